"""House rules that ruff, mypy and the import contracts cannot express, read from the syntax tree of src/emberkv.

Each rule is a function from one parsed file to its findings. Each is also shown a bad sample, because a check that has
never failed proves nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "emberkv"

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70

# Rooms where bytes of blocks travel.
PAYLOAD_ROOMS = ("net", "storage", "node", "client", "connectors")
# `view[a:b] = data` copies while holding the interpreter lock, so a large block stops every other thread of the engine.
# These comments on the statement say why it is harmless there: a few bytes of framing, or a numpy array, whose
# assignment releases the lock.
SLICE_ALLOWED = ("# control bytes", "# numpy copy")
# The two boundaries where anything may come through: a task of the runtime, and an engine's call into a connector.
BROAD_EXCEPT_ALLOWED = ("node/runtime.py", "connectors/")
# Time, chance and results of input and output reach these rooms as arguments only.
PURE_ROOMS = ("core", "wire")
IMPURE_MODULES = {"asyncio", "time", "random", "os", "socket", "threading"}


@dataclass(frozen=True)
class Source:
    """One file: where it stands below the package, its text and its tree."""

    path: str
    text: str
    tree: ast.Module = field(repr=False)

    @property
    def room(self) -> str:
        return self.path.split("/", 1)[0] if "/" in self.path else ""

    @classmethod
    def parse(cls, path: str, text: str) -> Source:
        return cls(path, text, ast.parse(text, filename=path))

    def lines_of(self, node: ast.stmt) -> str:
        return "\n".join(self.text.splitlines()[node.lineno - 1 : node.end_lineno])


Finding = tuple[int, str]
Rule = Callable[[Source], Iterator[Finding]]


def slice_targets(node: ast.AST) -> Iterator[ast.Subscript]:
    """The `x[a:b]` targets of an assignment, also inside a tuple."""
    if isinstance(node, ast.Tuple | ast.List):
        for element in node.elts:
            yield from slice_targets(element)
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        yield node


def payload_slices(source: Source) -> Iterator[Finding]:
    if source.room not in PAYLOAD_ROOMS:
        return
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Assign):
            continue
        if any(True for target in node.targets for _ in slice_targets(target)):
            if any(reason in source.lines_of(node) for reason in SLICE_ALLOWED):
                continue
            yield node.lineno, f"slice assignment holds the interpreter lock (or say why not: {SLICE_ALLOWED})"


def names_in(node: ast.expr | None) -> set[str]:
    if isinstance(node, ast.Tuple):
        return {name for element in node.elts for name in names_in(element)}
    if isinstance(node, ast.Attribute):
        return {node.attr}
    return {node.id} if isinstance(node, ast.Name) else set()


def broad_except(source: Source) -> Iterator[Finding]:
    if source.path.startswith(BROAD_EXCEPT_ALLOWED):
        return
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        last = node.body[-1]
        if isinstance(last, ast.Raise) and last.exc is None:
            continue  # tidies up and lets the error travel on, so nothing is swallowed
        if node.type is None or names_in(node.type) & {"Exception", "BaseException"}:
            yield node.lineno, "catches everything: name the errors, or let it reach the runtime's task boundary"


def builtin_hash(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hash":
            yield node.lineno, "hash() differs in each process: use a named digest"


def file_length(source: Source) -> Iterator[Finding]:
    count = len(source.text.splitlines())
    if count > FILE_LINES_MAX:
        yield 1, f"{count} lines, at most {FILE_LINES_MAX}: which second reason to exist does this file have?"


def function_length(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            count = node.end_lineno - node.lineno + 1
            if count > FUNCTION_LINES_MAX:
                yield node.lineno, f"{node.name}() has {count} lines, at most {FUNCTION_LINES_MAX}"


def impure_import(source: Source) -> Iterator[Finding]:
    if source.room not in PURE_ROOMS:
        return
    for node in ast.walk(source.tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            modules = [node.module]
        for module in modules:
            if module.split(".")[0] in IMPURE_MODULES:
                yield node.lineno, f"imports {module}: time, chance and I/O are arguments here"


def socket_timeout(source: Source) -> Iterator[Finding]:
    if source.room != "net":
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and node.attr == "settimeout":
            yield node.lineno, "settimeout() makes the socket non-blocking, which breaks MSG_WAITALL: set SO_RCVTIMEO"


# rule, then a path and a text that it must refuse
RULES: dict[str, tuple[Rule, str, str]] = {
    "payload_slices": (payload_slices, "net/x.py", "view[0:4], y = data, 1\n"),
    "broad_except": (broad_except, "client/x.py", "try:\n    pass\nexcept (OSError, Exception):\n    pass\n"),
    "builtin_hash": (builtin_hash, "core/x.py", "shard = hash(key) % 256\n"),
    "file_length": (file_length, "core/x.py", "\n" * (FILE_LINES_MAX + 1)),
    "function_length": (function_length, "core/x.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX),
    "impure_import": (impure_import, "core/x.py", "def f():\n    from os.path import join\n"),
    "socket_timeout": (socket_timeout, "net/x.py", "connection.settimeout(1)\n"),
}

ALLOWED: list[tuple[str, str, str]] = [
    ("payload_slices", "storage/x.py", "array[0:4] = other  # numpy copy\n"),
    ("payload_slices", "net/x.py", "header[0:4] = size  # control bytes: the length of the frame\n"),
    ("broad_except", "node/runtime.py", "try:\n    pass\nexcept Exception:\n    pass\n"),
    ("broad_except", "coord/x.py", "try:\n    pass\nexcept BaseException:\n    close()\n    raise\n"),
    ("builtin_hash", "core/x.py", "digest = xxhash.xxh3_128_digest(key)\n"),
    ("file_length", "core/x.py", "\n" * FILE_LINES_MAX),
    ("function_length", "core/x.py", "def f():\n" + "    x = 1\n" * (FUNCTION_LINES_MAX - 1)),
    ("impure_import", "net/x.py", "import socket\n"),
    ("socket_timeout", "net/x.py", "connection.setsockopt(level, SO_RCVTIMEO, value)\n"),
]


@pytest.fixture(scope="module")
def package() -> list[Source]:
    return [
        Source.parse(path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    ]


@pytest.mark.parametrize("name", RULES)
def test_package_keeps_rule(name: str, package: list[Source]) -> None:
    rule = RULES[name][0]
    findings = [f"src/emberkv/{source.path}:{line}: {what}" for source in package for line, what in rule(source)]
    assert not findings, "\n".join(["", *findings])


@pytest.mark.parametrize("name", RULES)
def test_rule_refuses_bad_sample(name: str) -> None:
    rule, path, text = RULES[name]
    assert list(rule(Source.parse(path, text)))


@pytest.mark.parametrize(("name", "path", "text"), ALLOWED)
def test_rule_accepts_good_sample(name: str, path: str, text: str) -> None:
    assert not list(RULES[name][0](Source.parse(path, text)))


def test_the_package_was_found(package: list[Source]) -> None:
    assert any(source.path == "__init__.py" for source in package)
