"""merge = max, and the applied vector's ranges."""

from emberkv.core.merge import AppliedVector, merge, same_version_other_bytes, stamp_of
from emberkv.messages import Span
from emberkv.types import NO_VERSION, EntryState, Version

C, T = EntryState.COMMITTED, EntryState.TOMBSTONE


def test_higher_version_wins_then_tombstone_then_checksum():
    low, high = stamp_of(Version(1, 9), C, b"z"), stamp_of(Version(2, 1), C, b"a")
    assert merge(low, high) == merge(high, low) == high
    assert merge(stamp_of(Version(2, 1), T, b""), high) == stamp_of(Version(2, 1), T, b"")
    assert merge(stamp_of(Version(2, 1), C, b"b"), high).checksum == b"b"


def test_one_version_with_two_contents_is_noticed_and_pending_is_not():
    assert same_version_other_bytes(stamp_of(Version(1, 1), C, b"a"), stamp_of(Version(1, 1), C, b"b"))
    assert not same_version_other_bytes(stamp_of(NO_VERSION, C, b"a"), stamp_of(NO_VERSION, C, b"b"))
    assert not same_version_other_bytes(stamp_of(Version(1, 1), C, b"a"), stamp_of(Version(1, 1), C, b"a"))


def vector_of(*versions: tuple[int, int]) -> AppliedVector:
    vector = AppliedVector()
    for version in versions:
        vector.add(Version(*version))
    return vector


def test_applied_vector_joins_ranges_and_knows_its_holes():
    vector = vector_of((7, 1), (7, 2), (7, 5), (7, 4), (7, 9))
    assert vector.spans() == [Span(7, 1, 2), Span(7, 4, 5), Span(7, 9, 9)]
    assert [seq for seq in range(11) if vector.covers(Version(7, seq))] == [1, 2, 4, 5, 9]
    assert not vector.covers(Version(6, 1))
    vector.add(Version(7, 3))
    assert vector.spans() == [Span(7, 1, 5), Span(7, 9, 9)]


def test_vector_lacks_what_another_has_processed_until_it_takes_it():
    mine, theirs = vector_of((7, 1), (7, 2)), vector_of((6, 4), (7, 1), (7, 2), (7, 3))
    assert mine.lacks(theirs.spans())
    assert not theirs.lacks(mine.spans())
    assert not mine.lacks([])
    assert mine.union(theirs.spans()) is None
    assert mine.spans() == theirs.spans() == [Span(6, 4, 4), Span(7, 1, 3)]
    assert not mine.lacks(theirs.spans())


def test_one_span_that_lies_in_two_of_ours_with_a_hole_between_is_lacking():
    assert vector_of((7, 1), (7, 2), (7, 4)).lacks([Span(7, 1, 4)])


def test_too_many_ranges_forget_the_highest_which_only_means_to_process_them_again():
    vector = AppliedVector()
    assert all(vector.add(Version(1, seq)) is None for seq in range(1, 1000, 2))
    assert len(vector.spans()) == AppliedVector.RANGES_MAX
    assert vector.covers(Version(1, 1))
    assert not vector.covers(Version(1, 999))


def test_too_many_epochs_forget_the_oldest_and_say_up_to_which_version():
    vector = vector_of((1, 4), (1, 9), (1, 10))
    for epoch in range(2, AppliedVector.EPOCHS_MAX + 1):
        assert vector.add(Version(epoch, 1)) is None
    assert vector.add(Version(500, 1)) == Version(1, 10)
    assert vector.union([Span(600, 1, 5), Span(601, 1, 5)]) == Version(3, 1)
    assert len(vector.ranges) == AppliedVector.EPOCHS_MAX
    assert min(vector.ranges) == 4
