"""TOML file + EMBERKV_* environment + explicit overrides -> checked structs; later ones win.

Laws: what is not known is refused, naming it, the nearest known key and where it stands. Every failure is one
ConfigError of one line. Relative paths of a file start at the file's directory.

    [cluster]  EMBERKV_CLUSTER_<KEY>  overrides {"cluster.<key>": value}      cluster.py
    [node]     EMBERKV_NODE_<KEY>     overrides {"node.<key>": value}         node.py

Sizes (keys that end in `bytes` or `bytes_max`) are numbers or text such as "512MiB"; in the environment a list is
separated by commas. Other EMBERKV_ variables (EMBERKV_ENDPOINTS) belong to the client and are left alone.
"""

from __future__ import annotations

import difflib
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import msgspec

from emberkv.config.cluster import DURATIONS, ClusterConfig, state_home
from emberkv.config.namespace import NamespaceConfig
from emberkv.config.node import NodeConfig
from emberkv.core.budget import Costs
from emberkv.errors import ConfigError
from emberkv.types import BLOCK_BYTES_MAX, Level

ENVIRONMENT_PREFIX: Final = "EMBERKV_"
FILE_BYTES_MAX: Final = 1 << 20
"""A configuration is a page of text; a larger file is something else."""

_TABLES: Final[dict[str, type[msgspec.Struct]]] = {"cluster": ClusterConfig, "node": NodeConfig}
_BELOW: Final[dict[str, type[msgspec.Struct]]] = {"namespaces": NamespaceConfig, "costs": Costs}
"""Keys of [cluster] that are tables of their own."""
_PATHS: Final = ("control_dir", "data_dir", "socket")
_PATH_LISTS: Final = ("nvme_dirs",)
_UNITS: Final = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("i", 1024), ("B", 1000), ("", 1024))
}


def parse_size(text: str) -> int:
    """Bytes of '512MiB', '2 GiB', '4096', '1.5G' (K, M, G, T are binary; KB, MB, ... decimal)."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"{text!r} is not a size: write it like 512MiB, 2GiB or a number of bytes")
    size = float(match[1]) * factor
    if size > 1 << 60:
        raise ConfigError(f"{text!r} is more than any machine has")
    return int(match[1]) * factor if match[1].isdigit() else int(size)


def load(
    path: str | os.PathLike[str],
    *,
    overrides: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[ClusterConfig, NodeConfig]:
    """Both tables of a file for `emberkv node --config`. `environment` None means os.environ. Raises ConfigError."""
    file = _File(Path(path).expanduser().absolute())
    tables = {name: dict(file.table(name)) for name in _TABLES}
    origins: dict[tuple[str, str], str] = {}
    for (table, key), value, origin in (
        *_from_environment(os.environ if environment is None else environment),
        *_from_overrides(overrides or {}),
    ):
        tables[table][key] = value
        origins[table, key] = origin
    cluster = _build("cluster", ClusterConfig, tables["cluster"], file, origins)
    if "name" in tables["node"] and "data_dir" not in tables["node"]:
        tables["node"]["data_dir"] = str(state_home().absolute() / cluster.cluster_id / str(tables["node"]["name"]))
    node = _build("node", NodeConfig, tables["node"], file, origins)
    _check_together(cluster, node, file)
    return cluster, node


class _File:
    """A parsed TOML file that knows on which line a key stands."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                raw = stream.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
        try:
            self.text = raw.decode()
            if len(raw) > FILE_BYTES_MAX:
                raise ConfigError(f"{path} is larger than {FILE_BYTES_MAX} bytes: not a configuration")
            self.values: dict[str, Any] = tomllib.loads(self.text)
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not a text file in UTF-8") from None
        except tomllib.TOMLDecodeError as error:
            raise self._syntax_error(error) from None
        for key, value in self.values.items():
            if key not in _TABLES:
                raise ConfigError(f"{self.where('', key)}: unknown table or key {key!r}{_nearest(key, _TABLES)}")
            if not isinstance(value, dict):
                raise ConfigError(f"{self.where('', key)}: {key} must be a table: write [{key}]")

    def table(self, name: str) -> dict[str, Any]:
        """The values of one table, paths made absolute and `~` expanded."""
        table = dict(self.values.get(name, {}))
        for key in _PATHS:
            if isinstance(table.get(key), str) and table[key]:
                table[key] = _absolute(table[key], self.path.parent)
        for key in _PATH_LISTS:
            if isinstance(table.get(key), list):
                table[key] = [_absolute(p, self.path.parent) if isinstance(p, str) else p for p in table[key]]
        return table

    def where(self, table: str, key: str) -> str:
        """`file:line` of a key of a table (or of a table below it); the file alone when it is not found."""
        current = ""
        for number, line in enumerate(self.text.splitlines(), start=1):
            header = re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line)
            if header:
                current = header[1]
                names = [part.strip(" \"'") for part in current.split(".")]
                if (not table and names[0] == key) or (table and names[0] == table and key in names[1:]):
                    return f"{self.path}:{number}"
                continue
            inside = current == table or (table and current.startswith(f"{table}."))
            if inside and re.match(rf"""\s*["']?{re.escape(key)}["']?\s*(\.[^=]*)?=""", line):
                return f"{self.path}:{number}"
            if inside and re.search(rf"[{{,]\s*{re.escape(key)}\s*=", line):  # an inline table
                return f"{self.path}:{number}"
        return str(self.path)

    def _syntax_error(self, error: tomllib.TOMLDecodeError) -> ConfigError:
        match = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", str(error))
        if match:
            return ConfigError(f"{self.path}:{match[2]}: not valid TOML: {match[1]} (column {match[3]})")
        return ConfigError(f"{self.path}: not valid TOML: {error}")


