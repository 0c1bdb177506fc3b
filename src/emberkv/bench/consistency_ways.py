"""The ways to put and get that `bench consistency` compares, and what each does to a real cluster.

Why it exists: a level is a promise, and its price is the difference between two ways that do the same otherwise: same
bytes, same near node, same place of the keys.
Laws: a way does one call of the client; bytes are prepared before and compared after, never while time is taken. An
outcome of another level, a byte of another put, or too few copies ends the benchmark. Puts overwrite rows of keys with
bytes that were never stored before, since equal bytes are not sent again.
Limits: one client, one call at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from emberkv.bench.bench_cluster import NEAR, OTHER, STRONG_NAMESPACE, BenchCluster, Place
from emberkv.bench.ref import prefaulted
from emberkv.bench.workload import DEADLINE_MS, Bytes
from emberkv.client import Client
from emberkv.errors import Unavailable
from emberkv.types import Hit, Level, PutOutcome, PutStatus

MARK_BYTES: Final = 8
STRONG_BYTES_MAX: Final = 256 << 10
"""Largest blocks that are put as strong records; their bound is 512 KiB."""


class Shape(msgspec.Struct, frozen=True):
    """`count` blocks of `size` bytes in a call. Per round: `lone` calls each way, `slow` of those that wait for the
    disk, and `burst` calls without a pause."""

    count: int
    size: int
    lone: int
    slow: int
    burst: int

    @property
    def name(self) -> str:
        """Like 32x256KiB."""
        size = f"{self.size >> 20}MiB" if self.size >> 20 else f"{self.size >> 10}KiB"
        return f"{self.count}x{size}"

    @property
    def nbytes(self) -> int:
        """All blocks together."""
        return self.count * self.size


class Row(msgspec.Struct):
    """Keys that are put and read together, and the mark of the bytes that they hold."""

    keys: list[bytes]
    mark: int = 0


class Clients:
    """One of each namespace at the near node and at another one; use as a context manager."""

    def __init__(self, cluster: BenchCluster) -> None:
        near, other = cluster.endpoint(NEAR), cluster.endpoint(OTHER)
        self.near, self.other = Client(near), Client(other)
        self.ledger = Client(near, namespace=STRONG_NAMESPACE)
        self.other_ledger = Client(other, namespace=STRONG_NAMESPACE)
        self.strong_revision = 0
        """Of the store, as the newest put was told: each commit raises it by one."""

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        for client in (self.near, self.other, self.ledger, self.other_ledger):
            client.close()


class Scene:
    """Rows of keys at each place for one shape, their bytes, and the session that puts and reads them."""

    def __init__(self, cluster: BenchCluster, clients: Clients, shape: Shape, salt: str) -> None:
        self.shape = shape
        self.clients = clients
        size, count = shape.size, shape.count
        self.data: Bytes = np.frombuffer(prefaulted(shape.nbytes), np.uint8).reshape(count, size)
        self.dest: Bytes = np.frombuffer(prefaulted(shape.nbytes), np.uint8).reshape(count, size)
        np.copyto(self.data, np.random.default_rng(size).integers(0, 256, (count, size), np.uint8))
        self._marks = self.data[:, :MARK_BYTES].view(np.uint64)
        self._found = self.dest[:, :MARK_BYTES].view(np.uint64)
        self._mark = 0
        self.session = clients.near.session()
        self.checked = dict.fromkeys(CHECKS, 0)

        def rows(place: Place, what: str, number: int) -> list[Row]:
            keys = cluster.make_keys(place, count * number, f"{salt} {shape.name} {what}")
            return [Row(keys[at * count : (at + 1) * count]) for at in range(number)]

        # A ring as long as a burst: no key is put again while its last put is on its way.
        self._rings = {place: rows(place, "put", shape.burst) for place in (Place.PRIMARY, Place.OUTSIDE)}
        self._next = dict.fromkeys(self._rings, 0)
        self.at_backup: Row = rows(Place.BACKUP, "get", 1)[0]
        self.at_outside: Row = rows(Place.OUTSIDE, "get", 1)[0]
        self.behind: Row = rows(Place.OUTSIDE, "behind", 1)[0]
        self.strong: Row = rows(Place.PRIMARY, "strong", 1)[0]
        for row in (self.at_backup, self.at_outside, self.behind):
            self.put_session(self.stamp(row), 2)
        if self.takes_strong:
            self.put_strong(self.stamp(self.strong))

    @property
    def takes_strong(self) -> bool:
        """Are blocks of this size kept as strong records here?"""
        return self.shape.size <= STRONG_BYTES_MAX

    def stamp(self, row: Row) -> Row:
        """Gives the bytes a mark that was never there before, and says that `row` will hold them."""
        self._mark += 1
        np.copyto(self._marks, np.uint64(self._mark))
        row.mark = self._mark
        return row

    def next_row(self, place: Place) -> Row:
        """The next row of a ring, with bytes of its own."""
        ring = self._rings[place]
        self._next[place] = (self._next[place] + 1) % len(ring)
        return self.stamp(ring[self._next[place]])

    # -- puts: what is timed is the client's call ---------------------------------------------------------------------

    def _items(self, row: Row) -> list[tuple[bytes, memoryview]]:
        return [(key, block.data) for key, block in zip(row.keys, self.data, strict=True)]

    def put_eventual(self, row: Row) -> None:
        """Accepted by the near node."""
        found = self.clients.near.put_many(self._items(row), level=Level.EVENTUAL, deadline_ms=DEADLINE_MS)
        _expect(found, PutStatus.ACCEPTED, PutStatus.STORED)

    def put_session(self, row: Row, min_copies: int) -> None:
        """Stamped by the primary, and kept by `min_copies` replicas."""
        found = self.session.put_many(self._items(row), deadline_ms=DEADLINE_MS, min_copies=min_copies)
        _expect(found, PutStatus.STORED)
        if min(outcome.copies for outcome in found) < min_copies:
            raise Unavailable(f"a put was acknowledged with fewer than {min_copies} copies: {found[0]}")
        self.checked[COPIES] += len(found)

    def put_strong(self, row: Row) -> None:
        """One synced commit each."""
        found = self.clients.ledger.put_many(self._items(row), deadline_ms=DEADLINE_MS)
        _expect(found, PutStatus.STORED)
        self.clients.strong_revision = max(outcome.version.seq for outcome in found)

    # -- gets ---------------------------------------------------------------------------------------------------------

    def get(self, client: Client, row: Row, level: Level) -> None:
        """Without a token."""
        _usable(client.get_into(row.keys, self.dest, level=level, deadline_ms=DEADLINE_MS).usable, row)

    def get_token(self, row: Row) -> None:
        """With the token of the session that put the row."""
        _usable(self.session.get_into(row.keys, self.dest, deadline_ms=DEADLINE_MS).usable, row)

    def clear(self, row: Row) -> Row:
        """Removes the marks from where blocks are loaded, so that a block that was not loaded is seen."""
        np.copyto(self._found, np.uint64(0))
        return row

    def put_elsewhere(self) -> Row:
        """Another node's client overwrites the row; its token goes as text to the near node's session, whose near copy
        is behind from now on."""
        writer = self.clients.other.session(self.session.token.to_text())
        found = writer.put_many(self._items(self.stamp(self.behind)), deadline_ms=DEADLINE_MS)
        _expect(found, PutStatus.STORED)
        self.session = self.clients.near.session(writer.token.to_text())
        return self.clear(self.behind)

    # -- checks -------------------------------------------------------------------------------------------------------

    def check_marks(self, row: Row, what: str) -> None:
        """Are the loaded blocks those of the row's last put? Raises Unavailable."""
        wrong = int((self._found != row.mark).sum())
        if wrong:
            raise Unavailable(f"{what}: {wrong} of {len(row.keys)} blocks are not those that were put last")
        self.checked[what] += len(row.keys)

    def check_bytes(self, row: Row) -> None:
        """Are they whole? Slow; once a round is enough, since each was checksummed too. Raises Unavailable."""
        if (self.dest[:, MARK_BYTES:] != self.data[:, MARK_BYTES:]).any():
            raise Unavailable(f"blocks of {row.keys[0].hex()[:16]} came back with other bytes")

    def check_strong(self, row: Row) -> None:
        """A read at another node sees the write that was acknowledged before it began. Raises Unavailable."""
        self.get(self.clients.other_ledger, self.clear(row), Level.STRONG)
        self.check_marks(row, STRONG_SEEN)

    def check_everywhere(self) -> None:
        """At rest, every node serves the last put of each row to a reader without a token. Raises Unavailable."""
        for rows in (*self._rings.values(), [self.at_backup, self.at_outside]):
            for row in rows[-2:]:
                if row.mark:
                    for client in (self.clients.near, self.clients.other):
                        self.get(client, self.clear(row), Level.SESSION)
                        self.check_marks(row, AT_REST)
                        self.check_bytes(row)

    def stale_seen(self) -> bool:
        """Does an eventual read at the near node return what another node's put has replaced? Nothing forbids it."""
        before = self.behind.mark
        self.put_elsewhere()
        found = self.clients.near.get_many(self.behind.keys[:1], level=Level.EVENTUAL, deadline_ms=DEADLINE_MS)[0]
        return isinstance(found, Hit) and int.from_bytes(bytes(found.data[:MARK_BYTES]), "little") == before


