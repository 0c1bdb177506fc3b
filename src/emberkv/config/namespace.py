"""What an operator may state of a namespace, in the configuration file or at run time, and what fits together.

Laws: a key that was not stated is not compared with anything; what is stated is valid alone (NamespaceConfig) and
together with the cluster (check_namespace), or refused with one line that begins with the name of the key. Geometry
and level are fixed at creation; min_copies, factor, expiry, verify and owner may change (CHANGEABLE).
Limits: a strong namespace holds small records on the coordinator's engine, so replicas, expiry and parts mean nothing
there and are refused instead of ignored.
"""

from __future__ import annotations

import math
import re
from typing import Final, Literal

import msgspec

from emberkv.core.budget import parse_duration_ms
from emberkv.errors import ConfigError
from emberkv.types import BLOCK_BYTES_MAX, Level, Namespace

TOKEN_CHARS_MAX: Final = 64
NAMESPACES_MAX: Final = 512
"""Their list must fit one answer; each is a record that every node keeps. Dropped ones count, since they keep one."""
PARTS_MAX: Final = 64
COPIES_MAX: Final = 128
STRONG_BYTES_MAX: Final = 512 << 10
"""Largest record of a strong namespace: it passes through a database that syncs (design 2)."""
EXPIRY_MS_MIN: Final = 1000
"""Below a second the wall clocks of two machines may differ by more than the life of a block."""
EXPIRY_MS_MAX: Final = 10 * 365 * 86_400_000
CHANGEABLE: Final = ("min_copies", "factor", "expiry", "verify", "owner")
_REPLICAS_ONLY: Final = ("factor", "min_copies", "expiry", "parts", "verify")
"""Keys that say something about replicated blocks, and nothing about strong records."""

_TOKEN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def is_token(value: str) -> bool:
    """Can it be a name? Names end up in file names, metric labels and coordinator keys: plain characters only."""
    return len(value) <= TOKEN_CHARS_MAX and _TOKEN.fullmatch(value) is not None


