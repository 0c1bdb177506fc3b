"""Hugging Face transformers: load a prompt's longest cached prefix, compute the rest, save what is new.

Why it exists: the simplest real engine, and the one in which equality can be proved to the bit.
Laws: nothing of the cache raises into the engine, a miss of any kind means computing. Loaded and recomputed paths run
    the SAME forwards over the rest (same shapes, same split), so equal bytes give equal logits. Prefill is always cut
    at the last block boundary before the prompt's last token, so stored blocks do not depend on the prompt's tail.
    A block is [layers, 2 (keys, values), kv_heads, block_tokens, head_dim], C-contiguous.
Limits: decoder-only models whose layers are all plain `DynamicLayer` (no sliding window, no quantised cache), batch of
    one, on the CPU, greedy. At most `load_tokens_max` tokens are loaded (the buffer is allocated once and prefaulted);
    the rest of a longer prefix is computed.

Why cuts matter (measured, SmolLM2, 2 threads): the KV of 1,280 tokens computed in one forward differs from the same
rows of a forward over 2,048 by up to 2e-5: matrix kernels choose their blocking by shape. See `PrefixCache.recompute`.
"""

from __future__ import annotations

import inspect
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import transformers
import xxhash
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from emberkv.connectors.keys import Fingerprint, Geometry, chain_keys
from emberkv.connectors.saver import BackgroundSaver, BlockClient, Rows, SaveJob, SaverStats
from emberkv.types import Level, MissReason

log = logging.getLogger(__name__)

LAYOUT: Final = "[layers,2,kv_heads,tokens,head_dim] c-contiguous /1"


class KvShape(NamedTuple):
    """Axes of one block."""

    layers: int
    kv_heads: int
    block_tokens: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        values = 2 * self.layers * self.kv_heads * self.block_tokens * self.head_dim
        return values * int(self.dtype.itemsize)


class LoadedPrefix(NamedTuple):
    """A cache holding the first `tokens` tokens. `reasons`: one per key asked, NONE for a hit; `keys`: all full
    blocks."""

    cache: Any
    tokens: int
    keys: list[bytes]
    reasons: tuple[MissReason, ...]
    fetch_s: float
    import_s: float

    @property
    def reason(self) -> MissReason:
        """Why the prefix ended where it did: the first miss, or NONE if every block asked for was usable."""
        return next((reason for reason in self.reasons if reason), MissReason.NONE)


class Generation(NamedTuple):
    """What a greedy run produced. `first_logits` [vocabulary] belong to the prompt's last token, to compare bits."""

    tokens: list[int]
    ttft_s: float
    total_s: float
    prompt_tokens: int
    loaded_tokens: int
    fetch_s: float
    import_s: float
    reasons: tuple[MissReason, ...]
    first_logits: torch.Tensor


class PrefixCacheStats(NamedTuple):
    """Counts since the start: prompts, tokens loaded and computed in prefill, misses per block by reason, saver."""

    prompts: int
    loaded_tokens: int
    computed_tokens: int
    misses: dict[str, int]
    load_errors: int
    saver: SaverStats


