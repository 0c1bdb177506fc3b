"""The byte pattern of a test block: whoever knows its key can tell from the bytes alone whether they are whole.

    word 0: counter      word i: (BASE[i] ^ seed) * ODD      seed = xxh3-64(key, counter, length)

Laws: each word but the first depends on key, counter, length and place, so bytes of another key, another put of the
same key, another place, another length or of no pattern at all are wrong words. A block is whole when all of its words
belong to the counter that its first word names.
Limits: blocks of LENGTH_MIN to LENGTH_MAX bytes; little endian.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

LENGTH_MIN: Final = 16
LENGTH_MAX: Final = 2 << 20
WORD: Final = 8
COUNTER_MAX: Final = (1 << 63) - 1

Bytes = npt.NDArray[np.uint8]


def _mixed(count: int) -> npt.NDArray[np.uint64]:
    """splitmix64 of 1 ... count: different everywhere, so that a block read from a wrong place matches nowhere."""
    words = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


_BASE: Final = _mixed(LENGTH_MAX // WORD + 1)
_ODD: Final = np.uint64(0xD6E8FEB86659FD93)


class WrongBytes(AssertionError):
    """Bytes that belong to no one put; the text says which words, and to whom they belong if that can be told."""


def key_of(number: int) -> bytes:
    """The 32-byte key of test block `number`."""
    return xxhash.xxh3_128_digest(b"stress %d" % number) * 2


def make(key: bytes, counter: int, length: int) -> Bytes:
    """The block that put number `counter` of `key` stores: uint8 [length]."""
    assert LENGTH_MIN <= length <= LENGTH_MAX
    assert 0 < counter <= COUNTER_MAX
    return _words(key, counter, length).view(np.uint8)[:length]


def whole(key: bytes, view: memoryview | Bytes) -> int:
    """The counter that all of these bytes belong to; raises WrongBytes."""
    found = np.frombuffer(view, np.uint8)
    if not LENGTH_MIN <= len(found) <= LENGTH_MAX:
        raise WrongBytes(f"a block of {len(found)} bytes was never put")
    counter = _counter(found)
    if not 0 < counter <= COUNTER_MAX:
        raise WrongBytes(f"no put has counter {counter:#x}: {bytes(found[:32]).hex()}")
    if not np.array_equal(found, make(key, counter, len(found))):
        raise WrongBytes(_story(key, counter, found))
    return counter


def same(key: bytes, counter: int, view: memoryview | Bytes) -> None:
    """The bytes must still be those of this very put; raises WrongBytes."""
    found = np.frombuffer(view, np.uint8)
    if not np.array_equal(found, make(key, counter, len(found))):
        raise WrongBytes(_story(key, counter, found))


def _counter(found: Bytes) -> int:
    return int.from_bytes(found[:WORD].tobytes(), "little")


def _words(key: bytes, counter: int, length: int) -> npt.NDArray[np.uint64]:
    seed = xxhash.xxh3_64_intdigest(key + counter.to_bytes(8, "little") + length.to_bytes(8, "little"))
    words = (_BASE[: -(-length // WORD)] ^ np.uint64(seed)) * _ODD
    words[0] = counter
    return words


def _story(key: bytes, counter: int, found: Bytes) -> str:
    """What is wrong with a block of which `counter` was expected."""
    wrong = np.flatnonzero(found != make(key, counter, len(found)))
    first, last = int(wrong[0]), int(wrong[-1])
    now = _counter(found)
    text = f"{len(found)} bytes of put {counter:#x}: {len(wrong)} are wrong, between {first} and {last}"
    if now != counter:
        text += f"; the first word now says {now:#x}"
        if 0 < now <= COUNTER_MAX and np.array_equal(found, make(key, now, len(found))):
            text += ", and all words agree: a later put of the same key was written over it"
    tail = found[first : first + 16].tobytes().hex()
    return f"{text}; there: {tail} (key {key[:8].hex()})"
