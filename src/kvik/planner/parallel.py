"""How processes or devices divide a model: the part of each, and their communication.

On CPUs the parts run in processes of one machine, and the cut is exact (docs/scale-out.md): every
matrix is cut by its outputs, and all processes read all activations. On GPUs each layer is cut as
in Megatron-LM (the fast cut, Shoeybi et al. 2019): the first matrix of a pair by its outputs, the
second by its inputs, so that each pair ends in one sum over the devices. A pipeline gives each
stage whole layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from kvik.errors import ConfigError
from kvik.planner.shape import LayerShape, MatrixGroup, ModelShape, changed_layers, token_bytes
from kvik.spec.declared import SMALL
from kvik.spec.kv import KVCacheSpec
from kvik.spec.shares import MAX_RANKS, MAX_STAGES, TILE, HeadShare, cut_cache, share_of, stages_of

MAX_DEVICES = 1024
ACTIVATION_BYTES, FP32 = 2, 4  # per number that devices send each other, and of whole experts

# Replicated on every device in the fast cut: lookup tables, and matrices that are too small to be
# worth a message or, like MLA's latents, not specific to a head.
REPLICATED = SMALL | {"embedding", "positions"}
# Cut by inputs: the second matrix of each pair, unless that would divide a group of inputs or their
# order (act-order of GPTQ). All others are cut by outputs.
SECOND = frozenset({"o", "down", "expert_down", "shared_down"})
# Products of the exact cut that no other process reads: a process expands latents only for its own
# heads.
UNSHARED = frozenset({"kv_up"})


def check_parallel(
    shape: ModelShape, tp: int, pp: int, *, exact: bool = False, whole_experts: bool = False
) -> None:
    """Raise ConfigError if `tp` processes or devices cannot share a layer or its whole experts, or
    `pp` stages cannot share the layers."""
    limits = (MAX_RANKS, MAX_STAGES) if exact else (MAX_DEVICES, MAX_DEVICES)
    for name, value, limit in (("tp", tp, limits[0]), ("pp", pp, limits[1])):
        if not 1 <= value <= limit:
            raise ConfigError(name, f"must be an integer in [1, {limit}], not {value}")
    heads = shape.num_heads if shape.spec is None else shape.spec.divisible_heads
    if tp > heads:
        parts = "query heads" if heads == shape.num_heads else "groups of query heads"
        raise ConfigError("tp", f"must be at most the {heads} {parts}, not {tp}")
    if whole_experts:
        experts = min((m.experts for m in shape.matrices if m.experts), default=0)
        if not experts:
            reason = f"must be left out: {shape.architecture} has no experts"
            raise ConfigError("expert_parallel", reason)
        if not 1 < tp <= experts:
            reason = f"needs --tp from 2 to {experts}, the experts of a layer, not {tp}"
            raise ConfigError("expert_parallel", reason)
    if pp > shape.num_layers:
        raise ConfigError("pp", f"must be at most the {shape.num_layers} layers, not {pp}")
    if pp > 1 and (joined := _joined(shape)):
        try:
            stages_of([1] * shape.num_layers, 0, 0, pp, joined)
        except ValueError as error:
            raise ConfigError("pp", f"cannot be {pp}: {error}") from None


def can_share(shape: ModelShape, tp: int, pp: int = 1, *, whole_experts: bool = False) -> bool:
    """Return whether `check_parallel` accepts this division."""
    try:
        check_parallel(shape, tp, pp, whole_experts=whole_experts)
    except ConfigError:
        return False
    return True


@lru_cache(maxsize=32)  # each step of a load needs them
def shares(
    shape: ModelShape, tp: int, pp: int, weight_format: str, *, whole_experts: bool = False
) -> tuple[ModelShape, ...]:
    """Return the part on the fullest device of each stage in the fast cut, as smaller models.

    If there are more devices than KV heads, K and V of a head are replicated. MLA's latent serves
    all heads and is replicated on all devices. Each device holds the states of its own heads.

    Args:
        weight_format: of the weights; stages have about equally many bytes in it.
        whole_experts: each device has some experts whole. A token is expected to choose as many on
            each.

    Raises:
        ConfigError: the model cannot be cut so.
    """
    check_parallel(shape, tp, pp, whole_experts=whole_experts)
    if tp == pp == 1:
        return (shape,)
    parts = (shape,) if pp == 1 else stages(shape, stage_runs(shape, pp, weight_format))
    heads, kv_heads = _most_heads(shape, tp)

    def cut(layer: LayerShape) -> LayerShape:
        return replace(
            layer,
            matrices=tuple(
                _some_experts(matrix, tp - 1, tp)  # no rank has more
                if whole_experts and matrix.experts
                else _cut(matrix, shape, tp, weight_format)
                for matrix in layer.matrices
            ),
            cache=layer.cache and cut_cache(layer.cache, tp - 1, tp),  # no rank has more heads
            state_bytes=-(-layer.state_bytes // tp),
            state_flops=tuple((kind, -(-flops // tp)) for kind, flops in layer.state_flops),
        )

    return tuple(
        replace(
            part,
            num_heads=heads,
            num_kv_heads=kv_heads,
            layers=changed_layers(part.layers, cut),
            outside=cut(part.outside),
            runs=False,
        )
        for part in parts
    )


def _most_heads(shape: ModelShape, tp: int) -> tuple[int, int]:
    """Return the query heads and the KV heads of the fullest device. They need not divide evenly:
    see `HeadShare`."""
    shares = (HeadShare.of(shape.num_heads, shape.num_kv_heads, r, tp).heads for r in range(tp))
    return max(end - first for first, end in shares), -(-shape.num_kv_heads // tp)


def _cut(matrix: MatrixGroup, shape: ModelShape, tp: int, weight_format: str) -> MatrixGroup:
    """Return the part of a matrix on the fullest device, of the kind that the whole matrix has."""
    if matrix.role in REPLICATED or tp == 1:
        return matrix
    heads, kv_heads = _most_heads(shape, tp)
    if matrix.role in SECOND:
        inputs = -(-matrix.inputs * heads // shape.num_heads)
        if matrix.role != "o":
            inputs = _channels(matrix, shape, tp, weight_format)
        kind = shape.kind_of(matrix, weight_format)
        if kind is not None and (kind.ordered or (kind.group and inputs % kind.group)):
            return replace(matrix, outputs=-(-matrix.outputs // tp))
        return replace(matrix, inputs=inputs)
    if matrix.role.endswith("up") and matrix.role not in ("q_up", "kv_up"):
        second = matrix.role.removesuffix("gate_up").removesuffix("up") + "down"
        copies = 2 if matrix.role.endswith("gate_up") else 1
        down = replace(matrix, role=second, inputs=matrix.outputs // copies)
        return replace(matrix, outputs=copies * _channels(down, shape, tp, weight_format))
    if matrix.role == "qkv":
        pair = shape.head_dim + shape.v_head_dim
        queries = matrix.outputs - shape.num_kv_heads * pair
        local_queries = -(-queries * heads // shape.num_heads)
        return replace(matrix, outputs=local_queries + kv_heads * pair)
    if matrix.role in ("q_up", "kv_up"):
        return replace(matrix, outputs=-(-matrix.outputs * heads // shape.num_heads))
    return replace(matrix, outputs=-(-matrix.outputs // tp))


def _some_experts(matrix: MatrixGroup, rank: int, tp: int) -> MatrixGroup:
    """Return the experts of one process, undivided."""
    first, end = share_of(matrix.experts, rank, tp)
    return replace(matrix, count=matrix.count // matrix.experts * (end - first))


def _channels(down: MatrixGroup, shape: ModelShape, tp: int, weight_format: str) -> int:
    """Return the channels of an MLP on the fullest device, which divides no group of weights."""
    kind = shape.kind_of(down, weight_format)
    unit = math.lcm(TILE, kind.group if kind and kind.group else 1)
    return min(down.inputs, -(-down.inputs // (unit * tp)) * unit)


# Stages of a pipeline.


def stage_runs(
    shape: ModelShape, pp: int, weight_format: str, kv_format: str = "", tokens: int = 0
) -> tuple[range, ...]:
    """Return the layers of each stage, chosen to minimise the bytes of the largest stage: of
    weights, and of the cache for some tokens.

    Raises:
        ConfigError: too many layers must stay in one stage for this many stages.
    """
    check_parallel(shape, 1, pp)
    costs = []
    for layer in shape.layers:
        cost = shape.bytes_of(layer.matrices, layer.other_parameters, weight_format)
        costs.append(
            cost + (tokens * token_bytes(layer.cache, kv_format) if layer.cache and tokens else 0)
        )
    first, last = (shape.bytes_of(end, 0, weight_format) for end in _ends(shape))
    return stages_of(costs, first, last, pp, _joined(shape))


def stages(shape: ModelShape, runs: Sequence[range]) -> tuple[ModelShape, ...]:
    """Return the stages of a pipeline as smaller models. The first also has a tied embedding."""
    if len(runs) <= 1:
        return (shape,)
    first, last = _ends(shape)
    parts = []
    for run in runs:
        is_last = run is runs[-1]
        matrices = (*(first if run is runs[0] else ()), *(last if is_last else ()))
        norms = shape.outside.other_parameters if is_last else 0
        layers = shape.layers[run.start : run.stop]
        outside = LayerShape(matrices, norms, None)
        parts.append(replace(shape, layers=layers, outside=outside, runs=False))
    return tuple(parts)


def unevenness(shape: ModelShape, runs: Sequence[range]) -> float:
    """Return the time of the stage with the most arithmetic over the mean time of all stages."""
    parts = stages(shape, runs)
    work = [part.active_parameters for part in parts]
    return len(parts) * max(work) / sum(work)


def _ends(shape: ModelShape) -> tuple[list[MatrixGroup], list[MatrixGroup]]:
    """Return the matrices that the first and the last stage have besides their layers."""
    head = [matrix for matrix in shape.outside.matrices if matrix.role == "head"]
    first = [matrix for matrix in shape.outside.matrices if matrix.role != "head"]
    if shape.tied:
        first += [replace(matrix, multiplied=False) for matrix in head]
    return first, head


def _joined(shape: ModelShape) -> list[tuple[int, int]]:
    """Return the pairs of layers that must be in one stage, the later one first."""
    if shape.spec is not None:
        return shape.spec.joined_layers
    layers = enumerate(layer.kv_from for layer in shape.layers)
    return [(reader, source) for reader, source in layers if source is not None]


# The exact cut.


def together(shape: ModelShape, tp: int) -> ModelShape:
    """Return the model as all processes of the exact cut compute it together: each process reads
    all states, and the key heads it shares with others."""
    if tp == 1:
        return shape

    def of_all(layer: LayerShape) -> LayerShape:
        return replace(
            layer,
            cache=layer.cache and _cache_of_all(layer.cache, tp),
            state_bytes=tp * layer.state_bytes,
            state_flops=tuple((kind, tp * flops) for kind, flops in layer.state_flops),
        )

    return replace(shape, layers=changed_layers(shape.layers, of_all))


def _cache_of_all(cache: KVCacheSpec, tp: int) -> KVCacheSpec:
    """Return a cache with the heads that all processes store, those of several repeatedly."""
    parts = (cut_cache(cache, rank, tp) for rank in range(tp))
    return replace(cache, num_kv_heads=sum(part.num_kv_heads for part in parts))


def own_rows(
    matrix: MatrixGroup, shape: ModelShape, rank: int, tp: int, *, whole_experts: bool = False
) -> MatrixGroup:
    """Return the part of a matrix that one process of the exact cut has; a table other than the
    head is whole."""
    if whole_experts and matrix.experts:
        return _some_experts(matrix, rank, tp)
    if not matrix.multiplied and matrix.role != "head":
        return matrix
    piece = TILE
    if matrix.role == "kv_up":
        piece = matrix.outputs // shape.num_heads
    first, end = share_of(-(-matrix.outputs // piece), rank, tp)
    rows = min(end * piece, matrix.outputs) - min(first * piece, matrix.outputs)
    return replace(matrix, outputs=rows)


@dataclass(frozen=True, slots=True)
class Collectives:
    """The communication in a step among processes or devices that share layers."""

    # "exchange": each computes some columns, and all read all of them; "all-reduce": each has a
    # partial sum, and all get the total.
    kind: str
    count: int  # number of collectives in a step
    layer: int  # maximum number in a layer
    numbers: int  # numbers per token in that layer, all columns or sums together


def collectives(shape: ModelShape, *, exact: bool, whole_experts: bool = False) -> Collectives:
    """Return the collectives of a step with more than one process or device.

    The exact cut has one after each product and after attention, two per layer for experts, and one
    after the token vectors if these are rows of the head. With whole experts it has one for them,
    of the outputs of each in fp32. The fast cut has one after attention or states, and one after
    the MLP or experts.
    """
    if not exact:
        each = [
            len({m.role == "o" for m in layer.matrices if m.role in SECOND})
            for layer in shape.layers
        ]
        return Collectives("all-reduce", sum(each), max(each), max(each) * shape.hidden_size)
    counts: list[int] = []
    numbers: list[int] = []
    for layer in shape.layers:
        products = [m for m in layer.matrices if m.role not in UNSHARED and not m.experts]
        routed = [
            matrix
            for matrix in layer.matrices
            if matrix.experts and (matrix.role in SECOND or not whole_experts)
        ]
        counts.append(sum(m.count * m.uses for m in products) + len(routed) + layer.attends)
        made = sum(m.count * m.uses * _columns(m) for m in products)
        for matrix in routed:
            if whole_experts:
                made += matrix.active * matrix.outputs * FP32 // ACTIVATION_BYTES
            else:
                made += _columns(matrix) * (1 if matrix.role in SECOND else matrix.active)
        numbers.append(made + layer.attends * shape.num_heads * shape.v_head_dim)
    outer = shape.outside.matrices
    outside = sum(m.count for m in outer if m.multiplied or m.role == "token_inputs")
    outside += shape.tied  # token vectors are rows of a matrix that is cut
    count = sum(counts) + outside
    return Collectives("exchange", count, max(counts), max(numbers))


def _columns(matrix: MatrixGroup) -> int:
    """Return the columns of a product; gate and up are first multiplied with each other."""
    return matrix.outputs // (2 if matrix.role.endswith("gate_up") else 1)
