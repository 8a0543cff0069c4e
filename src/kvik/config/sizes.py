"""How much fits: requests and tokens of a step, the longest request, and blocks of the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvik.config.capacity import MIN_BUDGET, MIN_CONTEXT, Limit, cache_bytes, capacity_error
from kvik.config.config import EngineConfig
from kvik.config.errors import ConfigError
from kvik.config.memory import Footprint
from kvik.config.notes import ASKED, Notes
from kvik.config.speculative_choice import draft_tokens, wish_of, with_draft_rows
from kvik.config.step_memory import StepSize
from kvik.config.units import GIB, show_bytes

MAX_NUM_SEQS = 256
CPU_BUDGET, GPU_BUDGET = 2048, 8192  # tokens of a step: enough to be bound by arithmetic
# Of a computer's memory, which has other work to do, the KV cache takes by default at most this
# share of what is left, and no more than keeps it in proportion to the model.
CPU_KV_SHARE = 0.5
CPU_KV_PER_WEIGHTS, CPU_KV_FLOOR = 2, GIB


def choose_sizes(
    config: EngineConfig, footprint: Footprint, limit: Limit, notes: Notes
) -> StepSize:
    """A step, and its longest request."""
    size = step_size(config, footprint, limit, notes)
    return replace(size, max_model_len=_max_model_len(config, footprint, size, limit, notes))


def step_size(config: EngineConfig, footprint: Footprint, limit: Limit, notes: Notes) -> StepSize:
    """Requests and tokens of a step, cut so that the tensors of a step take at most a quarter of
    what the weights leave. `max_model_len` of the result is only a first guess."""
    context = footprint.spec.max_context
    default = GPU_BUDGET if footprint.device == "cuda" else CPU_BUDGET
    wish = wish_of(config)
    each, drafts = (1, 0) if wish is None else (2, 2 * draft_tokens(wish))  # tokens of a request
    batch = config.batch_size if config.policy in ("static", "dynamic") else 0
    least = max(config.block_size, batch, (config.max_num_seqs or 0) + drafts)
    size = StepSize(
        max_model_len=config.max_model_len or min(context, 4096),
        max_num_seqs=config.max_num_seqs
        or max(1, min(MAX_NUM_SEQS, (config.max_num_batched_tokens or GPU_BUDGET) // each)),
        max_num_batched_tokens=config.max_num_batched_tokens or max(default, least),
    )
    if batch:
        if config.max_num_seqs is None:
            size = replace(size, max_num_seqs=max(size.max_num_seqs, batch))
        elif batch > config.max_num_seqs:
            raise ConfigError(
                "batch_size",
                f"must be at most max_num_seqs ({config.max_num_seqs}), not {batch}",
            )
    size = with_draft_rows(wish, size, footprint.device)
    asked = size
    room = (limit.size - footprint.weights - footprint.overhead(size)) // 4
    floor = max(MIN_BUDGET, least)
    while footprint.activations(size) > room:
        smaller = []
        if config.max_num_batched_tokens is None and size.max_num_batched_tokens // 2 >= floor:
            tokens = size.max_num_batched_tokens // 2
            seqs = min(size.max_num_seqs, max(tokens // each, config.max_num_seqs or batch or 1))
            smaller.append(replace(size, max_num_batched_tokens=tokens, max_num_seqs=seqs))
        if config.max_num_seqs is None and size.max_num_seqs > config.batch_size:
            seqs = max(size.max_num_seqs // 2, config.batch_size)
            smaller.append(replace(size, max_num_seqs=seqs))
        if not smaller:
            break
        smaller = [with_draft_rows(wish, one, footprint.device) for one in smaller]
        size = min(smaller, key=footprint.activations)
    reason = "enough to keep the arithmetic units busy"
    if size.max_num_batched_tokens < asked.max_num_batched_tokens:
        reason = "a larger step would take over a quarter of the memory left by the weights"
    if config.max_num_batched_tokens is not None:
        reason = ASKED
    notes.add("max_num_batched_tokens", size.max_num_batched_tokens, reason)
    return size


def _max_model_len(
    config: EngineConfig, footprint: Footprint, size: StepSize, limit: Limit, notes: Notes
) -> int:
    """The asked-for context if it fits, else the longest that does."""
    context = footprint.spec.max_context
    if config.max_model_len is not None and config.max_model_len > context:
        raise ConfigError(
            "max_model_len",
            f"must be at most the model's context of {context}, not {config.max_model_len}",
        )
    wanted = config.max_model_len or context
    longest = _longest_fitting(
        config, footprint, lambda length: replace(size, max_model_len=length), limit, wanted
    )
    least = wanted
    if config.max_model_len is None:
        small_cache = config.num_blocks is not None or config.kv_cache_memory is not None
        least = 1 if small_cache else min(wanted, MIN_CONTEXT)
    if longest < least:
        # What the error offers must fit when it is asked for, with the step sized for that.
        offer = _longest_fitting(
            config, footprint, lambda length: _asked(config, footprint, limit, length), limit, least
        )
        size = replace(size, max_model_len=least)
        raise capacity_error(config, footprint, size, limit, offer)
    if config.max_model_len is not None:
        return notes.add("max_model_len", wanted, ASKED)
    if longest == wanted:
        return notes.add("max_model_len", wanted, "the model's context")
    limiter = "the memory left"
    if config.num_blocks is not None or config.kv_cache_memory is not None:
        limiter = "the KV cache asked for"
    reason = f"what {limiter} holds, of the model's context of {context}"
    return notes.add("max_model_len", longest, reason)


def _asked(config: EngineConfig, footprint: Footprint, limit: Limit, length: int) -> StepSize:
    """The step of a user who asks for a context of `length`."""
    size = step_size(replace(config, max_model_len=length), footprint, limit, Notes())
    return replace(size, max_model_len=length)


def _longest_fitting(
    config: EngineConfig,
    footprint: Footprint,
    size_for: Callable[[int], StepSize],
    limit: Limit,
    most: int,
) -> int:
    """A long context, up to `most`, of which one request fits; 0 if none is found.

    It is the longest if a longer context never fits better, as with steps of a fixed size.
    """

    def fits(length: int) -> bool:
        trial = size_for(length)
        one = 1 + footprint.blocks_per_request(length, trial.max_num_batched_tokens)
        cache = cache_bytes(config, footprint, trial)
        enough = cache >= one * footprint.block_cost
        return enough and footprint.fixed(trial) + cache <= limit.size

    if fits(most):
        return most
    low, high = 0, most  # fits(low) or low == 0; not fits(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    # Whole blocks: a longer context could not be told apart from this one.
    whole = low - low % footprint.block_size
    return whole if whole and fits(whole) else low


def choose_num_blocks(
    config: EngineConfig, footprint: Footprint, size: StepSize, limit: Limit, notes: Notes
) -> int:
    """At least one request of `max_model_len`, at most what all requests together can use."""
    if config.num_blocks is not None:
        return notes.add("num_blocks", config.num_blocks, ASKED)
    per_request = footprint.blocks_per_request(size.max_model_len, size.max_num_batched_tokens)
    cost = footprint.block_cost
    if config.kv_cache_memory is not None:
        asked = show_bytes(config.kv_cache_memory)
        count, reason = config.kv_cache_memory // cost, f"kv_cache_memory of {asked}"
    else:
        room = limit.size - footprint.fixed(size)
        bounds = [(room // cost, "all memory left")]
        if footprint.device == "cpu":
            proportion = max(CPU_KV_FLOOR, CPU_KV_PER_WEIGHTS * footprint.weights)
            bounds += [
                (int(room * CPU_KV_SHARE) // cost, f"{CPU_KV_SHARE:.0%} of the memory left"),
                (proportion // cost, f"{show_bytes(proportion)}, in proportion to the weights"),
            ]
        count, reason = min(bounds)
        if count <= per_request:
            count, reason = 1 + per_request, "one request of max_model_len"
    useful = 1 + size.max_num_seqs * per_request
    if count >= useful:
        count = useful
        reason = f"all that {size.max_num_seqs} requests of max_model_len can use"
    tokens = (count - 1) * footprint.block_size // len(footprint.groups)
    notes.add("num_blocks", count, f"{reason}; {tokens} tokens")
    return count


def cut_seqs(
    config: EngineConfig, footprint: Footprint, size: StepSize, num_blocks: int, notes: Notes
) -> StepSize:
    """No more requests at a time than there are blocks to give them."""
    if config.max_num_seqs is not None:
        notes.add("max_num_seqs", config.max_num_seqs, ASKED)
        return size
    count = min(size.max_num_seqs, num_blocks - 1)
    reason = "more would wait for each other's memory or arithmetic"
    if count < size.max_num_seqs:
        reason = "one block for each at least"
    elif count < MAX_NUM_SEQS:
        reason = "sampling for more would take too much memory, or more tokens than a step has"
    notes.add("max_num_seqs", count, reason)
    return with_draft_rows(wish_of(config), replace(size, max_num_seqs=count), footprint.device)
