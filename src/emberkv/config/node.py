"""What may differ from node to node: where it listens, where it keeps things, how much it may take.

Laws: a value that stands here is valid; the constructor refuses anything else with one line that begins with the name
of the key. Sizes are bytes, paths are absolute.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

import msgspec

from emberkv.config.namespace import check_range, check_token
from emberkv.errors import ConfigError
from emberkv.types import BLOCK_BYTES_MAX, SLOT_ALIGN

SOCKET_BYTES_MAX: Final = 107
"""Linux keeps a Unix socket's path in 108 bytes with a closing zero."""
ARENA_BYTES_MIN: Final = 1 << 20
CONNECTIONS_MAX: Final = 16_384
"""A connection costs a thread and three descriptors; more were not tested."""

NVME_BYTES_MIN: Final = 64 << 20
"""Sixteen segments of which one holds a block of 3 MiB; below that most of a directory would be headroom."""
NVME_DIRS_MAX: Final = 64


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `[node]` table."""

    name: str
    data_dir: str
    """Durable state of this node, locked by its process; load.py fills in <state>/<cluster_id>/<name>."""
    listen: str = "127.0.0.1:0"
    """TCP address for peers and clients; port 0 takes any free one."""
    socket: str = ""
    """Unix socket for engines of this machine; empty: node.sock in data_dir."""
    arena_bytes: int = 512 << 20
    staging_bytes: int = 64 << 20
    """Most staging memory of one connection: two of the largest blocks."""
    nvme_dirs: list[str] = []
    """Directories for blocks on NVMe, striped; each is used by this node alone. Empty: memory only."""
    nvme_bytes: int = 0
    """Most that each of nvme_dirs may take."""
    nvme_depth_min: int = 0
    """Blocks nearer to the head of their chain than this are kept in memory only."""
    connections_max: int = 2048
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    prefault: bool = True
    """Touch the arena's memory in the background after the start, so that no save pays for it."""

    def __post_init__(self) -> None:
        check_token("name", self.name)
        if not os.path.isabs(self.data_dir):
            raise ConfigError(f"data_dir: {self.data_dir!r} is not an absolute path")
        self.listen_address  # noqa: B018  (refuses a bad one)
        if self.socket and not os.path.isabs(self.socket):
            raise ConfigError(f"socket: {self.socket!r} is not an absolute path")
        length = len(os.fsencode(self.socket_path))
        if length > SOCKET_BYTES_MAX:
            raise ConfigError(
                f"socket: {self.socket_path} has {length} bytes, a Unix socket's path at most {SOCKET_BYTES_MAX}: "
                "set `socket` to a shorter one"
            )
        check_range("arena_bytes", self.arena_bytes, ARENA_BYTES_MIN, 1 << 50)
        check_range("staging_bytes", self.staging_bytes, SLOT_ALIGN, 32 * BLOCK_BYTES_MAX)
        self._check_nvme()
        check_range("connections_max", self.connections_max, 1, CONNECTIONS_MAX)

    def _check_nvme(self) -> None:
        for path in self.nvme_dirs:
            if not os.path.isabs(path):
                raise ConfigError(f"nvme_dirs: {path!r} is not an absolute path")
        if len(set(map(os.path.normpath, self.nvme_dirs))) < len(self.nvme_dirs):
            raise ConfigError("nvme_dirs: a directory is named twice")
        if len(self.nvme_dirs) > NVME_DIRS_MAX:
            raise ConfigError(f"nvme_dirs: {len(self.nvme_dirs)} directories, at most {NVME_DIRS_MAX}")
        if self.nvme_dirs:
            check_range("nvme_bytes", self.nvme_bytes, NVME_BYTES_MIN, 1 << 50)
        check_range("nvme_depth_min", self.nvme_depth_min, 0, 1 << 31)

    @property
    def listen_address(self) -> tuple[str, int]:
        """(host, port) of `listen`; an IPv6 host stands in brackets there."""
        host, colon, port = self.listen.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            colon = ""
        if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"listen: {self.listen!r} is not host:port, as in 127.0.0.1:7700 (port 0: any free one)")
        return host, int(port)

    @property
    def data_path(self) -> Path:
        """Directory of this node's durable state."""
        return Path(self.data_dir)

    @property
    def socket_path(self) -> Path:
        """Path of the Unix socket."""
        return Path(self.socket) if self.socket else self.data_path / "node.sock"
