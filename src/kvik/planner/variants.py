"""The same model with other attention heads, in other weight formats, with other KV formats; and
what a prompt's attention moves with and without the matrix of all scores."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvik.errors import ConfigError
from kvik.planner.devices import Setting
from kvik.planner.formats import WEIGHT_FORMATS
from kvik.planner.memory import memory_of
from kvik.planner.roofline import decode_rate
from kvik.planner.shape import ModelShape
from kvik.spec.kv import KV_FORMATS
from kvik.spec.model import DTYPE_BYTES

GROUPED_HEADS = 8  # KV heads of the GQA row of a model that has none; most models with GQA have 8


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """Attributes:
    kv_heads: 0: a latent serves all heads.
    kv_per_token, kv_total: bytes, of a token and of the whole batch at its context; the model's,
        not a device's.
    ceiling: tokens/s of decode, all requests together; None: the device's speed is unknown in
        this format, or these heads cannot be shared by this many.
    own: this is what the model has.
    """

    attention: str
    kv_heads: int
    kv_per_token: int
    kv_total: int
    ceiling: float | None
    own: bool


@dataclass(frozen=True, slots=True)
class WeightRow:
    """Attributes:
    bytes: of the whole model.
    bits: per parameter, with scales and with what is not quantised.
    single, ceiling: tokens/s of decode, of one request and of the batch.
    fits: the batch at its context.
    largest_batch: of that context.
    """

    format: str
    bytes: int
    bits: float
    single: float | None
    ceiling: float | None
    fits: bool
    largest_batch: int


@dataclass(frozen=True, slots=True)
class KVRow:
    """As `WeightRow`, of a format of the KV cache."""

    format: str
    per_token: int
    total: int
    ceiling: float | None
    fits: bool
    largest_batch: int


def attention_variants(shape: ModelShape, at: Setting) -> tuple[AttentionRow, ...]:
    """Return the model with the caches of MHA, GQA, MQA and MLA.

    Only the cache differs: the projections, whose sizes would change too, are left as they are, so
    that the rows differ by the cache alone.
    """
    rows = []
    for attention, kv_heads, variant in _attentions(shape):
        total = at.batch * variant.kv_bytes(at.context, at.kv_format)
        rows.append(
            AttentionRow(
                attention=attention,
                kv_heads=kv_heads,
                kv_per_token=variant.kv_bytes_per_token(at.kv_format),
                kv_total=total,
                ceiling=_ceiling(variant, at),
                own=variant is shape,
            )
        )
    return tuple(rows)


def weight_formats(shape: ModelShape, at: Setting) -> tuple[WeightRow, ...]:
    """Return the model in each format in which it can be divided so."""
    rows = []
    for name in WEIGHT_FORMATS:
        stored = replace(at, weight_format=name)
        try:
            memory = memory_of(shape, stored)
        except ConfigError:
            continue
        size = shape.weight_bytes(name)
        rows.append(
            WeightRow(
                format=name,
                bytes=size,
                bits=8 * size / shape.parameters,
                single=_ceiling(shape, replace(stored, batch=1)),
                ceiling=_ceiling(shape, stored),
                fits=memory.fits,
                largest_batch=memory.largest_batch,
            )
        )
    return tuple(rows)


def kv_formats(shape: ModelShape, at: Setting) -> tuple[KVRow, ...]:
    rows = []
    for name in KV_FORMATS:
        stored = replace(at, kv_format=name)
        memory = memory_of(shape, stored)
        rows.append(
            KVRow(
                format=name,
                per_token=shape.kv_bytes_per_token(name),
                total=at.batch * shape.kv_bytes(at.context, name),
                ceiling=_ceiling(shape, stored),
                fits=memory.fits,
                largest_batch=memory.largest_batch,
            )
        )
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """The attention of one prompt, which FlashAttention (arXiv 2205.14135) computes in tiles.

    Attributes:
        matrix: bytes of the scores of one layer, of all heads, in the dtype that is computed in.
        moved, tiled: bytes read and written in all layers, with the matrix and in tiles.
        seconds, tiled_seconds: of moving them on the devices that share a layer; None: the speed
            is unknown.
    """

    prompt: int
    matrix: int
    moved: int
    tiled: int
    seconds: float | None
    tiled_seconds: float | None


def attention_matrices(
    shape: ModelShape, at: Setting, prompts: Iterable[int]
) -> tuple[MatrixRow, ...]:
    """Return what attention moves for each length of a prompt.

    With the matrix, scores are written, read by the softmax, and its weights written and read
    again. In tiles, queries, keys, values and results are moved once, which is the least.
    """
    item = DTYPE_BYTES[shape.working_dtype(at.weight_format)]
    sharing = 1 if at.exact else at.tp
    bandwidth = at.device.bandwidth * sharing if at.device.bandwidth else None
    queries = shape.num_layers * shape.num_heads * (shape.head_dim + shape.v_head_dim)
    keys = sum(cache.layers * cache.elements for cache in shape.caches)
    rows = []
    for prompt in prompts:
        matrix = shape.num_heads * prompt * prompt * item
        tiled = prompt * (queries + keys) * item
        moved = tiled + 4 * shape.num_layers * matrix
        times = (moved / bandwidth, tiled / bandwidth) if bandwidth else (None, None)
        rows.append(MatrixRow(prompt, matrix, moved, tiled, *times))
    return tuple(rows)


def _ceiling(shape: ModelShape, at: Setting) -> float | None:
    try:
        ceiling, _ = decode_rate(shape, at)
    except ConfigError:
        return None
    return ceiling


def _attentions(shape: ModelShape) -> Iterator[tuple[str, int, ModelShape]]:
    """Yield name, KV heads (0: a latent) and the model with that attention, its own unchanged."""
    grouped = max(n for n in range(1, GROUPED_HEADS + 1) if shape.num_heads % n == 0)
    for attention, kv_heads in (("MHA", shape.num_heads), ("GQA", grouped), ("MQA", 1)):
        if attention == shape.attention:
            yield attention, shape.num_kv_heads, shape
        elif attention != "GQA" or 1 < kv_heads < shape.num_heads:
            yield attention, kv_heads, _with_heads(shape, attention, kv_heads)
    if shape.attention == "MLA":
        yield "MLA", 0, shape
    else:
        yield "MLA", 0, _with_latent(shape)


def _with_heads(shape: ModelShape, attention: str, kv_heads: int) -> ModelShape:
    elements = kv_heads * (shape.head_dim + shape.v_head_dim)
    return _with_cache(replace(shape, num_kv_heads=kv_heads), attention, elements, 2 * kv_heads, 0)


def _with_latent(shape: ModelShape) -> ModelShape:
    """Return a latent of four heads' width and a rotary key of half a head's, in the proportion of
    DeepSeek-V2 (arXiv 2405.04434, section 2.1.4)."""
    latent, rotary = 4 * shape.head_dim, shape.head_dim // 2
    return _with_cache(shape, "MLA", latent + rotary, 1, latent)


def _with_cache(
    shape: ModelShape, attention: str, elements: int, vectors: int, latent: int
) -> ModelShape:
    caches = tuple(replace(cache, elements=elements, vectors=vectors) for cache in shape.caches)
    return replace(
        shape, attention=attention, latent_dim=latent, caches=caches, layers=(), spec=None
    )
