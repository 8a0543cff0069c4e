"""Triton's matrix products: every kind of weight and class of tokens, compared with the reference.

The interpreter is slow, so each kind has each activation in only one dtype, and larger shapes are
just large enough for a second tile, a second split or a partial last step.
"""

from __future__ import annotations

from math import log2
from typing import Any

import pytest
import torch
from helpers.compared import check_case
from helpers.optional_triton import INTERPRETED_ONLY, NO_TRITON, device
from torch import Tensor

pytest.importorskip("triton", reason=NO_TRITON)

from helpers.compilations import compilation
from helpers.kernel_cases import CASES, Case, as_integers, filled_matrix
from triton.runtime.interpreter import InterpretedFunction

from kvik.config.memory import TRITON_WIDENED
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.triton import linear_bytes, matrix, norm
from kvik.kernels.triton.matrix import TritonMatrices, how_bytes
from kvik.kernels.triton.matrix_shapes import (
    FEW,
    FEW_INT4,
    MANY,
    MAX_IN_WORDS,
    WIDENED_BYTES,
    splits_for,
    tile_for,
)
from kvik.kernels.triton.ops import triton_ops
from kvik.kernels.triton.packed import TritonPacked, empty
from kvik.kernels.triton.scaled_mm import Library
from kvik.kernels.weights import (
    Activation,
    Matrix,
    MatrixSpec,
    Weight,
    float_weight,
    fp8_weight,
    int4_min_weight,
    int4_weight,
    int8_weight,
    mxfp4_weight,
    ordered_weight,
)
from kvik.spec.weight_kind import WeightKind

OPS = triton_ops(device())
DTYPES = {
    None: torch.float32,
    "silu_and_mul": torch.bfloat16,
    "gelu_tanh": torch.float16,
    "gelu_tanh_and_mul": torch.float32,
    "gelu": torch.float32,
    "clamped_swiglu": torch.float32,
    "limited_swiglu": torch.float32,
    "clipped_swiglu": torch.bfloat16,
}


LIMITED = ("clamped_swiglu", "clipped_swiglu")
UNROUNDED = ("int4", "mxfp4", "nvfp4", "iq4", "nf4", "bnb_fp4", "int8", "fp8")
WORDS = ("int4-32", "int4-min", "mxfp4", "nvfp4", "iq4", "int8", "fp8")


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chosen() -> list[tuple[Case, torch.dtype]]:
    """Return one case of each kind with bias, activation and residual, one for each dtype of kinds
    with different unpacking, and results wider than x."""
    found = []
    for case in CASES:
        if case.op != "linear":
            continue
        if case.name.startswith("wide-out"):
            found.append((case, torch.bfloat16))
        for activation, dtype in DTYPES.items():
            if case.name.endswith(f"-{activation or 'plain'}-bias-residual"):
                kind = case.name.split("-", 1)[1].split(f"-{activation or 'plain'}")[0]
                if activation in ("silu_and_mul", *LIMITED) or kind in WORDS:
                    found.append((case, dtype))
    return found


@pytest.mark.parametrize(("case", "dtype"), chosen(), ids=lambda v: getattr(v, "name", str(v)))
def test_matches_the_reference(case: Case, dtype: torch.dtype) -> None:
    check_case(OPS, case, dtype, device(), as_integers)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(c, d) for c, d in chosen() if c.name.split("-")[1] in UNROUNDED],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_widened_weights_match_the_reference(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "MAX_IN_WORDS", 0)
    test_matches_the_reference(case, dtype)


def test_every_number_of_four_bits_with_powers_of_two() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    scales = torch.tensor([0, 1, 2, 126, 127, 128, 252], dtype=torch.uint8)[:, None]
    weight = mxfp4_weight((codes | codes.flip(0) << 4).repeat(7, 1), scales)
    matrix = filled_matrix(OPS, weight, None, None, torch.float32, device())
    rows = OPS.matrix_rows(matrix, torch.arange(7, device=device()), torch.float32)
    assert torch.equal(rows.cpu(), weight.dequantized())


