"""merge = max, and the applied vector's ranges."""

from emberkv.core.merge import AppliedVector, merge, same_version_other_bytes, stamp_of
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


def test_applied_vector_joins_ranges_and_names_holes():
    vector = AppliedVector()
    for seq in (1, 2, 5, 4, 9):
        vector.add(Version(7, seq))
    assert vector.ranges == {7: [(1, 2), (4, 5), (9, 9)]}
    assert vector.holes(7) == [(3, 3), (6, 8)]
    vector.add(Version(7, 3))
    assert vector.ranges[7] == [(1, 5), (9, 9)]


def test_applied_vector_is_bounded_and_forgets_only_upwards():
    vector = AppliedVector()
    for seq in range(1, 1000, 2):
        vector.add(Version(1, seq))
    assert len(vector.ranges[1]) <= AppliedVector.RANGES_MAX
    assert vector.ranges[1][0] == (1, 1)
    for epoch in range(2, 100):
        vector.add(Version(epoch, 1))
    assert len(vector.ranges) == AppliedVector.EPOCHS_MAX
    assert 99 in vector.ranges
