"""Sessions: what a client has seen is the least that it is shown, at whatever node, in whatever process.

What needs faults on demand runs against the stand-in; the promises run against node processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from emberkv.cli.cluster import LocalCluster
from emberkv.client import AsyncClient, Client, PutBlock, Session, SessionToken
from emberkv.errors import ConfigError
from emberkv.messages import (
    WIRE_VERSION,
    BlockInfo,
    GetFlag,
    GetReply,
    GetRequest,
    Hello,
    PutItem,
    PutRequest,
    Role,
)
from emberkv.net import LinkClosed
from emberkv.net.tcp import connect
from emberkv.net.tcp_link import TcpLink
from emberkv.types import (
    NO_VERSION,
    Hit,
    Level,
    Miss,
    MissReason,
    Namespace,
    PutOutcome,
    PutStatus,
    Version,
    scope_of,
    shard_of,
)
from standin import StandIn

SCOPE = scope_of("default", 1)
FAR = Version(1, 1_000_000)
"""Later than anything that a stand-in stamps in these tests."""


@pytest.fixture
def make() -> Iterator[Callable[..., StandIn]]:
    nodes: list[StandIn] = []
    with tempfile.TemporaryDirectory(prefix="ekv-") as folder:

        def build(name: str = "a", *, local: bool = True, **options: object) -> StandIn:
            node = StandIn(name, f"{folder}/{name}.sock" if local else "", **options)  # type: ignore[arg-type]
            nodes.append(node)
            return node

        yield build
        for node in nodes:
            node.close()


def keys_of(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


def store(node: StandIn, key: bytes, value: bytes, seq: int) -> None:
    """A block that this node has under version (1, seq)."""
    node._put(PutItem(key, bytes(24), len(value)), value, PutRequest([]))
    slot, digest, _, put_id = node.blocks[key]
    node.blocks[key] = (slot, digest, Version(1, seq), put_id)


def gets(node: StandIn) -> list[GetRequest]:
    return [request for request in node.requests if isinstance(request, GetRequest)]


def reaching(node: StandIn, local: bool, **options: object) -> Client:
    return Client(node.unix if local else node.tcp, prefer_local=local, **options)  # type: ignore[arg-type]


def wait_for(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "condition did not come true"
        time.sleep(0.02)


# -- what travels ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [True, False])
def test_what_a_session_stored_is_the_floor_of_its_next_get(make: Callable[..., StandIn], local: bool) -> None:
    node = make(local=local)
    with reaching(node, local) as client:
        session = client.session()
        first, second, unseen = keys_of(3)
        outcomes = session.put_many([(first, b"one"), (second, b"two")])
        assert [outcome.status for outcome in outcomes] == [PutStatus.STORED] * 2
        assert [session.token.floor(SCOPE + key) for key in (first, second)] == [o.version for o in outcomes]
        found = session.get_many([second, unseen, first])
        assert [bool(hit) for hit in found] == [True, False, True]
        (request,) = gets(node)
        assert request.flags & GetFlag.FLOORS
        assert request.level == Level.SESSION
        assert request.floors == [outcomes[1].version, NO_VERSION, outcomes[0].version]
        assert session.token.cluster_id == "test"


@pytest.mark.parametrize("local", [True, False])
def test_without_a_token_or_without_floors_nothing_is_added(make: Callable[..., StandIn], local: bool) -> None:
    node = make(local=local)
    with reaching(node, local) as client:
        (key,) = keys_of(1)
        client.put_many([(key, b"one")], level=Level.SESSION)
        client.get_many([key])
        client.session().get_many([key])
        assert not any(request.flags & GetFlag.FLOORS for request in gets(node))
        assert [request.level for request in gets(node)] == [Level.EVENTUAL, Level.SESSION]


def test_only_what_a_primary_vouched_for_enters_the_token(make: Callable[..., StandIn]) -> None:
    node = make()
    with reaching(node, True) as client:
        token = SessionToken()
        key, other = keys_of(2)
        (accepted,) = client.put_many([(key, b"v")], level=Level.EVENTUAL, token=token)
        assert accepted.status is PutStatus.ACCEPTED
        assert accepted.version > NO_VERSION
        assert len(token) == 0
        for status in PutStatus:
            outcome = PutOutcome(status, Version(1, 50 + status))
            node._put = lambda *_, outcome=outcome: outcome  # type: ignore[method-assign]
            client.put_many([(other, b"v")], level=Level.SESSION, token=token)
            seen = {PutStatus.STORED: (1, 51), PutStatus.SUPERSEDED: (1, 54)}
            reached = [version for known, version in seen.items() if known <= status]
            assert token.floor(SCOPE + other) == (max(reached) if reached else NO_VERSION)


def test_hits_and_deleted_misses_enter_the_token_and_other_misses_do_not(make: Callable[..., StandIn]) -> None:
    node = make()
    with reaching(node, True) as client:
        session = client.session()
        hit, deleted, behind, evicted = keys = keys_of(4)
        store(node, hit, b"value", 7)
        node.faults.reason_of = {
            deleted: BlockInfo(MissReason.DELETED, Version(1, 8)),
            behind: BlockInfo(MissReason.BEHIND, Version(1, 9)),
            evicted: BlockInfo(MissReason.EVICTED, Version(1, 10)),
        }
        found = session.get_many(keys)
        assert found[1:] == [
            Miss(MissReason.DELETED, Version(1, 8)),
            Miss(MissReason.BEHIND, Version(1, 9)),
            Miss(MissReason.EVICTED, Version(1, 10)),
        ]
        assert [session.token.floor(SCOPE + key) for key in keys] == [(1, 7), (1, 8), NO_VERSION, NO_VERSION]


def test_a_put_says_which_version_its_session_has_seen(make: Callable[..., StandIn]) -> None:
    node = make()
    with reaching(node, True) as client:
        session = client.session()
        key, other = keys_of(2)
        session.token.observe_all(SCOPE, [key, other], [Version(1, 5), Version(1, 6)])
        session.put_many([PutBlock(key, b"v", 0, Version(1, 9)), PutBlock(other, b"v")])
        session.delete_many([other])
        puts = [request for request in node.requests if isinstance(request, PutRequest)]
        assert [item.seen for request in puts for item in request.items][:2] == [(1, 9), (1, 6)]
        assert puts[1].items[0].seen >= (1, 6)
        assert session.token.floor(SCOPE + other) > (1, 0)


@pytest.mark.parametrize("local", [True, False])
def test_a_token_costs_a_load_no_further_return_to_the_interpreter(make: Callable[..., StandIn], local: bool) -> None:
    node = make(local=local)
    with reaching(node, local) as client:
        keys = keys_of(64)
        session = client.session()
        assert all(session.put_many([(key, os.urandom(4096)) for key in keys]))
        dest = np.zeros((64, 4096), np.uint8)
        plain = [client.get_into(keys, dest).gil_returns for _ in range(3)]
        carried = [session.get_into(keys, dest) for _ in range(3)]
        assert [result.usable for result in carried] == [64] * 3
        assert min(result.gil_returns for result in carried) <= min(plain)


# -- who is believed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("reason", [MissReason.BEHIND, MissReason.UNREACHABLE])
def test_a_node_that_is_behind_or_cut_off_does_not_have_the_last_word(
    make: Callable[..., StandIn], local: bool, reason: MissReason
) -> None:
    first, second = make("a", local=local), make("b", local=local)
    keys = keys_of(6)
    for key in keys:
        store(first, key, b"old" + key, 3)
        store(second, key, b"new" + key, 9)
    if reason is MissReason.UNREACHABLE:
        first.faults.reason_of = {key: BlockInfo(reason) for key in keys}
    second.peers = [first]  # the map names the first as owner of everything
    endpoints = [first.unix, second.unix] if local else [first.tcp, second.tcp]
    with Client(endpoints, prefer_local=False) as client:
        session = client.session()
        session.token.observe_all(SCOPE, keys, [Version(1, 9)] * 6)
        found = session.get_many(keys)
        assert [bytes(hit.data) for hit in found if isinstance(hit, Hit)] == [b"new" + key for key in keys]
        assert (len(gets(first)), len(gets(second))) == (1, 1)


@pytest.mark.parametrize("local", [True, False])
def test_when_all_are_behind_the_miss_says_so(make: Callable[..., StandIn], local: bool) -> None:
    first, second = make("a", local=local), make("b", local=local)
    (key,) = keys_of(1)
    store(first, key, b"old", 3)
    store(second, key, b"old", 4)
    endpoints = [first.unix, second.unix] if local else [first.tcp, second.tcp]
    with Client(endpoints, prefer_local=False) as client:
        session = client.session()
        session.token.observe(SCOPE + key, FAR)
        (miss,) = session.get_many([key])
        assert isinstance(miss, Miss)
        assert miss.reason is MissReason.BEHIND
        assert miss.version in (Version(1, 3), Version(1, 4))
        assert client.counters.snapshot()["misses"] == {"behind": 1}
        dest = np.zeros((1, 3), np.uint8)
        assert session.get_into([key], dest).reasons == [MissReason.BEHIND]
        assert session.token.floor(SCOPE + key) == FAR


@pytest.mark.parametrize("local", [True, False])
def test_an_old_hit_is_not_believed_whoever_sends_it(make: Callable[..., StandIn], local: bool) -> None:
    node = make(local=local)
    node.faults.ignore_floors = True
    old, new = keys_of(2)
    store(node, old, b"old", 3)
    store(node, new, b"new", 4)
    with reaching(node, local) as client:
        session = client.session()
        session.token.observe_all(SCOPE, [old, new], [Version(1, 4)] * 2)
        assert session.get_many([old, new]) == [Miss(MissReason.BEHIND, Version(1, 3)), Hit(b"new", Version(1, 4))]  # type: ignore[arg-type]
        dest = np.zeros((2, 3), np.uint8)
        result = session.get_into([old, new], dest)
        assert (result.usable, result.reasons) == (0, [MissReason.BEHIND, MissReason.NONE])
        if local:
            with session.pin_many([old, new]) as pinned:
                assert pinned.views[0] is None
                assert pinned.reasons == [MissReason.BEHIND, MissReason.NONE]
                assert bytes(pinned.views[1] or b"") == b"new"


@pytest.mark.parametrize("local", [True, False])
def test_an_answer_that_is_meant_for_nodes_ends_the_connection(make: Callable[..., StandIn], local: bool) -> None:
    node = make(local=local)
    (key,) = keys_of(1)
    store(node, key, b"value", 3)
    node.faults.reason_of = {key: BlockInfo(MissReason.CURRENT, Version(1, 3))}
    with reaching(node, local) as client:
        assert client.get_many([key], deadline_ms=300)[0] == Miss(MissReason.UNREACHABLE)
        node.faults.reason_of = {}
        wait_for(lambda: client.get_many([key])[0])


def test_pins_carry_the_token(make: Callable[..., StandIn]) -> None:
    node = make()
    with reaching(node, True) as client:
        keys = keys_of(2)
        session = client.session()
        store(node, keys[0], b"value", 3)
        with session.pin_many(keys) as pinned:
            assert pinned.reasons == [MissReason.NONE, MissReason.ABSENT]
            assert pinned.versions == [Version(1, 3), NO_VERSION]
        assert session.token.floor(SCOPE + keys[0]) == (1, 3)
        session.token.observe(SCOPE + keys[0], Version(1, 4))
        with session.pin_many(keys) as pinned:
            assert pinned.reasons == [MissReason.BEHIND, MissReason.ABSENT]
        assert gets(node)[-1].floors == [Version(1, 4), NO_VERSION]


def test_jobs_carry_the_token_and_do_not_mix_sessions(make: Callable[..., StandIn]) -> None:
    node = make()
    with reaching(node, True) as client:
        one, other = client.session(), client.session()
        keys = keys_of(8)
        jobs = [session.submit_put([(key, b"abc")]) for key in keys[:4] for session in (one, other)]
        assert all(outcome.status is PutStatus.STORED for job in jobs for outcome in job.result())
        assert len(one.token) == len(other.token) == 4
        assert one.token.floors(SCOPE, keys[:4]) != other.token.floors(SCOPE, keys[:4])
        dest = np.zeros((4, 3), np.uint8)
        late = client.session()
        assert late.submit_get(keys[:4], dest).result().usable == 4
        assert len(late.token) == 4
        late.token.observe(SCOPE + keys[0], FAR)
        assert late.submit_get(keys[:1], dest).result().reasons == [MissReason.BEHIND]


def test_the_asynchronous_client_has_sessions_too(make: Callable[..., StandIn]) -> None:
    node = make()

    async def run() -> None:
        async with await AsyncClient.open(node.unix) as client:
            session = client.session()
            key, other = keys_of(2)
            assert (await session.put_many([(key, b"abc")]))[0].status is PutStatus.STORED
            assert len(session.token) == 1
            following = client.session(session.token.to_text())
            assert (await following.get_many([key]))[0]
            assert gets(node)[-1].floors
            dest = np.zeros((1, 3), np.uint8)
            assert (await following.get_into([key], dest)).usable == 1
            (await following.pin_many([key])).unpin()
            assert await following.exists_many([key, other]) == [True, False]
            assert (await following.match_prefix([key, other])).usable == 1
            following.token.observe(SCOPE + key, FAR)
            assert (await client.get_many([key], token=following.token))[0] == Miss(
                MissReason.BEHIND, session.token.floor(SCOPE + key)
            )
            assert (await following.delete_many([key]))[0]
            with pytest.raises(ConfigError):
                client.session(b"nonsense")

    asyncio.run(run())


# -- bad tokens --------------------------------------------------------------------------------------------------------


def test_a_token_of_another_cluster_is_refused_and_stays_as_it_was(make: Callable[..., StandIn]) -> None:
    node = make()
    (key,) = keys_of(1)
    token = SessionToken("elsewhere")
    token.observe(SCOPE + key, Version(1, 1))
    with reaching(node, True) as client:
        for given in (token, token.to_bytes(), token.to_text()):
            with pytest.raises(ConfigError, match="belongs to cluster 'elsewhere', not 'test'"):
                client.session(given)
        dest = np.zeros((1, 1), np.uint8)
        session = Session(client, token)
        for call in (
            lambda: session.get_many([key]),
            lambda: session.get_into([key], dest),
            lambda: session.pin_many([key]),
            lambda: session.put_many([(key, b"v")]),
            lambda: session.delete_many([key]),
            lambda: session.submit_put([(key, b"v")]),
            lambda: session.submit_get([key], dest),
        ):
            with pytest.raises(ConfigError, match="belongs to cluster"):
                call()
        assert not node.blocks
        assert not gets(node)
        assert (token.cluster_id, token.floor(SCOPE + key), len(token)) == ("elsewhere", (1, 1), 1)


@pytest.mark.parametrize("bad", [b"", b"nonsense", "nonsense!", "", SessionToken("test").to_bytes()[:-1]])
def test_a_corrupted_token_is_refused(make: Callable[..., StandIn], bad: bytes | str) -> None:
    node = make()
    with reaching(node, True) as client, pytest.raises(ConfigError, match="session token"):
        client.session(bad)


def test_before_any_node_was_reached_a_token_is_neither_trusted_nor_ignored() -> None:
    with tempfile.TemporaryDirectory(prefix="ekv-") as folder:
        path = f"{folder}/late.sock"
        (key,) = keys_of(1)
        token = SessionToken("test")
        token.observe(SCOPE + key, Version(1, 9))
        with Client(f"unix:{path}") as client:
            session = client.session(token)
            assert session.get_many([key], deadline_ms=50)[0] == Miss(MissReason.UNREACHABLE)
            assert session.pin_many([key], deadline_ms=50).reasons == [MissReason.UNREACHABLE]
            assert session.put_many([(key, b"v")], deadline_ms=50)[0].status is PutStatus.REFUSED
            node = StandIn("a", path)
            try:
                store(node, key, b"old", 3)
                wait_for(lambda: session.get_many([key])[0].reason is not MissReason.UNREACHABLE)  # type: ignore[union-attr]
                assert session.get_many([key])[0] == Miss(MissReason.BEHIND, Version(1, 3))
            finally:
                node.close()


def test_a_new_generation_of_a_namespace_has_no_old_floors(make: Callable[..., StandIn]) -> None:
    node = make(namespace=Namespace("default", generation=2))
    (key,) = keys_of(1)
    store(node, key, b"new", 1)
    token = SessionToken("test")
    token.observe(scope_of("default", 1) + key, FAR)
    with reaching(node, True) as client:
        assert client.session(token).get_many([key])[0]
    assert token.floor(scope_of("default", 2) + key) == (1, 1)


@pytest.mark.parametrize("local", [True, False])
def test_a_namespace_that_is_created_anew_during_a_call_loses_no_floor(
    make: Callable[..., StandIn], local: bool
) -> None:
    node = make(local=local)
    read, written = keys_of(2)
    store(node, read, b"value", 7)
    with reaching(node, local) as client:
        session = client.session()
        session.get_many(keys_of(1))
        node.namespace = Namespace("default", generation=2)
        node.faults.drop_get = 1
        assert session.get_many([read])[0]
        node.namespace = Namespace("default", generation=3)
        session.put_many([(keys_of(1)[0], b"warm")])
        node.faults.drop_before_put = 1
        (outcome,) = session.put_many([(written, b"value")])
        assert outcome.status is PutStatus.STORED
        assert session.token.floor(scope_of("default", 2) + read) == (1, 7)
        assert session.token.floor(scope_of("default", 3) + written) == outcome.version


# -- node processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running() -> Iterator[LocalCluster]:
    with (
        tempfile.TemporaryDirectory(prefix="ekv-") as folder,
        LocalCluster(folder, 3, arena_bytes=256 << 20) as cluster,
    ):
        cluster.wait_ready()
        yield cluster


@pytest.fixture
def clients(running: LocalCluster) -> Iterator[list[Client]]:
    """One client per node, each of which asks its own node first."""
    made = [Client(endpoint, prefer_local=False) for endpoint in running.endpoints()]
    yield made
    for client in made:
        client.close()


READER = """
import sys
from emberkv.client import Client
endpoint, key, text = sys.argv[1:]
with Client(endpoint, prefer_local=False) as client:
    session = client.session(text)
    (found,) = session.get_many([bytes.fromhex(key)], deadline_ms=5000)
    print(found.version.epoch, found.version.seq, bytes(found.data).decode() if found else found.reason.label)
