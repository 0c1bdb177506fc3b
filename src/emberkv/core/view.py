"""What this node knows of the cluster: the coordinator's records, decoded, and what follows from them.

Laws: own/ records are the truth about shards; placement only proposes. A shard is VACANT when its record is absent or
names a (node, liveness epoch) that is not current: a level that is looked at again and again, not an edge that could
be missed. A record that cannot be decoded is left out and named; it never stops the node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec

from emberkv.messages import DrainRecord, HeartbeatRecord, LiveRecord, MapReply, NodeAddress, ShardOwner
from emberkv.ports import Record
from emberkv.types import SHARDS, Namespace, scope_of

HEARTBEAT_PREFIX = "hb/"
LIVE_PREFIX = "live/"
OWNER_PREFIX = "own/"
DRAIN_PREFIX = "drain/"
NAMESPACE_PREFIX = "ns/"
PREFIXES = (HEARTBEAT_PREFIX, LIVE_PREFIX, OWNER_PREFIX, DRAIN_PREFIX, NAMESPACE_PREFIX)
"""All that a node watches."""

_encode = msgspec.msgpack.Encoder().encode
_decode_live = msgspec.msgpack.Decoder(LiveRecord).decode
_decode_owner = lru_cache(SHARDS * 4)(msgspec.msgpack.Decoder(ShardOwner).decode)
"""Remembered, since a full listing brings mostly what is known, and in the simulator all nodes read the same bytes."""
_decode_heartbeat = msgspec.msgpack.Decoder(HeartbeatRecord).decode
_decode_drain = msgspec.msgpack.Decoder(DrainRecord).decode
_decode_namespace = msgspec.msgpack.Decoder(Namespace).decode


def encode_record(record: LiveRecord | ShardOwner | HeartbeatRecord | DrainRecord | Namespace) -> bytes:
    """The value of a coordinator record."""
    return _encode(record)


_OWNER_KEYS = [f"{OWNER_PREFIX}{shard:03d}" for shard in range(SHARDS)]
_SHARDS_BY_KEY = {key: shard for shard, key in enumerate(_OWNER_KEYS)}


def owner_key(shard: int) -> str:
    """Coordinator key of a shard's owner record."""
    return _OWNER_KEYS[shard]


def shard_of_key(key: str) -> int | None:
    """Shard of an owner record's key; None when it names none (a record of another version)."""
    return _SHARDS_BY_KEY.get(key)


class Heartbeat(msgspec.Struct):
    """When a node's heartbeat was last seen to move, on this node's clock."""

    revision: int
    seen_ns: int
    liveness_epoch: int


