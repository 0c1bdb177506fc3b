/* Planned hand-over and giving up alone: closed before the commit, until its outcome is certain (PROTOCOL 7).
 *
 * Modelled: three nodes, each of which may be primary. A primary closes its gate for the shard, then commits a record
 *   that names the next one (compares: its own live record, the shard's record, the next one's live record). Known
 *   outcomes end the hand-over. After an unknown one the gate stays closed until the watch shows that the record moved,
 *   or until the primary's own record, written again on the same revision, is acknowledged. Nodes lapse, renew, are
 *   expired while lapsed, rejoin under a new epoch, and take what is vacant. Watches lag; commits are applied late.
 *   With -DISOLATION links between nodes are cut for good, and a primary that reaches no other live node gives the
 *   shard up in the same way, to whoever takes it.
 * Abstraction: no clocks. What lease.pml shows is assumed here: a node is expired only while its lease is not open.
 *   Lapses, expiries, hand-overs, cuts and unknown outcomes are bounded (MAX_*); after them the coordinator works.
 *   live[i] is odd while node i lives. A takeover is one step: applied late, it would succeed exactly if sent late.
 * Properties: ltl one_gate (safety). ltl opens (weak fairness): again and again some gate is open.
 * Run: docs/models/run.sh handover (1,189,146 states, 5 s; opens: 78,238; isolation: 414,714 and 112,182; 2 s each)
 */
#ifndef MAX_HANDS
#define MAX_HANDS 1
#endif
#ifndef MAX_UNKNOWN
#define MAX_UNKNOWN 2
#endif
#ifndef MAX_LAPSES
#define MAX_LAPSES 1
#endif
#ifndef MAX_EXPIRIES
#define MAX_EXPIRIES 1
#endif
#define NODES 3
#define NOBODY 3
#define SLOTS 3 /* one commit in flight and the unknown ones that may still land */

mtype = { HELD, COMMITTING, SETTLING, FREE, SENT, APPLIED, REFUSED };

/* The coordinator's records. */
byte own_rev = 1, own_node = 0, own_live = 1;
byte live[NODES] = 1;

/* Commits on the shard's record. */
typedef Slot { bool used; byte by; byte rev; byte by_live; byte to; byte to_live }
Slot slot[SLOTS];

/* The nodes: their view of the record, their lease, their hand-over. */
byte seen_rev[NODES] = 1, seen_node[NODES] = 0, seen_live[NODES] = 1;
byte my_live[NODES] = 1;
bool lease[NODES] = true;
mtype hand[NODES] = HELD, answer[NODES] = FREE;
byte closed[NODES]; /* revision at which the gate was closed; 0: not closed */
byte waits[NODES];  /* slot + 1 of the commit that is waited for */
byte hands = 0, unknowns = 0, lapses = 0, expiries = 0;

#ifdef ISOLATION
bool cut[NODES]; /* cut[i]: the link between the two nodes other than i */
bool gave_up[NODES]; /* once in each spell of being alone */
#define OTHERS(i) (live[(i + 1) % 3] % 2 || live[(i + 2) % 3] % 2)
#define REACHES(i) (live[(i + 1) % 3] % 2 && !cut[(i + 2) % 3] || live[(i + 2) % 3] % 2 && !cut[(i + 1) % 3])
#define ALONE(i) (OTHERS(i) && !REACHES(i))
#else
#define ALONE(i) false
#endif

#define OPEN(i) (lease[i] && my_live[i] && seen_node[i] == i && seen_live[i] == my_live[i] && closed[i] == 0)
#define SLOT_FREE (!slot[0].used || !slot[1].used || !slot[2].used)
#define VACANT (own_node == NOBODY || own_live != live[own_node])
ltl one_gate { [] (!(OPEN(0) && OPEN(1)) && !(OPEN(0) && OPEN(2)) && !(OPEN(1) && OPEN(2))) }
ltl opens { [] <> (OPEN(0) || OPEN(1) || OPEN(2)) }

inline ends(i) { hand[i] = HELD; closed[i] = 0 }

inline sees(i) { /* the record that this node knows moved: whatever became of its commit, it is settled */
    if
    :: closed[i] && closed[i] != own_rev -> ends(i)
    :: else
    fi;
    seen_rev[i] = own_rev; seen_node[i] = own_node; seen_live[i] = own_live
}

inline frees(s) {
    slot[s].used = false; slot[s].by = 0; slot[s].rev = 0; slot[s].by_live = 0; slot[s].to = 0; slot[s].to_live = 0
}

inline forgotten(s) { /* compares a revision that is gone, and nobody waits for it: it makes no difference any more */
    if
    :: slot[s].used && waits[slot[s].by] != s + 1 -> frees(s)
    :: else
    fi
}

inline moves(node, node_live) {
    own_rev++; own_node = node; own_live = node_live;
#ifndef HAND_UNREVISED
    forgotten(0); forgotten(1); forgotten(2)
#endif
}

inline commits(i, target, target_live) {
    k = 0;
    do
    :: slot[k].used -> k++
    :: else -> break
    od;
    slot[k].used = true; slot[k].by = i; slot[k].rev = seen_rev[i]; slot[k].by_live = my_live[i];
    slot[k].to = target; slot[k].to_live = target_live;
    answer[i] = SENT; waits[i] = k + 1; k = 0
}

