"""Session tokens: floors that only rise, bounded, and whole or refused when they come from elsewhere."""

from __future__ import annotations

import base64
import os
import struct
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberkv.client.token import FORMAT, KEYS_LIMIT, KEYS_MAX, MAGIC, TOKEN_BYTES_MAX, SessionToken
from emberkv.errors import ConfigError
from emberkv.types import EPOCH_MAX, NO_VERSION, Version, checksum, scope_of

SCOPE = scope_of("default", 1)
KEYS = [bytes([number]) * 32 for number in range(8)]


def scoped(number: int) -> bytes:
    return SCOPE + KEYS[number]


def filled(count: int = 5, cluster_id: str = "c1", **options: int) -> SessionToken:
    token = SessionToken(cluster_id, **options)
    token.observe_all(SCOPE, KEYS[:count], [Version(1, number + 1) for number in range(count)])
    return token


def floors_of(token: SessionToken) -> dict[bytes, Version]:
    return dict(token._floors)


def sealed(body: bytes) -> bytes:
    return body + checksum(body)


def test_a_floor_only_rises() -> None:
    token = SessionToken("c1")
    assert token.floor(scoped(0)) == NO_VERSION
    for version, floor in [((1, 5), (1, 5)), ((1, 3), (1, 5)), ((2, 1), (2, 1)), ((0, 0), (2, 1)), ((1, 9), (2, 1))]:
        token.observe(scoped(0), Version(*version))
        assert token.floor(scoped(0)) == Version(*floor)
    token.observe(scoped(1), NO_VERSION)
    assert len(token) == 1


def test_a_bare_key_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="40 bytes"):
        SessionToken().observe(KEYS[0], Version(1, 1))


def test_floors_of_a_batch_are_in_its_order_or_nothing() -> None:
    token = filled(2)
    assert token.floors(SCOPE, [KEYS[1], KEYS[7], KEYS[0]]) == [Version(1, 2), NO_VERSION, Version(1, 1)]
    assert token.floors(SCOPE, [KEYS[7]]) == []
    assert token.floors(SCOPE, []) == []
    assert SessionToken().floors(SCOPE, KEYS) == []


def test_namespaces_and_generations_are_kept_apart() -> None:
    token = filled(1)
    for other in (scope_of("chat", 1), scope_of("default", 2)):
        assert token.floors(other, KEYS[:1]) == []


def test_the_key_seen_longest_ago_is_forgotten_and_counted() -> None:
    token = filled(3, keys_max=3)
    token.observe(scoped(0), Version(1, 1))  # nothing new, but seen again
    token.observe(scoped(5), Version(9, 9))
    assert [token.floor(scoped(number)) for number in (0, 1, 2, 5)] == [(1, 1), NO_VERSION, (1, 3), (9, 9)]
    assert token.dropped == 1
    assert token.floor(scoped(2)) == (1, 3)  # a question is no use
    token.observe(scoped(6), Version(9, 9))
    assert token.floor(scoped(2)) == NO_VERSION
    assert (len(token), token.dropped) == (3, 2)


@pytest.mark.parametrize("keys_max", [0, -1, KEYS_LIMIT + 1])
def test_an_impossible_bound_is_refused(keys_max: int) -> None:
    with pytest.raises(ValueError, match="keys_max"):
        SessionToken("c1", keys_max)
    with pytest.raises(ValueError, match="cluster id"):
        SessionToken("c" * 256)


def test_a_token_belongs_to_one_cluster() -> None:
    token = SessionToken()
    token.bind("c1")
    token.bind("c1")
    with pytest.raises(ConfigError, match="belongs to cluster 'c1', not 'c2'") as caught:
        token.bind("c2")
    assert "\n" not in str(caught.value)
    assert token.cluster_id == "c1"


