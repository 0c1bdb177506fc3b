"""What the processes of a herd play: readers, writers, holders of pins, and those that die in the middle.

Laws: a reader believes what it read through a pin only if `unpin` says that the pin was whole to its end, and then
every byte must have been right at every look. A writer reuses its buffers as soon as a call allows it.
Limits: blocks of SIZES; half of all calls go to HOT keys, which are overwritten all the time, the others to so many
COLD ones that an arena never holds them.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

from emberkv.client import Client
from emberkv.client.pins import Pinned
from emberkv.types import Hit, Level, MissReason, Version
from stress.board import ROWS, Board, Column, Order, State
from stress.oracle import Ledger, TwoValues
from stress.pattern import WrongBytes, key_of, make, same, whole

SIZES: Final = (4096, 5000, 16 << 10, 40_000, 64 << 10)
BIG_SIZES: Final = (200_000, 512 << 10, 1 << 20)
HOT: Final = 48
COLD: Final = 2000
PRIVATE: Final = 1_000_000
"""Numbers from here on belong to the row that makes them, `PRIVATE + row * 1000 + n`."""
PIN_MS: Final = 20_000
"""A pin's own deadline: so long that a busy machine never ends a connection, and with it other pins."""
ORPHAN_S: Final = 60.0
PROBLEMS_MAX: Final = 5


