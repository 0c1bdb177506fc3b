"""Which nodes a command talks to: --endpoint, else $EMBERKV_ENDPOINTS, else the cluster that `up` started last.

Laws: the note that `up` leaves is only believed while the process that wrote it lives.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from emberkv.cli.probe import check_endpoint
from emberkv.config import state_home
from emberkv.errors import ConfigError

VARIABLE: Final = "EMBERKV_ENDPOINTS"
NOTE_BYTES_MAX: Final = 64 << 10


class UpNote(msgspec.Struct, frozen=True):
    """up.json in the state directory: the cluster that runs in the foreground somewhere on this machine."""

    pid: int
    start_ticks: int
    """Start time of the process since boot: a pid alone may have been given to another one."""
    cluster_id: str
    directory: str
    endpoints: list[str]


def note_path() -> Path:
    """Where `up` leaves its note."""
    return state_home() / "up.json"


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # Field 22; the name in field 2 may hold anything, but ends with the last ')'.
    return int(stat.rpartition(")")[2].split()[19])


def leave_note(cluster_id: str, directory: Path, endpoints: Sequence[str]) -> None:
    """Names this process's cluster as the one started last. Raises ConfigError."""
    pid = os.getpid()
    note = UpNote(pid, start_ticks(pid), cluster_id, str(directory), list(endpoints))
    path = note_path()
    temporary = path.with_name(f".{path.name}.{pid}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(msgspec.json.encode(note))
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def remove_note() -> None:
    """Takes the note away if it is this process's."""
    note = read_note()
    if note is not None and note.pid == os.getpid():
        note_path().unlink(missing_ok=True)


def read_note() -> UpNote | None:
    """The note of a cluster that still runs, or None."""
    try:
        with note_path().open("rb") as stream:
            note = msgspec.json.decode(stream.read(NOTE_BYTES_MAX), type=UpNote)
    except (OSError, msgspec.MsgspecError):
        return None
    return note if note.start_ticks and start_ticks(note.pid) == note.start_ticks else None


def choose(given: Sequence[str] | None) -> list[str]:
    """The endpoints to use. Raises ConfigError with what to do when there are none, or one is malformed."""
    texts = list(given or [])
    if not texts:
        texts = [text.strip() for text in os.environ.get(VARIABLE, "").split(",") if text.strip()]
    if not texts:
        note = read_note()
        texts = note.endpoints if note else []
    if not texts:
        raise ConfigError(f"no cluster is known: start one with `emberkv up`, or give --endpoint or set {VARIABLE}")
    for text in texts:
        check_endpoint(text)
    return list(dict.fromkeys(texts))