def weight_of(kind: str, outputs: int, inputs: int, group: int) -> Weight:
    """Return weights whose products with standard normal numbers are about 1. Scales have few
    digits, because minima are stored with eleven."""
    g = drawn(outputs + inputs + group)
    shape = (outputs, -(-inputs // group)) if group else (outputs,)
    scales = torch.randint(128, 256, shape, generator=g) / 128 * 2.0 ** -round(log2(inputs) / 2)
    codes = torch.randint(0, 256, (outputs, inputs // 2), generator=g, dtype=torch.uint8)
    whole = torch.randint(-127, 128, (outputs, inputs), generator=g)
    small = torch.randint(0, 127, (outputs, inputs), generator=g).to(torch.uint8)
    e4m3 = torch.where(whole < 0, small + 128, small).view(torch.float8_e4m3fn)
    match kind:
        case "float":
            return float_weight(torch.randn(outputs, inputs, generator=g) * inputs**-0.5)
        case "int4":
            zeros = torch.randint(0, 16, shape, generator=g).to(torch.uint8)
            return int4_weight(codes, scales / 8, zeros, group)
        case "symmetric":
            return int4_weight(codes, scales / 8, None, group)
        case "minima":
            return int4_min_weight(codes, scales / 8, scales.flip(0), group)
        case "mxfp4":
            return mxfp4_weight(codes, 125 + scales.log2().floor().to(torch.uint8))
        case "int8":
            return int8_weight(whole.to(torch.int8), scales / 128, False, group)
        case "w8a8":
            return int8_weight(whole.to(torch.int8), scales / 128, True, group)
        case "fp8":
            return fp8_weight(e4m3, scales / 256, group)
        case "fp8-tensor":
            one = scales[:1].expand_as(scales).contiguous() / 256
            return fp8_weight(e4m3, one, group, "static", torch.tensor([1 / 64]))
        case "fp8-token":
            return fp8_weight(e4m3, scales / 256, group, "token")
        case _:
            assert kind == "fp8-group"
            return fp8_weight(e4m3, scales / 256, group, "group")


def made(weight: Weight, dtype: torch.dtype, activation: Activation | None = None) -> Matrix:
    return filled_matrix(OPS, weight, None, activation, dtype, device())


def multiplied(weight: Weight, x: Tensor) -> Tensor:
    return OPS.linear(x.to(device()), made(weight, x.dtype), None).cpu()


def expected_of(weight: Weight, x: Tensor) -> Tensor:
    kept = filled_matrix(REFERENCE, weight, None, None, x.dtype)
    return REFERENCE.linear(x, kept, None)


# Tokens of every class; 9 steps of inputs in two splits of 5 and 4 with a partial last step; one
# output, and more than one tile.
SHAPES = [(2, 1120, 3), (17, 320, 1), (66, 192, 70)]


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), SHAPES)
@pytest.mark.parametrize(
    ("kind", "group"),
    [
        ("symmetric", 32),
        ("minima", 32),
        ("int8", 0),
        ("int8", 64),
        ("w8a8", 0),
        ("fp8", 0),
        ("fp8-token", 0),
        ("fp8-tensor", 0),
        ("fp8-group", 128),
    ],
)
def test_splits_and_tiles(kind: str, group: int, tokens: int, inputs: int, outputs: int) -> None:
    weight = weight_of(kind, outputs, inputs, group)
    x = torch.randn(tokens, inputs, generator=drawn()).bfloat16()
    found, expected = multiplied(weight, x), expected_of(weight, x)
    torch.testing.assert_close(found, expected, rtol=1.6e-2, atol=3e-2)


@pytest.mark.parametrize(("tokens", "inputs"), [(66, 1120), (130, 192)])
@pytest.mark.parametrize(("kind", "group"), [("int4", 32), ("fp8", 0)])
def test_several_tiles_of_tokens(kind: str, group: int, tokens: int, inputs: int) -> None:
    """With two splits, and without."""
    weight = weight_of(kind, 70, inputs, group)
    x = torch.randn(tokens, inputs, generator=drawn()).bfloat16()
    for _ in range(2):  # the counters of splits are as before
        found, expected = multiplied(weight, x), expected_of(weight, x)
        torch.testing.assert_close(found, expected, rtol=1.6e-2, atol=3e-2)


@pytest.mark.parametrize(
    ("group", "dtype"),
    [(16, torch.bfloat16), (48, torch.float32), (64, torch.float16), (192, torch.float32)],
)
@pytest.mark.parametrize("kind", ["int4", "minima", "int8", "w8a8", "fp8", "fp8-group"])
def test_groups(kind: str, group: int, dtype: torch.dtype) -> None:
    """That fill a step, or do not, and end inside one."""
    weight = weight_of(kind, 5, 192, group)
    x = torch.randn(3, 192, generator=drawn()).to(dtype)
    rtol, atol = (1e-4, 1e-4) if dtype == torch.float32 else (1.6e-2, 3e-2)
    torch.testing.assert_close(multiplied(weight, x), expected_of(weight, x), rtol=rtol, atol=atol)
    ids = torch.tensor([4, 0])
    rows = OPS.matrix_rows(made(weight, dtype), ids.to(device()), torch.float32).cpu()
    torch.testing.assert_close(rows, weight.rows(ids).dequantized(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("activation", "added"),
    [
        (None, True),
        pytest.param(None, False, marks=pytest.mark.full),
        ("silu_and_mul", True),
        pytest.param("gelu_tanh", False, marks=pytest.mark.full),
    ],
)
def test_parts_of_a_widened_matrix(
    activation: Activation | None, added: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory for 128 of 400 rows, whose products may have another order of sums on a GPU."""
    monkeypatch.setattr(matrix, "MAX_IN_WORDS", 2)
    weight = weight_of("int4", 400, 192, 64)
    x = torch.randn(3, 192, generator=drawn()).bfloat16().to(device())
    whole, parts = TritonMatrices(device()), TritonMatrices(device())
    filled = made(weight, x.dtype, activation)
    residual = torch.randn(3, filled.spec.outputs, generator=drawn()).bfloat16().to(device())
    expected = whole.linear(x, filled, residual.clone() if added else None)
    monkeypatch.setattr(matrix, "WIDENED_BYTES", 2 * 192 * 200)
    found = parts.linear(x, filled, residual.clone() if added else None)
    torch.testing.assert_close(found, expected, rtol=1.6e-2, atol=3e-2)
    few = whole.linear(x[:2], filled, residual[:2].clone() if added else None)
    torch.testing.assert_close(found[:2], few, rtol=1.6e-2, atol=3e-2)


@pytest.mark.parametrize("kind", ["int4", "symmetric", "minima", "mxfp4", "int8", "fp8"])
def test_widened_weights_are_rounded_once(kind: str) -> None:
    """Except to bf16 in the interpreter, which cuts digits off."""
    weight = weight_of(kind, 70, 320, 32 if kind != "fp8" else 0)
    ids = torch.arange(70, device=device())
    for dtype in (torch.float16, torch.float32):
        rows = OPS.matrix_rows(made(weight, dtype), ids, dtype)
        assert torch.equal(rows.cpu(), weight.dequantized().to(dtype))


@pytest.mark.parametrize("kind", ["int4", "minima"])
def test_few_tokens_and_several_tiles_of_outputs(kind: str) -> None:
    weight = weight_of(kind, 200, 1152, 128 if kind == "int4" else 32)
    x = torch.randn(3, 1152, generator=drawn()).bfloat16()
    expected = x.double() @ weight.rows(torch.arange(200)).dequantized().double().t()
    torch.testing.assert_close(multiplied(weight, x), expected.bfloat16(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ["int4", "fp8", "w8a8"])
def test_a_row_does_not_depend_on_the_others(kind: str) -> None:
    """In a class of tokens, to the bit, also with split inputs."""
    weight = weight_of(kind, 6, 1152, 128 if kind == "int4" else 0)
    matrix = made(weight, torch.bfloat16)
    assert splits_for(FEW_INT4 if kind == "int4" else FEW[0], 6, 9) == 2
    x = torch.randn(8, 1152, generator=drawn()).bfloat16().to(device())
    together = OPS.linear(x, matrix, None)
    for rows in (slice(0, 1), slice(5, 8)):
        assert torch.equal(OPS.linear(x[rows], matrix, None), together[rows])
    assert isinstance(matrix.data, TritonPacked) and not matrix.data.arrivals.any()


def test_no_tokens() -> None:
    for kind in ("float", "int4", "w8a8", "fp8-token"):
        weight = weight_of(kind, 6, 32, 16 if kind == "int4" else 0)
        x = torch.empty(0, 32, device=device())
        assert OPS.linear(x, made(weight, torch.float32), None).shape == (0, 6)
        nothing = torch.empty(0, dtype=torch.int64, device=device())
        rows = OPS.matrix_rows(made(weight, torch.float32), nothing, torch.float32)
        assert rows.shape == (0, 32)


@pytest.mark.parametrize(
    ("kind", "activation"),
    [
        ("int4", "silu_and_mul"),
        ("minima", None),
        ("int8", "silu_and_mul"),
        ("w8a8", "silu_and_mul"),
        ("fp8-group", None),
    ],
)
def test_a_matrix_packed_in_runs(kind: str, activation: Activation | None) -> None:
    """In any order, across gate and up."""
    weight = weight_of(kind, 70, 64, 32)
    spec = MatrixSpec(weight.kind, 70, 64, False, activation, torch.float32, device())
    x = torch.randn(2, 64, generator=drawn()).to(device())
    whole, pieces = OPS.matrix(spec), OPS.matrix(spec)
    OPS.pack_rows(whole, 0, weight)
    for first, last in ((36, 50), (0, 33), (50, 70), (33, 36)):
        OPS.pack_rows(pieces, first, weight.rows(slice(first, last)))
    found = OPS.linear(x, pieces, None)
    assert torch.equal(found, OPS.linear(x, whole, None)) and found.any()


def test_nan_is_kept() -> None:
    """A weight's NaN is in its output, that of a rounded token in the token's row."""
    weight = weight_of("fp8", 3, 64, 0)
    assert weight.kind.codes == "fp8"
    weight.values.view(torch.uint8)[1, 5] = 0x7F
    y = multiplied(weight, torch.ones(2, 64))
    assert y.isnan().tolist() == [[False, True, False]] * 2
    x = torch.ones(3, 64)
    x[1, 63], x[2, 0] = torch.nan, torch.inf
    for kind in ("w8a8", "fp8-token"):
        y = multiplied(weight_of(kind, 3, 64, 0), x)
        assert y.isnan().any(1).tolist() == [False, True, True]
    one_scale = weight_of("fp8-tensor", 3, 64, 0)  # calibrated, which clamps infinity
    y = multiplied(one_scale, x)
    assert y.isnan().any(1).tolist() == [False, True, False]
    torch.testing.assert_close(y, expected_of(one_scale, x), equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["int4", "w8a8"])
def test_groups_that_tensor_cores_do_not_support(kind: str) -> None:
    weight = weight_of(kind, 4, 48, 24)
    x = torch.randn(2, 48, generator=drawn())
    torch.testing.assert_close(multiplied(weight, x), expected_of(weight, x))


def test_rows_of_one_matrix_have_one_order() -> None:
    weight = weight_of("int4", 4, 32, 16)
    assert weight.kind.codes == "int4"
    order = torch.arange(31, -1, -1).int()
    matrix = made(ordered_weight(weight, order), torch.float32)
    with pytest.raises(ValueError, match="different orders"):
        OPS.pack_rows(matrix, 0, ordered_weight(weight, order.flip(0).contiguous()))


def test_the_memory_plan_covers_widened_weights() -> None:
    assert TRITON_WIDENED >= WIDENED_BYTES


def test_tensor_cores_do_not_multiply_fp8_for_fp32() -> None:
    """They add with less precision."""
    library = Library(tensor_cores=True, rows=True, blocks=True)
    how = [
        how_bytes(WeightKind("fp8", 128, activations="group"), library, dtype)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    assert how == [linear_bytes.E4M3.value, linear_bytes.E4M3_IN_FP16.value]


def test_classes_of_tokens() -> None:
    assert [tile_for(n).tokens for n in (1, 8, 9, 17, 64, 65)] == [8, 8, 16, 32, 64, 128]
    assert [tile_for(n, int4=True) for n in (1, 8, 9)] == [FEW_INT4, FEW_INT4, FEW[1]]
    assert splits_for(MANY, 64, 1000) == 1
    # Shapes of Llama 3 8B: enough programs, and never splits of fewer than four steps.
    for rows, steps in ((6144, 32), (4096, 32), (28672, 32), (4096, 112)):
        for tile in (FEW[0], FEW_INT4):
            splits = splits_for(tile, rows, steps)
            enough = tile.programs * 7 // 8
            assert rows // tile.outputs * splits >= enough and steps // splits >= 4


PACKED = (
    WeightKind("int4", 128, "zeros"),
    WeightKind("int4", 32, ordered=True),
    WeightKind("int4", 48, "minima"),
    WeightKind("int8"),
    WeightKind("int8", 64, activations="group"),
    WeightKind("fp8"),
    WeightKind("fp8", activations="static"),
    WeightKind("fp8", 128, activations="group"),
    WeightKind("fp8", 64, activations="group"),
)


@pytest.mark.parametrize("kind", PACKED, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 128), (1344, 200)])
def test_bytes_of_a_packed_matrix_are_those_of_its_parts(
    kind: WeightKind, inputs: int, outputs: int
) -> None:
    """The memory plan counts quantised matrices with the whole tiles of GPU memory."""
    meta = torch.device("meta")
    packed = empty(MatrixSpec(kind, outputs, inputs, False, None, torch.bfloat16, meta))
    parts = [packed.values, packed.scales, packed.factors, packed.order, packed.input_scale]
    parts += [packed.arrivals, packed.squares.scales if packed.squares else None]
    taken = sum(part.nbytes for part in parts if part is not None)
    assert kind.weight_bytes(inputs, outputs, "triton") == taken


# How often Triton compiles again as steps have different tokens.

CPU = torch.device("cpu")
TOKENS = (*range(1, 130), MAX_IN_WORDS, MAX_IN_WORDS + 1, 1000)
CLASSES = 1 + len(FEW)  # by tile sizes


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Record what would be compiled: kernels with their specialisation."""
    found: set[str] = set()

    def bind(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.add(compilation(self, *args, **options))

    monkeypatch.setattr(InterpretedFunction, "run", bind)
    return found


@INTERPRETED_ONLY
@pytest.mark.parametrize(
    ("kind", "kernels"),
    [
        (WeightKind("int4", 128, "zeros"), 3),  # one widens weights; two have 64 tokens in a tile
        (WeightKind("int8", activations="token"), 2),
        (WeightKind("int8", 128, activations="group"), 2),
        (WeightKind("fp8"), 3),
    ],
    ids=str,
)
def test_products_compile_once_for_each_class_of_tokens(
    kind: WeightKind, kernels: int, compiled: set[str]
) -> None:
    matrices, inputs = TritonMatrices(CPU), 4096
    matrix = matrices.matrix(MatrixSpec(kind, 256, inputs, False, None, torch.bfloat16, CPU))
    for tokens in TOKENS:
        matrices.linear(torch.empty(tokens, inputs, dtype=torch.bfloat16), matrix, None)
    assert len(compiled) == CLASSES + kernels - 1


@INTERPRETED_ONLY
def test_norms_compile_once(compiled: set[str]) -> None:
    weight = torch.empty(64)
    for tokens in TOKENS:
        norm.rms_norm(torch.empty(tokens, 64), weight, 1e-5)
        norm.layer_norm(torch.empty(tokens, 64), weight, weight, 1e-5)
    assert len(compiled) == 2
