"""This node's own disk, as the core sees it: what goes there, what counts of what is found there (design 7, P7).

    COMMITTED --admitted--> (Persist) --> on disk --evicted from memory--> on disk only --read--> COMMITTED again

Laws: the disk is a source like a peer, asked first. What it answers is believed only from a floor on: a session's, the
newest version that this node gave up for room, and the floor of the deletes that this node may have missed. What
replaces or deletes a block in memory does so on disk too, in the same order.
Limits: what only the disk holds is not offered to other replicas; they have disks of their own, or read it from here.
"""

from __future__ import annotations

from collections.abc import Callable

from emberkv.core.directory import NO_PUT_ID, Entry, make_entry
from emberkv.core.effects import Persist
from emberkv.core.state import State
from emberkv.core.stream import Stream
from emberkv.messages import BlockInfo
from emberkv.ports import Saved, Slot
from emberkv.types import CHECKSUM_BYTES, NO_VERSION, EntryState, MissReason, Version, shard_of

ASK_EVERY_NS = 1_000_000_000
"""A replica that finds blocks on its disk which its primary may not have tells it once in so long, per shard."""


class OwnDisk:
    """What is written to this node's disk and what is taken from it."""

    def __init__(self, state: State, stream: Stream, ask_to_compare: Callable[[int], None]) -> None:
        self.state = state
        self.stream = stream
        self.ask_to_compare = ask_to_compare
        self._asked_ns: dict[int, int] = {}
        self.is_on = state.settings.nvme
        if self.is_on:
            state.directory.installed = []

    # -- to disk -------------------------------------------------------------------------------------------------

    def persist(self) -> None:
        """What was installed in this step goes to disk, if it is admitted; what it replaced there goes in any case."""
        directory = self.state.directory
        installed = directory.installed
        if not installed and not directory.ended:
            return
        blocks = [_ended(key, version) for key, version in directory.ended.items()]
        directory.ended.clear()
        for entry in installed or ():
            if entry.version == NO_VERSION or not directory.is_current(entry):
                continue
            # Without its bytes it ends there what is older, like a delete.
            slot = entry.slot if entry.depth >= self.state.settings.nvme_depth_min else None
            blocks.append(_saved(entry, directory.ref(slot) if slot is not None else None))
        if installed:
            installed.clear()
        if blocks:
            self.state.out.append(Persist(blocks))

    # -- from disk -----------------------------------------------------------------------------------------------

    def floor(self, key: bytes) -> Version:
        """From which version on a copy on disk counts."""
        state = self.state
        missed = state.disk_floors[shard_of(key)]
        above = Version(missed.epoch, missed.seq + 1) if missed != NO_VERSION else NO_VERSION
        return max(state.directory.evicted_version(key), above)

    def take(self, key: bytes, info: BlockInfo, slot: Slot, expiry_ms: int, depth: int) -> BlockInfo:
        """Bytes came from disk: how they are answered. The reader owns the slot's reference if that is a hit, else it
        is given back here."""
        directory = self.state.directory
        current = directory.get(key)
        if current is not None and current.slot is None and current.version >= info.version:
            directory.unref(slot)
            return current.info  # deleted meanwhile
        if info.version < self.floor(key):
            directory.unref(slot)
            return BlockInfo(int(MissReason.BEHIND), info.version)
        self.state.counters["disk_hits"] += 1
        if (current is None or current.version < info.version) and self._keeps(key, info.version):
            directory.install(
                make_entry(
                    key,
                    state=EntryState.COMMITTED,
                    version=info.version,
                    put_id=NO_PUT_ID,
                    checksum=info.checksum,
                    slot=directory.ref(slot),
                    depth=depth,
                    expiry_ms=expiry_ms,
                )
            )
            if directory.installed:
                directory.installed.pop()  # it came from there
            self.state.counters["disk_promoted"] += 1
        return BlockInfo(0, info.version, slot.length, info.checksum, slot.offset)

    def _keeps(self, key: bytes, version: Version) -> bool:
        """May it be held in memory again? A primary takes it as if it had been handed in; a replica has its primary
        compare, which takes it over or knows that it is gone."""
        shard, state = shard_of(key), self.state
        owner = state.view.owners[shard]
        is_replica = owner is not None and state.settings.name in owner.replicas
        if not is_replica or self.stream.vector(shard).covers(version):
            return True
        if version <= state.directory.floors[shard]:
            return False
        if state.view.primary_epoch[shard]:
            self.stream.mark_applied(shard, version)
            self.stream.others_behind(shard, "")
        elif state.now_ns - self._asked_ns.get(shard, -ASK_EVERY_NS) >= ASK_EVERY_NS:
            self._asked_ns[shard] = state.now_ns
            self.ask_to_compare(shard)
        return True


def _ended(key: bytes, version: Version) -> Saved:
    return Saved(key, version, None, b"\0" * CHECKSUM_BYTES, NO_VERSION, NO_PUT_ID, 0, 1, 0)


def _saved(entry: Entry, slot: Slot | None) -> Saved:
    return Saved(
        entry.key, entry.version, slot, entry.checksum, entry.prev, entry.put_id, entry.depth, entry.parts,
        entry.expiry_ms,
    )  # fmt: skip
