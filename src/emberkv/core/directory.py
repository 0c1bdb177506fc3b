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
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from emberkv.core.eviction import Residency
from emberkv.errors import InvariantViolation
from emberkv.messages import BlockInfo
from emberkv.ports import Slot, Tier
from emberkv.types import (
    BLOCK_BYTES_MAX,
    NO_VERSION,
    SCOPE_BYTES,
    SHARDS,
    EntryState,
    MissReason,
    Version,
    shard_of,
)

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
    expiry_ms: int = 0


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
    expiry_ms: int = 0,
    shard: int = -1,
) -> Entry:
    """An entry that takes over the caller's reference of `slot`; `shard` where the caller knows it already."""
    if shard < 0:
        shard = shard_of(key)
    length = slot.length if slot is not None else 0
    reason = MissReason.DELETED if state is EntryState.TOMBSTONE else MissReason.NONE
    info = BlockInfo(int(reason), version, length, checksum, slot.offset if slot is not None else 0)
    return Entry(key, shard, state, version, put_id, checksum, length, slot, info, prev, depth, parts, expiry_ms)


def restamped(entry: Entry, version: Version, prev: Version, expiry_ms: int = 0) -> Entry:
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
        expiry_ms=expiry_ms,
    )


class Evicted(NamedTuple):
    """What is remembered of a block that left for want of room."""

    version: Version
    replaced: bool
    """It had replaced an older version, which some node may still hold: forgetting this raises the floor."""
    checksum: bytes = b""
    """Of its bytes, where known: equal bytes may be put again by whoever computes them again."""


