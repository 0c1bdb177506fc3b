"""From tokens to block keys: fingerprint, geometry, chain hashing (design 8).

Why it exists: two engines may exchange bytes only if everything that shapes those bytes is equal; so the key of a block
    is a hash over the fingerprint of the engine and over every token up to the end of the block.
Laws: pure; the same input gives the same key in every process, on every machine, for ever (`HASH_SCHEME` names the
    rule, the canary proves it); a key covers its whole prefix; partial blocks have no key.
Limits: token ids fit 32 bits. The weights digest inside the fingerprint guards against accidents (xxh3, see
    `transformers.weights_digest`), not against a forger of weights; tenants are kept apart by the node, not by these
    keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from emberkv.types import BLOCK_BYTES_MAX, KEY_BYTES

HASH_SCHEME: Final = "sha256(parent || tokens as u32 little-endian), root = sha256(domain || fingerprint)"
"""Names the rule below. Whoever changes the rule changes this text, and with it every key."""

_ROOT_DOMAIN: Final = b"emberkv/chain/1\0"
_FINGERPRINT_DOMAIN: Final = b"emberkv/fingerprint/1\0"
_CANARY_TOKENS: Final = (*range(64), 255, 256, 65_535, 65_536, (1 << 31) - 1, (1 << 32) - 1)
"""Covers every byte width, so that a wrong width, sign or byte order shows in the canary."""
_TOKEN_MAX: Final = (1 << 32) - 1


class Geometry(msgspec.Struct, frozen=True):
    """How a sequence is cut: tokens per block, bytes of one part, parts per block (tensor-parallel ranks; 1 here)."""

    block_tokens: int
    block_bytes: int
    parts: int = 1

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.parts < 1:
            raise ValueError(f"block_tokens and parts must be at least 1, not {self.block_tokens} and {self.parts}")
        if not 1 <= self.block_bytes <= BLOCK_BYTES_MAX:
            raise ValueError(
                f"a block of {self.block_tokens} tokens has {self.block_bytes} bytes, not 1 to {BLOCK_BYTES_MAX}: "
                "choose fewer tokens per block"
            )

    def full_blocks(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill completely; only these are ever stored."""
        return tokens // self.block_tokens

    def loadable_blocks(self, tokens: int) -> int:
        """Blocks that may be loaded for a prompt: at least its last token is computed, else there are no logits."""
        return max(0, tokens - 1) // self.block_tokens


class Fingerprint(msgspec.Struct, frozen=True):
    """All that changes the bytes of a block. Two engines share blocks only if theirs are equal.

    weights: hex digest of all weights. dtype: of the KV tensors. layout: name of the order of axes in a block. engine:
    name and version of engine and kernels. isa: device and instruction set the kernels were chosen for. attention:
    backend name. quantisation: of weights or KV, "none" if plain. rope: canonical text of the rope parameters.
    kv_groups: query heads per KV head. canary: the chain hash of a fixed token list under a zero parent, as this
    process computes it.
    """

    weights: str
    dtype: str
    layout: str
    engine: str
    isa: str
    attention: str
    quantisation: str
    rope: str
    layers: int
    kv_heads: int
    kv_groups: int
    head_dim: int
    block_tokens: int
    parts: int = 1
    hash_scheme: str = HASH_SCHEME
    canary: bytes = b""

    def __post_init__(self) -> None:
        if not self.canary:
            msgspec.structs.force_setattr(self, "canary", hash_canary())

    def digest(self) -> bytes:
        """32 bytes: SHA-256 over the msgpack list of (name, value) sorted by name: field order is no part of it."""
        fields = sorted((name, getattr(self, name)) for name in self.__struct_fields__)
        return hashlib.sha256(_FINGERPRINT_DOMAIN + msgspec.msgpack.encode(fields)).digest()

    def difference(self, other: Fingerprint) -> list[str]:
        """Names of the fields in which two fingerprints differ, as declared; empty if blocks can be shared."""
        return [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]


def chain_root(fingerprint_digest: bytes) -> bytes:
    """The parent of a chain's first block: binds every key of the chain to the fingerprint."""
    _expect_digest("fingerprint_digest", fingerprint_digest)
    return hashlib.sha256(_ROOT_DOMAIN + fingerprint_digest).digest()


def chain_keys(
    token_ids: Sequence[int] | npt.NDArray[np.integer],
    block_tokens: int,
    fingerprint_digest: bytes,
    parent: bytes | None = None,
) -> list[bytes]:
    """One 32-byte key per FULL block of `token_ids`; tokens after the last full block have no key.

    To go on with a longer sequence, pass the tokens after the last full block and the last key as `parent`.
    Raises ValueError for a token outside 0..2^32-1 or a digest of the wrong length: both are errors of the caller.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
    link = chain_root(fingerprint_digest) if parent is None else parent
    _expect_digest("parent", link)
    blocks = len(token_ids) // block_tokens
    packed = memoryview(_pack_tokens(token_ids[: blocks * block_tokens]))
    step = 4 * block_tokens
    keys = []
    for start in range(0, blocks * step, step):
        state = hashlib.sha256(link)
        state.update(packed[start : start + step])
        link = state.digest()
        keys.append(link)
    return keys


def hash_canary() -> bytes:
    """The key that this process computes for a fixed block under a zero parent."""
    return chain_keys(_CANARY_TOKENS, len(_CANARY_TOKENS), bytes(KEY_BYTES), parent=bytes(KEY_BYTES))[0]


def _pack_tokens(token_ids: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """4 bytes little-endian per token; checked first, because a silent wrap-around would give two prompts one key."""
    try:
        wide = np.asarray(token_ids, dtype=np.int64)
    except OverflowError as error:
        raise ValueError("a token id does not fit 32 bits") from error
    if wide.ndim != 1:
        raise ValueError(f"token ids must be one flat sequence, not {wide.ndim}-dimensional")
    if wide.size and (int(wide.min()) < 0 or int(wide.max()) > _TOKEN_MAX):
        raise ValueError(f"token ids must lie in 0..{_TOKEN_MAX}, found {int(wide.min())}..{int(wide.max())}")
    return wide.astype("<u4").tobytes()


def _expect_digest(name: str, value: bytes) -> None:
    if len(value) != KEY_BYTES:
        raise ValueError(f"{name} must have {KEY_BYTES} bytes, not {len(value)}")
