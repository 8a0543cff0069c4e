"""Load a model from its files, with its cache, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch

from kvik.attention.base import AttentionBackend, AttentionSpec
from kvik.config.config import ResolvedConfig
from kvik.config.memory import DRAFT_STATES
from kvik.config.speculative import EMBEDDING_METHODS, ResolvedSpeculation
from kvik.errors import ModelError
from kvik.models.decoder import Decoder, Predictor
from kvik.models.eagle3 import Eagle3Head
from kvik.models.gemma4 import Gemma4Assistant
from kvik.models.model_spec import ModelSpec
from kvik.nn.builder import Builder
from kvik.nn.checkpoint import Checkpoint
from kvik.nn.engine_folder import MappedStorage, stored_bytes, write_weights
from kvik.nn.gguf_checkpoint import open_weights
from kvik.nn.kv_formats import KVCache, allocate_kv, allocate_states
from kvik.nn.layers import PooledHead
from kvik.nn.loader import load_model
from kvik.nn.lora import AdapterSlots, merged
from kvik.nn.parameters import Parameters
from kvik.nn.parts import FreshStorage, Storage
from kvik.spec.engine_folder import Manifest
from kvik.spec.kv import KVGroup, group_layers
from kvik.spec.model import DTYPE_BYTES
from kvik.spec.network import Network
from kvik.spec.shares import PipelineStage, cut_groups, stage_groups
from kvik.worker.engine_cache import cache_of, manifest_of, modules_of
from kvik.worker.graphs import EngineNetwork
from kvik.worker.group import RankSetup
from kvik.worker.platforms import Platform, PlatformParts, on_device, platform
from kvik.worker.step_inputs import StepSizes

# Making the weights of an engine folder: a model is loaded as usual, and written with its layout in
# memory.


def build_weights(
    config: ResolvedConfig, file: BinaryIO, advance: Callable[[int, int], None]
) -> Manifest:
    """Load a model and write its weights. Returns their manifest.

    Args:
        advance: called with the number of bytes of each piece that was written, and the total.

    Raises:
        ModelError: the weights do not fit the model.
        OSError: they cannot be written.
    """
    runner, groups = config.runner, config.cache.groups
    if runner.device == "cpu":
        torch.set_num_threads(runner.threads)
    with on_device(torch.device(runner.device)), torch.inference_mode():
        parts = platform(config).parts
        storage = FreshStorage(parts.ops)
        checkpoint = _checkpoint(Path(runner.model_path), config.model, runner.lora)
        builder = make_builder(
            config, parts, config.model, groups, runner.quantization, checkpoint, storage
        )
        load_model(config.model, builder)
        total = stored_bytes(storage, parts.packing)
        written = write_weights(file, storage, parts.packing, lambda size: advance(size, total))
    return manifest_of(runner, runner.quantization, parts.packing, written)


def fill_cache(config: ResolvedConfig) -> None:
    """Write the whole model to the engine cache, as a single process would, before several
    processes map their shares of it.

    Raises:
        ModelError: the weights do not fit the model.
    """
    runner = config.runner
    threads = runner.threads * runner.ranks * max(1, len(runner.stage_ends))
    single = replace(runner, threads=threads, ranks=1, stage_ends=())
    config = replace(config, runner=single)
    parts, path = platform(config).parts, Path(runner.model_path)
    with torch.inference_mode():
        _load(config, parts, config.model, path, config.cache.groups, runner.quantization)


def load_network(
    config: ResolvedConfig,
    platform: Platform,
    spec: ModelSpec,
    path: Path,
    groups: tuple[KVGroup, ...],
    quantization: str,
    *,
    drafts: bool = False,
    stage: PipelineStage | None = None,
    backend: AttentionBackend | None = None,
    kv: KVCache | None = None,
) -> EngineNetwork:
    """Load the model, or a draft model that uses the same blocks.

    Args:
        config: of the engine.
        path: of the weights, unless they are random.
        drafts: it is a draft model, and all its KV groups have the same block tables.
        stage: the layers computed here; `groups` has only these. None: all.
        backend: for attention; None: the platform's.
        kv: keys and values that it reads; None: it has its own.

    Raises:
        ModelError: the weights do not fit the spec.
    """
    parts, cache = platform.parts, config.cache
    if backend is not None:
        parts = replace(parts, backend=backend)
    platform.release_freed()  # memory used while reading the tokenizer
    with torch.inference_mode():
        loaded = _load(config, parts, spec, path, groups, quantization, stage, adapted=not drafts)
        platform.release_freed()
        if kv is None:

            def heads(layer: int) -> int:
                facts = spec.layers[layer]
                return parts.backend.rank_heads(spec.query_heads(facts), spec.heads(facts)[0])

            kv = allocate_kv(
                groups,
                cache.pool_size,
                cache.block_size,
                parts.dtype,
                parts.device,
                parts.kv_zeros,
                separate=drafts,
                slots=config.scheduler.max_num_seqs,
                heads=heads,
            )
        layers = (
            spec.layers if stage is None else spec.layers[stage.layers.start : stage.layers.stop]
        )
        state_specs = [layer.state for layer in layers if layer.state]
        rows = config.state_rows
        if drafts:
            rows = DRAFT_STATES * config.scheduler.max_num_seqs
        states = allocate_states(state_specs, rows, parts.device, parts.kv_zeros)
    return EngineNetwork(
        loaded.model,
        parts.ops,
        parts.backend,
        groups,
        kv,
        states,
        stage=stage,
        pooling=spec.pooling,
        pooled=loaded.pooled,
        generates=not spec.encoder,
        adapters=loaded.adapters,
        budgeted=loaded.budgeted,
    )


def load_share(
    config: ResolvedConfig, platform: Platform, setup: RankSetup | None, stage: PipelineStage | None
) -> EngineNetwork:
    """Load this process's share of the model.

    Args:
        setup: of the group that has the layers; None: there is no group.
        stage: its stage; None: the process or group has all layers.

    Raises:
        ModelError: see `load_network`.
    """
    runner, groups = config.runner, config.cache.groups
    if config.model.fallback is not None:
        from kvik.worker.transformers_model import load_transformers  # few models need it

        parts = platform.parts
        model = load_transformers(config, parts.dtype, parts.device)
        nothing = KVCache((), (), {})  # each request has a separate cache
        return EngineNetwork(model, parts.ops, parts.backend, groups, nothing)
    spec, speculation = config.model, config.speculation
    if stage is not None:
        groups = stage_groups(groups, stage)
        if not stage.last:
            spec = replace(spec, predictor=None)
        elif speculation is not None and speculation.method in EMBEDDING_METHODS:
            stage = replace(stage, reads_tokens=True)
    if setup is not None:
        groups = cut_groups(groups, setup.rank, setup.size)
    path = Path(runner.model_path)
    network = load_network(config, platform, spec, path, groups, runner.quantization, stage=stage)
    if setup is not None:
        network = replace(network, ranks=setup.ranks)
    if speculation is None or not speculation.divided:
        return network
    network = replace(network, taps=speculation.source.taps)
    if stage is not None and not stage.last:
        return network
    return _with_drafting(config, speculation, platform, setup, network)


def _with_drafting(
    config: ResolvedConfig,
    speculation: ResolvedSpeculation,
    platform: Platform,
    setup: RankSetup | None,
    target: EngineNetwork,
) -> EngineNetwork:
    """Return the model with its share of the network that drafts from its hidden states or keys.

    Raises:
        ModelError: see `load_network`; or the model gives such a network nothing to read.
    """
    source, model, spec = speculation.source, target.model, config.model
    if not isinstance(model, Decoder):
        reason = f"{spec.architecture} shows no hidden states of its layers"
        raise ModelError("spec_method", f"must not be {speculation.method}: {reason}")
    head: Network | None = model.predictor
    drafting = target
    if source.spec is not None:
        kv: KVCache | None = target.kv
        groups = tuple(map(_before_newest, target.groups))
        if speculation.paged:
            groups, kv = head_groups(config), None
            groups = groups if setup is None else cut_groups(groups, setup.rank, setup.size)
        path, quantization = Path(source.path), speculation.quantization
        with of_drafts():
            drafting = load_network(
                config, platform, source.spec, path, groups, quantization, drafts=True, kv=kv
            )
        head = drafting.model
    assert isinstance(head, Predictor | Eagle3Head | Gemma4Assistant)
    if isinstance(head, Gemma4Assistant):
        drafting = replace(drafting, onward=head.onward)
    elif isinstance(head, Eagle3Head):
        # Forks copy its blocks, too.
        storages = (*target.kv.storages, *drafting.kv.storages)
        both = replace(target.kv, storages=storages)
        target = replace(target, kv=both, onward=head.onward)
    if not isinstance(head, Predictor):
        head.embed_target = model.embed
    tokens = StepSizes.of_drafting(config).tokens
    head.hidden = hidden = platform.hidden_states(tokens, spec.hidden_size)
    drafting = replace(drafting, model=head, ranks=target.ranks, stage=None, hidden=hidden)
    return replace(target, drafting=drafting)


def head_groups(config: ResolvedConfig) -> tuple[KVGroup, ...]:
    """Return the KV groups of a draft model or head with a cache of its own."""
    assert config.speculation is not None and config.speculation.source.spec is not None
    specs = config.speculation.source.spec.kv_specs(DTYPE_BYTES[config.runner.dtype])
    return group_layers(specs, separate=True)


@contextmanager
def of_drafts() -> Iterator[None]:
    """Return a context in which a `ModelError` becomes one of the option `spec_model`."""
    try:
        yield
    except ModelError as error:
        message = error.message if error.field in ("spec_model", "model") else str(error)
        raise ModelError("spec_model", message) from None


def _before_newest(group: KVGroup) -> KVGroup:
    """Return a group whose windows exclude the newest token, whose query reads before its key is
    written."""
    specs = tuple(
        replace(spec, window=spec.window and replace(spec.window, keys=spec.window.keys - 1))
        for spec in group.specs
    )
    return replace(group, specs=specs)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A model, and what belongs to it; see `EngineNetwork`."""

    model: Network
    pooled: PooledHead | None
    adapters: AdapterSlots | None
    budgeted: Mapping[int, AttentionSpec]


