"""Memory of the fullest device, itemised, and what fits.

The bytes come from `config.memory.Footprint`, the formula that the engine itself uses, so a plan
for this machine equals the engine's own decision for the same options. CPU processes that share a
model are planned together, as in the engine, since they share one memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from kvik.config.compute import Compute, computing_in
from kvik.config.config import EngineConfig, Notes, requested_speculation
from kvik.config.fit import Fit, footprint_of, with_drafter
from kvik.config.hardware import Gpu, Hardware
from kvik.config.memory import RANK_BYTES, Limit, MemoryPlan, StepSize
from kvik.config.parallel import check_group, repeated_bytes, stage_ends
from kvik.core.config import RESERVED_BLOCKS, CacheConfig
from kvik.errors import ConfigError
from kvik.planner.devices import Device, Setting
from kvik.planner.formats import weight_facts
from kvik.planner.parallel import (
    check_parallel,
    own_rows,
    repeated_tables,
    share,
    shares,
    stage_runs,
    stages,
    together,
)
from kvik.planner.search import largest
from kvik.planner.shape import ModelShape
from kvik.spec.kv import KVCacheSpec, block_bytes, stored_as
from kvik.spec.layers import LatentSpec
from kvik.spec.model import LinearLayers
from kvik.spec.rope import RopeSpec
from kvik.spec.shares import PipelineStage, cut_groups, stage_groups

MAX_REQUESTS = 65_536  # the limit of `max_num_seqs`
_ADVANCED_CPU = frozenset({"avx2", "fma"})  # minimum for the native kernels


@dataclass(frozen=True, slots=True)
class PartMemory:
    """Bytes of one of the CPU processes that share a model, or of one GPU of each stage.

    Attributes:
        stage, rank: index of the stage, and index of a process within its stage.
        layers: layers of the stage.
        weights: including tables that it holds entirely.
    """

    stage: int
    rank: int
    layers: int
    weights: int
    kv_cache: int
    activations: int
    runtime: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.runtime


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest device, or of all processes together on a CPU.

    Attributes:
        limit: bytes that the engine may use.
        weights: of the model and its drafter.
        activations: peak of one step of `step_tokens` tokens.
        kv_cache: for all requests at the full context, in whole blocks.
        runtime: libraries, tables, graphs and the peak of loading.
        kv_per_token: for one request, not rounded to blocks, before any window is full.
        kv_per_request: for one request at the full context, in whole blocks.
        kv_padding: part of `kv_cache` that is still empty when all requests have their full
            context.
        largest_batch: number of requests with the full context that fit; 0: none.
        draft_weights: part of `weights` of the model or heads that draft.
    """

    limit: int
    weights: int
    kv_cache: int
    activations: int
    runtime: int
    kv_per_token: int
    kv_per_request: int
    kv_padding: int
    step_tokens: int
    largest_batch: int
    draft_weights: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.runtime

    @property
    def missing(self) -> int:
        """Bytes beyond the limit; 0 if it fits."""
        return max(0, self.total - self.limit)

    @property
    def fits(self) -> bool:
        return self.missing == 0


