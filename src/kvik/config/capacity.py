"""What to say when something cannot fit: what it needs, what there is, and what would fit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvik.config.config import EngineConfig
from kvik.config.errors import CapacityError
from kvik.config.memory import Footprint
from kvik.config.step_memory import StepSize
from kvik.config.units import show_bytes

MIN_BUDGET = 64  # tokens of a step below which even one request crawls
MIN_CONTEXT = 256  # a planned context shorter than this is of no use to anyone


@dataclass(frozen=True, slots=True)
class Limit:
    """Bytes the engine may plan with, and their source in words."""

    size: int
    source: str


def cache_bytes(config: EngineConfig, footprint: Footprint, size: StepSize) -> int:
    """The KV cache that was asked for, else the smallest that holds one request."""
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    blocks = config.num_blocks
    if blocks is None:
        blocks = 1 + footprint.blocks_per_request(size.max_model_len, size.max_num_batched_tokens)
    return blocks * footprint.block_cost


def capacity_error(
    config: EngineConfig, footprint: Footprint, size: StepSize, limit: Limit, longest: int
) -> CapacityError:
    """The error for a `size` that does not fit.

    Args:
        longest: the longest context that would fit with all else as it is; 0 if none does.
    """
    length = size.max_model_len
    enough = 1 + footprint.blocks_per_request(length, size.max_num_batched_tokens)
    if config.num_blocks is not None and config.num_blocks < enough:
        return CapacityError(
            "num_blocks",
            f"must be at least {enough} to hold {length} tokens, not {config.num_blocks}",
        )
    enough_bytes = enough * footprint.block_cost
    if config.kv_cache_memory is not None and config.kv_cache_memory < enough_bytes:
        return CapacityError(
            "kv_cache_memory",
            f"must be at least {enough_bytes} bytes to hold {length} tokens, "
            f"not {config.kv_cache_memory}",
        )
    cache = cache_bytes(config, footprint, size)
    needed = footprint.fixed(size) + cache
    allowed = f"{show_bytes(limit.size)} are allowed: {limit.source}"
    if config.max_model_len is not None and longest > 0:
        return CapacityError(
            "max_model_len",
            f"{length} tokens need {show_bytes(needed)}, {allowed}; up to {longest} would fit",
        )
    graphs = footprint.graphs(size)
    captured = (f"{show_bytes(graphs)} for CUDA graphs",) if graphs else ()
    parts = ", ".join(
        (
            f"{show_bytes(footprint.weights)} of weights in {footprint.stored_as}",
            f"{show_bytes(footprint.activations(size))} for a step",
            f"{show_bytes(cache)} of KV cache",
            *captured,
            f"{show_bytes(footprint.overhead(size) - graphs)} for the runtime",
        )
    )
    advice = _what_would_fit(config, footprint, size, limit)
    return CapacityError(
        "memory", f"{show_bytes(needed)} are needed ({parts}), {allowed}; {advice} would fit"
    )


def _what_would_fit(
    config: EngineConfig, footprint: Footprint, size: StepSize, limit: Limit
) -> str:
    """The smallest change that helps."""
    free = replace(config, num_blocks=None, kv_cache_memory=None)
    small = replace(size, max_num_seqs=1, max_num_batched_tokens=MIN_BUDGET)
    half = replace(footprint, dtype="bfloat16")
    one_by_one = f"max_num_seqs=1 with max_num_batched_tokens={MIN_BUDGET}"
    also = "" if free == config else " and a smaller KV cache"
    eager = replace(footprint, graph_memory=0)
    for advice, trial_config, trial_footprint, trial_size in (
        ("a smaller KV cache", free, footprint, size),
        ("a smaller graph_memory", config, eager, size),
        (f"a smaller graph_memory{also}", free, eager, size),
        (f"{one_by_one}{also}", free, footprint, small),
        (f"dtype=bfloat16{also}", free, half, size),
        (f"dtype=bfloat16, {one_by_one}{also}", free, half, small),
    ):
        cache = cache_bytes(trial_config, trial_footprint, trial_size)
        if trial_footprint.fixed(trial_size) + cache <= limit.size:
            return advice
    needed = footprint.fixed(size) + cache_bytes(config, footprint, size)
    if needed * config.memory_utilization <= limit.size:
        return "a higher memory_utilization"
    return f"a smaller model, or {show_bytes(int(needed / config.memory_utilization))} of memory,"