class Directory:
    """Entries by shard, their residency order, and room in the tier."""

    ORDER_PER_RESERVE_MAX = 4096
    """Blocks that one reservation looks at, the coldest first, for one of its own size: 0.3 ms under the lock."""
    NEIGHBOURS_PER_RESERVE_MAX = 32768
    """Slots that it looks at to find a slab that it may clear: 4 ms; the largest slab has 16,384."""
    CLEARED_PER_TICK_MAX = 16384
    """Blocks that leave with their slabs between two ticks, and one slab more; then blocks of a new size are refused
    until the next tick. One costs about 5 us under the lock: a batch of large ones in an arena of small ones would
    else hold it for seconds."""
    COLD_SHARE = 0.25
    """Share of all blocks that counts as cold when a slab is chosen; were it all, the choice would be none."""
    EVICTED_MEMORY_MAX = 65536
    """How many evicted keys are remembered, so that a miss can say `evicted`."""
    TOMBSTONES_MAX = 65536
    """Deletes that are remembered, about 20 MB; beyond it the oldest is forgotten and counted (P8)."""
    TOMBSTONES_PER_TICK_MAX = 256
    """Deletes forgotten by age in one step: bounds the time under the lock."""

    def __init__(self, tier: Tier, block_bytes_max: int = BLOCK_BYTES_MAX) -> None:
        """`block_bytes_max`: longest block that ever fits; nothing is evicted for a longer one."""
        self.tier = tier
        self._block_bytes_max = block_bytes_max
        self.shards: list[dict[bytes, Entry]] = [{} for _ in range(SHARDS)]
        self.residency = Residency()
        self.floors: list[Version] = [NO_VERSION] * SHARDS
        """Per shard: a version at or below it that is not held by the primary is gone for good, because the tombstone
        or the newer version that ended it may be forgotten."""
        self.evicted: OrderedDict[bytes, Evicted] = OrderedDict()
        self.replaced: list[dict[bytes, Version]] = [{} for _ in range(SHARDS)]
        """Of `evicted`, by shard: newest versions that left while an older one may be somewhere; repair tells them."""
        self.evictions = 0
        self._cleared, self._cleared_ns = 0, 0
        """Blocks that left with their slabs since the tick of that moment."""
        self._refused: set[int] = set()
        """Slot sizes for which nothing could be evicted, until anything changes: a batch of 128 asks only once."""
        self.tombstones_dropped = 0
        self._tombstones: OrderedDict[bytes, int] = OrderedDict()
        """Key -> when it came in, on this node's clock; the oldest first."""
        self.installed: list[Entry] | None = None
        """Where there is a disk: what was installed since the core last looked."""
        self.ended: dict[bytes, Version] = {}
        """Likewise: keys that ended without an entry to say so, and at which version."""
        self.now_ns = 0
        """Set by the core at each tick; tombstones are dated by it."""
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
        if self._refused:
            self._refused.clear()
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
            if entry.version < old.version:
                raise InvariantViolation(f"{entry.version} was to replace {old.version}: an entry never goes back")
            self._forget_sums(old)
            if old.slot is not None:
                self.unref(old.slot)
        table[entry.key] = entry
        if self.installed is not None:
            self.installed.append(entry)
        if entry.slot is None:
            self.residency.discard(entry.key)
            self._tombstones[entry.key] = self.now_ns
            self._tombstones.move_to_end(entry.key)
            while len(self._tombstones) > self.TOMBSTONES_MAX:
                self._forget_oldest_tombstone()
        else:
            entry.slot.key = entry.key
            self.residency.add(entry.key, entry.slot)
            self.entry_bytes += entry.length
            if self._refused:
                self._refused.clear()
        if self.evicted:
            self._forget_evicted(entry.key)

    def end(self, key: bytes, version: Version) -> None:
        """Copies of the key at or below `version` on this node's disk do not count any more."""
        if self.installed is not None and version > self.ended.get(key, NO_VERSION):
            self.ended[key] = version

    def drop(self, entry: Entry) -> None:
        """Forgets an entry for good, in memory and on disk."""
        self.remove(entry)
        self.end(entry.key, entry.version)

    def raise_floor(self, shard: int, version: Version) -> None:
        """From now on nothing at or below `version` is believed to be alive unless the primary holds it."""
        if version > self.floors[shard]:
            self.floors[shard] = version

    def _forget_oldest_tombstone(self) -> None:
        oldest = self.get(next(iter(self._tombstones)))
        assert oldest is not None
        self.raise_floor(oldest.shard, oldest.version)
        self.remove(oldest)
        self.tombstones_dropped += 1

    def forget_tombstones(self, before_ns: int) -> None:
        """Ends the memory of deletes that came in before a moment; the floor remembers that there were some."""
        for _ in range(self.TOMBSTONES_PER_TICK_MAX):
            if not self._tombstones or next(iter(self._tombstones.values())) >= before_ns:
                return
            self._forget_oldest_tombstone()

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
        """Room for `length` bytes. When there is none, the first to leave of the blocks that take as much is evicted,
        since one of those always helps, else the blocks of one slab.

        None, and nothing is evicted, when all is in use, when a block of this length never fits, or when slabs had to
        be cleared for so many others since the last tick.
        """
        slot = self.tier.reserve(length)
        if slot is not None or length > self._block_bytes_max:
            return slot
        size_class = self.tier.size_class(length)
        if size_class in self._refused:
            return None
        for key, victim in self.residency.order(self.ORDER_PER_RESERVE_MAX):
            if victim.size_class == size_class and victim.refs == 1:
                self._evict_all([key])
                return self.tier.reserve(length)
        if self._cleared_ns != self.now_ns:
            self._cleared, self._cleared_ns = 0, self.now_ns
        if self._cleared >= self.CLEARED_PER_TICK_MAX:
            return None
        neighbours = self._neighbours(length)
        if not neighbours:
            self._refused.add(size_class)
            return None
        self._cleared += len(neighbours)
        self._evict_all(neighbours)
        return self.tier.reserve(length)

    def _neighbours(self, length: int) -> list[bytes]:
        """Keys that leave so that a slab comes free for `length` bytes: all of one in which no slot is in use by a
        reader, a sender or a put; empty when none was found."""
        limit = min(self.ORDER_PER_RESERVE_MAX, int(self.COLD_SHARE * len(self.residency)) + 1)
        cold = [slot for _, slot in self.residency.order(limit)]
        left = self.NEIGHBOURS_PER_RESERVE_MAX
        for slots in self.tier.slabs(length, cold):
            keys: list[bytes] = []
            for slot in slots:
                if slot.refs != 1 or self.residency.slot(slot.key) is not slot:
                    break
                keys.append(slot.key)
            else:
                return keys
            left -= len(keys) + 1
            if left <= 0:
                break
        return []

    def _evict_all(self, keys: list[bytes]) -> None:
        for key in keys:
            entry = self.get(key)
            assert entry is not None, "what is resident has an entry"
            self.evict(entry)

    def evict(self, entry: Entry, version: Version = NO_VERSION) -> None:
        """Gives up a copy for space, remembering up to which version (its own, or a newer one that found no room)."""
        self.remove(entry)
        self.evictions += 1
        if version > entry.version:
            self.remember_evicted(entry.key, version, replaced=True)
            self.end(entry.key, version)
        else:
            self.remember_evicted(entry.key, entry.version, replaced=entry.prev != NO_VERSION, checksum=entry.checksum)

    def remember_evicted(self, key: bytes, version: Version, *, replaced: bool, checksum: bytes = b"") -> None:
        """Repair shall not fetch this version or an older one again, and a miss can say `evicted`. What is forgotten
        for it raises the floor if an older version than it may still be somewhere."""
        known = self.evicted.get(key)
        if known is not None:
            if known.version > version:
                version, checksum = known.version, known.checksum
            replaced = replaced or known.replaced
        elif len(self.evicted) >= self.EVICTED_MEMORY_MAX:
            oldest = next(iter(self.evicted))
            forgotten = self._forget_evicted(oldest)
            if forgotten is not None and forgotten.replaced:
                self.raise_floor(shard_of(oldest), forgotten.version)
        self.evicted[key] = Evicted(version, replaced, checksum)
        if replaced:
            self.replaced[shard_of(key)][key] = version

    def _forget_evicted(self, key: bytes) -> Evicted | None:
        known = self.evicted.pop(key, None)
        if known is not None and known.replaced:
            self.replaced[shard_of(key)].pop(key, None)
        return known

    def ghosts(self, shard: int, wanted: Callable[[Version], bool]) -> list[Entry]:
        """What was given up here and had replaced an older version, as entries without bytes."""
        return [
            make_entry(
                key,
                state=EntryState.COMMITTED,
                version=version,
                put_id=NO_PUT_ID,
                checksum=b"\0" * 16,
                slot=None,
                shard=shard,
            )
            for key, version in self.replaced[shard].items()
            if wanted(version)
        ]

    def evicted_version(self, key: bytes) -> Version:
        """Up to which version this node has given the key up for room; NO_VERSION where it has not."""
        known = self.evicted.get(key)
        return known.version if known is not None else NO_VERSION

    def sweep(self, shard: int, wall_ms: int, dead_scopes: set[bytes]) -> int:
        """Gives up what has expired or belongs to a dropped namespace, in one shard; returns how many entries."""
        gone = [
            entry
            for entry in self.shards[shard].values()
            if (entry.expiry_ms and entry.expiry_ms <= wall_ms) or entry.key[:SCOPE_BYTES] in dead_scopes
        ]
        for entry in gone:
            self.remove(entry)
        return len(gone)

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
