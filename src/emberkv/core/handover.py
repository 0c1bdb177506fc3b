"""Giving shards away while alive: to a better placed node, in a drain, or because nobody can be reached (design 2, 4).

    HELD --(close the gate)--> CLOSING --(nothing in flight to the next one)--> COMMITTING --committed--> (GIVEN)
      ^                           |                                                |  unknown
      +---- next one is lost -----+<------------------ refused --------------------+--> SETTLING --own commit--> HELD

Laws: the gate of the shard is closed BEFORE the commit is sent and stays closed until it is certain whether it took
effect: the record's revision has moved, or a later commit of ours on the same revision succeeded. Puts that arrive
meanwhile wait as hints and are forwarded: no request fails for it. The next primary is complete, and nothing that this
one stamped is unanswered by it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import msgspec

from emberkv.core import rebalance
from emberkv.core.effects import Commit
from emberkv.core.events import Committed
from emberkv.core.lease import Lease
from emberkv.core.machine import moved
from emberkv.core.repair import Repair
from emberkv.core.state import State
from emberkv.core.stream import Stream
from emberkv.core.view import LIVE_PREFIX, encode_record, owner_key
from emberkv.messages import ShardOwner
from emberkv.ports import CommitStatus, Compare, Write

CLOSED_MAX = 32
"""Shards handed over at the same time: their puts wait meanwhile, so few at once."""
PER_COMMIT_MAX = 16
CLOSING_TTLS_MAX = 0.25
"""A gate that has been closed for this part of a lease without a commit is opened again, and closed once more later:
the next one does not keep up, or a batch spans two shards that wait for each other. Puts wait meanwhile."""


class Phase(Enum):
    """State of one shard that is given away."""

    CLOSING = "closing"
    COMMITTING = "committing"
    SETTLING = "settling"


TRANSITIONS = {
    (Phase.CLOSING, "nothing in flight"): Phase.COMMITTING,
    (Phase.COMMITTING, "unknown"): Phase.SETTLING,
    (Phase.SETTLING, "unknown"): Phase.SETTLING,
    (Phase.SETTLING, "refused"): Phase.SETTLING,
}
"""Beside these a shard leaves the table (gate open again, or given) as the laws say."""


class Leaving(msgspec.Struct):
    """One shard on its way to another primary; `target` empty: to whoever takes it."""

    shard: int
    target: str
    since_ns: int
    phase: Phase = Phase.CLOSING
    in_flight: bool = False

    def move(self, what: str) -> None:
        """Takes one of the listed transitions."""
        self.phase = moved(TRANSITIONS, self.phase, what, "a hand-over")


class Handover:
    """Shards that this primary gives away."""

    def __init__(
        self, state: State, lease: Lease, repair: Repair, stream: Stream, owes_an_answer: Callable[[int], bool]
    ) -> None:
        self.state = state
        self.owes_an_answer = owes_an_answer
        self.lease = lease
        self.repair = repair
        self.stream = stream
        self.leaving: dict[int, Leaving] = {}
        self._commits: dict[int, list[tuple[Leaving, ShardOwner]]] = {}

    def begin(self, shard: int, target: str) -> bool:
        """Closes the gate of a shard; False when too many are: a whole node is handed over piece by piece."""
        if shard in self.leaving or len(self.leaving) >= CLOSED_MAX:
            return False
        self.leaving[shard] = Leaving(shard, target, self.state.now_ns)
        self.state.closed[shard] = self.state.view.owner_revision[shard]
        return True

    def _end(self, shard: int) -> None:
        self.leaving.pop(shard, None)
        self.state.closed.pop(shard, None)
        self.state.given.discard(shard)
        self.state.review.add(shard)

    def on_records(self) -> None:
        """A record that moved has settled its shard, whatever became of our commit."""
        for shard, revision in list(self.state.closed.items()):
            if self.state.view.owner_revision[shard] != revision:
                self._end(shard)

    def on_tick(self, now_ns: int) -> None:
        """Commits what is ready, settles what is unknown, opens again what cannot be given."""
        if not self.leaving or not self.lease.open(now_ns):
            return
        ttl_ns = self.state.settings.ttl_ns
        ready: dict[str, list[Leaving]] = {}
        for leaving in list(self.leaving.values()):
            if leaving.in_flight:
                continue
            if leaving.phase is Phase.SETTLING:
                self._commit([leaving], keep=True)
            elif not self._still_wanted(leaving) or now_ns - leaving.since_ns > self._patience_ns(
                leaving.shard, ttl_ns
            ):
                self._end(leaving.shard)
            elif self._is_quiet(leaving):
                ready.setdefault(leaving.target, []).append(leaving)
        for group in ready.values():
            self._commit(group[:PER_COMMIT_MAX], keep=False)

    @staticmethod
    def _patience_ns(shard: int, ttl_ns: int) -> int:
        """Not the same for all, so that of two that wait for each other one gives way."""
        return int(CLOSING_TTLS_MAX * ttl_ns * (1 + shard % 8 / 8))

    def _is_quiet(self, leaving: Leaving) -> bool:
        """Has the next one answered all, and is nothing left to acknowledge? Who reaches nobody waits for neither: what
        it cannot acknowledge any more is answered as unknown."""
        if not leaving.target:
            return True
        return not self.stream.flying(leaving.target, leaving.shard) and not self.owes_an_answer(leaving.shard)

    def _still_wanted(self, leaving: Leaving) -> bool:
        view, shard = self.state.view, leaving.shard
        if not view.primary_epoch[shard]:
            return False
        if not leaving.target:
            return not self.state.peers_up
        return view.is_live(leaving.target) and leaving.target in self.repair.complete.get(shard, ())

    def _commit(self, group: list[Leaving], *, keep: bool) -> None:
        """One commit for some shards of one target. `keep`: our own record again, whose success proves that an earlier
        commit on the same revision can no longer take effect."""
        view, factor = self.state.view, self.state.settings.factor
        compares = [self.lease.guard()]
        target = group[0].target
        if target and not keep:
            compares.append(Compare(LIVE_PREFIX + target, view.live_revision[target]))
        chosen: list[tuple[Leaving, ShardOwner]] = []
        for leaving in group:
            shard = leaving.shard
            owner = view.owners[shard]
            assert owner is not None
            if keep:
                record = owner
            elif target:
                record = rebalance.handed_to(view, shard, target, self.repair.complete.get(shard, set()), factor)
            else:
                record = rebalance.given_up(view, shard)
            compares.append(Compare(owner_key(shard), self.state.closed[shard]))
            chosen.append((leaving, record))
            leaving.in_flight = True
            if not keep:
                leaving.move("nothing in flight")
                self.state.given.add(shard)
        op = self.state.request_id()
        self._commits[op] = chosen
        writes = [Write(owner_key(leaving.shard), encode_record(record)) for leaving, record in chosen]
        self.state.out.append(Commit(op, compares, writes))

    def on_committed(self, event: Committed) -> bool:
        """Takes the outcome of our own commit; False when it is not ours."""
        chosen = self._commits.pop(event.op, None)
        if chosen is None:
            return False
        for leaving, record in chosen:
            shard = leaving.shard
            if self.leaving.get(shard) is not leaving:
                continue  # settled by the record's move; what that was compared with is gone
            leaving.in_flight = False
            if event.status is CommitStatus.COMMITTED:
                self.state.view.own_record(shard, record, event.revision)
                self.state.counters["handed_over"] += record.primary != self.state.settings.name
                self._end(shard)
            elif event.status is CommitStatus.UNKNOWN:
                leaving.move("unknown")
            elif leaving.phase is Phase.COMMITTING:
                # Certainly not done: the next one has died or rejoined, or the record moved and the watch will say so.
                self._end(shard)
            else:
                leaving.move("refused")  # the record moved; the watch will say where to
        return True
