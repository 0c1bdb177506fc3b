"""Asks one node, directly, how it is.

Why it exists: the client library hides nodes that are down, which is just what `status` and a starting cluster must
see. Nothing is retried, nothing is kept open.
"""

from __future__ import annotations

import os
from typing import Any, Final

import msgspec

from emberkv.errors import ConfigError, ProtocolError
from emberkv.messages import WIRE_VERSION, Hello, Message, Role, StatusReply, StatusRequest
from emberkv.net.local_link import close_fds, connect_local
from emberkv.net.tcp import connect

STATUS_TIMEOUT_MS: Final = 1000
STAGING_BYTES: Final = 4096
"""A status question needs no staging; this is the least that a node makes."""


def hello() -> Hello:
    """The first frame of a client that belongs to no particular cluster."""
    return Hello(
        role=int(Role.CLIENT),
        wire_min=WIRE_VERSION,
        wire_max=WIRE_VERSION,
        cluster_id="",
        tenant="default",
        node="",
        incarnation=os.urandom(16),
        namespace="",
        want_staging_bytes=STAGING_BYTES,
    )


def fetch_status(endpoint: str, timeout_ms: int = STATUS_TIMEOUT_MS) -> dict[str, Any]:
    """The status document of the node at "unix:/path", "tcp:host:port" or "host:port".

    Raises Unavailable, HandshakeRefused, ProtocolError; ConfigError for a text that is no endpoint.
    """
    scheme, _, rest = endpoint.partition(":")
    answer = _ask_local(rest, timeout_ms) if scheme == "unix" else _ask_tcp(_tcp_address(endpoint), timeout_ms)
    if not isinstance(answer, StatusReply):
        raise ProtocolError(f"{endpoint} answered a status request with {type(answer).__name__}")
    try:
        document: dict[str, Any] = msgspec.json.decode(answer.document, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"{endpoint} sent a status document that is not JSON: {error}") from None
    return document


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError unless the text names a socket or an address."""
    if endpoint.startswith("unix:"):
        if not endpoint.startswith("unix:/"):
            raise ConfigError(f"endpoint {endpoint!r}: a socket path must be absolute, as in unix:/run/node.sock")
        return
    _tcp_address(endpoint)


def _tcp_address(endpoint: str) -> str:
    address = endpoint.removeprefix("tcp:")
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ConfigError(f"endpoint {endpoint!r} is neither unix:/path nor tcp:host:port")
    return address


def _ask_local(path: str, timeout_ms: int) -> Message:
    link, _, arena_fd, staging_fd = connect_local(path, hello(), timeout_ms)
    try:
        close_fds(tuple(fd for fd in (arena_fd, staging_fd) if fd >= 0))
        link.set_recv_timeout_ms(timeout_ms)
        link.send(StatusRequest(), 1)
        _, answer, _ = link.recv()
        return answer
    finally:
        link.close()


def _ask_tcp(address: str, timeout_ms: int) -> Message:
    link, _ = connect(address, hello(), timeout_ms)
    try:
        link.set_recv_timeout_ms(timeout_ms)
        link.send(StatusRequest(), 1)
        _, answer = link.recv()
        return answer
    finally:
        link.close()
