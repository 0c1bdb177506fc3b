"""Decoded records and what follows from them."""

from emberkv.core import events as ev
from emberkv.core.view import ClusterView, encode_record, owner_key
from emberkv.messages import DrainRecord, ShardOwner
from emberkv.ports import Record
from emberkv.types import Namespace, checksum, scope_of
from harness.bare import Bare, beat, live

LISTED_AT = 100
"""Revision of a full listing; no record of these tests is newer."""


def view_of(*records: tuple[str, bytes, int]) -> ClusterView:
    view = ClusterView("a")
    view.set_membership(7)
    apply(view, *records)
    return view


def apply(view: ClusterView, *records: tuple[str, bytes, int], deleted=(), full=False, now_ns=1) -> None:
    view.apply([Record(*record) for record in records], list(deleted), full=full, now_ns=now_ns, revision=LISTED_AT)


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
    assert not view.touched
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


# -- drains ------------------------------------------------------------------------------------------------------------


def drain(incarnation: bytes) -> bytes:
    return encode_record(DrainRecord(incarnation))


def test_a_drain_concerns_one_life_of_a_node():
    life, next_life = checksum(b"b"), checksum(b"b, again")
    view = view_of(("live/b", live("b", 1, life), 1))
    assert not view.is_draining("b")
    apply(view, ("drain/b", drain(life), 2))
    assert view.touched
    assert view.is_draining("b")
    apply(view, ("live/b", live("b", 2, next_life), 3))
    assert not view.is_draining("b")
    assert not view.is_draining("nobody")


def test_a_drain_ends_with_its_record():
    view = view_of(("live/b", live("b", 1), 1), ("drain/b", drain(checksum(b"b")), 2))
    apply(view, deleted=["drain/b"])
    assert view.touched
    assert not view.is_draining("b")


# -- namespaces --------------------------------------------------------------------------------------------------------


def namespace(generation: int = 1, **policy: object) -> bytes:
    return encode_record(Namespace("ns", generation=generation, **policy))  # type: ignore[arg-type]


FIRST, SECOND = scope_of("ns", 1), scope_of("ns", 2)


def test_policy_is_found_by_scope_and_follows_its_record():
    view = view_of(("ns/ns", namespace(factor=3), 1))
    assert view.policies[FIRST].factor == 3
    assert not view.touched
    apply(view, ("ns/ns", namespace(factor=1), 3), ("ns/ns", namespace(factor=2), 2))
    assert view.policies[FIRST].factor == 1
    assert view.namespace_revision["ns"] == 3
    assert not view.dead_scopes


def test_dropping_a_namespace_kills_its_scope_and_creating_it_again_makes_another():
    view = view_of(("ns/ns", namespace(), 1))
    apply(view, ("ns/ns", namespace(dropped=True), 2))
    assert not view.policies
    assert view.dead_scopes == {FIRST}
    assert view.namespaces["ns"].dropped
    apply(view, ("ns/ns", namespace(generation=2), 3))
    assert list(view.policies) == [SECOND]
    assert view.dead_scopes == {FIRST}


def test_a_generation_that_was_missed_kills_the_old_scope_too():
    view = view_of(("ns/ns", namespace(), 1))
    apply(view, ("ns/ns", namespace(generation=2), 4))
    assert (list(view.policies), view.dead_scopes) == ([SECOND], {FIRST})


def test_a_namespace_that_was_never_seen_alive_has_nothing_to_sweep():
    view = view_of(("ns/ns", namespace(dropped=True), 1))
    assert (view.policies, view.dead_scopes) == ({}, set())


def test_scope_of_a_namespace_that_is_there_is_never_dead():
    """A listing that came from a lagging or restored coordinator lacked it; then it was back."""
    view = view_of(("ns/ns", namespace(), 1))
    apply(view, full=True)
    apply(view, ("ns/ns", namespace(), 2))
    assert list(view.policies) == [FIRST]
    assert not view.dead_scopes


def test_blocks_expire_somewhere_only_while_a_policy_says_so():
    view = view_of(("ns/ns", namespace(), 1))
    assert not view.expiring
    apply(view, ("ns/ns", namespace(expiry_ms=5), 2))
    assert view.expiring
    apply(view, ("ns/ns", namespace(expiry_ms=5, dropped=True), 3))
    assert not view.expiring


# -- listings and watches overtake each other --------------------------------------------------------------------------


def test_a_full_listing_does_not_delete_what_is_newer_than_itself():
    """It was asked for before these records were written, and arrives after their watch or our own commit."""
    bare = Bare().join().own(replicas=("a",), in_sync=("a",))
    bare.records(("live/d", live("d", 1)), ("ns/ns", namespace()), ("drain/c", drain(checksum(b"c"))))
    view, asked_at = bare.core.state.view, 1  # before a had joined
    known = [Record("live/b", live("b", 1), 1), Record("live/c", live("c", 1), 1)]
    bare.step(ev.Records(bare.now, known, [], asked_at, full=True))
    assert view.is_live("d")
    assert view.is_live("a")
    assert view.owners[3] is not None
    assert view.primary_epoch[3]
    assert view.is_draining("c")
    assert list(view.policies) == [FIRST]
    assert not view.dead_scopes


def test_a_full_listing_deletes_what_is_as_old_as_itself():
    bare = Bare().join()
    bare.records(("live/d", live("d", 1)))
    known = [Record("live/b", live("b", 1), 1), Record("live/c", live("c", 1), 1)]
    bare.step(ev.Records(bare.now, known, [], bare.revision, full=True))
    assert not bare.core.state.view.is_live("d")