class Actor:
    """One child: its options, its chance, its numbers, its clients."""

    def __init__(
        self, board: Board, folder: Path, row: int, endpoints: str | list[str], options: dict[str, Any]
    ) -> None:
        self.board, self.folder, self.row, self.options = board, folder, row, options
        self.endpoints = endpoints
        self.rng = random.Random(row * 1_000_003 + int(options.get("seed", 0)))
        self.ledger = Ledger()
        self._put = 0
        self._lock = threading.Lock()

    def client(self) -> Client:
        local = "unix:" in str(self.endpoints)
        staging = int(self.options.get("staging", 2 << 20))
        return Client(self.endpoints, prefer_local=local, staging_bytes=staging, connect_timeout_ms=5000)

    @property
    def ending(self) -> bool:
        return self.board.ending

    @property
    def released(self) -> bool:
        return self.board.ordered(self.row) is Order.RELEASE or self.board.ending

    def counter(self) -> int:
        """Of a new put: no two puts of a herd have the same."""
        with self._lock:
            self._put += 1
            return (self.row << 32) + self._put

    def numbers(self, count: int, rng: random.Random) -> list[int]:
        """Different blocks, half of them hot."""
        hot = rng.sample(range(HOT), min(HOT, count // 2 + 1))
        return [*hot, *rng.sample(range(HOT, HOT + COLD), count)][:count]

    def find(self, text: str) -> None:
        self.board.find(self.row, text)

    def note(self, number: int, version: Version, counter: int) -> None:
        """One value per version, for all threads of this process; the driver compares the processes."""
        with self._lock:
            try:
                self.ledger.note(number, version, counter)
            except TwoValues as error:
                self.find(str(error))

    def add(self, column: Column, count: int = 1) -> None:
        self.board.add(self.row, column, count)

    def state(self, state: State) -> None:
        self.board.put(self.row, Column.STATE, state)

    def end(self) -> None:
        (self.folder / f"ledger-{self.row}.tmp").write_text(json.dumps(self.ledger.rows()))
        (self.folder / f"ledger-{self.row}.tmp").rename(self.folder / f"ledger-{self.row}")


class Held:
    """A pin and what its blocks must say until it is given back."""

    def __init__(self, me: Actor, pinned: Pinned, numbers: list[int]) -> None:
        self.me, self.pinned = me, pinned
        self.keys = [key_of(number) for number in numbers]
        self.counters: list[int] = []
        self.problems: list[str] = []
        self.versions: list[tuple[int, Version, int]] = []
        self.looks = 0
        for number, view, version in zip(numbers, pinned.views, pinned.versions, strict=True):
            self.counters.append(0 if view is None else self._first_look(number, view, version))
        self.blocks = sum(view is not None for view in pinned.views)
        self.bytes = sum(view.nbytes for view in pinned.views if view is not None)
        me.add(Column.PINS)

    def _first_look(self, number: int, view: memoryview, version: Version) -> int:
        """The counter of the put that these bytes are, 0 if of none."""
        self.looks += 1
        try:
            counter = whole(key_of(number), view)
        except WrongBytes as error:
            self._problem(f"at the pin: {error}")
            return 0
        self.versions.append((number, version, counter))
        return counter

    def _problem(self, text: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)

    def look(self) -> None:
        """Every byte, once more."""
        for key, counter, view in zip(self.keys, self.counters, self.pinned.views, strict=True):
            if view is None or not counter:
                continue
            self.looks += 1
            try:
                same(key, counter, view)
            except WrongBytes as error:
                self._problem(f"under the pin: {error}")

    def drop(self) -> bool:
        """The last look, the end of the pin, and the verdict. False: the pin had ended before."""
        self.look()
        me = self.me
        whole_to_its_end = self.pinned.unpin()
        me.add(Column.KEPT if whole_to_its_end else Column.VOID)
        if whole_to_its_end:
            me.add(Column.LOOKS, self.looks)
            for problem in self.problems:
                me.find(problem)
            for number, version, counter in self.versions:
                me.note(number, version, counter)
        return whole_to_its_end


def take(me: Actor, client: Client, rng: random.Random, count: int) -> Held:
    numbers = me.numbers(count, rng)
    level = rng.choice((Level.EVENTUAL, Level.EVENTUAL, Level.SESSION))
    return Held(me, client.pin_many([key_of(number) for number in numbers], deadline_ms=PIN_MS, level=level), numbers)


def pin_rounds(me: Actor, client: Client, rng: random.Random) -> None:
    """Several pins at a time, each looked at at several moments, given back in any order."""
    held: list[Held] = []
    while not me.ending:
        if len(held) < 4:
            held.append(take(me, client, rng, rng.randint(1, 8)))
        for one in rng.sample(held, min(2, len(held))):
            one.look()
        if len(held) > 1 and rng.random() < 0.6:
            held.pop(rng.randrange(len(held))).drop()
        if rng.random() < 0.1:
            time.sleep(rng.uniform(0, 0.02))
    for one in held:
        one.drop()


def get_rounds(me: Actor, client: Client, rng: random.Random) -> None:
    """Copies: whole or a miss, and one value per version."""
    while not me.ending:
        numbers = me.numbers(rng.randint(1, 12), rng)
        level = rng.choice((Level.EVENTUAL, Level.SESSION))
        for number, hit in zip(
            numbers, client.get_many([key_of(number) for number in numbers], deadline_ms=2000, level=level), strict=True
        ):
            if not isinstance(hit, Hit):
                continue
            me.add(Column.LOOKS)
            try:
                me.note(number, hit.version, whole(key_of(number), hit.data))
            except WrongBytes as error:
                me.find(f"a copy: {error}")


class Saver:
    """Saves through the same few buffers all the time."""

    def __init__(self, me: Actor, client: Client, rng: random.Random) -> None:
        self.me, self.client, self.rng = me, client, rng
        self.sizes: tuple[int, ...] = tuple(me.options.get("sizes", SIZES))
        self.buffers = [np.empty(max(self.sizes), np.uint8) for _ in range(8)]
        self.deadline_ms = int(me.options.get("deadline_ms", 5000))

    def batch(self, numbers: list[int]) -> list[tuple[bytes, np.ndarray[Any, Any]]]:
        """Items over the buffers, freshly written."""
        items = []
        for number, buffer in zip(numbers, self.buffers, strict=False):
            size = self.rng.choice(self.sizes)
            np.copyto(buffer[:size], make(key_of(number), self.me.counter(), size))
            items.append((key_of(number), buffer[:size]))
        return items

    def save(self, numbers: list[int]) -> None:
        items = self.batch(numbers)
        level = self.rng.choice((Level.EVENTUAL, Level.SESSION))
        if self.rng.random() < 0.3:
            outcomes = self.client.submit_put(items, level=level, deadline_ms=self.deadline_ms).result()
        else:
            outcomes = self.client.put_many(items, level=level, deadline_ms=self.deadline_ms)
        stored = sum(bool(outcome) for outcome in outcomes)
        self.me.add(Column.SAVES, stored)
        self.me.add(Column.LOST_SAVES, len(outcomes) - stored)

    def rounds(self) -> None:
        while not self.me.ending:
            numbers = self.me.numbers(self.rng.randint(1, len(self.buffers)), self.rng)
            if self.rng.random() < 0.06:
                self.client.delete_many([key_of(number) for number in numbers[:3]], deadline_ms=self.deadline_ms)
            self.save(numbers)


# -- roles -------------------------------------------------------------------------------------------------------------


def pinner(me: Actor) -> None:
    with me.client() as client:
        pin_rounds(me, client, me.rng)


def getter(me: Actor) -> None:
    with me.client() as client:
        get_rounds(me, client, me.rng)


def writer(me: Actor) -> None:
    with me.client() as client:
        Saver(me, client, me.rng).rounds()


def crowd(me: Actor) -> None:
    """Several threads in one client: all share its connections, its staging and its pins."""
    failures: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # carried over to the process, which reports it
            failures.append(error)

    with me.client() as client:
        chances = [random.Random(me.rng.random()) for _ in range(5)]
        bodies: list[Callable[[], None]] = [
            lambda: pin_rounds(me, client, chances[0]),
            lambda: pin_rounds(me, client, chances[1]),
            lambda: get_rounds(me, client, chances[2]),
            lambda: Saver(me, client, chances[3]).rounds(),
            lambda: Saver(me, client, chances[4]).rounds(),
        ]
        threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def hold(me: Actor, client: Client) -> list[Held]:
    """Saves blocks of its own and pins some of them, however fast others evict; then says HOLDING."""
    saver = Saver(me, client, me.rng)
    numbers = [PRIVATE + me.row * 1000 + n for n in range(len(saver.buffers))]
    held: list[Held] = []
    wanted = int(me.options.get("pins", 3))
    while len(held) < wanted and not me.ending:
        saver.save(numbers)
        pinned = client.pin_many([key_of(number) for number in numbers], deadline_ms=PIN_MS)
        one = Held(me, pinned, numbers)
        if one.blocks:
            held.append(one)
        else:
            one.drop()
    me.board.put(me.row, Column.HELD_BYTES, sum(one.bytes for one in held))
    me.state(State.HOLDING)
    return held


def keep(me: Actor, held: list[Held]) -> None:
    """Looks until released; then every pin must have been whole: a pin is not revoked while its process lives."""
    while not me.released:
        for one in held:
            one.look()
        time.sleep(me.rng.uniform(0, 0.03))
    for one in held:
        if not one.drop():
            me.find(f"a pin of {one.bytes} bytes ended although its process lived; {one.problems}")


def holder(me: Actor) -> None:
    with me.client() as client:
        keep(me, hold(me, client))


def parent(me: Actor) -> None:
    """Pins and forks. `child`: "works" with its own pins, is "idle", or is a program that got our sockets ("leak")."""
    with me.client() as client:
        held = hold(me, client)
        kind = me.options["child"]
        if kind == "leak":
            pid = _leak(client)
        else:
            pid = os.fork()
            if pid == 0:
                _forked(me, client, held, works=kind == "works")
        me.board.put(me.row, Column.CHILD, pid)
        keep(me, held)
        if kind != "leak":
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code:
                me.find(f"the forked child ended with {code}")


def _forked(me: Actor, client: Client, held: list[Held], *, works: bool) -> None:
    """The child's life: what it inherited stays right as long as the parent's pins do, what it pins is its own."""
    code = 1
    try:
        parent_pid = os.getppid()
        me.row += ROWS // 2
        end = time.monotonic() + ORPHAN_S
        while time.monotonic() < end and not me.ending and me.board.ordered(me.row - ROWS // 2) is not Order.RELEASE:
            inherited = [(key, at, view) for one in held for key, at, view in zip(
                one.keys, one.counters, one.pinned.views, strict=True) if view is not None and at]  # fmt: skip
            problem = ""
            try:
                for key, counter, view in inherited:
                    same(key, counter, view)
            except WrongBytes as error:
                problem = str(error)
            # A view of a parent that is gone, or that has given its pins back meanwhile, may say anything. A process
            # that dies loses its sockets a moment before its children learn of it.
            time.sleep(0.3 if problem else 0.01)
            alive = os.getppid() == parent_pid and me.board.ordered(me.row - ROWS // 2) is not Order.RELEASE
            if problem and alive and not me.ending:
                me.find(f"inherited: {problem}")
            if works:
                take(me, client, me.rng, 4).drop()
        code = 0
    finally:
        os._exit(code)


def _leak(client: Client) -> int:
    """Starts a program that holds copies of our connections, as one does that was forked behind Python's back."""
    for node in client._pool.nodes():
        for connections in node.idle.values():
            for connection in connections:
                os.set_inheritable(connection.link.fileno(), True)
    program = f"import time; time.sleep({ORPHAN_S})"
    return subprocess.Popen([sys.executable, "-S", "-c", program], close_fds=False).pid


def mortal(me: Actor) -> None:
    """Saves big blocks and kills itself in the middle of one, without a word."""

    def die() -> None:
        time.sleep(me.rng.uniform(0, 0.03))
        os.kill(os.getpid(), 9)

    with me.client() as client:
        saver = Saver(me, client, me.rng)
        saver.save(me.numbers(2, me.rng))  # connected, staging mapped: from here on death comes in the middle
        threading.Thread(target=die, daemon=True).start()
        while True:
            saver.save(me.numbers(4, me.rng))


def scribbler(me: Actor) -> None:
    """Writes over its staging while the node copies out of it and ever after. What is stored then is this client's own
    loss, but it must be one value: the checksum fits, and it stays as it is."""
    size, key = 256 << 10, key_of(PRIVATE + me.row * 1000)
    with me.client() as client:
        while not me.ending:
            _scribble(me, client, key, size)


def _scribble(me: Actor, client: Client, key: bytes, size: int) -> None:
    from emberkv.client.pool import SAVE
    from emberkv.errors import EmberError
    from emberkv.messages import PutFlag, PutItem, PutReply, PutRequest
    from emberkv.net import now_ns

    pool = client._pool
    deadline_ns = now_ns() + 10_000_000_000
    nodes = pool.candidates()
    if not nodes:
        time.sleep(0.01)
        return
    connection = pool.lend(nodes[0], SAVE, deadline_ns, fresh=True)
    assert connection.staging is not None
    offset = connection.staging.reserve(size)
    assert offset is not None
    room = connection.staging.data[offset : offset + size]
    values = [make(key, me.counter(), size) for _ in range(2)]
    np.copyto(room, values[0])
    item = PutItem(key, client._put_ids.take(1)[0], size, offset=offset)
    request = PutRequest([item], int(Level.SESSION), 5000, int(PutFlag.FRESH))
    try:
        request_id = connection.send(request, deadline_ns)
        for at in range(0, size, 4096):
            np.copyto(room[at : at + 4096], values[1][at : at + 4096])
        reply = connection.receive(PutReply, request_id, deadline_ns)
    except EmberError as error:
        pool.drop(nodes[0], connection, error)
        return
    if reply.outcomes[0]:
        me.add(Column.SAVES)
        with client.pin_many([key], deadline_ms=PIN_MS) as pinned:
            if pinned.reasons[0] is MissReason.CHECKSUM:
                me.find("an acknowledged block does not fit the checksum that the node took of it")
            view = pinned.views[0]
            before = b"" if view is None else bytes(view)
            room.fill(0)
            after = b"" if view is None else bytes(view)
            if pinned.unpin() and before != after:
                me.find("what a client does to its staging after the acknowledgement reaches the arena")
            me.add(Column.LOOKS, view is not None)
    connection.staging.release(offset)
    pool.give(nodes[0], connection)


ROLES: Final[dict[str, Callable[[Actor], None]]] = {
    role.__name__: role for role in (pinner, getter, writer, crowd, holder, parent, mortal, scribbler)
}
