"""EmberKV: a replicated cache of attention keys and values for LLM inference.

The public names of the client library stand here; they are loaded on first use, so that importing the package costs
nothing where only a part of it is needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from emberkv.types import Hit, Level, Miss, MissReason, PrefixMatch, PutOutcome, PutStatus, RefuseReason

if TYPE_CHECKING:
    from emberkv.client import AsyncClient, AsyncSession, Client, Job, LoadResult, PutBlock, Session, SessionToken

__version__ = "0.1.0"
__all__ = [
    "AsyncClient",
    "AsyncSession",
    "Client",
    "Hit",
    "Job",
    "Level",
    "LoadResult",
    "Miss",
    "MissReason",
    "PrefixMatch",
    "PutBlock",
    "PutOutcome",
    "PutStatus",
    "RefuseReason",
    "Session",
    "SessionToken",
]

_OF_CLIENT = frozenset(
    {"AsyncClient", "AsyncSession", "Client", "Job", "LoadResult", "PutBlock", "Session", "SessionToken"}
)


def __getattr__(name: str) -> object:
    if name in _OF_CLIENT:
        import emberkv.client

        return getattr(emberkv.client, name)
    raise AttributeError(f"module 'emberkv' has no attribute {name!r}")
