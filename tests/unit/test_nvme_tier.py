"""The NVMe tier over real directories: written behind, read back, bounded, restarted, damaged."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from emberkv.errors import NameInUse, NotOurs
from emberkv.ports import Saved, Slot
from emberkv.storage.dram import DramTier
from emberkv.storage.nvme import NvmeDirectory, NvmeTier
from emberkv.types import NO_VERSION, SHARDS, MissReason, Version, checksum

MIB = 1 << 20
FIRST = Version(1, 1)


def _eventually(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.01)


class World:
    """An arena and a tier over directories under `root`."""

    def __init__(self, root: Path, *, directories: int = 1, limit: int = 64 * MIB, cluster: str = "c") -> None:
        self.root = root
        self.dram = DramTier(64 * MIB)
        self.rng = random.Random(1)
        floors = [NO_VERSION] * SHARDS
        self.disk = NvmeTier(
            [NvmeDirectory(str(root / f"d{at}"), limit) for at in range(directories)],
            root / "index",
            cluster,
            dirty_bytes_max=48 * MIB,
            pages=self.dram.pages,
            release=self.release,
            floors=lambda: (floors, floors),
        )
        self.disk.start()
        assert self.disk.wait_ready(30)

    def release(self, slots: list[Slot]) -> None:
        for slot in slots:
            slot.refs -= 1
            if slot.refs == 0:
                self.dram.release(slot)

    def save(self, key: bytes, data: bytes, version: Version = FIRST, depth: int = 0) -> None:
        slot = self.dram.reserve(len(data))
        assert slot is not None
        self.dram.view(slot)[:] = data  # control bytes
        self.disk.save([Saved(key, version, slot, checksum(data), NO_VERSION, b"p" * 24, depth, 1, 0)])

    def settle(self) -> None:
        _eventually(lambda: not self.disk.writer.document()["dirty_bytes"], "what was saved was never written")

    def load(self, keys: list[bytes]) -> list[bytes | MissReason]:
        found = self.disk.find(keys)
        answer: list[bytes | MissReason] = [MissReason.ABSENT] * len(keys)
        there = [(index, each) for index, each in enumerate(found) if each is not None]
        slots = [self.dram.reserve(each.length) for _, each in there]
        asked = [slot for slot in slots if slot is not None]
        deadline = time.clock_gettime_ns(time.CLOCK_BOOTTIME) + 30 * 10**9
        reasons = self.disk.load(
            [keys[i] for i, _ in there], [each for _, each in there], asked, deadline, lambda slot: self.release([slot])
        )
        for (index, _), slot, reason in zip(there, asked, reasons, strict=True):
            answer[index] = bytes(self.dram.view(slot)) if reason is MissReason.NONE else reason
            self.release([slot])
        return answer

    def close(self) -> None:
        self.disk.close()
        self.dram.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def _blocks(rng: random.Random, count: int) -> dict[bytes, bytes]:
    return {rng.randbytes(40): rng.randbytes(rng.choice([1, 4096, 100_000, MIB])) for _ in range(count)}


def test_what_was_saved_is_read_back_and_its_slots_come_back(world: World) -> None:
    blocks = _blocks(world.rng, 30)
    for key, data in blocks.items():
        world.save(key, data)
    world.settle()
    assert world.dram.usage()[0] == 0
    assert world.load(list(blocks)) == list(blocks.values())
    assert world.load([b"x" * 40]) == [MissReason.ABSENT]


def test_a_restart_serves_what_was_synced_with_and_without_the_index(tmp_path: Path) -> None:
    world = World(tmp_path, directories=2)
    blocks = _blocks(world.rng, 30)
    for key, data in blocks.items():
        world.save(key, data)
    world.settle()
    world.close()
    world = World(tmp_path, directories=2)
    assert world.disk.recovered is not None
    assert world.disk.recovered.scanned == 0
    assert world.load(list(blocks)) == list(blocks.values())
    world.close()
    (tmp_path / "index").unlink()
    world = World(tmp_path, directories=2)
    assert world.disk.recovered is not None
    assert world.disk.recovered.scanned == len(blocks)
    assert world.load(list(blocks)) == list(blocks.values())
    world.close()


def test_a_delete_outlives_the_index(tmp_path: Path) -> None:
    world = World(tmp_path, directories=2)
    world.save(b"k" * 40, b"old")
    world.save(b"l" * 40, b"stays")
    world.settle()
    world.disk.save([Saved(b"k" * 40, Version(1, 2), None, b"", NO_VERSION, b"p" * 24, 0, 1, 0)])
    assert world.load([b"k" * 40]) == [MissReason.ABSENT], "deleted at once"
    world.close()
    (tmp_path / "index").unlink()
    world = World(tmp_path, directories=2)
    assert world.load([b"k" * 40, b"l" * 40]) == [MissReason.ABSENT, b"stays"]
    world.close()


def test_the_newest_version_counts(tmp_path: Path) -> None:
    world = World(tmp_path)
    for seq in range(1, 6):
        world.save(b"k" * 40, f"value {seq}".encode(), Version(1, seq))
        if seq % 2:
            world.settle()
    world.settle()
    assert world.load([b"k" * 40]) == [b"value 5"]
    world.close()
    (tmp_path / "index").unlink()
    world = World(tmp_path)
    assert world.load([b"k" * 40]) == [b"value 5"]
    world.close()


def test_the_size_is_bounded_and_the_newest_stay(world: World) -> None:
    keys = []
    for number in range(160):
        keys.append(number.to_bytes(40, "big"))
        world.save(keys[-1], world.rng.randbytes(MIB))
        if number % 32 == 31:
            world.settle()
    world.settle()
    on_disk = sum(file.stat().st_size for file in world.root.glob("d0/*/*.seg"))
    assert on_disk <= 64 * MIB
    found = [each is not None for each in world.disk.find(keys)]
    assert found[-8:] == [True] * 8
    assert not any(found[:32])
    assert 16 <= sum(found) <= 64


def test_a_smaller_limit_is_honoured_at_the_start(tmp_path: Path) -> None:
    world = World(tmp_path, limit=256 * MIB)
    for number in range(120):
        world.save(number.to_bytes(40, "big"), world.rng.randbytes(MIB))
        if number % 32 == 31:
            world.settle()
    world.settle()
    world.close()
    world = World(tmp_path, limit=64 * MIB)
    _eventually(
        lambda: sum(file.stat().st_size for file in tmp_path.glob("d0/*/*.seg")) <= 64 * MIB, "the limit is not kept"
    )
    world.close()


def test_flipped_bytes_are_a_counted_miss_and_forgotten(world: World) -> None:
    world.save(b"k" * 40, b"x" * 5000)
    world.settle()
    (file,) = world.root.glob("d0/*/*.seg")
    with file.open("r+b") as stream:
        stream.seek(8192 + 100)
        stream.write(b"y")
    assert world.load([b"k" * 40]) == [MissReason.CHECKSUM]
    assert world.disk.document()["bad_blocks"] == 1
    assert world.load([b"k" * 40]) == [MissReason.ABSENT]


def test_foreign_directories_are_refused_and_untouched(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(NameInUse, match="in use by another node"):
        World(tmp_path)
    world.close()
    with pytest.raises(NotOurs, match="another cluster"):
        World(tmp_path, cluster="other")
    other = tmp_path / "else"
    (other / "d0").mkdir(parents=True)
    (other / "d0" / "thesis.txt").write_text("precious")
    with pytest.raises(NotOurs, match=r"holds something else \(thesis.txt\)"):
        World(other)
    assert (other / "d0" / "thesis.txt").read_text() == "precious"