@dataclass(frozen=True, slots=True)
class KVWaste:
    """Unused parts of the KV cache: with blocks, and with a contiguous reservation for the longest
    possible request. Bytes are those on the fullest device.

    Attributes:
        block_size: tokens of a block.
        paged: unused bytes in the last blocks of the batch, on average half a block per request.
        reserved: bytes that the model's whole context takes, per request.
        empty: fraction of `reserved` that a request with the plan's context leaves unused; 0 if
            all layers of the device keep states.
        batch: number of requests that fit with reservations; with blocks it is
            `Memory.largest_batch`.
    """

    block_size: int
    paged: int
    reserved: int
    empty: float
    batch: int


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in given formats, with the interface that `Footprint` expects."""

    vocab_size: int
    hidden_size: int
    inner_width: int
    experts_of_token: int
    num_heads: int
    head_dims: tuple[int, ...]
    query_width: int
    key_width: int
    max_context: int
    rotations: tuple[tuple[RopeSpec, int], ...]
    shape: ModelShape
    weight_format: str
    kv: tuple[KVCacheSpec | None, ...] = field(repr=False)
    latent: LatentSpec | None = None  # only of models that kvik runs
    state_bytes: int = 0
    state_width: int = 0
    query_scales: tuple[object, ...] = ()
    transposed_numbers: int = 0
    encoder: bool = False

    @classmethod
    def of(cls, shape: ModelShape, weight_format: str, kv_format: str) -> StoredModel:
        learned = any(matrix.role == "positions" for matrix in shape.matrices)
        # MLA gathers its latent instead of K and V.
        widest = max((cache.numbers for cache, _ in shape.caches), default=0)
        model = cls(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            inner_width=shape.intermediate_size,
            experts_of_token=max(matrix.active for matrix in shape.matrices),
            num_heads=shape.num_heads,
            head_dims=(shape.head_dim,),
            query_width=shape.num_heads * shape.head_dim,
            key_width=-(-widest // 2),
            max_context=shape.max_context,
            rotations=() if learned else ((RopeSpec(), shape.head_dim),),
            shape=shape,
            weight_format=weight_format,
            kv=tuple(stored_as([layer.cache for layer in shape.layers], kv_format)),
            state_bytes=shape.state_bytes,
            state_width=shape.state_width,
        )
        if (spec := shape.spec) is None:
            return model
        return replace(
            model,
            head_dims=spec.head_dims,
            query_width=spec.query_width,
            key_width=spec.key_width,
            rotations=spec.rotations,
            latent=spec.latent,
            query_scales=spec.query_scales,
            transposed_numbers=spec.transposed_numbers,
        )

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes as the shape counts them, including quantised weights."""
        return self.shape.weight_bytes(self.weight_format)

    def linear_layers(self) -> tuple[LinearLayers, ...]:
        """Return no layers: `weight_bytes` already counts them."""
        return ()

    def kv_specs(self, dtype_bytes: int) -> list[KVCacheSpec | None]:
        return list(self.kv)


def laid_out(shape: ModelShape, at: Setting) -> ModelShape:
    """Return the model with quantised weights in the layout of that device's kernels.

    Raises:
        ConfigError: as `memory_of`.
    """
    return replace(shape, kernels=_Planner.of(shape, at).part.kernels)


def memory_of(shape: ModelShape, at: Setting) -> Memory:
    """Return the memory that a setting's requests need at their full context.

    Raises:
        ConfigError: the model cannot be shared by this many devices, or a format is unknown.
    """
    planner = _Planner.of(shape, at)
    part, footprint = planner.part, planner.fit.footprint
    size = planner.sized(at.context, at.batch)
    parts = planner.planned(size)
    cached = part.kv_bytes(at.context, at.kv_format)
    for group in footprint.draft.groups if footprint.draft else ():
        cached += at.context * group.bytes_per_token
    return Memory(
        limit=parts.limit,
        weights=parts.weights,
        kv_cache=parts.kv_cache,
        activations=parts.activations,
        runtime=parts.overhead,
        kv_per_token=part.kv_bytes_per_token(at.kv_format),
        kv_per_request=planner.blocks_each(size) * footprint.block_bytes,
        kv_padding=parts.kv_cache - at.batch * cached,
        step_tokens=size.max_num_batched_tokens,
        largest_batch=largest(lambda batch: planner.fits(at.context, batch), MAX_REQUESTS),
        draft_weights=sum(part.weights for part in (footprint.draft, footprint.heads) if part),
    )


def cache_of(shape: ModelShape, at: Setting, size: StepSize, block_size: int) -> CacheConfig:
    """Return the KV cache of an engine with steps of a size, with all blocks that fit.

    Raises:
        ConfigError: as `memory_of`.
    """
    fit = _Planner.of(shape, at).fit
    footprint = replace(fit.footprint, block_size=block_size)
    blocks = footprint.blocks_within(fit.limit.size - footprint.fixed(size))
    checkpoints = footprint.num_checkpoints(size) if shape.state_bytes else None
    return CacheConfig(block_size, blocks, footprint.groups, checkpoints=checkpoints)


def longest_context(shape: ModelShape, at: Setting) -> int:
    """Return the longest context that fits for a setting's requests, at most the model's; 0: none.

    Raises:
        ConfigError: as `memory_of`.
    """
    planner = _Planner.of(shape, at)
    return largest(lambda context: planner.fits(context, at.batch), shape.max_context)


def parts_of(shape: ModelShape, at: Setting) -> tuple[PartMemory, ...]:
    """Return the memory of each CPU process, or of one GPU per stage; (): the model is not divided.

    Raises:
        ConfigError: as `memory_of`.
    """
    if at.parts == 1:
        return ()
    if not at.exact:
        return _gpus(shape, at)
    planner = _Planner.of(shape, at)
    return _processes(planner, planner.sized(at.context, at.batch), at)