def test_merge_takes_the_higher_floor_of_each_key() -> None:
    left, right = filled(3), SessionToken("c1")
    right.observe_all(SCOPE, [KEYS[0], KEYS[2], KEYS[4]], [Version(2, 1), Version(1, 1), Version(1, 7)])
    right.dropped = 4
    before = floors_of(right)
    left.merge(right)
    assert floors_of(left) == {
        scoped(0): (2, 1),
        scoped(1): (1, 2),
        scoped(2): (1, 3),
        scoped(4): (1, 7),
    }
    assert left.dropped == 4
    assert floors_of(right) == before
    left.merge(left)
    assert len(left) == 4


def test_merge_with_another_cluster_changes_nothing() -> None:
    left, right = filled(2), filled(4, "c2")
    before = floors_of(left)
    with pytest.raises(ConfigError, match="belongs to cluster 'c1', not 'c2'"):
        left.merge(right)
    assert (floors_of(left), left.cluster_id, left.dropped) == (before, "c1", 0)
    fresh = SessionToken()
    fresh.merge(right)
    assert fresh.cluster_id == "c2"


@pytest.mark.parametrize("cluster_id", ["", "c1", "ü" * 100])
@pytest.mark.parametrize("count", [0, 1, 8])
def test_it_comes_back_equal_as_bytes_and_as_text(cluster_id: str, count: int) -> None:
    token = filled(count, cluster_id)
    token.dropped = 3
    for back in (
        SessionToken.from_bytes(token.to_bytes()),
        SessionToken.from_bytes(memoryview(token.to_bytes())),
        SessionToken.from_text(token.to_text()),
        SessionToken.from_text(" " + token.to_text().rstrip("=") + "\n"),
    ):
        assert list(back._floors.items()) == list(token._floors.items())  # the order of forgetting too
        assert (back.cluster_id, back.dropped) == (cluster_id, 3)
    assert set(token.to_text()) <= set(base64.urlsafe_b64encode(bytes(range(256))).decode() + "=-_")


def test_a_larger_token_keeps_what_was_seen_last() -> None:
    back = SessionToken.from_bytes(filled(5).to_bytes(), keys_max=2)
    assert floors_of(back) == {scoped(3): (1, 4), scoped(4): (1, 5)}
    assert back.dropped == 3


def test_the_largest_token_fits_its_bound() -> None:
    token = SessionToken("c" * 255, KEYS_LIMIT)
    keys = [number.to_bytes(32, "little") for number in range(KEYS_LIMIT)]
    token.observe_all(SCOPE, keys, [Version(1, 1)] * KEYS_LIMIT)
    data = token.to_bytes()
    assert TOKEN_BYTES_MAX - 100 < len(data) <= TOKEN_BYTES_MAX
    assert len(SessionToken.from_text(token.to_text(), KEYS_LIMIT)) == KEYS_LIMIT
    assert SessionToken.from_bytes(data).dropped == KEYS_LIMIT - KEYS_MAX


GOOD = filled().to_bytes()
HEAD = struct.Struct("<4sBxHI4xQ")


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not a session token"),
        (b"{}", "not a session token"),
        (b"EKV1" + bytes(60), "not a session token"),
        (MAGIC[:2], "cut short"),
        (GOOD[:30], "cut short"),
        (GOOD[:-1], "cut short or extended"),
        (GOOD + b"\0", "cut short or extended"),
        (bytes(TOKEN_BYTES_MAX + 1), "at most 8388608 bytes"),
        (sealed(HEAD.pack(MAGIC, FORMAT + 1, 0, 0, 0)), "format 2, this EmberKV knows 1: upgrade"),
        (sealed(HEAD.pack(MAGIC, 0, 0, 0, 0)), "corrupted"),
        (sealed(HEAD.pack(MAGIC, FORMAT, 0, 2**32 - 1, 0)), "it names 240518168"),
        (sealed(HEAD.pack(MAGIC, FORMAT, 2, 0, 0) + b"\xff\xff"), "UTF-8"),
        (sealed(HEAD.pack(MAGIC, FORMAT, 256, 0, 0) + b"c" * 256), "corrupted"),
        (sealed(HEAD.pack(MAGIC, FORMAT, 0, 1, 0) + scoped(0) + struct.pack("<QQ", EPOCH_MAX + 1, 1)), "no cluster"),
        (sealed(HEAD.pack(MAGIC, FORMAT, 0, 1, 0) + scoped(0) + struct.pack("<QQ", 0, 0)), "no cluster"),
    ],
)
def test_what_is_no_token_is_refused_in_one_line(data: bytes, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        SessionToken.from_bytes(data)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("text", ["", "not base64!", "ab$=", "é", "A", "A" * (TOKEN_BYTES_MAX * 2)])
def test_text_that_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="session token") as caught:
        SessionToken.from_text(text)
    assert len(str(caught.value)) < 200


