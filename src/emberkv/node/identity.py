"""A node's data directory: the lock that proves the previous process is gone, and who it was.

Laws: a directory that names another cluster or node is refused, never overwritten. The lock is held as long as the
process lives (flock: the kernel gives it back on any death), so a readable incarnation under a held lock belongs to a
dead process.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from emberkv.errors import ConfigError, NameInUse, NotOurs

FORMAT = 1
FILE_BYTES_MAX = 4096


class Identity(msgspec.Struct, frozen=True):
    """Contents of identity.json."""

    format: int
    cluster_id: str
    node: str
    incarnation: str
    """Hex, of the process that wrote it."""


class DataDirectory:
    """The locked directory. Raises NameInUse while another process holds it, NotOurs when it is someone else's."""

    def __init__(self, path: Path, cluster_id: str, node: str) -> None:
        self.path = path
        self._cluster_id = cluster_id
        self._node = node
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot use data directory {path}: {error.strerror or error}") from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_fd)
            raise NameInUse(f"node {node!r} runs already on {path}: stop it, or give this one another name") from None
        try:
            self.previous_incarnation = self._read()
        except BaseException:
            os.close(self._lock_fd)
            raise

    def _read(self) -> bytes:
        """Incarnation of the process that held this directory before; empty on the first start."""
        file = self.path / "identity.json"
        try:
            with file.open("rb") as stream:
                text = stream.read(FILE_BYTES_MAX)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
        try:
            identity = msgspec.json.decode(text, type=Identity)
            incarnation = bytes.fromhex(identity.incarnation)
        except (msgspec.MsgspecError, ValueError):
            raise NotOurs(f"{file} is not an EmberKV identity file: choose another data_dir or move it away") from None
        if identity.format != FORMAT or identity.cluster_id != self._cluster_id or identity.node != self._node:
            raise NotOurs(
                f"{self.path} belongs to node {identity.node!r} of cluster {identity.cluster_id!r} "
                f"(format {identity.format}): choose another data_dir"
            )
        return incarnation

    def claim(self, incarnation: bytes) -> None:
        """Writes who lives here now; synced before the name is claimed at the coordinator. Raises ConfigError."""
        identity = Identity(FORMAT, self._cluster_id, self._node, incarnation.hex())
        temporary = self.path / "identity.json.new"
        try:
            with temporary.open("wb") as stream:
                stream.write(msgspec.json.encode(identity))
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(self.path / "identity.json")
        except OSError as error:
            raise ConfigError(f"cannot write {self.path / 'identity.json'}: {error.strerror or error}") from error

    def close(self) -> None:
        """Gives the lock back."""
        os.close(self._lock_fd)
