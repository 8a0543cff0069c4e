"""Derive every setting, with its reason, from options and facts about the model and the machine.

Pure: nothing is read, loaded or allocated here, so the plan is complete before the first byte of
weights is read, and a model that cannot fit raises an error that says what would fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from kvik.config.compute import BUILT_IN, Compute, built_in, choose_compute, settled, torch_prompts
from kvik.config.config import (
    ASKED,
    EngineConfig,
    Notes,
    ResolvedConfig,
    RunnerConfig,
    TierOptions,
    batch_size,
    check_config,
    read_tiers,
    requested_speculation,
)
from kvik.config.fit import (
    Fit,
    choose_speculation,
    draft_tokens,
    footprint_of,
    with_adapters,
    with_drafter,
)
from kvik.config.hardware import Hardware
from kvik.config.kv_budget import KVBudgets, check_model
from kvik.config.memory import Footprint, Limit
from kvik.config.parallel import (
    check_group,
    check_replicas,
    experts_of_layers,
    given_bytes,
    gpus_of,
    is_fast,
    repeated_bytes,
    replica_limit,
    replicas_reason,
    share_reason,
    stage_ends,
    stage_weights,
    stages_reason,
)
from kvik.config.speculative import (
    DIVIDED_METHODS,
    MTP,
    NO_SOURCE,
    DraftSource,
    ResolvedSpeculation,
    SpeculativeConfig,
)
from kvik.config.step_memory import StepSize
from kvik.config.units import show_bytes
from kvik.core.config import CacheConfig, SchedulerConfig, TierSizes
from kvik.errors import CapacityError, ConfigError
from kvik.models.model_spec import ModelSpec
from kvik.spec.adapters import Adapter
from kvik.spec.kv import AUTO, PAGE_HEAD_BYTES, state_pages
from kvik.spec.visible_keys import Budget, Window
from kvik.spec.weights import SCHEMES

TIERS = "kv_tiers"
PREFILL_TIER = 1 << 30  # default memory tier of a prefill server, in bytes


def resolve(
    config: EngineConfig,
    spec: ModelSpec,
    hardware: Hardware,
    model_path: str,
    source: DraftSource = NO_SOURCE,
    drawn_seed: int | None = None,
    budgets: KVBudgets | None = None,
    adapters: tuple[Adapter, ...] = (),
    *,
    moves: bool = False,
) -> ResolvedConfig:
    """Decide every setting of an engine.

    Args:
        source: where drafts come from.
        drawn_seed: random seed for options without one; None: no engine is started.
        budgets: contents of the options' `kv_budget` file.
        adapters: those of the options.
        moves: see `resolve_config`.

    Raises:
        ConfigError: a field is out of range, or contradicts the model or another field.
        CapacityError: the engine does not fit this machine; the message says what would fit.
    """
    config = check_config(config)
    if spec.built is None:
        config = as_stored(config, spec)
    if config.load_format == "random":
        spec = replace(spec, quantization=None, built=None)  # random weights are floats
    built = spec.built
    notes = Notes() if built is None else Notes(dict.fromkeys(built_in(built), BUILT_IN))
    config, spec = _with_options(config, spec, budgets, notes)
    if built is not None:
        config = settled(config, built, hardware)
    compute, limit = choose_compute(config, spec, hardware, notes)
    requested = requested_speculation(config)
    if spec.encoder:
        config = _of_encoder(config, spec, requested is not None)
    check_group(config, spec, compute, hardware)
    check_replicas(config, compute, hardware)
    tiers = check_tiers(config, spec, compute, moves=moves)
    mapped = None if built is None else built.weight_bytes
    replicas, total = config.data_parallel_size, _of_fullest(limit, config, compute, hardware)
    limit = replica_limit(total, replicas, compute, hardware, mapped) if replicas > 1 else total
    if requested is not None:
        spec = as_drafting(requested, spec, source)
    ends = stage_ends(config, spec, compute, source)
    footprint = footprint_of(config, spec, hardware, compute, mapped)
    footprint = _divided(footprint, config, compute, ends)
    footprint = with_drafter(footprint, requested, source)
    footprint = with_adapters(footprint, config, adapters, notes)
    rest = less_memory_tier(limit, tiers, compute, hardware, replicas)
    footprint, size, num_blocks = Fit(config, footprint, rest).decide(notes)
    speculation = choose_speculation(requested, size, footprint.groups, source, notes)
    threads = config.threads or hardware.threads
    quota = hardware.cpu_quota if config.threads is None else None
    notes.add("threads", threads, _threads_reason(config, hardware))
    ranks, fast = config.tensor_parallel_size, is_fast(config, compute)
    threads_each = threads // (ranks * max(1, len(ends)) * replicas)
    if replicas > 1:
        reason = replicas_reason(threads, replicas, compute, total, limit, mapped)
        notes.add("data_parallel_size", replicas, reason)
    if ends:
        notes.add("pipeline_parallel_size", len(ends), stages_reason(ends, ranks))
    if ranks > 1:
        reason = share_reason(spec, threads, threads_each, ranks, compute=compute, fast=fast)
        notes.add("tensor_parallel_size", ranks, reason)
    if config.role != "both":
        reason = "computes prompts for others" if config.role == "prefill" else "fetches prompts"
        notes.add("role", config.role, f"{ASKED}: {reason}")
    seed = _choose_seed(config, drawn_seed, notes)
    return ResolvedConfig(
        model=spec,
        cache=CacheConfig(
            config.block_size,
            num_blocks,
            footprint.groups,
            config.enable_prefix_caching,
            checkpoints=footprint.num_checkpoints(size) if spec.states else None,
            private=spec.fallback is not None,
            tiers=tier_sizes(
                tiers,
                _paged(footprint, speculation),
                config.block_size,
                notes,
                state_bytes=spec.state_bytes,
            ),
        ),
        scheduler=_scheduler(config, spec, size, speculation, len(ends)),
        runner=RunnerConfig(
            model_path=model_path,
            dtype=compute.dtype,
            device=compute.device,
            attention_backend=compute.attention,
            torch_prompts=torch_prompts(compute.attention, spec, compute.gpu),
            threads=threads_each,
            adapt_threads=config.threads is None and ranks == 1 and not ends,
            cpu_quota=quota and quota / replicas,
            kernels=compute.kernels,
            load_format=config.load_format,
            engine_cache=config.engine_cache,
            kv_folder=None if tiers is None else tiers.folder,
            kv_listen=config.kv_listen if tiers is not None and tiers.lends else None,
            quantization=config.quantization,
            seed=config.seed or 0,
            lora=config.lora,
            adapters=adapters,
            max_adapters=0 if footprint.adapters is None else footprint.adapters.slots,
            adapter_ranks={} if footprint.adapters is None else footprint.adapters.ranks,
            graph_sizes=footprint.graph_sizes(size),
            draft_graph_sizes=footprint.draft_graph_sizes(size),
            graph_memory=footprint.graphs(size),
            ranks=ranks,
            stage_ends=ends,
            backend=config.distributed_executor_backend,
            expert_parallel=config.expert_parallel,
            fast_cut=fast,
            replicas=replicas,
            role=config.role,
        ),
        memory=replace(footprint.plan(size, num_blocks, limit), kv_tiers=limit.size - rest.size),
        seed=seed,
        decisions=tuple(notes.decisions),
        speculation=speculation,
        chat_template=config.chat_template,
    )


def _divided(
    footprint: Footprint, config: EngineConfig, compute: Compute, ends: tuple[int, ...]
) -> Footprint:
    """Return the footprint of the processes and stages that divide the model."""
    spec = footprint.spec
    # Processes share the mapped pages of an engine folder.
    repeated = repeated_bytes(config, spec, compute) if footprint.mapped is None else 0
    stage_bytes = stage_weights(config, spec, compute, ends)
    footprint = replace(
        footprint,
        repeated=repeated,
        whole_experts=min(experts_of_layers(spec)) if config.expert_parallel else 0,
        output_bytes=given_bytes(config, spec, compute),
        stage_ends=ends,
    )
    return replace(footprint, stage_bytes=tuple(map(footprint.own_share, stage_bytes)))


def _scheduler(
    config: EngineConfig,
    spec: ModelSpec,
    size: StepSize,
    speculation: ResolvedSpeculation | None,
    stages: int,
) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=size.max_num_seqs,
        max_num_batched_tokens=size.max_num_batched_tokens,
        max_model_len=size.max_model_len,
        policy=config.policy,
        batch_size=batch_size(config),
        max_wait=config.max_wait,
        ageing=config.ageing,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        num_lookahead_tokens=speculation.num_lookahead_tokens if speculation else 0,
        stages=max(1, stages),
        whole_prompts=spec.encoder,
    )


def _with_options(
    config: EngineConfig, spec: ModelSpec, budgets: KVBudgets | None, notes: Notes
) -> tuple[EngineConfig, ModelSpec]:
    """Return the options adapted to the model, and the model as the options change it. Raises
    ConfigError if the model does not support the change."""
    if spec.fallback is not None:
        config = _of_fallback(config, spec, notes)
    elif config.fallback != "none":
        notes.add("fallback", "not needed", f"kvik runs {spec.architecture} itself")
    _check_adapted(config, spec)
    if config.lora is not None:
        notes.add("lora", Path(config.lora).name, "merged into the weights when they are loaded")
    return config, as_budgeted(as_streamed(config, spec, notes), budgets, notes)


def _of_fullest(limit: Limit, config: EngineConfig, compute: Compute, hardware: Hardware) -> Limit:
    """Return the limit of the GPU with the least memory, as the plan is for all."""
    if compute.gpu is None or config.tensor_parallel_size * config.pipeline_parallel_size == 1:
        return limit
    gpus = gpus_of(config, compute.gpu, hardware)
    smallest = min(gpu.free_memory for gpu in gpus)
    if smallest >= compute.gpu.free_memory:
        return limit
    return replace(limit, size=int(smallest * config.memory_utilization))


@lru_cache(maxsize=16)  # a planner asks for many settings, and what a model declares takes time
def as_drafting(options: SpeculativeConfig, spec: ModelSpec, source: DraftSource) -> ModelSpec:
    """Return the model with room for drafts in its states, and with its own head if that drafts.
    Raises ConfigError if the model does not support this method."""
    if options.method in DIVIDED_METHODS:
        _check_divided(options.method, spec)
    if options.method == MTP:
        spec = _predicting(spec)
    drafts = draft_tokens(options)
    if source.heads is not None:  # states need a chain, of one draft for each depth
        drafts = min(drafts, source.heads.depth)
    layers = (
        replace(layer, state=layer.state and replace(layer.state, drafts=drafts))
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


def _check_divided(method: str, spec: ModelSpec) -> None:
    """Raise ConfigError if the engine lacks what methods need that read hidden states or keys of
    all tokens."""
    if any(layer.budget for layer in spec.layers):
        reason = (
            f"must be another one than {method}: it reads all keys, of which kv_budget drops some"
        )
        raise ConfigError("spec_method", reason)


def _predicting(spec: ModelSpec) -> ModelSpec:
    """Return the model with its head for multi-token prediction; raise ConfigError without one."""
    if spec.family.predictor is None:
        reason = f"kvik knows no head of {spec.architecture} that predicts further tokens"
        raise ConfigError("spec_method", f"must be another one than {MTP}: {reason}")
    return replace(spec, predictor=spec.family.predictor)


def _threads_reason(config: EngineConfig, hardware: Hardware) -> str:
    if config.threads is not None:
        return ASKED
    if hardware.cpu_quota is not None:
        quota = f"a cgroup grants {hardware.cpu_quota:g} cores' worth of time"
        return f"{quota}: {hardware.cpu_name}"
    return f"cores this process may use: {hardware.cpu_name}"


def _of_encoder(config: EngineConfig, spec: ModelSpec, drafts: bool) -> EngineConfig:
    """Return the options of an encoder, which keeps no keys and values. Raises ConfigError for an
    option of models that generate text."""
    kind = f"{spec.architecture} is an encoder"
    if drafts:
        raise ConfigError("spec_method", f"must be left out: {kind}, which writes no text")
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(config, name) != 1:
            raise ConfigError(name, f"must be 1: {kind}, which runs in one process")
    return replace(config, enable_prefix_caching=False)


# Options that a model running through transformers does not support, with their only value.
FALLBACK_ALONE: Mapping[str, object] = {
    "quantization": "none",
    "kv_cache_dtype": AUTO,
    "kv_cache_dtype_skip_layers": (),
    "window": None,
    "kernels": "auto",
    "attention_backend": "auto",
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "engine_cache": None,
    "kv_tiers": None,
    "lora": None,
    "adapters": (),
    "max_adapters": None,
    "max_adapter_rank": None,
}


def _check_adapted(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise ConfigError if the weights do not allow the adapters."""
    if spec.built is not None:
        reason = "an engine folder has its weights in their final form"
        if config.lora is not None:
            raise ConfigError("lora", f"must be left out: {reason}: build it with the adapter")
        for option in ("adapters", "max_adapters"):
            if getattr(config, option):
                raise ConfigError(option, f"must be left out: {reason}: name the model's files")
    if config.lora is not None and config.load_format != "safetensors":
        raise ConfigError("lora", f"must be left out: the weights are {config.load_format}")


