"""`emberkv put`, `get` and `delete`: single blocks by hand, for people and scripts."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from emberkv.cli.endpoints import choose
from emberkv.cli.output import emit_error, emit_json, human_bytes, notes, results
from emberkv.errors import ConfigError, Unavailable
from emberkv.types import (
    BLOCK_BYTES_MAX,
    KEY_BYTES,
    Level,
    Miss,
    MissReason,
    Namespace,
    PutOutcome,
    PutStatus,
    RefuseReason,
)

if TYPE_CHECKING:
    from emberkv.client import Client

HEX_CHARS_SUSPECT: Final = 16
"""From so many hex digits on, a text is taken for a key that was cut or doubled, not for a name."""
WHY_MS: Final = 500
"""To ask why nobody was reached, after the command's own deadline."""

Key = Annotated[str, typer.Argument(metavar="KEY", help="64 hex digits, or any text (its SHA-256 is the key).")]
Endpoints = Annotated[
    list[str] | None,
    typer.Option(
        "--endpoint",
        help="unix:/path or tcp:host:port; repeatable. Default: $EMBERKV_ENDPOINTS, else the cluster of `up`.",
    ),
]
LevelOption = Annotated[str, typer.Option("--level", help="eventual, session or strong. Default: the namespace's.")]
Deadline = Annotated[int, typer.Option("--deadline-ms", min=1, max=600_000, help="The answer comes by then.")]
NamespaceOption = Annotated[str, typer.Option("--namespace", help="Name of the namespace.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def parse_key(text: str) -> bytes:
    """The 32-byte key that a text names. Raises ConfigError for one that looks like a key of another length."""
    digits = text.removeprefix("0x")
    if re.fullmatch(r"[0-9a-fA-F]+", digits):
        if len(digits) == 2 * KEY_BYTES:
            return bytes.fromhex(digits)
        if len(digits) >= HEX_CHARS_SUSPECT:
            raise ConfigError(
                f"key {text!r} has {len(digits)} hex digits; a key has {2 * KEY_BYTES} ({KEY_BYTES} bytes)"
            )
    if not text:
        raise ConfigError("the key is empty: give 64 hex digits or a text")
    return hashlib.sha256(text.encode(errors="surrogateescape")).digest()


def parse_level(text: str) -> Level | None:
    """A Level, or None for the namespace's own. Raises ConfigError."""
    if not text:
        return None
    try:
        return Level[text.upper()]
    except KeyError:
        raise ConfigError(f"--level: {text!r} is not one of {', '.join(item.name.lower() for item in Level)}") from None


@contextmanager
def connect(endpoints: list[str] | None, namespace: str) -> Iterator[Client]:
    """A client for one command; impossible arguments become ConfigError."""
    from emberkv.client import Client

    chosen = choose(endpoints)
    try:
        client = Client(chosen, namespace=namespace)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        yield client
    finally:
        client.close()


def check_terms(policy: Namespace | None, level: Level | None, min_copies: int) -> None:
    """Raises ConfigError, with the fix, for what a namespace cannot do; `policy` None: no node has described it."""
    if policy is None:
        return
    if level is not None and (level is Level.STRONG) != (policy.level == Level.STRONG):
        usual = Level(policy.level).name.lower()
        fix = "leave --level out" if policy.level == Level.STRONG else "say --level session"
        raise ConfigError(
            f"--level {level.name.lower()}: namespace {policy.name!r} is {usual}: {fix}, or create a namespace with "
            f"`emberkv namespace create NAME --level {level.name.lower()}`"
        )
    if min_copies == 1:
        return
    if policy.level == Level.STRONG:
        raise ConfigError(f"--min-copies: namespace {policy.name!r} is strong, it has no copies: leave it out")
    if (level if level is not None else policy.level) == Level.EVENTUAL:
        raise ConfigError(f"--min-copies {min_copies}: an eventual put waits for no copies: say --level session")
    if min_copies > policy.factor:
        raise ConfigError(
            f"--min-copies {min_copies}: factor of namespace {policy.name!r} is {policy.factor}, so at most "
            f"{policy.factor} replicas hold a block: ask for fewer copies, or raise the factor"
        )


def explained(client: Client, reason: RefuseReason | MissReason) -> str:
    """The label of a reason; of *unreachable* with each address and why it does not answer, if that is known."""
    if reason in (RefuseReason.UNREACHABLE, MissReason.UNREACHABLE):
        try:
            client.status(deadline_ms=WHY_MS)
        except Unavailable as error:
            return f"{reason.label}: {error}"
    return reason.label


def put(
    key: Key,
    file: Annotated[str, typer.Argument(metavar="FILE", help="File to store, or - for standard input.")],
    level: LevelOption = "",
    min_copies: Annotated[int, typer.Option(min=1, max=255, help="Answer when so many replicas hold it.")] = 1,
    deadline_ms: Deadline = 2000,
    namespace: NamespaceOption = "default",
    endpoint: Endpoints = None,
    as_json: Json = False,
) -> None:
    """Store a file as one block."""
    digest, chosen_level = parse_key(key), parse_level(level)
    data = read_value(file)
    with connect(endpoint, namespace) as client:
        if len(data) > client.block_bytes_max:
            raise _too_large(len(data), client.block_bytes_max)
        check_terms(client.policy, chosen_level, min_copies)
        outcome = client.put_many([(digest, data)], level=chosen_level, deadline_ms=deadline_ms, min_copies=min_copies)[
            0
        ]
        reason = explained(client, outcome.reason)
    _report("put", digest, outcome, as_json, {"bytes": len(data)}, reason)


def delete(
    key: Key,
    level: LevelOption = "",
    deadline_ms: Deadline = 2000,
    namespace: NamespaceOption = "default",
    endpoint: Endpoints = None,
    as_json: Json = False,
) -> None:
    """Delete a block everywhere."""
    digest, chosen_level = parse_key(key), parse_level(level)
    with connect(endpoint, namespace) as client:
        check_terms(client.policy, chosen_level, 1)
        outcome = client.delete_many([digest], level=chosen_level, deadline_ms=deadline_ms)[0]
        reason = explained(client, outcome.reason)
    _report("delete", digest, outcome, as_json, {}, reason)


def get(
    key: Key,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; default, and -: standard output.")
    ] = None,
    level: LevelOption = "",
    deadline_ms: Deadline = 1000,
    namespace: NamespaceOption = "default",
    endpoint: Endpoints = None,
    as_json: Json = False,
) -> None:
    """Fetch a block. A miss prints its reason and ends with code 1."""
    output = None if output == Path("-") else output
    digest, chosen_level = parse_key(key), parse_level(level)
    with connect(endpoint, namespace) as client:
        check_terms(client.policy, chosen_level, 1)
        found = client.get_many([digest], deadline_ms=deadline_ms, level=chosen_level)[0]
        reason = explained(client, found.reason) if isinstance(found, Miss) else ""
    document: dict[str, Any] = {"key": digest.hex(), "hit": bool(found), "version": list(found.version)}
    if isinstance(found, Miss):
        if as_json:
            emit_json(document | {"reason": found.reason.label})
        else:
            emit_error(f"miss: {reason}")
        raise typer.Exit(1)
    document["bytes"] = found.data.nbytes
    if output is not None:
        _write_file(output, found.data)
        document["file"] = str(output)
    elif as_json:
        document["data_base64"] = base64.b64encode(found.data).decode()
    else:
        sys.stdout.buffer.write(found.data)
        sys.stdout.buffer.flush()
    if as_json:
        emit_json(document)
    elif output is not None:
        version = f"{found.version.epoch}.{found.version.seq}"
        notes().print(f"{human_bytes(found.data.nbytes)} of version {version} -> {output}", soft_wrap=True)


def read_value(file: str) -> bytes:
    """The bytes of a file or of standard input, up to the limit of the format. Raises ConfigError."""

    def bounded(read: Callable[[int], bytes]) -> bytes:
        data = read(BLOCK_BYTES_MAX + 1)
        if len(data) > BLOCK_BYTES_MAX:
            raise _too_large(None, BLOCK_BYTES_MAX)
        if not data:
            raise ConfigError(f"{'standard input' if file == '-' else file} is empty: a block has at least one byte")
        return data

    try:
        if file == "-":
            return bounded(sys.stdin.buffer.read)
        with open(file, "rb") as stream:
            return bounded(stream.read)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None


def _too_large(size: int | None, limit: int) -> ConfigError:
    what = "the value is larger" if size is None else f"the value has {size} bytes, more"
    return ConfigError(f"{what} than one block may have ({limit} bytes): split it")


def _write_file(path: Path, data: memoryview) -> None:
    try:
        # A new file beside it first: a reader never sees half a block, a full disk never costs the old content.
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _report(what: str, key: bytes, outcome: PutOutcome, as_json: bool, more: dict[str, Any], reason: str) -> None:
    status = outcome.status.name.lower()
    version = f"{outcome.version.epoch}.{outcome.version.seq}"
    if as_json:
        emit_json(
            {
                "key": key.hex(),
                "status": status,
                "version": list(outcome.version),
                "copies": outcome.copies,
                "reason": outcome.reason.label,
                **more,
            }
        )
    elif outcome:
        results().print(f"{what}: {_success(what, outcome, version)}  {key.hex()}", soft_wrap=True)
    if outcome:
        return
    text = {
        PutStatus.SUPERSEDED: f"a newer value is there (version {version})",
        PutStatus.UNKNOWN: "the answer did not come in time; it may or may not have been done: look with `emberkv get`",
    }.get(outcome.status, f"refused: {reason}")
    bad_input = outcome.reason in (RefuseReason.TOO_LARGE, RefuseReason.BAD_KEY, RefuseReason.NO_NAMESPACE)
    if not as_json:
        emit_error(f"{what}: {text}")
    raise typer.Exit(2 if bad_input else 1)


def _success(what: str, outcome: PutOutcome, version: str) -> str:
    """'stored, version 1.7, 2 copies', 'deleted, version 1.8, at 2 replicas', or how far it came."""
    if outcome.status is not PutStatus.STORED:
        return outcome.status.name.lower()
    many = outcome.copies != 1
    if what == "delete":
        return f"deleted, version {version}, at {outcome.copies} replica{'s' if many else ''}"
    return f"stored, version {version}, {outcome.copies} {'copies' if many else 'copy'}"


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("put")(put)
    app.command("get")(get)
    app.command("delete")(delete)
