"""What this node holds: entries by shard and key, and the slots they refer to.

        put            stamp / merge                delete
    () -----> PENDING ---------------> COMMITTED -----------> TOMBSTONE
                 |  dropped hint           |  evict               |  (retention)
                 v                         v                      v
                ()                        ()                     ()

Laws: an entry with bytes owns one reference of its slot; readers and senders own more; a slot goes back to the tier
when the last reference ends, so bytes in use are never overwritten. Sums are checked by `check()` in tests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

import msgspec

from emberkv.core.eviction import Residency
from emberkv.errors import InvariantViolation
from emberkv.messages import BlockInfo
from emberkv.ports import Slot, Tier
from emberkv.types import BLOCK_BYTES_MAX, NO_VERSION, SHARDS, EntryState, MissReason, Version, shard_of

NO_PUT_ID = b"\0" * 24


class Entry(msgspec.Struct, gc=False):
    """One block on this node. `info` is what a get answers, made once."""

    key: bytes
    shard: int
    state: EntryState
    version: Version
    put_id: bytes
    checksum: bytes
    length: int
    slot: Slot | None
    info: BlockInfo
    prev: Version = NO_VERSION
    depth: int = 0
    parts: int = 1


def make_entry(
    key: bytes,
    *,
    state: EntryState,
    version: Version,
    put_id: bytes,
    checksum: bytes,
    slot: Slot | None,
    prev: Version = NO_VERSION,
    depth: int = 0,
    parts: int = 1,
    shard: int = -1,
) -> Entry:
    """An entry that takes over the caller's reference of `slot`; `shard` where the caller knows it already."""
    if shard < 0:
        shard = shard_of(key)
    length = slot.length if slot is not None else 0
    reason = MissReason.DELETED if state is EntryState.TOMBSTONE else MissReason.NONE
    info = BlockInfo(int(reason), version, length, checksum, slot.offset if slot is not None else 0)
    return Entry(key, shard, state, version, put_id, checksum, length, slot, info, prev, depth, parts)


def restamped(entry: Entry, version: Version, prev: Version) -> Entry:
    """The same bytes under a version, COMMITTED; the caller takes one more reference of the slot for it."""
    return make_entry(
        entry.key,
        state=EntryState.COMMITTED,
        version=version,
        put_id=entry.put_id,
        checksum=entry.checksum,
        slot=entry.slot,
        prev=prev,
        depth=entry.depth,
        parts=entry.parts,
    )


