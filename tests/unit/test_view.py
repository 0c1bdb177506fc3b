"""Decoded records and what follows from them."""

from emberkv.core.view import ClusterView, encode_record, owner_key
from emberkv.messages import ShardOwner
from emberkv.ports import Record
from harness.bare import beat, live


def view_of(*records: tuple[str, bytes, int]) -> ClusterView:
    view = ClusterView("a")
    view.set_membership(7)
    apply(view, *records)
    return view


def apply(view: ClusterView, *records: tuple[str, bytes, int], deleted=(), full=False, now_ns=1) -> None:
    view.apply([Record(*record) for record in records], list(deleted), full=full, now_ns=now_ns)


def own(primary: str, liveness: int, epoch: int) -> bytes:
    return encode_record(ShardOwner(primary, liveness, epoch, (primary, "b"), (primary,)))


def test_primary_only_under_the_current_liveness_epoch():
    view = view_of(("live/a", live("a", 7), 1), (owner_key(3), own("a", 7, 50), 2), (owner_key(4), own("a", 6, 50), 2))
    assert (view.primary_epoch[3], view.primary_epoch[4]) == (50, 0)
    assert not view.is_vacant(3)
    assert view.is_vacant(4)
    view.set_membership(0)
    assert view.primary_epoch[3] == 0


def test_vacancy_is_a_level():
    view = view_of(("live/b", live("b", 1), 1), (owner_key(3), own("b", 1, 5), 2))
    assert view.primary_of(3) == "b"
    apply(view, ("live/b", live("b", 2, dead=True), 3))
    assert view.primary_of(3) is None
    assert view.is_vacant(9)


def test_older_revisions_change_nothing_and_epochs_only_rise():
    view = view_of((owner_key(3), own("b", 1, 9), 5))
    apply(view, (owner_key(3), own("c", 1, 8), 4))
    assert view.owners[3].primary == "b"
    apply(view, (owner_key(3), own("c", 1, 8), 6))
    assert view.epoch_seen[3] == 9


def test_a_full_listing_deletes_what_is_not_in_it():
    view = view_of(("live/b", live("b", 1), 1), ("hb/b", beat(1, 1), 1), (owner_key(3), own("b", 1, 5), 2))
    apply(view, ("live/c", live("c", 1), 3), full=True)
    assert (list(view.live), list(view.heartbeats), view.owners[3]) == (["c"], [], None)


def test_undecodable_and_foreign_records_stop_nothing():
    view = view_of(
        ("live/b", b"\xff", 1), ("own/999", own("b", 1, 1), 1), ("own/x", b"", 1), ("live/c", live("c", 1), 2)
    )
    assert sorted(view.undecodable) == ["live/b", "own/999", "own/x"]
    assert view.live_nodes() == ["c"]
    apply(view, deleted=["own/x", "own/999", "other/1"])


def test_heartbeats_alone_change_no_roles_and_are_timed_at_each_move():
    view = view_of(("hb/b", beat(1, 1), 1))
    assert not view.roles_changed
    apply(view, ("hb/b", beat(1, 1), 1), now_ns=50)
    assert view.heartbeats["b"].seen_ns == 1
    apply(view, ("hb/b", beat(1, 2), 2), now_ns=60)
    assert view.heartbeats["b"].seen_ns == 60


def test_map_leaves_out_the_dead_and_the_vacant():
    view = view_of(
        ("live/b", live("b", 1), 1), ("live/c", live("c", 1, dead=True), 1), (owner_key(3), own("c", 1, 5), 2)
    )
    found = view.cluster_map()
    assert [node.name for node in found.nodes] == ["b"]
    assert found.owners[3] is None