def test_every_flipped_bit_is_seen() -> None:
    for at in range(len(GOOD)):
        for bit in range(8):
            broken = bytearray(GOOD)
            broken[at] ^= 1 << bit
            with pytest.raises(ConfigError):
                SessionToken.from_bytes(broken)


def test_many_threads_leave_the_highest_version() -> None:
    token = SessionToken("c1", 64)
    keys = [os.urandom(32) for _ in range(64)]

    def work(first: int) -> None:
        for seq in range(first, 400, 4):
            token.observe_all(SCOPE, keys, [Version(1, seq + 1)] * 64)
            token.floors(SCOPE, keys)
            token.to_bytes()

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert token.floors(SCOPE, keys) == [Version(1, 400)] * 64
    assert token.dropped == 0


def test_two_tokens_may_be_merged_into_each_other_at_once() -> None:
    left, right = filled(4), filled(8)
    threads = [threading.Thread(target=lambda a=a, b=b: [a.merge(b) for _ in range(300)], daemon=True)
               for a, b in ((left, right), (right, left))]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert floors_of(left) == floors_of(right)


def test_a_forked_child_can_use_a_token_whose_lock_was_held() -> None:
    token = filled(2)
    with token._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if token.floors(SCOPE, KEYS[:2]) else 1)
    assert os.waitpid(child, 0)[1] == 0


VERSIONS = st.builds(Version, st.integers(0, EPOCH_MAX), st.integers(0, 2**64 - 1))
SEEN = st.lists(st.tuples(st.sampled_from(KEYS), VERSIONS), max_size=30)


def token_of(seen: list[tuple[bytes, Version]], keys_max: int = KEYS_MAX) -> SessionToken:
    token = SessionToken("c1", keys_max)
    for key, version in seen:
        token.observe(SCOPE + key, version)
    return token


@given(SEEN, SEEN, st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_laws(left: list[tuple[bytes, Version]], right: list[tuple[bytes, Version]], keys_max: int) -> None:
    expected: dict[bytes, Version] = {}
    for key, version in left + right:
        if version > NO_VERSION:
            expected[SCOPE + key] = max(expected.get(SCOPE + key, NO_VERSION), version)
    one, other = token_of(left), token_of(right)
    one.merge(other)
    assert floors_of(one) == expected
    other.merge(token_of(left))
    assert floors_of(other) == expected
    assert floors_of(SessionToken.from_bytes(one.to_bytes())) == expected
    small = token_of(left + right, keys_max)
    assert len(small) <= keys_max
    assert all(floor <= expected[key] for key, floor in floors_of(small).items())
    assert small.dropped >= len(expected) - keys_max


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused_and_nothing_else(data: bytes) -> None:
    for body in (data, sealed(data), sealed(HEAD.pack(MAGIC, FORMAT, 0, len(data) // 56, 0) + data)):
        try:
            token = SessionToken.from_bytes(body)
        except ConfigError:
            continue
        assert SessionToken.from_bytes(token.to_bytes())._floors == token._floors
