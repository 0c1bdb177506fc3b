"""An engine: one process with the model, and a connector when it is attached to the cluster.

Why it exists: engine A, engine B and the uncached reference are the same program, so that only the cache differs.
Laws: greedy decoding, float32, a fixed number of threads. The reference never opens a client. Mode "fill" turns
    loads off (every block is reported absent), so that each cold pass is a full recompute and yet fills the cache.
Limits: started by the demo (`python -m emberkv.demo.engine`), spoken to in lines of JSON (children.py).

    attach(endpoints, mode, load_deadline_ms)   generate(session, new_tokens)   recompute(session, new_tokens, split)
    flush()   stats()
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import transformers

from emberkv.client import Client
from emberkv.connectors import smollm2
from emberkv.connectors.saver import BlockClient, LoadOutcome, Rows
from emberkv.connectors.transformers import Generation, PrefixCache
from emberkv.demo import texts
from emberkv.demo.children import Message, answer_all
from emberkv.types import Level, MissReason, PutOutcome

SAVER_BLOCKS: Final = 8


class Absent:
    """What a load finds when loads are turned off."""

    def __init__(self, count: int) -> None:
        self.usable = 0
        self.reasons: Sequence[MissReason] = (MissReason.ABSENT,) * count


class FillOnly:
    """A client that saves and never loads: every pass of the engine is then a full recompute."""

    def __init__(self, client: BlockClient) -> None:
        self._client = client

    def get_into(self, keys: Sequence[bytes], dest: Rows, *, deadline_ms: int) -> LoadOutcome:
        """Every block is absent."""
        return Absent(len(keys))

    def exists_many(self, keys: Sequence[bytes], *, deadline_ms: int) -> list[bool]:
        """As the client."""
        return self._client.exists_many(keys, deadline_ms=deadline_ms)

    def put_many(
        self, items: Sequence[tuple[bytes, Any]], *, level: Level | None, deadline_ms: int
    ) -> list[PutOutcome]:
        """As the client."""
        return self._client.put_many(items, level=level, deadline_ms=deadline_ms)


class LoadOnly:
    """A client that loads and never saves: what is computed behind a broken load must not replace what was there, or
    the next reference would be cut elsewhere."""

    def __init__(self, client: BlockClient) -> None:
        self._client = client

    def get_into(self, keys: Sequence[bytes], dest: Rows, *, deadline_ms: int) -> LoadOutcome:
        """As the client."""
        return self._client.get_into(keys, dest, deadline_ms=deadline_ms)

    def exists_many(self, keys: Sequence[bytes], *, deadline_ms: int) -> list[bool]:
        """Every block is there: nothing to save."""
        return [True] * len(keys)

    def put_many(
        self, items: Sequence[tuple[bytes, Any]], *, level: Level | None, deadline_ms: int
    ) -> list[PutOutcome]:
        """Never reached, because every block is there."""
        raise AssertionError("a load-only connector saved")


def _both(client: BlockClient) -> BlockClient:
    return client


MODES: Final[dict[str, Callable[[BlockClient], BlockClient]]] = {"fill": FillOnly, "load": LoadOnly, "both": _both}


class NoClient:
    """The reference has no cache; whoever calls this has a bug."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the uncached reference called {name} of a client")


class Engine:
    """The model, its sessions, and the connector in use."""

    def __init__(self, model_cache: str, session_count: int) -> None:
        started = time.perf_counter()
        self.model, self.tokenizer = smollm2.load(model_cache)
        self.sessions = texts.sessions(self.tokenizer, session_count)
        self.client: Client | None = None
        self.cache = self._connector(NoClient(), 1_000)
        self.cache.recompute(texts.warmup_tokens(self.tokenizer), 0, 2)
        self.load_s = time.perf_counter() - started

    def _connector(self, client: Any, load_deadline_ms: int) -> PrefixCache:
        return PrefixCache(
            self.model,
            client,
            block_tokens=texts.BLOCK_TOKENS,
            load_tokens_max=texts.PREFIX_TOKENS,
            prefill_chunk_tokens=texts.SHARED_TOKENS,
            load_deadline_ms=load_deadline_ms,
            saver_options={"batch_blocks": SAVER_BLOCKS},
        )

    def hello(self) -> Message:
        """What the parent must know of this engine."""
        return {
            "load_s": self.load_s,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "fingerprint": self.cache.fingerprint.digest().hex(),
            "block_bytes": self.cache.geometry.block_bytes,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "sessions": [
                {
                    "name": session.name,
                    "topic": session.topic,
                    "question": session.question,
                    "prompt_tokens": len(session.token_ids),
                    "keys": [key.hex() for key in self.cache.keys(session.token_ids)],
                }
                for session in self.sessions
            ],
        }

    def attach(self, endpoints: list[str], mode: str, load_deadline_ms: int) -> Message:
        """Connects to the cluster with a new client and a new connector, which remember nothing. `mode`: see MODES."""
        self.cache.close()
        if self.client is not None:
            self.client.close()
        self.client = Client(endpoints)
        self.cache = self._connector(MODES[mode](self.client), load_deadline_ms)
        return {}

    def generate(self, session: int, new_tokens: int) -> Message:
        """The engine's ordinary path: load, compute the rest, save what is new."""
        return self._described(self.cache.generate(self.sessions[session].token_ids, new_tokens))

    def recompute(self, session: int, new_tokens: int, split: int) -> Message:
        """The reference, cut at `split` tokens; touches no cache."""
        return self._described(self.cache.recompute(self.sessions[session].token_ids, split, new_tokens))

    def _described(self, run: Generation) -> Message:
        reasons: dict[str, int] = {}
        for reason in run.reasons:
            if reason:
                reasons[reason.label] = reasons.get(reason.label, 0) + 1
        return {
            "tokens": run.tokens,
            "text": self.tokenizer.decode(run.tokens),
            "ttft_s": run.ttft_s,
            "total_s": run.total_s,
            "prompt_tokens": run.prompt_tokens,
            "loaded_tokens": run.loaded_tokens,
            "fetch_s": run.fetch_s,
            "import_s": run.import_s,
            "misses": reasons,
            "logits": hashlib.sha256(run.first_logits.numpy().tobytes()).hexdigest(),
        }

    def flush(self, within_s: float) -> Message:
        """Waits until all blocks were handed to the cluster."""
        return {"flushed": self.cache.flush(within_s), **self.stats()}

    def stats(self) -> Message:
        """Counts of the connector."""
        stats = self.cache.stats()
        return {
            "saved": stats.saver.saved,
            "skipped": stats.saver.skipped_known + stats.saver.skipped_present,
            "dropped": stats.saver.dropped,
            "load_errors": stats.load_errors,
        }


def main() -> None:
    """Body of the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-cache", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--sessions", type=int, required=True)
    options = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(options.threads)
    engine = Engine(options.model_cache, options.sessions)
    answer_all(
        {
            "attach": engine.attach,
            "generate": engine.generate,
            "recompute": engine.recompute,
            "flush": engine.flush,
            "stats": engine.stats,
        },
        engine.hello(),
    )


if __name__ == "__main__":
    main()
