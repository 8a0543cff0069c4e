"""The MLPs of the experts that a router chose: a launch for each of the two matrices, in which a
program multiplies a tile of an expert's outputs by a block of its rows.

The addresses of all experts' matrices are in a table in GPU memory, since the choice determines
which of them a program needs. Words and bytes are multiplied as in dense layers
(`linear_words.py`, `linear_bytes.py`), but inputs are never split: there are enough programs.

Floor: few tokens, the bytes of the chosen experts; many, 2 * tokens * active * rows * inputs FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvik.kernels.reference.experts import experts_by
from kvik.kernels.triton import linear_bytes
from kvik.kernels.triton.expert_rows import ExpertRows, block_at, by_expert
from kvik.kernels.triton.launch import ceil_div, launch, power_of_two
from kvik.kernels.triton.linear_bytes import scaled, sums_of_bytes
from kvik.kernels.triton.linear_end import end_and_store
from kvik.kernels.triton.linear_words import dot, sums_of_words
from kvik.kernels.triton.matrix import TritonMatrices, format_of, how_bytes, narrow_in_words
from kvik.kernels.triton.matrix_shapes import FEW_INT4, MANY, Tile, tile_of_experts
from kvik.kernels.triton.packed import MIN_GROUP, STEP, TritonPacked, in_words, interleaved, span_of
from kvik.kernels.triton.rounding import round_tokens
from kvik.kernels.triton.words import E2M1, INT4, MINIMUM
from kvik.kernels.weights import ACTIVATIONS, ExpertSet, Matrix, Weight

# Parts of an expert's matrix: rows of the table.
VALUES = tl.constexpr(0)
SCALES = tl.constexpr(1)
FACTORS = tl.constexpr(2)
ORDER = tl.constexpr(3)
INPUT_SCALE = tl.constexpr(4)
BIAS = tl.constexpr(5)


@triton.jit
def part_of_table(table, part: tl.constexpr, expert, experts, dtype: tl.constexpr):
    """Return a pointer to a part of an expert's matrix; it is a multiple of 16 bytes."""
    address = tl.load(table + part * experts + expert)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _row_of(pair, pairs, PER: tl.constexpr):
    """Return rows of x, [BT] int64. After the last pair its row repeats, and is not stored."""
    return (tl.minimum(pair, pairs - 1) // PER).to(tl.int64)


# Otherwise steps of 1 token, or of a multiple of 16, would be compiled separately.
@triton.jit(do_not_specialize=["pairs"])
def float_experts_kernel(
    x, table, blocks, order, y, pairs, experts, rows, inputs, x_stride, PER: tl.constexpr,
    BIASED: tl.constexpr, SPAN: tl.constexpr, WHOLE: tl.constexpr, ACTIVATION: tl.constexpr,
    BO: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grid [tiles of rows, blocks]; x [pairs / PER, inputs], y [pairs, outputs]. Rows of gate are
    before those of up, and are multiplied alternately. WHOLE: inputs are whole spans."""
    first = tl.program_id(0) * BO
    expert, pair = block_at(blocks, order, pairs, tl.program_id(1), tl.num_programs(1), BT)
    if expert < 0:
        return
    dtype: tl.constexpr = x.dtype.element_ty
    o = tl.minimum(first + tl.arange(0, BO), rows - 1)
    if ACTIVATION % 2 == 1:
        o = o // 2 + o % 2 * (rows // 2)
    k = tl.arange(0, SPAN)
    values = part_of_table(table, VALUES, expert, experts, dtype)
    lines = values + o.to(tl.int64)[:, None] * inputs + k[None, :]
    columns = x + _row_of(pair, pairs, PER)[None, :] * x_stride + k[:, None]
    sums = tl.zeros((BO, BT), tl.float32)
    for start in tl.range(0, inputs, SPAN, num_stages=STAGES):
        if WHOLE:
            w, xs = tl.load(lines + start), tl.load(columns + start)
        else:
            inside = start + k < inputs
            w = tl.load(lines + start, mask=inside[None, :], other=0.0)
            xs = tl.load(columns + start, mask=inside[:, None], other=0.0)
        sums = dot(w, xs, sums)
    bias = part_of_table(table, BIAS, expert, experts, dtype) if BIASED else None
    end_and_store(sums, first, pair, bias, None, y, pairs, rows, 0, ACTIVATION)


@triton.jit(do_not_specialize=["pairs"])
def word_experts_kernel(
    x, table, blocks, order, y, pairs, experts, rows, inputs, steps, x_stride, scale_stride,
    PER: tl.constexpr, BIASED: tl.constexpr, FORMAT: tl.constexpr, OFFSET: tl.constexpr,
    GROUP: tl.constexpr, SPAN: tl.constexpr, WHOLE: tl.constexpr, SUBTRACT: tl.constexpr,
    ACTIVATION: tl.constexpr, BO: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grid [tiles of rows, blocks]; the rest as in `float_experts_kernel` and `words_kernel`."""
    first = tl.program_id(0) * BO
    expert, pair = block_at(blocks, order, pairs, tl.program_id(1), tl.num_programs(1), BT)
    if expert < 0:
        return
    o = first + tl.arange(0, BO)
    wide_type: tl.constexpr = tl.int32 if FORMAT == INT4 else tl.float32
    scale_type: tl.constexpr = tl.uint8 if FORMAT == E2M1 else wide_type
    scales = part_of_table(table, SCALES, expert, experts, scale_type)
    factors = (
        part_of_table(table, FACTORS, expert, experts, tl.float32) if OFFSET == MINIMUM else None
    )
    words = part_of_table(table, VALUES, expert, experts, tl.int32)
    sums = sums_of_words(
        x, words, scales, factors, o, _row_of(pair, pairs, PER), pair < pairs,
        inputs, steps, 0, steps, x_stride, scale_stride,
        FORMAT, OFFSET, GROUP, SPAN, WHOLE, SUBTRACT, STAGES,
    )  # fmt: skip
    if GROUP == 0:
        sums *= tl.load(scales + o)[:, None]
    bias = part_of_table(table, BIAS, expert, experts, tl.float32) if BIASED else None
    end_and_store(sums, first, pair, bias, None, y, pairs, rows, 0, ACTIVATION)


@triton.jit(do_not_specialize=["pairs", "tokens"])
def byte_experts_kernel(
    x, x_scales, table, blocks, order, y, pairs, tokens, experts, rows, steps, scale_stride,
    PER: tl.constexpr, BIASED: tl.constexpr, GATE_FIRST: tl.constexpr, HOW: tl.constexpr,
    GROUP: tl.constexpr, X_GROUP: tl.constexpr, SPAN: tl.constexpr, ACTIVATION: tl.constexpr,
    BO: tl.constexpr, BT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grid [tiles of rows, blocks]; x [tokens, 128 * steps], with tokens = pairs / PER.
    GATE_FIRST: rows of gate are before those of up. The rest as in `bytes_kernel`."""
    first = tl.program_id(0) * BO
    expert, pair = block_at(blocks, order, pairs, tl.program_id(1), tl.num_programs(1), BT)
    if expert < 0:
        return
    o = first + tl.arange(0, BO)
    if GATE_FIRST:
        o = o // 2 + o % 2 * (rows // 2)
    scales = part_of_table(table, SCALES, expert, experts, tl.float32)
    values = part_of_table(table, VALUES, expert, experts, x.dtype.element_ty)
    known = _row_of(pair, pairs, PER)
    sums = sums_of_bytes(
        x, x_scales, values, scales, o, known, tokens,
        steps * 128, 0, steps, scale_stride, HOW, GROUP, X_GROUP, SPAN, STAGES,
    )  # fmt: skip
    z = scaled(sums, x_scales, scales, o, known, GROUP, X_GROUP)
    bias = part_of_table(table, BIAS, expert, experts, tl.float32) if BIASED else None
    end_and_store(z, first, pair, bias, None, y, pairs, rows, 0, ACTIVATION)


@triton.jit
def pair_inputs_kernel(
    x, table, ids, weights, out, scales, experts, inputs, x_stride, PER: tl.constexpr,
    ORDERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid [pairs, blocks]; x [pairs / PER, inputs] -> out [pairs, inputs] in the order of the
    expert's inputs, times weights [pairs] if not None, and scales [pairs], its calibrated scale;
    None: there is none."""
    pair = tl.program_id(0).to(tl.int64)
    expert = tl.maximum(tl.load(ids + pair), 0)  # a pair without one is not read
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < inputs
    source = at
    if ORDERED:
        order = part_of_table(table, ORDER, expert, experts, tl.int32)
        source = tl.load(order + at, mask=inside, other=0)
    values = tl.load(x + pair // PER * x_stride + source, mask=inside)
    if weights is not None:
        values = (values.to(tl.float32) * tl.load(weights + pair)).to(x.dtype.element_ty)
    tl.store(out + pair * inputs + at, values, mask=inside)
    if scales is not None:
        scale = tl.load(part_of_table(table, INPUT_SCALE, expert, experts, tl.float32))
        tl.store(scales + pair, scale)


NO_PAIR = tl.constexpr(0x7FFFFFFF)


@triton.jit
def combine_kernel(
    made, ids, weights, residual, y, dim, residual_stride, ACTIVE: tl.constexpr,
    ACTIVE_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grid [tokens, blocks]; made [tokens * ACTIVE, dim] -> y [tokens, dim]. A token's experts are
    added by ascending id; pairs without one have no `made`."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < dim
    k = tl.arange(0, ACTIVE_BLOCK)
    pair = token * ACTIVE + k
    own = k < ACTIVE
    weight = tl.full((ACTIVE_BLOCK,), 1.0, tl.float32)
    if weights is not None:
        weight = tl.load(weights + pair, mask=own, other=0.0)
    # With the place in the lower digits, every pair is added exactly once, for any ids.
    ids_and_places = tl.load(ids + pair, mask=own, other=1 << 20).to(tl.int32) * ACTIVE_BLOCK + k
    total = tl.zeros((BLOCK,), tl.float32)
    before = -1
    for _ in range(ACTIVE):
        left = tl.where(ids_and_places > before, ids_and_places, NO_PAIR)
        before = tl.min(left, 0)
        place = before % ACTIVE_BLOCK
        row = made + (token * ACTIVE + place) * dim + at
        share = tl.sum(tl.where(k == place, weight, 0.0), 0)
        there = inside & (before < NO_PAIR)
        total += tl.load(row, mask=there, other=0.0).to(tl.float32) * share
    if residual is not None:
        near = residual + token * residual_stride + at
        total += tl.load(near, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + token * dim + at, total.to(y.dtype.element_ty), mask=inside)


PIECE = 1024  # elements of a row that a program copies or adds


# Launches.


@dataclass(frozen=True, slots=True)
class Tables:
    """Addresses of the matrices of all experts."""

    # up, down: [parts, experts] int64, addresses; 0 for parts that do not exist.
    up: Tensor
    down: Tensor


def _table(matrices: Sequence[Matrix]) -> Tensor:
    addresses = [_addresses(matrix) for matrix in matrices]
    device = matrices[0].spec.device
    return torch.tensor(addresses, dtype=torch.int64).t().contiguous().to(device)


def _addresses(matrix: Matrix) -> tuple[int, ...]:
    """Return the addresses of a matrix's parts, in the order of the table's rows."""
    stored = matrix.data
    assert isinstance(stored, TritonPacked | Weight)
    tensors: tuple[Tensor | None, ...] = (stored.values, None, None, None, None)
    if isinstance(stored, TritonPacked):
        tensors = (stored.values, stored.scales, stored.factors, stored.order, stored.input_scale)
    addresses = tuple(0 if part is None else part.data_ptr() for part in (*tensors, matrix.bias))
    assert not any(address % 16 for address in addresses)
    return addresses


def _multiplied(matrix: Matrix) -> bool:
    """Return whether a kernel here multiplies it: groups must be multiples of 16."""
    return isinstance(matrix.data, TritonPacked) or matrix.spec.kind.floats


class TritonExperts:
    """The rows `expert_set` and `experts` of `Ops`, for one device."""

    def __init__(self, matrices: TritonMatrices) -> None:
        self._matrices = matrices
        self._one_by_one = experts_by(matrices.linear)

    def expert_set(self, up: Sequence[Matrix], down: Sequence[Matrix]) -> ExpertSet:
        has_kernel = _multiplied(up[0]) and _multiplied(down[0])
        tables = Tables(_table(up), _table(down)) if has_kernel else None
        return ExpertSet(tuple(up), tuple(down), tables)

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor | None,
        experts: ExpertSet,
        residual: Tensor | None,
    ) -> Tensor:
        """See `Ops.experts`.

        Raises:
            RuntimeError: no kernel multiplies such weights, and a capture is running, in which
                torch cannot read the choice on the host.
        """
        tables = experts.data
        if tables is None:
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "experts whose weights have groups that are not a multiple of "
                    f"{MIN_GROUP} cannot be captured"
                )
            return self._one_by_one(x, ids, weights, experts, residual)
        assert isinstance(tables, Tables)
        tokens, active = ids.shape
        if not tokens:
            return x.new_empty(0, experts.outputs)
        count = len(experts.up)
        up, down = experts.up[0], experts.down[0]
        # With whole experts, the pairs are those of all experts; this process has some of these.
        _, of_all = up.spec.expert or (0, count)
        up_tile, down_tile = (
            self._tile(matrix, x.dtype, ids.numel(), of_all) for matrix in (up, down)
        )
        rows = by_expert(ids, count, up_tile.tokens)
        if experts.weigh_inputs:
            inputs, _ = _pair_inputs(x, active, ids, tables.up, weights)
            per, shares = 1, None
        else:
            inputs, per, shares = x, active, weights
        inner = self._product(inputs, per, ids, up, tables.up, up_tile, rows)
        if down_tile.tokens != up_tile.tokens:
            rows = by_expert(ids, count, down_tile.tokens)
        made = self._product(inner, 1, ids, down, tables.down, down_tile, rows)
        return _combined(made, ids, shares, residual, x)

    def _tile(self, matrix: Matrix, dtype: torch.dtype, pairs: int, experts: int) -> Tile:
        kind = matrix.spec.kind
        if kind.floats or in_words(kind):
            narrow = not kind.floats and narrow_in_words(kind, matrix.spec.device)
            int4 = kind.codes == "int4" and kind.offsets != "minima"
            fp32 = dtype == torch.float32
            return tile_of_experts(pairs, experts, narrow=narrow, fp32=fp32, int4=int4)
        how = how_bytes(kind, self._matrices.library, dtype)
        narrow = how == linear_bytes.E4M3_IN_FP16.value
        return tile_of_experts(pairs, experts, narrow=narrow)

    def _product(
        self,
        x: Tensor,
        per: int,
        ids: Tensor,
        like: Matrix,
        table: Tensor,
        tile: Tile,
        rows: ExpertRows,
    ) -> Tensor:
        """Return the outputs of each pair, [pairs, outputs].

        Args:
            x: [pairs / per, inputs].
            like: a matrix of the table.
        """
        spec, packed, kind = like.spec, like.data, like.spec.kind
        pairs, experts, count = ids.numel(), table.shape[1], rows.blocks.shape[1]
        y = torch.empty(pairs, spec.outputs, dtype=spec.out_dtype, device=x.device)
        activation = ACTIVATIONS[spec.activation]
        grid = (ceil_div(spec.rows, tile.outputs), count)
        sizes = (tile.outputs, tile.tokens, tile.stages)
        if not isinstance(packed, TritonPacked):
            span = float_span(tile, x.dtype)
            launch(
                float_experts_kernel,
                grid,
                (x, table, rows.blocks, rows.order, y),
                (pairs, experts, spec.rows, spec.inputs, x.stride(0)),
                (per, spec.bias, span, spec.inputs % span == 0, activation, *sizes),
                num_warps=tile.num_warps,
            )
            return y
        scale = None
        if packed.order is not None or packed.input_scale is not None:
            ordered, calibrated = packed.order is not None, packed.input_scale is not None
            x, scale = _pair_inputs(
                x, per, ids, table, None, ordered=ordered, calibrated=calibrated
            )
            per = 1
        group, scale_stride = kind.group, packed.scales.shape[-1]
        if in_words(kind):
            numbers = (pairs, experts, spec.rows, spec.inputs, ceil_div(spec.inputs, STEP))
            formats = (*format_of(kind), group, span_of(group), spec.inputs % STEP == 0)
            launch(
                word_experts_kernel,
                grid,
                (x, table, rows.blocks, rows.order, y),
                (*numbers, x.stride(0), scale_stride),
                (per, spec.bias, *formats, tile != FEW_INT4, activation, *sizes),
                num_warps=tile.num_warps,
            )
            return y
        how = how_bytes(kind, self._matrices.library, x.dtype)
        filled = packed.values.shape[1]
        x_group = group if kind.codes == "int8" or kind.activations == "group" else 0
        codes, x_scales = round_tokens(x, filled, x_group, kind.codes == "fp8", scale)
        if how == linear_bytes.E4M3_IN_FP16.value:
            codes = codes.view(torch.int8)
        gate_first = spec.paired and not interleaved(spec)
        launch(
            byte_experts_kernel,
            grid,
            (codes, x_scales, table, rows.blocks, rows.order, y),
            (pairs, len(codes), experts, spec.rows, filled // STEP, scale_stride),
            (per, spec.bias, gate_first, how, group, x_group, span_of(group), activation, *sizes),
            num_warps=tile.num_warps,
        )
        return y


def float_span(tile: Tile, dtype: torch.dtype) -> int:
    """Return how many inputs of floats are multiplied at once: fp32 is in registers; for many
    tokens x takes as much shared memory as the weight."""
    if dtype == torch.float32:
        return 32
    return 64 if tile is MANY else 128


def _pair_inputs(
    x: Tensor,
    per: int,
    ids: Tensor,
    table: Tensor,
    weights: Tensor | None,
    *,
    ordered: bool = False,
    calibrated: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return the inputs of each pair, and its expert's calibrated scale: x [pairs / per, inputs] ->
    [pairs, inputs], [pairs].

    Args:
        weights: factors of the inputs of each pair; None: none.
        ordered: return inputs in the order of the expert.
        calibrated: the experts have calibrated scales.
    """
    pairs, inputs, experts = ids.numel(), x.shape[1], table.shape[1]
    out = torch.empty(pairs, inputs, dtype=x.dtype, device=x.device)
    scales = torch.empty(pairs, dtype=torch.float32, device=x.device) if calibrated else None
    block = min(PIECE, power_of_two(inputs))
    tensors, numbers = (x, table, ids, weights, out, scales), (experts, inputs, x.stride(0))
    grid = (pairs, ceil_div(inputs, block))
    launch(pair_inputs_kernel, grid, tensors, numbers, (per, ordered, block))
    return out, scales


def _combined(
    made: Tensor, ids: Tensor, weights: Tensor | None, residual: Tensor | None, like: Tensor
) -> Tensor:
    """Return the sum over the experts of a token, and the residual, in the dtype of `like`."""
    (tokens, active), dim = ids.shape, made.shape[1]
    y = residual
    if y is None or not y.is_contiguous():
        y = torch.empty(tokens, dim, dtype=like.dtype, device=like.device)
    block = min(PIECE, power_of_two(dim))
    stride, filled = 0 if residual is None else residual.stride(0), power_of_two(active)
    tensors, grid = (made, ids, weights, residual, y), (tokens, ceil_div(dim, block))
    launch(combine_kernel, grid, tensors, (dim, stride), (active, filled, block))
    return y