def check_token(key: str, value: str) -> None:
    """Raises ConfigError for what cannot be a name."""
    if not is_token(value):
        shown = value if len(value) <= 2 * TOKEN_CHARS_MAX else f"{value[:TOKEN_CHARS_MAX]}..."
        raise ConfigError(
            f"{key}: {shown!r} is not a name: use 1 to {TOKEN_CHARS_MAX} letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )


def check_range(key: str, value: int, low: int, high: int) -> None:
    """Bounds of a number, both included."""
    if not low <= value <= high:
        raise ConfigError(f"{key}: {value} is not between {low} and {high}")


def parse_expiry_ms(text: str) -> int:
    """Life of a block in milliseconds; 0: for ever. Raises ConfigError."""
    try:
        wanted = parse_duration_ms(text)
    except ConfigError as error:
        raise ConfigError(f"expiry: {error}") from None
    if not math.isfinite(wanted) or not (wanted == 0 or EXPIRY_MS_MIN <= wanted <= EXPIRY_MS_MAX):
        raise ConfigError(f"expiry: {text!r} is neither 0 (for ever) nor between 1s and ten years")
    return int(wanted)


class NamespaceConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One `[[cluster.namespaces]]` table, or the arguments of `namespace create`; None: not stated."""

    name: str
    level: Literal["eventual", "session", "strong"] | None = None
    verify: Literal["pin", "entry"] | None = None
    """`pin`: checksum again before each answer; `entry`: only when bytes enter the node's memory."""
    factor: int | None = None
    """Replicas that keep the bytes; None: as many as the cluster has of each shard."""
    min_copies: int | None = None
    block_bytes_max: int | None = None
    parts: int | None = None
    expiry: str | None = None
    """Life of a block after it was stamped, like 10m; "0": for ever."""
    owner: str | None = None

    def __post_init__(self) -> None:
        check_token("name", self.name)
        if self.level == "strong":
            for key in _REPLICAS_ONLY:
                if getattr(self, key) is not None:
                    raise ConfigError(f"{key}: {_no_replicas(self.name)}: leave {key} out")
        if self.parts is not None and self.parts != 1:
            raise ConfigError(f"parts: namespace {self.name!r} asks for {self.parts}, this version serves 1")
        if self.min_copies is not None:
            check_range("min_copies", self.min_copies, 1, COPIES_MAX)
        if self.factor is not None:
            check_range("factor", self.factor, 1, COPIES_MAX)
        if self.block_bytes_max is not None:
            check_range("block_bytes_max", self.block_bytes_max, 1, BLOCK_BYTES_MAX)
        if self.expiry is not None:
            parse_expiry_ms(self.expiry)
        if self.owner:
            check_token("owner", self.owner)

    def namespace(self, cluster_factor: int, number: int = 1, generation: int = 1, revision: int = 0) -> Namespace:
        """The record that this creates, with defaults for what is not stated. Raises ConfigError."""
        strong = self.level == "strong"
        made = Namespace(
            name=self.name,
            id=number,
            generation=generation,
            level=int(Level[(self.level or "eventual").upper()]),
            factor=1 if strong else self.factor or cluster_factor,
            min_copies=self.min_copies or 1,
            verify_pin=self.verify != "entry",
            parts=1,
            block_bytes_max=self.block_bytes_max or (STRONG_BYTES_MAX if strong else BLOCK_BYTES_MAX),
            expiry_ms=parse_expiry_ms(self.expiry or "0"),
            owner=self.owner or "",
            revision=revision,
        )
        check_namespace(made, cluster_factor)
        return made

    def differences(self, record: Namespace) -> list[str]:
        """What is stated here and is otherwise in the cluster, as 'factor 2 here, 3 in the cluster'."""
        return [
            f"{key} {mine or 'none'} here, {shown[key] or 'none'} in the cluster"
            for shown in [policy_document(record)]
            for key, mine in policy_document(self).items()
            if mine is not None and mine != shown[key]
        ]


def policy_document(namespace: NamespaceConfig | Namespace) -> dict[str, str | int | None]:
    """Keys and values as an operator writes them, the same for what is stated (None: not) and what is recorded."""
    if isinstance(namespace, Namespace):
        return {
            "level": Level(namespace.level).name.lower(),
            "verify": "pin" if namespace.verify_pin else "entry",
            "factor": namespace.factor,
            "min_copies": namespace.min_copies,
            "block_bytes_max": namespace.block_bytes_max,
            "parts": namespace.parts,
            "expiry": duration(namespace.expiry_ms),
            "owner": namespace.owner,
        }
    stated: dict[str, str | int | None] = {
        field: getattr(namespace, field) for field in namespace.__struct_fields__ if field != "name"
    }
    if namespace.expiry is not None:
        stated["expiry"] = duration(parse_expiry_ms(namespace.expiry))
    return stated


def duration(ms: int) -> str:
    """Milliseconds as the largest unit that names them exactly: '10m', '1500ms'; '0' for none."""
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if ms and ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms" if ms else "0"


def check_namespace(namespace: Namespace, cluster_factor: int) -> None:
    """What a namespace's fields ask of one another and of the cluster. Raises ConfigError, one line, key first."""
    name = namespace.name
    if namespace.level == Level.STRONG:
        if namespace.block_bytes_max > STRONG_BYTES_MAX:
            raise ConfigError(
                f"block_bytes_max: {namespace.block_bytes_max} is more than a record of the strong namespace {name!r} "
                f"may have ({STRONG_BYTES_MAX}): KV blocks belong into an eventual or session namespace"
            )
        if (namespace.factor, namespace.min_copies, namespace.expiry_ms, namespace.parts) != (1, 1, 0, 1):
            raise ConfigError(f"factor: {_no_replicas(name)}")
        return
    if namespace.factor > cluster_factor:
        raise ConfigError(
            f"factor: namespace {name!r} asks for {namespace.factor} replicas, but each shard has {cluster_factor}: "
            "lower it or raise the cluster's factor"
        )
    if namespace.min_copies > namespace.factor:
        raise ConfigError(
            f"min_copies: {namespace.min_copies} copies asked by namespace {name!r}, but factor is "
            f"{namespace.factor}: lower min_copies or raise factor"
        )
    if namespace.level == Level.EVENTUAL and namespace.min_copies > 1:
        raise ConfigError(
            f"min_copies: namespace {name!r} is eventual, its puts wait for no copies: lower min_copies to 1 or create "
            "it with level session"
        )


def _no_replicas(name: str) -> str:
    return f"namespace {name!r} is strong, its records are kept by the coordinator's engine and not by replicas"
