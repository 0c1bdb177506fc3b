"""Configuration: three sources, one answer; whatever is wrong is one line that says where and what instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkv.config import ClusterConfig, NamespaceConfig, NodeConfig, dump, load, parse_size, write
from emberkv.core.budget import Costs
from emberkv.errors import ConfigError
from emberkv.types import Level

GOOD = """\
[cluster]
cluster_id = "c1"
members = ["n1", "n2", "n3"]
failover_budget = "3s"

[[cluster.namespaces]]
name = "default"
level = "session"
verify = "entry"
block_bytes_max = "4MiB"

[node]
name = "n1"
arena_bytes = "64MiB"
"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "emberkv"


def load_text(tmp_path: Path, text: str, **more: object) -> tuple[ClusterConfig, NodeConfig]:
    path = tmp_path / "node.toml"
    path.write_text(text)
    more.setdefault("environment", {})
    return load(path, **more)  # type: ignore[arg-type]


def refused(tmp_path: Path, text: str, **more: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text, **more)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{tmp_path}/", "")


def test_file_with_defaults(tmp_path: Path, state: Path) -> None:
    cluster, node = load_text(tmp_path, GOOD)
    assert cluster.factor == 2
    assert cluster.coordinator == "embedded"
    assert cluster.budget().budget_ms == 3000
    assert cluster.control_path == Path("/dev/shm/emberkv-c1")
    assert cluster.data_path == state / "c1" / "coordinator"
    assert node.data_path == state / "c1" / "n1"
    assert node.socket_path == state / "c1" / "n1" / "node.sock"
    assert node.arena_bytes == 64 << 20
    assert node.listen_address == ("127.0.0.1", 0)
    (namespace,) = cluster.namespace_list()
    assert (namespace.name, namespace.id, namespace.level, namespace.verify_pin) == ("default", 1, Level.SESSION, False)
    assert namespace.block_bytes_max == 4 << 20


def test_later_sources_win(tmp_path: Path, state: Path) -> None:
    environment = {
        "EMBERKV_NODE_ARENA_BYTES": "32MiB",
        "EMBERKV_NODE_CONNECTIONS_MAX": "7",
        "EMBERKV_NODE_PREFAULT": "false",
        "EMBERKV_CLUSTER_MEMBERS": "n1, n9",
        "EMBERKV_ENDPOINTS": "unix:/x",
        "HOME": "/root",
    }
    cluster, node = load_text(tmp_path, GOOD, environment=environment, overrides={"node.arena_bytes": 16 << 20})
    assert node.arena_bytes == 16 << 20
    assert node.connections_max == 7
    assert node.prefault is False
    assert cluster.members == ["n1", "n9"]
    _, node = load_text(tmp_path, GOOD, overrides={"node.socket": Path("/run/x.sock"), "node.listen": "[::1]:5"})
    assert node.socket == "/run/x.sock"
    assert node.listen_address == ("::1", 5)


def test_relative_paths_start_at_the_file(tmp_path: Path) -> None:
    _, node = load_text(tmp_path, GOOD + 'data_dir = "data"\nsocket = "./s/n1.sock"\n')
    assert node.data_path == tmp_path / "data"
    assert node.socket_path == tmp_path / "s" / "n1.sock"


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    cluster = ClusterConfig(
        cluster_id="c",
        members=["a", "b"],
        namespaces=[
            NamespaceConfig(name="default"),
            NamespaceConfig(name="kv", level="session", min_copies=2, parts=1, factor=2, expiry="10m", owner="team-a"),
            NamespaceConfig(name="ledger", level="strong"),
        ],
        costs=Costs(commit_ms=60.5, drift=1e-05),
        ttl="2s",
        heartbeat="0.5s",
        margin="150ms",
        tombstone_retention="2h",
        hint_age_max="30m",
        control_dir='/tmp/with "quotes" and \\',
        data_dir="/tmp/ünï",
    )
    node = NodeConfig(name="b", data_dir="/tmp/x", listen="0.0.0.0:7000", prefault=False, log_level="debug")
    path = tmp_path / "deep" / "node.toml"
    write(path, cluster, node)
    assert load(path, environment={}) == (cluster, node)
    assert path.stat().st_mode & 0o077 == 0
    assert list(path.parent.iterdir()) == [path]
    assert dump(cluster, node) == path.read_text()


