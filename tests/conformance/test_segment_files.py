"""What every `disk.SegmentFiles` promises, whatever stands behind it; then what only a real directory can break."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from emberkv.errors import ConfigError, NameInUse, NotOurs
from emberkv.storage import segment_files
from emberkv.storage.disk import SegmentFiles
from emberkv.storage.faulty_files import FaultyFiles, MemoryFiles, SlowFiles
from emberkv.storage.mapping import page_buffer
from emberkv.storage.segment import FORMAT_VERSION, PAGE
from emberkv.storage.segment_files import RealFiles

CLUSTER = b"c" * 32
HANG_S = 30.0
SHM = Path("/dev/shm")


def _direct(stack: ExitStack, root: Path) -> SegmentFiles:
    return RealFiles(root / "disk", cluster=CLUSTER)


def _buffered(stack: ExitStack, root: Path) -> SegmentFiles:
    return RealFiles(root / "disk", cluster=CLUSTER, direct=False)


def _shm(stack: ExitStack, root: Path) -> SegmentFiles:
    if not SHM.is_dir():
        pytest.skip("there is no /dev/shm")
    return RealFiles(Path(stack.enter_context(TemporaryDirectory(dir=SHM))) / "disk", cluster=CLUSTER)


KINDS: dict[str, Callable[[ExitStack, Path], SegmentFiles]] = {
    "real": _direct,
    "real, page cache": _buffered,
    "real, /dev/shm": _shm,
    "memory": lambda stack, root: MemoryFiles(),
    "faulty, memory": lambda stack, root: FaultyFiles(MemoryFiles()),
    "faulty, real": lambda stack, root: FaultyFiles(_direct(stack, root)),
    "slow, real": lambda stack, root: SlowFiles(_direct(stack, root), 0.0002, 8e9),
}


@pytest.fixture(params=sorted(KINDS))
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SegmentFiles]:
    with ExitStack() as stack:
        made = KINDS[request.param](stack, tmp_path)
        yield made
        made.close()


@pytest.fixture
def real(tmp_path: Path) -> Iterator[RealFiles]:
    made = RealFiles(tmp_path / "disk", cluster=CLUSTER)
    yield made
    made.close()


def pages(count: int, seed: int = 0) -> memoryview:
    """Page-aligned bytes that differ everywhere."""
    view = page_buffer(count * PAGE)
    view[:] = random.Random(seed).randbytes(count * PAGE)
    return view


def read(files: SegmentFiles, segment: int, offset: int, count: int) -> bytes:
    view = page_buffer(count * PAGE)
    return bytes(view[: files.read(segment, offset, [view])])


def in_threads(*tasks: Callable[[], None]) -> None:
    """Runs tasks at the same time; what one raises comes out."""
    errors: list[BaseException] = []

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive(), "hangs"
    if errors:
        raise errors[0]


# -------------------------------------------------------------------------------------------------- one suite for all


def test_pieces_lie_one_after_another(files: SegmentFiles) -> None:
    head, body = pages(1, 1), pages(5, 2)
    files.write(3, 0, [head, body])
    assert read(files, 3, 0, 6) == bytes(head) + bytes(body)
    assert read(files, 3, 2 * PAGE, 3) == bytes(body)[PAGE : 4 * PAGE]


def test_a_read_fills_its_buffers_in_order(files: SegmentFiles) -> None:
    data = pages(6)
    files.write(1, 0, [data])
    first, second, third = page_buffer(PAGE), page_buffer(3 * PAGE), page_buffer(2 * PAGE)
    assert files.read(1, 0, [first, second, third]) == 6 * PAGE
    assert bytes(first) + bytes(second) + bytes(third) == bytes(data)


def test_more_pieces_than_one_system_call_takes(files: SegmentFiles) -> None:
    data = pages(2500)
    pieces = [data[at : at + PAGE] for at in range(0, data.nbytes, PAGE)]
    files.write(1, PAGE, pieces)
    into = page_buffer(data.nbytes)
    assert files.read(1, PAGE, [into[at : at + PAGE] for at in range(0, into.nbytes, PAGE)]) == data.nbytes
    assert bytes(into) == bytes(data)


def test_a_read_ends_at_the_end_of_the_file(files: SegmentFiles) -> None:
    data = pages(3)
    files.write(1, 0, [data])
    assert read(files, 1, PAGE, 10) == bytes(data)[PAGE:]
    assert read(files, 1, 3 * PAGE, 1) == b""
    assert read(files, 1, 30 * PAGE, 1) == b""


def test_appending_leaves_what_is_there(files: SegmentFiles) -> None:
    first, second = pages(2, 1), pages(2, 2)
    files.write(1, 0, [first])
    files.sync(1)
    files.write(1, 2 * PAGE, [second])
    assert read(files, 1, 0, 4) == bytes(first) + bytes(second)
    assert files.segments() == [(1, 4 * PAGE)]


def test_a_place_that_was_not_written_reads_as_zeros(files: SegmentFiles) -> None:
    data = pages(1)
    files.write(1, 4 * PAGE, [data])
    assert read(files, 1, 0, 5) == bytes(4 * PAGE) + bytes(data)


def test_segments_are_listed_ascending_with_their_sizes(files: SegmentFiles) -> None:
    assert files.segments() == []
    for number, count in ((70_000, 1), (2, 3), (255, 2), (256, 1), (1, 1)):
        files.write(number, 0, [pages(count)])
    assert files.segments() == [
        (1, PAGE),
        (2, 3 * PAGE),
        (255, 2 * PAGE),
        (256, PAGE),
        (70_000, PAGE),
    ]


def test_a_segment_that_is_not_there_is_not_made_by_asking(files: SegmentFiles) -> None:
    with pytest.raises(FileNotFoundError):
        read(files, 9, 0, 1)
    with pytest.raises(FileNotFoundError):
        files.sync(9)
    files.remove(9)
    assert files.segments() == []


def test_what_was_removed_is_gone_also_for_those_who_read_it_before(files: SegmentFiles) -> None:
    files.write(1, 0, [pages(2, 1)])
    files.write(2, 0, [pages(2, 2)])
    assert len(read(files, 1, 0, 2)) == 2 * PAGE
    files.remove(1)
    with pytest.raises(FileNotFoundError):
        read(files, 1, 0, 2)
    assert files.segments() == [(2, 2 * PAGE)]


def test_a_number_may_come_back_after_its_removal_with_other_bytes(files: SegmentFiles) -> None:
    files.write(1, 0, [pages(2, 1)])
    read(files, 1, 0, 2)
    files.sync(1)
    files.remove(1)
    again = pages(1, 2)
    files.write(1, 0, [again])
    files.sync(1)
    assert read(files, 1, 0, 2) == bytes(again)


def test_sync_may_be_repeated(files: SegmentFiles) -> None:
    files.write(1, 0, [pages(1)])
    files.sync(1)
    files.sync(1)
    assert files.segments() == [(1, PAGE)]


def test_nothing_works_after_close_and_close_may_be_repeated(files: SegmentFiles) -> None:
    files.write(1, 0, [pages(1)])
    read(files, 1, 0, 1)
    files.close()
    files.close()
    for verb in (lambda: read(files, 1, 0, 1), lambda: files.write(1, PAGE, [pages(1)]), lambda: files.sync(1)):
        with pytest.raises(OSError, match="closed"):
            verb()


def test_many_readers_see_whole_blocks_while_the_writer_appends_and_removes(files: SegmentFiles) -> None:
    count = 24
    known = [bytes(pages(4, number)) for number in range(count)]
    written: list[int] = []
    done = threading.Event()

    def write() -> None:
        try:
            for number in range(count):
                view = page_buffer(4 * PAGE)
                view[:] = known[number]
                files.write(number, 0, [view])
                written.append(number)
                if number >= 8:
                    files.remove(number - 8)
        finally:
            done.set()

    def look(seed: int) -> None:
        rng = random.Random(seed)
        hits = 0
        while not done.is_set() or not hits:
            if not written:
                continue
            number = rng.choice(written[-12:])
            try:
                assert read(files, number, 0, 4) == known[number]
                hits += 1
            except FileNotFoundError:
                assert number <= written[-1] - 8 + 1, "a segment is missing that was not removed"

    in_threads(write, *(lambda seed=seed: look(seed) for seed in range(4)))


def test_several_writes_to_one_segment_at_once(files: SegmentFiles) -> None:
    parts = [pages(8, seed) for seed in range(8)]

    def write(at: int) -> None:
        files.write(5, at * 8 * PAGE, [parts[at]])

    in_threads(*(lambda at=at: write(at) for at in range(len(parts))))
    files.sync(5)
    assert read(files, 5, 0, 64) == b"".join(bytes(part) for part in parts)


# ---------------------------------------------------------------------------------------------- whose directory it is


def test_the_directory_is_the_same_store_in_its_next_life(tmp_path: Path) -> None:
    first = RealFiles(tmp_path / "a" / "b", cluster=CLUSTER)
    data = pages(2)
    first.write(300, 0, [data])
    first.sync(300)
    first.close()
    second = RealFiles(tmp_path / "a" / "b", cluster=CLUSTER)
    assert second.store_id == first.store_id
    assert len(second.store_id) == 16
    assert second.segments() == [(300, 2 * PAGE)]
    assert read(second, 300, 0, 2) == bytes(data)
    second.close()
    other = RealFiles(tmp_path / "other", cluster=CLUSTER)
    assert other.store_id != first.store_id
    other.close()


def names_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def contents(root: Path) -> dict[str, bytes]:
    return {name: (root / name).read_bytes() for name in names_below(root) if (root / name).is_file()}


def test_a_directory_that_holds_something_else_is_refused_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(NotOurs, match=r"holds something else \(thesis.tex\).*empty directory"):
        RealFiles(tmp_path, cluster=CLUSTER)
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}


def test_segments_without_their_store_file_are_refused(tmp_path: Path, real: RealFiles) -> None:
    real.write(1, 0, [pages(1)])
    real.close()
    (real.root / "STORE").unlink()
    before = contents(real.root)
    with pytest.raises(NotOurs, match="something else"):
        RealFiles(real.root, cluster=CLUSTER)
    assert contents(real.root) == before


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"cluster": "00" * 32}, "another cluster"),
        ({"format": FORMAT_VERSION + 1}, f"has format {FORMAT_VERSION + 1}, this version reads {FORMAT_VERSION}"),
        ({"store_id": "no number"}, "cannot be read"),
        ({"store_id": "00"}, "another cluster"),
        ({"format": "one"}, "cannot be read"),
    ],
)
def test_a_directory_of_others_is_refused_and_not_touched(
    real: RealFiles, change: dict[str, object], line: str
) -> None:
    real.write(1, 0, [pages(1)])
    real.close()
    file = real.root / "STORE"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    before = contents(real.root)
    with pytest.raises(NotOurs, match=line) as refused:
        RealFiles(real.root, cluster=CLUSTER)
    assert "\n" not in str(refused.value)
    assert contents(real.root) == before


@pytest.mark.parametrize("text", [b"", b"{", b"\xff" * 100, b"[]", b"x" * 10_000])
def test_a_damaged_store_file_is_refused(real: RealFiles, text: bytes) -> None:
    real.close()
    (real.root / "STORE").write_bytes(text)
    with pytest.raises(NotOurs, match="cannot be read"):
        RealFiles(real.root, cluster=CLUSTER)
    assert (real.root / "STORE").read_bytes() == text


def test_a_first_start_that_was_cut_off_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "STORE.new").write_bytes(b"{half")
    (tmp_path / "lock").touch()
    (tmp_path / "lost+found").mkdir()
    RealFiles(tmp_path, cluster=CLUSTER).close()
    assert json.loads((tmp_path / "STORE").read_text())["cluster"] == CLUSTER.hex()


def test_two_never_share_a_directory(real: RealFiles) -> None:
    with pytest.raises(NameInUse, match="in use by another node"):
        RealFiles(real.root, cluster=CLUSTER)
    real.close()
    RealFiles(real.root, cluster=CLUSTER).close()


def test_a_root_that_is_no_directory_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot use the NVMe directory"):
        RealFiles(tmp_path / "file", cluster=CLUSTER)
    with pytest.raises(ConfigError, match="cannot use the NVMe directory"):
        RealFiles(tmp_path / "file" / "below", cluster=CLUSTER)


# ------------------------------------------------------------------------------------------------- files on the disk


def test_direct_is_said_and_its_absence_has_a_reason(tmp_path: Path, real: RealFiles) -> None:
    assert real.direct is (real.fallback_reason == "")
    buffered = RealFiles(tmp_path / "buffered", cluster=CLUSTER, direct=False)
    assert not buffered.direct
    assert buffered.fallback_reason == "not asked for"
    buffered.close()


def test_a_file_system_that_refuses_direct_requests_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    files = RealFiles(tmp_path / "disk", cluster=CLUSTER)
    assert not files.direct
    assert "refuses O_DIRECT: Invalid argument" in files.fallback_reason
    data = pages(2)
    files.write(1, 0, [data])
    files.sync(1)
    assert read(files, 1, 0, 2) == bytes(data)
    files.close()


def test_a_full_disk_is_no_reason_not_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RealFiles(tmp_path, cluster=CLUSTER).close()
    (tmp_path / "lock").write_bytes(b"")

    def full(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    files = RealFiles(tmp_path, cluster=CLUSTER)
    with pytest.raises(OSError, match="No space") as raised:
        files.write(1, 0, [pages(1)])
    assert raised.value.errno == errno.ENOSPC
    files.close()


def test_folders_by_range_and_gone_when_empty(real: RealFiles) -> None:
    for number in (1, 255, 256):
        real.write(number, 0, [pages(1)])
        real.sync(number)
    folders = [name for name in os.listdir(real.root) if (real.root / name).is_dir()]
    assert sorted(folders) == ["00000000", "00000001"]
    real.remove(256)
    real.remove(1)
    assert [name for name in os.listdir(real.root) if (real.root / name).is_dir()] == ["00000000"]
    real.remove(255)
    real.write(2, 0, [pages(1)])
    real.sync(2)
    assert real.segments() == [(2, PAGE)]


def test_foreign_names_are_no_segments_and_stay(real: RealFiles) -> None:
    real.write(1, 0, [pages(1)])
    folder = real.root / "00000000"
    for name in (
        "notes.txt",
        "1.seg",
        "000000000000000G.seg",
        f"{300:016x}.seg",
        f"{2:016X}.seg.bak",
        f"+{3:015x}.seg",
    ):
        (folder / name).write_bytes(b"x")
    (folder / f"{4:016x}.seg").mkdir()
    (folder / f"{5:016x}.seg").symlink_to(folder / "notes.txt")
    (real.root / "zzz").mkdir()
    (real.root / "00000001").write_bytes(b"a file, not a folder")
    before = names_below(real.root)
    assert real.segments() == [(1, PAGE)]
    assert names_below(real.root) == before


def test_a_listing_is_bounded(real: RealFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_files, "SEGMENTS_MAX", 2)
    for number in range(3):
        real.write(number, 0, [pages(1)])
    with pytest.raises(OSError, match="more than 2 segment files"):
        real.segments()


def test_buffers_that_start_off_a_page_are_copied_and_counted(real: RealFiles) -> None:
    if not real.direct:
        pytest.skip(f"nothing is copied here: {real.fallback_reason}")
    data = pages(3)
    assert real.bounced == 0
    real.write(1, 0, [data])
    assert read(real, 1, 0, 3) == bytes(data)
    assert real.bounced == 0
    off = memoryview(mmap.mmap(-1, 5 * PAGE))[1 : 1 + 3 * PAGE]
    assert real.read(1, 0, [off]) == 3 * PAGE
    assert bytes(off) == bytes(data)
    assert real.bounced == 1
    real.write(2, 0, [off])
    assert read(real, 2, 0, 3) == bytes(data)
    assert real.bounced == 2
    # A header page in bytes, as a careless caller would hand it over, between proper ones.
    odd = memoryview(mmap.mmap(-1, 3 * PAGE))[7 : 7 + PAGE]
    odd[:] = bytes(data)[:PAGE]
    real.write(3, 0, [odd, data])
    assert read(real, 3, 0, 4) == bytes(odd) + bytes(data)


def test_a_copied_read_is_larger_than_one_copy(real: RealFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_files, "BOUNCE_BYTES", 2 * PAGE)
    data = pages(7)
    real.write(1, 0, [data])
    area = memoryview(mmap.mmap(-1, 10 * PAGE))
    pieces = [area[3 : 3 + 2 * PAGE], area[3 * PAGE + 1 : 3 * PAGE + 1 + 6 * PAGE]]
    assert real.read(1, 0, pieces) == 7 * PAGE
    assert (bytes(pieces[0]) + bytes(pieces[1]))[: 7 * PAGE] == bytes(data)
    real.write(2, 0, [pieces[0], pieces[1][: 5 * PAGE]])
    assert read(real, 2, 0, 7) == bytes(data)


def test_half_a_page_is_refused_not_rounded(real: RealFiles) -> None:
    if not real.direct:
        pytest.skip(f"the page cache takes any length: {real.fallback_reason}")
    with pytest.raises(OSError, match="refuses to write") as raised:
        real.write(1, 0, [pages(1)[:100]])
    assert raised.value.errno == errno.EINVAL


def test_a_tail_within_a_page_is_read_to_its_end(real: RealFiles) -> None:
    data = pages(2)
    real.write(1, 0, [data])
    real.sync(1)
    os.truncate(real.root / "00000000" / f"{1:016x}.seg", PAGE + 100)
    assert read(real, 1, 0, 4) == bytes(data)[: PAGE + 100]


@pytest.mark.parametrize("most", [1, 1000, PAGE, PAGE + 1, 3 * PAGE])
def test_requests_that_are_done_in_part_are_continued(
    real: RealFiles, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    real_preadv, real_pwritev = os.preadv, os.pwritev
    count = 2 if most == 1 else 8

    def short_read(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset % PAGE or any(buffer.nbytes % PAGE for buffer in buffers):
            raise OSError(errno.EINVAL, "not on a page")
        came = min(real_preadv(fd, buffers, offset), most)
        # What was not delivered is not in the buffers either.
        left = came
        for buffer in buffers:
            for at in range(left, buffer.nbytes) if left < buffer.nbytes else ():
                buffer[at] = 0
            left = max(0, left - buffer.nbytes)
        return came

    data = pages(count)
    if most >= PAGE:
        most_pages = most - most % PAGE
        monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: real_pwritev(fd, [buffers[0][:most_pages]], at))
    real.write(1, 0, [data[: 2 * PAGE], data[2 * PAGE :]])
    assert read(real, 1, 0, count) == bytes(data)
    monkeypatch.setattr(os, "preadv", short_read)
    came = read(real, 1, 0, count)
    if most >= PAGE:
        assert came == bytes(data)
    else:  # a file system that never brings a whole page: nothing is made up and nothing hangs
        assert came == bytes(data)[: len(came)]


def test_a_write_that_takes_nothing_is_an_error(real: RealFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: 0)
    with pytest.raises(OSError, match="took nothing"):
        real.write(1, 0, [pages(1)])


# ----------------------------------------------------------------------------------------------------- descriptors


def descriptors_below(root: Path) -> int:
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            count += str(root) in os.readlink(entry)
        except FileNotFoundError:
            pass  # the one that lists
    return count


def test_descriptors_are_bounded_and_all_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_files, "DESCRIPTORS_MAX", 4)
    files = RealFiles(tmp_path / "disk", cluster=CLUSTER)
    for number in range(20):
        files.write(number, 0, [pages(1, number)])
    for number in (*range(20), *range(20)):
        assert read(files, number, 0, 1) == bytes(pages(1, number))
    assert descriptors_below(tmp_path) == 5  # and the lock
    files.close()
    assert descriptors_below(tmp_path) == 0


class Gate:
    """Holds the first os.preadv until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "preadv") -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self._real = getattr(os, name)
        self._first = True
        monkeypatch.setattr(os, name, self)

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        if self._first:
            self._first = False
            self.reached.set()
            assert self.opened.wait(HANG_S)
        return int(self._real(fd, buffers, offset))


