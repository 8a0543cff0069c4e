"""The layout of quantised matrices in GPU memory.

**Words** (weights that unrounded x is multiplied by): 16 words of 32 bits of an output are 64
contiguous bytes; those of 64 outputs are a tile of 4 KiB, and the tiles of 64 outputs follow each
other along the inputs. So a program reads memory sequentially, 16 bytes per thread. Word c of a
tile, plane p: the weights of inputs 32 p + 2 c in its lower and 32 p + 2 c + 1 in its upper half,
four bits at 4 p or eight at 8 p; with groups of 16, of inputs 32 p + c and 32 p + 16 + c.

**Bytes** (weights that x rounded to eight bits is multiplied by): rows of outputs, unchanged.

Both: inputs are padded with zeros to whole steps of 128, and outputs to whole tiles of 128. Scales:
[groups, outputs], so that the scales of a tile of outputs are contiguous. With zero points the four
lowest bits of an fp32 scale are the zero point; with minima, both are fp16, in a word, times
factors of the output that are powers of two; for E2M1 they are bytes (E8M0). For paired
activations, rows of gate and up alternate if the kernel that multiplies applies the activation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvik.kernels.packing import PLAIN, Packing, Parts, check_order
from kvik.kernels.reference.ops import fill_shared
from kvik.kernels.reference.ops import matrix as plain_matrix
from kvik.kernels.triton.launch import ceil_div
from kvik.kernels.triton.matrix_shapes import MIN_OUTPUTS
from kvik.kernels.triton.scaled_mm import SQUARE
from kvik.kernels.weights import (
    DTYPES,
    NUMBERS,
    SYMMETRIC_ZERO,
    UNITS,
    Matrix,
    MatrixSpec,
    Weight,
    in_nibbles,
    scale_dtype,
)
from kvik.spec.weight_kind import WeightKind

# Which rows of an E4M3 weight have the same scales: libraries need one scale per square block, or
# for the whole, while a matrix is filled by runs of rows, in any order, with a scale per row.


@dataclass(slots=True)
class Squares:
    """The scales of square blocks of an E4M3 weight."""

    scales: Tensor  # [rows / 128, inputs / 128 up to a multiple of 4] fp32, of each first row
    equal: list[bool]  # for each block, whether all of its rows have these scales
    # Whether that is true for all blocks. Known on the host, as it decides which kernel multiplies.
    everywhere: bool = False

    def update(self, row_scales: Tensor, rows: int, first: int, last: int) -> None:
        """Update after rows first..last were filled: row_scales [groups, filled rows]."""
        begin, end = first // SQUARE, ceil_div(last, SQUARE)
        of_rows = row_scales[:, begin * SQUARE : min(rows, end * SQUARE)]
        firsts = of_rows[:, ::SQUARE]  # [groups, blocks]
        self.scales[begin:end, : len(firsts)] = firsts.t()
        alike = of_rows == firsts.repeat_interleave(SQUARE, 1)[:, : of_rows.shape[1]]
        missing = (end - begin) * SQUARE - of_rows.shape[1]
        equal_blocks = torch.nn.functional.pad(alike.all(0), (0, missing), value=True)
        self.equal[begin:end] = equal_blocks.view(-1, SQUARE).all(1).tolist()
        self.everywhere = all(self.equal)


@dataclass(slots=True)
class SingleScale:
    """The scale of a whole E4M3 weight."""

    # Whether all rows have one scale. Known on the host, as it decides which kernel multiplies.
    alike: bool = False

    def update(self, row_scales: Tensor, rows: int) -> None:
        """Update after some rows were filled: row_scales [filled rows]; others have 0."""
        self.alike = bool((row_scales[:rows] == row_scales[0]).all())


# Packed matrices in a file, in the layout of GPU memory.


def layout(spec: MatrixSpec) -> Parts:
    """See `Packing`."""
    return parts(unfilled(replace(spec, device=torch.device("meta"))))


def parts(matrix: Matrix) -> Parts:
    """See `Packing`."""
    packed = matrix.data
    if not isinstance(packed, TritonPacked):
        return PLAIN.parts(matrix)
    names = ("values", "scales", "factors", "order", "input_scale")
    tensors = {name: getattr(packed, name) for name in names} | {"bias": matrix.bias}
    return {name: part for name, part in tensors.items() if part is not None}


def over(spec: MatrixSpec, parts: Parts) -> Matrix:
    """See `Packing`."""
    if not is_packed(spec):
        return PLAIN.over(spec, parts)
    tensors = {name: part.to(spec.device) for name, part in parts.items()}
    if "order" in tensors:
        check_order(tensors["order"])
    packed = TritonPacked(
        tensors["values"],
        tensors["scales"],
        tensors.get("factors"),
        tensors.get("order"),
        tensors.get("input_scale"),
        squares_of(spec),
        whole_of(spec),
        arrivals_of(spec),
    )
    if packed.squares is not None:
        packed.squares.update(packed.scales, spec.rows, 0, spec.rows)
    if packed.single_scale is not None:
        packed.single_scale.update(packed.scales, spec.rows)
    return Matrix(spec, tensors.get("bias"), packed)


GPU = Packing("gpu-1", layout, parts, over)


STEP = 128  # inputs are padded to a multiple of this
ROW_STEP = 128  # and outputs to a multiple of this
TILE_ROWS = 64
TILE_WORDS = 16  # of an output
MIN_GROUP = 16


@dataclass(frozen=True, slots=True)
class TritonPacked:
    """A quantised weight on a GPU."""

    # Words [row tiles, word tiles, 64, 16] int32, or bytes [rows, inputs] int8 or float8_e4m3fn,
    # padded.
    values: Tensor
    # [groups, rows], or [rows] if the group is 0; fp32, or int32 that also holds a zero point or
    # minimum, or uint8 for E2M1.
    scales: Tensor
    factors: Tensor | None  # [2, rows] fp32 of scales and minima; None: there are no minima
    order: Tensor | None  # [inputs] int32; None: unchanged
    input_scale: Tensor | None  # [1] fp32 of calibrated activations
    # Scales of square blocks, for E4M3 in groups of 128, if x has such groups too.
    squares: Squares | None
    single_scale: SingleScale | None  # for E4M3, if x has a calibrated scale
    # [row tiles] int32, zeros between two products: see `linear_end.py`. So products with one
    # matrix must not overlap: they use one stream, or streams that wait.
    arrivals: Tensor


def in_words(kind: WeightKind) -> bool:
    """Return whether x is not rounded, and so the weight is stored in words."""
    return not kind.floats and kind.activations == "float"


def interleaved(spec: MatrixSpec) -> bool:
    """Return whether rows of gate and up alternate. For E4M3 times E4M3 they do not: a library
    multiplies them too, which supports only scales of square blocks."""
    return spec.paired and (in_words(spec.kind) or spec.kind.codes == "int8")


def span_of(group: int) -> int:
    """Return how many inputs are multiplied at once: the largest of 16, 32, 64, 128 that divides
    the group."""
    return min(group & -group, STEP) if group else STEP


def is_packed(spec: MatrixSpec) -> bool:
    """Return whether the kernels here multiply it. Floats, and groups unsuitable for tensor cores,
    are multiplied by torch, from the unpacked weight."""
    return not spec.kind.floats and spec.kind.group % MIN_GROUP == 0


def empty(spec: MatrixSpec) -> TritonPacked:
    """Return a weight of zeros, as the inputs beyond the last must be zeros."""
    kind = spec.kind

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=spec.device)

    rows, inputs = _up(spec.rows, ROW_STEP), _up(spec.inputs, STEP)
    scale_shape = (ceil_div(inputs, kind.group), rows) if kind.group else (rows,)
    if in_words(kind):
        tiles = inputs * kind.gpu_bits // (32 * TILE_WORDS)
        values = zeros(rows // TILE_ROWS, tiles, TILE_ROWS, TILE_WORDS, dtype=torch.int32)
    else:
        values = zeros(rows, inputs, dtype=DTYPES[kind.codes])
    words = kind.codes == "int4"
    scales = zeros(*scale_shape, dtype=torch.int32 if words else scale_dtype(kind))
    factors = zeros(2, rows, dtype=torch.float32) if kind.offsets == "minima" else None
    order = zeros(spec.inputs, dtype=torch.int32) if kind.ordered else None
    input_scale = zeros(1, dtype=torch.float32) if kind.activations == "static" else None
    squares, whole = squares_of(spec), whole_of(spec)
    arrivals = arrivals_of(spec)
    return TritonPacked(values, scales, factors, order, input_scale, squares, whole, arrivals)


def fill(spec: MatrixSpec, packed: TritonPacked, first: int, weight: Weight) -> None:
    """Fill rows first.. of a packed weight.

    Raises:
        ValueError: rows packed before have their inputs in another order.
    """
    device = packed.values.device
    # Copied unpacked; the device packs the words.
    parts = {name: part.to(device) for name, part in weight.tensors.items()}
    weight = Weight(weight.kind, **parts)
    fill_shared(weight, packed.order, packed.input_scale)
    rows = torch.arange(first, first + weight.outputs, device=device)
    if interleaved(spec):
        half = spec.rows // 2
        rows = rows % half * 2 + rows // half
    if in_words(spec.kind):
        words = words_of(weight, packed.values.shape[1])
        packed.values[rows // TILE_ROWS, :, rows % TILE_ROWS] = words
    else:
        # As bytes, since not every device can write rows of eight-bit floats at indices.
        raw = packed.values.view(torch.uint8)
        raw[rows, : spec.inputs] = weight.values.view(torch.uint8)
    scales, factors = _scales(weight)
    if scales.dim() == 1:
        packed.scales[rows] = scales
    else:
        packed.scales[: scales.shape[1], rows] = scales.t()
    if factors is not None and packed.factors is not None:
        packed.factors[:, rows] = factors
    if packed.squares is not None:
        packed.squares.update(packed.scales, spec.rows, first, first + weight.outputs)
    if packed.single_scale is not None:
        packed.single_scale.update(packed.scales, spec.rows)


def words_of(weight: Weight, tiles: int) -> Tensor:
    """Return the words of a weight: [rows, tiles, 16] int32."""
    bits = weight.kind.gpu_bits
    planes = 16 // bits
    if in_nibbles(weight.kind):
        codes = torch.stack((weight.values & 15, weight.values >> 4), dim=-1).flatten(1)
        if bits == 8:
            numbers = torch.tensor(NUMBERS[weight.kind.codes], device=codes.device)
            integers = numbers.mul_(UNITS[weight.kind.codes]).round_().to(torch.int8)
            codes = integers[codes.int()].view(torch.uint8)
    else:
        codes = weight.values.view(torch.uint8)
    missing = tiles * planes * 32 - codes.shape[1]
    codes = torch.nn.functional.pad(codes, (0, missing))
    if span_of(weight.kind.group) == MIN_GROUP:
        halves = codes.view(len(codes), tiles, planes, 2, TILE_WORDS).transpose(-1, -2)
    else:
        halves = codes.view(len(codes), tiles, planes, TILE_WORDS, 2)
    words = torch.zeros(len(codes), tiles, TILE_WORDS, dtype=torch.int32, device=codes.device)
    for plane in range(planes):
        for half in range(2):
            code = halves[:, :, plane, :, half].to(torch.int32)
            words |= code << (16 * half + bits * plane)
    return words


def _scales(weight: Weight) -> tuple[Tensor, Tensor | None]:
    """Return scales [rows] or [rows, groups] as they are stored, and factors [2, rows]."""
    assert weight.scales is not None
    kind = weight.kind
    scales = weight.scales.to(scale_dtype(kind))
    if kind.gpu_bits != kind.bits:  # the kernels have integers
        scales = scales / UNITS[kind.codes]
    if weight.minima is not None:
        scale_factor, scales = _in_fp16(scales)
        minimum_factor, minima = _in_fp16(weight.minima.float())
        word = (minima.int() & 0xFFFF) << 16 | (scales.int() & 0xFFFF)
        return word, torch.stack((scale_factor, minimum_factor))
    if kind.codes == "int4":
        bits = scales.view(torch.int32)
        points = SYMMETRIC_ZERO if weight.zeros is None else weight.zeros.to(torch.int32)
        # Nineteen binary digits are kept, rounded half up: nothing is lost of numbers with no more
        # digits, and infinity does not become NaN.
        return ((bits + (bits & 8)) & -16) | points, None
    if kind.codes == "fp8":
        # Products do not check the bits for NaN, so the scale becomes NaN.
        nan = (weight.values.view(torch.uint8) & 0x7F) == 0x7F
        if kind.group:
            missing = scales.shape[1] * kind.group - nan.shape[1]
            nan = torch.nn.functional.pad(nan, (0, missing))
            nan = nan.view(len(nan), -1, kind.group)
        scales = scales.masked_fill(nan.any(-1), torch.nan)
    return scales, None


def _in_fp16(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Convert [rows, groups] to factors [rows], powers of two, and int16 [rows, groups], bits of
    fp16. The largest of a row is just below 2^15, so that numbers 2^28 times smaller keep eleven
    binary digits."""
    exponent = torch.frexp(numbers.abs().amax(1))[1].clamp(-110, 127)
    wide = torch.ldexp(numbers, (15 - exponent)[:, None])
    factors = torch.ldexp(torch.ones_like(numbers[:, 0]), exponent - 15)
    return factors, wide.half().view(torch.int16)


