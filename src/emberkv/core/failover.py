"""Who takes over when a node is gone, and who replaces its copies (design 4).

    node:  ALIVE --(heartbeat still for ttl*(1+drift))--> SUSPECT --(commit live+1)--> DEAD
             ^----------(heartbeat moved)-------------------+
    shard: OWNED --(primary's liveness epoch not current)--> VACANT --(rank k waited k*2c, commit)--> OWNED anew

Laws: the expiry commit compares the very revision at which its timer started. The timers restart when this observer
itself was late. After a coordinator outage nobody is expired before `grace` of own successful commits. Vacancy is a
level: it is looked at on every tick. In-sync replicas come first; a replica that joined after the owner record was
written holds nothing it promised, so it does not count as in sync whatever the record says, and no record is written
that could name such a one.
"""

from __future__ import annotations

from emberkv.core import placement, rebalance
from emberkv.core.effects import Commit
from emberkv.core.events import Committed
from emberkv.core.handover import Handover
from emberkv.core.lease import Lease
from emberkv.core.state import SHARDS_PER_COMMIT, State
from emberkv.core.view import HEARTBEAT_PREFIX, LIVE_PREFIX, ClusterView, encode_record, owner_key
from emberkv.messages import LiveRecord, ShardOwner
from emberkv.ports import CommitStatus, Compare, Write
from emberkv.types import EPOCH_GENERATION_SHIFT

FIRST_START_PATIENCE_NS = 10_000_000_000
"""How long the first start of a cluster waits for a member that it expects: loading Python on a busy machine."""
RECONCILES_PER_HEARTBEAT = 3
"""How often owner records may change for repair and moves: a few commits a lease."""
MOVES_MAX = 32
"""Shards of one primary that move at the same time: rebalancing must leave the network to reads and fresh writes."""
GUARD_COMPARES_MAX = 8
"""Own liveness plus the dead primaries named by one batch; with SHARDS_PER_COMMIT this fills one commit."""


def unbroken(view: ClusterView, shard: int, names: tuple[str, ...]) -> list[str]:
    """Those of `names` that live and have not restarted or rejoined since the owner record was written."""
    since = view.owner_revision[shard]
    return [name for name in names if view.is_live(name) and view.live_revision[name] < since]


def takers(view: ClusterView, shard: int, members: tuple[str, ...]) -> list[str]:
    """Who may take a vacant shard, in order of rank; who drains comes last."""
    owner = view.owners[shard]
    if owner is None:
        return placement.ranked(shard, sorted({*members, *view.live_nodes()}))
    order = unbroken(view, shard, owner.in_sync)
    # A learner holds part of the shard; a replica that has restarted may hold nothing at all.
    order += [name for name in unbroken(view, shard, owner.replicas) if name not in order]
    order += [name for name in owner.replicas if view.is_live(name) and name not in order]
    order += [name for name in placement.ranked(shard, view.homes()) if name not in order]
    return order


def taken(view: ClusterView, shard: int, taker: str, liveness_epoch: int, factor: int, floor: int) -> ShardOwner:
    """The record that makes `taker` primary: higher epoch, the live replicas kept, the best others added."""
    owner = view.owners[shard]
    old = owner.replicas if owner is not None else ()
    former = owner.former if owner is not None else ()
    in_sync = owner.in_sync if owner is not None else ()
    kept = [name for name in old if name != taker and view.is_live(name)]
    kept.sort(key=lambda name: name not in in_sync)
    spare = [name for name in placement.ranked(shard, view.homes()) if name != taker and name not in kept]
    replicas = tuple([taker, *kept, *spare][:factor])
    gone = tuple(name for name in old if name not in replicas)
    epoch = max(owner.epoch if owner is not None else 0, view.epoch_seen[shard], floor) + 1
    former = tuple(name for name in (*gone, *former) if name not in replicas)[:factor]
    # Only the taker is sure to hold what it will speak for; the others are in sync again once repair has compared.
    return ShardOwner(taker, liveness_epoch, epoch, replicas, (taker,), former)