@pytest.mark.parametrize("ends", ["remove", "close", "push out"])
def test_a_read_under_way_keeps_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    monkeypatch.setattr(segment_files, "DESCRIPTORS_MAX", 2)
    files = RealFiles(tmp_path / "disk", cluster=CLUSTER)
    ours = pages(2, 1)
    files.write(1, 0, [ours])
    files.sync(1)
    gate = Gate(monkeypatch)
    came: list[bytes] = []
    reader = threading.Thread(target=lambda: came.append(read(files, 1, 0, 2)), daemon=True)
    reader.start()
    assert gate.reached.wait(HANG_S)
    if ends == "remove":
        files.remove(1)
    elif ends == "close":
        files.close()
    # Whoever opens files now must not be given the number that the reader still uses.
    stranger = tmp_path / "stranger"
    stranger.write_bytes(b"s" * 2 * PAGE)
    others = [os.open(stranger, os.O_RDONLY) for _ in range(8)]
    if ends == "push out":
        for number in range(2, 8):
            files.write(number, 0, [pages(1, number)])
    if ends == "close":
        with pytest.raises(NameInUse):  # not before the last read has ended
            RealFiles(tmp_path / "disk", cluster=CLUSTER)
    gate.opened.set()
    reader.join(HANG_S)
    assert came == [bytes(ours)]
    files.close()
    for fd in others:
        os.close(fd)
    assert descriptors_below(tmp_path) == 0
    RealFiles(tmp_path / "disk", cluster=CLUSTER).close()


