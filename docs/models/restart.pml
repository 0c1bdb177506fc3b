/* Restart within a lease: the new process never inherits, and an old one that was frozen does no harm (PROTOCOL 6, 11).
 *
 * Modelled: node N runs as the old process A (a member, primary of the shard; it may die, or be frozen and wake at any
 *   time) and as the new process B. If A is dead, B may hold the lock on A's data directory, which proves it; otherwise
 *   B waits until hb/N stood still for ttl(1+d) of its own clock and compares that heartbeat when it joins. An observer
 *   O times hb/N, expires A and takes the shard. A may rejoin when it was expired. Commits take any time; their outcome
 *   may be unknown, an unknown one was applied, never is, or is applied late.
 * Clocks and abstractions: as in lease.pml. B's own lease never lapses and O does not expire it (lease.pml has that).
 * Properties: one_gate (safety) with an assert that B acts only on a record that B itself has written; settles
 *   (liveness, with few unknown outcomes): B ends as a member or refused, also when there is no other node (ALONE).
 * Run: docs/models/run.sh restart (980,874 states, 6 s; settles: 27,254, 1 s)
 */
#define A_REV_MAX 3   /* A is born, expired, reborn (and expired again) */
#define B_REV_MAX 6   /* and B joins, and may join once more over its own record */
#define SHORT 4
#ifdef NO_DRIFT
#define LONG 6
#else
#define LONG 8
#endif
#define NODE_N 0
#define NODE_O 1

mtype = { DOWN, DEAD, WAITING, JOINING, MEMBER, LOST, STOPPED, IDLE, SENT, APPLIED, REFUSED, RENEW, JOIN, A, B };

/* The coordinator's records: live/N and own/S. */
byte live_rev = 1, live_epoch = 1;
bool dead = false;
mtype live_by = A;
byte owner = NODE_N, owner_epoch = 1;
mtype owner_by = A;

/* The old process. */
mtype a_phase = MEMBER, a_commit = IDLE, a_kind = RENEW;
byte lease_age = 0, sent_age = 0, a_rev = 1, a_compared = 1, a_late = 0;
bool a_primary = true;

/* The new process. */
mtype b_phase = DOWN, b_commit = IDLE;
bool proof = false;       /* it holds the lock of A's directory */
byte waited = 0;          /* since it began to wait, in units of its clock */
bool still = true;        /* hb/N is at the revision where the wait began */
byte outwaited = 0;       /* revision of the live/N whose heartbeat stood still */
byte b_compared = 0, b_late = 0, b_epoch = 0; /* the epoch that its last join asks for */
bool b_timed = false, b_late_timed = false; /* the join compares the heartbeat too */
bool b_primary = false;
byte unknowns = 0;

/* The observer. */
byte age = 0;
bool behind = false, o_gate = false;

#define OPEN_A (a_phase == MEMBER && a_primary && lease_age < SHORT)
#define OPEN_B (b_phase == MEMBER && b_primary)
#define VACANT (owner == NODE_N && (dead || owner_epoch != live_epoch))
ltl one_gate { [] (!(OPEN_A && OPEN_B) && !(OPEN_A && o_gate) && !(OPEN_B && o_gate)) }
ltl settles { [] ((b_phase == WAITING || b_phase == JOINING) -> <> (b_phase == MEMBER || b_phase == STOPPED)) }

inline passed(counter, top) {
    if
    :: counter < top -> counter++
    :: counter < top - 1 -> counter = counter + 2
    :: counter == top
    fi
}

inline heartbeat_moves() { still = false; behind = true; age = 0 }

inline joins(who) {
    live_rev++; dead = false; live_by = who;
#ifdef NO_EPOCH_BUMP
    live_epoch = (who == B -> live_epoch : live_epoch + 1);
#else
    live_epoch++;
#endif
    heartbeat_moves()
}

inline a_renewal(guard, outcome) {
    if
    :: guard == live_rev -> heartbeat_moves(); outcome = APPLIED
    :: else -> outcome = REFUSED
    fi
}

inline b_join(guard, timed, outcome) {
    if
#ifdef NO_HEARTBEAT_COMPARE
    :: guard == live_rev -> joins(B); outcome = APPLIED
#else
    :: guard == live_rev && (!timed || still) -> joins(B); outcome = APPLIED
#endif
    :: else -> outcome = REFUSED
    fi
}

inline b_becomes_member() {
    b_phase = MEMBER;
    b_primary = (owner == NODE_N && owner_epoch == b_epoch);
    assert(!b_primary || owner_by == B);
    waited = 0
}

inline b_sends_join(timed) {
    b_compared = live_rev; b_timed = timed; b_commit = SENT;
#ifdef NO_EPOCH_BUMP
    b_epoch = live_epoch
#else
    b_epoch = live_epoch + 1
#endif
}

/* A join that was refused or is unknown has happened if the record carries this incarnation and the epoch asked for. */
#ifdef READ_BACK_ANY_EPOCH
#define READ_BACK (live_by == B && !dead)
#else
#define READ_BACK (live_by == B && !dead && live_epoch == b_epoch)
#endif

inline b_waits() { b_phase = WAITING; waited = 0; still = true; outwaited = 0 }