def _of_fallback(config: EngineConfig, spec: ModelSpec, notes: Notes) -> EngineConfig:
    """Return the options of a model that runs through transformers. Raises ConfigError for an
    option of models that kvik runs itself."""
    reason = f"{spec.architecture} runs through transformers"
    for name, only in FALLBACK_ALONE.items():
        if getattr(config, name) != only:
            value = "left out" if only in (None, ()) else str(only)
            raise ConfigError(name, f"must be {value}: {reason}")
    if requested_speculation(config) is not None:
        raise ConfigError("spec_method", f"must be left out: {reason}")
    notes.add(
        "fallback",
        config.fallback,
        f"kvik does not know {spec.architecture}: requests are computed one after the other, "
        "without prefix caching, quantised weights or KV cache, speculation or parallelism",
    )
    return replace(config, enable_prefix_caching=False)


def as_stored(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Return the options without a quantization that the files already have.

    Raises:
        ConfigError: it is a stored format, but not the one of the files.
    """
    requested, stored = config.quantization, spec.quantization
    if stored is not None and requested == stored.method:
        return replace(config, quantization="none")
    if requested not in SCHEMES:
        stored_as = f"as {stored.method}" if stored is not None else "as plain floats"
        raise ConfigError(
            "quantization",
            f"is {requested}, but the files store the weights {stored_as}; while they are loaded "
            f"they can become {', '.join(scheme for scheme in SCHEMES if scheme != 'none')}",
        )
    return config


def as_streamed(config: EngineConfig, spec: ModelSpec, notes: Notes) -> ModelSpec:
    """Return the model with the requested window in the layers whose queries see all keys. Raises
    ConfigError if the model does not support it."""
    if config.window is None:
        return spec
    name = spec.architecture
    full = spec.full_layers
    for wrong, reason in (
        (spec.latent is not None, "attends over latent vectors"),
        (spec.indexed > 0, "has layers that choose keys"),
        (spec.compressed, "keeps entries that sum up tokens"),
        (not full, "has no layers that see all keys"),
        (
            not spec.ropes and not spec.states and not any(layer.slopes for layer in spec.layers),
            "has learned positions, which end",
        ),
        (
            bool(spec.query_scales) or any(rope.query_beta for rope in spec.ropes),
            "scales queries by their positions",
        ),
        (any(rope.then_normed for rope in spec.ropes), "normalises heads after turning them"),
    ):
        if wrong:
            raise ConfigError("window", f"must be left out: {name} {reason}")
    window = Window(config.window, sinks=config.attention_sinks)
    if window.max_keys > spec.max_context:
        raise ConfigError(
            "window",
            f"must be at most {spec.max_context - window.sinks} with {window.sinks} sinks, as "
            f"the model's context is {spec.max_context}, not {window.keys}",
        )
    notes.add("window", window.keys, ASKED)
    reason = f"{ASKED}: each request keeps the KV of at most {window.max_keys} tokens and one step"
    notes.add("attention_sinks", window.sinks, reason)
    ropes = {rope: replace(rope, most_keys=window.max_keys) for rope in spec.ropes}
    layers = (
        replace(
            layer,
            window=window if i in full else layer.window,
            rope=layer.rope and ropes[layer.rope],
        )
        for i, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def as_budgeted(spec: ModelSpec, budgets: KVBudgets | None, notes: Notes) -> ModelSpec:
    """Return the model with the budgets of a file in its layers. Raises ConfigError if they do not
    support budgets."""
    if budgets is None:
        return spec
    check_model(spec)
    kept = [tokens for tokens in budgets.budgets if tokens is not None]
    smallest, largest = min(kept), max(kept)
    value = f"{smallest} tokens" if smallest == largest else f"{smallest} to {largest} tokens"
    reason = "lossy: answers to long prompts are not those of the model"
    notes.add("kv_budget", value, f"{reason}; by {budgets.by}, {ASKED}")
    layers = (
        replace(layer, budget=None if tokens is None else Budget(tokens))
        for layer, tokens in zip(spec.layers, budgets.budgets, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def check_tiers(
    config: EngineConfig, spec: ModelSpec, compute: Compute, *, moves: bool
) -> TierOptions | None:
    """Return the tiers of an engine; raise ConfigError if it does not support them."""
    if config.kv_tiers is None and config.role == "both":
        return None
    tiers = TierOptions() if config.kv_tiers is None else read_tiers(config.kv_tiers)
    if config.role == "prefill" and not tiers.memory:
        if config.kv_tiers is not None:
            reason = "must have a memory tier for role prefill, such as memory:1GiB"
            raise ConfigError(TIERS, f"{reason}: others fetch its pages")
        tiers = replace(tiers, memory=PREFILL_TIER)
    # Handing requests over with their pages needs a memory tier.
    moved = tiers.memory > 0 and (config.data_parallel_size > 1 or moves)
    tiers = replace(
        tiers, peers=config.role == "decode" or moved, lends=config.role == "prefill" or moved
    )
    for wrong, reason in (
        (spec.encoder, f"{spec.architecture} is an encoder, of whose prompts nothing is kept"),
        (
            compute.gpu is not None
            and (config.tensor_parallel_size > 1 or config.pipeline_parallel_size > 1),
            "blocks of several GPUs are not moved yet",
        ),
        (
            config.distributed_executor_backend == "ray",
            "stages on machines of their own share no memory for pages; "
            "distributed_executor_backend mp has tiers",
        ),
        (not config.enable_prefix_caching, "it needs enable_prefix_caching"),
    ):
        if wrong:
            if config.kv_tiers is None:
                raise ConfigError("role", f"must be both: {reason}")
            raise ConfigError(TIERS, f"must be left out: {reason}")
    return tiers


def less_memory_tier(
    limit: Limit, tiers: TierOptions | None, compute: Compute, hardware: Hardware, replicas: int
) -> Limit:
    """Return the limit minus the memory tier, unless the model is in other memory, of a GPU. Raises
    CapacityError if the tier leaves no memory."""
    if tiers is None or not tiers.memory:
        return limit
    size, host = show_bytes(tiers.memory), limit
    if compute.gpu is not None:
        host = Limit(hardware.memory_limit // replicas, hardware.memory_reason)
    if tiers.memory >= host.size:
        for_what = "the model" if compute.gpu is None else "the host"
        reason = f"must leave memory for {for_what}: memory:{size} of {show_bytes(host.size)}"
        raise CapacityError(TIERS, f"{reason} allowed ({host.source})")
    if compute.gpu is not None:
        return limit
    return Limit(limit.size - tiers.memory, f"{limit.source}, less the {size} of kv_tiers")


def _paged(footprint: Footprint, speculation: ResolvedSpeculation | None) -> list[int]:
    """Return the bytes of a token in a page of each KV group: of its layers, and of a head that has
    the same blocks."""
    sizes = [group.bytes_per_token for group in footprint.groups]
    if speculation is not None and speculation.paged and footprint.draft is not None:
        head = footprint.draft.groups
        sizes[speculation.draft_group] += sum(group.bytes_per_token for group in head)
    return sizes


def tier_sizes(
    tiers: TierOptions | None,
    groups: Sequence[int],
    block_size: int,
    notes: Notes,
    *,
    state_bytes: int,
) -> TierSizes | None:
    """Return the sizes of the tiers in pages.

    Args:
        groups: bytes of a token in a page of each KV group.
        state_bytes: of the states of a request.

    Raises:
        CapacityError: one is smaller than a page, and the states of a request.
    """
    if tiers is None:
        return None
    pages = tuple(PAGE_HEAD_BYTES + size * block_size for size in groups)
    largest = max(pages)
    count, page_of_states = state_pages(state_bytes, largest) if state_bytes else (0, 0)
    min_bytes, states = largest + count * max(largest, page_of_states), ""
    if count:
        states = f", with {show_bytes(count * page_of_states)} for each state"
    for name, size in (("memory", tiers.memory), ("disk", tiers.disk)):
        if 0 < size < min_bytes:
            reason = (
                f"must have at least {min_bytes} bytes for one page of {block_size} tokens{states}"
            )
            raise CapacityError(TIERS, f"{reason}; {name} has {size}")
    parts = [
        f"{name} {show_bytes(size)} (about {size // sum(pages) * block_size:,} tokens)"
        for name, size in (("memory", tiers.memory), ("disk", tiers.disk))
        if size
    ]
    parts += ["peers have what they computed"] if tiers.peers else []
    size_of_page = f"{sum(pages) / 1024:,.0f} KiB"
    page = f"pages of {block_size} tokens, {size_of_page}{states}"
    loaded = "prefixes and preempted requests are loaded if that is faster than computing them"
    reason = f"{ASKED}: {page}; {loaded}, as measured"
    notes.add(
        TIERS, "+".join(name.split()[0] for name in parts), "; ".join([reason, ", ".join(parts)])
    )
    pages += (page_of_states,) if count else ()
    places = tiers.memory // max(pages)
    return TierSizes(pages, places, tiers.disk, tiers.peers, tiers.lends, state_pages=count)


def _choose_seed(config: EngineConfig, drawn_seed: int | None, notes: Notes) -> int:
    if config.seed is not None:
        return notes.add("seed", config.seed, ASKED)
    if drawn_seed is None:
        notes.add("seed", "random", "drawn at each start, for requests without one")
        return 0
    return notes.add("seed", drawn_seed, "drawn at this start, for requests without one")
