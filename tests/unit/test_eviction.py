"""Which block leaves first."""

from emberkv.core.eviction import ORDER_STEP, PROTECTED_SHARE, Residency


def order(residency: Residency, limit: int = 1000) -> list[bytes]:
    return list(residency.order(limit))


def filled(count: int) -> tuple[Residency, list[bytes]]:
    residency, keys = Residency(), [b"%03d" % index for index in range(count)]
    for key in keys:
        residency.add(key)
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
        residency.add(b"scan%d" % index)
    assert order(residency)[-4:] == [keys[3], keys[2], keys[1], keys[0]]


def test_protected_share_is_bounded():
    residency, keys = filled(10)
    residency.touch(keys)
    first_out = order(residency)[: 10 - int(PROTECTED_SHARE * 10)]
    assert first_out == [keys[9], keys[8]]


def test_order_survives_discards_while_it_is_read_and_respects_its_limit():
    residency, keys = filled(3 * ORDER_STEP)
    seen = []
    for key in residency.order(2 * ORDER_STEP):
        residency.discard(key)
        seen.append(key)
    assert len(seen) == len(set(seen))
    assert seen[:ORDER_STEP] == keys[:ORDER_STEP]
    assert len(list(filled(40)[0].order(5))) == 5
    residency.discard(b"unknown")
