"""What all nodes of a cluster must agree on; its digest is compared when a node joins.

Laws: a value that stands here is valid, alone and together with the others: the constructor refuses anything else with
one line that begins with the name of the key. Paths are absolute. The order of members means nothing. Namespaces are
only proposals for the first start: afterwards their records at the coordinator are the truth (node/namespaces.py).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final, Literal

import msgspec

from emberkv.config.namespace import NAMESPACES_MAX, NamespaceConfig, check_range, check_token
from emberkv.core.budget import Budget, Costs, Timers, check_costs, parse_duration_ms, plan
from emberkv.errors import ConfigError
from emberkv.types import Namespace

MEMBERS_MAX: Final = 128
"""One takeover transaction and one status table must stay readable; larger clusters are not tested."""
RETENTION_MS_MAX: Final = 30 * 86_400_000
"""A tombstone takes about 750 bytes; a month of deletes is more than their bound keeps anyway."""
STRONG_BYTES_MIN: Final = 256 << 20
"""The store keeps its last 128 to 192 changes beside the records: 96 MiB, if each is as large as it may be."""
DURATIONS: Final = ("failover_budget", "ttl", "heartbeat", "margin", "tombstone_retention", "hint_age_max")
"""Keys that are times: text such as 3s or 15m, or a number of seconds."""
_TIMERS: Final = ("ttl", "heartbeat", "margin")


def state_home() -> Path:
    """Where durable state goes when nobody says: $XDG_STATE_HOME/emberkv, else ~/.local/state/emberkv."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "emberkv"


class ClusterConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The `[cluster]` table."""

    cluster_id: str
    members: list[str]
    failover_budget: str = "3s"
    """Longest outage of session puts after a primary is lost; every timer follows from it (core/budget.py)."""
    costs: Costs = Costs()
    """What was measured of this environment, where the defaults of the budget do not hold."""
    ttl: str = ""
    """Lease time; empty: what the budget gives. Stated or not, it is checked against the budget and the health line."""
    heartbeat: str = ""
    """Renewal period; empty: a third of the ttl."""
    margin: str = ""
    """How long before its end a lease is not used any more; empty: max(50 ms, three times the loop's lateness)."""
    tombstone_retention: str = "1h"
    """How long a delete is remembered."""
    hint_age_max: str = "15m"
    """How long a put may wait for its primary; shorter than tombstone_retention, or it could undo a delete."""
    factor: int = 2
    """Replicas of each shard."""
    namespaces: list[NamespaceConfig] = msgspec.field(default_factory=lambda: [NamespaceConfig(name="default")])
    strong_bytes_max: int = 1 << 30
    """Most disk that the records of strong namespaces may take, for the whole cluster."""
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
        check_range("namespaces", len(self.namespaces), 0, NAMESPACES_MAX)
        _check_unique("namespaces", [namespace.name for namespace in self.namespaces])
        check_range("strong_bytes_max", self.strong_bytes_max, STRONG_BYTES_MIN, 1 << 40)
        if self.factor < 1 or self.factor > len(self.members):
            raise ConfigError(f"factor: {self.factor} replicas need 1 to {len(self.members)} of the members listed")
        for namespace in self.namespaces:
            namespace.namespace(self.factor)
        for key, path in (("control_dir", self.control_dir), ("data_dir", self.data_dir)):
            if path and not os.path.isabs(path):
                raise ConfigError(f"{key}: {path!r} is not an absolute path")
        check_costs(self.costs)
        self._check_times()

    def _check_times(self) -> None:
        for key in DURATIONS:
            if getattr(self, key) and key in _TIMERS and not 0 < self.duration_ms(key) < float("inf"):
                raise ConfigError(f"{key}: {getattr(self, key)!r} is not a time above 0")
            self.duration_ms(key)
        try:
            self.budget()
        except ConfigError as error:
            raise ConfigError(f"{self._blamed(str(error))}: {error}") from None
        for key in ("tombstone_retention", "hint_age_max"):
            if not 1000 <= self.duration_ms(key) <= RETENTION_MS_MAX:
                raise ConfigError(f"{key}: {getattr(self, key)!r} is not between 1s and 30 days")
        if self.duration_ms("hint_age_max") >= self.duration_ms("tombstone_retention"):
            raise ConfigError(
                f"hint_age_max: {self.hint_age_max} is not shorter than tombstone_retention "
                f"{self.tombstone_retention}: a put that waited longer than a delete is remembered would undo it"
            )

    def _blamed(self, text: str) -> str:
        """The key whose value a refusal of the budget's arithmetic is about."""
        first = text.partition(" ")[0]
        if first in _TIMERS:
            return first
        stated = [key for key in _TIMERS if getattr(self, key)]
        return stated[0] if stated and text.startswith("a healthy node") else "failover_budget"

    def duration_ms(self, key: str) -> float:
        """A time of this table in milliseconds; 0 when it is not stated. Raises ConfigError that names the key."""
        text: str = getattr(self, key)
        try:
            return parse_duration_ms(text) if text else 0.0
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from None

    def budget(self) -> Budget:
        """All timers that follow from `failover_budget`, with those that are stated instead."""
        timers = Timers(self.duration_ms("ttl"), self.duration_ms("heartbeat"), self.duration_ms("margin"))
        return plan(self.duration_ms("failover_budget"), self.costs, timers)

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
        return [item.namespace(self.factor, index) for index, item in enumerate(self.namespaces, start=1)]

    def digest(self) -> str:
        """SHA-256 (hex) over all that must agree, the same however it was written down.

        Without the namespaces: they change while the cluster runs, and each is compared with its own record.
        """
        agreed: dict[str, object] = msgspec.to_builtins(self)
        agreed |= {key: self.duration_ms(key) for key in DURATIONS}
        agreed |= {"namespaces": [], "members": sorted(self.members)}
        agreed |= {"control_dir": str(self.control_path), "data_dir": str(self.data_path)}
        return hashlib.sha256(msgspec.json.encode(agreed, order="sorted")).hexdigest()


def _check_unique(key: str, names: list[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"{key}: {name!r} is listed twice")
