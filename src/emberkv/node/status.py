"""The status document of one node: what an operator asks first (field by field in docs/OPERATIONS.md)."""

from __future__ import annotations

import time
from typing import Any

from emberkv.net.peers import PeerStreams
from emberkv.node.runtime import Runtime
from emberkv.node.timers import Ticker
from emberkv.storage.dram import DramTier
from emberkv.types import SHARDS, MissReason

MISS_PREFIX = "miss_"


def shard_roles(runtime: Runtime) -> tuple[dict[str, int], dict[str, int]]:
    """Shards per role of this node, and the range of epochs it is primary under."""
    view = runtime.core.state.view
    name = view.name
    roles = {"primary": 0, "backup": 0, "learner": 0, "vacant": 0}
    epochs = []
    for shard in range(SHARDS):
        owner = view.owners[shard]
        if view.is_vacant(shard) or owner is None:
            roles["vacant"] += 1
        elif owner.primary == name:
            roles["primary"] += 1
            epochs.append(owner.epoch)
        elif name in owner.in_sync:
            roles["backup"] += 1
        elif name in owner.replicas:
            roles["learner"] += 1
    return roles, {"min": min(epochs, default=0), "max": max(epochs, default=0)}


def document(
    runtime: Runtime, tier: DramTier, ticker: Ticker, streams: PeerStreams, connections: int, started_s: float
) -> dict[str, Any]:
    """Everything `emberkv status` shows of one node; plain JSON types."""
    with runtime.lock:
        core = runtime.core
        state = core.state
        roles, epochs = shard_roles(runtime)
        counters = dict(state.counters)
        used, total = tier.usage()
        now_ns = runtime.now_ns()
        body: dict[str, Any] = {
            "node": state.settings.name,
            "phase": core.lease.phase.value,
            "lease_open": core.lease.open(now_ns),
            "lease_left_ms": max(0.0, (core.lease.deadline_ns - now_ns) / 1e6),
            "liveness_epoch": core.lease.liveness_epoch,
            "revision": state.view.revision,
            "live_nodes": state.view.live_nodes(),
            "draining": state.view.is_draining(state.settings.name),
            "draining_nodes": [name for name in state.view.live_nodes() if state.view.is_draining(name)],
            "namespaces": {space.name: [space.generation, space.revision] for space in state.view.policies.values()},
            "shards": roles,
            "epochs": epochs,
            "entries": state.directory.count(),
            "tombstones": state.directory.tombstones,
            "evictions": state.directory.evictions,
            "bytes_used": used,
            "bytes_total": total,
            "hints": core.put.hints.count(),
            "hint_bytes": core.put.hints.bytes,
            "lag": core.put.repair.lag() + len(core.put.stream.flights),
            "reads": len(core.reads.ops),
            "writes": len(core.put.ops),
        }
    lateness = ticker.lateness()
    body["peers_up"] = sorted(streams.peers_up())
    body["arena"] = tier.stats()
    body["prefaulted_bytes"] = tier.stats()["prefaulted_bytes"]
    body["connections"] = connections
    body["misses"] = {
        MissReason[key[len(MISS_PREFIX) :].upper()].label: count
        for key, count in counters.items()
        if key.startswith(MISS_PREFIX)
    }
    body["counters"] = {key: count for key, count in counters.items() if not key.startswith(MISS_PREFIX)}
    body["heartbeat_lateness_ms"] = {
        "p50": round(lateness.p50, 3),
        "p99": round(lateness.p99, 3),
        "p999": round(lateness.p999, 3),
        "max": round(lateness.max, 3),
    }
    body["uptime_s"] = round(time.monotonic() - started_s, 3)
    return body