def test_a_write_under_way_keeps_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RealFiles(tmp_path / "disk", cluster=CLUSTER)
    data = pages(2)
    gate = Gate(monkeypatch, "pwritev")
    writer = threading.Thread(target=lambda: files.write(1, 0, [data]), daemon=True)
    writer.start()
    assert gate.reached.wait(HANG_S)
    files.close()
    stranger = tmp_path / "stranger"
    others = [os.open(stranger, os.O_RDWR | os.O_CREAT) for _ in range(8)]
    gate.opened.set()
    writer.join(HANG_S)
    assert stranger.stat().st_size == 0
    for fd in others:
        os.close(fd)
    again = RealFiles(tmp_path / "disk", cluster=CLUSTER)
    assert read(again, 1, 0, 2) == bytes(data)
    again.close()


def test_a_segment_removed_while_it_is_opened_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real: RealFiles
) -> None:
    real.write(1, 0, [pages(1, 1)])
    real_open, before = os.open, bytes(pages(1, 1))
    reached, go_on = threading.Event(), threading.Event()

    def slow_open(path: str | Path, flags: int, mode: int = 0o777) -> int:
        fd = real_open(path, flags, mode)
        if str(path).endswith(".seg") and not reached.is_set():
            reached.set()
            assert go_on.wait(HANG_S)
        return fd

    monkeypatch.setattr(os, "open", slow_open)
    came: list[bytes] = []
    reader = threading.Thread(target=lambda: came.append(read(real, 1, 0, 1)), daemon=True)
    reader.start()
    assert reached.wait(HANG_S)
    real.remove(1)
    go_on.set()
    reader.join(HANG_S)
    assert came == [before]
    with pytest.raises(FileNotFoundError):
        read(real, 1, 0, 1)


