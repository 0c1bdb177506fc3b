/* Grace after an outage of the coordinator: nobody who is healthy and connected is expired because of it (PROTOCOL 7).
 *
 * Modelled: a healthy node H renews its heartbeat, an observer O renews its own lease and times H's heartbeat, and the
 *   coordinator is away once, from any moment, for any time. Commits that meet the outage fail at once, hang until their
 *   deadline, or are applied when it is over, as the outage likes and for each node apart. O expires H when the
 *   heartbeat stood still for ttl and O's own commits have been succeeding for the grace. All other times are the
 *   shortest or the longest that is allowed, whichever is worse for H; what is applied is seen at once.
 * Time: ticks, which pass only when nothing is overdue. No drift (it is 0 by default, and a part of the slack).
 * Left out: a coordinator that flaps (each gap may hit H alone), an outage that O does not share.
 * Property: the assert before the expiry, and ltl spared.
 * Run: docs/models/run.sh outage (34,835 states, 1 s)
 */
#ifndef HB
#define HB 8            /* renewal period */
#endif
#define COMMIT 1        /* c: longest commit of a coordinator that works */
#ifndef LATE
#define LATE 2          /* j: how late a renewal may be sent, ticker's period and waiting for a turn included */
#endif
#define DEADLINE (HB / 2)
#ifdef TTL_THREE_PERIODS
#define TTL (3 * HB)
#else
#define TTL (3 * HB + 3 * LATE + COMMIT)
#endif
#ifdef GRACE_WITHOUT_LATENESS
#define GRACE (HB + 2 * COMMIT)
#else
#define GRACE (HB + LATE + 2 * COMMIT)
#endif
#define H 0
#define O 1

bool away = false, was_away = false, expired = false;
byte since[2];          /* ticks since the node's last renewal was sent */
bool flying[2];         /* it has no outcome yet */
bool met[2];            /* it met the outage */
byte still = 0;         /* ticks for which O has seen hb/H stand still */
bool healthy = true;    /* O's commits have been succeeding without a failure between */
byte healthy_for = GRACE;

ltl spared { [] !expired }

#define OVERDUE(i) (flying[i] && since[i] >= (met[i] -> DEADLINE : COMMIT) || !flying[i] && since[i] >= HB + LATE)

inline succeeds(i) {
    flying[i] = false; met[i] = false;
    if
    :: i == H -> still = 0
    :: i == O && !healthy -> healthy = true; healthy_for = 0
    :: else
    fi
}

active proctype Time() {
    do
    :: d_step { !OVERDUE(H) && !OVERDUE(O) ->
           since[H]++; since[O]++;
           still = (still <= TTL -> still + 1 : still);
           healthy_for = (healthy && healthy_for < GRACE -> healthy_for + 1 : healthy_for) }
    od
}

active [2] proctype Renews() {
    byte me = _pid - 1;
    do
    :: d_step { !flying[me] && since[me] >= HB -> since[me] = 0; flying[me] = true; met[me] = away }
    :: d_step { flying[me] && !away -> succeeds(me) }
    :: d_step { flying[me] && met[me] -> /* unknown: at once, or at the deadline */
           flying[me] = false; met[me] = false;
           if
           :: me == O -> healthy = false; healthy_for = 0
           :: else
           fi }
    od
}

active proctype Expires() {
    do
#ifdef NO_GRACE
    :: d_step { !away && still > TTL -> expired = true; assert(false) }
#else
    :: d_step { !away && still > TTL && healthy && healthy_for >= GRACE -> expired = true; assert(false) }
#endif
    od
}

active proctype Outage() {
    d_step { !was_away -> was_away = true; away = true; met[H] = flying[H]; met[O] = flying[O] };
    d_step { away -> away = false }
}
