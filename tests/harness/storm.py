"""Random faults and requests on a small world, and the oracles that judge every step (they know nothing of the core's
own bookkeeping beyond what it holds and says)."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

from emberkv.core import effects as fx
from emberkv.messages import BlockInfo, Replicate
from emberkv.types import NO_VERSION, SHARDS, MissReason, PutOutcome, PutStatus, Version, shard_of
from harness.world import MS, Node, World, key_of

FAULTS = ("kill", "restart", "pause", "wake", "cut", "cut", "heal", "heal", "isolate", "unknown", "flip", "drain")
CLIENTS = 3


class Client:
    """A session: what it has seen of each key, and must never read below."""

    def __init__(self) -> None:
        self.floors: dict[bytes, Version] = {}

    def saw(self, key: bytes, version: Version) -> None:
        self.floors[key] = max(self.floors.get(key, NO_VERSION), version)

    def token(self, keys: list[bytes]) -> list[Version]:
        return [self.floors.get(key, NO_VERSION) for key in keys]


class Read(NamedTuple):
    """A read in progress; `client` is None for one without a token."""

    keys: list[bytes]
    floors: list[Version]
    client: Client | None


class Written(NamedTuple):
    """A put in progress."""

    keys: list[bytes]
    client: Client


class Storm:
    """One seed is one run."""

    def __init__(
        self,
        seed: int,
        *,
        nodes: int = 3,
        keys: int = 10,
        faults: bool = True,
        arena_slots: int = 256,
        fault_share: float = 0.06,
        flips: bool = True,
        forgetful: bool = False,
    ) -> None:
        """`forgetful`: deletes are remembered for a moment only, so that floors decide what is gone."""
        memory = {"tombstone_retention_ns": 400 * MS, "hint_age_max_ns": 300 * MS} if forgetful else {}
        self.world = World(
            "abcde"[:nodes],
            seed,
            account_every=23,
            arena_bytes=arena_slots * 4096,
            factor=2 if seed % 3 else 3,
            **memory,
        )
        self.rng = self.world.rng
        self.fault_share = fault_share if faults else 0.0
        self.keys = [key_of(number) for number in range(keys)]
        self.values: dict[bytes, set[bytes]] = defaultdict(set)
        self.contents: dict[tuple[int, Version], tuple[bytes, bytes]] = {}
        self.clients = [Client() for _ in range(CLIENTS)]
        self.gets: dict[int, Read] = {}
        self.puts: dict[int, Written] = {}
        self.number = 0
        self.flips = flips
        self.exact = arena_slots > 3 * keys
        """Nothing was evicted and no bad copy dropped, so every replica must hold every block."""
        self.hits = self.stored = 0
        self.world.observers.append(self.observe)

    # -- oracles -------------------------------------------------------------------------------------------------

    def observe(self, node: Node, effect: fx.Effect) -> None:
        if isinstance(effect, fx.Send) and isinstance(effect.message, Replicate):
            for item in effect.message.items:
                if item.skip:
                    continue  # without bytes, and often without their checksum
                self.one_content(item.key, item.version, item.checksum)
        elif isinstance(effect, fx.PutDone) and any(o.status is PutStatus.STORED for o in effect.outcomes):
            self.world.check_gates()

    def one_content(self, key: bytes, version: Version, digest: bytes) -> None:
        """(shard, version) names one (key, checksum) for ever."""
        known = self.contents.setdefault((shard_of(key), version), (key, digest))
        assert known == (key, digest), f"version {version} names two contents"

    def check_results(self) -> None:
        world = self.world
        for op in [op for op in self.gets if op in world.results]:
            self.check_read(self.gets.pop(op), world.results.pop(op))
        for op in [op for op in self.puts if op in world.results]:
            written, outcomes = self.puts.pop(op), world.results.pop(op)
            if outcomes != "aborted":
                self.check_written(written, outcomes)
        slack = 3 * world.tick_ms * MS
        for op, (deadline, name) in list(world.asked.items()):
            node = world.nodes[name]
            if op in self.gets or op in self.puts:
                running = node.alive and not node.paused and op in node.waiting
                if not running:
                    if not node.alive or op not in node.waiting:
                        del world.asked[op]  # its process died
                        self.gets.pop(op, None)
                        self.puts.pop(op, None)
                elif node.running_since + slack < world.now:
                    assert world.now <= deadline + slack, f"operation {op} at {name} outlived its deadline"

    def check_read(self, read: Read, found: list[tuple[BlockInfo, bytes | None]]) -> None:
        for key, floor, (info, data) in zip(read.keys, read.floors, found, strict=True):
            if info.reason == MissReason.NONE:
                assert data in self.values[key], "a get returned bytes that nobody put under that key"
                self.hits += 1
            else:
                assert data is None
                assert info.reason != MissReason.CURRENT, "what nodes say to each other reached a client"
            if info.reason in (MissReason.NONE, MissReason.DELETED) and read.client is not None:
                assert info.version >= floor, f"a session that saw {floor} was served {info.version}"
                assert info.version != NO_VERSION, "a session was served a block that no primary has met"
                read.client.saw(key, info.version)

    def check_written(self, written: Written, outcomes: list[PutOutcome]) -> None:
        assert len(outcomes) == len(written.keys)
        for key, outcome in zip(written.keys, outcomes, strict=True):
            if outcome.status is PutStatus.STORED:
                self.stored += 1
                written.client.saw(key, outcome.version)

    # -- what happens --------------------------------------------------------------------------------------------

    def request(self) -> None:
        world, rng = self.world, self.rng
        name = rng.choice(world.names)
        node = world.nodes[name]
        if not node.alive or node.paused:
            return
        keys = rng.sample(self.keys, rng.randint(1, min(4, len(self.keys))))
        if rng.random() < 0.5:
            client = rng.choice(self.clients) if rng.random() < 0.6 else None
            floors = client.token(keys) if client is not None else []
            op = world.get(name, keys, session=client is not None, verify=True, floors=floors,
                           deadline_ms=rng.choice([5, 100, 300]))  # fmt: skip
            self.gets[op] = Read(keys, floors or [NO_VERSION] * len(keys), client)
            return
        delete = rng.random() < 0.1
        datas = []
        for key in keys:
            self.number += 1
            data = b"%d " % self.number * rng.randint(1, 40)
            datas.append(data)
            if not delete:
                self.values[key].add(data)
        op = world.put(name, keys, datas, session=rng.random() < 0.6, fresh=rng.random() < 0.8, delete=delete,
                       min_copies=rng.choice([1, 1, 2]), deadline_ms=rng.choice([50, 300, 1000]),
                       abort=not delete and rng.random() < 0.05)  # fmt: skip
        self.puts[op] = Written(keys, rng.choice(self.clients))

    def fault(self) -> None:
        world, rng = self.world, self.rng
        name = rng.choice(world.names)
        node = world.nodes[name]
        kind = rng.choice(FAULTS)
        if kind == "kill" and sum(n.alive for n in world.nodes.values()) > 1:
            world.kill(name)
        elif kind == "restart":
            world.restart(name, proof=rng.random() < 0.7)
        elif kind == "pause" and node.alive:
            world.pause(name)
        elif kind == "wake" and node.alive and node.paused:
            node.running_since = world.now
            world.wake(name)
        elif kind == "cut":
            other = rng.choice(world.names)
            if other != name:
                world.cut(name, other)
        elif kind == "isolate":
            world.isolate_coordinator(name)
        elif kind == "unknown":
            world.unknown_share = rng.choice([0.0, 0.2, 0.5])
        elif kind == "drain" and node.alive:
            world.undrain(name) if rng.random() < 0.4 else world.drain(name)
        elif kind == "flip" and node.alive and self.flips:
            self.flip(node)
        elif kind == "heal":
            self.heal()

    def flip(self, node: Node) -> None:
        """A memory cell fails."""
        tables = node.core.state.directory.shards
        # Bytes that a reader has verified already are its own; nobody could see a flip after that.
        entries = [e for table in tables for e in table.values() if e.slot and e.length and e.slot.refs == 1]
        if entries:
            self.exact = False
            place = node.tier.bytes[self.rng.choice(entries).slot.offset]
            place[self.rng.randrange(len(place))] ^= 1 + self.rng.randrange(255)

    def heal(self) -> None:
        for node in self.world.nodes.values():
            node.running_since = self.world.now
        self.world.heal()

    def run(self, duration_ms: float = 4000) -> None:
        """Phase one: anything may happen, nothing may be wrong."""
        world, rng = self.world, self.rng
        for node in world.nodes.values():
            node.running_since = world.now
        end = world.now + int(duration_ms * MS)
        while world.now < end:
            world.run_ms(rng.choice([0.5, 2, 10, 60]))
            for _ in range(rng.randint(0, 3)):
                self.request()
            if rng.random() < self.fault_share:
                self.fault()
            self.check_results()
        world.check_all()

    def finish(self, quiet_ms: float = 6000) -> None:
        """Phase two: everything is mended; the cluster must come to rest, with equal replicas."""
        world = self.world
        self.heal()
        for name, node in world.nodes.items():
            if not node.alive:
                world.restart(name)
                node.running_since = world.now
        world.run_ms(quiet_ms)
        self.check_results()
        assert not self.gets, "reads are still open"
        assert not self.puts, "puts are still open"
        world.check_all()
        assert world.settled(), "a shard has no primary"
        for name, node in world.nodes.items():
            assert not node.core.put.hints.count(), f"{name}: hints wait although everything is reachable"
            assert not node.core.put.ops
            assert not node.core.reads.ops
            assert not node.core.put.stream.flights, f"{name}: stream messages are unanswered"
            assert not any(node.held.values()), f"{name}: references are held by nobody"
            assert node.core.put.repair.lag() == 0, f"{name}: repair never ends"
            assert not node.core.handover.leaving, f"{name}: a hand-over never ends"
        self.equal_vectors()
        self.equal_replicas()

    def equal_vectors(self) -> None:
        """All replicas of a shard have processed the same writes, and no shard is left on a node that drains."""
        world = self.world
        for shard in range(SHARDS):
            view = world.nodes[world.primary(shard)].core.state.view
            replicas = view.owners[shard].replicas
            found = {name: world.nodes[name].core.put.stream.vector(shard).spans() for name in replicas}
            assert len({tuple(spans) for spans in found.values()}) == 1, f"shard {shard} at rest: {found}"
            draining = {name for name in view.live_nodes() if view.is_draining(name)}
            if draining < set(view.live_nodes()):
                assert not draining.intersection(replicas), (
                    f"shard {shard}: {view.owners[shard]} while {draining} drain"
                )

    def equal_replicas(self) -> None:
        world = self.world
        for key in self.keys:
            shard = shard_of(key)
            owner = world.nodes[world.primary(shard)].core.state.view.owners[shard]
            assert set(owner.in_sync) == set(owner.replicas), f"shard {shard}: {owner} is quiet and not in sync"
            found: dict[str, Any] = {}
            for name in owner.replicas:
                directory = world.nodes[name].core.state.directory
                entry = directory.get(key)
                if entry is not None:
                    assert entry.version != NO_VERSION
                    found[name] = (entry.version, entry.state, entry.checksum)
                    self.one_content(key, entry.version, entry.checksum)
                elif key in directory.evicted:
                    found[name] = None
                else:
                    found[name] = "missing"
            if not self.exact:
                found = {name: value for name, value in found.items() if value != "missing"}
            held = {value for value in found.values() if value is not None}
            assert len(held) <= 1, f"shard {shard} after healing: {found}"


def run_storm(seed: int, *, duration_ms: float = 4000, quiet_ms: float = 6000, **options: Any) -> Storm:
    storm = Storm(seed, **options)
    storm.run(duration_ms)
    storm.finish(quiet_ms)
    return storm
