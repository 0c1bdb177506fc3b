"""Namespaces of this node: who may open which, and the scope that keeps their keys apart.

scope = first 8 bytes of SHA-256(tenant salt, namespace name, generation). It is a prefix of every internal key, so a
bumped generation makes all old keys unreachable at once, and no client can name another namespace's keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from emberkv.messages import Hello, Role
from emberkv.types import Namespace
from emberkv.wire.session import ServerSession

SCOPE_BYTES = 8
DEFAULT_TENANT = "default"


class Namespaces:
    """Fixed at start in this version; created and dropped at run time later."""

    def __init__(self, namespaces: Iterable[Namespace], *, cluster_id: str, node: str, incarnation: bytes) -> None:
        self._by_name = {namespace.name: namespace for namespace in namespaces}
        self._by_scope = {self.scope(namespace): namespace for namespace in self._by_name.values()}
        self._cluster_id = cluster_id
        self._node = node
        self._incarnation = incarnation

    def scope(self, namespace: Namespace, tenant: str = DEFAULT_TENANT) -> bytes:
        """8 bytes that every internal key of the namespace begins with."""
        identity = f"{tenant}\0{namespace.name}\0{namespace.generation}".encode()
        return hashlib.sha256(identity).digest()[:SCOPE_BYTES]

    def session(self) -> ServerSession:
        """The accepting side of one connection's handshake and message rules."""
        return ServerSession(
            cluster_id=self._cluster_id, node=self._node, incarnation=self._incarnation, namespaces=self._by_name
        )

    def hello(self, role: Role, scope: bytes = b"") -> Hello:
        """What this node says when it opens a connection to a peer."""
        namespace = self._by_scope[scope].name if scope else next(iter(self._by_name))
        return Hello(
            int(role), 1, 1, self._cluster_id, DEFAULT_TENANT, self._node, self._incarnation, namespace=namespace
        )
