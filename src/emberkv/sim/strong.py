"""Requests of strong namespaces in virtual time: node/strong.py's own dialogues over the simulated store.

Why it exists: what a node makes of an unknown outcome, a refused condition or a store that is away is decided there, so
that code is what the simulator has to run.
Laws: a dialogue is driven by what the store answers, whenever that is; it ends once, through `done`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from emberkv.errors import CoordinatorError
from emberkv.messages import PutItem
from emberkv.node.strong import Look, Replace, StrongRecords
from emberkv.sim.coordinator import Strong
from emberkv.sim.engine import MS
from emberkv.types import NO_VERSION, Version

SCOPE = b"strong.1"


class StrongNode:
    """Strong records as one node serves them."""

    def __init__(self, store: Strong, now_ns: Callable[[], int]) -> None:
        self._store = store
        self._now_ns = now_ns
        # The dialogues name what they want; the store itself is asked below, over time.
        self._records = StrongRecords(None, now_ns)  # type: ignore[arg-type]

    def get(self, key: bytes, *, deadline_ms: int, done: Callable[[Any], None]) -> None:
        """`done((BlockInfo, bytes or None))`."""
        deadline_ns = self._deadline_ns(deadline_ms)
        _Talk(self._store, self._now_ns, deadline_ns, self._records.reading(SCOPE, key, deadline_ns), done).go()

    def put(
        self,
        key: bytes,
        put_id: bytes,
        data: bytes | None,
        *,
        deadline_ms: int,
        done: Callable[[Any], None],
        seen: Version = NO_VERSION,
        fresh: bool = True,
    ) -> None:
        """`done(PutOutcome)`; `data` None deletes."""
        deadline_ns = self._deadline_ns(deadline_ms)
        item = PutItem(key, put_id, len(data or b""), seen=seen)
        dialogue = self._records.writing(SCOPE, item, data, deadline_ns, fresh=fresh)
        _Talk(self._store, self._now_ns, deadline_ns, dialogue, done).go()

    def _deadline_ns(self, deadline_ms: int) -> int:
        return self._now_ns() + deadline_ms * MS


class _Talk:
    """One dialogue under way."""

    def __init__(
        self,
        store: Strong,
        now_ns: Callable[[], int],
        deadline_ns: int,
        dialogue: Generator[Look | Replace, Any, Any],
        done: Callable[[Any], None],
    ) -> None:
        self._store, self._now_ns, self._deadline_ns = store, now_ns, deadline_ns
        self._dialogue, self._done = dialogue, done

    def go(self, answer: Any = None) -> None:
        """Hands the store's answer in and asks for what is wanted next."""
        try:
            if isinstance(answer, CoordinatorError):
                wanted = self._dialogue.throw(answer)
            else:
                wanted = self._dialogue.send(answer)
        except StopIteration as ended:
            self._done(ended.value)
            return
        left_ms = max(1, (self._deadline_ns - self._now_ns()) // MS)
        if isinstance(wanted, Look):
            self._store.get(wanted.key, deadline_ms=left_ms, done=self.go)
        elif wanted.value is None:
            self._store.delete(wanted.key, wanted.revision, deadline_ms=left_ms, done=self.go)
        else:
            self._store.put_if(wanted.key, wanted.value, wanted.revision, deadline_ms=left_ms, done=self.go)