active proctype Time() {
    do
    :: atomic {
           if
           :: a_phase == MEMBER -> passed(lease_age, SHORT)
           :: else
           fi;
           if
           :: a_commit != IDLE -> passed(sent_age, SHORT)
           :: else
           fi;
           if
           :: b_phase == WAITING -> passed(waited, LONG)
           :: else
           fi;
           if
           :: live_by == A && !dead -> passed(age, LONG)
           :: else
           fi
       }
    od
}

active proctype Old() {
    do
    :: d_step { a_phase == MEMBER && a_commit == IDLE ->
           a_kind = RENEW; a_compared = a_rev; sent_age = 0; a_commit = SENT }
    :: d_step { a_phase == LOST && a_commit == IDLE && dead && live_rev < A_REV_MAX ->
           a_kind = JOIN; a_compared = live_rev; sent_age = 0; a_commit = SENT }
    :: d_step { a_phase == LOST && a_commit == IDLE && !dead && live_by == B -> a_phase = STOPPED }
    :: d_step { a_commit == APPLIED ->
           a_phase = MEMBER; a_rev = (a_kind == JOIN -> a_compared + 1 : a_rev);
           lease_age = sent_age; a_commit = IDLE; sent_age = 0 }
    :: d_step { a_commit == REFUSED ->
           a_phase = LOST; a_primary = false; lease_age = SHORT; a_commit = IDLE; sent_age = 0 }
    :: d_step { a_commit != IDLE -> /* unknown */
           a_late = (a_commit == SENT && a_kind == RENEW -> a_compared : a_late);
           if
           :: a_commit == APPLIED && a_kind == JOIN -> a_phase = MEMBER; a_rev = a_compared + 1
           :: else
           fi;
           a_commit = IDLE; sent_age = 0 }
    :: d_step { a_phase == MEMBER && VACANT && a_rev == live_rev && !dead ->
           owner_epoch = live_epoch; owner_by = A; a_primary = true }
    :: d_step { a_phase != DEAD -> /* killed; what it has sent may still arrive */
           a_late = (a_commit == SENT && a_kind == RENEW -> a_compared : a_late);
           a_phase = DEAD; a_primary = false; lease_age = SHORT; a_commit = IDLE; sent_age = 0 } -> break
    od
}

active proctype New() {
    do
    :: d_step { b_phase == DOWN && a_phase == DEAD -> proof = true; b_phase = JOINING }
    :: d_step { b_phase == DOWN ->
#ifdef NO_STILLNESS
           proof = true;
#endif
           b_phase = JOINING }
    :: atomic { b_phase == JOINING && b_commit == IDLE ->
           if
#ifdef REFUSED_JOIN_REPEATED
           :: outwaited == live_rev && !still -> b_sends_join(true)
#else
           :: outwaited == live_rev && !still -> b_phase = STOPPED /* slow and not gone: "a node named N is alive" */
#endif
           :: outwaited == live_rev && still -> b_sends_join(true)
           :: outwaited != live_rev && (dead || live_by == B || proof) && live_rev < B_REV_MAX -> b_sends_join(false)
           :: outwaited != live_rev && !dead && live_by == A && !proof -> b_waits()
           fi }
    :: d_step { b_phase == WAITING && dead -> b_phase = JOINING; waited = 0 }
    :: d_step { b_phase == WAITING && !still -> b_phase = STOPPED; waited = 0 }
    :: d_step { b_phase == WAITING && waited >= LONG -> outwaited = live_rev; b_phase = JOINING; waited = 0 }
    :: d_step { b_commit == APPLIED -> b_commit = IDLE; b_becomes_member() }
    :: d_step { b_commit == REFUSED -> b_commit = IDLE;
           if
           :: READ_BACK -> b_becomes_member()
           :: else
           fi }
#ifdef SETTLES
    :: d_step { b_commit != IDLE && unknowns < 1 -> unknowns++;
#else
    :: d_step { b_commit != IDLE ->
#endif
           b_late = (b_commit == SENT -> b_compared : b_late);
           b_late_timed = (b_commit == SENT -> b_timed : b_late_timed);
           b_commit = IDLE;
           if
           :: READ_BACK -> b_becomes_member()
           :: else
           fi }
    :: d_step { b_phase == MEMBER && VACANT && live_by == B ->
           owner_epoch = live_epoch; owner_by = B; b_primary = true }
    od
}

#ifndef ALONE
active proctype Observer() {
    do
    :: d_step { behind -> behind = false; age = 0 }
    :: d_step { live_by == A && !dead && age >= LONG && !behind ->
           live_rev++; live_epoch++; dead = true; age = 0 }
    :: d_step { VACANT && !o_gate -> owner = NODE_O; o_gate = true }
    od
}
#endif

/* The coordinator is two processes, so that weak fairness serves A and B. */
active proctype ServesOld() {
    mtype outcome;
    do
    :: d_step { a_commit == SENT && a_kind == RENEW -> a_renewal(a_compared, a_commit) }
    :: d_step { a_commit == SENT && a_kind == JOIN ->
           if
           :: a_compared == live_rev -> joins(A); a_commit = APPLIED
           :: else -> a_commit = REFUSED
           fi }
    :: d_step { a_late -> a_renewal(a_late, outcome); a_late = 0; outcome = 0 }
    od
}

active proctype ServesNew() {
    mtype outcome;
    do
    :: d_step { b_commit == SENT -> b_join(b_compared, b_timed, b_commit) }
    :: d_step { b_late -> b_join(b_late, b_late_timed, outcome); b_late = 0; b_late_timed = false; outcome = 0 }
    od
}
