"""The simulated cluster: does the outside get what a real one would give, and do the parts fail as real ones do?"""

from __future__ import annotations

from typing import Any

import pytest

from emberkv.core.view import LIVE_PREFIX
from emberkv.messages import Offer
from emberkv.ports import Compare, Write
from emberkv.sim.cluster import Cluster, key_of
from emberkv.sim.engine import MS, Fault, Options
from emberkv.sim.faults import Faults
from emberkv.sim.network import Item
from emberkv.sim.prober import Prober, probe_keys
from emberkv.types import SHARDS, Level, MissReason, PutStatus, shard_of


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster(Options(), seed=3)
    assert made.run_until(made.settled, 5000) is not None
    made.run_ms(1500)
    return made


class Answers:
    """Takes the one answer of a request."""

    def __init__(self) -> None:
        self.all: list[tuple[Any, ...]] = []

    def __call__(self, *answer: Any) -> None:
        self.all.append(answer)

    @property
    def only(self) -> tuple[Any, ...]:
        assert len(self.all) == 1, self.all
        return self.all[0]


def owned_by(cluster: Cluster, name: str) -> bytes:
    return next(key for key in map(key_of, range(9999)) if cluster.primary(shard_of(key)) == name)


def put(cluster: Cluster, node: str, key: bytes, data: bytes, **options: Any) -> Any:
    answers = Answers()
    cluster.put(node, [key], [data], done=answers, **options)
    cluster.run_ms(400)
    outcomes = answers.only[0]
    return outcomes[0] if outcomes is not None else None


def get(cluster: Cluster, node: str, key: bytes, **options: Any) -> tuple[Any, Any]:
    answers = Answers()
    cluster.get(node, [key], done=answers, **options)
    cluster.run_ms(400)
    infos, datas = answers.only
    return (infos[0], datas[0]) if infos is not None else (None, None)


def test_what_one_node_takes_all_nodes_find(cluster):
    for number, node in enumerate(cluster.names):
        outcome = put(cluster, node, key_of(number), b"bytes %d" % number, min_copies=2)
        assert outcome.status is PutStatus.STORED
        assert outcome.copies == 2
        for reader in cluster.names:
            info, data = get(cluster, reader, key_of(number))
            assert (info.reason, data) == (MissReason.NONE, b"bytes %d" % number)


def test_a_delete_is_seen_by_all(cluster):
    put(cluster, "a", key_of(1), b"x")
    assert put(cluster, "b", key_of(1), b"", delete=True).status is PutStatus.STORED
    assert get(cluster, "c", key_of(1))[0].reason == MissReason.DELETED


def test_a_request_to_a_dead_or_frozen_node_ends_with_nothing(cluster):
    cluster.processes["a"].pause()
    cluster.processes["b"].kill()
    assert put(cluster, "a", key_of(1), b"x", deadline_ms=50) is None
    assert get(cluster, "b", key_of(1), deadline_ms=50) == (None, None)


def test_a_frozen_node_goes_on_where_it_was(cluster):
    key = owned_by(cluster, "a")
    cluster.processes["a"].pause()
    cluster.run_ms(cluster.budget.ttl_ms / 4)
    cluster.processes["a"].wake()
    assert put(cluster, "a", key, b"x").status is PutStatus.STORED


def test_the_shards_of_a_frozen_node_are_taken_and_it_comes_back_as_a_learner(cluster):
    key = owned_by(cluster, "a")
    cluster.processes["a"].pause()
    cluster.run_ms(2 * cluster.options.budget_ms)
    assert cluster.primary(shard_of(key)) in ("b", "c")
    cluster.processes["a"].wake()
    assert put(cluster, "a", key, b"x").status is PutStatus.STORED
    assert cluster.settled()


def test_a_paused_machine_thinks_no_time_has_passed(cluster):
    process = cluster.processes["a"]
    process.pause(machine=True)
    before = process.clock.now_ns()
    cluster.run_ms(2 * cluster.options.budget_ms)
    assert process.clock.now_ns() == before


def test_a_restart_is_a_new_life_with_nothing_in_it(cluster):
    process = cluster.processes["a"]
    put(cluster, "a", owned_by(cluster, "a"), b"x")
    held, core, life = process.tier.usage()[0], process.core, process.lives
    assert held
    process.kill()
    process.start()
    assert process.lives == life + 1
    assert process.core is not core
    assert process.tier.usage()[0] == 0