def _processes(planner: _Planner, size: StepSize, at: Setting) -> tuple[PartMemory, ...]:
    """Return the bytes of each CPU process, the engine's last: it has the rest of the plan."""
    shape, footprint = planner.full_model, planner.fit.footprint
    planned, groups = planner.planned(size), footprint.groups
    blocks = size.max_num_seqs * planner.blocks_each(size) + RESERVED_BLOCKS
    rows = size.max_num_seqs + footprint.num_checkpoints(size)
    ends = footprint.stage_ends or (max(layer for g in groups for layer in g.layers) + 1,)
    parts: list[PartMemory] = []
    for stage, part in zip(PipelineStage.all_of(ends), stages(shape, planner.runs), strict=True):
        kv_groups = stage_groups(groups, stage.layers)
        for rank in range(at.tp):
            matrices = [own_rows(matrix, shape, rank, at.tp) for matrix in part.matrices]
            rest = part.other_parameters if rank == 0 else 0
            cached = block_bytes(cut_groups(kv_groups, rank, at.tp), footprint.block_size)
            parts.append(
                PartMemory(
                    stage=stage.number,
                    rank=rank,
                    layers=part.num_layers,
                    weights=part.bytes_of(matrices, rest, at.weight_format),
                    kv_cache=blocks * cached + rows * part.state_bytes,
                    activations=planned.activations // at.parts,
                    runtime=RANK_BYTES,
                )
            )
    last = parts.pop(-at.tp)  # the engine's process is the first of its stage
    rest = sum(part.total for part in parts)
    engine = replace(last, runtime=0)
    parts.insert(
        len(parts) - at.tp + 1, replace(engine, runtime=planned.total - rest - engine.total)
    )
    return tuple(parts)


def _gpus(shape: ModelShape, at: Setting) -> tuple[PartMemory, ...]:
    parts = []
    for stage, part in enumerate(shares(shape, at.tp, at.pp, at.weight_format)):
        planner = _Planner.of_part(part, at)
        planned = planner.planned(planner.sized(at.context, at.batch))
        sizes = planned.weights, planned.kv_cache, planned.activations, planned.overhead
        parts.append(PartMemory(stage, 0, part.num_layers, *sizes))
    return tuple(parts)


def kv_waste(shape: ModelShape, at: Setting) -> KVWaste:
    """Return the unused parts of the KV cache with blocks and with contiguous reservations.

    Raises:
        ConfigError: as `memory_of`.
    """
    planner = _Planner.of(shape, at)
    part, block_size = planner.part, planner.fit.footprint.block_size
    reserved = part.kv_bytes(part.max_context, at.kv_format)
    used = part.kv_bytes(at.context, at.kv_format)

    def fits(batch: int) -> bool:
        parts = planner.planned(planner.sized(at.context, batch))
        base = parts.total - parts.kv_cache
        return base + batch * reserved <= planner.fit.limit.size

    return KVWaste(
        block_size=block_size,
        paged=at.batch * (block_size - 1) * part.kv_bytes_per_token(at.kv_format) // 2,
        reserved=reserved,
        empty=1.0 - used / reserved if reserved else 0.0,
        batch=largest(fits, MAX_REQUESTS),
    )


def bytes_of(shape: ModelShape, at: Setting) -> tuple[int, int]:
    """Return `total` and `limit` of `memory_of`, without searching for what would fit.

    Raises:
        ConfigError: as `memory_of`.
    """
    planner = _Planner.of(shape, at)
    return planner.planned(planner.sized(at.context, at.batch)).total, planner.fit.limit.size


