"""Session tokens: for each key the version below which this session must not be served.

Why it exists: a session's guarantees (read your writes, never back) must follow it from node to node and from process
to process, so they are a value that the caller can carry, store and send.
Laws: a floor only rises; asking changes nothing; what does not parse, fails its checksum or belongs to another cluster
is refused whole (ConfigError) and leaves every token as it was. No I/O and no clock.
Limits: `keys_max` keys; the one that was seen longest ago is forgotten first and counted in `dropped`. A full token of
65,536 keys is 3.7 MB as bytes and about 20 MB in memory.

Format 1, little endian: "EKVT", u8 format, u8 0, u16 bytes of the cluster id, u32 count, u32 0, u64 dropped, cluster id
(UTF-8), `count` records (scope 8, key 32, u64 epoch, u64 seq), the one seen longest ago first; xxh3-128 of all that.
"""

from __future__ import annotations

import base64
import binascii
import os
import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from emberkv.errors import ConfigError
from emberkv.types import CHECKSUM_BYTES, EPOCH_MAX, KEY_BYTES, NO_VERSION, SCOPE_BYTES, Version, checksum

KEYS_MAX: Final = 65_536
"""As many keys as a node remembers tombstones: a conversation of a million tokens is a thousand of them."""
TOKEN_BYTES_MAX: Final = 8 << 20
MAGIC: Final = b"EKVT"
FORMAT: Final = 1
CLUSTER_ID_BYTES_MAX: Final = 255

_HEAD: Final = struct.Struct("<4sBxHI4xQ")
"""magic, format, cluster id bytes, count, dropped."""
_RECORD: Final = struct.Struct(f"<{SCOPE_BYTES + KEY_BYTES}sQQ")
"""scoped key, epoch, seq."""
KEYS_LIMIT: Final = (TOKEN_BYTES_MAX - _HEAD.size - CLUSTER_ID_BYTES_MAX - CHECKSUM_BYTES) // _RECORD.size
"""Largest `keys_max`: what fits TOKEN_BYTES_MAX."""
_DROPPED_MAX: Final = (1 << 64) - 1

_tokens: weakref.WeakSet[SessionToken] = weakref.WeakSet()


def _renew_in_child() -> None:
    for token in list(_tokens):
        token._lock = threading.Lock()  # a thread that the child does not have may have held the old one


os.register_at_fork(after_in_child=_renew_in_child)


