"""Which block leaves first."""

from emberkv.core.eviction import PROTECTED_SHARE, Residency
from emberkv.storage.arena import Slot


def order(residency: Residency, limit: int = 1000) -> list[bytes]:
    return [key for key, _ in residency.order(limit)]


def filled(count: int) -> tuple[Residency, list[bytes]]:
    residency, keys = Residency(), [b"%03d" % index for index in range(count)]
    for key in keys:
        residency.add(key, Slot(0, 1, 4096))
    return residency, keys


def test_never_touched_blocks_leave_in_order_of_arrival():
    residency, keys = filled(40)
    assert order(residency) == keys


def test_of_one_batch_the_deepest_leaves_first():
    residency, keys = filled(5)
    residency.arrived(keys)
    assert order(residency) == keys[::-1]
    residency.touch(keys[:3])
    assert order(residency) == [keys[4], keys[3], keys[2], keys[1], keys[0]]


def test_a_scan_does_not_push_out_what_was_read_twice():
    residency, keys = filled(10)
    residency.touch(keys[:4])
    for index in range(100):
        residency.add(b"scan%d" % index, Slot(0, 1, 4096))
    assert order(residency)[-4:] == [keys[3], keys[2], keys[1], keys[0]]


def test_protected_share_is_bounded():
    residency, keys = filled(10)
    residency.touch(keys)
    first_out = order(residency)[: 10 - int(PROTECTED_SHARE * 10)]
    assert first_out == [keys[9], keys[8]]


def test_order_respects_its_limit_over_both_parts():
    residency, keys = filled(40)
    residency.touch(keys[:3])
    assert order(residency, 5) == keys[3:8]
    assert order(residency, 39) == [*keys[3:], keys[2], keys[1]]
    residency.discard(b"unknown")
    assert len(residency) == 40


def test_place_of_a_block_follows_it_through_touch_demotion_and_new_bytes():
    residency, keys = filled(10)
    places = dict(residency.order(10))
    residency.touch(keys)  # more than may be protected: the last two are demoted again
    assert dict(residency.order(10)) == places
    assert all(residency.slot(key) is places[key] for key in keys)
    newer = Slot(4096, 1, 4096)
    residency.add(keys[0], newer)
    assert residency.slot(keys[0]) is newer
    residency.discard(keys[0])
    assert residency.slot(keys[0]) is None
