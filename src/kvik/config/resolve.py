"""Wishes + facts of the model + facts of the machine -> every setting, each with its reason.

Pure: nothing is read, loaded or allocated here, so the plan stands before the first byte of weights
is touched, and what cannot fit is an error that says what would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

from kvik.config.built import BUILT_IN, built_in, settled
from kvik.config.capacity import (
    MIN_BUDGET,
    MIN_CONTEXT,
    Limit,
    cache_bytes,
    capacity_error,
    show_bytes,
)
from kvik.config.check import check_config
from kvik.config.config import (
    CacheConfig,
    Decision,
    EngineConfig,
    MemoryPlan,
    ResolvedConfig,
    RunnerConfig,
    SchedulerConfig,
)
from kvik.config.errors import ConfigError
from kvik.config.hardware import Gpu, Hardware
from kvik.config.kernels import (
    choose_attention,
    choose_kernels,
    native_reason,
    torch_prompts,
)
from kvik.config.kv_choice import choose_kv_format
from kvik.config.kv_formats import SYNONYMS
from kvik.config.memory import (
    CUDA_BUILD_BYTES,
    GIB,
    POOL_BYTES_PER_BLOCK,
    RUNTIME_BYTES,
    THREAD_BYTES,
    Footprint,
    ModelSizes,
    StepSize,
)
from kvik.config.model_spec import ModelSpec
from kvik.config.quantization import SCHEMES, weight_bytes
from kvik.config.speculative import NO_SOURCE, DraftSource
from kvik.config.speculative_choice import (
    choose_speculation,
    draft_tokens,
    wish_of,
    with_draft_rows,
    with_drafter,
)

MAX_NUM_SEQS = 256
CPU_BUDGET, GPU_BUDGET = 2048, 8192  # tokens of a step: enough to be bound by arithmetic
# Of a computer's memory, which has other work to do, the KV cache takes by default at most this
# share of what is left, and no more than keeps it in proportion to the model.
CPU_KV_SHARE = 0.5
CPU_KV_PER_WEIGHTS, CPU_KV_FLOOR = 2, GIB
ASKED = "as asked"

_T = TypeVar("_T")


def resolve(
    config: EngineConfig,
    spec: ModelSpec,
    hardware: Hardware,
    model_path: str,
    source: DraftSource = NO_SOURCE,
) -> ResolvedConfig:
    """Decide everything.

    Args:
        source: of drafts.

    Raises:
        ConfigError: a field that is out of range, or contradicts the model or another field.
        CapacityError: what was asked for cannot fit this machine; the message says what would.
    """
    check_config(config)
    kv_cache_dtype = SYNONYMS.get(config.kv_cache_dtype, config.kv_cache_dtype)
    config = replace(config, kv_cache_dtype=kv_cache_dtype)
    if config.load_format == "random":
        spec = replace(spec, quantization=None, built=None)  # made as floats, however it is stored
    notes = Notes()
    if spec.built is not None:
        config = settled(config, spec.built, hardware)
        notes = Notes(dict.fromkeys(built_in(spec.built), BUILT_IN))
    device, gpu = choose_device(config, hardware, notes)
    limit = _memory_limit(config, hardware, gpu, notes)
    dtype = choose_dtype(config, spec, hardware, gpu, limit, notes)
    kernels, footprint = choose_footprint(config, spec, hardware, device, gpu, dtype, notes)
    if spec.built is not None:
        footprint = replace(footprint, mapped=spec.built.weight_bytes)
    wish = wish_of(config)
    footprint = with_drafter(footprint, wish, source)
    choose_kv_format(config, spec, dtype, notes.add)
    asked = ASKED if config.quantization != "none" else "the default"
    words = SCHEMES[config.quantization]
    words += f" ({spec.quantization})" if spec.quantization else ""
    notes.add("quantization", config.quantization, f"{asked}: {words}")
    size = step_size(config, footprint, limit, notes)
    size = replace(size, max_model_len=_max_model_len(config, footprint, size, limit, notes))
    num_blocks = _num_blocks(config, footprint, size, limit, notes)
    size = _cut_seqs(config, footprint, size, num_blocks, notes)
    _note_graphs(footprint, size, notes)
    speculation = choose_speculation(wish, size, footprint.groups, source, notes.add)
    threads = config.threads or hardware.cores
    notes.add(
        "threads",
        threads,
        ASKED if config.threads else f"cores this process may use: {hardware.cpu_name}",
    )
    plan = memory_plan(footprint, size, num_blocks, limit)
    return ResolvedConfig(
        model=spec,
        cache=CacheConfig(
            config.block_size, num_blocks, footprint.groups, config.enable_prefix_caching
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=size.max_num_seqs,
            max_num_batched_tokens=size.max_num_batched_tokens,
            max_model_len=size.max_model_len,
            policy=config.policy,
            batch_size=config.batch_size,
            max_wait=config.max_wait,
            ageing=config.ageing,
            max_queued_requests=config.max_queued_requests,
            max_queued_tokens=config.max_queued_tokens,
            num_lookahead_tokens=speculation.num_lookahead_tokens if speculation else 0,
        ),
        runner=RunnerConfig(
            model_path=model_path,
            dtype=dtype,
            device=device,
            attention_backend=footprint.attention_backend,
            torch_prompts=torch_prompts(footprint.attention_backend, spec, gpu),
            threads=threads,
            kernels=kernels,
            load_format=config.load_format,
            quantization=config.quantization,
            seed=config.seed,
            graph_sizes=footprint.graph_sizes(size),
            draft_graph_sizes=footprint.draft_graph_sizes(size),
            graph_memory=footprint.graphs(size),
        ),
        memory=plan,
        seed=config.seed,
        decisions=tuple(notes.decisions),
        speculation=speculation,
    )


class Notes:
    """Collects decisions in the order they are made; of what is settled the reason is known."""

    def __init__(self, settled: Mapping[str, str] = MappingProxyType({})) -> None:
        self.decisions: list[Decision] = []
        self._settled = settled

    def add(self, name: str, value: _T, reason: str) -> _T:
        self.decisions.append(Decision(name, str(value), self._settled.get(name, reason)))
        return value


def choose_device(config: EngineConfig, hardware: Hardware, notes: Notes) -> tuple[str, Gpu | None]:
    """ "cpu", or "cuda:N" and what that is."""
    gpus = {gpu.index: gpu for gpu in hardware.gpus}
    if config.device == "cpu" or (config.device == "auto" and not gpus):
        reason = ASKED if config.device == "cpu" else "no CUDA device is visible"
        return notes.add("device", "cpu", reason), None
    _, _, wanted = config.device.partition(":")
    index = int(wanted) if wanted else min(gpus, default=0)
    if index not in gpus:
        visible = ", ".join(f"cuda:{i}" for i in sorted(gpus)) or "none"
        raise ConfigError("device", f"{config.device} is not there (CUDA devices: {visible})")
    reason = ASKED if wanted else gpus[index].name
    return notes.add("device", f"cuda:{index}", reason), gpus[index]


def _memory_limit(config: EngineConfig, hardware: Hardware, gpu: Gpu | None, notes: Notes) -> Limit:
    free = gpu.free_memory if gpu else hardware.memory_limit
    what = "free GPU memory" if gpu else hardware.memory_reason
    limit = int(free * config.memory_utilization)
    source = f"{config.memory_utilization:.0%} of {show_bytes(free)} ({what})"
    notes.add("memory", show_bytes(limit), source)
    return Limit(limit, source)


def choose_dtype(
    config: EngineConfig,
    spec: ModelSpec,
    hardware: Hardware,
    gpu: Gpu | None,
    limit: Limit,
    notes: Notes,
) -> str:
    if config.dtype != "auto":
        return notes.add("dtype", config.dtype, ASKED)
    if gpu and spec.dtype == "bfloat16" and gpu.capability < (8, 0):
        return notes.add("dtype", "float16", f"{gpu.name} has no bfloat16")
    if gpu:
        return notes.add("dtype", spec.dtype, "the checkpoint's")
    full = weight_bytes(spec, "float32", config.quantization)
    if spec.dtype == "float32":
        if full <= limit.size // 2:
            return notes.add("dtype", "float32", "the checkpoint's")
        return notes.add("dtype", "bfloat16", f"float32 would take {show_bytes(full)}")
    if hardware.fast_bf16:
        return notes.add("dtype", "bfloat16", "half the bytes to read, and this CPU multiplies it")
    if native_reason(hardware) is None and config.kernels != "torch":
        return notes.add("dtype", "bfloat16", "half the bytes to read, widened as they are read")
    if full <= limit.size // 2:
        return notes.add("dtype", "float32", "this CPU has no bfloat16 arithmetic")
    return notes.add("dtype", "bfloat16", f"float32 would take {show_bytes(full)}")


def choose_footprint(
    config: EngineConfig,
    model: ModelSizes,
    hardware: Hardware,
    device: str,
    gpu: Gpu | None,
    dtype: str,
    notes: Notes,
) -> tuple[str, Footprint]:
    """The kernels and, with the attention backend that suits them, what the engine takes."""
    kernels = choose_kernels(config, hardware, model, device, dtype, notes.add)
    backend = choose_attention(config, model, kernels, dtype, gpu, notes.add)
    kind = "cpu" if device == "cpu" else "cuda"
    runtime = RUNTIME_BYTES[kind]
    if kind == "cpu":
        runtime += THREAD_BYTES * (config.threads or hardware.cores)
        runtime += CUDA_BUILD_BYTES if hardware.cuda_build else 0
    footprint = Footprint(
        model,
        dtype,
        config.quantization,
        kind,
        backend,
        config.block_size,
        runtime,
        config.kv_cache_dtype,
        config.kv_cache_dtype_skip_layers,
        kernels,
        graph_memory=config.graph_memory,
    )
    return kernels, footprint


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


def _num_blocks(
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


def _cut_seqs(
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


def _note_graphs(footprint: Footprint, size: StepSize, notes: Notes) -> None:
    """Of captured forwards, where any can be."""
    able = replace(footprint, graph_memory=None)
    sizes, drafting = able.graph_sizes(size), able.draft_graph_sizes(size)
    if footprint.graph_memory == 0 and (sizes or drafting):
        notes.add("cuda_graphs", "none", ASKED)
    elif sizes or drafting:
        what = f"{len(drafting)} of the {'heads' if footprint.heads else 'draft model'}"
        value, replayed = what, "drafts are made by replays"
        if sizes:
            value = f"{len(sizes)} sizes up to {max(each.rows for each in sizes)} requests"
            value += f", {what}" if drafting else ""
            judging = " and judging" if size.max_draft_rows else ""
            replayed = f"decoding{judging} steps are replays"
        taken = show_bytes(footprint.graphs(size))
        planned = "are planned" if footprint.graph_memory is None else "were asked for"
        notes.add("cuda_graphs", value, f"{replayed}; {taken} {planned} for all of them")


def memory_plan(footprint: Footprint, size: StepSize, num_blocks: int, limit: Limit) -> MemoryPlan:
    bookkeeping = POOL_BYTES_PER_BLOCK * num_blocks if footprint.device == "cpu" else 0
    return MemoryPlan(
        limit=limit.size,
        weights=footprint.weights,
        activations=footprint.activations(size),
        kv_cache=num_blocks * footprint.block_bytes,
        overhead=footprint.overhead(size) + bookkeeping,
    )
