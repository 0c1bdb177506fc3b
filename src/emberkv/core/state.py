"""What all promises of one node share: settings, the directory, the view, counters and the effects of this step.

Limits: bounds that keep memory finite stand here, each with its reason.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

import msgspec

from emberkv.core.directory import Directory
from emberkv.core.effects import Effect, Note, Send
from emberkv.core.view import ClusterView
from emberkv.errors import ConfigError
from emberkv.messages import Message, NodeAddress
from emberkv.ports import Slot, Tier
from emberkv.types import BLOCK_BYTES_MAX, NO_VERSION, SCOPE_BYTES, SHARDS, Version

HINTS_MAX = 65536
"""Waiting hints; beyond it the oldest is dropped and counted (P8)."""
PUTS_REMEMBERED_MAX = 65536
"""Puts whose late first send is known for a replay, about 10 MB: minutes of puts at the rates of one node."""
OPS_MAX = 4096
"""Reads and writes in progress; beyond it new ones are refused, since their callers have long timed out."""
ANSWER_OVERDUE_LEASES = 4
"""A peer that has not answered a stream message for so many leases is taken to have lost it; repair compares then."""
SHARDS_PER_COMMIT = 120
"""Owner records of one takeover commit: under the coordinator's bound of 128, with room for the guards."""
SEND_BYTES_MAX = 64 << 20
"""Payload of one stream message; keeps one message from holding up heartbeats of the stream for long."""


class Settings(msgspec.Struct, frozen=True):
    """Fixed for the life of the process; the times follow from the failover budget (core/budget.py)."""

    name: str
    incarnation: bytes
    address: NodeAddress
    members: tuple[str, ...]
    """Nodes expected at the first start; others may join later."""
    generation: int
    factor: int = 2
    ttl_ns: int = 2_000_000_000
    drift: float = 0.0
    margin_ns: int = 300_000_000
    heartbeat_every_ns: int = 0
    """Renewal period that the operator states; 0: ttl / 3."""
    commit_ns: int = 50_000_000
    """c of the budget: coordinator commit, p99.9."""
    hint_bytes_max: int = 256 << 20
    hint_age_max_ns: int = 900_000_000_000
    """A hint that waited longer is dropped and counted: its key may have been deleted and that forgotten by now."""
    tombstone_retention_ns: int = 3_600_000_000_000
    """How long a delete is remembered; a node that was away for longer drops what it cannot prove to be alive."""
    block_bytes_max: int = BLOCK_BYTES_MAX
    """Longest block that fits into a slab of this node's arena."""
    nvme: bool = False
    """This node has a disk for blocks."""
    nvme_depth_min: int = 0
    """Blocks nearer to the head of their chain are kept in memory only."""
    previous_incarnation: bytes = b""
    """Read from the locked data directory: proof that the process that wrote it is gone."""

    @property
    def heartbeat_ns(self) -> int:
        """Renewal period: three of them, each late by j (m >= 3j), and a commit fit into a ttl, or what the operator
        states. Otherwise the third renewal of a healthy node could race its expiry (docs/models/outage.pml)."""
        return self.heartbeat_every_ns or max(self.ttl_ns - self.commit_ns - self.margin_ns, self.ttl_ns // 2) // 3

    @property
    def grace_ns(self) -> int:
        """After a coordinator outage nobody is expired before this much of own successful commits: a whole period of
        the others, their lateness, and two commits."""
        return self.heartbeat_ns + self.margin_ns + 2 * self.commit_ns


class State:
    """Shared by the promises; owned by Replica."""

    def __init__(self, settings: Settings, tier: Tier) -> None:
        self.settings = settings
        self.directory = Directory(tier, settings.block_bytes_max)
        self.view = ClusterView(settings.name)
        self.counters: Counter[str] = Counter()
        self.out: list[Effect] = []
        self.now_ns = 0
        self.lease_open: Callable[[], bool] = lambda: False
        """Is this node's lease open now? Set by the lease."""
        self.wall_ms = 0
        """Wall clock: that of the last tick and what has passed since. For the expiry of blocks and nothing else."""
        self.wall_tick_ms = self.wall_tick_ns = 0
        self._puts: OrderedDict[bytes, None] = OrderedDict()
        self.disk_floors: list[Version] = [NO_VERSION] * SHARDS
        """Per shard: copies on this node's disk at or below it are not believed: their end may have been missed."""
        self.remembered_floors: list[Version] = [NO_VERSION] * SHARDS
        """Floors of the directory as this node's last life left them: deletes up to there are known on its disk."""
        self.peers_up: set[str] = set()
        self.review: set[int] = set()
        """Shards of this node whose owner record may have to change: failover looks at these alone."""
        self.closed: dict[int, int] = {}
        """Shards whose gate this node keeps closed while it hands them over (failover.py) -> revision of the record."""
        self.given: set[int] = set()
        """Of `closed`, those whose commit has left: from then on another may speak for them."""
        self._next_request = 1 << 31
        if settings.hint_age_max_ns >= settings.tombstone_retention_ns:
            raise ConfigError("hint_age_max must be shorter than tombstone_retention, or a hint undoes a delete")
        """Requests and commits of the core count from 2**31 up; ops of the runtime lie below."""

    def factor_of(self, key: bytes) -> int:
        """Copies that the namespace of an internal key wants; never more than the shard has replicas."""
        policy = self.view.policies.get(key[:SCOPE_BYTES])
        return min(policy.factor, self.settings.factor) if policy is not None else self.settings.factor

    def expiry_of(self, key: bytes) -> int:
        """Wall-clock milliseconds at which a block stamped now expires; 0: never."""
        policy = self.view.policies.get(key[:SCOPE_BYTES])
        return self.wall_ms + policy.expiry_ms if policy is not None and policy.expiry_ms else 0

    def remember_put(self, put_id: bytes) -> None:
        """This put has been decided here. Should its first send still arrive (it was held up on its way, and its writer
        has tried again elsewhere), it is a replay."""
        self._puts[put_id] = None
        if len(self._puts) > PUTS_REMEMBERED_MAX:
            self._puts.popitem(last=False)

    def is_decided(self, put_id: bytes) -> bool:
        """Has this put been decided here before?"""
        return put_id in self._puts

    def request_id(self) -> int:
        """A number that no other request or commit of this core carries at the same time."""
        self._next_request = self._next_request + 1 if self._next_request < (1 << 32) - 1 else 1 << 31
        return self._next_request

    def send(self, peer: str, message: Message, slots: list[Slot]) -> int:
        """Queues a message to a peer, taking one more reference of each slot; returns its request id."""
        for slot in slots:
            slot.refs += 1
        request = self.request_id()
        self.out.append(Send(peer, request, message, slots))
        return request

    def note(self, text: str, *, alarm: bool = False) -> None:
        """One line for the operator."""
        self.out.append(Note(text, alarm))
