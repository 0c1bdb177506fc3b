"""What every oracle is: a law, the handlers that watch over it, and a way to say that it was broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Protocol

from emberkv.sim.engine import Violation
from emberkv.sim.history import History, Request
from emberkv.sim.oracles_evidence import Evidence


class Passing(Protocol):
    """Where an oracle says what it wants to see pass by (oracles.Oracles)."""

    def on_type(self, kind: type, handler: Callable[[Any, Any], None]) -> None:
        """handler(process, detail) for each event or effect of this type."""
        ...

    def on_kind(self, kind: str, handler: Callable[[Any, Any], None]) -> None:
        """handler(process, detail) for each observation of this kind."""
        ...


class Oracle:
    """Watches over one law. Silent while it holds."""

    law: ClassVar[str] = ""

    def __init__(self, evidence: Evidence, history: History) -> None:
        self.evidence = evidence
        self.cluster = evidence.cluster
        self.history = history

    def watch(self, passing: Passing) -> None:
        """Says what it wants to see."""

    def on_request(self, request: Request) -> None:
        """A client's request has ended."""

    def on_healed(self) -> None:
        """Every fault has ended."""

    def at_end(self) -> None:
        """The cluster is at rest."""

    def broken(self, what: str) -> NoReturn:
        """Ends the run."""
        raise Violation(f"{type(self).__name__}: {what} [law: {self.law}]")