def _absolute(text: str, base: Path) -> str:
    try:
        return os.path.normpath(base / Path(text).expanduser())
    except RuntimeError:
        raise ConfigError(f"{text!r} names a home directory that is not there") from None


def _nearest(key: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"


# ------------------------------------------------------------------------------------- environment and overrides

_Given = tuple[tuple[str, str], object, str]
"""(table, key), value, where it came from."""


def _from_environment(environment: Mapping[str, str]) -> Iterable[_Given]:
    for variable, text in sorted(environment.items()):
        for table, model in _TABLES.items():
            prefix = f"{ENVIRONMENT_PREFIX}{table.upper()}_"
            if variable.startswith(prefix):
                key = variable.removeprefix(prefix).lower()
                yield (table, key), _typed(model, key, text, variable, prefix), f"environment {variable}"


def _from_overrides(overrides: Mapping[str, object]) -> Iterable[_Given]:
    for dotted, value in overrides.items():
        table, _, key = dotted.partition(".")
        model = _TABLES.get(table)
        if model is None:
            raise ConfigError(f"override {dotted!r}: unknown table {table!r}{_nearest(table, _TABLES)}")
        plain = os.fspath(value) if isinstance(value, os.PathLike) else value
        typed = _typed(model, key, plain, dotted, "") if isinstance(plain, str) else plain
        yield (table, key), typed, f"override {dotted}"


def _typed(model: type[msgspec.Struct], key: str, text: str, source: str, prefix: str) -> object:
    """The text as the type that its key has in `model`."""
    fields = {field.name: field.type for field in msgspec.structs.fields(model)}
    if key not in fields:
        known = [prefix + name.upper() for name in fields] if prefix else list(fields)
        raise ConfigError(f"{source}: unknown key{_nearest(source if prefix else key, known)}")
    kind = fields[key]
    if key in _BELOW:
        raise ConfigError(f"{source}: {key} are tables; set them in the file")
    if kind == list[str]:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return [_absolute(part, Path.cwd()) for part in parts] if key in _PATH_LISTS else parts
    if key in _PATHS and text:
        return _absolute(text, Path.cwd())
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise ConfigError(f"{source}: {text!r} is neither true nor false")
        return text.lower() in ("true", "1")
    if kind is int and not _is_size(key):
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"{source}: {text!r} is not a whole number") from None
    return text


# ----------------------------------------------------------------------------------------------- checking tables

_StructT = TypeVar("_StructT", bound=msgspec.Struct)


def _is_size(key: str) -> bool:
    return key.endswith(("_bytes", "_bytes_max"))