def _load(
    config: ResolvedConfig,
    parts: PlatformParts,
    spec: ModelSpec,
    path: Path,
    groups: tuple[KVGroup, ...],
    quantization: str,
    stage: PipelineStage | None = None,
    *,
    adapted: bool = True,
) -> _Loaded:
    """Load a model from an engine folder or the engine cache, else from its files.

    Args:
        adapted: with the adapters of the engine; those that requests choose are never cached.

    Raises:
        ModelError: the weights do not fit the spec.
    """
    runner = config.runner
    if not adapted:
        runner = replace(runner, lora=None, adapters=(), max_adapters=0, adapter_ranks={})
    fixed: tuple[str, ...] = ()
    if spec.predictor_scope:  # drafts come from the plain model
        fixed = (spec.predictor_scope,)

    def load(checkpoint: Checkpoint | None, storage: Storage | None) -> _Loaded:
        adapters = None
        if runner.max_adapters:
            adapters = AdapterSlots(
                runner.max_adapters,
                runner.adapter_ranks,
                parts.own_ops,
                parts.dtype,
                parts.device,
                spec,
                fixed,
            )
        builder = make_builder(
            config, parts, spec, groups, quantization, checkpoint, storage, stage, adapters
        )
        model, pooled = load_model(spec, builder, runner.adapters, seed=runner.seed)
        return _Loaded(model, pooled, adapters, builder.budgeted)

    if spec.built is not None:
        return load(None, MappedStorage(path, parts.packing))
    if runner.load_format != "safetensors":
        return load(None, None)
    cache = cache_of(runner, path, spec, quantization, parts.packing)
    if cache is not None and (mapped := cache.stored(parts.packing)) is not None:
        try:
            return load(None, mapped)
        except ModelError as error:
            cache.is_bad(str(error))
    fresh = FreshStorage(parts.ops)
    loaded = load(_checkpoint(path, spec, runner.lora), fresh)
    if cache is not None and not parts.packing.divided and stage is None:
        cache.keep(runner, quantization, fresh, parts.packing)
    return loaded


def _checkpoint(path: Path, spec: ModelSpec, lora: str | None) -> Checkpoint:
    """Open a model's weights, with an adapter merged into them.

    Raises:
        ModelError: one of them cannot be used.
    """
    checkpoint = open_weights(path, modules_of(spec))
    return checkpoint if lora is None else merged(checkpoint, Path(lora), spec)


def make_builder(
    config: ResolvedConfig,
    parts: PlatformParts,
    spec: ModelSpec,
    groups: tuple[KVGroup, ...],
    quantization: str,
    checkpoint: Checkpoint | None,
    storage: Storage | None,
    stage: PipelineStage | None = None,
    adapters: AdapterSlots | None = None,
) -> Builder:
    """Make a builder for a model on this platform; see `Builder`."""
    parameters = Parameters(
        parts.ops,
        dtype=parts.dtype,
        device=parts.device,
        checkpoint=checkpoint,
        stored_quantization=spec.quantization,
        quantization=quantization,
        storage=storage,
        adapters=adapters,
    )
    max_model_len = config.scheduler.max_model_len
    return Builder(parameters, parts.backend, groups, max_model_len=max_model_len, stage=stage)