class ClusterView:
    """Decoded records of the coordinator, and this node's roles per shard."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.revision = 0
        self.live: dict[str, LiveRecord] = {}
        self.live_revision: dict[str, int] = {}
        self.heartbeats: dict[str, Heartbeat] = {}
        self.owners: list[ShardOwner | None] = [None] * SHARDS
        self.owner_revision: list[int] = [0] * SHARDS
        self.my_liveness_epoch = 0
        """0 until this incarnation is a member."""
        self.primary_epoch: list[int] = [0] * SHARDS
        """This node's epoch for each shard it is primary of by record; 0 elsewhere. The lease gate comes on top."""
        self.epoch_seen: list[int] = [0] * SHARDS
        """Highest epoch known per shard: streams of lower authority are refused."""
        self.vacant: set[int] = set(range(SHARDS))
        """Shards without a primary that lives: kept with the records, so that a tick looks at these alone."""
        self.drains: dict[str, DrainRecord] = {}
        self.drain_revision: dict[str, int] = {}
        self.namespaces: dict[str, Namespace] = {}
        self.namespace_revision: dict[str, int] = {}
        """Mod revision of ns/ records: what a change of a policy compares."""
        self.policies: dict[bytes, Namespace] = {}
        """Namespaces that are there, by scope."""
        self.dead_scopes: set[bytes] = set()
        """Scopes of dropped or re-created namespaces that were seen alive: what they hold can go."""
        self.undecodable: list[str] = []
        self.doubt_until_ns: list[int] = [0] * SHARDS
        """A peer claimed a higher epoch: until then this node does not act as primary, unless its record is newer."""
        self.touched: set[int] = set()
        """Shards whose role here may have changed with the last records: all, when a node came, went or drains."""
        self._nodes_changed = False
        self._live: list[str] = []
        self._homes: tuple[str, ...] = ()

    def apply(
        self, records: Sequence[Record], deleted: Sequence[str], *, full: bool, now_ns: int, revision: int = 0
    ) -> None:
        """Takes changes in. `full`: what is not listed at `revision` is gone, unless it is known to have changed since:
        an old listing proves nothing about that."""
        if full:
            listed = {record.key for record in records}
            deleted = [key for key, known in self._revisions() if key not in listed and known <= revision]
        self.touched.clear()
        self._nodes_changed = full
        for key in deleted:
            self._delete(key)
        for record in records:
            try:
                self._put(record, now_ns)
            except (msgspec.MsgspecError, ValueError):
                self.undecodable.append(record.key)
            self.revision = max(self.revision, record.revision)
        if self._nodes_changed:
            self._recompute()
        else:
            for shard in self.touched:
                self._recompute_shard(shard)

    def _revisions(self) -> Iterator[tuple[str, int]]:
        """All keys that are known, each with the revision of its last known change."""
        for name, revision in self.live_revision.items():
            yield LIVE_PREFIX + name, revision
        for name, beat in self.heartbeats.items():
            yield HEARTBEAT_PREFIX + name, beat.revision
        for name in self.drains:
            yield DRAIN_PREFIX + name, self.drain_revision[name]
        for name, revision in self.namespace_revision.items():
            yield NAMESPACE_PREFIX + name, revision
        for shard, owner in enumerate(self.owners):
            if owner is not None:
                yield owner_key(shard), self.owner_revision[shard]

    def _delete(self, key: str) -> None:
        if key.startswith(LIVE_PREFIX):
            self._nodes_changed = True
            self.live.pop(key[len(LIVE_PREFIX) :], None)
            self.live_revision.pop(key[len(LIVE_PREFIX) :], None)
        elif key.startswith(HEARTBEAT_PREFIX):
            self.heartbeats.pop(key[len(HEARTBEAT_PREFIX) :], None)
        elif key.startswith(DRAIN_PREFIX):
            self._nodes_changed = True
            self.drains.pop(key[len(DRAIN_PREFIX) :], None)
        elif key.startswith(NAMESPACE_PREFIX):
            self._namespace_gone(key[len(NAMESPACE_PREFIX) :])
        elif key.startswith(OWNER_PREFIX):
            shard = shard_of_key(key)
            if shard is not None:
                self.touched.add(shard)
                self.owners[shard], self.owner_revision[shard] = None, 0

    def _put(self, record: Record, now_ns: int) -> None:
        key = record.key
        if key.startswith(HEARTBEAT_PREFIX):
            name = key[len(HEARTBEAT_PREFIX) :]
            known = self.heartbeats.get(name)
            if known is None or record.revision > known.revision:
                beat = _decode_heartbeat(record.value)
                self.heartbeats[name] = Heartbeat(record.revision, now_ns, beat.liveness_epoch)
        elif key.startswith(LIVE_PREFIX):
            name = key[len(LIVE_PREFIX) :]
            if record.revision > self.live_revision.get(name, 0):
                self._nodes_changed = True
                self.live[name] = _decode_live(record.value)
                self.live_revision[name] = record.revision
        elif key.startswith(OWNER_PREFIX):
            shard = shard_of_key(key)
            if shard is None:
                self.undecodable.append(key)
            elif record.revision > self.owner_revision[shard]:
                self.touched.add(shard)
                owner = _decode_owner(record.value)
                self.owners[shard], self.owner_revision[shard] = owner, record.revision
                self.epoch_seen[shard] = max(self.epoch_seen[shard], owner.epoch)
        elif key.startswith(DRAIN_PREFIX):
            self._nodes_changed = True
            name = key[len(DRAIN_PREFIX) :]
            self.drains[name], self.drain_revision[name] = _decode_drain(record.value), record.revision
        elif key.startswith(NAMESPACE_PREFIX):
            self._put_namespace(key[len(NAMESPACE_PREFIX) :], record)

    def _put_namespace(self, name: str, record: Record) -> None:
        if record.revision <= self.namespace_revision.get(name, 0):
            return
        namespace = _decode_namespace(record.value)
        known = self.namespaces.get(name)
        if known is not None and (known.generation != namespace.generation or namespace.dropped):
            self._namespace_gone(name)
        self.namespaces[name], self.namespace_revision[name] = namespace, record.revision
        if not namespace.dropped:
            scope = scope_of(name, namespace.generation)
            self.policies[scope] = namespace
            self.dead_scopes.discard(scope)

    def _namespace_gone(self, name: str) -> None:
        namespace = self.namespaces.pop(name, None)
        self.namespace_revision.pop(name, None)
        if namespace is None:
            return
        scope = scope_of(name, namespace.generation)
        if self.policies.pop(scope, None) is not None:
            self.dead_scopes.add(scope)

    def _recompute(self) -> None:
        self._live = sorted(name for name, record in self.live.items() if not record.dead)
        staying = [name for name in self._live if not self.is_draining(name)]
        self._homes = tuple(staying or self._live)
        for shard in range(SHARDS):
            self._recompute_shard(shard)
        self.touched.update(range(SHARDS))

    def _recompute_shard(self, shard: int) -> None:
        owner, mine = self.owners[shard], self.my_liveness_epoch
        held = owner is not None and mine != 0 and owner.primary == self.name and owner.liveness_epoch == mine
        self.primary_epoch[shard] = owner.epoch if held and owner is not None else 0
        if self.is_vacant(shard):
            self.vacant.add(shard)
        else:
            self.vacant.discard(shard)

    def own_record(self, shard: int, record: ShardOwner, revision: int) -> None:
        """A record that this node has just written is known before the watch brings it."""
        if revision > self.owner_revision[shard]:
            self.owners[shard], self.owner_revision[shard] = record, revision
            self.revision = max(self.revision, revision)
            self.epoch_seen[shard] = max(self.epoch_seen[shard], record.epoch)
            self._recompute_shard(shard)

    def set_membership(self, liveness_epoch: int) -> None:
        """This incarnation became a member under an epoch, or (0) is none any more."""
        self.my_liveness_epoch = liveness_epoch
        self._recompute()

    def is_live(self, name: str) -> bool:
        """Does the node's live record say that it lives?"""
        record = self.live.get(name)
        return record is not None and not record.dead

    @property
    def expiring(self) -> bool:
        """Does any namespace let its blocks expire?"""
        return any(namespace.expiry_ms for namespace in self.policies.values())

    def is_draining(self, name: str) -> bool:
        """Does this life of the node give its shards away?"""
        drain, record = self.drains.get(name), self.live.get(name)
        return drain is not None and record is not None and drain.incarnation == record.incarnation

    def live_nodes(self) -> list[str]:
        """Names of live nodes, sorted; not to be changed."""
        return self._live

    def homes(self) -> tuple[str, ...]:
        """Nodes that should hold shards, sorted: those that live and do not drain; all that live if all drain."""
        return self._homes

    def is_vacant(self, shard: int) -> bool:
        """Nobody who lives may act as this shard's primary."""
        owner = self.owners[shard]
        if owner is None:
            return True
        record = self.live.get(owner.primary)
        return record is None or record.dead or record.epoch != owner.liveness_epoch

    def primary_of(self, shard: int) -> str | None:
        """The primary by record, or None when the shard is vacant."""
        owner = self.owners[shard]
        return None if owner is None or self.is_vacant(shard) else owner.primary

    def peer_addresses(self) -> dict[str, str]:
        """TCP addresses of all other live nodes."""
        return {name: record.address.tcp for name, record in self.live.items() if name != self.name and not record.dead}

    def cluster_map(self) -> MapReply:
        """What clients need to route."""
        nodes: list[NodeAddress] = [self.live[name].address for name in self.live_nodes()]
        owners = tuple(None if self.is_vacant(shard) else self.owners[shard] for shard in range(SHARDS))
        return MapReply(self.revision, tuple(nodes), owners)
