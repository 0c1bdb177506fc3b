"""A small node for tests of the client: one process, no replication, faults on demand.

It speaks the contract over both links and keeps blocks in a real sealed arena. `faults` are read for each request.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field

from emberkv.messages import (
    BlockInfo,
    ErrorFrame,
    ExistsReply,
    ExistsRequest,
    GetFlag,
    GetReply,
    GetRequest,
    Hello,
    MapReply,
    MapRequest,
    Message,
    NodeAddress,
    PutFlag,
    PutItem,
    PutReply,
    PutRequest,
    ShardOwner,
    StatusReply,
    StatusRequest,
    Unpin,
    Welcome,
)
from emberkv.net import LinkClosed
from emberkv.net.local import LocalLink, LocalListener
from emberkv.net.tcp import TcpListener, serve_handshake
from emberkv.net.tcp_link import TcpLink
from emberkv.storage.dram import DramTier
from emberkv.storage.staging import StagingArea
from emberkv.types import (
    DEFAULT_NAMESPACE,
    NO_VERSION,
    SHARDS,
    MissReason,
    Namespace,
    PutOutcome,
    PutStatus,
    RefuseReason,
    Version,
    checksum,
    round_up,
)


@dataclass
class Faults:
    """What to do wrong. Counters say how often; they are used up by requests."""

    get_delay_s: float = 0.0
    put_delay_s: float = 0.0
    frozen: bool = False
    """Answers nothing at all, like a stopped process, but keeps its connections."""
    drop_before_put: int = 0
    drop_after_put: int = 0
    drop_get: int = 0
    flip: set[bytes] = field(default_factory=set)
    """Keys whose payload is sent with one wrong byte (TCP)."""
    cut_payload: int = 0
    """Sends only half of a payload, then closes (TCP)."""
    stall_payload: int = 0
    swap_puts: int = 0
    """Holds the answer of a put back until the next one was answered (local)."""
    refuse: str = ""
    ignore_floors: bool = False
    """Serves what is older than a session has seen."""
    reason_of: dict[bytes, BlockInfo] = field(default_factory=dict)
    """Keys that a get answers in this way, whatever is stored."""


class StandIn:
    """A node at `path` (Unix socket) and a TCP port. `peers` may be set later to make a map of several."""

    def __init__(
        self,
        name: str,
        path: str = "",
        *,
        tcp: bool = True,
        arena_bytes: int = 128 << 20,
        pin_bytes_max: int = 0,
        cluster_id: str = "test",
        namespace: Namespace = DEFAULT_NAMESPACE,
    ) -> None:
        self.name, self.path, self.cluster_id, self.namespace = name, path, cluster_id, namespace
        self.incarnation = os.urandom(16)
        self.faults = Faults()
        self.tier = DramTier(arena_bytes)
        self.arena_bytes = arena_bytes
        self.pin_bytes_max = pin_bytes_max or arena_bytes // 8
        self.blocks: dict[bytes, tuple[object, bytes, Version, bytes]] = {}
        self.pins: dict[int, int] = {}
        self.requests: list[Message] = []
        self.peers: list[StandIn] = [self]
        self.revision = 1
        self.connections = 0
        self._lock = threading.RLock()
        self._seq = 0
        self._pin = 0
        self.local_listener = LocalListener(path, self._serve_local) if path else None
        self.tcp_listener = TcpListener("127.0.0.1:0", self._serve_tcp) if tcp else None

    @property
    def unix(self) -> str:
        return f"unix:{self.path}"

    @property
    def tcp(self) -> str:
        return f"tcp:{self.tcp_address}"

    @property
    def tcp_address(self) -> str:
        return self.tcp_listener.address if self.tcp_listener else ""

    def close(self) -> None:
        if self.local_listener:
            self.local_listener.close()
        if self.tcp_listener:
            self.tcp_listener.stop()

    # -- answers ------------------------------------------------------------------------------------------------------

    def _welcome(self, hello: Hello, staging: int = 0, local: bool = False) -> Welcome | ErrorFrame:
        while self.faults.frozen:
            time.sleep(0.005)
        if self.faults.refuse:
            return ErrorFrame(self.faults.refuse, True)
        if hello.cluster_id and hello.cluster_id != self.cluster_id:
            return ErrorFrame(f"this is cluster {self.cluster_id}, not {hello.cluster_id}", True)
        self.connections += 1
        return Welcome(
            hello.wire_max,
            self.cluster_id,
            self.name,
            self.incarnation,
            self.namespace,
            self.arena_bytes if local else 0,
            staging,
            self.pin_bytes_max if local else 0,
        )

    def map(self) -> MapReply:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            host = file.read().strip()
        nodes = tuple(NodeAddress(p.name, p.tcp_address, p.path, host) for p in self.peers)
        names = [p.name for p in self.peers]
        owners = []
        for shard in range(SHARDS):
            order = tuple(names[shard % len(names) :] + names[: shard % len(names)])
            owners.append(ShardOwner(order[0], 1, 1, order[:2], order[:2]))
        return MapReply(self.revision, nodes, tuple(owners))

    def _find_all(self, request: GetRequest) -> list[BlockInfo]:
        floors = request.floors or [NO_VERSION] * len(request.keys)
        return [self._find(key, floor) for key, floor in zip(request.keys, floors, strict=True)]

    def _find(self, key: bytes, floor: Version = NO_VERSION) -> BlockInfo:
        if key in self.faults.reason_of:
            return self.faults.reason_of[key]
        found = self.blocks.get(key)
        if found is None:
            return BlockInfo(MissReason.ABSENT)
        slot, digest, version, _ = found
        if version < floor and not self.faults.ignore_floors:
            return BlockInfo(MissReason.BEHIND, version)
        return BlockInfo(0, version, slot.length, digest, slot.offset)  # type: ignore[attr-defined]

    def _pinned(self, request: GetRequest, mine: dict[int, int]) -> GetReply:
        infos, held = [], sum(mine.values())
        size = 0
        for found in self._find_all(request):
            info = found
            if not info.reason:
                room = round_up(info.length)
                if held + size + room > self.pin_bytes_max:
                    info = BlockInfo(MissReason.QUOTA)
                else:
                    size += room
            infos.append(info)
        if not size:
            return GetReply(infos, 0)
        self._pin += 1
        mine[self._pin] = size
        return GetReply(infos, self._pin)

    def _put(self, item: PutItem, data: bytes | memoryview, request: PutRequest) -> PutOutcome:
        found = self.blocks.get(item.key)
        if request.delete:
            if found:
                self.tier.release(self.blocks.pop(item.key)[0])  # type: ignore[arg-type]
            self._seq += 1
            return PutOutcome(PutStatus.STORED, Version(1, self._seq), 1)
        digest = checksum(data)
        if item.checksum != bytes(16) and item.checksum != digest:
            return PutOutcome(PutStatus.REFUSED, reason=RefuseReason.CHECKSUM)
        if found and not request.flags & PutFlag.FRESH:
            if found[3] == item.put_id or found[1] == digest:
                return PutOutcome(PutStatus.STORED, found[2], 1)
            return PutOutcome(PutStatus.SUPERSEDED, found[2])
        if found and not self.pins:  # a block that somebody reads is left behind instead
            self.tier.release(self.blocks.pop(item.key)[0])  # type: ignore[arg-type]
        slot = self.tier.reserve(item.length)
        if slot is None:
            return PutOutcome(PutStatus.REFUSED, reason=RefuseReason.NO_SPACE)
        self.tier.view(slot)[:] = data
        self._seq += 1
        version = Version(1, self._seq)
        self.blocks[item.key] = (slot, digest, version, item.put_id)
        return PutOutcome(PutStatus.STORED if request.level else PutStatus.ACCEPTED, version, 1)

    def _plain(self, message: Message) -> Message | None:
        if isinstance(message, ExistsRequest):
            return ExistsReply([self._find(key).reason for key in message.keys])
        if isinstance(message, MapRequest):
            return self.map()
        if isinstance(message, StatusRequest):
            return StatusReply(json.dumps({"node": self.name}).encode())
        return None

    def _wait(self, message: Message) -> None:
        self.requests.append(message)
        while self.faults.frozen:
            time.sleep(0.005)
        if isinstance(message, GetRequest) and self.faults.get_delay_s:
            time.sleep(self.faults.get_delay_s)
        if isinstance(message, PutRequest) and self.faults.put_delay_s:
            time.sleep(self.faults.put_delay_s)

    def _use(self, fault: str) -> bool:
        count = getattr(self.faults, fault)
        if count:
            setattr(self.faults, fault, count - 1)
        return bool(count)

    # -- links --------------------------------------------------------------------------------------------------------

    def _serve_local(self, link: LocalLink) -> None:
        _, hello, _ = link.recv()
        assert isinstance(hello, Hello)
        welcome = self._welcome(hello, hello.want_staging_bytes, local=True)
        if isinstance(welcome, ErrorFrame):
            link.send(welcome, 0)
            return
        staging = StagingArea(hello.want_staging_bytes) if hello.want_staging_bytes else None
        link.send(welcome, 0, [self.tier.fd, staging.fd] if staging else [self.tier.fd])
        mine: dict[int, int] = {}
        held: tuple[Message, int] | None = None
        try:
            while True:
                header, message, _ = link.recv()
                self._wait(message)
                if isinstance(message, Unpin):
                    with self._lock:
                        for pin in message.pins:
                            self.pins.pop(pin, None)
                            mine.pop(pin, None)
                    continue
                if isinstance(message, GetRequest):
                    if self._use("drop_get"):
                        return
                    with self._lock:
                        reply: Message = self._pinned(message, mine)
                        self.pins.update(mine)
                elif isinstance(message, PutRequest):
                    if self._use("drop_before_put"):
                        return
                    with self._lock:
                        views = [staging.view(i.offset, i.length) if staging else b"" for i in message.items]
                        reply = PutReply([self._put(i, v, message) for i, v in zip(message.items, views, strict=True)])
                    if self._use("drop_after_put"):
                        return
                    if self._use("swap_puts"):
                        held = reply, header.request_id
                        continue
                else:
                    answer = self._plain(message)
                    assert answer is not None
                    reply = answer
                link.send(reply, header.request_id)
                if held:
                    link.send(*held)
                    held = None
        except LinkClosed:
            pass
        finally:
            with self._lock:
                for pin in mine:
                    self.pins.pop(pin, None)
            if staging:
                staging.close()

    def _serve_tcp(self, link: TcpLink) -> None:
        if serve_handshake(link, self._welcome) is None:
            return
        while True:
            header, message = link.recv()
            payload = memoryview(bytearray(header.payload_len))
            if header.payload_len:
                link.recv_payload([payload])
            self._wait(message)
            if isinstance(message, GetRequest):
                if self._use("drop_get"):
                    return
                if not self._send_blocks(link, header.request_id, message):
                    return
                continue
            if isinstance(message, PutRequest):
                if self._use("drop_before_put"):
                    return
                with self._lock:
                    outcomes, at = [], 0
                    for item in message.items:
                        outcomes.append(self._put(item, payload[at : at + item.length], message))
                        at += item.length
                if self._use("drop_after_put"):
                    return
                link.send(PutReply(outcomes), header.request_id)
                continue
            answer = self._plain(message)
            assert answer is not None
            link.send(answer, header.request_id)

    def _send_blocks(self, link: TcpLink, request_id: int, message: GetRequest) -> bool:
        with self._lock:
            infos = self._find_all(message)
            assert not message.flags & GetFlag.PIN
            payload = []
            for key, info in zip(message.keys, infos, strict=True):
                if info.reason:
                    continue
                data = bytearray(self.tier.view(self.blocks[key][0]))  # type: ignore[arg-type]
                if key in self.faults.flip:
                    data[len(data) // 2] ^= 1
                payload.append(memoryview(data))
        if self._use("cut_payload"):
            self._send_half(link, request_id, infos, payload)
            return False
        if self._use("stall_payload"):
            self._send_half(link, request_id, infos, payload)
            time.sleep(3)
            return False
        link.send(GetReply(infos), request_id, payload)
        return True

    def _send_half(self, link: TcpLink, request_id: int, infos: list[BlockInfo], payload: list[memoryview]) -> None:
        from emberkv.wire.codec import encode

        frame = encode(GetReply(infos), request_id, sum(len(p) for p in payload)) + b"".join(payload)
        link._socket.sendall(frame[: len(frame) // 2])