class SessionToken:
    """Version floors of one session in one cluster; any thread may use it.

    Keys are scoped: 8 bytes of the namespace (types.scope_of), then the 32 of the block key. `cluster_id` is empty
    until the first use binds the token to a cluster.
    """

    def __init__(self, cluster_id: str = "", keys_max: int = KEYS_MAX) -> None:
        """Raises ValueError for a `keys_max` outside 1 to KEYS_LIMIT or a cluster id above CLUSTER_ID_BYTES_MAX."""
        if not 1 <= keys_max <= KEYS_LIMIT:
            raise ValueError(f"keys_max is {keys_max}, it must be 1 to {KEYS_LIMIT}")
        if len(cluster_id.encode()) > CLUSTER_ID_BYTES_MAX:
            raise ValueError(f"the cluster id has more than {CLUSTER_ID_BYTES_MAX} bytes")
        self.cluster_id = cluster_id
        self.keys_max = keys_max
        self.dropped = 0
        """Floors that were forgotten for room: for their keys the session's guarantee has ended."""
        self._lock = threading.Lock()
        self._floors: OrderedDict[bytes, Version] = OrderedDict()
        """Scoped key -> floor, the one seen longest ago first."""
        _tokens.add(self)

    def __len__(self) -> int:
        return len(self._floors)

    def __bool__(self) -> bool:
        return True  # an empty token is a token

    def __repr__(self) -> str:
        return f"SessionToken(cluster {self.cluster_id!r}, {len(self)} keys, {self.dropped} dropped)"

    def bind(self, cluster_id: str) -> None:
        """Ties a new token to its cluster. Raises ConfigError for a token of another one."""
        with self._lock:
            if self.cluster_id == "":
                self.cluster_id = cluster_id
        if self.cluster_id != cluster_id:
            raise ConfigError(
                f"this session token belongs to cluster {self.cluster_id!r}, not {cluster_id!r}: begin a new session"
            )

    def floor(self, key: bytes) -> Version:
        """The version below which the scoped key must not be served; NO_VERSION when the session saw none."""
        return self._floors.get(key, NO_VERSION)

    def floors(self, scope: bytes, keys: Sequence[bytes]) -> list[Version]:
        """One floor per block key of a namespace; empty when none of them was ever seen."""
        with self._lock:
            known = self._floors
            if not known:
                return []
            found = [known.get(scope + key, NO_VERSION) for key in keys]
        return found if any(floor is not NO_VERSION for floor in found) else []

    def observe(self, key: bytes, version: Version) -> None:
        """The session saw this version of a scoped key; NO_VERSION says nothing. Raises ValueError for a bare key."""
        if len(key) != SCOPE_BYTES + KEY_BYTES:
            raise ValueError(f"a scoped key has {SCOPE_BYTES + KEY_BYTES} bytes, this one {len(key)}")
        self.observe_all(key[:SCOPE_BYTES], [key[SCOPE_BYTES:]], [version])

    def observe_all(self, scope: bytes, keys: Sequence[bytes], versions: Sequence[Version]) -> None:
        """`observe` for many block keys of one namespace."""
        with self._lock:
            for key, version in zip(keys, versions, strict=True):
                if version > NO_VERSION:
                    self._raise(scope + key, version)
            self._trim()

    def merge(self, other: SessionToken) -> None:
        """Takes over what the other token saw: the higher floor of each key. Raises ConfigError for another cluster."""
        if other is self:
            return
        if other.cluster_id:
            self.bind(other.cluster_id)
        with other._lock:  # one lock at a time, so that two tokens can be merged into each other at once
            theirs, dropped = list(other._floors.items()), other.dropped
        with self._lock:
            for key, version in theirs:
                self._raise(key, version)
            self.dropped = min(self.dropped + dropped, _DROPPED_MAX)
            self._trim()

    def _raise(self, key: bytes, version: Version) -> None:
        known = self._floors.get(key)
        if known is None or version > known:
            self._floors[key] = version
        if known is not None:
            self._floors.move_to_end(key)

    def _trim(self) -> None:
        while len(self._floors) > self.keys_max:
            self._floors.popitem(last=False)
            self.dropped = min(self.dropped + 1, _DROPPED_MAX)

    # -- as bytes and text --------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The token for another process; at most TOKEN_BYTES_MAX."""
        with self._lock:
            cluster = self.cluster_id.encode()
            head = _HEAD.pack(MAGIC, FORMAT, len(cluster), len(self._floors), self.dropped)
            records = [_RECORD.pack(key, *version) for key, version in self._floors.items()]
        body = b"".join((head, cluster, *records))
        return body + checksum(body)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, keys_max: int = KEYS_MAX) -> SessionToken:
        """The token that `to_bytes` wrote; of more than `keys_max` keys the ones seen last. Raises ConfigError."""
        if len(data) > TOKEN_BYTES_MAX:
            raise ConfigError(f"a session token has at most {TOKEN_BYTES_MAX} bytes, this one {len(data)}")
        data = bytes(data)
        if data[:4] != MAGIC[: len(data)] or not data:
            raise ConfigError("this is not a session token")
        if len(data) < _HEAD.size + CHECKSUM_BYTES:
            raise ConfigError(f"this session token was cut short: it has {len(data)} bytes")
        _, version, cluster_bytes, count, dropped = _HEAD.unpack_from(data)
        if version > FORMAT:
            raise ConfigError(
                f"this session token has format {version}, this EmberKV knows {FORMAT}: upgrade this side"
            )
        size = _HEAD.size + cluster_bytes + count * _RECORD.size + CHECKSUM_BYTES
        if len(data) != size:
            raise ConfigError(f"this session token was cut short or extended: {len(data)} bytes, it names {size}")
        body = data[:-CHECKSUM_BYTES]
        if version != FORMAT or cluster_bytes > CLUSTER_ID_BYTES_MAX or checksum(body) != data[-CHECKSUM_BYTES:]:
            raise ConfigError("this session token is corrupted: its checksum does not fit; begin a new session")
        return cls._parse(body, cluster_bytes, dropped, keys_max)

    @classmethod
    def _parse(cls, body: bytes, cluster_bytes: int, dropped: int, keys_max: int) -> SessionToken:
        """The token in a body whose length and checksum are right, which proves nothing about who wrote it."""
        start = _HEAD.size + cluster_bytes
        try:
            token = cls(body[_HEAD.size : start].decode(), keys_max)
        except UnicodeDecodeError:
            raise ConfigError("this session token names its cluster in something else than UTF-8") from None
        for key, epoch, seq in _RECORD.iter_unpack(body[start:]):
            if epoch > EPOCH_MAX or (epoch, seq) == NO_VERSION:
                raise ConfigError("this session token has a version that no cluster gives out; begin a new session")
            token._floors[key] = max(Version(epoch, seq), token._floors.get(key, NO_VERSION))
        token.dropped = dropped
        token._trim()
        return token

    def to_text(self) -> str:
        """The bytes in URL-safe base64, for headers and environment variables."""
        return base64.urlsafe_b64encode(self.to_bytes()).decode("ascii")

    @classmethod
    def from_text(cls, text: str, keys_max: int = KEYS_MAX) -> SessionToken:
        """The token that `to_text` wrote; missing "=" at its end are forgiven. Raises ConfigError."""
        text = text.strip()
        if len(text) > TOKEN_BYTES_MAX * 4 // 3 + 4:
            raise ConfigError(f"a session token has at most {TOKEN_BYTES_MAX} bytes, this text is longer")
        try:
            data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise ConfigError("this is not a session token: it is not URL-safe base64") from None
        return cls.from_bytes(data, keys_max)
