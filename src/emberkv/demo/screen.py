"""What the demo says while it runs: a spinner on a terminal, plain lines elsewhere, and the closing table.

Laws: the progress of a demo that prints JSON goes to standard error; nothing here measures or decides.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from emberkv.demo.report import Report


class Screen:
    """One console. `started` is when the demo began (perf_counter)."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.started = time.perf_counter()

    def scene(self, letter: str, title: str) -> None:
        """Opens a scene."""
        self._console.print()
        self._console.print(f"[bold]({letter}) {escape(title)}[/bold]  [dim]{self._clock()}[/dim]")

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Something that takes time: a spinner while it lasts, one line when it is done."""
        started = time.perf_counter()
        if self._console.is_terminal:
            with self._console.status(f"{escape(text)} ..."):
                yield
            mark = "[green]done[/green]"
        else:
            self._console.print(f"    {escape(text)} ...")
            yield
            mark = "done:"
        self._console.print(f"    {mark} {escape(text)} [dim]({time.perf_counter() - started:.1f} s)[/dim]")

    def say(self, text: str, *, good: bool | None = None) -> None:
        """A finding of the scene."""
        style = {None: "", True: "[green]", False: "[bold red]"}[good]
        close = "[/]" if style else ""
        self._console.print(f"    {style}{escape(text)}{close}")

    def quote(self, who: str, question: str, answer: str) -> None:
        """What an engine answered."""
        self._console.print(f"    [dim]{escape(who)}[/dim] {escape(question)} [cyan]{escape(one_line(answer))}[/cyan]")

    def table(self, report: Report) -> None:
        """The closing table."""
        table = Table(title="Time to first token: A computes, B loads", title_justify="left")
        table.add_column("session")
        for heading in ("A, s", "no cache, s", "B, s", "faster", "blocks"):
            table.add_column(heading, justify="right")
        table.add_column("tokens")
        for session in report.sessions:
            table.add_row(
                session.topic,
                f"{session.recompute_ttft_s:.2f}",
                f"{session.uncached_ttft_s:.2f}",
                f"{session.hit_ttft_s:.3f}",
                f"{session.speedup:.1f} x",
                f"{session.blocks_near} + {session.blocks_wire}",
                "identical" if session.tokens_identical else "DIFFER",
            )
        self._console.print()
        self._console.print(table)
        for label, value in report.summary():
            self._console.print(f"  {escape(label):<49}{escape(value)}")

    def verdict(self, report: Report, seconds: float) -> None:
        """The last lines."""
        self._console.print()
        for path in report.written:
            self._console.print(f"  written: {escape(path)}", soft_wrap=True)
        if report.busy:
            self._console.print(f"  [yellow]note:[/] {escape(report.busy)}", soft_wrap=True)
        if report.shortfalls:
            self._console.print(f"[bold red]FELL SHORT:[/] {escape('; '.join(report.shortfalls))}", soft_wrap=True)
        else:
            self._console.print(f"[bold green]All promises of the demo were kept[/] ({seconds:.0f} s in all).")

    def _clock(self) -> str:
        return f"{time.perf_counter() - self.started:.0f} s"


def one_line(text: str) -> str:
    """Text of a model on one line."""
    return " ".join(text.split())