def test_digest_is_of_the_meaning() -> None:
    def digest(**changes: object) -> str:
        fields: dict[str, object] = {"cluster_id": "c", "members": ["a", "b"], **changes}
        return ClusterConfig(**fields).digest()  # type: ignore[arg-type]

    assert digest() == digest(members=["b", "a"])
    assert digest() == digest(failover_budget="3000ms")
    assert digest() == digest(control_dir="/dev/shm/emberkv-c")
    changed = [
        digest(),
        digest(cluster_id="d"),
        digest(members=["a", "b", "c"]),
        digest(failover_budget="4s"),
        digest(factor=1),
        digest(control_dir="/elsewhere"),
        digest(data_dir="/elsewhere"),
        digest(ttl="2s"),
        digest(hint_age_max="10m"),
        digest(costs=Costs(commit_ms=60)),
    ]
    assert len(set(changed)) == len(changed)
    # Namespaces change at run time; each is compared with its own record, not with the other nodes' files.
    assert digest() == digest(namespaces=[NamespaceConfig(name="other")])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("arena_bytes", "arena_byte", "node.toml:14: unknown key 'arena_byte'; did you mean 'arena_bytes'?"),
        ("failover_budget", "budget", "node.toml:4: unknown key 'budget'; known: cluster_id, members, failover_budget"),
        ("[node]", "[nodes]", "node.toml:12: unknown table or key 'nodes'; did you mean 'node'?"),
        ("verify", "verfy", "node.toml:9: unknown key 'verfy'; did you mean 'verify'?"),
        ('"session"', '"sesion"', "node.toml:8: level: 'sesion' is not one of eventual, session, strong"),
        ('"64MiB"', '"64 apples"', "node.toml:14: arena_bytes: '64 apples' is not a size"),
        ('"64MiB"', "1.5", "node.toml:14: arena_bytes: expected int, got float"),
        ('"64MiB"', "64", "node.toml:14: arena_bytes: 64 is not between 1048576 and"),
        ('"64MiB"', '"2MiB"', "node.toml:14: arena_bytes: smaller than one block of 4194304 bytes"),
        ('"3s"', '"soon"', "node.toml:4: failover_budget: 'soon' is not a duration"),
        ('"3s"', '"200ms"', "failover budget 0.2s is infeasible here: the smallest is 1s"),
        ('"n1", "n2", "n3"', '"n1", "n2", "n2"', "node.toml:3: members: 'n2' is listed twice"),
        ('"n1", "n2", "n3"', '"n1", 2', "node.toml:3: members: expected str, got int"),
        ('"n1", "n2", "n3"', '"n1"', "factor: 2 replicas need 1 to 1 of the members"),
        ('"n1", "n2", "n3"', '"n1", "n/2"', "node.toml:3: members: 'n/2' is not a name"),
        ('name = "n1"', 'name = "n4"', "node.toml:13: name: 'n4' is not among the members n1, n2, n3"),
        ('name = "n1"', 'socket = "x"', "node.toml: [node] lacks 'name'"),
        ('cluster_id = "c1"', "", "node.toml: [cluster] lacks 'cluster_id'"),
        ('name = "default"', "parts = 1", "node.toml: [cluster.namespaces] lacks 'name'"),
        ('verify = "entry"', "min_copies = 3", "min_copies: 3 copies asked by namespace 'default', but factor is 2"),
        ('verify = "entry"', "parts = 0", "node.toml:9: parts: namespace 'default' asks for 0, this version serves 1"),
        ("[[cluster.namespaces]]", "[cluster.namespaces]", "namespaces: expected array, got object"),
        ('cluster_id = "c1"', 'cluster_id = "c1', "node.toml:2: not valid TOML"),
        ("[node]", "[node]\nlisten = 'localhost'", "node.toml:13: listen: 'localhost' is not host:port"),
        ("[node]", "[node]\nlisten = '::1:80'", "node.toml:13: listen: '::1:80' is not host:port"),
        ("[node]", "[node]\nlisten = 'h:99999'", "node.toml:13: listen: 'h:99999' is not host:port"),
        ("[node]", f"[node]\nsocket = '/{'d' * 120}'", "a Unix socket's path at most 107: set `socket` to a shorter"),
        ("[node]", "[node]\nprefault = 'yes'", "node.toml:13: prefault: expected bool, got str"),
        ("[node]", "[node]\ndata_dir = '~nobody-like-this/x'", "names a home directory that is not there"),
        ("[cluster]", "x = 1\n[cluster]", "node.toml:1: unknown table or key 'x'"),
        ('"3s"', '"1e9s"', "node.toml:4: failover_budget: failover budget 1e+09s: it must be above 0"),
        ('"3s"', '"-1"', "node.toml:4: failover_budget: failover budget -1s: it must be above 0"),
        ('"3s"', '"nan"', "node.toml:4: failover_budget: failover budget nans: it must be above 0"),
        ('"3s"', '"banana"', "node.toml:4: failover_budget: 'banana' is not a duration"),
        (
            '"3s"',
            '"3s"\nttl = "5s"',
            "node.toml:5: ttl: ttl 5000 ms makes an outage of 5580.0 ms, longer than the failov",
        ),
        ('"3s"', '"3s"\nttl = "-1"', "node.toml:5: ttl: '-1' is not a time above 0"),
        ('"3s"', '"3s"\nttl = "inf"', "node.toml:5: ttl: 'inf' is not a time above 0"),
        (
            '"3s"',
            '"3s"\nttl = 0.4',
            "node.toml:5: ttl: a healthy node would lose its lease: T(1-d)/(1+d) - m >= heartb",
        ),
        ('"3s"', '"3s"\nmargin = "1.5s"', "node.toml:5: margin: a healthy node would lose its lease"),
        ('"3s"', '"3s"\nmargin = "50ms"', "node.toml:5: margin: margin 50 ms is shorter than max(50, 3j) = 120 ms"),
        ('"3s"', '"3s"\nheartbeat = "1s"', "heartbeat: heartbeat 1000 ms is longer than a third of the ttl of 2420 ms"),
        ('"3s"', '"3s"\nhint_age_max = "1h"', "hint_age_max: 1h is not shorter than tombstone_retention 1h"),
        ('"3s"', '"3s"\nhint_age_max = "0"', "node.toml:5: hint_age_max: '0' is not between 1s and 30 days"),
        (
            "[node]",
            "[cluster.costs]\ncommit = 5\n[node]",
            "node.toml:13: unknown key 'commit'; did you mean 'commit_ms'",
        ),
        ("[node]", "[cluster.costs]\ncommit_ms = -5\n[node]", "node.toml:13: commit_ms: -5 is not a positive number"),
        ("[node]", "[cluster.costs]\ndrift = 0.5\n[node]", "node.toml:13: drift: 0.5 leaves no room for any lease"),
        ("[node]", "[cluster.costs]\ncommit_ms = 'x'\n[node]", "node.toml:13: commit_ms: expected float, got str"),
        ('verify = "entry"', "factor = 3", "factor: namespace 'default' asks for 3 replicas, but each shard has 2"),
        (
            '"session"',
            '"eventual"\nmin_copies = 2',
            "min_copies: namespace 'default' is eventual, its puts wait for no copies",
        ),
        (
            'verify = "entry"',
            'expiry = "10ms"',
            "node.toml:9: expiry: '10ms' is neither 0 (for ever) nor between 1s and ten",
        ),
        ('verify = "entry"', 'expiry = "soon"', "node.toml:9: expiry: 'soon' is not a duration"),
        ('verify = "entry"', 'owner = "a b"', "node.toml:9: owner: 'a b' is not a name"),
        (
            '"session"',
            '"strong"',
            "verify: namespace 'default' is strong, its records are kept by the coordinator's engine",
        ),
        (
            '"session"\nverify = "entry"',
            '"strong"',
            "block_bytes_max: 4194304 is more than a record of the strong namesp",
        ),
    ],
)
def test_bad_files(tmp_path: Path, state: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    assert message in refused(tmp_path, GOOD.replace(old, new, 1))


def test_bad_environment_and_overrides(tmp_path: Path, state: Path) -> None:
    def environment(**variables: str) -> str:
        return refused(tmp_path, GOOD, environment=variables)

    assert "EMBERKV_NODE_ARENA_BYTE: unknown key; did you mean 'EMBERKV_NODE_ARENA_BYTES'?" in environment(
        EMBERKV_NODE_ARENA_BYTE="1"
    )
    assert "EMBERKV_NODE_CONNECTIONS_MAX: 'many' is not a whole number" in environment(
        EMBERKV_NODE_CONNECTIONS_MAX="many"
    )
    assert "EMBERKV_NODE_PREFAULT: 'maybe' is neither true nor false" in environment(EMBERKV_NODE_PREFAULT="maybe")
    message = environment(EMBERKV_NODE_ARENA_BYTES="10 MB?")
    assert message.startswith("environment EMBERKV_NODE_ARENA_BYTES: arena_bytes: '10 MB?' is not a size")
    assert "override 'nod.x': unknown table 'nod'; did you mean 'node'?" in refused(
        tmp_path, GOOD, overrides={"nod.x": 1}
    )
    assert "override node.arena: unknown key 'arena'" in refused(tmp_path, GOOD, overrides={"node.arena": 1})


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration .*none.toml: No such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    with pytest.raises(ConfigError, match="not a text file in UTF-8"):
        load(tmp_path / "binary")
    (tmp_path / "huge").write_bytes(b"#" * (1 << 20) + b"\n")
    with pytest.raises(ConfigError, match="not a configuration"):
        load(tmp_path / "huge")


def test_a_node_may_not_live_in_the_coordinators_directory(tmp_path: Path) -> None:
    text = GOOD.replace("[[", 'data_dir = "d"\n[[', 1) + 'data_dir = "d"\n'
    assert "is the coordinator's directory" in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1KiB", 1024),
        ("512MiB", 512 << 20),
        ("2 GiB", 2 << 30),
        ("1.5G", 3 << 29),
        ("3mb", 3_000_000),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "1 2", "5 XB", "99999999999 TiB", "nan", "٣"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_size(text)


def test_a_namespace_states_only_what_it_names() -> None:
    record = NamespaceConfig(name="kv", level="session", min_copies=2, expiry="90s").namespace(3)
    assert (record.factor, record.min_copies, record.expiry_ms, record.verify_pin) == (3, 2, 90_000, True)
    assert NamespaceConfig(name="kv").differences(record) == []
    assert NamespaceConfig(name="kv", expiry="1.5m", factor=3, level="session").differences(record) == []
    assert NamespaceConfig(name="kv", factor=2, owner="x").differences(record) == [
        "factor 2 here, 3 in the cluster",
        "owner x here, none in the cluster",
    ]


def test_a_strong_namespace_asks_nothing_of_replicas() -> None:
    record = NamespaceConfig(name="ledger", level="strong").namespace(3)
    assert (record.factor, record.min_copies, record.block_bytes_max) == (1, 1, 512 << 10)
    for key, value in {"factor": 1, "min_copies": 1, "expiry": "0", "parts": 1, "verify": "pin"}.items():
        with pytest.raises(ConfigError, match=f"^{key}: namespace 'ledger' is strong"):
            NamespaceConfig(name="ledger", level="strong", **{key: value})  # type: ignore[arg-type]


def test_stated_timers_reach_the_budget() -> None:
    stated = {"ttl": "2s", "heartbeat": "500ms", "margin": "200ms"}
    budget = ClusterConfig(cluster_id="c", members=["a", "b"], **stated).budget()  # type: ignore[arg-type]
    assert (budget.ttl_ms, budget.heartbeat_ms, budget.margin_ms) == (2000, 500, 200)
    assert budget.worst_case_ms < budget.budget_ms
    slow = ClusterConfig(cluster_id="c", members=["a", "b"], costs=Costs(commit_ms=100)).budget()
    assert slow.ttl_ms < ClusterConfig(cluster_id="c", members=["a", "b"]).budget().ttl_ms
