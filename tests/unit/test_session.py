"""The handshake, from both sides, and what each role may say after it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from emberkv import messages as m
from emberkv.errors import HandshakeRefused, ProtocolError, Unavailable
from emberkv.messages import Kind, PutFlag, Role
from emberkv.types import Namespace
from emberkv.wire.session import REQUESTS, ServerSession, SessionState, checked_welcome

NAMESPACES = {"default": Namespace("default"), "chat": Namespace("chat", id=2)}
HELLO = m.Hello(Role.CLIENT, 1, 1, "c1", "default", "", b"i" * 16)
PEER = msgspec.structs.replace(HELLO, role=int(Role.STREAM), node="n2")
FRAMES: dict[Kind, Any] = {
    Kind.HELLO: HELLO,
    Kind.WELCOME: m.Welcome(1, "c1", "n1", b"i" * 16, NAMESPACES["default"]),
    Kind.ERROR: m.ErrorFrame("x"),
    Kind.GET: m.GetRequest([]),
    Kind.GET_REPLY: m.GetReply([]),
    Kind.UNPIN: m.Unpin([]),
    Kind.EXISTS: m.ExistsRequest([]),
    Kind.EXISTS_REPLY: m.ExistsReply([]),
    Kind.PUT: m.PutRequest([]),
    Kind.DELETE: m.PutRequest([], delete=True),
    Kind.PUT_REPLY: m.PutReply([]),
    Kind.REPLICATE: m.Replicate([]),
    Kind.REPLICATE_REPLY: m.ReplicateReply([], []),
    Kind.OFFER: m.Offer(0, 0, []),
    Kind.OFFER_REPLY: m.OfferReply([]),
    Kind.VECTOR: m.Vector([]),
    Kind.VECTOR_REPLY: m.VectorReply([]),
    Kind.MAP: m.MapRequest(),
    Kind.MAP_REPLY: m.MapReply(0, (), ()),
    Kind.STATUS: m.StatusRequest(),
    Kind.STATUS_REPLY: m.StatusReply(b""),
    Kind.ADMIN: m.AdminRequest("namespaces"),
    Kind.ADMIN_REPLY: m.AdminReply(True),
}


def session() -> ServerSession:
    return ServerSession(cluster_id="c1", node="n1", incarnation=b"n" * 16, namespaces=NAMESPACES)


def hello(**changes: Any) -> m.Hello:
    return msgspec.structs.replace(HELLO, **changes)


@pytest.mark.parametrize("said", [HELLO, hello(cluster_id=""), hello(wire_max=9), hello(namespace="chat"), PEER])
def test_a_fitting_hello_is_welcome(said: m.Hello) -> None:
    server = session()
    answer = server.answer(said)
    assert answer == m.Welcome(1, "c1", "n1", b"n" * 16, NAMESPACES[said.namespace])
    assert (server.state, server.role) == (SessionState.OPEN, said.role)
    assert checked_welcome(said, answer, "here", "n1") is answer


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (hello(role=9), "role 9 is unknown"),
        (hello(wire_min=2, wire_max=3), "speaks wire version 1, not 2-3"),
        (hello(wire_min=0, wire_max=0), "speaks wire version 1"),
        (hello(cluster_id="c2"), "belongs to cluster 'c1', not 'c2'"),
        (hello(tenant="other"), "tenant 'other' is unknown"),
        (hello(namespace="no"), "namespace 'no' does not exist"),
        (hello(incarnation=b""), "incarnation of 0 bytes"),
        (hello(role=int(Role.FETCH)), "FETCH connection needs a node name"),
        (hello(node="n" * 256), "node name"),
        (hello(role=int(Role.STREAM), node="n1"), "'n1', which is this node itself"),
        (hello(role=int(Role.FETCH), node="n1"), "'n1', which is this node itself"),
        (hello(want_staging_bytes=-1), "-1 bytes of staging"),
        (hello(tenant="evil\nline " + "x" * 10_000), "tenant 'evil\\\\nline x"),
    ],
)
def test_a_wrong_hello_is_refused_in_one_line(said: m.Hello, text: str) -> None:
    server = session()
    answer = server.answer(said)
    assert isinstance(answer, m.ErrorFrame)
    assert answer.refused
    assert text.replace("\\\\", "\\") in answer.text
    assert "\n" not in answer.text
    assert len(answer.text) < 400
    assert server.state is SessionState.CLOSED
    with pytest.raises(ProtocolError):
        server.check(FRAMES[Kind.GET])
    with pytest.raises(HandshakeRefused, match="here refused"):
        checked_welcome(said, answer, "here")


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.HELLO])
def test_nothing_comes_before_hello(kind: Kind) -> None:
    server = session()
    with pytest.raises(ProtocolError, match="the first frame must be HELLO"):
        server.check(FRAMES[kind])
    assert server.state is SessionState.CLOSED


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("kind", Kind)
def test_each_role_may_say_what_it_needs_and_nothing_else(role: Role, kind: Kind) -> None:
    server = session()
    server.answer(msgspec.structs.replace(PEER, role=int(role)))
    if kind in REQUESTS[role]:
        server.check(FRAMES[kind])
        assert server.state is SessionState.OPEN
        return
    with pytest.raises(ProtocolError, match=f"{kind.name} is not allowed on a {role.name} connection"):
        server.check(FRAMES[kind])
    assert server.state is SessionState.CLOSED


def test_a_reader_can_never_write() -> None:
    assert not REQUESTS[Role.FETCH] & {Kind.PUT, Kind.DELETE, Kind.REPLICATE, Kind.OFFER, Kind.VECTOR, Kind.UNPIN}
    assert not REQUESTS[Role.CLIENT] & {Kind.REPLICATE, Kind.OFFER, Kind.VECTOR}


def test_only_a_client_may_give_orders() -> None:
    assert [role for role in Role if Kind.ADMIN in REQUESTS[role]] == [Role.CLIENT]


FLOORS, IF_NEWER, RELAY = int(m.GetFlag.FLOORS), int(m.GetFlag.IF_NEWER), int(m.GetFlag.RELAY)


@pytest.mark.parametrize(
    ("message", "role", "allowed"),
    [
        (m.GetRequest([], flags=FLOORS), Role.CLIENT, True),
        (m.GetRequest([], flags=FLOORS), Role.FETCH, True),
        (m.GetRequest([], flags=FLOORS | IF_NEWER), Role.CLIENT, False),
        (m.GetRequest([], flags=FLOORS | IF_NEWER), Role.FETCH, True),
        (m.GetRequest([], flags=RELAY), Role.CLIENT, False),
        (m.GetRequest([], flags=RELAY), Role.FETCH, True),
        (m.PutRequest([], flags=int(PutFlag.FORWARD)), Role.CLIENT, False),
        (m.PutRequest([], flags=int(PutFlag.FORWARD | PutFlag.RELAY)), Role.CLIENT, False),
        (m.PutRequest([], flags=int(PutFlag.FORWARD | PutFlag.RELAY), delete=True), Role.CLIENT, False),
        (m.PutRequest([], flags=int(PutFlag.FORWARD | PutFlag.RELAY)), Role.STREAM, True),
        (m.PutRequest([], flags=int(PutFlag.FRESH)), Role.CLIENT, True),
    ],
)
def test_flags_for_nodes_end_the_connection_of_a_client(message: Any, role: Role, allowed: bool) -> None:
    server = session()
    server.answer(msgspec.structs.replace(PEER, role=int(role)))
    if allowed:
        server.check(message)
        assert server.state is SessionState.OPEN
        return
    with pytest.raises(ProtocolError, match="not allowed on a CLIENT connection"):
        server.check(message)
    assert server.state is SessionState.CLOSED


def test_hello_twice_is_an_error_and_close_is_final() -> None:
    server = session()
    server.answer(HELLO)
    with pytest.raises(ProtocolError, match="HELLO"):
        server.answer(HELLO)
    server.close()
    server.close()
    assert server.state is SessionState.CLOSED
    with pytest.raises(ProtocolError):
        server.check(FRAMES[Kind.GET])


@pytest.mark.parametrize(
    ("answer", "error", "text"),
    [
        (m.ErrorFrame("busy"), Unavailable, "busy"),
        (m.ErrorFrame("no\nsuch"), Unavailable, r"no\\nsuch"),
        (m.GetReply([]), ProtocolError, "answered HELLO with GET_REPLY"),
        (m.Welcome(2, "c1", "n1", b"i" * 16, NAMESPACES["default"]), HandshakeRefused, "wire version 2"),
        (m.Welcome(1, "c2", "n1", b"i" * 16, NAMESPACES["default"]), HandshakeRefused, "cluster 'c2'"),
        (m.Welcome(1, "c1", "n9", b"i" * 16, NAMESPACES["default"]), HandshakeRefused, "is node 'n9', not 'n1'"),
        (m.Welcome(1, "c1", "n1", b"i" * 16, NAMESPACES["chat"]), ProtocolError, "opened namespace 'chat'"),
        (m.Welcome(1, "c1", "n1", b"short", NAMESPACES["default"]), ProtocolError, "incarnation"),
        (m.Welcome(1, "c1", "n1", b"i" * 16, NAMESPACES["default"], -1), ProtocolError, "below 0"),
    ],
)
def test_a_wrong_answer_is_told_apart(answer: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        checked_welcome(HELLO, answer, "10.0.0.1:7", "n1")
