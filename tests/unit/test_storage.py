"""Maps that others see: what a client that holds the descriptor can do (read) and cannot (write, map, shrink)."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash

from emberkv.checksum import COPY_PIECE_BYTES, HELD_PIECE_BYTES, checksum_held, copy_and_checksum
from emberkv.errors import ConfigError, InvariantViolation, ProtocolError
from emberkv.storage import dram, mapping
from emberkv.storage.arena import Slot
from emberkv.storage.dram import DramTier
from emberkv.storage.staging import StagingArea, StagingMap
from emberkv.types import checksum

MIB = 1 << 20
SIZES = (0, 1, 4095, HELD_PIECE_BYTES, HELD_PIECE_BYTES + 1, COPY_PIECE_BYTES, COPY_PIECE_BYTES + 1, 3 * MIB + 17)


def pattern(size: int) -> bytes:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()


@pytest.fixture
def tier():
    tier = DramTier(8 * MIB)
    yield tier
    tier.close()


def store(tier: DramTier, data: bytes) -> Slot:
    slot = tier.reserve(len(data))
    assert slot is not None
    np.copyto(np.frombuffer(tier.view(slot), np.uint8), np.frombuffer(data, np.uint8))
    return slot


# -- the arena as its clients see it -----------------------------------------------------------------------------------


def open_ways(fd: int) -> list[int]:
    """The descriptor as it was sent, and the two ways to open its file again."""
    path = f"/proc/self/fd/{fd}"
    return [os.dup(fd), os.open(path, os.O_RDWR), os.open(path, os.O_RDONLY)]


def test_a_client_reads_the_arena_and_cannot_write_it(tier: DramTier) -> None:
    slot = store(tier, pattern(5000))
    for fd in open_ways(tier.fd):
        try:
            with mmap.mmap(fd, tier.total_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as seen:
                assert seen[slot.offset : slot.offset + 5000] == pattern(5000)
            with pytest.raises(PermissionError):
                mmap.mmap(fd, tier.total_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            for attempt in (
                lambda fd=fd: os.write(fd, b"x"),
                lambda fd=fd: os.pwrite(fd, b"x", slot.offset),
                lambda fd=fd: os.ftruncate(fd, 0),
                lambda fd=fd: os.ftruncate(fd, tier.total_bytes * 2),
                lambda fd=fd: os.posix_fallocate(fd, 0, tier.total_bytes * 2),
                lambda fd=fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
            ):
                with pytest.raises(OSError) as caught:
                    attempt()
                assert caught.value.errno in (errno.EPERM, errno.EBADF, errno.EINVAL)
        finally:
            os.close(fd)
    assert bytes(tier.view(slot)) == pattern(5000)


def test_a_read_only_map_cannot_be_made_writable(tier: DramTier) -> None:
    import ctypes

    fd = os.open(f"/proc/self/fd/{tier.fd}", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    seen = mmap.mmap(fd, tier.total_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    array = np.frombuffer(seen, np.uint8)
    try:
        assert libc.mprotect(array.ctypes.data, 4096, mmap.PROT_READ | mmap.PROT_WRITE) == -1
        assert ctypes.get_errno() == errno.EACCES
    finally:
        del array
        seen.close()
        os.close(fd)


def test_holes_cannot_be_punched(tier: DramTier) -> None:
    import ctypes

    slot = store(tier, pattern(4096))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    fd = os.open(f"/proc/self/fd/{tier.fd}", os.O_RDWR)
    try:
        assert libc.fallocate(fd, 0x01 | 0x02, slot.offset, 4096) == -1  # KEEP_SIZE | PUNCH_HOLE
        assert ctypes.get_errno() == errno.EPERM
    finally:
        os.close(fd)
    assert bytes(tier.view(slot)) == pattern(4096)


def test_the_node_still_writes_after_the_seal(tier: DramTier) -> None:
    seals = fcntl.fcntl(tier.fd, fcntl.F_GET_SEALS)
    assert seals == mapping.F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    first, second = store(tier, pattern(10_000)), store(tier, pattern(MIB))
    assert bytes(tier.view(first)) == pattern(10_000)
    assert bytes(tier.view(second)) == pattern(MIB)
    assert len(tier.view(first)) == 10_000
    assert not tier.view(first).readonly
    tier.release(first)
    assert tier.usage() == (MIB, 8 * MIB)


def test_only_our_own_slots_are_released(tier: DramTier) -> None:
    class Foreign:
        offset = 0
        length = 1

    with pytest.raises(InvariantViolation, match="another tier"):
        tier.release(Foreign())
    slot = store(tier, b"x")
    assert tier.size_class(4096) == slot.size_class < tier.size_class(4097)
    assert [list(slots) for slots in tier.slabs(4097, [])] == [[slot]]


# -- memory ------------------------------------------------------------------------------------------------------------


def test_an_arena_larger_than_memory_is_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"^arena_bytes: \d+ MiB is more than this machine can give \(\d+ MiB avail"
    ) as e:
        DramTier(1 << 50)
    assert "\n" not in str(e.value)


def test_the_limit_counts_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dram, "available_bytes", lambda: 10 * MIB)
    with pytest.raises(ConfigError):
        DramTier(10 * MIB)
    DramTier(9 * MIB).close()


def test_the_tightest_cgroup_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = mapping.available_bytes()
    assert 0 < machine < 1 << 50
    for folder, limit, used, cache in (("loose", "max", 0, 0), ("tight", str(100 * MIB), 30 * MIB, 10 * MIB)):
        path = tmp_path / folder
        path.mkdir()
        (path / "memory.max").write_text(limit + "\n")
        (path / "memory.current").write_text(f"{used}\n")
        (path / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")
    monkeypatch.setattr(mapping, "_cgroup_folders", lambda: iter([tmp_path / "absent", tmp_path / "loose"]))
    assert mapping.available_bytes() > 100 * MIB
    monkeypatch.setattr(mapping, "_cgroup_folders", lambda: iter([tmp_path / "loose", tmp_path / "tight"]))
    assert mapping.available_bytes() == 80 * MIB


def wait_for(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def test_prefault_touches_all_and_says_so() -> None:
    tier = DramTier(40 * MIB)
    try:
        assert tier.stats()["prefaulted_bytes"] == 0
        tier.prefault()
        tier.prefault()
        wait_for(lambda: tier.stats()["prefaulted_bytes"] == tier.total_bytes)
        assert os.fstat(tier.fd).st_blocks * 512 >= tier.total_bytes
        stats = tier.stats()
        assert stats["total"] == tier.total_bytes
        assert stats["thp"] in ("always", "within_size", "advise", "never", "deny", "force", "unknown")
        assert isinstance(stats["thp_bytes"], int)
        assert stats["thp_bytes"] >= 0
        assert stats["hugetlb"] is False
    finally:
        tier.close()


def test_prefault_keeps_what_is_stored() -> None:
    tier = DramTier(16 * MIB)
    slot = store(tier, pattern(MIB))
    tier.prefault()
    wait_for(lambda: tier.stats()["prefaulted_bytes"] == tier.total_bytes)
    assert bytes(tier.view(slot)) == pattern(MIB)
    tier.close()


def test_close_stops_the_prefault_at_once() -> None:
    tier = DramTier(512 * MIB)
    tier.prefault()
    wait_for(lambda: tier.stats()["prefaulted_bytes"] != 0)
    started = time.monotonic()
    tier.close()
    assert time.monotonic() - started < 1.0
    assert not [thread for thread in threading.enumerate() if thread.name == "prefault"]
    done = tier.stats()["prefaulted_bytes"]
    time.sleep(0.05)
    assert tier.stats()["prefaulted_bytes"] == done
    tier.close()


def test_a_kernel_without_the_advice_only_prefaults_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        @staticmethod
        def madvise(_address: int, _size: int, _advice: int) -> int:
            return -1

    monkeypatch.setattr(mapping, "_libc", Old)
    tier = DramTier(MIB)
    tier.prefault()
    time.sleep(0.05)
    assert tier.stats()["prefaulted_bytes"] == 0
    slot = store(tier, b"still works")
    assert bytes(tier.view(slot)) == b"still works"
    tier.close()


def test_a_view_outlives_close() -> None:
    tier = DramTier(MIB)
    view = tier.view(store(tier, b"held by a sendmsg"))
    held = np.frombuffer(view, np.uint8)
    tier.close()
    assert held.tobytes() == b"held by a sendmsg"


def test_populate_read_fills_a_clients_map(tier: DramTier) -> None:
    slot = store(tier, pattern(5000))
    with mmap.mmap(tier.fd, tier.total_bytes, mmap.MAP_SHARED, mmap.PROT_READ) as seen:
        array = np.frombuffer(seen, np.uint8)
        assert mapping.populate_read(array.ctypes.data, tier.total_bytes)
        assert array[slot.offset : slot.offset + 5000].tobytes() == pattern(5000)
        assert not mapping.populate_read(1, 4096), "an address that is no page is refused"
        del array


# -- staging -----------------------------------------------------------------------------------------------------------


def test_the_node_sees_what_the_client_stages() -> None:
    area = StagingArea(MIB)
    mapped = StagingMap(area.fd, area.total_bytes)
    offset = mapped.reserve(5000)
    assert offset is not None
    np.copyto(mapped.data[offset : offset + 5000], np.frombuffer(pattern(5000), np.uint8))
    seen = area.view(offset, 5000)
    assert seen.readonly
    assert bytes(seen) == pattern(5000)
    del seen
    mapped.close()
    mapped.close()
    area.close()
    area.close()


def test_staging_can_be_written_but_not_resized() -> None:
    area = StagingArea(5000)
    assert area.total_bytes == 8192
    fd = os.open(f"/proc/self/fd/{area.fd}", os.O_RDWR)
    for size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.pwrite(fd, b"client", 0)
    assert bytes(area.view(0, 6)) == b"client"
    os.close(fd)
    area.close()


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 1), (0, -1), (0, 8193), (8192, 1), (1 << 62, 1 << 62), (4096, 4097)]
)
def test_a_client_cannot_name_bytes_outside_its_staging(offset: int, length: int) -> None:
    area = StagingArea(8192)
    with pytest.raises(ProtocolError, match="lie outside"):
        area.view(offset, length)
    assert len(area.view(8192, 0)) == 0
    area.close()


def test_full_staging_says_so_and_wrong_releases_are_bugs() -> None:
    area = StagingArea(8 * 4096)
    mapped = StagingMap(area.fd, area.total_bytes)
    rooms = [mapped.reserve(4096) for _ in range(8)]
    assert rooms == [4096 * i for i in range(8)]
    assert mapped.reserve(1) is None
    assert mapped.usage() == (8 * 4096, 8 * 4096)
    mapped.release(4096)
    mapped.release(3 * 4096)
    assert mapped.reserve(8192) is None, "two rooms apart are not one"
    mapped.release(2 * 4096)
    assert mapped.reserve(3 * 4096) == 4096
    for wrong in (2 * 4096, 5, 1 << 40):
        with pytest.raises(InvariantViolation, match="released twice"):
            mapped.release(wrong)
    with pytest.raises(InvariantViolation, match="not reserved"):
        mapped.view(4096, 3 * 4096 + 1)
    mapped.check()
    mapped.close()
    area.close()


def test_a_client_does_not_trust_a_file_that_can_shrink_or_is_short(tmp_path: Path) -> None:
    unsealed = mapping.memory_file("unsealed", 8192)
    with pytest.raises(ProtocolError, match="could shrink"):
        StagingMap(unsealed, 8192)
    fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, mapping.SIZE_SEALS)
    StagingMap(unsealed, 8192).close()
    for size in (0, -1, 8193):
        with pytest.raises(ProtocolError, match="announced"):
            StagingMap(unsealed, size)
    os.close(unsealed)
    with (tmp_path / "file").open("w+b") as plain, pytest.raises(ProtocolError, match="no memory file"):
        StagingMap(plain.fileno(), 1)


def test_staging_prefault() -> None:
    area = StagingArea(20 * MIB)
    mapped = StagingMap(area.fd, area.total_bytes)
    mapped.prefault()
    wait_for(lambda: os.fstat(area.fd).st_blocks * 512 >= area.total_bytes)
    mapped.close()
    area.close()


# -- checksums ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_both_checksums_are_the_checksum(size: int) -> None:
    data = pattern(size)
    target = bytearray(size)
    assert checksum_held(memoryview(data)) == checksum(data)
    assert copy_and_checksum(memoryview(target), memoryview(data)) == checksum(data)
    assert target == data


def test_checksum_of_wider_items_is_of_their_bytes() -> None:
    wide = np.arange(3 * HELD_PIECE_BYTES, dtype=np.int32).reshape(3, -1)
    assert checksum_held(wide.data) == checksum(wide.tobytes())


def test_lengths_must_agree() -> None:
    with pytest.raises(InvariantViolation, match="3 bytes are to be copied into a place of 4"):
        copy_and_checksum(memoryview(bytearray(4)), memoryview(b"abc"))


def test_the_checksum_is_of_the_copy_even_when_the_source_changes_meanwhile() -> None:
    source, target = np.zeros(8 * MIB, np.uint8), np.zeros(8 * MIB, np.uint8)
    stop = threading.Event()

    def meddle() -> None:
        value = 0
        while not stop.is_set():
            value = (value + 1) & 255
            source.fill(value)

    thread = threading.Thread(target=meddle, daemon=True)
    thread.start()
    try:
        for _ in range(20):
            digest = copy_and_checksum(target.data, source.data)
            assert digest == xxhash.xxh3_128_digest(target.data)
    finally:
        stop.set()
        thread.join()


def turns_of_another_thread(work) -> int:
    """Steps that a busy thread got while `work` ran once, with a switch interval that only a release can beat."""
    import sys

    turns = [0]
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            turns[0] += 1

    thread = threading.Thread(target=spin, daemon=True)
    interval = sys.getswitchinterval()
    thread.start()
    try:
        time.sleep(0.02)
        sys.setswitchinterval(0.2)
        time.sleep(0.001)  # gives the interpreter away once, and has it back at the other thread's end of turn
        before = turns[0]
        work()
        return turns[0] - before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


def test_the_held_checksum_never_gives_the_interpreter_away() -> None:
    data = memoryview(pattern(MIB))
    assert turns_of_another_thread(lambda: [checksum_held(data) for _ in range(50)]) == 0
    # The probe does see it when the interpreter is given away.
    large = np.zeros(64 * MIB, np.uint8).data
    assert turns_of_another_thread(lambda: [xxhash.xxh3_128_digest(large) for _ in range(10)]) > 0
