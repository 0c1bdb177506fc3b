"""Which record a shard's primary should write next: a pure policy over the view (design 4, 8).

    replicas as placement proposes <--- dropped to `former` <--- all of them complete <--- learners added <--- elsewhere

Laws: a dead replica is replaced at once. A live one that placement does not propose (a node joined, another drains) is
dropped only when enough others are complete, so there are never fewer copies than before; one is added at a time. The
primary itself is moved last, by a hand-over (handover.py). Placement is a fixed function of the nodes that live and do
not drain, so every move brings the record closer to it and the moves end.
"""

from __future__ import annotations

from emberkv.core import placement
from emberkv.core.view import ClusterView
from emberkv.messages import ShardOwner


def proposed(view: ClusterView, shard: int, factor: int) -> tuple[str, ...]:
    """The replicas that placement proposes, best first."""
    return placement.ranking(shard, view.homes())[: max(factor, 1)]


def record_of(
    owner: ShardOwner, replicas: list[str], caught_up: set[str], factor: int, former: tuple[str, ...]
) -> ShardOwner:
    """The primary's record with these replicas. Only what this primary knows itself is in sync: who was so by record
    may have missed a write since."""
    in_sync = tuple(name for name in replicas if name == owner.primary or name in caught_up)
    former = tuple(dict.fromkeys(name for name in former if name not in replicas))[:factor]
    return ShardOwner(owner.primary, owner.liveness_epoch, owner.epoch, tuple(replicas), in_sync, former)


def reconciled(view: ClusterView, shard: int, factor: int, caught_up: set[str], *, may_move: bool) -> ShardOwner | None:
    """The primary's own record as it should be next, or None when it is right. `may_move`: live replicas may be
    exchanged for better placed ones; without it only the dead are replaced."""
    owner = view.owners[shard]
    assert owner is not None
    ideal = proposed(view, shard, factor)
    alive = [name for name in owner.replicas if name == owner.primary or view.is_live(name)]
    gone = [name for name in owner.replicas if name not in alive]
    replicas = list(alive)
    spare = [name for name in placement.ranked(shard, view.homes()) if name not in replicas]
    while len(replicas) < factor and spare:
        replicas.append(spare.pop(0))
    missing = [name for name in ideal if name not in replicas]
    if missing and may_move and len(replicas) <= factor:
        replicas.append(missing[0])
    elif may_move or len(replicas) > factor:
        extra = [name for name in replicas if name not in ideal and name != owner.primary]
        staying = [name for name in replicas if name not in extra[:1] and (name == owner.primary or name in caught_up)]
        settled = all(name == owner.primary or name in caught_up for name in ideal)
        # Fewer nodes than the factor may be left to hold it: then all of those have to be complete.
        if extra and (len(staying) >= factor or settled):
            replicas.remove(extra[0])
            gone.append(extra[0])
    record = record_of(owner, replicas, caught_up, factor, (*gone, *owner.former))
    if record.replicas == owner.replicas and record.in_sync == owner.in_sync and not vouches_for_the_gone(view, shard):
        return None
    return record


def vouches_for_the_gone(view: ClusterView, shard: int) -> bool:
    """Does the record name one as in sync that has restarted since it was written? It counts for nothing then, neither
    in a takeover nor for a session read, until the record is written anew."""
    owner, since = view.owners[shard], view.owner_revision[shard]
    if owner is None:
        return False
    return any(view.live_revision.get(name, 0) > since for name in owner.in_sync if name != owner.primary)


def is_home(view: ClusterView, shard: int, factor: int, caught_up: set[str]) -> bool:
    """Is the shard where placement proposes it, with all its replicas in sync, by record and in fact?"""
    owner, ideal = view.owners[shard], proposed(view, shard, factor)
    if owner is None or owner.primary != ideal[0] or len(owner.replicas) != len(ideal):
        return False
    at_home = all(name in owner.in_sync and (name == owner.primary or name in caught_up) for name in ideal)
    return at_home and len(owner.in_sync) == len(ideal) and not vouches_for_the_gone(view, shard)


def successor(view: ClusterView, shard: int, factor: int, caught_up: set[str]) -> str | None:
    """Who should be primary instead of this node: the best placed one, once it is complete."""
    owner = view.owners[shard]
    if owner is None:
        return None
    best = proposed(view, shard, factor)[0]
    return best if best != owner.primary and best in caught_up and best in owner.replicas else None


def handed_to(view: ClusterView, shard: int, target: str, caught_up: set[str], factor: int) -> ShardOwner:
    """The record that makes a complete replica the primary, under the next epoch."""
    owner = view.owners[shard]
    assert owner is not None
    in_sync = tuple(name for name in owner.replicas if name in caught_up or name == owner.primary)
    replicas = (target, *(name for name in owner.replicas if name != target))
    epoch = max(owner.epoch, view.epoch_seen[shard]) + 1
    return ShardOwner(target, view.live[target].epoch, epoch, replicas, in_sync, owner.former)


def given_up(view: ClusterView, shard: int) -> ShardOwner:
    """The record of a primary that reaches nobody: vacant, with itself as the last choice."""
    owner = view.owners[shard]
    assert owner is not None
    others = tuple(name for name in owner.in_sync if name != owner.primary)
    replicas = (*(name for name in owner.replicas if name != owner.primary), owner.primary)
    return ShardOwner("", 0, owner.epoch, replicas, (*others, owner.primary), owner.former)
