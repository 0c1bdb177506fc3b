"""Child processes of the demo, spoken to in lines of JSON.

Why it exists: an engine must be a process of its own, or "a fresh engine" would mean nothing; and whatever happens to
    the demo, its children must end with it.
Laws: one line in, one line out, in order. A child ends when its standard input ends, also in the middle of a
    computation, so it cannot outlive its parent. Children are no members of the terminal's foreground group: Ctrl-C
    reaches the parent only, which then takes everything down in order.
Limits: messages are small (token ids, figures), never payload.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Final

from emberkv.errors import EmberError, Unavailable

STOP_WAIT_S: Final = 3.0
"""A child that has not ended this long after its input ended is killed."""
LOG_LINE_MAX: Final = 300

Message = dict[str, Any]


class ChildFailed(EmberError):
    """A child process ended or answered with an error; the text has its own last words."""


class Child:
    """One child process: `ask` for a call, or `send` and `receive` to do something else meanwhile."""

    def __init__(
        self, name: str, module: str, arguments: list[str], log_dir: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """`environment`: variables set beside those of this process."""
        self.name = name
        self._log_path = log_dir / f"{name.replace(' ', '-')}.log"
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"{name} answers", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line.decode())
        self._answers.put("")

    def send(self, do: str, **arguments: Any) -> None:
        """Sends a request; its answer is the next one that `receive` returns."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise ChildFailed(self._last_words()) from None

    def receive(self, timeout_s: float) -> Message:
        """The next answer. Raises ChildFailed if the child failed, Unavailable if it does not answer in time."""
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise Unavailable(f"{self.name} did not answer within {timeout_s:g} s") from None
        if not line:
            raise ChildFailed(self._last_words())
        answer: Message = json.loads(line)
        if "error" in answer:
            raise ChildFailed(f"{self.name}: {answer['error']}")
        return answer

    def ask(self, do: str, timeout_s: float = 60.0, **arguments: Any) -> Message:
        """One request and its answer."""
        self.send(do, **arguments)
        return self.receive(timeout_s)

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        text = self._log_path.read_text(errors="replace").strip() if self._log_path.exists() else ""
        last = text.splitlines()[-1][:LOG_LINE_MAX] if text else "it wrote nothing to its log"
        return f"{self.name} ended (exit code {self._process.poll()}): {last}"

    def stop(self) -> None:
        """Ends the child: first its input, then by force. Safe to call twice."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(STOP_WAIT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()


# ------------------------------------------------------------------------------------------------ the child's side


def answer_all(handlers: Mapping[str, Callable[..., Message]], first: Message) -> None:
    """Body of a child: sends `first`, then answers requests by calling `handlers[do](**arguments)`, until input ends.

    Requests are read by a thread, so that the end of the input ends the process even while a handler runs.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints goes to the log, not between the answers
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_requests, args=(sys.stdin, requests), name="requests", daemon=True).start()
    _write(out, first)
    while True:
        request = json.loads(requests.get())
        try:
            answer = handlers[request.pop("do")](**request)
        except (EmberError, ValueError, OSError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        _write(out, answer)


def _read_requests(source: IO[str], requests: queue.Queue[str]) -> None:
    for line in source:
        requests.put(line)
    os._exit(0)


def _write(out: IO[str], message: Message) -> None:
    try:
        out.write(json.dumps(message) + "\n")
        out.flush()
    except OSError:
        os._exit(0)  # the parent is gone
