"""The right to act: membership of this incarnation, and the lease that its heartbeats extend (design 4).

        full view          proof or stillness        committed           refused: record changed
    STARTING ----> WAITING -----------------> JOINING -----> MEMBER ------------------------> LOST
                      |  record moves            ^  ^ unknown  |                                |
                      v                          |  +----------+ renew                          |
                   REFUSED <---- other incarnation lives ---- (rejoin under a new epoch) <------+

Laws: the right ends at sent_at + ttl*(1-drift) - margin, counted from BEFORE the renewal was sent. A renewal is only
ever emitted by a step of the core, so a frozen core never stays primary. A lapsed holder whose renewal succeeds goes
on in the same epoch, because its record did not change. An unknown outcome extends nothing.
"""

from __future__ import annotations

from enum import Enum

from emberkv.core.effects import Commit
from emberkv.core.events import Committed
from emberkv.core.machine import moved
from emberkv.core.state import State
from emberkv.core.view import HEARTBEAT_PREFIX, LIVE_PREFIX, encode_record
from emberkv.messages import HeartbeatRecord, LiveRecord
from emberkv.ports import CommitStatus, Compare, Write
from emberkv.types import EPOCH_GENERATION_SHIFT


class Phase(Enum):
    """State of this incarnation's membership."""

    STARTING = "starting"
    WAITING = "waiting"
    JOINING = "joining"
    MEMBER = "member"
    LOST = "lost"
    REFUSED = "refused"


TRANSITIONS = {
    (Phase.STARTING, "name is free"): Phase.JOINING,
    (Phase.STARTING, "name may be in use"): Phase.WAITING,
    (Phase.WAITING, "name is free"): Phase.JOINING,
    (Phase.WAITING, "its heartbeat moves"): Phase.REFUSED,
    (Phase.JOINING, "name is free"): Phase.JOINING,
    (Phase.JOINING, "name may be in use"): Phase.WAITING,
    (Phase.JOINING, "committed or read back"): Phase.MEMBER,
    (Phase.MEMBER, "renewal refused"): Phase.LOST,
    (Phase.LOST, "another incarnation lives"): Phase.REFUSED,
    (Phase.LOST, "expired"): Phase.JOINING,
}
"""All moves of one incarnation; a missing one is a bug. Within MEMBER the lease opens and lapses with time alone."""


