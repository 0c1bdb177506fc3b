"""`kept.json` on the data disk: the few records of the embedded coordinator that must outlive its memory.

Why it exists: control.db lies in memory and begins anew with each boot, which is right for leases and owners and wrong
for what an operator decided: the namespaces, their policies and their generations (a generation that went back would
bring dropped strong records back to life).
Laws: written whole, synced and renamed, under the creation lock; a file that cannot be understood is refused, never
overwritten. It holds what control.db holds, never more: control.db is the truth while it lives.
Limits: the records under KEPT_PREFIX, about 200 bytes each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from emberkv.coord import sqlite_file
from emberkv.errors import NotOurs

KEPT_PREFIX: Final = "ns/"
FILE_NAME: Final = "kept.json"
FORMAT: Final = 1


class _Kept(msgspec.Struct, frozen=True):
    """The file's content; values in base64, as JSON has no bytes."""

    format: int
    cluster_id: str
    records: dict[str, bytes]


def load(data_dir: Path, cluster_id: str) -> dict[str, bytes]:
    """Key -> value of what was kept; empty when there is no file. Raises NotOurs, OSError."""
    path = data_dir / FILE_NAME
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except FileNotFoundError:
        return {}
    except msgspec.MsgspecError as error:
        raise NotOurs(f"{path} is damaged ({error}); restore it, or move it away to begin without namespaces") from None
    if kept.format != FORMAT or kept.cluster_id != cluster_id:
        raise NotOurs(f"{path} belongs to cluster {kept.cluster_id!r} (format {kept.format}); use another directory")
    return kept.records


def save(data_dir: Path, cluster_id: str, records: Mapping[str, bytes]) -> None:
    """Replaces the file; when it returns, the new one survives a power cut. Raises OSError."""
    kept = _Kept(FORMAT, cluster_id, dict(records))
    sqlite_file.replace_durably(data_dir / FILE_NAME, msgspec.json.format(msgspec.json.encode(kept), indent=1))
