"""Options, facts of the model and facts of the machine -> every setting, each with its reason.

Pure: nothing is read, loaded or allocated here, so the plan is complete before the first byte of
weights is read, and a model that cannot fit is an error that says what would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvik.config.compute import BUILT_IN, built_in, choose_compute, settled, torch_prompts
from kvik.config.config import (
    ASKED,
    EngineConfig,
    Notes,
    ResolvedConfig,
    RunnerConfig,
    check_config,
    requested_speculation,
)
from kvik.config.draft_heads import EAGLE
from kvik.config.fit import Fit, choose_speculation, footprint_of, with_drafter
from kvik.config.hardware import Hardware
from kvik.config.kv_budget import KVBudgets, check_model
from kvik.config.parallel import (
    check_group,
    check_replicas,
    given_bytes,
    group_gpus,
    is_fast,
    repeated_bytes,
    replica_limit,
    replicas_reason,
    share_reason,
    stage_ends,
    stage_weights,
    stages_reason,
)
from kvik.config.speculative import NO_SOURCE, DraftSource
from kvik.core.config import CacheConfig, SchedulerConfig
from kvik.errors import ConfigError
from kvik.models.model_spec import ModelSpec
from kvik.spec.kv import AUTO, Budget, Window
from kvik.spec.weights import SCHEMES


def resolve(
    config: EngineConfig,
    spec: ModelSpec,
    hardware: Hardware,
    model_path: str,
    source: DraftSource = NO_SOURCE,
    drawn_seed: int | None = None,
    budgets: KVBudgets | None = None,
) -> ResolvedConfig:
    """Decide every setting of an engine.

    Args:
        source: where drafts come from.
        drawn_seed: seed of the engine if the options give none; None: no engine is started.
        budgets: tokens that layers keep, as the options' `kv_budget` says.

    Raises:
        ConfigError: a field that is out of range, or contradicts the model or another field.
        CapacityError: what was asked for cannot fit this machine; the message says what would.
    """
    config = check_config(config)
    if spec.built is None:
        config = as_stored(config, spec)
    if config.load_format == "random":
        spec = replace(spec, quantization=None, built=None)  # random weights are floats
    notes = Notes()
    if spec.fallback is not None:
        config = _of_fallback(config, spec, notes)
    elif config.fallback != "none":
        notes.add("fallback", "not needed", f"kvik runs {spec.architecture} itself")
    spec = as_budgeted(as_streamed(config, spec, notes), budgets, notes)
    if spec.built is not None:
        config = settled(config, spec.built, hardware)
        notes = Notes(dict.fromkeys(built_in(spec.built), BUILT_IN))
    compute, limit = choose_compute(config, spec, hardware, notes)
    if budgets is not None and compute.kind != "cpu":
        raise ConfigError("kv_budget", f"must be left out on {compute.device}: it is for CPUs")
    asked = requested_speculation(config)
    if spec.encoder:
        config = _of_encoder(config, spec, asked is not None)
    check_group(config, spec, compute, hardware)
    mapped = None if spec.built is None else spec.built.weight_bytes
    if compute.gpu is not None and config.tensor_parallel_size > 1:
        gpus = group_gpus(compute.gpu, config.tensor_parallel_size, hardware)
        least = min(gpu.free_memory for gpu in gpus)
        if least < compute.gpu.free_memory:  # all have as much of the model
            limit = replace(limit, size=int(least * config.memory_utilization))
    replicas = config.data_parallel_size
    check_replicas(config, compute, hardware)
    whole = limit
    if replicas > 1:
        limit = replica_limit(limit, replicas, compute, hardware, mapped)
    ends = stage_ends(config, spec, compute)
    if asked is not None and spec.states:
        raise ConfigError(
            "spec_method",
            f"must be left out: {spec.architecture} keeps states, which cannot take back drafts",
        )
    if ends and asked is not None and asked.method == EAGLE:
        raise ConfigError("pipeline_parallel_size", f"must be 1 with {EAGLE}: it reads embeddings")
    footprint = footprint_of(config, spec, hardware, compute, mapped)
    # Processes share the pages of a folder that is mapped.
    repeated = repeated_bytes(config, spec, compute) if mapped is None else 0
    apart = stage_weights(config, spec, compute, ends)
    given = given_bytes(config, spec)
    footprint = replace(footprint, repeated=repeated, stage_ends=ends, apart=apart, given=given)
    footprint = with_drafter(footprint, asked, source)
    footprint, size, num_blocks = Fit(config, footprint, limit).decide(notes)
    speculation = choose_speculation(asked, size, footprint.groups, source, notes)
    threads, reason = config.threads or hardware.threads, ASKED
    quota = hardware.cpu_quota if config.threads is None else None
    if config.threads is None:
        reason = f"cores this process may use: {hardware.cpu_name}"
    if quota is not None:
        reason = f"a cgroup grants {quota:g} cores' worth of time: {hardware.cpu_name}"
    ranks, fast = config.tensor_parallel_size, is_fast(config, compute)
    notes.add("threads", threads, reason)
    each = threads // (ranks * max(1, len(ends)) * replicas)
    if replicas > 1:
        told = replicas_reason(threads, replicas, compute, whole, limit, mapped)
        notes.add("data_parallel_size", replicas, told)
    if ends:
        notes.add("pipeline_parallel_size", len(ends), stages_reason(ends, ranks))
    if ranks > 1:
        told = share_reason(spec, threads, each, ranks, compute=compute, fast=fast)
        notes.add("tensor_parallel_size", ranks, told)
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
            stages=max(1, len(ends)),
            whole_prompts=spec.encoder,
        ),
        runner=RunnerConfig(
            model_path=model_path,
            dtype=compute.dtype,
            device=compute.device,
            attention_backend=compute.attention,
            torch_prompts=torch_prompts(compute.attention, spec, compute.gpu),
            threads=each,
            adapt_threads=config.threads is None and ranks == 1 and not ends,
            cpu_quota=quota and quota / replicas,
            kernels=compute.kernels,
            load_format=config.load_format,
            engine_cache=config.engine_cache,
            quantization=config.quantization,
            seed=config.seed or 0,
            graph_sizes=footprint.graph_sizes(size),
            draft_graph_sizes=footprint.draft_graph_sizes(size),
            graph_memory=footprint.graphs(size),
            ranks=ranks,
            stage_ends=ends,
            backend=config.distributed_executor_backend,
            expert_parallel=config.expert_parallel,
            fast_cut=fast,
            replicas=replicas,
        ),
        memory=footprint.plan(size, num_blocks, limit),
        seed=seed,
        decisions=tuple(notes.decisions),
        speculation=speculation,
        chat_template=config.chat_template,
    )


def _of_encoder(config: EngineConfig, spec: ModelSpec, drafts: bool) -> EngineConfig:
    """Return the options of an encoder, of whose prompts nothing is kept.

    Raises:
        ConfigError: one of them is for models that write text.
    """
    whole = f"{spec.architecture} is an encoder"
    if drafts:
        raise ConfigError("spec_method", f"must be left out: {whole}, which writes no text")
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(config, name) != 1:
            raise ConfigError(name, f"must be 1: {whole}, which runs in one process")
    return replace(config, enable_prefix_caching=False)


# What a model that runs through transformers cannot be asked for, and what it gets.
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
}


def _of_fallback(config: EngineConfig, spec: ModelSpec, notes: Notes) -> EngineConfig:
    """Return the options of a model that runs through transformers.

    Raises:
        ConfigError: one of them is for models that kvik runs itself.
    """
    why = f"{spec.architecture} runs through transformers"
    for name, only in FALLBACK_ALONE.items():
        if getattr(config, name) != only:
            value = "left out" if only in (None, ()) else str(only)
            raise ConfigError(name, f"must be {value}: {why}")
    if requested_speculation(config) is not None:
        raise ConfigError("spec_method", f"must be left out: {why}")
    notes.add(
        "fallback",
        config.fallback,
        f"kvik does not know {spec.architecture}: requests are computed one after the other, "
        "without prefix caching, quantised weights or keys, speculation and parallelism",
    )
    return replace(config, enable_prefix_caching=False)


def as_stored(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Return the options without a quantization that is the one of the files.

    Raises:
        ConfigError: it is a way to store weights, and the files have another.
    """
    asked, stored = config.quantization, spec.quantization
    if stored is not None and asked == stored.method:
        return replace(config, quantization="none")
    if asked not in SCHEMES:
        found = f"as {stored.method}" if stored is not None else "as plain floats"
        raise ConfigError(
            "quantization",
            f"is {asked}, but the files store the weights {found}; while they are loaded they can "
            f"become {', '.join(scheme for scheme in SCHEMES if scheme != 'none')}",
        )
    return config