def test_observers_see_acknowledgements_commits_and_lives(cluster):
    seen: dict[str, list[Any]] = {}
    cluster.observe(lambda kind, process, detail: seen.setdefault(kind, []).append(detail))
    put(cluster, "a", owned_by(cluster, "a"), b"x")
    cluster.processes["b"].kill()
    cluster.run_ms(2 * cluster.options.budget_ms)
    assert any(ack.stored() for ack in seen["ack"])
    assert "kill" in seen["life"]
    assert any(write.key == f"{LIVE_PREFIX}b" for commit in seen["commit"] for write in commit.writes)


# -- network -----------------------------------------------------------------------------------------------------------


def message(number: int) -> Offer:
    return Offer(number, 1, [])


def stream_with_log(cluster: Cluster) -> tuple[Any, list[int]]:
    stream, got = cluster.network.streams[("a", "b")], []

    def receive(stream: Any, request: int, message: Offer, data: list[bytes]) -> None:
        got.append(message.shard)
        stream.next()

    cluster.processes["b"].receive = receive  # type: ignore[method-assign]
    return stream, got


def test_a_stream_keeps_its_order_through_cuts_and_pauses(cluster):
    stream, got = stream_with_log(cluster)
    link = cluster.network.link("a", "b")
    for number in range(40):
        stream.send(Item(number, message(number), [], lambda: None))
        if number == 10:
            link.clogged += 1
        if number == 15:
            cluster.processes["b"].pause()
        if number == 25:
            link.clogged -= 1
            cluster.network.freed(link)
        if number == 35:
            cluster.processes["b"].wake()
        cluster.run_ms(0.3)
    cluster.run_ms(50)
    assert got == sorted(got)
    assert [number for number in got if number < 40] == list(range(40))


def test_a_stream_breaks_when_its_bytes_are_stuck(cluster):
    stream, got = stream_with_log(cluster)
    sent: list[int] = []
    cluster.network.link("a", "b").cut += 1
    for number in range(5):
        stream.send(Item(number, message(number), [], lambda n=number: sent.append(n)))
    cluster.run_ms(cluster.options.tcp_timeout_ms + 10)
    assert not stream.open
    assert sent == list(range(5)), "each message gives its bytes back once"
    assert not got
    assert "b" not in cluster.processes["a"].core.state.peers_up


def test_a_full_queue_ends_the_connection_and_a_new_one_begins():
    cluster = Cluster(Options(queue_max=2), seed=3)
    assert cluster.run_until(cluster.settled, 5000) is not None
    cluster.run_ms(1500)
    core = cluster.processes["a"].core
    for _ in range(5):
        core.state.send("b", message(0), [])
    cluster.run_ms(cluster.tick_ms * 2)
    assert "b" not in core.state.peers_up
    cluster.run_ms(500)
    assert "b" in core.state.peers_up


def test_a_one_way_cut_lets_requests_through_and_loses_their_answers(cluster):
    key = owned_by(cluster, "b")
    cluster.network.link("b", "a").cut += 1
    answers = Answers()
    cluster.put("a", [key], [b"x"], deadline_ms=100, done=answers)
    cluster.run_ms(50)
    assert cluster.processes["b"].core.state.directory.get(key) is not None
    assert not answers.all


def test_of_a_dead_senders_messages_a_head_may_still_arrive(cluster):
    stream, got = stream_with_log(cluster)
    cluster.network.link("a", "b").slower = 50.0
    for number in range(20):
        stream.send(Item(number, message(number), [], lambda: None))
    cluster.processes["a"].kill()
    cluster.run_ms(500)
    assert got == list(range(len(got)))


# -- coordinator -------------------------------------------------------------------------------------------------------


def test_a_commit_compares_revisions(cluster):
    coordinator = cluster.coordinator
    first = coordinator.commit(None, [Compare("x", 0)], [Write("x", b"1")])
    assert first.revision == coordinator.revision
    assert coordinator.commit(None, [Compare("x", 0)], [Write("x", b"2")]).status.value == "refused"
    assert coordinator.commit(None, [Compare("x", first.revision)], [Write("x", None)]).status.value == "committed"
    assert "x" not in coordinator.records


def test_watches_tell_the_last_of_each_key_and_cut_histories_say_so(cluster):
    coordinator = cluster.coordinator
    begun = coordinator.revision
    for value in (b"1", b"2"):
        coordinator.commit(None, [], [Write("live/z", value)])
    coordinator.commit(None, [], [Write("live/y", b"1")])
    coordinator.commit(None, [], [Write("live/y", None)])
    batch = coordinator.watch(begun + 1)
    assert [record.value for record in batch.records] == [b"2"]
    assert batch.deleted == ("live/y",)
    coordinator.compact()
    assert coordinator.watch(begun + 1).compacted