class Lease:
    """Membership and lease of one incarnation."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.phase = Phase.STARTING
        state.lease_open = lambda: self.open(state.now_ns)
        self.deadline_ns = 0
        self.live_revision = 0
        """Mod revision of our own live record: what every guarded commit of ours compares."""
        self.renewed_ns = 0
        """When our last commit that succeeded was known to."""
        self.healthy_since_ns: int | None = None
        """Since when our commits have been succeeding without a failure between."""
        self.liveness_epoch = 0
        self._live_key = LIVE_PREFIX + state.settings.name
        self._heartbeat_key = HEARTBEAT_PREFIX + state.settings.name
        self._counter = 0
        self._in_flight = 0
        self._sent_ns = 0
        self._waiting_since_ns = 0
        self._waiting_revision = 0
        self._outwaited: LiveRecord | None = None
        """A stranger's record under our name whose heartbeat stood still for a whole lease."""

    def _move(self, what: str) -> None:
        self.phase = moved(TRANSITIONS, self.phase, what, "an incarnation")

    def open(self, now_ns: int) -> bool:
        """May this node act as primary of the shards that its records name, at this moment?"""
        return self.phase is Phase.MEMBER and now_ns < self.deadline_ns

    def guard(self) -> Compare:
        """Every commit that acts on this incarnation's right compares its live record."""
        return Compare(self._live_key, self.live_revision)

    def on_records(self, now_ns: int, *, full: bool) -> None:
        """The view changed."""
        if self.phase is Phase.STARTING and full:
            self._consider_start(now_ns)
        elif self.phase is Phase.WAITING:
            self._consider_waiting(now_ns)
        elif self.phase is Phase.LOST:
            self._consider_lost()

    def on_tick(self, now_ns: int) -> None:
        """Renews when due; moves on from waiting."""
        settings = self.state.settings
        if self.phase is Phase.WAITING:
            self._consider_waiting(now_ns)
        if self._in_flight or now_ns - self._sent_ns < settings.heartbeat_ns:
            return
        if self.phase is Phase.MEMBER:
            self._renew(now_ns)
        elif self.phase is Phase.JOINING:
            # Asked anew each time: another process may have joined under our name since the last attempt.
            self._consider_start(now_ns)

    def _consider_start(self, now_ns: int) -> None:
        if self._name_is_free():
            self._move("name is free")
            self._join(now_ns)
            return
        # Somebody lived under our name and we hold no proof that it is gone: only stillness of its heartbeat is one.
        self._move("name may be in use")
        self._waiting_since_ns = now_ns
        self._waiting_revision = self._heartbeat_revision()

    def _name_is_free(self) -> bool:
        """Nobody else can still be acting under our name."""
        settings = self.state.settings
        record = self.state.view.live.get(settings.name)
        if record is None or record.dead:
            return True
        if record == self._outwaited and self._heartbeat_revision() == self._waiting_revision:
            return True
        return record.incarnation in (settings.previous_incarnation, settings.incarnation)

    def _heartbeat_revision(self) -> int:
        beat = self.state.view.heartbeats.get(self.state.settings.name)
        return beat.revision if beat is not None else 0

    def _consider_waiting(self, now_ns: int) -> None:
        settings = self.state.settings
        moved = self._heartbeat_revision() != self._waiting_revision
        if not moved and now_ns - self._waiting_since_ns > settings.ttl_ns * (1 + settings.drift):
            self._outwaited = self.state.view.live.get(settings.name)
        if self._name_is_free():
            self._move("name is free")
            self._join(now_ns)
        elif moved:
            self._move("its heartbeat moves")
            self.state.note(f"a node named {settings.name!r} is alive: stop it or start under another name", alarm=True)

    def _consider_lost(self) -> None:
        settings = self.state.settings
        record = self.state.view.live.get(settings.name)
        if self.state.view.live_revision.get(settings.name, 0) == self.live_revision:
            return  # the change that refused us has not reached our view yet
        if record is not None and not record.dead and record.incarnation != settings.incarnation:
            self._move("another incarnation lives")
            self.state.note(f"another process took over the name {settings.name!r}: this one stops", alarm=True)
            return
        self._move("expired")

    def _join(self, now_ns: int) -> None:
        settings, view = self.state.settings, self.state.view
        record = view.live.get(settings.name)
        floor = settings.generation << EPOCH_GENERATION_SHIFT
        self.liveness_epoch = max(record.epoch if record is not None else 0, floor) + 1
        live = LiveRecord(self.liveness_epoch, settings.incarnation, settings.address)
        beat = HeartbeatRecord(self.liveness_epoch, 0)
        compares = [Compare(self._live_key, view.live_revision.get(settings.name, 0))]
        if record is not None and record == self._outwaited:
            # Its process may have been slow and not gone: then its heartbeat has moved on by now.
            compares.append(Compare(self._heartbeat_key, self._waiting_revision))
        writes = [Write(self._live_key, encode_record(live)), Write(self._heartbeat_key, encode_record(beat))]
        self._commit(now_ns, compares, writes)

    def _renew(self, now_ns: int) -> None:
        self._counter += 1
        beat = HeartbeatRecord(self.liveness_epoch, self._counter)
        self._commit(now_ns, [self.guard()], [Write(self._heartbeat_key, encode_record(beat))])

    def _commit(self, now_ns: int, compares: list[Compare], writes: list[Write]) -> None:
        self._in_flight = self.state.request_id()
        self._sent_ns = now_ns
        self.state.out.append(Commit(self._in_flight, compares, writes))

    def on_committed(self, event: Committed) -> bool:
        """Takes the outcome of our own commit; False when it is not ours. Whose commit it ever was: one without an
        outcome means that the coordinator may be out, for the others too."""
        if event.status is CommitStatus.UNKNOWN:
            self.healthy_since_ns = None
        if event.op != self._in_flight:
            return False
        self._in_flight = 0
        if event.status is CommitStatus.UNKNOWN:
            self._read_back()
        elif event.status is CommitStatus.REFUSED:
            self._refused()
        else:
            self._extended(event)
        return True

    def _read_back(self) -> None:
        """A join whose outcome is unknown has happened if the record carries our incarnation and epoch."""
        view, name = self.state.view, self.state.settings.name
        record = view.live.get(name)
        ours = record is not None and record.incarnation == self.state.settings.incarnation
        if self.phase is Phase.JOINING and ours and record is not None and record.epoch == self.liveness_epoch:
            self._become_member(view.live_revision[name])

    def _refused(self) -> None:
        if self.phase is Phase.MEMBER:
            self._move("renewal refused")
            self.deadline_ns = 0
            self.state.view.set_membership(0)
            self.state.counters["lease_lost"] += 1
            self.state.note("lease lost: this node was expired or restored; rejoining as a learner")
            self._consider_lost()
        elif self.phase is Phase.JOINING:
            self._read_back()

    def _become_member(self, live_revision: int) -> None:
        self._move("committed or read back")
        self.live_revision = live_revision
        self.state.view.set_membership(self.liveness_epoch)

    def _extended(self, event: Committed) -> None:
        settings = self.state.settings
        if self.phase is Phase.JOINING:
            # The watch may be slow: what this node has just written it knows already.
            view, name = self.state.view, settings.name
            if event.revision > view.live_revision.get(name, 0):
                view.live[name] = LiveRecord(self.liveness_epoch, settings.incarnation, settings.address)
                view.live_revision[name] = event.revision
            self._become_member(event.revision)
        if self.phase is not Phase.MEMBER:
            return
        self.renewed_ns = event.now_ns
        self.deadline_ns = event.sent_ns + int(settings.ttl_ns * (1 - settings.drift)) - settings.margin_ns
        # Counted from when it was asked for: it may have waited behind other commits of ours that hung.
        if self.healthy_since_ns is None or event.now_ns - self._sent_ns > settings.heartbeat_ns:
            # A commit that took this long was an outage for the others too: they need time to beat again.
            self.healthy_since_ns = event.now_ns
        self.state.counters["renewals"] += 1
