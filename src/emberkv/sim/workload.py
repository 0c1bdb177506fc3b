"""Seeded clients that ask a simulated cluster for what real ones ask: all levels, retries, overwrites, deletes.

Why it exists: oracles can only judge what somebody asked for. Each mechanism of the protocol has a kind of request here
that meets it: few keys and several writers (conflicts), retries of the same put_id through other nodes (replays), reads
with and without a session token, deadlines that are sometimes too short.
Laws: all chance comes from `cluster.rng_workload`, drawn when a request is made, so that what the cluster answers
changes nothing but retries. Clients know what clients know: outcomes, and what their own token saw.
Limits: a client starts requests at its own rate and does not wait for the last one; a token keeps TOKEN_KEYS_MAX keys.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from emberkv.client.token import SessionToken
from emberkv.core.view import NAMESPACE_PREFIX, encode_record
from emberkv.messages import BlockInfo
from emberkv.node.strong import ABSENT
from emberkv.ports import Write
from emberkv.sim.cluster import SCOPE, Cluster, key_of
from emberkv.sim.history import History, Put, Request
from emberkv.sim.lincheck import UNKNOWN, StrongOp
from emberkv.types import NO_VERSION, Level, MissReason, Namespace, PutOutcome, PutStatus, Version, scope_of

TOKEN_KEYS_MAX: Final = 16
"""Fewer than there are keys, so that forgetting is exercised too."""
ATTEMPTS_MAX: Final = 4
"""Of one put_id."""
BATCH_MAX: Final = 8
LENGTHS: Final = (24, 200, 900, 3000)
"""Bytes of a block; all fit one slot of the simulated arena."""
HOME_SHARE: Final = 0.5
"""Of the clients that have a node on their host; the others roam."""
READ_SHARE: Final = 0.48
DELETE_SHARE: Final = 0.08
STRONG_SHARE: Final = 0.06
SESSION_SHARE: Final = 0.65
SEEN_SHARE: Final = 0.4
"""Of the puts of a client with a token: those that say what it saw of the key."""
RETRY_SHARE: Final = 0.5
"""Of the puts whose end was not a good one."""
STRONG_KEYS: Final = 3
EXPIRING_SHARE: Final = 0.3
"""Of the runs that have a namespace whose blocks expire."""
EXPIRING_KEYS: Final = 4
EXPIRY_SHARE: Final = 0.12
"""Of phase 1, how long such a block is served."""
EXPIRING: Final = Namespace(name="short", id=2)
EXPIRING_SCOPE: Final = scope_of(EXPIRING.name, EXPIRING.generation)
READ_DEADLINES_MS: Final = (15, 120, 400)
PUT_DEADLINES_MS: Final = (40, 300, 900)


class Client(msgspec.Struct):
    """One client. `home` is the node that it speaks to; empty: any, drawn each time."""

    name: str
    home: str
    token: SessionToken | None


class Workload:
    """All clients of a run."""

    def __init__(self, cluster: Cluster, history: History) -> None:
        self.cluster = cluster
        self.history = history
        self.rng = cluster.rng_workload
        self.keys = [key_of(number) for number in range(cluster.options.keys)]
        self.factor = cluster.options.factor
        if self.rng.random() < EXPIRING_SHARE:
            history.expiry_ms = max(50, int(EXPIRY_SHARE * cluster.options.phase1_ms))
            self.keys += [EXPIRING_SCOPE + key[len(SCOPE) :] for key in self.keys[:EXPIRING_KEYS]]
        self.clients = self._draw_clients()
        self.gap_ns = 1e9 * len(self.clients) / cluster.options.requests_per_s
        self.running = False
        self._strong_open = 0
        self._strong_number = 0
        self._strong_known: dict[tuple[str, bytes], tuple[Version, int | None]] = {}
        """What a client read last of a strong key: version and value."""

    def _draw_clients(self) -> list[Client]:
        names = self.cluster.names
        clients = []
        for number in range(len(names) + 1):
            home = names[number] if number < len(names) and self.rng.random() < HOME_SHARE else ""
            token = SessionToken("sim", TOKEN_KEYS_MAX) if self.rng.random() < 0.75 else None
            clients.append(Client(f"c{number}", home, token))
        return clients

    def start(self) -> None:
        """From now on clients ask, until `stop`."""
        self.running = True
        if self.history.expiry_ms:
            policy = msgspec.structs.replace(EXPIRING, expiry_ms=self.history.expiry_ms)
            self.cluster.coordinator.commit(None, [], [Write(NAMESPACE_PREFIX + policy.name, encode_record(policy))])
        for client in self.clients:
            self._next(client)

    def stop(self) -> None:
        """No new requests; those under way end by themselves."""
        self.running = False

    def open(self) -> int:
        """Requests that have not ended."""
        return len(self.history.open) + self._strong_open

    # -- what a client does next ---------------------------------------------------------------------------------

    def _next(self, client: Client) -> None:
        self.cluster.after(self.rng.expovariate(1.0) * self.gap_ns, self._act, client)

    def _act(self, client: Client) -> None:
        if not self.running:
            return
        self._next(client)
        node = client.home or self.rng.choice(self.cluster.names)
        kind = self.rng.random()
        count = min(self.rng.choice((1, 1, 1, 2, 3, BATCH_MAX)), len(self.keys))
        first = int(len(self.keys) * self.rng.random() ** 1.6)  # the lower numbers are the hot ones
        keys = [self.keys[(first + step) % len(self.keys)] for step in range(count)]
        keys = [key for key in keys if key[: len(SCOPE)] == keys[0][: len(SCOPE)]]  # one request, one namespace
        session = self.rng.random() < SESSION_SHARE
        if not self.cluster.processes[node].alive:
            return  # nobody listens there; the chance above was drawn all the same
        if kind < READ_SHARE:
            self._read(client, node, keys, session)
        elif kind < 1 - STRONG_SHARE:
            self._write(client, node, keys, session, delete=kind < READ_SHARE + DELETE_SHARE)
        else:
            self._strong(client, node)

    def _read(self, client: Client, node: str, keys: list[bytes], session: bool) -> None:
        level = Level.SESSION if session else Level.EVENTUAL
        token = client.token if session else None
        scope, bare = keys[0][: len(SCOPE)], [key[len(SCOPE) :] for key in keys]
        floors = token.floors(scope, bare) if token is not None else []
        deadline_ms = self.rng.choice(READ_DEADLINES_MS)
        session_of = client.name if token is not None else ""
        request = self.history.begin(client.name, node, level, keys, deadline_ms, token=session_of, floors=floors)

        def done(infos: list[BlockInfo] | None, datas: list[bytes | None]) -> None:
            self.history.get_ended(request, infos, datas)
            for key, info in zip(keys, infos or (), strict=infos is not None):
                if token is not None and info.reason in (MissReason.NONE, MissReason.DELETED):
                    token.observe(key, info.version)

        self.cluster.get(node, keys, level=level, floors=floors, deadline_ms=deadline_ms, done=done)

    def _write(self, client: Client, node: str, keys: list[bytes], session: bool, *, delete: bool) -> None:
        length = self.rng.choice(LENGTHS)
        puts = [self.history.new_put(key, client.name, delete=delete, length=length) for key in keys]
        if client.token is not None and self.rng.random() < SEEN_SHARE:
            for put in puts:
                put.seen = client.token.floor(put.key)
        min_copies = min(self.rng.choice((1, 1, 1, 2, 2, 3)), self.factor) if session else 1
        level = Level.SESSION if session else Level.EVENTUAL
        self._try(client, node, puts, level, min_copies, first=True)

    def _try(self, client: Client, node: str, puts: list[Put], level: Level, min_copies: int, *, first: bool) -> None:
        keys, token = [put.key for put in puts], client.token
        deadline_ms = self.rng.choice(PUT_DEADLINES_MS)
        request = self.history.begin(
            client.name,
            node,
            level,
            keys,
            deadline_ms,
            puts=puts,
            fresh=first,
            min_copies=min_copies,
            token=client.name if token is not None and level is Level.SESSION else "",
        )

        def done(outcomes: list[PutOutcome] | None) -> None:
            self.history.put_ended(request, outcomes)
            self._after_put(client, request, outcomes)

        self.cluster.put(
            node,
            keys,
            [put.data for put in puts],
            level=level,
            fresh=first,
            min_copies=min_copies,
            deadline_ms=deadline_ms,
            seen=[put.seen for put in puts],
            delete=puts[0].delete,
            put_ids=[put.put_id for put in puts],
            done=done,
        )

    def _after_put(self, client: Client, request: Request, outcomes: list[PutOutcome] | None) -> None:
        if client.token is not None and request.token:
            for key, outcome in zip(request.keys, outcomes or (), strict=outcomes is not None):
                if outcome.status is PutStatus.STORED:
                    client.token.observe(key, outcome.version)
        good = (PutStatus.STORED, PutStatus.ACCEPTED, PutStatus.SUPERSEDED)
        again = [
            put
            for index, put in enumerate(request.puts)
            if put.attempts < ATTEMPTS_MAX and (outcomes is None or outcomes[index].status not in good)
        ]
        if again and self.running and self.rng.random() < RETRY_SHARE:
            node = self.rng.choice(self.cluster.names)
            self.cluster.after(self.rng.randrange(1, 200) * 1_000_000, self._retry, client, node, again, request)

    def _retry(self, client: Client, node: str, puts: list[Put], request: Request) -> None:
        if self.running and self.cluster.processes[node].alive:
            self._try(client, node, puts, request.level, request.min_copies, first=False)

    # -- strong --------------------------------------------------------------------------------------------------

    def _strong(self, client: Client, node: str) -> None:
        """A read, write, conditional write or delete of a strong namespace."""
        strong, rng, begun = self.cluster.strong(node), self.rng, self.cluster.now
        key = b"%032d" % rng.randrange(STRONG_KEYS)
        kind, deadline_ms = rng.random(), rng.choice(PUT_DEADLINES_MS)
        self._strong_open += 1
        if kind < 0.45:
            strong.get(key, deadline_ms=deadline_ms, done=lambda found: self._strong_read(client, key, begun, found))
            return
        self._strong_number += 1
        value = self._strong_number if kind < 0.9 else None
        seen, expected = NO_VERSION, None
        if kind > 0.7 and (client.name, key) in self._strong_known:
            seen, expected = self._strong_known[(client.name, key)]
        put_id = b"strong.........." + self._strong_number.to_bytes(8, "big")
        data = b"%d" % value if value is not None else None
        what: Literal["swap", "write"] = "swap" if seen != NO_VERSION else "write"
        op = StrongOp(what, key, value, begun, UNKNOWN, client.name, expected)

        def done(outcome: PutOutcome) -> None:
            again = outcome.status is PutStatus.UNKNOWN and rng.random() < RETRY_SHARE and self.running
            if again:
                retried = self.cluster.strong(rng.choice(self.cluster.names))
                retried.put(key, put_id, data, deadline_ms=deadline_ms, done=ended, seen=seen, fresh=False)
            else:
                ended(outcome)

        def ended(outcome: PutOutcome) -> None:
            self._strong_open -= 1
            if outcome.status is PutStatus.REFUSED or (outcome.status is PutStatus.SUPERSEDED and what == "write"):
                return  # certainly not written
            returned = UNKNOWN if outcome.status is PutStatus.UNKNOWN else self.cluster.now
            swapped = outcome.status is PutStatus.STORED
            self.history.strong.append(op._replace(returned=returned, swapped=swapped))

        strong.put(key, put_id, data, deadline_ms=deadline_ms, done=done, seen=seen)

    def _strong_read(self, client: Client, key: bytes, begun: int, found: tuple[BlockInfo, memoryview | None]) -> None:
        self._strong_open -= 1
        info, data = found
        if info.reason not in (MissReason.NONE, MissReason.ABSENT):
            return
        value = int(bytes(data)) if data is not None else None
        self._strong_known[(client.name, key)] = (info.version if data is not None else ABSENT, value)
        self.history.strong.append(StrongOp("read", key, value, begun, self.cluster.now, client.name))
