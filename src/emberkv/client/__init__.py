"""The client room: how engines and tools reach the cache.

Why it exists: the public names in one place; everything else here is private to the room.
"""

from __future__ import annotations

from emberkv.client.aio import AsyncClient, AsyncSession
from emberkv.client.checks import PutBlock
from emberkv.client.client import Client
from emberkv.client.jobs import Job
from emberkv.client.loads import LoadResult
from emberkv.client.pins import Pinned
from emberkv.client.session import Session
from emberkv.client.token import SessionToken

__all__ = [
    "AsyncClient",
    "AsyncSession",
    "Client",
    "Job",
    "LoadResult",
    "Pinned",
    "PutBlock",
    "Session",
    "SessionToken",
]