def as_streamed(config: EngineConfig, spec: ModelSpec, notes: Notes) -> ModelSpec:
    """Return the model with the window that the options ask for in every layer.

    Raises:
        ConfigError: the model cannot be run so.
    """
    if config.window is None:
        return spec
    name = spec.architecture
    for wrong, reason in (
        (spec.latent is not None, "attends over latent vectors"),
        (bool(spec.states), "has layers that keep states"),
        (any(spec.windows), "has windows of its own"),
        (not spec.ropes, "has learned positions, which end"),
        (len(spec.rotations) > 1, "turns layers in several ways"),
        (any(rope.query_beta for rope in spec.ropes), "scales queries by their positions"),
        (bool(spec.query_scales), "scales queries by their positions"),
    ):
        if wrong:
            raise ConfigError("window", f"must be left out: {name} {reason}")
    window = Window(config.window, sinks=config.attention_sinks)
    if window.most > spec.max_context:
        raise ConfigError(
            "window",
            f"must be at most {spec.max_context - window.sinks} beside {window.sinks} sinks, as "
            f"the model's context is {spec.max_context}, not {window.keys}",
        )
    notes.add("window", window.keys, ASKED)
    reason = f"{ASKED}: of each request KV of at most {window.most} tokens and of a step is kept"
    notes.add("attention_sinks", window.sinks, reason)
    ropes = {rope: replace(rope, most_keys=window.most) for rope in spec.ropes}
    layers = (
        replace(layer, window=window, rope=layer.rope and ropes[layer.rope])
        for layer in spec.layers
    )
    return replace(spec, layers=tuple(layers))


def as_budgeted(spec: ModelSpec, budgets: KVBudgets | None, notes: Notes) -> ModelSpec:
    """Return the model whose layers keep as many tokens as a file says.

    Raises:
        ConfigError: its layers cannot.
    """
    if budgets is None:
        return spec
    check_model(spec)
    least, most = min(budgets.budgets), max(budgets.budgets)
    value = f"{least} tokens" if least == most else f"{least} to {most} tokens"
    reason = "lossy: answers to long prompts are not those of the model"
    notes.add("kv_budget", value, f"{reason}; by {budgets.by}, {ASKED}")
    layers = (
        replace(layer, budget=Budget(tokens))
        for layer, tokens in zip(spec.layers, budgets.budgets, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def _choose_seed(config: EngineConfig, drawn_seed: int | None, notes: Notes) -> int:
    if config.seed is not None:
        return notes.add("seed", config.seed, ASKED)
    if drawn_seed is None:
        notes.add("seed", "random", "drawn at each start, for requests that bring none")
        return 0
    return notes.add("seed", drawn_seed, "drawn at this start, for requests that bring none")
