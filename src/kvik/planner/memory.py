"""Memory of the fullest device by part, and what fits.

The bytes come from `config.memory.Footprint`, the formula that the engine itself plans with, so a
plan for this machine equals what an engine here decides for the same options.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from kvik.config.compute import computing_in
from kvik.config.config import EngineConfig, Notes
from kvik.config.fit import Fit, footprint_of
from kvik.config.hardware import Gpu, Hardware
from kvik.config.memory import Limit, MemoryPlan, StepSize
from kvik.planner.devices import Device, Setting
from kvik.planner.formats import weight_facts
from kvik.planner.parallel import share
from kvik.planner.search import largest
from kvik.planner.shape import ModelShape
from kvik.spec.kv import KVCacheSpec
from kvik.spec.layers import LatentSpec
from kvik.spec.model import LinearLayers
from kvik.spec.rope import RopeSpec

MOST_REQUESTS = 65_536  # as `max_num_seqs` allows
_ADVANCED_CPU = frozenset({"avx2", "fma"})  # what the native kernels need at least


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on the fullest device.

    Attributes:
        limit: that the engine may use.
        activations: peak of one step of `step_tokens` tokens.
        kv_cache: of all requests at the full context, in whole blocks.
        runtime: libraries, tables, graphs and the peak of loading.
        kv_per_token: of one request, not rounded to blocks, before any window is full.
        kv_per_request: of one request at the full context, in whole blocks.
        kv_padding: part of `kv_cache` that stays empty when all requests are at their end.
        largest_batch: requests of the full context that fit; 0: none.
        longest_context: that fits for this many requests, at most the model's; 0: none.
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
    longest_context: int

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
    """What stays empty of the KV cache: in blocks, and where each request reserves as much as the
    longest may need. Bytes on the fullest device.

    Attributes:
        block_size: tokens of a block.
        paged: empty in the last blocks of the batch, on average: half a block of each request.
        reserved: that the model's whole context takes, of each request.
        empty: share of that which a request of the plan's context leaves empty.
        batch: requests that fit so; in blocks it is `Memory.largest_batch`.
    """

    block_size: int
    paged: int
    reserved: int
    empty: float
    batch: int


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in given formats, as `Footprint` reads it."""

    vocab_size: int
    hidden_size: int
    inner_width: int
    experts_of_token: int
    num_heads: int
    head_dims: tuple[int, ...]
    query_width: int
    key_width: int
    max_context: int
    gated_mlp: bool
    rotations: tuple[tuple[RopeSpec, int], ...]
    shape: ModelShape
    weight_format: str
    kv: tuple[KVCacheSpec, ...] = field(repr=False)
    latent: LatentSpec | None = None  # no backend of kvik takes the shapes that are planned here
    state_bytes: int = 0
    state_width: int = 0
    query_scales: tuple[()] = ()

    @classmethod
    def of(cls, shape: ModelShape, weight_format: str, kv_format: str) -> StoredModel:
        learned = any(matrix.role == "positions" for matrix in shape.matrices)
        # MLA gathers its latent in place of K and V.
        widest = max(cache.elements for cache in shape.caches)
        return cls(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            inner_width=shape.intermediate_size,
            experts_of_token=max(matrix.active for matrix in shape.matrices),
            num_heads=shape.num_heads,
            head_dims=(shape.head_dim,),
            query_width=shape.num_heads * shape.head_dim,
            key_width=-(-widest // 2),
            max_context=shape.max_context,
            gated_mlp=shape.gated_mlp,
            rotations=() if learned else ((RopeSpec(), shape.head_dim),),
            shape=shape,
            weight_format=weight_format,
            kv=_kv_specs(shape, kv_format),
            state_bytes=shape.state_bytes,
            state_width=shape.state_width,
        )

    def weight_bytes(self, dtype: str) -> int:
        """As the shape counts them for all of a plan, quantised ones included."""
        return self.shape.weight_bytes(self.weight_format)

    def linear_layers(self) -> tuple[LinearLayers, ...]:
        """None that would have to be counted anew."""
        return ()

    def kv_specs(self, dtype_bytes: int) -> list[KVCacheSpec]:
        return list(self.kv)


def laid_out(shape: ModelShape, at: Setting) -> ModelShape:
    """Return the model with quantised weights as the kernels that run there have them.

    Raises:
        ConfigError: as `memory_of`.
    """
    return replace(shape, kernels=_Planner.of(shape, at).part.kernels)


def memory_of(shape: ModelShape, at: Setting) -> Memory:
    """Return the memory of a setting's requests at their full context, and what would fit.

    Raises:
        ConfigError: the model cannot be shared by this many devices, or an unknown format.
    """
    planner = _Planner.of(shape, at)
    part, footprint, limit = planner.part, planner.fit.footprint, planner.fit.limit.size
    size = planner.sized(at.context, at.batch)
    parts = planner.planned(size)

    def fits(context: int, batch: int) -> bool:
        return planner.planned(planner.sized(context, batch)).total <= limit

    return Memory(
        limit=limit,
        weights=parts.weights,
        kv_cache=parts.kv_cache,
        activations=parts.activations,
        runtime=parts.overhead,
        kv_per_token=part.kv_bytes_per_token(at.kv_format),
        kv_per_request=planner.blocks_each(size) * footprint.block_bytes,
        kv_padding=parts.kv_cache - at.batch * part.kv_bytes(at.context, at.kv_format),
        step_tokens=size.max_num_batched_tokens,
        largest_batch=largest(lambda batch: fits(at.context, batch), MOST_REQUESTS),
        longest_context=largest(lambda context: fits(context, at.batch), shape.max_context),
    )


def kv_waste(shape: ModelShape, at: Setting) -> KVWaste:
    """Return what blocks leave empty of the KV cache beside contiguous reservations.

    Raises:
        ConfigError: as `memory_of`.
    """
    planner = _Planner.of(shape, at)
    part, block_size = planner.part, planner.fit.footprint.block_size
    reserved = part.kv_bytes(part.max_context, at.kv_format)
    used = part.kv_bytes(at.context, at.kv_format)

    def fits(batch: int) -> bool:
        parts = planner.planned(planner.sized(at.context, batch))
        others = parts.total - parts.kv_cache
        return others + batch * reserved <= planner.fit.limit.size

    return KVWaste(
        block_size=block_size,
        paged=at.batch * (block_size - 1) * part.kv_bytes_per_token(at.kv_format) // 2,
        reserved=reserved,
        empty=1.0 - used / reserved,
        batch=largest(fits, MOST_REQUESTS),
    )


def bytes_of(shape: ModelShape, at: Setting) -> tuple[int, int]:
    """Return `total` and `limit` of `memory_of`, without the search for what would fit.

    Raises:
        ConfigError: as `memory_of`.
    """
    planner = _Planner.of(shape, at)
    return planner.planned(planner.sized(at.context, at.batch)).total, planner.fit.limit.size


@dataclass(frozen=True, slots=True)
class _Planner:
    """Plans of a setting's fullest device, for any number of requests of any length.

    Attributes:
        part: of the model, on that device.
    """

    part: ModelShape
    fit: Fit

    @classmethod
    def of(cls, shape: ModelShape, at: Setting) -> _Planner:
        part = share(shape, at.tp, at.pp)
        facts = weight_facts(at.weight_format)
        config = EngineConfig(
            dtype=shape.working_dtype(at.weight_format),
            quantization=facts.quantization or "none",
        )
        hardware = at.hardware or hardware_of(at.device)
        on_cpu = at.device.kind == "cpu"
        device = "cpu" if on_cpu else "cuda:0"
        gpu = None if on_cpu else next(iter(hardware.gpus), None)
        stored = StoredModel.of(part, at.weight_format, at.kv_format)
        compute = computing_in(config.dtype, config, stored, hardware, device, gpu, Notes())
        part = replace(part, kernels=compute.kernels)
        stored = replace(stored, shape=part)
        footprint = footprint_of(config, stored, hardware, compute)
        return cls(part, Fit(config, footprint, Limit(int(at.device.memory * at.utilization), "")))

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


def hardware_of(device: Device) -> Hardware:
    """Return a machine of which only the device is known, with a complete installation of kvik."""
    memory = int(device.memory)
    gpus = (Gpu(0, device.name, memory, memory, (9, 0)),) if device.kind == "cuda" else ()
    bare = Hardware(device.name, 1, memory, "its memory", _ADVANCED_CPU, gpus)
    return replace(bare, native=True, triton=True)


def _kv_specs(shape: ModelShape, kv_format: str) -> tuple[KVCacheSpec, ...]:
    """Return the KV specs, equal layers merged: blocks stay the same, and planning is faster."""
    merged = math.gcd(*(cache.layers for cache in shape.caches))
    specs: list[KVCacheSpec] = []
    for cache in shape.caches:
        spec = KVCacheSpec(
            num_kv_heads=max(1, cache.vectors // 2),
            head_dim=cache.elements // cache.vectors,
            bytes_per_token=merged * cache.token_bytes(kv_format),
            window=cache.window,
        )
        specs += [spec] * (cache.layers // merged)
    return tuple(specs)
