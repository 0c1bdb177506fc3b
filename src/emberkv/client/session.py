"""Sessions: reads and writes that carry a token, so that a caller never sees its own past.

Why it exists: the guarantees of the level `session` (PROTOCOL 1, P6) hold for whoever carries the token along; here
that is done for the caller.
Laws: what a call saw enters the token before the call returns. STORED and SUPERSEDED outcomes, hits and deleted misses
enter; ACCEPTED, QUEUED and UNKNOWN do not, for no primary has vouched for them. A hit below its floor is not believed,
whoever sent it. A token of another cluster is refused before anything is sent.
Limits: those of SessionToken; `exists_many` and `match_prefix` ask for presence, of whatever version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from emberkv.client.checks import PutBlock
from emberkv.client.connection import Bytes
from emberkv.client.jobs import Job
from emberkv.client.loads import LoadResult
from emberkv.client.pins import Pinned
from emberkv.client.token import SessionToken
from emberkv.messages import PutItem
from emberkv.types import NO_VERSION, Hit, Miss, MissReason, PrefixMatch, PutOutcome, PutStatus, Version

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from emberkv.client.client import Client

_VOUCHED = frozenset((PutStatus.STORED, PutStatus.SUPERSEDED))


class Carried:
    """A token in one call: the floors to ask with, and what the call saw."""

    def __init__(self, token: SessionToken, scope_now: Callable[[], bytes], keys: Sequence[bytes]) -> None:
        """`scope_now`: the scope of the namespace that nodes have told of last."""
        self._token = token
        self._scope_now = scope_now
        self._scope = scope_now()
        self._keys = keys
        self.floors = token.floors(self._scope, keys)
        """One per key, or empty."""

    def _observe(self, versions: Sequence[Version]) -> None:
        # Two scopes only if the namespace was created anew during the call: it is not known under which one each
        # answer was given, and a floor too many costs a miss, one too few the guarantee.
        for scope in {self._scope, self._scope_now()}:
            self._token.observe_all(scope, self._keys, versions)

    def saw(self, reasons: list[MissReason], versions: Sequence[Version]) -> list[int]:
        """Takes what a read found into the token. Hits below their floor become BEHIND; returns their indices."""
        stale = [
            index
            for index, (floor, reason, version) in enumerate(zip(self.floors, reasons, versions, strict=False))
            if version < floor and not reason
        ]
        for index in stale:
            reasons[index] = MissReason.BEHIND
        seen = [
            version if not reason or reason is MissReason.DELETED else NO_VERSION
            for reason, version in zip(reasons, versions, strict=True)
        ]
        self._observe(seen)
        return stale

    def known_to(self, items: Sequence[PutItem]) -> None:
        """Says in each item which version its writer has seen."""
        for item, floor in zip(items, self.floors, strict=False):
            item.seen = max(item.seen, floor)

    def wrote(self, outcomes: Sequence[PutOutcome]) -> None:
        """Takes the versions of stamped puts into the token."""
        seen = [outcome.version if outcome.status in _VOUCHED else NO_VERSION for outcome in outcomes]
        self._observe(seen)


class Session:
    """The verbs of a client at the level of a session; arguments, results and errors are those of Client.

    `token` is carried by every call and advanced by it. Send it with `token.to_bytes()` or `token.to_text()`; whoever
    goes on with it sees nothing older than this session did. Any thread may use a session.
    """

    def __init__(self, client: Client, token: SessionToken) -> None:
        self.client = client
        self.token = token

    def get_many(self, keys: Sequence[bytes], *, deadline_ms: int = 1000) -> list[Hit | Miss]:
        """See Client.get_many. Miss(BEHIND, version): only copies older than the session's floor were found."""
        return self.client.get_many(keys, deadline_ms=deadline_ms, token=self.token)

    def get_into(self, keys: Sequence[bytes], dest: Bytes, *, deadline_ms: int = 1000) -> LoadResult:
        """See Client.get_into."""
        return self.client.get_into(keys, dest, deadline_ms=deadline_ms, token=self.token)

    def pin_many(self, keys: Sequence[bytes], *, deadline_ms: int = 1000) -> Pinned:
        """See Client.pin_many."""
        return self.client.pin_many(keys, deadline_ms=deadline_ms, token=self.token)

    def exists_many(self, keys: Sequence[bytes], *, deadline_ms: int = 1000) -> list[bool]:
        """See Client.exists_many."""
        return self.client.exists_many(keys, deadline_ms=deadline_ms)

    def match_prefix(self, keys: Sequence[bytes], *, deadline_ms: int = 1000) -> PrefixMatch:
        """See Client.match_prefix."""
        return self.client.match_prefix(keys, deadline_ms=deadline_ms)

    def put_many(
        self,
        items: Sequence[tuple[bytes, ReadableBuffer] | PutBlock],
        *,
        deadline_ms: int = 1000,
        min_copies: int = 1,
    ) -> list[PutOutcome]:
        """See Client.put_many."""
        return self.client.put_many(items, deadline_ms=deadline_ms, min_copies=min_copies, token=self.token)

    def delete_many(self, keys: Sequence[bytes], *, deadline_ms: int = 1000) -> list[PutOutcome]:
        """See Client.delete_many."""
        return self.client.delete_many(keys, deadline_ms=deadline_ms, token=self.token)

    def submit_put(
        self,
        items: Sequence[tuple[bytes, ReadableBuffer] | PutBlock],
        *,
        deadline_ms: int = 10_000,
        min_copies: int = 1,
    ) -> Job[list[PutOutcome]]:
        """See Client.submit_put; the outcomes are in the token when the job is done."""
        return self.client.submit_put(items, deadline_ms=deadline_ms, min_copies=min_copies, token=self.token)

    def submit_get(self, keys: Sequence[bytes], dest: Bytes, *, deadline_ms: int = 1000) -> Job[LoadResult]:
        """See Client.submit_get; what was found is in the token when the job is done."""
        return self.client.submit_get(keys, dest, deadline_ms=deadline_ms, token=self.token)
