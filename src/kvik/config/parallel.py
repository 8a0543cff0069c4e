"""Requirements for dividing a model among processes, and the resources of several engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvik.config.compute import Compute
from kvik.config.config import ASKED, EngineConfig, ResolvedConfig, requested_speculation
from kvik.config.hardware import Gpu, Hardware, detect
from kvik.config.memory import Limit
from kvik.config.speculative import EMBEDDING_METHODS, NO_SOURCE, DraftSource
from kvik.config.units import show_bytes
from kvik.errors import CapacityError, ConfigError
from kvik.models.model_spec import ModelSpec
from kvik.spec.kv import stored_as
from kvik.spec.model import DTYPE_BYTES
from kvik.spec.shares import HeadShare, PipelineStage, stages_of
from kvik.spec.weights import matrix_kind

OPTION = "tensor_parallel_size"
STAGES = "pipeline_parallel_size"
CUT = "tensor_parallel_cut"
REPLICAS = "data_parallel_size"


def check_group(
    config: EngineConfig, spec: ModelSpec, compute: Compute, hardware: Hardware
) -> None:
    """Raise ConfigError, which names the obstacle, if a process of a group could not compute, or
    would have nothing to compute."""
    ranks, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    option = STAGES if stages > 1 else OPTION
    if config.distributed_executor_backend == "ray" and stages == 1:
        reason = f"can be ray only with {STAGES} of 2 or more: Ray places the stages of a pipeline"
        raise ConfigError("distributed_executor_backend", reason)
    if config.expert_parallel:
        experts = experts_of_layers(spec)
        if ranks == 1:
            raise ConfigError("expert_parallel", f"can be true only with {OPTION} of 2 or more")
        if not experts:
            raise ConfigError(
                "expert_parallel", f"must be false: {spec.architecture} has no experts"
            )
        if min(experts) < ranks:
            reason = f"must be false: {ranks} processes cannot share {min(experts)} experts"
            raise ConfigError("expert_parallel", reason)
    if ranks * stages == 1:
        return
    native = compute.kernels == "native" and compute.attention == "cpu"
    if not native:
        _check_torch(config, spec, compute, hardware)
    elif config.tensor_parallel_cut == "fast":
        raise ConfigError(CUT, "must be exact with the native kernels, which keep every bit")
    heads, threads = spec.divisible_heads, config.threads or hardware.threads
    if ranks > heads:
        parts = "query heads" if heads == spec.num_heads else "groups of query heads"
        reason = f"must be at most {heads}, the number of its {parts}, not {ranks}"
        raise ConfigError(OPTION, reason)
    if ranks * stages > threads and compute.gpu is None:
        limit = threads // ranks if stages > 1 else threads
        requested = stages if stages > 1 else ranks
        per_stage = f", {ranks} for each stage" if ranks > 1 and stages > 1 else ""
        reason = (
            f"must be at most {limit}, as there are {threads} threads{per_stage}, not {requested}"
        )
        raise ConfigError(option, reason)
    if stages > 1 and any(layer.token_input for layer in spec.layers):
        why = f"{spec.architecture} reads vectors of tokens in its layers"
        raise ConfigError(STAGES, f"must be 1: {why}")
    if stages > 1 and any(layer.shortcut for layer in spec.layers):
        why = f"experts of {spec.architecture} are a shortcut past layers"
        raise ConfigError(STAGES, f"must be 1: {why}")


def experts_of_layers(spec: ModelSpec) -> list[int]:
    """Return the number of routed experts of each layer that has some."""
    return [layer.experts.router.experts for layer in spec.layers if layer.experts]


def _check_torch(
    config: EngineConfig, spec: ModelSpec, compute: Compute, hardware: Hardware
) -> None:
    """Check processes whose groups use torch.distributed."""
    option = STAGES if config.pipeline_parallel_size > 1 else OPTION
    kernels = f"{compute.kernels} kernels with {compute.attention} attention"
    if compute.kernels == "native":
        reason = "kernels torch, or native ones with their own attention"
        raise ConfigError(option, f"must be 1 with {kernels}: several processes need {reason}")
    if not hardware.native:
        reason = "kvik was installed without its native module, by which processes watch each other"
        raise ConfigError(option, f"must be 1: {reason}")
    if config.expert_parallel and config.tensor_parallel_cut == "exact":
        reason = f"must be fast or auto with {kernels} and whole experts, as these divide a sum"
        raise ConfigError(CUT, reason)
    if spec.built is not None:
        raise ConfigError(option, f"must be 1 with an engine folder for {compute.kernels} kernels")
    if config.engine_cache is not None:
        reason = f"must be left out with {kernels} in several processes"
        raise ConfigError("engine_cache", reason)
    if compute.gpu is not None:
        gpus_of(config, compute.gpu, hardware)


def gpus_of(config: EngineConfig, first: Gpu, hardware: Hardware) -> list[Gpu]:
    """Return the GPUs of an engine on this machine: consecutive ones from `first` on, one for each
    process.

    Raises:
        ConfigError: some do not exist, or they are of different models.
    """
    count, option = config.tensor_parallel_size, OPTION
    if config.pipeline_parallel_size > 1 and config.distributed_executor_backend == "mp":
        count, option = count * config.pipeline_parallel_size, STAGES
    gpus = {gpu.index: gpu for gpu in hardware.gpus}
    indices = range(first.index, first.index + count)
    missing = [f"cuda:{index}" for index in indices if index not in gpus]
    if missing:
        visible = ", ".join(f"cuda:{index}" for index in sorted(gpus))
        reason = f"needs a GPU for each of {count} processes, and {missing[0]} is not there"
        raise ConfigError(option, f"{reason} (CUDA devices: {visible})")
    names = {gpus[index].name for index in indices}
    if len(names) > 1:
        kinds = " and ".join(sorted(names))
        raise ConfigError(option, f"needs GPUs of one kind, not {kinds}")
    return [gpus[index] for index in indices]


def is_fast(config: EngineConfig, compute: Compute) -> bool:
    """Return whether matrices are divided by the fast cut."""
    if config.tensor_parallel_size == 1:
        return False
    cut, native = config.tensor_parallel_cut, compute.kernels == "native"
    divides_sums = compute.gpu is not None or (config.expert_parallel and not native)
    return cut == "fast" or (cut == "auto" and divides_sums)


def stage_ends(
    config: EngineConfig, spec: ModelSpec, compute: Compute, source: DraftSource = NO_SOURCE
) -> tuple[int, ...]:
    """Return the end of the layers of each stage, such that all stages have about the same bytes of
    weights and of keys and values of one request.

    Args:
        source: what drafts in the last stage.

    Raises:
        ConfigError: the layers cannot be divided so.
    """
    stages = config.pipeline_parallel_size
    if stages == 1:
        return ()
    weights, first, last = _weights_of_parts(config, spec, compute)
    length = config.max_model_len or spec.max_position_embeddings
    specs = spec.kv_specs(DTYPE_BYTES[compute.dtype])
    stored_specs = stored_as(specs, config.kv_cache_dtype, config.kv_cache_dtype_skip_layers)
    cached = [length * kv.bytes_per_token if kv else 0 for kv in stored_specs]
    heads = cached[spec.num_layers : len(spec.cached_layers)]
    costs = [
        size + cached[layer] + sum(cached[number] for number in spec.entries_of(layer))
        for layer, size in enumerate(weights)
    ]
    end = spec.num_layers - 1
    joined = spec.joined_layers + [(end, layer) for layer in source.read_layers if layer < end]
    try:
        return tuple(run.stop for run in stages_of(costs, first, last + sum(heads), stages, joined))
    except ValueError as error:
        raise ConfigError(STAGES, f"cannot be {stages}: {error}") from None


def stage_weights(
    config: EngineConfig, spec: ModelSpec, compute: Compute, ends: Sequence[int]
) -> tuple[int, ...]:
    """Return the bytes of the weights of each stage if stages are on separate machines or GPUs; ()
    if they share the memory of this machine."""
    if config.distributed_executor_backend != "ray" and compute.gpu is None:
        return ()
    weights, first, last = _weights_of_parts(config, spec, compute)
    return tuple(
        sum(weights[layer] for layer in stage.layers) + first * stage.first + last * stage.last
        for stage in PipelineStage.all_of(ends)
    )


def _weights_of_parts(
    config: EngineConfig, spec: ModelSpec, compute: Compute
) -> tuple[list[int], int, int]:
    """Return the bytes of each layer, of what is before the first one, and of what is after the
    last one: the head, and what drafts of the model's weights."""
    head, tied = _head_bytes(config, spec, compute), spec.tie_word_embeddings
    table = spec.declaration.embedding.num_parameters * DTYPE_BYTES[compute.dtype]
    first = head if tied else table
    blocks = spec.weight_bytes(compute.dtype, config.quantization, compute.kernels)
    blocks = max(0, blocks - (head if tied else head + first))
    scope = spec.predictor_scope
    numbers = [
        sum(linear.num_parameters for linear in spec.declaration.of_block(layer))
        for layer in range(spec.num_layers)
    ]
    numbers.append(
        sum(
            linear.num_parameters
            for linear in spec.declaration.linears
            if scope and linear.names[0].startswith(scope)
        )
    )
    *layers, drafting = [blocks * number // max(1, sum(numbers)) for number in numbers]
    drafting += table if _embeds_last(config) and not tied else 0
    return layers, first, head + drafting


def _embeds_last(config: EngineConfig) -> bool:
    """Return whether the last of several stages has the table of tokens, too."""
    speculation = requested_speculation(config)
    several = config.pipeline_parallel_size > 1
    return several and speculation is not None and speculation.method in EMBEDDING_METHODS


def stages_reason(ends: Sequence[int], ranks: int) -> str:
    """Return the reason of the decision: the layers of each stage."""
    runs = [
        f"{stage.layers.start} to {stage.layers.stop - 1}" for stage in PipelineStage.all_of(ends)
    ]
    group = f", each in {ranks} processes" if ranks > 1 else ""
    return f"{ASKED}: layers {', '.join(runs)}{group}; the last stage samples"


def with_ranks(config: ResolvedConfig, ranks: int) -> ResolvedConfig:
    """Return the same decisions for another number of processes, which divide the threads. With the
    native kernels, results are bit-identical.

    Raises:
        ConfigError: they cannot; the message names the obstacle.
    """
    if ranks < 1:
        raise ConfigError(OPTION, f"must be at least 1, not {ranks}")
    runner = config.runner
    if runner.device != "cpu" and ranks != runner.ranks:
        reason = f"must be {runner.ranks}, as when it was recorded: each process has a GPU"
        raise ConfigError(OPTION, reason)
    threads = max(ranks, runner.threads * runner.ranks)
    options = EngineConfig(
        tensor_parallel_size=ranks, threads=threads, engine_cache=runner.engine_cache
    )
    compute = Compute(runner.device, None, runner.dtype, runner.kernels, runner.attention_backend)
    check_group(options, config.model, compute, detect(()))
    return replace(config, runner=replace(runner, ranks=ranks, threads=threads // ranks))


def share_reason(
    spec: ModelSpec, threads: int, own_threads: int, ranks: int, *, compute: Compute, fast: bool
) -> str:
    """Return the reason of the decision: the share of each process."""
    shares = [HeadShare.of(spec.num_heads, spec.num_kv_heads, rank, ranks) for rank in range(ranks)]
    heads = sorted({end - first for first, end in (share.heads for share in shares)})
    kv_heads = sorted({end - first for first, end in (share.kv_heads for share in shares)})
    where = f"{own_threads} of {threads} threads" if compute.gpu is None else "a GPU of its own"
    cut = "" if compute.kernels == "native" else f"; {'fast' if fast else 'exact'} cut"
    return (
        f"{ASKED}: each process has {_some(heads)} of {spec.num_heads} heads, {_some(kv_heads)} of "
        f"{spec.num_kv_heads} heads of keys, as much of each matrix, and {where}{cut}"
    )


def given_bytes(config: EngineConfig, spec: ModelSpec, compute: Compute) -> int:
    """Return the fp32 bytes of a token's expert outputs if native processes with whole experts
    share them, or of its logits if transformers computes those of whole prompts."""
    if spec.fallback is not None:
        return 4 * spec.vocab_size
    if not config.expert_parallel or compute.kernels != "native":
        return 0
    return 4 * spec.hidden_size * spec.experts_of_token


def repeated_bytes(config: EngineConfig, spec: ModelSpec, compute: Compute) -> int:
    """Return the bytes of replicated weights, without one copy: each process of the stages that
    embed tokens has whole embedding tables (if the head is untied) and position tables; a table
    tied to the head is in the first and in the last stage."""
    if config.tensor_parallel_size * config.pipeline_parallel_size == 1:
        return 0
    numbers = spec.table_numbers + (spec.small_numbers if is_fast(config, compute) else 0)
    num_bytes = numbers * DTYPE_BYTES[compute.dtype]
    if compute.gpu is not None:  # the plan is for one device
        return num_bytes if config.tensor_parallel_size > 1 else 0
    local = config.distributed_executor_backend == "mp"
    twice = spec.tie_word_embeddings and config.pipeline_parallel_size > 1 and local
    tables = config.tensor_parallel_size * (1 + (local and _embeds_last(config)))
    return num_bytes * (tables - 1) + twice * _head_bytes(config, spec, compute)


def _head_bytes(config: EngineConfig, spec: ModelSpec, compute: Compute) -> int:
    table = spec.declaration.embedding
    kind = matrix_kind(config.quantization, table.width, (None,), head=True)
    if kind is None:
        return table.num_parameters * DTYPE_BYTES[compute.dtype]
    return kind.weight_bytes(table.width, table.rows, compute.kernels)


def _some(counts: list[int]) -> str:
    return " or ".join(map(str, counts))


# Several engines, each with the whole model: their threads and memory, or their GPUs.


def check_replicas(config: EngineConfig, compute: Compute, hardware: Hardware) -> None:
    """Raise ConfigError if there are too few threads or GPUs for all engines."""
    replicas, ranks = config.data_parallel_size, config.tensor_parallel_size
    each = ranks * config.pipeline_parallel_size
    if replicas == 1:
        return
    if config.distributed_executor_backend == "ray":
        raise ConfigError(
            REPLICAS, "must be 1 with ray: start a server on each machine, and kvik route"
        )
    if compute.gpu is not None:
        count = len(_gpus(compute.gpu, hardware))
        if replicas * each > count:
            reason = (
                f"must be at most {count // each}, as there are {count} GPUs like the first one"
            )
            raise ConfigError(REPLICAS, f"{reason}, {each} for each engine, not {replicas}")
        return
    threads = config.threads or hardware.threads
    if replicas * each > threads:
        suffix = f", {each} for each engine" if each > 1 else ""
        reason = (
            f"must be at most {max(1, threads // each)}, as there are {threads} threads{suffix}"
        )
        raise ConfigError(REPLICAS, f"{reason}, not {replicas}")


def replica_limit(
    limit: Limit, replicas: int, compute: Compute, hardware: Hardware, mapped: int | None
) -> Limit:
    """Return the memory that one engine may plan with.

    Args:
        mapped: bytes of weights that all engines map from one file; None: each has its own.

    Raises:
        CapacityError: the mapped weights leave no memory to divide.
    """
    if compute.gpu is not None:
        gpus = _gpus(compute.gpu, hardware)[:replicas]
        smallest = min(gpu.free_memory for gpu in gpus)
        return replace(limit, size=limit.size * smallest // max(1, compute.gpu.free_memory))
    shared = mapped or 0
    if shared >= limit.size:
        raise CapacityError(
            REPLICAS,
            f"the weights take {show_bytes(shared)} of {show_bytes(limit.size)}: {limit.source}",
        )
    size = shared + (limit.size - shared) // replicas
    return Limit(size, f"{limit.source}, shared out among {replicas} engines")


def replicas_reason(
    threads: int, replicas: int, compute: Compute, total: Limit, part: Limit, mapped: int | None
) -> str:
    """Return the reason of the decision: the resources of each engine."""
    if compute.gpu is not None:
        return "engines with all of the model, each on GPUs of its own"
    has = f"each has {threads // replicas} of {threads} threads"
    if mapped is None:
        return (
            f"{has} and {show_bytes(part.size)} of {show_bytes(total.size)}, with its own weights"
        )
    rest, share = show_bytes(total.size - mapped), show_bytes(part.size - mapped)
    return f"{has} and {share} of {rest}; {show_bytes(mapped)} of weights are mapped once for all"


def _gpus(first: Gpu, hardware: Hardware) -> list[Gpu]:
    """Return `first` and the later GPUs of the same model."""
    alike = [gpu for gpu in hardware.gpus if gpu.index >= first.index and gpu.name == first.name]
    return sorted(alike, key=lambda gpu: gpu.index)