class Directory:
    """Entries by shard, their residency order, and room in the tier."""

    VICTIMS_PER_RESERVE_MAX = 4096
    """Bounds the time under the lock that one reservation may spend on eviction."""
    EVICTED_MEMORY_MAX = 65536
    """How many evicted keys are remembered, so that a miss can say `evicted`."""
    TOMBSTONES_MAX = 65536
    """Deletes that are remembered, about 20 MB; beyond it the oldest is forgotten and counted (P8)."""

    def __init__(self, tier: Tier, block_bytes_max: int = BLOCK_BYTES_MAX) -> None:
        """`block_bytes_max`: longest block that ever fits; nothing is evicted for a longer one."""
        self.tier = tier
        self._block_bytes_max = block_bytes_max
        self.shards: list[dict[bytes, Entry]] = [{} for _ in range(SHARDS)]
        self.residency = Residency()
        self.evicted: OrderedDict[bytes, Version] = OrderedDict()
        self.evictions = 0
        self.tombstones_dropped = 0
        self._tombstones: OrderedDict[bytes, None] = OrderedDict()
        self.entry_bytes = 0

    def get(self, key: bytes) -> Entry | None:
        """The entry of a key, or None; changes nothing."""
        return self.shards[shard_of(key)].get(key)

    def entries(self, shard: int) -> Iterable[Entry]:
        """All entries of a shard, oldest first."""
        return self.shards[shard].values()

    def is_current(self, entry: Entry) -> bool:
        """Is this very entry the current one of its key? Only then its slot is sure to hold its bytes."""
        return self.shards[entry.shard].get(entry.key) is entry

    def count(self) -> int:
        """Entries in all shards, tombstones included."""
        return sum(map(len, self.shards))

    @property
    def tombstones(self) -> int:
        """Deletes that are remembered."""
        return len(self._tombstones)

    def ref(self, slot: Slot) -> Slot:
        """Takes one more reference."""
        slot.refs += 1
        return slot

    def unref(self, slot: Slot) -> None:
        """Gives one reference back; the last one frees the room."""
        slot.refs -= 1
        if slot.refs == 0:
            self.tier.release(slot)
        elif slot.refs < 0:
            raise InvariantViolation(f"slot at {slot.offset} released twice")

    def install(self, entry: Entry) -> None:
        """Makes `entry` the current one of its key and takes over the caller's reference of its slot; the reference
        of the entry that it replaces is given back."""
        table = self.shards[entry.shard]
        old = table.get(entry.key)
        if old is not None:
            self._forget_sums(old)
            if old.slot is not None:
                self.unref(old.slot)
        table[entry.key] = entry
        if entry.slot is None:
            self.residency.discard(entry.key)
            self._tombstones[entry.key] = None
            self._bound_tombstones()
        else:
            self.residency.add(entry.key)
            self.entry_bytes += entry.length
        if self.evicted:
            self.evicted.pop(entry.key, None)

    def _bound_tombstones(self) -> None:
        while len(self._tombstones) > self.TOMBSTONES_MAX:
            oldest = self.get(next(iter(self._tombstones)))
            if oldest is not None:
                self.remove(oldest)
            self.tombstones_dropped += 1

    def remove(self, entry: Entry) -> None:
        """Forgets an entry and its reference to bytes."""
        removed = self.shards[entry.shard].pop(entry.key, None)
        if removed is None:
            return
        self._forget_sums(removed)
        self.residency.discard(entry.key)
        if removed.slot is not None:
            self.unref(removed.slot)

    def _forget_sums(self, entry: Entry) -> None:
        if entry.slot is None:
            self._tombstones.pop(entry.key, None)
        else:
            self.entry_bytes -= entry.length

    def reserve(self, length: int) -> Slot | None:
        """Room for `length` bytes, evicting in policy order when there is none; None when all is in use, or when a
        block of this length never fits."""
        reserve = self.tier.reserve
        slot = reserve(length)
        if slot is not None or length > self._block_bytes_max:
            return slot
        for entry in self._victims(length):
            self.evict(entry)
            slot = reserve(length)
            if slot is not None:
                return slot
        return None

    def _victims(self, length: int) -> Iterator[Entry]:
        """Same-size victims first, since one of those always helps; then any, until a slab comes free."""
        for same_class in (True, False):
            for key in self.residency.order(self.VICTIMS_PER_RESERVE_MAX):
                entry = self.get(key)
                if entry is None or entry.slot is None or entry.slot.refs > 1:
                    continue
                if same_class and not self.tier.victim_helps(entry.slot, length):
                    continue
                yield entry

    def evict(self, entry: Entry, version: Version | None = None) -> None:
        """Gives up a copy for space, remembering up to which version (its own, or a newer one that found no room)."""
        self.remove(entry)
        self.evictions += 1
        self.remember_evicted(entry.key, version or entry.version)

    def remember_evicted(self, key: bytes, version: Version) -> None:
        """Repair shall not fetch this version or an older one again, and a miss can say `evicted`."""
        if len(self.evicted) >= self.EVICTED_MEMORY_MAX:
            self.evicted.popitem(last=False)
        self.evicted[key] = version

    def check(self) -> None:
        """Full sums; for tests and simulation."""
        bytes_seen = tombstones = resident = 0
        for table in self.shards:
            for entry in table.values():
                if entry.slot is None:
                    tombstones += 1
                else:
                    bytes_seen += entry.length
                    resident += 1
                    if entry.slot.refs < 1:
                        raise InvariantViolation("an entry refers to a released slot")
        if (bytes_seen, tombstones) != (self.entry_bytes, self.tombstones):
            raise InvariantViolation("directory sums differ from its entries")
        if resident != len(self.residency):
            raise InvariantViolation("residency order and entries differ")
