"""Administration of a cluster through any of its nodes: namespaces and drains.

Why it exists: these commands change what all nodes agree on, so they must neither be lost silently nor said twice: a
command goes to one node; another one is asked only while it is certain that nothing was sent.
Raises ConfigError for what the caller asks wrongly, Unavailable for what may work later (nobody answers, somebody else
changed the same record, an outcome that is not known). The text of both is one line that says what to do.
"""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

from emberkv.client.connection import dial, ms_left
from emberkv.client.pool import CONTROL, Pool, named
from emberkv.errors import ConfigError, EmberError, HandshakeRefused, Unavailable
from emberkv.messages import AdminReply, AdminRequest, Hello
from emberkv.net import now_ns

DIAL_MS_MAX: Final = 1000
ANSWER_MARGIN_MS: Final = 100
"""The node's deadline is so much shorter than ours, so that its reason still arrives."""


class Administration:
    """The part of a Client that commands; deadlines are milliseconds, documents are as docs/OPERATIONS.md says."""

    _pool: Pool

    def _hello(self, lane: str) -> Hello:
        raise NotImplementedError  # the Client's

    def namespaces(self, *, deadline_ms: int = 5000) -> list[dict[str, Any]]:
        """All namespaces, dropped ones among them (`dropped` is true)."""
        found: list[dict[str, Any]] = self.admin("namespace-list", deadline_ms=deadline_ms)["namespaces"]
        return found

    def create_namespace(self, name: str, *, deadline_ms: int = 5000, **policy: Any) -> dict[str, Any]:
        """Creates a namespace; `policy` as a `[[cluster.namespaces]]` table. Of a dropped name: its next generation."""
        stated = {key: value for key, value in policy.items() if value is not None}
        return self.admin("namespace-create", {"name": name, **stated}, deadline_ms=deadline_ms)["namespace"]  # type: ignore[no-any-return]

    def set_namespace(
        self, name: str, *, revision: int | None = None, deadline_ms: int = 5000, **changes: Any
    ) -> dict[str, Any]:
        """Changes min_copies, factor, expiry, verify or owner. `revision`: refuse if the policy is another by now."""
        stated = {key: value for key, value in changes.items() if value is not None}
        arguments = {"name": name, "changes": stated, "revision": revision}
        return self.admin("namespace-set", arguments, deadline_ms=deadline_ms)["namespace"]  # type: ignore[no-any-return]

    def drop_namespace(self, name: str, *, revision: int | None = None, deadline_ms: int = 5000) -> dict[str, Any]:
        """Drops a namespace and everything in it, at once and for good."""
        return self.admin("namespace-drop", {"name": name, "revision": revision}, deadline_ms=deadline_ms)

    def drain(self, node: str, *, undo: bool = False, deadline_ms: int = 5000) -> dict[str, Any]:
        """Makes a node give its shards to the others (`undo`: take part again); returns how far it is."""
        return self.admin("undrain" if undo else "drain", {"node": node}, deadline_ms=deadline_ms)

    def drain_status(self, node: str, *, deadline_ms: int = 5000) -> dict[str, Any]:
        """How many shards a node still holds as `primary` and as `replica`; `drained` when both are 0."""
        return self.admin("drain-status", {"node": node}, deadline_ms=deadline_ms)

    def admin(self, verb: str, arguments: dict[str, Any] | None = None, *, deadline_ms: int = 5000) -> dict[str, Any]:
        """One command (docs/OPERATIONS.md, Administration) and its document."""
        deadline_ns = now_ns() + deadline_ms * 1_000_000
        node_ms = max(1, deadline_ms - min(ANSWER_MARGIN_MS, deadline_ms // 10))
        request = AdminRequest(verb, json.dumps(arguments or {}).encode(), node_ms)
        # A connection of its own that belongs to no namespace: the client's own one may have been dropped.
        hello = msgspec.structs.replace(self._hello(CONTROL), namespace="", want_staging_bytes=0)
        failures: list[str] = []
        for node in sorted(self._pool.nodes(), key=lambda node: node.failures > 0):
            try:
                connection = dial(node.endpoint, hello, CONTROL, min(DIAL_MS_MAX, ms_left(deadline_ns)), None)
            except HandshakeRefused:
                raise
            except EmberError as error:
                failures.append(named(node.endpoint, str(error)))
                continue
            try:
                reply = connection.receive(AdminReply, connection.send(request, deadline_ns), deadline_ns)
            except EmberError as error:
                raise Unavailable(
                    f"{node.endpoint}: {error}: {verb} may or may not have been done; look, and say it again if not"
                ) from error
            finally:
                connection.close()
            return _document(reply)
        raise Unavailable("no node answers: " + ("; ".join(failures) or "none known"))


def _document(reply: AdminReply) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(reply.document)
    except ValueError:
        raise Unavailable("the node answered with something that is not JSON") from None
    if reply.ok:
        return document
    raise (Unavailable if document.get("retry") else ConfigError)(reply.error)
