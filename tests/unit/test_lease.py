"""The right to act: membership and the lease."""

import pytest

from emberkv.core import effects as fx
from emberkv.core import events as ev
from emberkv.core.lease import TRANSITIONS, Phase
from emberkv.errors import InvariantViolation
from emberkv.ports import CommitStatus
from emberkv.types import EPOCH_GENERATION_SHIFT, checksum
from harness.bare import MS, TTL, Bare, beat, beats, live, only

FULL_RIGHT = TTL - 60 * MS


def test_joins_an_empty_cluster_and_its_right_is_dated_from_before_the_send():
    bare = Bare()
    commit = only(beats(bare.records(full=True)), fx.Commit)
    assert [compare.revision for compare in commit.compares] == [0]
    sent = bare.now
    bare.now += 100 * MS
    bare.committed(commit, sent=sent)
    lease = bare.core.lease
    assert lease.phase is Phase.MEMBER
    assert lease.deadline_ns == sent + FULL_RIGHT
    assert lease.open(sent + FULL_RIGHT - 1)
    assert not lease.open(sent + FULL_RIGHT)
    assert lease.liveness_epoch == (1 << EPOCH_GENERATION_SHIFT) + 1


def test_renews_so_often_that_three_periods_and_a_commit_fit_into_a_lease_one_at_a_time():
    bare = Bare().join()
    settings = bare.core.state.settings
    period_ms = settings.heartbeat_ns / MS
    assert 3 * settings.heartbeat_ns + settings.commit_ns + settings.margin_ns <= settings.ttl_ns
    assert not beats(bare.tick(period_ms - 1))
    commit = only(beats(bare.tick(2)), fx.Commit)
    assert not beats(bare.tick(300))
    bare.committed(commit, sent=bare.now - 300 * MS)
    assert bare.core.lease.deadline_ns == bare.now - 300 * MS + FULL_RIGHT


def test_unknown_renewal_extends_nothing_and_the_same_epoch_goes_on_after_it():
    bare = Bare().join()
    deadline = bare.core.lease.deadline_ns
    bare.committed(only(beats(bare.tick(201)), fx.Commit), CommitStatus.UNKNOWN)
    assert bare.core.lease.deadline_ns == deadline
    assert bare.core.lease.healthy_since_ns is None
    epoch = bare.core.lease.liveness_epoch
    bare.committed(only(beats(bare.tick(900)), fx.Commit))
    assert bare.core.lease.open(bare.now)
    assert bare.core.lease.liveness_epoch == epoch


def test_expired_node_loses_its_shards_and_rejoins_under_a_new_epoch():
    bare = Bare().join().own()
    commit = only(beats(bare.tick(201)), fx.Commit)
    bare.committed(commit, CommitStatus.REFUSED)
    assert bare.core.lease.phase is Phase.LOST
    assert not any(bare.core.state.view.primary_epoch)
    epoch = bare.core.lease.liveness_epoch
    bare.records(("live/a", live("a", epoch + 1, dead=True)))
    join = only(beats(bare.tick(300)), fx.Commit)
    bare.committed(join)
    assert bare.core.lease.liveness_epoch == epoch + 2
    assert not any(bare.core.state.view.primary_epoch)


def test_another_process_under_our_name_stops_this_one():
    bare = Bare().join()
    bare.committed(only(beats(bare.tick(201)), fx.Commit), CommitStatus.REFUSED)
    effects = bare.records(("live/a", live("a", bare.core.lease.liveness_epoch + 1, checksum(b"other"))))
    assert bare.core.lease.phase is Phase.REFUSED
    assert only(effects, fx.Note).alarm
    assert not beats(bare.tick(5000))


def stranger(**settings: object) -> Bare:
    bare = Bare(**settings)
    bare.records(("live/a", live("a", 9, checksum(b"old"))), ("hb/a", beat(9, 1)), full=True)
    return bare


def test_without_proof_a_new_process_waits_a_whole_lease_and_compares_the_heartbeat_it_timed():
    bare = stranger()
    assert bare.core.lease.phase is Phase.WAITING
    assert not beats(bare.tick(600))
    commit = only(beats(bare.tick(1)), fx.Commit)
    assert {compare.key for compare in commit.compares} == {"live/a", "hb/a"}


def test_a_record_was_outwaited_only_as_long_as_its_heartbeat_stands_still():
    """The old process was slow, not gone: it has beaten again while the join was on its way."""
    bare = stranger()
    bare.tick(600)
    join = only(beats(bare.tick(1)), fx.Commit)
    bare.records(("hb/a", beat(9, 2)))
    bare.committed(join, CommitStatus.REFUSED)
    assert not beats(bare.tick(300))
    assert bare.core.lease.phase is Phase.WAITING


def test_a_late_answer_to_the_join_does_not_hide_that_we_were_expired_since():
    bare = Bare()
    join = only(beats(bare.records(full=True)), fx.Commit)
    bare.revision = 6
    bare.records(("live/a", live("a", 99, dead=True)))
    bare.step(ev.Committed(bare.now, join.op, CommitStatus.COMMITTED, 2, bare.now))
    assert bare.core.state.view.live["a"].dead


def test_a_name_that_moves_is_in_use():
    bare = stranger()
    bare.now += 300 * MS
    effects = bare.records(("hb/a", beat(9, 2)))
    assert bare.core.lease.phase is Phase.REFUSED
    assert only(effects, fx.Note).alarm
    assert not beats(bare.tick(2000))


def test_proof_of_the_old_process_or_its_death_ends_the_wait():
    assert stranger(previous_incarnation=checksum(b"old")).core.lease.phase is Phase.JOINING
    bare = stranger()
    assert beats(bare.records(("live/a", live("a", 10, checksum(b"old"), dead=True))))


def test_lost_join_race_does_not_overwrite_the_winner():
    bare = Bare()
    join = only(beats(bare.records(full=True)), fx.Commit)
    bare.records(("live/a", live("a", 9, checksum(b"winner"))), ("hb/a", beat(9, 1)))
    bare.committed(join, CommitStatus.REFUSED)
    assert not beats(bare.tick(300))
    assert bare.core.lease.phase is Phase.WAITING


def test_unknown_join_that_did_happen_is_read_back():
    bare = Bare()
    join = only(beats(bare.records(full=True)), fx.Commit)
    bare.records(*((write.key, write.value) for write in join.writes))
    bare.committed(join, CommitStatus.UNKNOWN)
    assert bare.core.lease.phase is Phase.MEMBER
    assert not bare.core.lease.open(bare.now)
    bare.committed(only(beats(bare.tick(201)), fx.Commit))
    assert bare.core.lease.open(bare.now)


def test_a_commit_as_slow_as_an_outage_starts_the_grace_anew():
    bare = Bare().join()
    commit = only(beats(bare.tick(201)), fx.Commit)
    sent = bare.now
    bare.now += 400 * MS
    bare.committed(commit, sent=sent)
    assert bare.core.lease.healthy_since_ns == bare.now


def test_an_incarnation_takes_only_the_moves_of_its_table():
    lease = Bare().core.lease
    with pytest.raises(InvariantViolation):
        lease._move("renewal refused")
    for phase, what in TRANSITIONS:
        lease.phase = phase
        lease._move(what)
        assert lease.phase is TRANSITIONS[phase, what]
    assert not any(phase is Phase.REFUSED for phase, _ in TRANSITIONS)  # which is the end


def test_what_a_step_asks_about_the_lease_is_asked_with_the_time_of_that_step():
    bare = Bare().join()
    assert bare.core.state.lease_open()
    bare.tick(FULL_RIGHT / MS)
    assert not bare.core.state.lease_open()
