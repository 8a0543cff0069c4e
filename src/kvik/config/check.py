"""Every field of `EngineConfig` on its own: the right type, in the allowed range."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from kvik.config.config import EngineConfig
from kvik.config.errors import ConfigError
from kvik.config.kv_spec import AUTO, KV_FORMATS, SYNONYMS
from kvik.config.model_spec import MAX_LAYERS
from kvik.config.quantization import SCHEMES
from kvik.config.speculative import speculative_wish

CHOICES: Mapping[str, tuple[str, ...]] = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "quantization": tuple(SCHEMES),
    "kv_cache_dtype": (AUTO, *KV_FORMATS, *SYNONYMS),
    "policy": (
        "fcfs",
        "priority",
        "shortest-prefill-first",
        "longest-prefix-match",
        "static",
        "dynamic",
    ),
    "kernels": ("auto", "native", "triton", "torch"),
    "attention_backend": ("auto", "cpu", "triton", "triton+sdpa", "sdpa", "reference"),
    "load_format": ("safetensors", "random"),
}

# Integers, low and high; the fields that may be None come second.
RANGES: Mapping[str, tuple[int, int]] = {
    "block_size": (1, 1024),
    "batch_size": (1, 65_536),
    "max_queued_requests": (1, 1 << 31),
    "max_queued_tokens": (1, 1 << 40),
}
OPTIONAL_RANGES: Mapping[str, tuple[int, int]] = {
    "max_model_len": (1, 1 << 24),
    "max_num_seqs": (1, 65_536),
    "max_num_batched_tokens": (1, 1 << 20),
    "num_blocks": (2, (1 << 31) - 1),  # block 0 is never handed out; ids are int32
    "kv_cache_memory": (1, 1 << 50),
    "graph_memory": (0, 1 << 50),
    "threads": (1, 1024),
    "seed": (-(1 << 63), (1 << 63) - 1),
}


def check_config(config: EngineConfig) -> None:
    """Raise ConfigError for the first field that is impossible whatever model and machine are."""
    if not isinstance(config.model, str) or "\0" in config.model:
        raise ConfigError("model", f"must be a folder or a hub id, not {config.model!r}")
    if config.kv_cache_dtype == "fp8_e5m2":
        text = "must be fp8 (E4M3) or int8, not fp8_e5m2: beside a scale for each vector, its "
        raise ConfigError("kv_cache_dtype", text + "range is of no use, and it has a bit less")
    for name, allowed in CHOICES.items():
        value = getattr(config, name)
        if value not in allowed:
            raise ConfigError(name, f"must be one of {', '.join(allowed)}, not {_shown(value)}")
    device = config.device
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", device):
        raise ConfigError("device", f"must be auto, cpu, cuda or cuda:N, not {_shown(device)}")
    for name, (low, high) in RANGES.items():
        _integer(name, getattr(config, name), low, high)
    for name, (low, high) in OPTIONAL_RANGES.items():
        if getattr(config, name) is not None:
            _integer(name, getattr(config, name), low, high)
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    if seqs is not None and tokens is not None and seqs > tokens:
        text = f"must be at most max_num_batched_tokens ({tokens}), not {seqs}"
        raise ConfigError("max_num_seqs", f"{text}: a step decodes a token of each request")
    if config.policy in ("static", "dynamic") and tokens is not None and config.batch_size > tokens:
        text = f"must be at most max_num_batched_tokens ({tokens}), not {config.batch_size}"
        raise ConfigError("batch_size", text)
    skipped = config.kv_cache_dtype_skip_layers
    if not isinstance(skipped, tuple):
        text = f"must be a tuple of layers, not {_shown(skipped)}"
        raise ConfigError("kv_cache_dtype_skip_layers", text)
    for layer in skipped:
        _integer("kv_cache_dtype_skip_layers", layer, 0, MAX_LAYERS - 1)
    _number("memory_utilization", config.memory_utilization, 0.01, 1.0)
    _number("max_wait", config.max_wait, 0.0, 3600.0)
    _number("ageing", config.ageing, 0.001, 1e9)
    if not isinstance(config.enable_prefix_caching, bool):
        raise ConfigError(
            "enable_prefix_caching",
            f"must be true or false, not {_shown(config.enable_prefix_caching)}",
        )
    speculative_wish(
        config.speculative_config, config.spec_method, config.spec_model, config.spec_tokens
    )
    if config.num_blocks is not None and config.kv_cache_memory is not None:
        raise ConfigError("kv_cache_memory", "must be left out when num_blocks is given")


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(name, f"must be an integer in [{low}, {high}], not {_shown(value)}")


def _number(name: str, value: object, low: float, high: float) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high:  # type: ignore[operator]
        raise ConfigError(name, f"must be a number in [{low:g}, {high:g}], not {_shown(value)}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
