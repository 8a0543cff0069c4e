"""Variants of a model: other attention heads, weight formats and KV formats, and context
parallelism; and the traffic of prompt attention with and without the score matrix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvik.errors import ConfigError
from kvik.planner.devices import Setting
from kvik.planner.formats import WEIGHT_FORMATS, weight_format
from kvik.planner.memory import Memory, MemoryPlanner
from kvik.planner.parallel import MAX_DEVICES, can_share, shares
from kvik.planner.roofline import PlannedStep, decode, decode_rate, prefill, step_time
from kvik.planner.shape import LayerShape, ModelShape, changed_layers
from kvik.spec.kv import KV_FORMATS
from kvik.spec.model import DTYPE_BYTES

GROUPED_HEADS = 8  # KV heads of the GQA row of a model without GQA; 8 is most common


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """The model with one kind of attention."""

    attention: str
    kv_heads: int  # 0: one latent for all heads
    kv_per_token: int  # bytes over all devices
    kv_total: int  # likewise, of the whole batch at its context
    # Decode tokens/s of all requests together; None: the device's speed in this format is unknown,
    # or the heads cannot be divided among the devices.
    ceiling: float | None
    own: bool  # the model has this attention


@dataclass(frozen=True, slots=True)
class WeightRow:
    """The model in one weight format."""

    format: str
    bytes: int  # of the whole model
    bits: float  # mean per parameter, including scales and unquantised parts
    single: float | None  # decode tokens/s of one request
    ceiling: float | None  # decode tokens/s of the batch
    fits: bool  # whether the batch fits at its context
    largest_batch: int  # largest batch that fits at this context


@dataclass(frozen=True, slots=True)
class KVRow:
    """As `WeightRow`, for one KV format."""

    format: str
    per_token: int
    total: int
    ceiling: float | None
    fits: bool
    largest_batch: int


def attention_variants(shape: ModelShape, at: Setting) -> tuple[AttentionRow, ...]:
    """Return the model with the caches of MHA, GQA, MQA and MLA.

    The projections, whose sizes would change too, stay as they are, so that rows differ only by
    the cache.
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


def in_weight_format(shape: ModelShape, at: Setting, name: str) -> Setting:
    """Return the setting in another weight format, with the KV format that the same question would
    have."""
    kv_format = at.kv_format if at.kv_asked else weight_format(shape.working_dtype(name))
    return replace(at, weight_format=name, kv_format=kv_format)


def weight_formats(shape: ModelShape, at: Setting) -> tuple[WeightRow, ...]:
    """Return the model in each weight format in which it can be divided among the devices."""
    return tuple(
        WeightRow(
            format=stored.weight_format,
            bytes=shape.weight_bytes(stored.weight_format),
            bits=8 * shape.weight_bytes(stored.weight_format) / shape.parameters,
            single=_ceiling(shape, replace(stored, batch=1)),
            ceiling=_ceiling(shape, stored),
            fits=memory.fits,
            largest_batch=memory.largest_batch,
        )
        for stored, memory in _possible(
            shape, (in_weight_format(shape, at, name) for name in WEIGHT_FORMATS)
        )
    )


def kv_formats(shape: ModelShape, at: Setting) -> tuple[KVRow, ...]:
    """Return the model with each KV format that can be stored, by all processes that share it."""
    return tuple(
        KVRow(
            format=stored.kv_format,
            per_token=shape.kv_bytes_per_token(stored.kv_format),
            total=at.batch * shape.kv_bytes(at.context, stored.kv_format),
            ceiling=_ceiling(shape, stored),
            fits=memory.fits,
            largest_batch=memory.largest_batch,
        )
        for stored, memory in _possible(shape, (replace(at, kv_format=f) for f in KV_FORMATS))
    )


def _possible(shape: ModelShape, settings: Iterable[Setting]) -> Iterator[tuple[Setting, Memory]]:
    """Yield the settings that the engine would not refuse, with their memory."""
    for setting in settings:
        try:
            memory = MemoryPlanner.of(shape, setting).memory()
        except ConfigError:
            continue
        yield setting, memory


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """The attention of one prompt with the score matrix and in tiles (FlashAttention, arXiv
    2205.14135)."""

    prompt: int
    matrix: int  # bytes of the scores of all heads of a layer, in the dtype of computation
    moved: int  # bytes read and written in all layers, with the matrix
    tiled: int  # likewise, in tiles
    # To move them on the devices that share a layer; None: the speed is unknown.
    seconds: float | None
    tiled_seconds: float | None  # likewise, in tiles


def attention_matrices(
    shape: ModelShape, at: Setting, prompts: Iterable[int]
) -> tuple[MatrixRow, ...]:
    """Return the traffic of attention for each prompt length.

    With the matrix, scores are written, read by the softmax, and its weights are written and read.
    In tiles, queries, keys, values and results move once, which is the minimum.
    """
    item = DTYPE_BYTES[shape.working_dtype(at.weight_format)]
    sharing = 1 if at.exact else at.tp
    bandwidth = at.device.bandwidth * sharing if at.device.bandwidth else None
    queries = shape.num_layers * shape.num_heads * (shape.head_dim + shape.v_head_dim)
    keys = sum(layers * cache.numbers for cache, layers in shape.caches)
    rows = []
    for prompt in prompts:
        matrix = shape.num_heads * prompt * prompt * item
        tiled = prompt * (queries + keys) * item
        moved = tiled + 4 * shape.num_layers * matrix
        times = (moved / bandwidth, tiled / bandwidth) if bandwidth else (None, None)
        rows.append(MatrixRow(prompt, matrix, moved, tiled, *times))
    return tuple(rows)


