/* Lease and takeover: at no moment do two nodes acknowledge for one shard (PROTOCOL 6, 7, 11).
 *
 * Modelled: a holder that renews hb/H and owns the shard; two observers that time its heartbeat, expire it and take the
 *   shard; a coordinator with compare-and-set. An expired holder joins again under a new liveness epoch and may take the
 *   shard back. Commits take any time; an unknown one was applied, never is, or is applied late. Watches lag. No process
 *   has to take a step, so a frozen one is part of every run.
 * Clocks: in a true tick a clock moves by 1 or 2 units, chosen anew each tick: nominal 1.5, so d = 1/3. ttl is 4 ticks =
 *   6 units; T(1-d) = 4, T(1+d) = 8. An acknowledgement leaves up to one tick after the look at the clock (the margin).
 * Abstraction: revisions are compared for equality only, so a view is one bit: is it current? A guarded commit that is
 *   applied late succeeds exactly if it would when sent late, so expiry and takeover are one step at the coordinator;
 *   renewals and joins are not, since they date a lease. live/H is odd while H lives, even when it is expired.
 * Left out: the observers' own leases (a taker's gate stays open for ever: the worst case), more than one shard.
 * Property: ltl one_gate, and an assert at each acknowledgement. Mutations: README.md.
 * Run: docs/models/run.sh lease (188,410 states, 2 s)
 */
#define LIVE_MAX 4 /* born, expired, reborn, expired again */
#define SHORT 4    /* T(1-d): what the holder allows itself */
#ifdef NO_DRIFT
#define LONG 6     /* T, as if all clocks ran alike */
#else
#define LONG 8     /* T(1+d): what an observer waits */
#endif
#ifdef NO_MARGIN
#define LIMIT SHORT
#else
#define LIMIT (SHORT - 1)
#endif
#define HOLDER 0

mtype = { MEMBER, LOST, IDLE, SENT, APPLIED, REFUSED, RENEW, JOIN };

/* The coordinator's records. */
byte live = 1;                          /* epoch and revision of live/H */
byte owner = HOLDER, owner_live = 1;    /* own/S: who, and under which live/H if it is the holder */

/* The holder; ages in units of its own clock, cut off where they stop to matter. */
mtype phase = MEMBER, commit = IDLE, kind = RENEW;
byte lease_age = 0;                     /* since the last extending renewal was SENT */
byte sent_age = 0;                      /* since the commit in flight was sent */
byte my_live = 1, compared = 1;
byte late = 0, late_join = 0;           /* unknown, and may still land: the live/H it compares */
bool primary = true, acting = false, aged = false;

/* The observers, 1 and 2. */
byte age[3];                            /* since it saw hb/H move */
bool behind[3];                         /* hb/H has moved and the watch has not shown it yet */
bool gate[3];

#define OPEN_H ((phase == MEMBER && primary && lease_age < LIMIT) || acting)
#define VACANT (owner == HOLDER && owner_live != live)
ltl one_gate { [] (!(OPEN_H && gate[1]) && !(OPEN_H && gate[2]) && !(gate[1] && gate[2])) }

inline passed(counter, top) {
    if
    :: counter < top -> counter++
    :: counter < top - 1 -> counter = counter + 2
    :: counter == top - 1 -> counter = top
    :: counter == top
    fi
}

inline heartbeat_moves() {
    behind[1] = true; behind[2] = true;
#ifndef FRESH_REVISION
    age[1] = 0; age[2] = 0 /* what a timer shows that started at an older revision makes no difference any more */
#endif
}

inline renewal_arrives(guard) {
#ifdef RENEW_UNGUARDED
    ok = true;
#else
    ok = (guard == live);
#endif
    if
    :: ok -> heartbeat_moves()
    :: else
    fi
}

active proctype Time() {
    do
    :: atomic { !(acting && aged) ->
           aged = acting;
           if
           :: phase == MEMBER -> passed(lease_age, SHORT)
           :: else
           fi;
           if
           :: commit != IDLE -> passed(sent_age, SHORT)
           :: else
           fi;
           if
           :: live % 2 -> passed(age[1], LONG)
           :: else
           fi;
           if
           :: live % 2 -> passed(age[2], LONG)
           :: else
           fi
       }
    od
}

