"""Memory of the fullest device, itemised, and what fits.

The bytes come from `config.memory.Footprint`, the formula that the engine itself uses, so a plan
for this machine equals the engine's own decision for the same options. CPU processes that share a
model are planned together, as in the engine, since they share one memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

from kvik.config.compute import Compute, computing_in
from kvik.config.config import EngineConfig, Notes, requested_speculation
from kvik.config.fit import Fit, footprint_of, with_drafter
from kvik.config.hardware import Gpu, Hardware
from kvik.config.memory import RANK_BYTES, Limit, MemoryPlan
from kvik.config.parallel import (
    check_group,
    experts_of_layers,
    given_bytes,
    repeated_bytes,
    stage_ends,
)
from kvik.config.resolve import as_drafting
from kvik.config.speculative import MTP, OWN_HEAD
from kvik.config.step_memory import StepSize
from kvik.core.config import RESERVED_BLOCKS, CacheConfig
from kvik.errors import ConfigError
from kvik.models.model_spec import ModelSpec
from kvik.planner.devices import Device, Setting
from kvik.planner.formats import weight_facts
from kvik.planner.parallel import check_parallel, own_rows, shares, stage_runs, stages, together
from kvik.planner.search import largest
from kvik.planner.shape import ModelShape
from kvik.spec.kv import AUTO, block_bytes
from kvik.spec.model import SHORT_DTYPES
from kvik.spec.shares import PipelineStage, cut_groups, stage_groups

MAX_REQUESTS = 65_536  # the limit of `max_num_seqs`
_ADVANCED_CPU = frozenset({"avx2", "fma"})  # minimum for the native kernels


@dataclass(frozen=True, slots=True)
class PartMemory:
    """Bytes of one of the CPU processes that share a model, or of one GPU of each stage."""

    stage: int  # index
    rank: int  # index of a process within its stage
    layers: int  # layers of the stage
    weights: int  # including tables that it holds entirely
    kv_cache: int
    activations: int
    runtime: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.runtime


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest device, or of all processes together on a CPU. Of stages on GPUs, the
    largest weights and the largest cache count."""

    limit: int  # bytes that the engine may use
    weights: int  # of the model and its drafter
    kv_cache: int  # for all requests at the full context, in whole blocks; and states
    states: int  # part of `kv_cache`: of all requests, with copies for prefix hits
    activations: int  # peak of one step of `step_tokens` tokens
    runtime: int  # libraries, tables, graphs and the peak of loading
    kv_per_token: int  # for one request, not rounded to blocks, before any window is full
    kv_per_request: int  # for one request at the full context, in whole blocks
    # Part of `kv_cache` that is still empty when all requests have their full context.
    kv_padding: int
    step_tokens: int
    largest_batch: int  # number of requests with the full context that fit; 0: none
    draft_weights: int  # part of `weights` of the model or heads that draft

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
    possible request. Bytes are those on the fullest device."""

    block_size: int  # tokens of a block
    paged: int  # unused bytes in the last blocks of the batch, on average half a block per request
    reserved: int  # bytes that the model's whole context takes, per request
    # Fraction of `reserved` that a request with the plan's context leaves unused; 0 if all layers
    # of the device keep states.
    empty: float
    # Number of requests that fit with reservations; with blocks it is `Memory.largest_batch`.
    batch: int


@dataclass(frozen=True, slots=True)
class MemoryPlanner:
    """Plans the memory of a setting's fullest device, for any number of requests of any length."""

    at: Setting
    # The whole model, with quantised weights in the layout of that device's kernels.
    shape: ModelShape
    part: ModelShape  # the part of the model on that device, or on all CPU processes together
    stages: tuple[ModelShape, ...]  # the parts of the model in the stages of a pipeline
    fit: Fit

    @classmethod
    def of(cls, shape: ModelShape, at: Setting) -> MemoryPlanner:
        """
        Raises:
            ConfigError: the model cannot be divided this way, by the engine's rules on a CPU, or a
                format is unknown.
        """
        whole_experts = at.expert_parallel
        check_parallel(shape, at.tp, at.pp, exact=at.exact, whole_experts=whole_experts)
        config, spec, hardware, compute = _computing(shape, at)
        if shape.kernels != compute.kernels:
            shape = replace(shape, kernels=compute.kernels)
        built = spec.built if at.weight_format == shape.stored else None
        mapped = None if built is None else built.weight_bytes
        drafting = requested_speculation(config)
        try:
            if drafting is not None:
                spec = as_drafting(drafting, spec, at.source)
            plain = footprint_of(config, spec, hardware, compute, mapped)
            footprint = with_drafter(plain, drafting, at.source)
        except ConfigError as error:
            raise ConfigError("draft", error.message) from None
        runs: tuple[range, ...] = ()
        sizes: tuple[int, ...] = ()
        if at.exact:
            ends = _stage_ends(at, config, spec, hardware, compute)
            # A head that drafts is one more layer of the shape.
            runs = tuple(range(*run) for run in pairwise((0, *ends[:-1], shape.num_layers)))
            part = together(shape, at.tp)
        else:
            runs = stage_runs(shape, at.pp, at.weight_format) if at.pp > 1 else ()
            ends = tuple(run.stop for run in runs)
            parts = shares(shape, at.tp, at.pp, at.weight_format, whole_experts=whole_experts)
            sizes = tuple(part.weight_bytes(at.weight_format) for part in parts)
            part = parts[sizes.index(max(sizes))]
        footprint = replace(
            footprint,
            counted=shape.weight_bytes(at.weight_format),
            repeated=0 if built else repeated_bytes(config, spec, compute),
            whole_experts=min(experts_of_layers(spec)) if whole_experts else 0,
            output_bytes=given_bytes(config, spec, compute),
            stage_ends=ends,
            stage_bytes=sizes if len(sizes) > 1 else (),
        )
        fit = Fit(config, footprint, Limit(at.memory_limit, ""))
        return cls(at, shape, part, stages(shape, runs), fit)

    def memory(self) -> Memory:
        """Return the memory that the setting's requests need at their full context."""
        at, part, footprint = self.at, self.part, self.fit.footprint
        size = self._sized(at.context, at.batch)
        parts = self._planned(size)
        cached, states = part.kv_bytes(at.context, at.kv_format), footprint.states(size)
        cached += at.context * footprint.draft_bytes_per_token
        return Memory(
            limit=parts.limit,
            weights=parts.weights,
            kv_cache=parts.kv_cache,
            states=states,
            activations=parts.activations,
            runtime=parts.overhead,
            kv_per_token=part.kv_bytes_per_token(at.kv_format),
            kv_per_request=self._blocks_each(size) * footprint.block_bytes,
            kv_padding=parts.kv_cache - states - at.batch * cached,
            step_tokens=size.max_num_batched_tokens,
            largest_batch=largest(lambda batch: self._fits(at.context, batch), MAX_REQUESTS),
            draft_weights=self._draft_weights,
        )

    @property
    def _draft_weights(self) -> int:
        shape, footprint = self.shape, self.fit.footprint
        if self.at.source == OWN_HEAD:
            head = shape.layers[-1]
            return shape.bytes_of(head.matrices, head.other_parameters, self.at.weight_format)
        return sum(part.weights for part in (footprint.draft, footprint.heads) if part)

    @property
    def total(self) -> int:
        """`total` of `memory`, without searching for what would fit."""
        return self._planned(self._sized(self.at.context, self.at.batch)).total

    def cache(self, size: StepSize, block_size: int) -> CacheConfig:
        """Return the KV cache that an engine with steps of a size has by default; if a request of
        the longest context does not fit, with all blocks that do."""
        footprint = replace(self.fit.footprint, block_size=block_size)
        blocks = footprint.blocks_within(self.at.memory_limit - footprint.fixed(size))
        blocks = min(blocks, replace(self.fit, footprint=footprint).num_blocks(size, Notes()))
        checkpoints = footprint.num_checkpoints(size) if self.shape.state_bytes else None
        return CacheConfig(block_size, blocks, footprint.groups, checkpoints=checkpoints)

    def longest_context(self) -> int:
        """Return the longest context that fits for the setting's requests, at most the model's; 0:
        none."""
        return largest(lambda n: self._fits(n, self.at.batch), self.shape.max_context)

    def kv_waste(self) -> KVWaste:
        """Return the unused parts of the KV cache with blocks and with contiguous reservations."""
        at, part, block_size = self.at, self.part, self.fit.footprint.block_size
        reserved = part.kv_bytes(part.max_context, at.kv_format)
        used = part.kv_bytes(at.context, at.kv_format)

        def fits(batch: int) -> bool:
            size = self._sized(at.context, batch)
            parts = self._planned(size)
            kept = self.fit.footprint.states(size) + batch * reserved
            return parts.total - parts.kv_cache + kept <= at.memory_limit

        return KVWaste(
            block_size=block_size,
            paged=at.batch * (block_size - 1) * part.kv_bytes_per_token(at.kv_format) // 2,
            reserved=reserved,
            empty=1.0 - used / reserved if reserved else 0.0,
            batch=largest(fits, MAX_REQUESTS),
        )

    def parts(self) -> tuple[PartMemory, ...]:
        """Return the memory of each CPU process, or of the fullest GPU of each stage; (): the model
        is not divided."""
        if self.at.parts == 1:
            return ()
        size = self._sized(self.at.context, self.at.batch)
        return (self._processes if self.at.exact else self._gpus)(size)

    def _processes(self, size: StepSize) -> tuple[PartMemory, ...]:
        """Return the bytes of each CPU process, the engine's last: it has the rest of the plan."""
        at, planned = self.at, self._planned(size)
        parts: list[PartMemory] = []
        for stage, part in enumerate(self.stages):
            for rank in range(at.tp):
                matrices = [
                    own_rows(m, self.shape, rank, at.tp, whole_experts=at.expert_parallel)
                    for m in part.matrices
                ]
                rest = part.other_parameters if rank == 0 else 0
                parts.append(
                    PartMemory(
                        stage=stage,
                        rank=rank,
                        layers=part.num_layers,
                        weights=part.bytes_of(matrices, rest, at.weight_format),
                        kv_cache=self._cached(size, stage, rank) + self._states(size, part),
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

    def _gpus(self, size: StepSize) -> tuple[PartMemory, ...]:
        """Return the bytes of the fullest GPU of each stage."""
        planned = self._planned(size)
        weights = self.fit.footprint.stage_bytes or (planned.weights,)
        return tuple(
            PartMemory(
                stage=stage,
                rank=0,
                layers=part.num_layers,
                weights=weights[stage],
                kv_cache=self._cached(size, stage, self.at.tp - 1) + self._states(size, part),
                activations=planned.activations,
                runtime=planned.overhead,
            )
            for stage, part in enumerate(self.stages)
        )

    def _blocks_each(self, size: StepSize) -> int:
        return self.fit.footprint.blocks_per_request(
            size.max_model_len, size.max_num_batched_tokens
        )

    def _states(self, size: StepSize, part: ModelShape) -> int:
        """Return the bytes of the states of all requests and checkpoints in a part of the model,
        with their room for drafts."""
        footprint = self.fit.footprint
        rows = size.max_num_seqs + footprint.num_checkpoints(size)
        share = Fraction(part.state_bytes, max(1, self.shape.state_bytes))
        return int(rows * footprint.spec.state_bytes * share)

    def _cached(self, size: StepSize, stage: int, rank: int) -> int:
        """Return the bytes of one device's blocks, those that are never allocated included."""
        footprint = self.fit.footprint
        ends = footprint.stage_ends or (self.shape.num_layers,)
        groups = stage_groups(footprint.groups, PipelineStage.all_of(ends)[stage])
        blocks = size.max_num_seqs * self._blocks_each(size) + RESERVED_BLOCKS
        return blocks * block_bytes(cut_groups(groups, rank, footprint.ranks), footprint.block_size)

    def _sized(self, context: int, batch: int) -> StepSize:
        wishes = replace(self.fit.config, max_model_len=context, max_num_seqs=batch)
        return replace(self.fit, config=wishes).step_size(Notes())

    def _planned(self, size: StepSize) -> MemoryPlan:
        blocks = size.max_num_seqs * self._blocks_each(size)
        return self.fit.footprint.plan(size, blocks, self.fit.limit)

    def _fits(self, context: int, batch: int) -> bool:
        plan = self._planned(self._sized(context, batch))
        return plan.total <= plan.limit


def _computing(shape: ModelShape, at: Setting) -> tuple[EngineConfig, ModelSpec, Hardware, Compute]:
    """Return the options, model, hardware and compute settings of an engine in a setting."""
    quantization, method = weight_facts(at.weight_format).quantization or "none", at.source.method
    spec = shape.like.in_floats
    if at.weight_format == shape.stored and shape.like.quantization is not None:
        spec, quantization = shape.like, "none"
    dtype = shape.working_dtype(at.weight_format)
    config = EngineConfig(
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=AUTO if at.kv_format == SHORT_DTYPES[dtype] else at.kv_format,
        tensor_parallel_size=at.tp,
        pipeline_parallel_size=at.pp if at.exact else 1,
        expert_parallel=at.expert_parallel,
        spec_method=method,
        spec_model=at.source.path if method not in (None, MTP) else None,
    )
    hardware = at.hardware or hardware_of(at.device)
    device = "cpu" if at.exact else "cuda:0"
    gpu = None if at.exact else next(iter(hardware.gpus), None)
    compute = computing_in(dtype, config, spec, hardware, device, gpu, Notes())
    return config, spec, hardware, compute


def _stage_ends(
    at: Setting, config: EngineConfig, spec: ModelSpec, hardware: Hardware, compute: Compute
) -> tuple[int, ...]:
    """Return the engine's decision on the layers of each stage on a CPU. Raises ConfigError if the
    engine would refuse this division."""
    full_config = replace(config, max_model_len=at.context)
    try:
        if at.hardware is not None:
            check_group(full_config, spec, compute, hardware)
        return stage_ends(full_config, spec, compute, at.source)
    except ConfigError as error:
        name = {"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp"}.get(error.field)
        raise ConfigError(name or error.field, error.message) from None


def hardware_of(device: Device) -> Hardware:
    """Return hardware with only this device, and a complete installation of kvik."""
    memory = int(device.memory)
    gpus = (Gpu(0, device.name, memory, memory, (9, 0)),) if device.kind == "cuda" else ()
    bare = Hardware(device.name, 1, memory, "its memory", _ADVANCED_CPU, gpus)
    return replace(bare, native=True, triton=True)