TOKEN_SEEN: Final = "session puts of another node, seen with its token"
STRONG_SEEN: Final = "strong puts, seen at another node at once"
AT_REST: Final = "last puts, seen at two nodes when all is at rest"
READS: Final = "reads that returned the last put"
COPIES: Final = "session puts acknowledged with as many copies as they asked for"
CHECKS: Final = (TOKEN_SEEN, STRONG_SEEN, AT_REST, READS, COPIES)
"""What is checked in every run; the report counts the blocks."""


def _expect(outcomes: list[PutOutcome], *statuses: PutStatus) -> None:
    wrong = [outcome for outcome in outcomes if outcome.status not in statuses]
    if wrong:
        raise Unavailable(f"{len(wrong)} of {len(outcomes)} puts ended otherwise than their level asks: {wrong[0]}")


def _usable(usable: int, row: Row) -> None:
    if usable != len(row.keys):
        raise Unavailable(f"only {usable} of {len(row.keys)} blocks were loaded")


class Way(msgspec.Struct, frozen=True):
    """One way to put or get. `act` does the call on the row that `prepare` returned; `check` comes after."""

    name: str
    title: str
    than: str
    """The eventual way that does the same otherwise."""
    reference: str
    """What the same machine does for the least that this way has to do: memcpy, tcp, ping or fsync."""
    prepare: Callable[[Scene], Row]
    act: Callable[[Scene, Row], None]
    check: Callable[[Scene, Row], None] | None = None
    strong: bool = False
    prepares_elsewhere: bool = False
    """Preparing puts blocks through another node; they have to arrive first."""

    @property
    def is_put(self) -> bool:
        """Else it reads."""
        return self.name.startswith("put_")