def test_an_old_state_can_be_listed_and_restored(cluster):
    coordinator = cluster.coordinator
    coordinator.commit(None, [], [Write("live/z", b"1")])
    then = dict(coordinator.records)
    assert coordinator.at_revision(coordinator.revision) == then
    revision = coordinator.revision
    cluster.run_ms(3 * cluster.options.budget_ms)
    assert coordinator.at_revision(revision) == then


def test_a_restored_backup_lifts_every_epoch(cluster):
    def highest() -> int:
        return max(p.core.state.view.epoch_seen[s] for p in cluster.processes.values() for s in range(SHARDS))

    before = highest()
    restore = Fault(0, "restore", "a", for_ms=1.5 * cluster.budget.ttl_ms, amount=500)
    Faults(cluster).begin(restore)
    cluster.run_ms(restore.for_ms + 3 * cluster.options.budget_ms)
    assert cluster.settled()
    epochs = [epoch for p in cluster.processes.values() for epoch in p.core.state.view.primary_epoch if epoch]
    assert min(epochs) > before
    assert {"P4", "P6b", "P6c"} <= set(cluster.waivers)


def test_a_silent_watch_hears_nothing_until_it_is_resumed(cluster):
    faults = Faults(cluster)
    faults.begin(Fault(0, "silent", "a", for_ms=500))
    cluster.coordinator.commit(None, [], [Write("drain/zz", b"")])
    revision = cluster.coordinator.revision
    cluster.run_ms(400)
    assert cluster.processes["a"].access._revision < revision
    cluster.run_ms(200)
    assert cluster.processes["a"].access._revision >= revision


STRONG_KEY = b"k" * 32


# -- the strong store --------------------------------------------------------------------------------------------------


def test_the_strong_store_is_reached_through_a_node(cluster):
    answers = Answers()
    cluster.strong("a").put(STRONG_KEY, b"p" * 24, b"v", deadline_ms=100, done=answers)
    cluster.run_ms(200)
    assert answers.only[0].status is PutStatus.STORED
    read = Answers()
    cluster.strong("b").get(STRONG_KEY, deadline_ms=100, done=read)
    cluster.run_ms(200)
    info, data = read.only[0]
    assert (info.reason, bytes(data)) == (0, b"v")


def test_a_strong_write_of_unknown_outcome_may_or_may_not_have_happened():
    cluster = Cluster(Options(unknown_share=1.0), seed=5, start=False)
    cluster.processes["a"].alive = True
    answers = Answers()
    for number in range(40):
        key, put_id = b"%032d" % number, b"%024d" % number
        cluster.strong("a").put(key, put_id, b"v", deadline_ms=20, done=answers)
    cluster.run_ms(200)
    assert {answer[0].status for answer in answers.all} <= {PutStatus.UNKNOWN, PutStatus.STORED}
    assert any(answer[0].status is PutStatus.UNKNOWN for answer in answers.all)
    assert 0 < len(cluster.strong_store.records) < 40


# -- outages -----------------------------------------------------------------------------------------------------------


def test_the_prober_measures_an_outage_that_is_there_and_within_the_budget(cluster):
    prober = Prober(cluster, "a")
    cluster.processes["a"].kill()
    prober.start(cluster.options.budget_ms)
    cluster.run_until(prober.ended, 5000)
    assert cluster.budget.ttl_ms / 3 < prober.outage_ms() <= cluster.options.budget_ms


def test_an_outage_that_never_ends_is_not_waited_for_for_ever(cluster):
    prober = Prober(cluster, "a")
    for name in cluster.names:
        cluster.processes[name].away += 1
    cluster.processes["a"].kill()
    prober.start(200.0)
    assert cluster.run_until(prober.ended, 5000) is not None
    assert prober.outage_ms() > 200.0


def test_there_is_a_probe_key_for_each_shard():
    assert [shard_of(key) for key in probe_keys()] == list(range(SHARDS))


def test_a_cluster_that_a_levels_reads_agree_on_keeps_its_levels(cluster):
    assert put(cluster, "a", key_of(5), b"e", level=Level.EVENTUAL).status in (PutStatus.ACCEPTED, PutStatus.STORED)
    cluster.run_ms(100)
    assert get(cluster, "c", key_of(5), level=Level.SESSION)[1] == b"e"
    assert cluster.now > 10 * MS