inline closes(i) {
    hand[i] = COMMITTING;
#ifndef NOT_CLOSED
    closed[i] = seen_rev[i]
#endif
}

active [NODES] proctype Node() {
    byte me = _pid, k, target;
    do
    /* Membership: expiry is noticed by the refused renewal, then the node joins again. */
    :: d_step { !lease[me] && my_live[me] && my_live[me] == live[me] -> lease[me] = true;
#ifdef LAPSE_REOPENS
           closed[me] = 0;
           hand[me] = HELD;
#endif
       }
    :: d_step { my_live[me] && my_live[me] != live[me] -> my_live[me] = 0; lease[me] = false }
    :: d_step { !my_live[me] -> live[me]++; my_live[me] = live[me]; lease[me] = true }

    /* Hand-over. */
    :: atomic { OPEN(me) && hand[me] == HELD && waits[me] == 0 && hands < MAX_HANDS && SLOT_FREE ->
           if
           :: target = (me + 1) % 3
           :: target = (me + 2) % 3
           fi;
           if
           :: live[target] % 2 -> hands++; closes(me); commits(me, target, live[target])
           :: else
           fi;
           target = 0 }
#ifdef ISOLATION
    :: d_step { ALONE(me) && !gave_up[me] && OPEN(me) && hand[me] == HELD && waits[me] == 0 && SLOT_FREE ->
           gave_up[me] = true; closes(me); commits(me, NOBODY, 0) }
    :: d_step { gave_up[me] && !ALONE(me) -> gave_up[me] = false }
#endif
    :: d_step { answer[me] == APPLIED -> answer[me] = FREE; waits[me] = 0; sees(me) }
    :: d_step { answer[me] == REFUSED -> answer[me] = FREE; waits[me] = 0;
           if
           :: hand[me] == COMMITTING -> ends(me) /* certainly not done */
#ifdef REFUSED_SETTLES
           :: hand[me] == SETTLING -> ends(me)
#endif
           :: else /* somebody's record stands there: the watch will say whose */
           fi }
    :: d_step { answer[me] != FREE && unknowns < MAX_UNKNOWN -> /* no answer: unknown */
           unknowns++; answer[me] = FREE; waits[me] = 0;
#ifdef UNKNOWN_AS_FAILURE
           ends(me)
#else
#ifdef UNKNOWN_AS_SUCCESS
           hand[me] = HELD; seen_node[me] = NOBODY
#else
           hand[me] = (hand[me] == HELD -> HELD : SETTLING) /* held: the record's move has settled it already */
#endif
#endif
       }
#ifndef NOT_SETTLED
    :: d_step { hand[me] == SETTLING && waits[me] == 0 && lease[me] && SLOT_FREE ->
           commits(me, seen_node[me], seen_live[me]) }
#endif

    /* Takeover; a node that reaches nobody takes last, which has no meaning without clocks. */
#ifdef ALONE_NEVER_TAKES
    :: d_step { lease[me] && my_live[me] == live[me] && VACANT && seen_rev[me] == own_rev && !ALONE(me) ->
#else
    :: d_step { lease[me] && my_live[me] == live[me] && VACANT && seen_rev[me] == own_rev ->
#endif
           moves(me, my_live[me]); sees(me) }
    od
}

active proctype Watch() {
    do
    :: d_step { seen_rev[0] != own_rev -> sees(0) }
    :: d_step { seen_rev[1] != own_rev -> sees(1) }
    :: d_step { seen_rev[2] != own_rev -> sees(2) }
    od
}

active proctype Coordinator() {
    byte k, target, target_live;
    bool ok;
    do
    :: atomic { slot[0].used || slot[1].used || slot[2].used ->
           if
           :: slot[0].used -> k = 0
           :: slot[1].used -> k = 1
           :: slot[2].used -> k = 2
           fi;
           ok = slot[k].by_live == live[slot[k].by];
#ifndef HAND_UNREVISED
           ok = ok && slot[k].rev == own_rev;
#endif
           ok = ok && (slot[k].to == NOBODY || slot[k].to == slot[k].by || slot[k].to_live == live[slot[k].to]);
           if
           :: waits[slot[k].by] == k + 1 -> answer[slot[k].by] = (ok -> APPLIED : REFUSED)
           :: else
           fi;
           target = slot[k].to; target_live = slot[k].to_live;
           frees(k);
           if
           :: ok -> moves(target, target_live)
           :: else
           fi;
           target = 0; target_live = 0; k = 0; ok = false }
    od
}

active proctype Faults() {
    byte i;
    do
    :: atomic { lapses < MAX_LAPSES ->
           select(i : 0 .. 2);
           if
           :: lease[i] -> lease[i] = false; lapses++
           :: else
           fi;
           i = 0 }
    :: atomic { expiries < MAX_EXPIRIES ->
           select(i : 0 .. 2);
           if
           :: !lease[i] && my_live[i] == live[i] && (lease[(i + 1) % 3] || lease[(i + 2) % 3]) -> live[i]++; expiries++
           :: else
           fi;
           i = 0 }
#ifdef ISOLATION
    :: d_step { !cut[0] -> cut[0] = true }
    :: d_step { !cut[1] -> cut[1] = true }
    :: d_step { !cut[2] -> cut[2] = true }
#endif
    :: break
    od
}