active proctype Holder() {
    do
    :: d_step { phase == MEMBER && commit == IDLE -> kind = RENEW; compared = my_live; sent_age = 0; commit = SENT }
    :: d_step { phase == LOST && commit == IDLE && live % 2 == 0 && live < LIVE_MAX ->
           kind = JOIN; compared = live; sent_age = 0; commit = SENT }
    :: d_step { commit == APPLIED ->
#ifdef RENEW_FROM_REPLY
           sent_age = 0;
#endif
           phase = MEMBER; my_live = (kind == JOIN -> compared + 1 : my_live);
           lease_age = sent_age; commit = IDLE; sent_age = 0 }
    :: d_step { commit == REFUSED -> /* a renewal: expired. A join: tried again with what the watch shows */
           phase = LOST; primary = false; lease_age = SHORT; commit = IDLE; sent_age = 0 }
    :: atomic { commit != IDLE -> /* no answer: unknown. */
           if
           :: commit == SENT && kind == RENEW -> late = compared
           :: commit == SENT && kind == JOIN -> late_join = compared
           :: commit == SENT /* never applied */
           :: commit == APPLIED && kind == JOIN -> phase = MEMBER; my_live = compared + 1
           :: commit == APPLIED && kind == RENEW
           :: commit == REFUSED
           fi;
#ifdef UNKNOWN_AS_SUCCESS
           lease_age = (kind == RENEW -> sent_age : lease_age);
#endif
           commit = IDLE; sent_age = 0 }
    :: d_step { phase == LOST && live % 2 && live > my_live -> phase = MEMBER; my_live = live } /* read back: no lease from it */
    :: d_step { phase == MEMBER && primary && lease_age < LIMIT && !acting -> acting = true; aged = false }
    :: d_step { acting -> assert(!gate[1] && !gate[2]); acting = false; aged = false }
    :: d_step { phase == MEMBER && VACANT && my_live == live -> owner_live = live; primary = true }
    od
}

active [2] proctype Observer() {
    byte me = _pid - 1;
    do
    :: d_step { behind[me] -> behind[me] = false; age[me] = 0 }
#ifdef FRESH_REVISION
    :: d_step { live % 2 && live < LIVE_MAX && age[me] >= LONG -> live++; age[1] = 0; age[2] = 0 }
#else
    :: d_step { live % 2 && live < LIVE_MAX && age[me] >= LONG && !behind[me] -> live++; age[1] = 0; age[2] = 0 }
#endif
    :: d_step { VACANT -> owner = me; gate[me] = true }
#ifdef TAKE_UNREVISED
    :: d_step { owner != HOLDER && owner != me -> owner = me; gate[me] = true } /* its view still shows a vacancy */
#endif
#ifdef TAKE_UNKNOWN_AS_SUCCESS
    :: d_step { VACANT -> gate[me] = true }
#endif
#ifdef UNREADABLE_UNGUARDED
    /* It cannot decode live/H (another version), takes the shard for vacant and compares nothing about the holder. The
     * rule is to compare "absent", which the record that is there refuses. */
    :: d_step { me == 2 && owner == HOLDER -> owner = me; gate[me] = true }
#endif
    od
}

active proctype Coordinator() {
    bool ok;
    do
    :: d_step { commit == SENT && kind == RENEW ->
           renewal_arrives(compared); commit = (ok -> APPLIED : REFUSED); ok = false }
    :: d_step { commit == SENT && kind == JOIN ->
           if
           :: compared == live -> live++; heartbeat_moves(); commit = APPLIED
           :: else -> commit = REFUSED
           fi }
    :: d_step { late -> renewal_arrives(late); late = 0; ok = false }
    :: d_step { late_join ->
           if
           :: late_join == live -> live++; heartbeat_moves()
           :: else
           fi;
           late_join = 0 }
    od
}