def squares_of(spec: MatrixSpec) -> Squares | None:
    kind = spec.kind
    if kind.codes != "fp8" or kind.activations != "group" or kind.group != STEP:
        return None
    blocks = ceil_div(spec.rows, ROW_STEP)
    shape = (blocks, _up(ceil_div(spec.inputs, STEP), 4))
    scales = torch.zeros(shape, dtype=torch.float32, device=spec.device)
    return Squares(scales, [False] * blocks)


def whole_of(spec: MatrixSpec) -> SingleScale | None:
    return SingleScale() if spec.kind.activations == "static" and not spec.kind.group else None


def arrivals_of(spec: MatrixSpec) -> Tensor:
    tiles = _up(spec.rows, ROW_STEP) // MIN_OUTPUTS
    return torch.zeros(tiles, dtype=torch.int32, device=spec.device)


def _up(n: int, to: int) -> int:
    return ceil_div(n, to) * to


def unfilled(spec: MatrixSpec) -> Matrix:
    """See `Ops.matrix`. Biases of floats have their dtype, as cuBLAS requires; others are fp32."""
    if not is_packed(spec):
        return plain_matrix(spec)
    bias = torch.empty(spec.rows, dtype=torch.float32, device=spec.device) if spec.bias else None
    return Matrix(spec, bias, empty(spec))