@dataclass(frozen=True, slots=True)
class _Planner:
    """Plans the memory of a setting's fullest device, for any number of requests of any length.

    Attributes:
        part: the part of the model on that device, or on all CPU processes together.
        full_model: the whole model, or the same as `part`.
        runs: layers of each stage on a CPU.
    """

    part: ModelShape
    fit: Fit
    full_model: ModelShape
    runs: tuple[range, ...] = ()

    @classmethod
    def of(cls, shape: ModelShape, at: Setting) -> _Planner:
        if at.exact:
            return cls._of_processes(shape, at)
        return cls.of_part(share(shape, at.tp, at.pp, at.weight_format), at)

    @classmethod
    def of_part(cls, part: ModelShape, at: Setting) -> _Planner:
        """Return the planner for one GPU, or for the only process on a CPU."""
        config, hardware, stored, compute = _computing(part, at)
        part = replace(part, kernels=compute.kernels)
        footprint = footprint_of(config, replace(stored, shape=part), hardware, compute)
        footprint = with_drafter(footprint, requested_speculation(config), at.source)
        return cls(part, Fit(config, footprint, _limit(at)), part)

    @classmethod
    def _of_processes(cls, shape: ModelShape, at: Setting) -> _Planner:
        """
        Raises:
            ConfigError: the engine would refuse to divide the model this way.
        """
        check_parallel(shape, at.tp, at.pp, exact=True)
        config, hardware, stored, compute = _computing(shape, at)
        full_shape = replace(shape, kernels=compute.kernels)
        runs, repeated = _divided(full_shape, at, config, hardware, compute)
        stored = StoredModel.of(full_shape, at.weight_format, at.kv_format)
        footprint = footprint_of(config, stored, hardware, compute)
        ends = tuple(run.stop for run in runs) if at.pp > 1 else ()
        footprint = replace(footprint, repeated=repeated, stage_ends=ends)
        footprint = with_drafter(footprint, requested_speculation(config), at.source)
        part = together(full_shape, at.tp)
        return cls(part, Fit(config, footprint, _limit(at)), full_shape, runs)

    def blocks_each(self, size: StepSize) -> int:
        return self.fit.footprint.blocks_per_request(
            size.max_model_len, size.max_num_batched_tokens
        )

    def sized(self, context: int, batch: int) -> StepSize:
        wishes = replace(self.fit.config, max_model_len=context, max_num_seqs=batch)
        return replace(self.fit, config=wishes).step_size(Notes())

    def planned(self, size: StepSize) -> MemoryPlan:
        blocks = size.max_num_seqs * self.blocks_each(size)
        return self.fit.footprint.plan(size, blocks, self.fit.limit)

    def fits(self, context: int, batch: int) -> bool:
        plan = self.planned(self.sized(context, batch))
        return plan.total <= plan.limit


def _computing(
    shape: ModelShape, at: Setting
) -> tuple[EngineConfig, Hardware, StoredModel, Compute]:
    """Return the options, hardware, model and compute settings of an engine that runs a part of a
    model."""
    facts, heads = weight_facts(at.weight_format), at.source.heads
    method = heads.kind if heads else "draft_model" if at.source.spec else None
    config = EngineConfig(
        dtype=shape.working_dtype(at.weight_format),
        quantization=facts.quantization or "none",
        tensor_parallel_size=at.tp if at.exact else 1,
        pipeline_parallel_size=at.pp if at.exact else 1,
        spec_method=method,
        spec_model=at.source.path if method else None,
    )
    hardware = at.hardware or hardware_of(at.device)
    device = "cpu" if at.exact else "cuda:0"
    gpu = None if at.exact else next(iter(hardware.gpus), None)
    stored = StoredModel.of(shape, at.weight_format, at.kv_format)
    compute = computing_in(config.dtype, config, stored, hardware, device, gpu, Notes())
    return config, hardware, stored, compute


def _limit(at: Setting) -> Limit:
    return Limit(int(at.device.memory * at.utilization), "")


def _divided(
    shape: ModelShape, at: Setting, config: EngineConfig, hardware: Hardware, compute: Compute
) -> tuple[tuple[range, ...], int]:
    """Return the layers of each stage, and the bytes of repeated weights beyond their first copy.
    For models that kvik runs, these are the engine's decisions.

    Raises:
        ConfigError: the engine would refuse this division.
    """
    if (spec := shape.spec) is None:
        runs = stage_runs(shape, at.pp, at.weight_format, at.kv_format, at.context)
        return runs, repeated_tables(shape, at.tp, at.pp, at.weight_format)
    full_config = replace(config, max_model_len=at.context, kv_cache_dtype=at.kv_format)
    try:
        if at.hardware is not None:
            check_group(full_config, spec, compute, hardware)
        ends = stage_ends(full_config, spec, compute) or (spec.num_layers,)
    except ConfigError as error:
        name = {"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp"}.get(error.field)
        raise ConfigError(name or error.field, error.message) from None
    runs = tuple(range(*run) for run in pairwise((0, *ends)))
    return runs, repeated_bytes(full_config, spec, compute)


def hardware_of(device: Device) -> Hardware:
    """Return hardware with only this device, and a complete installation of kvik."""
    memory = int(device.memory)
    gpus = (Gpu(0, device.name, memory, memory, (9, 0)),) if device.kind == "cuda" else ()
    bare = Hardware(device.name, 1, memory, "its memory", _ADVANCED_CPU, gpus)
    return replace(bare, native=True, triton=True)
