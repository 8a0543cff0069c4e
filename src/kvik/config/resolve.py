"""Wishes + facts of the model + facts of the machine -> every setting, each with its reason.

Pure: nothing is read, loaded or allocated here, so the plan stands before the first byte of weights
is touched, and what cannot fit is an error that says what would.
"""

from __future__ import annotations

from dataclasses import replace

from kvik.config.built import BUILT_IN, built_in, settled
from kvik.config.config import (
    EngineConfig,
    MemoryPlan,
    ResolvedConfig,
    RunnerConfig,
    check_config,
    wish_of,
)
from kvik.config.hardware import Gpu, Hardware
from kvik.config.kernels import (
    Note,
    choose_attention,
    choose_kernels,
    native_reason,
    torch_prompts,
)
from kvik.config.memory import (
    CUDA_BUILD_BYTES,
    POOL_BYTES_PER_BLOCK,
    RUNTIME_BYTES,
    THREAD_BYTES,
    Footprint,
    ModelSizes,
    StepSize,
)
from kvik.config.model_spec import ModelSpec
from kvik.config.notes import ASKED, Notes
from kvik.config.quantization import SCHEMES, weight_bytes
from kvik.config.sizes import (
    Limit,
    choose_num_blocks,
    choose_sizes,
    choose_speculation,
    cut_seqs,
    with_drafter,
)
from kvik.config.speculative import NO_SOURCE, DraftSource
from kvik.config.units import show_bytes
from kvik.core.config import CacheConfig, SchedulerConfig
from kvik.errors import CapacityError, ConfigError
from kvik.spec.kv import AUTO, KV_FORMATS

CROWDED = "no request would fit into memory beside them; decoding takes longer"


def resolve(
    config: EngineConfig,
    spec: ModelSpec,
    hardware: Hardware,
    model_path: str,
    source: DraftSource = NO_SOURCE,
    drawn_seed: int | None = None,
) -> ResolvedConfig:
    """Decide everything.

    Args:
        source: of drafts.
        drawn_seed: what the engine takes if no seed was asked for; None: nothing is started.

    Raises:
        ConfigError: a field that is out of range, or contradicts the model or another field.
        CapacityError: what was asked for cannot fit this machine; the message says what would.
    """
    config = check_config(config)
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
    footprint = _captured_if_it_fits(config, footprint, limit)
    size = choose_sizes(config, footprint, limit, notes)
    num_blocks = choose_num_blocks(config, footprint, size, limit, notes)
    size = cut_seqs(config, footprint, size, num_blocks, notes)
    _note_graphs(config, footprint, size, notes)
    speculation = choose_speculation(wish, size, footprint.groups, source, notes.add)
    threads = config.threads or hardware.cores
    notes.add(
        "threads",
        threads,
        ASKED if config.threads else f"cores this process may use: {hardware.cpu_name}",
    )
    seed = _choose_seed(config, drawn_seed, notes)
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
            seed=config.seed or 0,
            graph_sizes=footprint.graph_sizes(size),
            draft_graph_sizes=footprint.draft_graph_sizes(size),
            graph_memory=footprint.graphs(size),
        ),
        memory=plan,
        seed=seed,
        decisions=tuple(notes.decisions),
        speculation=speculation,
    )


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


def _choose_seed(config: EngineConfig, drawn_seed: int | None, notes: Notes) -> int:
    if config.seed is not None:
        return notes.add("seed", config.seed, ASKED)
    if drawn_seed is None:
        notes.add("seed", "random", "drawn at each start, for requests that bring none")
        return 0
    return notes.add("seed", drawn_seed, "drawn at this start, for requests that bring none")


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


def _captured_if_it_fits(config: EngineConfig, footprint: Footprint, limit: Limit) -> Footprint:
    """Without captured steps where no request fits beside them and nobody asked for them: an
    engine that starts is worth more than a fast one that does not."""
    if footprint.device == "cpu" or config.graph_memory is not None:
        return footprint
    try:
        choose_sizes(config, footprint, limit, Notes())
    except CapacityError:
        return replace(footprint, graph_memory=0)
    return footprint


def _note_graphs(config: EngineConfig, footprint: Footprint, size: StepSize, notes: Notes) -> None:
    """Of captured forwards, where any can be."""
    able = replace(footprint, graph_memory=None)
    sizes, drafting = able.graph_sizes(size), able.draft_graph_sizes(size)
    if footprint.graph_memory == 0 and (sizes or drafting):
        notes.add("cuda_graphs", "none", ASKED if config.graph_memory == 0 else CROWDED)
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


def choose_kv_format(config: EngineConfig, spec: ModelSpec, dtype: str, note: Note) -> None:
    """Write down what was asked for.

    Raises:
        ConfigError: the model has no such layers, or heads that the format cannot store.
    """
    name, skipped = config.kv_cache_dtype, sorted(set(config.kv_cache_dtype_skip_layers))
    for layer in skipped:
        if layer >= spec.num_layers:
            raise ConfigError(
                "kv_cache_dtype_skip_layers",
                f"must name layers from 0 to {spec.num_layers - 1}, not {layer}",
            )
    if name == AUTO:
        if skipped:
            raise ConfigError("kv_cache_dtype_skip_layers", "needs a kv_cache_dtype to keep out of")
        note("kv_cache_dtype", dtype, f"the model's{_calibrated(spec)}")
        return
    if name == "int4" and spec.head_dim % 2:
        raise ConfigError("kv_cache_dtype", f"int4 needs heads of even size, not {spec.head_dim}")
    reason = f"as asked: keys and values {KV_FORMATS[name].meaning}"
    if skipped:
        reason += f"; layers {', '.join(map(str, skipped))} in {dtype}"
    note("kv_cache_dtype", name, reason + _calibrated(spec))


def _calibrated(spec: ModelSpec) -> str:
    """What becomes of scales that the checkpoint has for keys and values."""
    if spec.quantization is None or not spec.quantization.kv_scales:
        return ""
    return "; the checkpoint's calibrated scales are not needed: each vector has its own"