def _build(
    table: str,
    model: type[_StructT],
    values: dict[str, Any],
    file: _File,
    origins: Mapping[tuple[str, str], str],
) -> _StructT:
    """The struct of a table; any failure says where the bad value stands."""

    def where(key: str) -> str:
        return origins.get((table, key)) or file.where(table, key)

    _check_keys(model, values, where)
    for key, below in _BELOW.items():
        tables = values.get(key)
        for inner in tables if isinstance(tables, list) else [tables]:
            if isinstance(inner, dict):
                _check_keys(below, inner, where)
    try:
        return msgspec.convert(values, model)
    except ConfigError as error:
        key, _, text = str(error).partition(": ")
        raise ConfigError(f"{where(key)}: {key}: {text}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(error, table, model, where)) from None


def _check_keys(model: type[msgspec.Struct], values: dict[str, Any], where: Callable[[str], str]) -> None:
    """Refuses unknown and missing keys, and reads sizes and durations in place."""
    fields = msgspec.structs.fields(model)
    known = [field.name for field in fields]
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{where(key)}: unknown key {key!r}{_nearest(key, known)}")
        if _is_size(key) and isinstance(value, str):
            try:
                values[key] = parse_size(value)
            except ConfigError as error:
                raise ConfigError(f"{where(key)}: {key}: {error}") from None
        elif key in (*DURATIONS, "expiry") and isinstance(value, int | float) and not isinstance(value, bool):
            values[key] = f"{value:g}s"
    missing = [field.name for field in fields if field.required and field.name not in values]
    if missing:
        table = next((name for name, known_model in _TABLES.items() if known_model is model), "cluster.namespaces")
        raise ConfigError(f"{where('')}: [{table}] lacks {missing[0]!r}")


def _explain(
    error: msgspec.ValidationError, table: str, model: type[msgspec.Struct], where: Callable[[str], str]
) -> str:
    """msgspec's text with the place in the file instead of a JSON path, and the choices of a word."""
    text, _, path = str(error).partition(" - at `$")
    names = re.findall(r"[A-Za-z_]+", path)
    key = names[-1] if names else table
    if "Invalid enum value" in text:
        owner = NamespaceConfig if len(names) > 1 else model
        hint = next((field.type for field in msgspec.structs.fields(owner) if field.name == key), None)
        # A key that need not be stated is "one of these words, or None".
        choices = [word for part in (hint, *get_args(hint)) for word in get_args(part) if isinstance(word, str)]
        text = f"{text.removeprefix('Invalid enum value ')} is not one of {', '.join(map(str, choices))}"
    return f"{where(key)}: {key}: {text[:1].lower()}{text[1:].replace('`', '')}"


def _check_together(cluster: ClusterConfig, node: NodeConfig, file: _File) -> None:
    """What neither table can see alone."""
    if node.name not in cluster.members:
        raise ConfigError(
            f"{file.where('node', 'name')}: name: {node.name!r} is not among the members "
            f"{', '.join(cluster.members)}{_nearest(node.name, cluster.members).partition('; known')[0]}"
        )
    # Strong records never lie in the arena.
    blocks = [space for space in cluster.namespace_list() if space.level != Level.STRONG]
    largest = max((namespace.block_bytes_max for namespace in blocks), default=BLOCK_BYTES_MAX)
    for key in ("arena_bytes", "staging_bytes"):
        # A limit that is only the format's own says nothing about the blocks to come.
        if largest < BLOCK_BYTES_MAX and getattr(node, key) < largest:
            raise ConfigError(f"{file.where('node', key)}: {key}: smaller than one block of {largest} bytes")
    if cluster.data_path == node.data_path:
        raise ConfigError(
            f"{file.where('node', 'data_dir')}: data_dir: {node.data_dir} is the coordinator's directory; "
            "each node needs one of its own"
        )


# ------------------------------------------------------------------------------------------------------- writing


def dump(cluster: ClusterConfig, node: NodeConfig) -> str:
    """The TOML text that `load` turns into these structs again."""
    lines = ["# Written by emberkv; `emberkv node --config THIS_FILE` starts the node.", "[cluster]"]
    lines += _assignments(cluster, skip=tuple(_BELOW))
    if cluster.costs != Costs():
        lines += ["", "[cluster.costs]", *_assignments(cluster.costs)]
    for namespace in cluster.namespaces:
        lines += ["", "[[cluster.namespaces]]", *_assignments(namespace)]
    lines += ["", "[node]", *_assignments(node)]
    return "\n".join(lines) + "\n"


def write(path: str | os.PathLike[str], cluster: ClusterConfig, node: NodeConfig) -> None:
    """Writes the file at once or not at all, readable by its owner only. Raises ConfigError."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(dump(cluster, node))
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write the configuration {target}: {error.strerror}") from None


def _assignments(config: msgspec.Struct, skip: tuple[str, ...] = ()) -> list[str]:
    # JSON writes numbers, truth values, texts and lists of texts exactly as TOML does.
    return [
        f"{field.name} = {msgspec.json.encode(getattr(config, field.name)).decode()}"
        for field in msgspec.structs.fields(config)
        if field.name not in skip and getattr(config, field.name) not in ("", None)
    ]
