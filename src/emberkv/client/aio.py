"""The same client for asyncio: each call runs in a thread of a small pool.

Why it exists: asyncio servers must not block their loop on a socket.
Laws: a cancelled call is waited for (its deadline bounds that) before the cancellation goes on, because until then its
thread may still write into the caller's buffers.
Limits: THREADS_MAX calls at once; more wait their turn, and their deadlines run from when they begin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from emberkv.client.checks import PutBlock
from emberkv.client.client import Client
from emberkv.client.connection import Bytes
from emberkv.client.loads import LoadResult
from emberkv.client.pins import Pinned
from emberkv.client.token import SessionToken
from emberkv.messages import MapReply
from emberkv.types import Hit, Level, Miss, PrefixMatch, PutOutcome

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

THREADS_MAX: Final = 8

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class AsyncClient:
    """Client with awaitable verbs; arguments, results and errors are those of Client.

    Made with `await AsyncClient.open(...)`, since shaking hands takes time; an async context manager.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self._threads = ThreadPoolExecutor(THREADS_MAX, "emberkv-async")

    @classmethod
    async def open(cls, endpoints: str | Sequence[str], **options: Any) -> AsyncClient:
        """Connects; `options` are those of Client."""
        return cls(await asyncio.to_thread(partial(Client, endpoints, **options)))

    async def _run(
        self, call: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        future = asyncio.get_running_loop().run_in_executor(self._threads, partial(call, *args, **kwargs))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue  # asked twice; the buffers are still in use
            if not future.cancelled():
                future.exception()  # looked at, so that asyncio does not report it as lost
            raise

    async def get_many(
        self,
        keys: Sequence[bytes],
        *,
        deadline_ms: int = 1000,
        level: Level | int | None = None,
        token: SessionToken | None = None,
    ) -> list[Hit | Miss]:
        """See Client.get_many."""
        return await self._run(self.client.get_many, keys, deadline_ms=deadline_ms, level=level, token=token)

    async def get_into(
        self,
        keys: Sequence[bytes],
        dest: Bytes,
        *,
        deadline_ms: int = 1000,
        level: Level | int | None = None,
        token: SessionToken | None = None,
    ) -> LoadResult:
        """See Client.get_into."""
        return await self._run(self.client.get_into, keys, dest, deadline_ms=deadline_ms, level=level, token=token)

    async def pin_many(
        self,
        keys: Sequence[bytes],
        *,
        deadline_ms: int = 1000,
        level: Level | int | None = None,
        token: SessionToken | None = None,
    ) -> Pinned:
        """See Client.pin_many; the result is an ordinary context manager."""
        return await self._run(self.client.pin_many, keys, deadline_ms=deadline_ms, level=level, token=token)

    async def exists_many(self, keys: Sequence[bytes], *, deadline_ms: int = 1000) -> list[bool]:
        """See Client.exists_many."""
        return await self._run(self.client.exists_many, keys, deadline_ms=deadline_ms)

    async def match_prefix(self, keys: Sequence[bytes], *, deadline_ms: int = 1000) -> PrefixMatch:
        """See Client.match_prefix."""
        return await self._run(self.client.match_prefix, keys, deadline_ms=deadline_ms)

    async def put_many(
        self,
        items: Sequence[tuple[bytes, ReadableBuffer] | PutBlock],
        *,
        level: Level | int | None = None,
        deadline_ms: int = 1000,
        min_copies: int = 1,
        token: SessionToken | None = None,
    ) -> list[PutOutcome]:
        """See Client.put_many."""
        return await self._run(
            self.client.put_many, items, level=level, deadline_ms=deadline_ms, min_copies=min_copies, token=token
        )

    async def delete_many(
        self,
        keys: Sequence[bytes],
        *,
        level: Level | int | None = None,
        deadline_ms: int = 1000,
        token: SessionToken | None = None,
    ) -> list[PutOutcome]:
        """See Client.delete_many."""
        return await self._run(self.client.delete_many, keys, level=level, deadline_ms=deadline_ms, token=token)

    def session(self, token: SessionToken | bytes | str | None = None) -> AsyncSession:
        """See Client.session; nothing is waited for."""
        return AsyncSession(self, self.client.session(token).token)

    async def status(self, *, deadline_ms: int = 1000) -> dict[str, Any]:
        """See Client.status."""
        return await self._run(self.client.status, deadline_ms=deadline_ms)

    async def cluster_map(self, *, deadline_ms: int = 1000) -> MapReply:
        """See Client.cluster_map."""
        return await self._run(self.client.cluster_map, deadline_ms=deadline_ms)

    async def close(self) -> None:
        """Ends all connections, after the calls that run."""
        await self._run(self.client.close)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncSession:
    """Session with awaitable verbs: `token` is carried by every call and advanced by it."""

    def __init__(self, client: AsyncClient, token: SessionToken) -> None:
        self.client = client
        self.token = token

    async def get_many(self, keys: Sequence[bytes], *, deadline_ms: int = 1000) -> list[Hit | Miss]:
        """See Session.get_many."""
        return await self.client.get_many(keys, deadline_ms=deadline_ms, token=self.token)

    async def get_into(self, keys: Sequence[bytes], dest: Bytes, *, deadline_ms: int = 1000) -> LoadResult:
        """See Session.get_into."""
        return await self.client.get_into(keys, dest, deadline_ms=deadline_ms, token=self.token)

    async def pin_many(self, keys: Sequence[bytes], *, deadline_ms: int = 1000) -> Pinned:
        """See Session.pin_many; the result is an ordinary context manager."""
        return await self.client.pin_many(keys, deadline_ms=deadline_ms, token=self.token)

    async def exists_many(self, keys: Sequence[bytes], *, deadline_ms: int = 1000) -> list[bool]:
        """See Session.exists_many."""
        return await self.client.exists_many(keys, deadline_ms=deadline_ms)

    async def match_prefix(self, keys: Sequence[bytes], *, deadline_ms: int = 1000) -> PrefixMatch:
        """See Session.match_prefix."""
        return await self.client.match_prefix(keys, deadline_ms=deadline_ms)

    async def put_many(
        self,
        items: Sequence[tuple[bytes, ReadableBuffer] | PutBlock],
        *,
        deadline_ms: int = 1000,
        min_copies: int = 1,
    ) -> list[PutOutcome]:
        """See Session.put_many."""
        return await self.client.put_many(items, deadline_ms=deadline_ms, min_copies=min_copies, token=self.token)

    async def delete_many(self, keys: Sequence[bytes], *, deadline_ms: int = 1000) -> list[PutOutcome]:
        """See Session.delete_many."""
        return await self.client.delete_many(keys, deadline_ms=deadline_ms, token=self.token)