class Failover:
    """Watches the others' heartbeats and takes what is vacant."""

    def __init__(self, state: State, lease: Lease, handover: Handover) -> None:
        self.state = state
        self.lease = lease
        self.handover = handover
        self.caught_up: dict[int, set[str]] = {}
        """Replicas that repair found complete in this epoch, per shard; kept by repair."""
        self._last_tick_ns = 0
        self._timers_from_ns = 0
        """Timers that started before this moment are void: this observer was late."""
        self._expiring: dict[int, str] = {}
        self._taking: dict[int, list[tuple[int, ShardOwner]]] = {}
        self._busy: set[int] = set()
        """Shards named by a commit in flight."""
        self._vacant_since: dict[int, int] = {}
        self._reconciled_ns = 0
        self._set_aside: set[int] = set()
        """Shards that may have to move, once the nodes are steady and fewer are on their way."""
        self._moving: set[int] = set()
        """Shards of ours on their way to better placed nodes."""
        self._nodes: tuple[tuple[str, bool], ...] = ()
        self._steady_since_ns = 0
        """Since when the same nodes live and drain: nothing is moved while they come and go."""
        self._gave_up: set[int] = set()
        """Shards given up in this spell of being alone. Once is enough: what is ours after that, nobody else wanted."""
        self._alone_since_ns = 0
        """Since when this node reaches no live peer, although there are some; 0: it is not alone."""

    def on_tick(self, now_ns: int) -> None:
        """Looks at all levels once."""
        settings = self.state.settings
        if now_ns - self._last_tick_ns > settings.ttl_ns // 3:
            self._timers_from_ns = now_ns
        self._last_tick_ns = now_ns
        self._note_alone(now_ns)
        if not self.lease.open(now_ns):
            return
        self._expire(now_ns)
        self.take(now_ns)
        self.handover.on_tick(now_ns)
        self._give_up_alone(now_ns)
        if (
            self.state.review or self._set_aside
        ) and now_ns - self._reconciled_ns > settings.heartbeat_ns // RECONCILES_PER_HEARTBEAT:
            self._reconciled_ns = now_ns
            self.reconcile()

    def _note_alone(self, now_ns: int) -> None:
        if self.state.peers_up or not self.state.view.peer_addresses():
            self._alone_since_ns = 0
            self._gave_up.clear()
        elif not self._alone_since_ns:
            self._alone_since_ns = now_ns

    def _is_alone(self, now_ns: int) -> bool:
        """Has this node reached no live peer for a whole lease? Then it speaks for nobody who can hear it."""
        return bool(self._alone_since_ns) and now_ns - self._alone_since_ns > self.state.settings.ttl_ns

    def _give_up_alone(self, now_ns: int) -> None:
        """Shards with another live replica are left to those who reach one another."""
        if not self._is_alone(now_ns):
            return
        view, name = self.state.view, self.state.settings.name
        for shard, epoch in enumerate(view.primary_epoch):
            owner = view.owners[shard]
            if not epoch or owner is None or shard in self._busy or shard in self._gave_up:
                continue
            others = any(peer != name and view.is_live(peer) for peer in owner.replicas)
            if others and self.handover.begin(shard, ""):
                self._gave_up.add(shard)

    def _expire(self, now_ns: int) -> None:
        settings, view = self.state.settings, self.state.view
        healthy_since = self.lease.healthy_since_ns
        if healthy_since is None or now_ns - healthy_since < settings.grace_ns:
            return
        if now_ns - self.lease.renewed_ns > settings.heartbeat_ns + settings.margin_ns:
            return  # our own renewal is overdue: the others' may hang where ours does
        patience_ns = int(settings.ttl_ns * (1 + settings.drift))
        for name in view.live_nodes():
            beat = view.heartbeats.get(name)
            if name == settings.name or beat is None or name in self._expiring.values():
                continue
            if now_ns - max(beat.seen_ns, self._timers_from_ns) > patience_ns:
                self._commit_death(name, beat.revision)

    def _commit_death(self, name: str, timed_revision: int) -> None:
        view = self.state.view
        record = view.live[name]
        dead = LiveRecord(record.epoch + 1, record.incarnation, record.address, dead=True)
        compares = [
            self.lease.guard(),
            Compare(LIVE_PREFIX + name, view.live_revision[name]),
            Compare(HEARTBEAT_PREFIX + name, timed_revision),
        ]
        op = self.state.request_id()
        self._expiring[op] = name
        self.state.out.append(Commit(op, compares, [Write(LIVE_PREFIX + name, encode_record(dead))]))
        self.state.note(f"node {name} has been silent for a whole lease: expiring it")

    def take(self, now_ns: int) -> None:
        """Takes the vacant shards whose turn it is; called on ticks and when records change."""
        settings, view = self.state.settings, self.state.view
        if not view.vacant and not self._vacant_since:
            return
        due: list[int] = []
        for shard in [shard for shard in self._vacant_since if shard not in view.vacant]:
            del self._vacant_since[shard]
        alone = self._is_alone(now_ns)
        for shard in sorted(view.vacant):
            since = self._vacant_since.setdefault(shard, now_ns)
            if shard in self._busy:
                continue
            order = takers(view, shard, settings.members)
            if settings.name not in order:
                continue
            better = order[: order.index(settings.name)]
            if alone and view.owners[shard] is not None:
                # Whoever reaches somebody goes first. If nobody does, one voice is better than none.
                better = [name for name in order if name != settings.name]
            patience_ns = self._patience_ns(shard, better) + (settings.ttl_ns if alone else 0)
            if now_ns - since >= patience_ns:
                due.append(shard)
        for start in range(0, len(due), SHARDS_PER_COMMIT):
            self._commit_take(due[start : start + SHARDS_PER_COMMIT])

    def _patience_ns(self, shard: int, better: list[str]) -> int:
        """How long a vacancy is left to those who rank better. At the first start they may still be on their way, and
        whoever comes too late stays without shards; later each gets one commit round."""
        settings, view = self.state.settings, self.state.view
        if view.owners[shard] is not None:
            return len(better) * 2 * settings.commit_ns
        absent = any(not view.is_live(name) for name in better)
        return len(better) * settings.ttl_ns // 2 + (FIRST_START_PATIENCE_NS if absent else 0)

    def _commit_take(self, shards: list[int]) -> None:
        settings, view = self.state.settings, self.state.view
        floor = settings.generation << EPOCH_GENERATION_SHIFT
        guards = {LIVE_PREFIX + settings.name: self.lease.guard()}
        chosen: list[tuple[int, ShardOwner]] = []
        for shard in shards:
            owner = view.owners[shard]
            if owner is not None and owner.primary:
                # Also one whose record is not known here: it must be absent, or this vacancy is only ours.
                key = LIVE_PREFIX + owner.primary
                if key not in guards and len(guards) >= GUARD_COMPARES_MAX:
                    continue
                guards.setdefault(key, Compare(key, view.live_revision.get(owner.primary, 0)))
            record = taken(view, shard, settings.name, self.lease.liveness_epoch, settings.factor, floor)
            chosen.append((shard, record))
        self._commit_owners(chosen, list(guards.values()))

    def reconcile(self) -> None:
        """Repairs the replica sets of the shards this node is primary of, and moves them to where they belong."""
        view, factor = self.state.view, self.state.settings.factor
        steady = self._is_steady()
        self._moving = {shard for shard in self._moving if view.primary_epoch[shard]}
        if steady:
            # Those on their way go on; others begin when fewer are.
            ready = self._set_aside & self._moving if len(self._moving) >= MOVES_MAX else set(self._set_aside)
            self.state.review |= ready
            self._set_aside -= ready
        due: list[tuple[int, ShardOwner]] = []
        for shard in sorted(self.state.review):
            owner = view.owners[shard]
            if not view.primary_epoch[shard] or owner is None:
                self.state.review.discard(shard)
                continue
            if shard in self._busy or shard in self.state.closed:
                continue
            caught_up = self.caught_up.get(shard, set())
            if rebalance.is_home(view, shard, factor, caught_up):
                self.state.review.discard(shard)
                self._moving.discard(shard)
                continue
            moves = steady and (shard in self._moving or len(self._moving) < MOVES_MAX)
            record = rebalance.reconciled(view, shard, factor, caught_up, may_move=moves)
            if record is not None:
                due.append((shard, record))
            elif moves and (target := rebalance.successor(view, shard, factor, caught_up)) is not None:
                self.handover.begin(shard, target)
                self._moving.add(shard)
            elif not moves:
                self.state.review.discard(shard)
                self._set_aside.add(shard)
            else:
                # Nothing to do before a comparison ends, the record moves or a node comes or goes: each brings the
                # shard back here.
                self.state.review.discard(shard)
            if len((record or owner).replicas) > factor:
                self._moving.add(shard)
        for start in range(0, len(due), SHARDS_PER_COMMIT):
            self._commit_reconciled(due[start : start + SHARDS_PER_COMMIT])

    def _is_steady(self) -> bool:
        view = self.state.view
        nodes = tuple((name, view.is_draining(name)) for name in view.live_nodes())
        if nodes != self._nodes:
            self._nodes, self._steady_since_ns = nodes, self.state.now_ns
        return self.state.now_ns - self._steady_since_ns > self.state.settings.ttl_ns

    def _commit_reconciled(self, due: list[tuple[int, ShardOwner]]) -> None:
        """Whoever is named in sync must still be the incarnation that repair has compared when the record lands, or
        the record would be younger than its restart and vouch for an empty memory."""
        view, me = self.state.view, self.state.settings.name
        guards = {me: self.lease.guard()}
        chosen: list[tuple[int, ShardOwner]] = []
        for shard, record in due:
            fresh = [name for name in record.in_sync if name not in guards]
            if len(guards) + len(fresh) > GUARD_COMPARES_MAX:
                continue  # in the next round
            for name in fresh:
                guards[name] = Compare(LIVE_PREFIX + name, view.live_revision[name])
            chosen.append((shard, record))
        self._commit_owners(chosen, list(guards.values()))

    def _commit_owners(self, chosen: list[tuple[int, ShardOwner]], guards: list[Compare]) -> None:
        if not chosen:
            return
        view = self.state.view
        compares = guards + [Compare(owner_key(shard), view.owner_revision[shard]) for shard, _ in chosen]
        writes = [Write(owner_key(shard), encode_record(record)) for shard, record in chosen]
        op = self.state.request_id()
        self._taking[op] = chosen
        self._busy.update(shard for shard, _ in chosen)
        self.state.out.append(Commit(op, compares, writes))

    def on_committed(self, event: Committed) -> list[int]:
        """Takes the outcome of our own commits; returns the shards whose owner record we have just written."""
        name = self._expiring.pop(event.op, None)
        if name is not None:
            self.state.counters["expired_peers"] += event.status is CommitStatus.COMMITTED
            return []
        chosen = self._taking.pop(event.op, None)
        if chosen is None:
            return []
        self._busy.difference_update(shard for shard, _ in chosen)
        if event.status is not CommitStatus.COMMITTED:
            return []  # refused: the watch brings what changed; unknown: the watch reads it back
        for shard, record in chosen:
            self.state.view.own_record(shard, record, event.revision)
        return [shard for shard, _ in chosen]
