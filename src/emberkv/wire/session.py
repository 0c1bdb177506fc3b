"""The handshake and what a connection may say, without I/O.

    NEW --HELLO accepted--> OPEN --EOF, error, forbidden frame--> CLOSED
     |                                                             ^
     +--HELLO refused, anything else-------------------------------+

Laws: the first frame is HELLO. Version, cluster, tenant and namespace are settled by it once and for all; a request
never names them. Each role may say only what it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from emberkv.errors import ProtocolError
from emberkv.messages import WIRE_VERSION, ErrorFrame, Hello, Kind, Message, Role, Welcome
from emberkv.types import Namespace
from emberkv.wire.codec import kind_of

TENANT: Final = "default"
"""The only tenant of this version."""


class SessionState(Enum):
    """Life of a connection."""

    NEW = "new"
    OPEN = "open"
    CLOSED = "closed"


_MAY_SAY: Final[dict[Role, frozenset[Kind]]] = {
    Role.CLIENT: frozenset({Kind.GET, Kind.UNPIN, Kind.EXISTS, Kind.PUT, Kind.DELETE, Kind.MAP, Kind.STATUS}),
    Role.FETCH: frozenset({Kind.GET, Kind.EXISTS}),
    Role.STREAM: frozenset({Kind.PUT, Kind.DELETE, Kind.REPLICATE, Kind.OFFER}),
}


class ServerSession:
    """The accepting side of one connection."""

    def __init__(self, *, cluster_id: str, node: str, incarnation: bytes, namespaces: Mapping[str, Namespace]) -> None:
        self._cluster_id = cluster_id
        self._node = node
        self._incarnation = incarnation
        self._namespaces = namespaces
        self.state = SessionState.NEW
        self.role = Role.CLIENT

    def answer(self, hello: Hello) -> Welcome | ErrorFrame:
        """What to send back; after an ErrorFrame the connection is to be closed."""
        refusal = self._refusal(hello)
        if refusal:
            self.state = SessionState.CLOSED
            return ErrorFrame(refusal, refused=True)
        self.state = SessionState.OPEN
        self.role = Role(hello.role)
        return Welcome(WIRE_VERSION, self._cluster_id, self._node, self._incarnation, self._namespaces[hello.namespace])

    def _refusal(self, hello: Hello) -> str:
        if self.state is not SessionState.NEW:
            return "HELLO came twice"
        if hello.role not in list(Role):
            return f"role {hello.role} is unknown here: use the same version on both sides"
        if not hello.wire_min <= WIRE_VERSION <= hello.wire_max:
            return f"this node speaks wire version {WIRE_VERSION}, not {hello.wire_min} to {hello.wire_max}"
        if hello.cluster_id not in ("", self._cluster_id):
            return f"this node belongs to cluster {self._cluster_id!r}, not {hello.cluster_id[:64]!r}"
        if hello.tenant != TENANT:
            return f"tenant {hello.tenant[:64]!r} is unknown here"
        if hello.namespace not in self._namespaces:
            return f"namespace {hello.namespace[:64]!r} does not exist: create it or use another name"
        if len(hello.incarnation) != 16 or (hello.role != Role.CLIENT and not hello.node):
            return "HELLO lacks an incarnation or a node name"
        return ""

    def check(self, message: Message) -> None:
        """Raises ProtocolError for a frame that this role may not send now."""
        kind = kind_of(message)
        if self.state is not SessionState.OPEN or kind not in _MAY_SAY[self.role]:
            raise ProtocolError(f"{kind.name} is not allowed on a {self.role.name} connection ({self.state.value})")