def test_after_an_error_the_file_is_opened_anew(real: RealFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pages(1)
    real.write(1, 0, [data])
    used: list[int] = []
    real_preadv = os.preadv

    def stale_once(fd: int, buffers: list[memoryview], offset: int) -> int:
        used.append(fd)
        if len(used) == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real_preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", stale_once)
    opens = []
    real_open = os.open
    monkeypatch.setattr(os, "open", lambda *how: opens.append(how) or real_open(*how))
    with pytest.raises(OSError, match="Stale") as raised:
        read(real, 1, 0, 1)
    assert raised.value.errno == errno.ESTALE
    assert read(real, 1, 0, 1) == bytes(data)
    assert len(opens) == 2


# ------------------------------------------------------------------------------------------------- a vanished mount


def test_a_directory_that_is_not_there_any_more_takes_nothing(real: RealFiles) -> None:
    real.write(1, 0, [pages(1)])
    away = real.root.with_name("away")
    real.root.rename(away)
    verbs: list[Callable[[], object]] = [
        real.check_there,
        lambda: real.write(1, PAGE, [pages(1)]),
        lambda: real.write(2, 0, [pages(1)]),
        lambda: real.sync(1),
        lambda: real.remove(1),
        real.segments,
    ]
    for stands_there in ("nothing", "an empty directory", "another store"):
        if stands_there == "an empty directory":
            real.root.mkdir()
        if stands_there == "another store":
            RealFiles(real.root, cluster=CLUSTER).close()
        before = names_below(real.root) if real.root.exists() else []
        for verb in verbs:
            with pytest.raises(OSError, match="no longer") as raised:
                verb()
            assert raised.value.errno == errno.ESTALE
        assert (names_below(real.root) if real.root.exists() else []) == before
    assert len(list(away.rglob("*.seg"))) == 1


def test_a_directory_that_came_back_is_taken_again_but_not_what_was_unsynced(real: RealFiles) -> None:
    synced, lost = pages(1, 1), pages(1, 2)
    real.write(1, 0, [synced])
    real.sync(1)
    real.write(1, PAGE, [lost])
    away = real.root.with_name("away")
    real.root.rename(away)
    # What the server had of the file when it came back: another inode, the same store.
    back = real.root
    (back / "00000000").mkdir(parents=True)
    (back / "STORE").write_bytes((away / "STORE").read_bytes())
    (back / "00000000" / f"{1:016x}.seg").write_bytes(bytes(synced))
    real.check_there()
    assert read(real, 1, 0, 2) == bytes(synced)
    with pytest.raises(OSError, match="mounted anew before segment 1 was synced"):
        real.sync(1)
    real.write(2, 0, [lost])
    real.sync(2)
    assert real.segments() == [(1, PAGE), (2, PAGE)]
    with pytest.raises(NameInUse):
        RealFiles(back, cluster=CLUSTER)


def test_a_directory_that_came_back_and_was_taken_by_another_is_busy(real: RealFiles) -> None:
    away = real.root.with_name("away")
    real.root.rename(away)
    real.root.mkdir()
    (real.root / "STORE").write_bytes((away / "STORE").read_bytes())
    other = RealFiles(real.root, cluster=CLUSTER)
    with pytest.raises(OSError, match="in use by another node") as raised:
        real.check_there()
    assert raised.value.errno == errno.EBUSY
    other.close()
    real.check_there()
    real.check_there()


def test_a_hanging_read_holds_up_nobody_else(tmp_path: Path) -> None:
    files = FaultyFiles(RealFiles(tmp_path / "disk", cluster=CLUSTER))
    data = pages(1)
    files.write(1, 0, [data])
    files.hold("read")
    came: list[bytes] = []
    reader = threading.Thread(target=lambda: came.append(read(files, 1, 0, 1)), daemon=True)
    reader.start()
    until = time.monotonic() + HANG_S
    while not files.calls["read"] and time.monotonic() < until:
        time.sleep(0.001)
    files.write(2, 0, [data])
    files.sync(2)
    assert came == []
    files.heal()
    reader.join(HANG_S)
    assert came == [bytes(data)]
    files.close()
