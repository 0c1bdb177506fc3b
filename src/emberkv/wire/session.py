"""The handshake and what a connection may say, without I/O.

    NEW --welcome--> OPEN --end--> CLOSED        (the table _NEXT; a cell that is missing is an error)
     |                               ^
     +--refuse, end------------------+

Laws: the first frame is HELLO. Version, cluster, tenant and namespace are settled by it once and for all; a request
never names them. Each role may say only what it needs (REQUESTS), and a client none of the flags that are for nodes. A
refusal is one line that says what to do, and never repeats more than TEXT_MAX characters of what a stranger sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from emberkv.errors import HandshakeRefused, InvariantViolation, ProtocolError, Unavailable
from emberkv.messages import (
    WIRE_VERSION,
    ErrorFrame,
    GetFlag,
    GetRequest,
    Hello,
    Kind,
    Message,
    PutFlag,
    PutRequest,
    Role,
    Welcome,
)
from emberkv.types import Namespace
from emberkv.wire.codec import kind_of

TENANT: Final = "default"
"""The only tenant of this version."""
INCARNATION_BYTES: Final = 16
TEXT_MAX: Final = 200
"""Characters of a stranger's text that reach our logs or answers."""
NAME_MAX: Final = 255
"""Characters of a node name; names are also file names and coordinator keys."""


NO_NAMESPACE: Final = Namespace(name="")
"""What a connection without a namespace is told: nothing can be stored under its scope."""


class SessionState(Enum):
    """Life of a connection."""

    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


_NEXT: Final[dict[tuple[SessionState, str], SessionState]] = {
    (SessionState.NEW, "welcome"): SessionState.OPEN,
    (SessionState.NEW, "refuse"): SessionState.CLOSED,
    (SessionState.NEW, "end"): SessionState.CLOSED,
    (SessionState.OPEN, "end"): SessionState.CLOSED,
    (SessionState.CLOSED, "end"): SessionState.CLOSED,
}

REQUESTS: Final[dict[Role, frozenset[Kind]]] = {
    Role.CLIENT: frozenset(
        {Kind.GET, Kind.UNPIN, Kind.EXISTS, Kind.PUT, Kind.DELETE, Kind.MAP, Kind.STATUS, Kind.ADMIN}
    ),
    Role.FETCH: frozenset({Kind.GET, Kind.EXISTS}),
    Role.STREAM: frozenset({Kind.PUT, Kind.DELETE, Kind.REPLICATE, Kind.OFFER, Kind.VECTOR}),
}
"""What the side that opened a connection may send after the handshake."""
_PEER_GET_FLAGS: Final = int(GetFlag.IF_NEWER | GetFlag.RELAY)
_PEER_PUT_FLAGS: Final = int(PutFlag.FORWARD | PutFlag.RELAY)
"""What only nodes may ask for: a client would get answers that it cannot use, or send others' hops on."""


