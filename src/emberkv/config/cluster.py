"""What all nodes of a cluster must agree on; its digest is compared when a node joins.

Laws: a value that stands here is valid, alone and together with the others: the constructor refuses anything else with
one line that begins with the name of the key. Paths are absolute. The order of members means nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Final, Literal

import msgspec

from emberkv.core.budget import Budget, parse_duration_ms, plan
from emberkv.errors import ConfigError
from emberkv.types import BLOCK_BYTES_MAX, Level, Namespace

TOKEN_CHARS_MAX: Final = 64
MEMBERS_MAX: Final = 128
"""One takeover transaction and one status table must stay readable; larger clusters are not tested."""
NAMESPACES_MAX: Final = 1024
PARTS_MAX: Final = 64

_TOKEN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_token(key: str, value: str) -> None:
    """Names end up in file names, metric labels and coordinator keys, so only plain characters are let in."""
    if not _TOKEN.fullmatch(value) or len(value) > TOKEN_CHARS_MAX:
        raise ConfigError(
            f"{key}: {value!r} is not a name: use 1 to {TOKEN_CHARS_MAX} letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )


def check_range(key: str, value: int, low: int, high: int) -> None:
    """Bounds of a number, both included."""
    if not low <= value <= high:
        raise ConfigError(f"{key}: {value} is not between {low} and {high}")


def state_home() -> Path:
    """Where durable state goes when nobody says: $XDG_STATE_HOME/emberkv, else ~/.local/state/emberkv."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "emberkv"


class NamespaceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[cluster.namespaces]]` table: geometry and policy, fixed at creation (design 8)."""

    name: str
    level: Literal["eventual", "session", "strong"] = "eventual"
    verify: Literal["pin", "entry"] = "pin"
    """`pin`: checksum again before each answer; `entry`: only when bytes enter the node's memory."""
    min_copies: int = 1
    block_bytes_max: int = BLOCK_BYTES_MAX
    parts: int = 1

    def __post_init__(self) -> None:
        check_token("name", self.name)
        if self.level == "strong":
            raise ConfigError(f"level: namespace {self.name!r} asks for strong, which this version does not serve yet")
        if self.parts != 1:
            raise ConfigError(f"parts: namespace {self.name!r} asks for {self.parts}, this version serves 1")
        check_range("min_copies", self.min_copies, 1, MEMBERS_MAX)
        check_range("block_bytes_max", self.block_bytes_max, 1, BLOCK_BYTES_MAX)
        check_range("parts", self.parts, 1, PARTS_MAX)


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `[cluster]` table."""

    cluster_id: str
    members: list[str]
    failover_budget: str = "3s"
    """Longest outage of session puts after a primary is lost; every timer follows from it (core/budget.py)."""
    factor: int = 2
    """Replicas of each shard."""
    namespaces: list[NamespaceConfig] = msgspec.field(default_factory=lambda: [NamespaceConfig(name="default")])
    coordinator: Literal["embedded"] = "embedded"
    control_dir: str = ""
    """Memory-backed directory of control.db; empty: /dev/shm/emberkv-<cluster_id>."""
    data_dir: str = ""
    """Durable directory of the coordinator, shared by the nodes; empty: <state>/<cluster_id>/coordinator."""

    def __post_init__(self) -> None:
        check_token("cluster_id", self.cluster_id)
        check_range("members", len(self.members), 1, MEMBERS_MAX)
        for name in self.members:
            check_token("members", name)
        _check_unique("members", self.members)
        check_range("namespaces", len(self.namespaces), 1, NAMESPACES_MAX)
        _check_unique("namespaces", [namespace.name for namespace in self.namespaces])
        if self.factor < 1 or self.factor > len(self.members):
            raise ConfigError(f"factor: {self.factor} replicas need 1 to {len(self.members)} of the members listed")
        for namespace in self.namespaces:
            if namespace.min_copies > self.factor:
                raise ConfigError(
                    f"min_copies: {namespace.min_copies} copies asked by namespace {namespace.name!r}, but factor is "
                    f"{self.factor}: lower min_copies or raise factor"
                )
        for key, path in (("control_dir", self.control_dir), ("data_dir", self.data_dir)):
            if path and not os.path.isabs(path):
                raise ConfigError(f"{key}: {path!r} is not an absolute path")
        try:
            self.budget()
        except ConfigError as error:
            raise ConfigError(f"failover_budget: {error}") from None

    def budget(self) -> Budget:
        """All timers that follow from `failover_budget`."""
        return plan(parse_duration_ms(self.failover_budget))

    @property
    def control_path(self) -> Path:
        """Directory of control.db."""
        return Path(self.control_dir) if self.control_dir else Path("/dev/shm") / f"emberkv-{self.cluster_id}"

    @property
    def data_path(self) -> Path:
        """Directory of the coordinator's durable generation file."""
        return Path(self.data_dir) if self.data_dir else state_home() / self.cluster_id / "coordinator"

    def namespace_list(self) -> list[Namespace]:
        """The namespaces as the wire and the core know them; ids count from 1 in the order of the file."""
        return [
            Namespace(
                name=item.name,
                id=index,
                level=int(Level[item.level.upper()]),
                factor=self.factor,
                min_copies=item.min_copies,
                verify_pin=item.verify == "pin",
                parts=item.parts,
                block_bytes_max=item.block_bytes_max,
            )
            for index, item in enumerate(self.namespaces, start=1)
        ]

    def digest(self) -> str:
        """SHA-256 (hex) over all that must agree, the same however it was written down."""
        agreed = msgspec.structs.replace(
            self,
            members=sorted(self.members),
            failover_budget=f"{parse_duration_ms(self.failover_budget):g}ms",
            control_dir=str(self.control_path),
            data_dir=str(self.data_path),
        )
        return hashlib.sha256(msgspec.json.encode(agreed, order="sorted")).hexdigest()


def _check_unique(key: str, names: list[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"{key}: {name!r} is listed twice")
