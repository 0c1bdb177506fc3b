"""What clients asked and what they were told: the only thing about requests that the oracles believe.

Why it exists: an oracle must not trust the code that it judges. Bytes name the put that they belong to (`content`), so
a wrong byte is recognised, and a read is judged by which put it returned, not by what version the answer claims.
Laws: times are true time in nanoseconds, unless a name says local; a put is one put_id, however often it is tried.
Limits: payload is not kept; a run of some hundred requests takes some hundred kilobytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec
import xxhash

from emberkv.messages import BlockInfo
from emberkv.sim.lincheck import StrongOp
from emberkv.types import NO_VERSION, Level, PutOutcome, PutStatus, Version

SCOPE: Final = b"scope..1"
"""Scope of the workload's main namespace, which has no policy record; blocks of the other one expire."""
NEVER: Final = math.inf
"""The time of what has not happened."""
CONTENT_BYTES_MIN: Final = 24
"""Room for the number and one digest."""
FINISHED: Final = (PutStatus.STORED, PutStatus.ACCEPTED, PutStatus.QUEUED)
"""A put that ended so is over for its writer, and only fills from then on; UNKNOWN may still take effect."""


def content(key: bytes, number: int, length: int) -> bytes:
    """The bytes of put `number`: its number, then a digest of key and number, repeated to `length`."""
    stamp = number.to_bytes(8, "little")
    digest = xxhash.xxh3_128_digest(key + stamp)
    return (stamp + digest * (length // 16 + 1))[: max(length, CONTENT_BYTES_MIN)]


class Put(msgspec.Struct, gc=False):
    """One put_id: a value or a delete of one key, tried once or more."""

    number: int
    key: bytes
    put_id: bytes
    client: str
    delete: bool
    length: int
    invoked_ns: int
    """First attempt."""
    seen: Version = NO_VERSION
    """What its writer says it knew, in all attempts."""
    finished_ns: float = NEVER
    """When the first attempt was told STORED or ACCEPTED."""
    stored: Version = NO_VERSION
    """Version of a session acknowledgement; NO_VERSION without one."""
    stored_ns: float = NEVER
    copies: int = 0
    """Most copies that an acknowledgement named."""
    attempts: int = 0
    adrift: bool = False
    """An attempt was never answered: it may still be on its way and take effect at any time, so this put is never over
    whatever later attempts were told."""
    status: PutStatus | None = None
    """Of the last attempt that ended; None: none has."""

    @property
    def expires(self) -> bool:
        """Does it belong to the namespace whose blocks expire?"""
        return not self.key.startswith(SCOPE)

    @property
    def data(self) -> bytes:
        """Its bytes, made anew."""
        return b"" if self.delete else content(self.key, self.number, self.length)

    def told(self) -> str:
        """For people: what it is and how it ended."""
        end = "open" if self.status is None else self.status.name
        what = "delete" if self.delete else "put"
        return f"{what} #{self.number} by {self.client} ({end}{f' {tuple(self.stored)}' if self.stored.epoch else ''})"


class Request(msgspec.Struct, gc=False):
    """One put, delete or get of up to 128 keys at one node."""

    number: int
    client: str
    node: str
    life: int
    level: Level
    keys: list[bytes]
    deadline_ms: float
    invoked_ns: int
    local_ns: int
    """The node's clock at the call."""
    puts: list[Put]
    """Empty for a read."""
    fresh: bool = True
    min_copies: int = 1
    token: str = ""
    """Whose session it belongs to; empty: none."""
    floors: list[Version] = []
    returned_ns: float = NEVER
    local_returned_ns: float = NEVER
    outcomes: list[PutOutcome] | None = None
    """None while it is open, and when its process died first."""
    infos: list[BlockInfo] | None = None
    found: list[Put | None] = []
    """Per key of a read: whose bytes came. None at a miss, and at a hit whose bytes nobody put."""

    @property
    def read(self) -> bool:
        """A get, not a put or delete."""
        return not self.puts

    @property
    def died(self) -> bool:
        """It ended because its process did."""
        return self.returned_ns != NEVER and self.outcomes is None and self.infos is None

    def told(self) -> str:
        """For people."""
        what = "get" if self.read else "delete" if self.puts[0].delete else "put"
        return f"{self.level.name.lower()} {what} {self.number} of {self.client} at {self.node}"


Ended = Callable[[Request], None]


class Clocks(Protocol):
    """What a history needs of the cluster: true time, and each node's own."""

    @property
    def now(self) -> int:
        """True time, ns."""
        ...

    @property
    def processes(self) -> dict[str, Any]:
        """By node name; each has a `clock` and a number of `lives`."""
        ...


class History:
    """All requests of one run, in the order of their calls."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks
        self.requests: list[Request] = []
        self.open: dict[int, Request] = {}
        self.puts: list[Put] = []
        """Index = number."""
        self.by_key: dict[bytes, list[Put]] = {}
        self.by_id: dict[bytes, Put] = {}
        self.expiry_ms = 0
        """Of the blocks of the second namespace; 0: this run has none."""
        self.strong: list[StrongOp] = []
        """Requests of strong namespaces, as lincheck.py takes them."""
        self.ended: list[Ended] = []
        """Called with each request when it has ended and its outcome stands in it."""

    # -- calls ---------------------------------------------------------------------------------------------------

    def new_put(self, key: bytes, client: str, *, delete: bool, length: int) -> Put:
        """A put that was never tried before. Its put_id: 16 bytes of its client, then its number."""
        number = len(self.puts)
        put_id = client.encode().ljust(16, b".")[:16] + number.to_bytes(8, "big")
        length = 0 if delete else max(length, CONTENT_BYTES_MIN)
        put = Put(number, key, put_id, client, delete, length, self.clocks.now)
        self.puts.append(put)
        self.by_key.setdefault(key, []).append(put)
        self.by_id[put_id] = put
        return put

    def begin(
        self,
        client: str,
        node: str,
        level: Level,
        keys: list[bytes],
        deadline_ms: float,
        *,
        puts: Sequence[Put] = (),
        fresh: bool = True,
        min_copies: int = 1,
        token: str = "",
        floors: Sequence[Version] = (),
    ) -> Request:
        """A request is being called."""
        process, number = self.clocks.processes[node], len(self.requests)
        now, local = self.clocks.now, process.clock.now_ns()
        request = Request(number, client, node, process.lives, level, keys, deadline_ms, now, local, list(puts))
        request.fresh, request.min_copies, request.token, request.floors = fresh, min_copies, token, list(floors)
        for put in request.puts:
            put.attempts += 1
        self.requests.append(request)
        self.open[number] = request
        return request

    # -- returns -------------------------------------------------------------------------------------------------

    def put_ended(self, request: Request, outcomes: list[PutOutcome] | None) -> None:
        """`outcomes` None: its process died first, so its puts may or may not take effect."""
        now = self.clocks.now
        request.outcomes = outcomes
        for put in request.puts if outcomes is None else ():
            put.adrift, put.finished_ns = True, NEVER
        for put, outcome in zip(request.puts, outcomes or (), strict=outcomes is not None):
            put.status = outcome.status
            if outcome.status in FINISHED and put.finished_ns == NEVER and not put.adrift:
                put.finished_ns = now
            if outcome.status is PutStatus.STORED:
                put.stored = max(put.stored, outcome.version)
                put.stored_ns = min(put.stored_ns, now)
                put.copies = max(put.copies, outcome.copies)
        self._end(request)

    def get_ended(self, request: Request, infos: list[BlockInfo] | None, datas: Sequence[bytes | None]) -> None:
        """`datas[i]` is None at a miss. `infos` None: its process died first."""
        request.infos = infos
        if infos is not None:
            request.found = [self.put_of(key, data) for key, data in zip(request.keys, datas, strict=True)]
        self._end(request)

    def _end(self, request: Request) -> None:
        request.returned_ns = self.clocks.now
        request.local_returned_ns = self.clocks.processes[request.node].clock.now_ns()
        del self.open[request.number]
        for ended in self.ended:
            ended(request)

    # -- questions -----------------------------------------------------------------------------------------------

    def put_of(self, key: bytes, data: bytes | None) -> Put | None:
        """Whose bytes are these? None: nobody's under this key, or there are none."""
        if data is None or len(data) < CONTENT_BYTES_MIN:
            return None
        number = int.from_bytes(data[:8], "little")
        if number >= len(self.puts):
            return None
        put = self.puts[number]
        right = put.key == key and not put.delete and put.length == len(data) and put.data == data
        return put if right else None