class ServerSession:
    """The accepting side of one connection: `answer` its HELLO, then `check` each of its frames."""

    def __init__(self, *, cluster_id: str, node: str, incarnation: bytes, namespaces: Mapping[str, Namespace]) -> None:
        self._cluster_id = cluster_id
        self._node = node
        self._incarnation = incarnation
        self._namespaces = namespaces
        self.state = SessionState.NEW
        self.role = Role.CLIENT
        """Meaningful once OPEN."""

    def answer(self, hello: Hello) -> Welcome | ErrorFrame:
        """What to send back; after an ErrorFrame the connection is to be closed.

        The caller adds what only it knows (arena and staging sizes). Raises ProtocolError for a second HELLO.
        """
        if self.state is not SessionState.NEW:
            raise ProtocolError(f"HELLO on a connection that is {self.state.value}")
        refusal = self._refusal(hello)
        if refusal:
            self._move("refuse")
            return ErrorFrame(refusal, refused=True)
        self._move("welcome")
        self.role = Role(hello.role)
        namespace = self._namespaces[hello.namespace] if hello.namespace else NO_NAMESPACE
        return Welcome(WIRE_VERSION, self._cluster_id, self._node, self._incarnation, namespace)

    def check(self, message: Message) -> None:
        """Raises ProtocolError for a frame that this role may not send now; the session is then closed."""
        kind = kind_of(message)
        if self.state is not SessionState.OPEN:
            self.close()
            raise ProtocolError(f"{kind.name} before the handshake was through: the first frame must be HELLO")
        if kind not in REQUESTS[self.role]:
            self.close()
            raise ProtocolError(f"{kind.name} is not allowed on a {self.role.name} connection")
        if self.role is Role.CLIENT and _for_nodes(message):
            self.close()
            raise ProtocolError(f"{kind.name} with a flag that is not allowed on a CLIENT connection")

    def close(self) -> None:
        """The connection ended, for whatever reason. May be called twice."""
        self._move("end")

    def _move(self, event: str) -> None:
        state = _NEXT.get((self.state, event))
        if state is None:
            raise InvariantViolation(f"session that is {self.state.value} got {event}")
        self.state = state

    def _refusal(self, hello: Hello) -> str:
        """Why this HELLO is not welcome; empty when it is."""
        if hello.role not in REQUESTS:
            return f"role {hello.role} is unknown here: use the same version on both sides"
        if not hello.wire_min <= WIRE_VERSION <= hello.wire_max:
            return (
                f"this node speaks wire version {WIRE_VERSION}, not {hello.wire_min}-{hello.wire_max}: upgrade one side"
            )
        if hello.cluster_id not in ("", self._cluster_id):
            return (
                f"this node belongs to cluster {self._cluster_id!r}, not {_short(hello.cluster_id)}: check the address"
            )
        if hello.tenant != TENANT:
            return f"tenant {_short(hello.tenant)} is unknown here"
        if hello.namespace and hello.namespace not in self._namespaces:
            return f"namespace {_short(hello.namespace)} does not exist: create it or use another name"
        if hello.namespace and hello.generation not in (0, self._namespaces[hello.namespace].generation):
            return f"namespace {_short(hello.namespace)} is of another generation than {hello.generation} here"
        if len(hello.incarnation) != INCARNATION_BYTES:
            return f"HELLO has an incarnation of {len(hello.incarnation)} bytes, needs {INCARNATION_BYTES}"
        if len(hello.node) > NAME_MAX or (hello.role != Role.CLIENT and not hello.node):
            return f"HELLO of a {Role(hello.role).name} connection needs a node name of 1 to {NAME_MAX} characters"
        if hello.role != Role.CLIENT and hello.node == self._node:
            return f"HELLO of a peer names {_short(hello.node)}, which is this node itself"
        if hello.want_staging_bytes < 0:
            return f"HELLO asks for {hello.want_staging_bytes} bytes of staging"
        return ""


def _for_nodes(message: Message) -> bool:
    """Does it carry a flag that only nodes may send?"""
    if isinstance(message, GetRequest):
        return bool(message.flags & _PEER_GET_FLAGS)
    return isinstance(message, PutRequest) and bool(message.flags & _PEER_PUT_FLAGS)


def checked_welcome(hello: Hello, message: Message, endpoint: str, expected_node: str = "") -> Welcome:
    """The answer to `hello` as the side that opened the connection takes it; `endpoint` names the other side in errors.

    `expected_node`, when given, must be who answers. Raises HandshakeRefused (useless to retry), Unavailable (later or
    elsewhere), ProtocolError (not one of us).
    """
    if isinstance(message, ErrorFrame):
        text = f"{endpoint} refused: {_short(message.text)}"
        raise HandshakeRefused(text) if message.refused else Unavailable(text)
    if not isinstance(message, Welcome):
        raise ProtocolError(f"{endpoint} answered HELLO with {kind_of(message).name}")
    if not hello.wire_min <= message.wire <= hello.wire_max:
        raise HandshakeRefused(f"{endpoint} speaks wire version {message.wire}, not {hello.wire_min}-{hello.wire_max}")
    if hello.cluster_id not in ("", message.cluster_id):
        raise HandshakeRefused(f"{endpoint} belongs to cluster {_short(message.cluster_id)}, not {hello.cluster_id!r}")
    if expected_node not in ("", message.node):
        raise HandshakeRefused(f"{endpoint} is node {_short(message.node)}, not {expected_node!r}")
    if message.namespace.name != hello.namespace:
        raise ProtocolError(f"{endpoint} opened namespace {_short(message.namespace.name)}, not {hello.namespace!r}")
    if len(message.incarnation) != INCARNATION_BYTES or not 0 < len(message.node) <= NAME_MAX:
        raise ProtocolError(f"{endpoint} sent a WELCOME without its incarnation or name")
    if min(message.arena_bytes, message.staging_bytes, message.pin_bytes_max) < 0:
        raise ProtocolError(f"{endpoint} sent a WELCOME with a size below 0")
    return message


def _short(text: str) -> str:
    """A stranger's text, quoted and escaped so that it stays on its line, and cut."""
    return repr(text[:TEXT_MAX])