PARTS_OF_CONTEXT = (1, 2, 4, 8)
PARTIAL_BYTES = 4  # per number of a partial result


@dataclass(frozen=True, slots=True)
class ContextRow:
    """Context parallelism: the tokens of every request are divided among GPUs that all have the
    weights. kvik does not run it."""

    parts: int  # of the tokens; 1: the plan itself
    kv_cache: int  # bytes per GPU, of all requests at their full context
    fits: bool  # whether it fits beside everything else on a GPU
    prefill: float  # seconds of a prompt that fills the context
    sending: float  # part of `prefill` in which arithmetic waits for keys and values of other parts
    decode: float  # seconds of a step
    # The same if that many GPUs share each layer instead; None: they cannot.
    wider_prefill: float | None
    wider_decode: float | None  # likewise


def context_parts(shape: ModelShape, at: Setting, memory: Memory) -> tuple[ContextRow, ...]:
    """Return the minimum times of requests whose tokens are divided among GPUs. Empty for CPUs, for
    pipelines, for states (which process tokens in order), and if the link or speed is unknown.

    Prompts use Ring Attention (Liu et al. 2023, arXiv 2310.01889), with rows interleaved so that
    all GPUs see equally many keys (Striped Attention, Brandon et al. 2023, arXiv 2311.09431): keys
    and values of other parts arrive while attention to those at hand is computed. A decode step
    reads the keys of each part where they are, then merges partial results by their largest scores
    and sums (as Tree Attention, Shyam et al. 2024, arXiv 2408.04093).
    """
    device = at.device
    if at.exact or at.pp > 1 or shape.state_bytes or not (device.rated and device.link):
        return ()
    (shard,) = shares(shape, at.tp, 1, at.weight_format, whole_experts=at.expert_parallel)
    prompt, step = prefill(at.context), decode(at.batch, at.context)
    attention, _ = _split_time(shape, at, prompt, "attention")
    reading, rest = _split_time(shape, at, step, "kv cache")
    received = shard.kv_bytes(at.context, at.kv_format) / device.link
    partial = shard.num_layers * at.batch * shard.num_heads * (shard.v_head_dim + 2) * PARTIAL_BYTES
    rows = []
    for parts in PARTS_OF_CONTEXT:
        if parts > at.context or parts * at.tp > MAX_DEVICES:
            break
        remote_share = (parts - 1) / parts
        _, products = _split_time(shape, at, prefill(-(-at.context // parts)), "attention")
        sending = max(0.0, remote_share * received - attention / parts)
        kv_cache = -(-memory.kv_cache // parts)
        wide = replace(at, tp=parts * at.tp)
        wider = can_share(shape, wide.tp, whole_experts=at.expert_parallel)
        rows.append(
            ContextRow(
                parts=parts,
                kv_cache=kv_cache,
                fits=memory.total - memory.kv_cache + kv_cache <= memory.limit,
                prefill=products + attention / parts + sending,
                sending=sending,
                decode=rest + reading / parts + 2 * remote_share * partial / device.link,
                wider_prefill=step_time(shape, wide, prompt).floor if wider else None,
                wider_decode=step_time(shape, wide, step).floor if wider else None,
            )
        )
    return tuple(rows)


def _split_time(
    shape: ModelShape, at: Setting, step: PlannedStep, name: str
) -> tuple[float, float]:
    """Return the minimum seconds of the named part of a step, and of all other parts."""
    parts = step_time(shape, at, step).parts
    seconds = sum(part.floor for part in parts if part.name == name)
    return seconds, sum(part.floor for part in parts) - seconds


def _ceiling(shape: ModelShape, at: Setting) -> float | None:
    try:
        ceiling, _ = decode_rate(shape, at)
    except ConfigError:
        return None
    return ceiling


def _attentions(shape: ModelShape) -> Iterator[tuple[str, int, ModelShape]]:
    """Yield name, KV heads (0: a latent) and the model with each attention; its own is `shape`."""
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
    head_dim = (shape.head_dim + shape.v_head_dim) // 2
    return _with_cache(replace(shape, num_kv_heads=kv_heads), attention, kv_heads, head_dim, 0)


def _with_latent(shape: ModelShape) -> ModelShape:
    """Return the model with MLA: a latent of four heads and a rotary key of half a head, as in
    DeepSeek-V2 (arXiv 2405.04434, section 2.1.4)."""
    latent, rotary = 4 * shape.head_dim, shape.head_dim // 2
    return _with_cache(shape, "MLA", 1, latent + rotary, latent)


def _with_cache(
    shape: ModelShape, attention: str, kv_heads: int, head_dim: int, latent: int
) -> ModelShape:
    def changed(layer: LayerShape) -> LayerShape:
        if layer.cache is None:
            return layer
        sizes = replace(layer.cache, num_kv_heads=kv_heads, head_dim=head_dim)
        return replace(layer, cache=replace(sizes, latent=latent > 0))

    layers = changed_layers(shape.layers, changed)
    return replace(shape, attention=attention, latent_dim=latent, layers=layers, runs=False)