"""


def test_what_was_put_at_one_node_is_never_older_at_another(clients: list[Client]) -> None:
    """Overwrites at one node, reads with the token at the two others: that version or newer, or a miss."""
    keys = keys_of(16)
    token = SessionToken()
    sessions = [client.session(token) for client in clients]
    hits = 0
    for turn in range(12):
        values = [b"%d %d" % (turn, at) for at in range(16)]
        outcomes = sessions[0].put_many(list(zip(keys, values, strict=True)), deadline_ms=5000)
        assert [outcome.status for outcome in outcomes] == [PutStatus.STORED] * 16
        floors = [outcome.version for outcome in outcomes]
        for session in sessions[1:]:
            for found, floor, value in zip(session.get_many(keys, deadline_ms=5000), floors, values, strict=True):
                if isinstance(found, Hit):
                    hits += 1
                    assert found.version >= floor
                    assert bytes(found.data) == value
    assert hits >= 12 * 2 * 16 * 0.9  # all nodes live and are connected: a miss is the exception
    assert not any(client.counters.snapshot()["reconnects"] for client in clients)  # no frame was refused


def test_a_delete_is_seen_through_another_node(clients: list[Client]) -> None:
    keys = keys_of(8)
    writer = clients[0].session()
    assert all(writer.put_many([(key, b"value") for key in keys], deadline_ms=5000))
    for client in clients[1:]:  # near copies everywhere
        assert all(client.session(writer.token).get_many(keys, deadline_ms=5000))
    outcomes = writer.delete_many(keys, deadline_ms=5000)
    assert [outcome.status for outcome in outcomes] == [PutStatus.STORED] * 8
    for client in clients[1:]:
        found = client.session(writer.token).get_many(keys, deadline_ms=5000)
        assert not any(found)
        assert {miss.reason for miss in found if isinstance(miss, Miss)} <= {MissReason.DELETED, MissReason.BEHIND}


def test_a_token_goes_on_in_another_process(running: LocalCluster, clients: list[Client]) -> None:
    session = clients[0].session()
    (key,) = keys_of(1)
    for value in (b"first", b"second", b"third"):
        (outcome,) = session.put_many([(key, value)], deadline_ms=5000)
        assert outcome.status is PutStatus.STORED
        for endpoint in running.endpoints()[1:]:
            done = subprocess.run(
                [sys.executable, "-c", READER, endpoint, key.hex(), session.token.to_text()],
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            )
            epoch, seq, what = done.stdout.split()
            assert (what, Version(int(epoch), int(seq))) == (value.decode(), outcome.version)


def test_a_real_node_refuses_no_floor_that_it_meets_and_says_behind_below_it(clients: list[Client]) -> None:
    (key,) = keys_of(1)
    session = clients[0].session()
    (outcome,) = session.put_many([(key, b"value")], deadline_ms=5000)
    ahead = session.token.from_bytes(session.token.to_bytes())
    ahead.observe(SCOPE + key, Version(outcome.version.epoch, outcome.version.seq + 1_000_000))
    for client in clients:
        (found,) = client.session(ahead).get_many([key], deadline_ms=2000)
        assert isinstance(found, Miss)
        assert found.reason is MissReason.BEHIND
        (found,) = client.session(session.token).get_many([key], deadline_ms=2000)
        assert isinstance(found, Hit)


def fetch_link(client: Client, name: str) -> TcpLink:
    """A connection to a node such as its peers have."""
    address = next(node.tcp for node in client.cluster_map().nodes if node.name == name)
    hello = Hello(Role.FETCH, WIRE_VERSION, WIRE_VERSION, "", "default", "tester", os.urandom(16))
    return connect(address, hello, 2000)[0]


def ask(link: TcpLink, key: bytes, floor: Version, flags: GetFlag) -> tuple[BlockInfo, bytes]:
    request = GetRequest([key], 2000, Level.SESSION, int(flags | GetFlag.FLOORS), 0, [floor])
    link.send(request, 7)
    link.set_recv_timeout_ms(5000)
    header, reply = link.recv()
    assert isinstance(reply, GetReply)
    data = memoryview(bytearray(header.payload_len))
    if header.payload_len:
        link.recv_payload([data])
    return reply.infos[0], bytes(data)


def test_what_nodes_say_to_each_other_about_floors(running: LocalCluster, clients: list[Client]) -> None:
    (key,) = keys_of(1)
    assert clients[0].session().put_many([(key, b"old")], deadline_ms=5000)[0]
    (outcome,) = clients[0].session().put_many([(key, b"value")], deadline_ms=5000, min_copies=2)
    assert outcome.status is PutStatus.STORED
    version = outcome.version
    owner = clients[0].cluster_map().owners[shard_of(key)]
    assert owner is not None
    (outsider,) = {node.name for node in running.nodes} - set(owner.replicas)
    below, above = version._replace(seq=version.seq - 1), version._replace(seq=version.seq + 1)
    for name in owner.replicas:
        link = fetch_link(clients[0], name)
        try:
            info, data = ask(link, key, version, GetFlag.LOCAL_ONLY | GetFlag.IF_NEWER)
            assert (info.reason, info.version, data) == (MissReason.CURRENT, version, b"")
            info, data = ask(link, key, below, GetFlag.LOCAL_ONLY | GetFlag.IF_NEWER)
            assert (info.reason, info.version, data) == (MissReason.NONE, version, b"value")
            info, data = ask(link, key, version, GetFlag.LOCAL_ONLY)
            assert (info.reason, info.version, data) == (MissReason.NONE, version, b"value")
            info, data = ask(link, key, above, GetFlag.LOCAL_ONLY | GetFlag.IF_NEWER)
            assert (info.reason, data) == (MissReason.BEHIND, b"")
        finally:
            link.close()
    link = fetch_link(clients[0], outsider)
    try:
        info, _ = ask(link, key, version, GetFlag.LOCAL_ONLY)
        assert info.reason  # it has none, or none that it may vouch for
        info, data = ask(link, key, version, GetFlag.RELAY)
        assert (info.reason, info.version, data) == (MissReason.NONE, version, b"value")
    finally:
        link.close()


@pytest.mark.parametrize("flag", [GetFlag.FLOORS | GetFlag.IF_NEWER, GetFlag.RELAY])
def test_a_client_that_speaks_like_a_node_loses_its_connection_and_no_other(
    running: LocalCluster, clients: list[Client], flag: GetFlag
) -> None:
    address = clients[0].cluster_map().nodes[0].tcp
    hello = Hello(Role.CLIENT, WIRE_VERSION, WIRE_VERSION, "", "default", "", os.urandom(16))
    link, _ = connect(address, hello, 2000)
    floors = [NO_VERSION] if flag & GetFlag.FLOORS else []
    link.send(GetRequest(keys_of(1), 1000, Level.SESSION, int(flag), 0, floors), 1)
    link.set_recv_timeout_ms(5000)
    with pytest.raises(LinkClosed):
        link.recv()
    link.close()
    for client in clients:
        assert not client.session().get_many(keys_of(1))[0]
    assert all(not client.counters.snapshot()["reconnects"] for client in clients)


def test_after_a_failover_a_token_is_shown_nothing_older() -> None:
    """Overwrites, near copies of the old values everywhere, then the node that took most of the writes is killed."""
    with (
        tempfile.TemporaryDirectory(prefix="ekv-") as folder,
        LocalCluster(folder, 3, arena_bytes=128 << 20, failover_budget="3s") as cluster,
    ):
        cluster.wait_ready()
        clients = [Client(endpoint, prefer_local=False) for endpoint in cluster.endpoints()]
        keys = keys_of(64)
        session = clients[1].session()
        assert all(session.put_many([(key, b"old") for key in keys], deadline_ms=5000))
        for client in clients:
            client.get_many(keys)
        outcomes = session.put_many([(key, b"new") for key in keys], deadline_ms=5000, min_copies=2)
        assert [outcome.status for outcome in outcomes] == [PutStatus.STORED] * 64
        cluster.kill("n1", signal.SIGKILL)
        readers = [client.session(session.token.to_bytes()) for client in clients[1:]]
        found_all = 0
        end = time.monotonic() + 60
        while found_all < 2:
            assert time.monotonic() < end, "what two nodes had acknowledged was not found again"
            found_all = 0
            for reader in readers:
                found = reader.get_many(keys, deadline_ms=2000)
                hits = [hit for hit in found if isinstance(hit, Hit)]
                assert {bytes(hit.data) for hit in hits} <= {b"new"}
                found_all += len(hits) == len(keys)
        for client in clients:
            client.close()


def test_bad_tokens_meet_a_real_cluster(clients: list[Client]) -> None:
    session = clients[0].session()
    (key,) = keys_of(1)
    assert session.put_many([(key, b"value")], deadline_ms=5000)[0]
    data = session.token.to_bytes()
    foreign = SessionToken("another-cluster")
    foreign.observe(SCOPE + key, FAR)
    broken = bytearray(data)
    broken[len(broken) // 2] ^= 1
    for bad in (foreign, foreign.to_bytes(), bytes(broken), data[:-3], data + b"x"):
        with pytest.raises(ConfigError, match="session token"):
            clients[1].session(bad)
    assert clients[1].session(data).get_many([key], deadline_ms=5000)[0]
