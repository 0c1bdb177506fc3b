"""What a node asks its peers for: flags, floors and deadlines of a read, and what becomes of its answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from emberkv.messages import BlockInfo, GetFlag, GetRequest, Hello, Role
from emberkv.net import now_ns
from emberkv.net.fetch import FetchPool, FetchResult
from emberkv.node.fetcher import PeerFetcher
from emberkv.ports import Slot
from emberkv.storage.dram import DramTier
from emberkv.types import Level, MissReason, Version, checksum

SCOPE = b"scope---"
KEYS = [SCOPE + bytes([number]) * 32 for number in range(3)]
FLOORS = [Version(1, 1), Version(0, 0), Version(1, 3)]
SECOND = 1_000_000_000


@pytest.fixture
def tier() -> DramTier:
    return DramTier(64 << 20)


@pytest.fixture
def fetcher(tier: DramTier) -> PeerFetcher:
    return PeerFetcher(tier, lambda _: Hello(Role.FETCH, 1, 1, "c", "default", "me", bytes(16)))


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, GetFlag.LOCAL_ONLY),
        ({"floors": FLOORS}, GetFlag.LOCAL_ONLY | GetFlag.FLOORS),
        ({"floors": FLOORS, "if_newer": True}, GetFlag.LOCAL_ONLY | GetFlag.FLOORS | GetFlag.IF_NEWER),
        ({"if_newer": True}, GetFlag.LOCAL_ONLY),
        ({"relay": True}, GetFlag.RELAY),
        ({"floors": FLOORS, "relay": True}, GetFlag.RELAY | GetFlag.FLOORS),
    ],
)
def test_what_is_asked(fetcher: PeerFetcher, options: dict[str, object], flags: GetFlag) -> None:
    request = fetcher.start("peer", KEYS, True, now_ns() + 10 * SECOND, **options)._request  # type: ignore[arg-type]
    assert request.keys == [key[8:] for key in KEYS]
    assert request.flags == int(flags)
    assert request.level == Level.SESSION
    assert request.floors == options.get("floors", [])


def test_a_relay_gets_most_of_the_time_and_its_answer_the_rest(fetcher: PeerFetcher) -> None:
    request = fetcher.start("peer", KEYS, True, now_ns() + 10 * SECOND, relay=True)._request
    assert 5000 < request.deadline_ms <= 8000
    assert fetcher.start("peer", KEYS, True, now_ns() - SECOND, relay=True)._request.deadline_ms == 1


def test_current_brings_its_version_and_no_room(tier: DramTier, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = PeerFetcher(tier, lambda _: Hello(Role.FETCH, 1, 1, "c", "default", "me", bytes(16)))
    hit = BlockInfo(0, Version(1, 4), 5, checksum(b"bytes"))
    current = BlockInfo(int(MissReason.CURRENT), Version(1, 1))
    behind = BlockInfo(int(MissReason.BEHIND), Version(1, 2))

    def get(_pool: FetchPool, _peer: str, _request: GetRequest, place: object, _deadline_ns: int) -> FetchResult:
        view = place(1, hit)  # type: ignore[operator]
        view[:] = b"bytes"
        return FetchResult([current, hit, behind], 5)

    monkeypatch.setattr(FetchPool, "get", get)
    asked: list[int] = []

    def place(lengths: Sequence[int]) -> list[Slot | None]:
        asked.extend(lengths)
        return [tier.reserve(length) for length in lengths]

    read = fetcher.start("peer", KEYS, True, now_ns() + SECOND, FLOORS, if_newer=True)
    ((infos, slots, _),) = fetcher.finish_all([read], place)
    assert infos == [current, hit, behind]
    assert [slot is None for slot in slots] == [True, False, True]
    assert asked == [5]


def test_connections_of_the_namespaces_that_were_read_last_are_kept(
    fetcher: PeerFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pool for each scope that ever was would keep those of dropped namespaces for ever."""
    monkeypatch.setattr("emberkv.node.fetcher.POOLS_MAX", 3)

    def pool(number: int) -> FetchPool:
        return fetcher.start("peer", [b"scope--%d" % number + bytes(32)], True, now_ns() + SECOND)._pool

    fetcher.set_peers({"peer": "127.0.0.1:1"})
    first, second, third = pool(1), pool(2), pool(3)
    assert pool(1) is first
    fourth = pool(4)
    assert [one._closed for one in (first, second, third, fourth)] == [False, True, False, False]
    assert pool(1) is first
    again = pool(2)
    assert again is not second
    assert again._addresses == {"peer": "127.0.0.1:1"}
    assert third._closed
    moved = {"peer": "127.0.0.1:2"}
    fetcher.set_peers(moved)
    assert [one._addresses for one in (first, fourth, again)] == [moved] * 3
    fetcher.close()
    assert all(one._closed for one in (first, fourth, again))