def _read(scene: Scene, row: Row) -> None:
    scene.check_marks(row, READS)


def _puts(place: Place, reference: str) -> tuple[Way, ...]:
    def prepare(scene: Scene) -> Row:
        return scene.next_row(place)

    than, at = f"put_eventual_{place.value}", place.value
    return (
        Way(than, f"put eventual, {at}", than, "memcpy", prepare, Scene.put_eventual),
        Way(f"put_session_{at}", f"put session, {at}", than, reference, prepare, lambda s, row: s.put_session(row, 1)),
        Way(
            f"put_copies2_{at}",
            f"put 2 copies, {at}",
            than,
            "tcp",
            prepare,
            lambda s, row: s.put_session(row, 2),
        ),
    )


def _gets(name: str, title: str, row_of: Callable[[Scene], Row], reference: str) -> tuple[Way, ...]:
    def prepare(scene: Scene) -> Row:
        return scene.clear(row_of(scene))

    def get(level: Level) -> Callable[[Scene, Row], None]:
        return lambda scene, row: scene.get(scene.clients.near, row, level)

    than = f"get_eventual_{name}"
    return (
        Way(than, f"get eventual, {title}", than, "memcpy", prepare, get(Level.EVENTUAL), _read),
        Way(f"get_session_{name}", f"get session, {title}", than, reference, prepare, get(Level.SESSION), _read),
        Way(f"get_token_{name}", f"get token, {title}", than, reference, prepare, Scene.get_token, _read),
    )


WAYS: Final = (
    *_puts(Place.PRIMARY, "memcpy"),
    *_puts(Place.OUTSIDE, "tcp"),
    Way(
        "put_strong",
        "put strong",
        "put_eventual_outside",
        "fsync",
        lambda scene: scene.stamp(scene.strong),
        Scene.put_strong,
        Scene.check_strong,
        strong=True,
    ),
    *_gets("backup", "backup", lambda scene: scene.at_backup, "memcpy"),
    *_gets("outside", "near copy", lambda scene: scene.at_outside, "ping"),
    Way(
        "get_token_behind",
        "get token, older copy",
        "get_eventual_outside",
        "tcp",
        Scene.put_elsewhere,
        Scene.get_token,
        lambda scene, row: scene.check_marks(row, TOKEN_SEEN),
        prepares_elsewhere=True,
    ),
    Way(
        "get_strong",
        "get strong",
        "get_eventual_backup",
        "memcpy",
        lambda scene: scene.clear(scene.strong),
        lambda scene, row: scene.get(scene.clients.ledger, row, Level.STRONG),
        _read,
        strong=True,
    ),
)
"""In the order of the table."""
