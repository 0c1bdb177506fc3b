"""Which node to ask for which keys: pure decisions over a cluster map.

Why it exists: without a near node the client is its own router, and a wrong choice must be testable without a socket.
Laws: no I/O, no clock; an order is stable, so that two clients spread alike and a test can name the answer.
Limits: a key goes to exactly one node per try; keys whose nodes are all unusable go to ANY_NODE, which then relays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from emberkv.messages import MapReply
from emberkv.types import BATCH_KEYS_MAX, PrefixMatch, shard_of

ANY_NODE: Final = ""
"""Group of the keys for which no particular node can be asked; any connected one answers for them."""


class Endpoint(NamedTuple):
    """Where a node can be reached: `local` is a Unix socket path, otherwise host:port."""

    address: str
    local: bool

    def __str__(self) -> str:
        return f"{'unix' if self.local else 'tcp'}:{self.address}"


def parse_endpoint(text: str) -> Endpoint:
    """Endpoint of "unix:/path", "tcp:host:port" or "host:port". Raises ValueError with one line."""
    text = text.strip()
    scheme, colon, rest = text.partition(":")
    if scheme == "unix" and colon:
        if not rest.startswith("/"):
            raise ValueError(f"endpoint {text!r}: a socket path must be absolute, as in unix:/run/emberkv/node.sock")
        return Endpoint(rest, True)
    address = rest if scheme == "tcp" else text
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise ValueError(f"endpoint {text!r} is neither unix:/path nor tcp:host:port")
    return Endpoint(address, False)


def parse_endpoints(endpoints: str | Sequence[str]) -> tuple[Endpoint, ...]:
    """Endpoints of a list, or of one string with commas; doubles are dropped. Raises ValueError."""
    texts = endpoints.split(",") if isinstance(endpoints, str) else endpoints
    parsed = tuple(dict.fromkeys(parse_endpoint(text) for text in texts))
    if not parsed:
        raise ValueError("at least one endpoint is needed, as in unix:/run/emberkv/node.sock")
    return parsed


def rank_endpoints(
    given: Sequence[Endpoint], cluster: MapReply | None, host_id: str, *, prefer_local: bool = True
) -> list[tuple[Endpoint, str]]:
    """All known endpoints with their node's name ("" if the map has none), best first.

    The caller's sockets, then sockets of nodes of the same boot, then the caller's addresses, then learned ones.
    """
    names: dict[Endpoint, str] = dict.fromkeys(given, "")
    learned: list[Endpoint] = []
    for node in cluster.nodes if cluster else ():
        found = [Endpoint(node.tcp, False)] if node.tcp else []
        if node.local and (
            Endpoint(node.local, True) in names or (prefer_local and host_id and node.host_id == host_id)
        ):
            found.append(Endpoint(node.local, True))
        for endpoint in found:
            if endpoint not in names:
                learned.append(endpoint)
            names[endpoint] = node.name
    order = [
        endpoint
        for local in (True, False)
        for source in (given, learned)
        for endpoint in source
        if endpoint.local == local
    ]
    return [(endpoint, names[endpoint]) for endpoint in order]


def group_gets(
    keys: Sequence[bytes], indices: Sequence[int], cluster: MapReply | None, usable: Collection[str]
) -> dict[str, list[int]]:
    """Indices grouped by the node to ask: the first usable of primary, in-sync backups, learners, former replicas.

    Primaries are spread over the nodes by placement, so asking them first spreads the load too.
    """
    return _group(keys, indices, cluster, usable, primary_only=False)


def group_puts(
    keys: Sequence[bytes], indices: Sequence[int], cluster: MapReply | None, usable: Collection[str]
) -> dict[str, list[int]]:
    """Indices grouped by the node to send to: the usable primary, else ANY_NODE, which queues a hint for it.

    Eventual puts go there too: that saves their hop, and a get by this client, which asks the primary, finds them.
    """
    return _group(keys, indices, cluster, usable, primary_only=True)


def _group(
    keys: Sequence[bytes],
    indices: Sequence[int],
    cluster: MapReply | None,
    usable: Collection[str],
    *,
    primary_only: bool,
) -> dict[str, list[int]]:
    owners = cluster.owners if cluster else ()
    choice: dict[int, str] = {}
    groups: dict[str, list[int]] = {}
    for index in indices:
        shard = shard_of(keys[index])
        node = choice.get(shard)
        if node is None:
            owner = owners[shard] if shard < len(owners) else None
            if owner is None:
                nodes: tuple[str, ...] = ()
            elif primary_only:
                nodes = (owner.primary,)
            else:
                nodes = (owner.primary, *owner.in_sync, *owner.replicas, *owner.former)
            node = choice[shard] = next((name for name in nodes if name in usable), ANY_NODE)
        groups.setdefault(node, []).append(index)
    return groups


def split_batches(indices: Sequence[int], most: int = BATCH_KEYS_MAX) -> list[list[int]]:
    """Indices cut into pieces that one request may carry."""
    if len(indices) <= most:
        return [list(indices)] if indices else []
    return [list(indices[start : start + most]) for start in range(0, len(indices), most)]


def split_by_bytes(
    indices: Sequence[int], lengths: Sequence[int], bytes_most: int, most: int = BATCH_KEYS_MAX, *, bytes_first: int = 0
) -> list[list[int]]:
    """Indices cut into pieces of at most `most` items and `bytes_most` bytes; an item above that stands alone.

    With `bytes_first` the pieces grow: the first has at most so many bytes, each next one twice as many.
    """
    pieces: list[list[int]] = []
    total = 0
    room = min(bytes_first or bytes_most, bytes_most)
    for index in indices:
        if not pieces or len(pieces[-1]) == most or total + lengths[index] > room:
            if pieces:
                room = min(2 * room, bytes_most)
            pieces.append([])
            total = 0
        pieces[-1].append(index)
        total += lengths[index]
    return pieces


def match(present: Sequence[bool]) -> PrefixMatch:
    """Leading keys present, and the indices of the absent ones at or after that point."""
    holes = tuple(index for index, there in enumerate(present) if not there)
    return PrefixMatch(holes[0] if holes else len(present), holes)
