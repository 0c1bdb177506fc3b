"""The oracles of a run: each a small class with one law, all outside the code that they judge.

Why it exists: a simulated cluster proves nothing unless somebody who does not trust it looks on. What they look at is
in history.py (what clients heard) and oracles_evidence.py (what passed by).
Laws: an oracle raises Violation at once, with its law's name, and changes nothing; an oracle that needs a fact it does
not have stays silent. oracles_safety.py: what must never happen. oracles_session.py: what sessions are promised.
oracles_records.py: what the coordinator's records may say. oracles_liveness.py: what must happen in time.
Limits: about a tenth of a run's time; handlers are looked up by the type of what passes by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.sim.history import History
from emberkv.sim.oracle import Oracle
from emberkv.sim.oracles_evidence import Evidence
from emberkv.sim.oracles_liveness import LIVENESS
from emberkv.sim.oracles_records import RECORDS
from emberkv.sim.oracles_safety import SAFETY
from emberkv.sim.oracles_session import SESSION

Handler = Callable[[Any, Any], None]


class Oracles:
    """All oracles of one run, and the evidence that they share."""

    def __init__(self, cluster: Any, history: History) -> None:
        self.cluster = cluster
        self.evidence = Evidence(cluster)
        self.oracles: list[Oracle] = [kind(self.evidence, history) for kind in (*SAFETY, *SESSION, *RECORDS, *LIVENESS)]
        self._by_type: dict[type, list[Handler]] = {}
        self._by_kind: dict[str, list[Handler]] = {}
        evidence = self.evidence
        # Laws are judged by what was known before: an oracle that needs an effect's evidence looks at it by itself.
        self.on_kind("commit", evidence.on_commit)
        self.on_kind("life", evidence.on_life)
        self.on_kind("fault", evidence.on_fault)
        self.on_type(ev.Records, evidence.on_records)
        self.on_type(ev.PutBegin, evidence.on_put_begin)
        self.on_type(ev.ReplicaBegin, evidence.on_replica_begin)
        self.on_type(fx.PutDone, evidence.on_put_done)
        self.on_type(fx.Send, evidence.on_send)
        for oracle in self.oracles:
            oracle.watch(self)
            history.ended.append(oracle.on_request)
        self.on_type(fx.ReplicaDone, evidence.on_replica_done)
        cluster.observe(self._typed, "event", "effect")
        cluster.observe(self._told, *self._by_kind)

    def on_type(self, kind: type, handler: Handler) -> None:
        """Calls handler(process, detail) for each event or effect of this type."""
        self._by_type.setdefault(kind, []).append(handler)

    def on_kind(self, kind: str, handler: Handler) -> None:
        """Calls handler(process, detail) for each observation of this kind (Cluster.observe lists them)."""
        self._by_kind.setdefault(kind, []).append(handler)

    def _typed(self, _kind: str, process: Any, detail: Any) -> None:
        for handler in self._by_type.get(type(detail), ()):
            handler(process, detail)

    def _told(self, kind: str, process: Any, detail: Any) -> None:
        for handler in self._by_kind[kind]:
            handler(process, detail)

    def on_healed(self) -> None:
        """Phase 2 begins: every fault has ended, dead nodes are back."""
        for oracle in self.oracles:
            oracle.on_healed()

    def at_end(self) -> None:
        """The cluster is at rest."""
        for oracle in self.oracles:
            oracle.at_end()

    def laws(self) -> dict[str, str]:
        """Name and law of each oracle, for people."""
        return {type(oracle).__name__: oracle.law for oracle in self.oracles}