class PrefixCache:
    """One model, one client. `generate` is the engine; `load` and `save` serve an engine of one's own."""

    def __init__(
        self,
        model: Any,
        client: BlockClient,
        *,
        block_tokens: int = 64,
        load_tokens_max: int = 4096,
        prefill_chunk_tokens: int = 2048,
        load_deadline_ms: int = 2_000,
        level: Level | None = None,
        saver_options: dict[str, int] | None = None,
    ) -> None:
        self._model = model
        self._client = client
        self._shape = kv_shape(model, block_tokens)
        self.geometry = Geometry(block_tokens, self._shape.block_bytes)
        self.fingerprint = fingerprint_of(model, block_tokens)
        self._digest = self.fingerprint.digest()
        self._prefill_chunk_tokens = prefill_chunk_tokens
        self._load_deadline_ms = load_deadline_ms
        # transformers 5.2x renamed the argument; the old name warns, then goes away in 5.40.
        accepts_cache = "cache" in inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if accepts_cache else "past_key_values"
        # One buffer for all loads, touched now: a first touch costs several times the copy (design 7).
        self._rows: Rows = np.empty((max(1, load_tokens_max // block_tokens), self._shape.block_bytes), np.uint8)
        self._rows.fill(0)
        self._rows_lock = threading.Lock()
        self._saver = BackgroundSaver(client, self._shape.block_bytes, level=level, **(saver_options or {}))
        self._counts: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()

    def keys(self, token_ids: Sequence[int]) -> list[bytes]:
        """Block keys of all full blocks of a prompt."""
        return chain_keys(token_ids, self.geometry.block_tokens, self._digest)

    def boundary(self, tokens: int) -> int:
        """Where prefill is cut: the last block boundary that leaves at least one token to compute."""
        return self.geometry.loadable_blocks(tokens) * self.geometry.block_tokens

    def load(self, token_ids: Sequence[int]) -> LoadedPrefix:
        """The longest cached prefix, ready to be passed to the model. Never raises for anything the client does."""
        keys = self.keys(token_ids)
        asked = keys[: min(self.geometry.loadable_blocks(len(token_ids)), len(self._rows))]
        if not asked:
            return LoadedPrefix(self._empty_cache(), 0, keys, (), 0.0, 0.0)
        started = time.perf_counter()
        try:
            with self._rows_lock:
                result = self._client.get_into(asked, self._rows[: len(asked)], deadline_ms=self._load_deadline_ms)
                usable, reasons = int(result.usable), tuple(MissReason(reason) for reason in result.reasons)
                if not 0 <= usable <= len(asked) or len(reasons) != len(asked):
                    raise ValueError(f"get_into answered usable={usable}, {len(reasons)} reasons for {len(asked)} keys")
                fetched = time.perf_counter()
                cache = import_blocks(self._rows[:usable], self._shape, self._model.config)
        except Exception as error:  # the engine boundary: whatever happens beneath, the engine computes
            log.warning("prefix load failed, computing instead: %s: %s", type(error).__name__, error)
            self._counts["load_errors"] += 1
            reasons = (MissReason.UNREACHABLE,) * len(asked)
            self._misses.update(reason.label for reason in reasons)
            return LoadedPrefix(self._empty_cache(), 0, keys, reasons, time.perf_counter() - started, 0.0)
        self._saver.remember(asked[:usable])
        self._saver.forget(key for key, reason in zip(asked, reasons, strict=True) if reason)
        self._misses.update(reason.label for reason in reasons if reason)
        tokens = usable * self.geometry.block_tokens
        return LoadedPrefix(cache, tokens, keys, reasons, fetched - started, time.perf_counter() - fetched)

    def generate(self, token_ids: Sequence[int], max_new_tokens: int, *, stop_token: int | None = None) -> Generation:
        """Greedy continuation: load, compute the rest, hand new full blocks over after the first token, go on."""
        started = time.perf_counter()
        loaded = self.load(token_ids)
        self._counts["prompts"] += 1
        self._counts["loaded_tokens"] += loaded.tokens
        self._counts["computed_tokens"] += len(token_ids) - loaded.tokens
        return self._continue(
            token_ids, loaded, max_new_tokens, stop_token, started, lambda: self._save(loaded.keys, loaded.cache)
        )

    def recompute(
        self, token_ids: Sequence[int], split: int, max_new_tokens: int = 1, *, stop_token: int | None = None
    ) -> Generation:
        """The reference: what `generate` must give after it loaded `split` tokens, without touching the cache.

        The blocks of a prefix were computed by a forward over the WHOLE prefix, so the reference does that too, forgets
        what lies behind `split` and then runs the forwards of the loaded path. At split = 0 or split = boundary(len)
        nothing is computed twice, and `ttft_s` is the honest cost of recomputing; in between it is not a measurement.
        """
        boundary = self.boundary(len(token_ids))
        if not 0 <= split <= boundary:
            raise ValueError(f"split must lie in 0..{boundary} for {len(token_ids)} tokens, not {split}")
        started = time.perf_counter()
        cache = self._empty_cache()
        if split:
            with torch.inference_mode():
                self._prefill(self._tensor(token_ids), cache, 0, boundary)
            _truncate(cache, split)
        loaded = LoadedPrefix(cache, split, [], (), 0.0, 0.0)
        return self._continue(token_ids, loaded, max_new_tokens, stop_token, started, None)

    def save(self, token_ids: Sequence[int], cache: Any) -> bool:
        """Queue the full blocks of a prompt whose KV `cache` holds; False if dropped. The cache may go on growing."""
        return self._save(self.keys(token_ids), cache)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until everything queued is saved or dropped; False if `timeout_s` ended first."""
        return self._saver.flush(timeout_s)

    def close(self) -> None:
        """Stop saving; what is queued is dropped (call `flush` before, if it matters)."""
        self._saver.close()

    def stats(self) -> PrefixCacheStats:
        """Counts since the start; changes nothing."""
        counts = self._counts
        return PrefixCacheStats(
            prompts=counts["prompts"],
            loaded_tokens=counts["loaded_tokens"],
            computed_tokens=counts["computed_tokens"],
            misses=dict(self._misses),
            load_errors=counts["load_errors"],
            saver=self._saver.stats(),
        )

    def _continue(
        self,
        token_ids: Sequence[int],
        loaded: LoadedPrefix,
        max_new_tokens: int,
        stop_token: int | None,
        started: float,
        after_first: Callable[[], object] | None,
    ) -> Generation:
        with torch.inference_mode():
            logits = self._prefill(self._tensor(token_ids), loaded.cache, loaded.tokens, len(token_ids))
            first_logits = logits
            tokens = [int(logits.argmax())]
            ttft_s = time.perf_counter() - started
            if after_first:
                after_first()
            while len(tokens) < max_new_tokens and tokens[-1] != stop_token:
                logits = self._forward(self._tensor(tokens[-1:]), loaded.cache)
                tokens.append(int(logits.argmax()))
        total_s = time.perf_counter() - started
        return Generation(
            tokens,
            ttft_s,
            total_s,
            len(token_ids),
            loaded.tokens,
            loaded.fetch_s,
            loaded.import_s,
            loaded.reasons,
            first_logits,
        )

    def _prefill(self, ids: torch.Tensor, cache: Any, start: int, end: int) -> torch.Tensor:
        """Forwards over ids[start:end], cut at multiples of the chunk and at the boundary; logits of the last token."""
        boundary = self.boundary(ids.shape[1])
        logits = torch.empty(0)
        while start < end:
            stop = min(end, (start // self._prefill_chunk_tokens + 1) * self._prefill_chunk_tokens)
            if start < boundary < stop:
                stop = boundary
            logits = self._forward(ids[:, start:stop], cache)
            start = stop
        return logits

    def _forward(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        # No attention mask and no position ids: with one unpadded sequence the model derives both from the cache's
        # length.
        output = self._model(ids, use_cache=True, logits_to_keep=1, **{self._cache_argument: cache})
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def _save(self, keys: list[bytes], cache: Any) -> bool:
        if not keys:
            return True
        # References, not copies: DynamicLayer.update makes new tensors by concatenation and never writes into old ones
        # (test_engine_may_go_on_while_blocks_are_saved checks it for the installed version).
        tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
        held_bytes = sum(tensor.nbytes for tensor in tensors)
        block_tokens = self.geometry.block_tokens
        return self._saver.submit(
            SaveJob(keys, held_bytes, lambda first, last, rows: export_blocks(tensors, block_tokens, first, last, rows))
        )

    def _empty_cache(self) -> Any:
        return DynamicCache(config=self._model.config)

    def _tensor(self, token_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(token_ids)], dtype=torch.long)


def kv_shape(model: Any, block_tokens: int) -> KvShape:
    """Axes of a block of this model. Raises ValueError for a model that this connector cannot serve."""
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=model.config).layers
    odd = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if odd or len(layers) != config.num_hidden_layers:
        raise ValueError(
            f"only models with one plain DynamicLayer per layer can be cached, this one has {odd or len(layers)}"
        )
    if model.device.type != "cpu":
        raise ValueError(f"the transformers connector serves models on the CPU, this one is on {model.device}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KvShape(config.num_hidden_layers, config.num_key_value_heads, block_tokens, head_dim, model.dtype)


def import_blocks(rows: Rows, shape: KvShape, config: Any) -> Any:
    """A DynamicCache from blocks: one copy for all layers (rows may be reused afterwards), then one view per layer."""
    cache = DynamicCache(config=config)
    if not len(rows):
        return cache
    blocks = torch.from_numpy(rows).view(shape.dtype)
    halves = 2 * shape.layers
    blocks = blocks.view(len(rows), halves, shape.kv_heads, shape.block_tokens, shape.head_dim)
    # clone: for a single block the reshape alone would be a view of the buffer that the next load overwrites.
    ordered = blocks.permute(1, 2, 0, 3, 4).clone(memory_format=torch.contiguous_format)
    # What is left of an import's time is the first touch of this new memory (94 MB: 5 ms if warm, 25 ms if not).
    halves_of_layers = ordered.view(halves, 1, shape.kv_heads, len(rows) * shape.block_tokens, shape.head_dim).unbind(0)
    for index, layer in enumerate(cache.layers):
        # Set, not `update`: update concatenates with an empty tensor, which would copy everything a second time.
        layer.keys, layer.values = halves_of_layers[2 * index : 2 * index + 2]
        layer.device, layer.dtype = ordered.device, ordered.dtype
        layer.is_initialized = True
    return cache


def export_blocks(tensors: Sequence[torch.Tensor], block_tokens: int, first: int, last: int, rows: Rows) -> None:
    """Blocks first..last-1 of all layers into `rows`. `tensors`: keys, values per layer, [1, heads, tokens, dim].

    One numpy call and not torch: it runs beside the engine, whose kernels own torch's threads; one plain copying thread
    disturbs less.
    """
    count = last - first
    heads = tensors[0].shape[1]
    span = slice(first * block_tokens, last * block_tokens)
    sources = [t[0, :, span].view(torch.uint8).numpy().reshape(heads, count, -1) for t in tensors]
    target = rows.reshape(count, len(tensors), heads, -1).transpose(1, 2, 0, 3)
    np.stack(sources, axis=0, out=target)


def weights_digest(model: Any) -> str:
    """Hex xxh3-128 over name, dtype, shape and ALL bytes of every parameter and saved buffer, sorted by name.

    The full bytes, because they cost 0.02 s for 540 MB (a sample would miss a fine-tuned layer). Not cryptographic: it
    tells models apart, it does not prove where they came from.
    """
    state = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        plain = tensor.detach().contiguous()
        state.update(f"{name}|{plain.dtype}|{tuple(plain.shape)}|".encode())
        state.update(plain.reshape(-1).view(torch.uint8).numpy())
    return state.hexdigest()


def fingerprint_of(model: Any, block_tokens: int) -> Fingerprint:
    """Everything about this model in this process that changes the bytes of a block.

    Thread counts are left out: 1 and 2 threads gave equal bits (measured). Shapes of forwards: see `recompute`.
    """
    config = model.config.get_text_config(decoder=True)
    shape = kv_shape(model, block_tokens)
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": getattr(config, "rope_theta", None)}
    quantisation = getattr(model.config, "quantization_config", None)
    precision = torch.get_float32_matmul_precision()
    return Fingerprint(
        weights=weights_digest(model),
        dtype=str(shape.dtype).removeprefix("torch."),
        layout=LAYOUT,
        engine=f"transformers {transformers.__version__}, torch {torch.__version__}",
        isa=f"cpu {torch.backends.cpu.get_cpu_capability()}, float32 matmul {precision}",
        attention=str(getattr(config, "_attn_implementation", "eager")),
        quantisation=json.dumps(quantisation, sort_keys=True, default=str) if quantisation else "none",
        rope=json.dumps(rope, sort_keys=True, default=str),
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        kv_groups=config.num_attention_heads // shape.kv_heads,
        head_dim=shape.head_dim,
        block_tokens=block_tokens,
    )


def _truncate(cache: Any, tokens: int) -> None:
    # By slices, as `crop` changed its meaning between versions (positive was a length, now it raises).
    for layer in cache.layers:
        layer.keys = layer.keys[:, :, :tokens]
        layer.values = layer.values[:, :, :tokens]
