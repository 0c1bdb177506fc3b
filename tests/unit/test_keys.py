"""Keys: the same everywhere and for ever, one per full block, different for whatever differs in the bytes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from emberkv.connectors.keys import Fingerprint, Geometry, chain_keys, chain_root, hash_canary

DIGEST = bytes(range(32))


def fingerprint(**changes: object) -> Fingerprint:
    fields: dict[str, object] = {
        "weights": "0123456789abcdef",
        "dtype": "float32",
        "layout": "test/1",
        "engine": "engine 1.0",
        "isa": "cpu AVX512",
        "attention": "sdpa",
        "quantisation": "none",
        "rope": '{"rope_theta": 10000.0}',
        "layers": 30,
        "kv_heads": 3,
        "kv_groups": 3,
        "head_dim": 64,
        "block_tokens": 64,
    }
    return Fingerprint(**(fields | changes))  # type: ignore[arg-type]  # a table of mixed values, as the test changes any


def test_keys_are_golden() -> None:
    # These literals must never change: a change would orphan every block that anyone has stored.
    assert hash_canary().hex() == "8a2e0e3fb409b357e79b95e9abad12d861fdd8a431ecf6b1939662fb91f1ae07"
    assert fingerprint().digest().hex() == "7b1df0fee7d17bf52b1a8a35fbfb3ece4a386b73238a849cecaa7011b36b8e3b"
    assert [key.hex() for key in chain_keys([1, 2, 3, 4], 2, DIGEST)] == [
        "f2511a8871a8c8da74825e1cc93375a02071d989fe46e7686e5c76baadcf48fb",
        "cd47706fddc86cfb5cacf10832f8438dd2364bb62396485f4d5bbbc64104b675",
    ]


def test_only_full_blocks_have_keys() -> None:
    tokens = list(range(1000))
    for count in (0, 1, 63, 64, 65, 127, 128, 1000):
        keys = chain_keys(tokens[:count], 64, DIGEST)
        assert len(keys) == count // 64
        assert all(len(key) == 32 for key in keys)
        assert keys == chain_keys(tokens, 64, DIGEST)[: count // 64]


def test_resuming_from_the_last_key_gives_the_same_chain() -> None:
    tokens = list(range(640))
    whole = chain_keys(tokens, 64, DIGEST)
    head = chain_keys(tokens[:256], 64, DIGEST)
    assert head + chain_keys(tokens[256:], 64, DIGEST, parent=head[-1]) == whole


def test_a_key_covers_its_whole_prefix_and_the_fingerprint() -> None:
    tokens = list(range(256))
    keys = chain_keys(tokens, 64, DIGEST)
    changed = chain_keys([*tokens[:70], 9, *tokens[71:]], 64, DIGEST)
    assert changed[0] == keys[0]
    assert all(a != b for a, b in zip(changed[1:], keys[1:], strict=True))
    assert not set(keys) & set(chain_keys(tokens, 64, bytes(32)))
    assert len(set(chain_keys([7] * 640, 64, DIGEST))) == 10  # equal blocks at different places are different


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint32, np.uint16])
def test_arrays_and_lists_give_the_same_keys(dtype: type) -> None:
    assert chain_keys(np.arange(128, dtype=dtype), 64, DIGEST) == chain_keys(list(range(128)), 64, DIGEST)


def test_keys_do_not_depend_on_the_process() -> None:
    code = (
        "from emberkv.connectors.keys import chain_keys;print(chain_keys(range(4096), 64, bytes(range(32)))[-1].hex())"
    )
    seen = set()
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        seen.add(subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout)
    assert seen == {chain_keys(range(4096), 64, DIGEST)[-1].hex().encode() + b"\n"}


@pytest.mark.parametrize("token", [-1, 1 << 32, 1 << 70])
def test_a_token_that_does_not_fit_is_refused_not_wrapped(token: int) -> None:
    with pytest.raises(ValueError, match=r"32 bits|must lie in"):
        chain_keys([token] * 4, 4, DIGEST)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="block_tokens"):
        chain_keys([1], 0, DIGEST)
    with pytest.raises(ValueError, match="parent must have 32 bytes, not 3"):
        chain_keys([1], 1, DIGEST, parent=b"abc")
    with pytest.raises(ValueError, match="fingerprint_digest must have 32 bytes"):
        chain_root(b"")
    with pytest.raises(ValueError, match="one flat sequence"):
        chain_keys(np.zeros((2, 2), np.int64), 1, DIGEST)


def test_every_field_changes_the_digest_and_is_named() -> None:
    plain = fingerprint()
    assert plain.difference(fingerprint()) == []
    for name in plain.__struct_fields__:
        value = getattr(plain, name)
        other = value + 1 if isinstance(value, int) else value + type(value)(b"x" if isinstance(value, bytes) else "x")
        changed = fingerprint(**{name: other})
        assert plain.difference(changed) == [name]
        assert plain.digest() != changed.digest()


def test_the_canary_is_filled_in() -> None:
    assert fingerprint().canary == hash_canary()
    assert len(hash_canary()) == 32


def test_geometry() -> None:
    geometry = Geometry(block_tokens=64, block_bytes=2_949_120)
    assert [geometry.full_blocks(n) for n in (0, 63, 64, 2080)] == [0, 0, 1, 32]
    # At least one token must be left to compute: the logits come from it.
    assert [geometry.loadable_blocks(n) for n in (0, 1, 64, 65, 128, 2080)] == [0, 0, 0, 1, 1, 32]
    with pytest.raises(ValueError, match="fewer tokens per block"):
        Geometry(block_tokens=4096, block_bytes=64 << 20)
    with pytest.raises(ValueError, match="at least 1"):
        Geometry(block_tokens=0, block_bytes=1)
