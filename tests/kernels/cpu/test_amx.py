"""Products by the tile registers of AMX. On machines without AMX they run in emulation, by kernels
built for it (`test_sanitizers.py`); on machines with it, `amx` is tested here too."""

from __future__ import annotations

import pytest
import torch
from helpers.native import Runtime, normal, runtimes
from helpers.native_matrix import I8, ONE_OF_EACH, NativeMatrix, Values, linear, pack, random_matrix
from torch import Tensor

_native = pytest.importorskip("kvik.kernels.cpu._native")

EMULATED = "amx_emulated"
AMX = [p for p in runtimes(threads=[2]) if p.values[0].isa in ("amx", EMULATED)]
VECTORS = Runtime("avx512_bf16", 1)  # every machine with AMX supports it
# Rows of one register and of two, with one more and less.
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 49, 64, 70)


def bf16_matrix(runtime: Runtime, weight: Tensor) -> NativeMatrix:
    """weight: [outputs, inputs] bf16."""
    values = Values(weight, weight.float(), weight, None, None, 0, 1)
    return pack(runtime, values)


@pytest.mark.parametrize("inputs", [64, 68, 1030, 2200])
@pytest.mark.parametrize("kind", [*ONE_OF_EACH, "int4/32-zeros"])
@pytest.mark.parametrize("runtime", AMX)
def test_every_number_of_rows_gives_the_same_bits(runtime: Runtime, kind: str, inputs: int) -> None:
    matrix = random_matrix(runtime, kind, 40, inputs)
    x = normal(max(ROWS), inputs, dtype=torch.bfloat16)
    together = linear(runtime, x, matrix)
    for rows in ROWS:
        assert torch.equal(linear(runtime, x[:rows], matrix), together[:rows]), rows
        assert torch.equal(linear(runtime, x[-rows:], matrix), together[-rows:]), rows


INT4 = (
    "int4/8",
    "int4/40-zeros",
    "int4/64",
    "int4/128",
    "int4/272",
    "int4-min/32",
    "mxfp4/32",
    "iq4/32",
    "nf4/64",
    "fp4/16",
)


# Groups smaller than a product, of a part of one, and of several and a part.
@pytest.mark.parametrize("kind", [I8, "int8/12", *INT4])
@pytest.mark.parametrize("runtime", AMX)
def test_integers_have_the_bits_of_vectors(runtime: Runtime, kind: str) -> None:
    for rows, inputs in ((1, 700), (17, 259), (37, 4200), (33, 7)):
        matrix = random_matrix(runtime, kind, 70, inputs)
        x = normal(rows, inputs)
        assert torch.equal(linear(runtime, x, matrix), linear(VECTORS, x, matrix))


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("runtime", AMX)
def test_floats_are_summed_in_the_order_of_the_manual(runtime: Runtime, rows: int) -> None:
    """The even and the odd of 32 inputs are summed apart, then both, then the previous sum;
    denormal numbers are zero."""
    big, small = 2.0**25, 2.0**-70
    x = torch.zeros(rows, 96, dtype=torch.bfloat16)
    x[:, :4] = torch.tensor([big, 1, -big, 1])  # in order: 1
    x[:, 32:34] = torch.tensor([big, 0])  # the previous 2 is lost
    x[:, 64:66] = torch.tensor([-big, 0])
    for inputs, expected in ((32, 2), (96, 0)):
        ones = bf16_matrix(runtime, torch.ones(3, inputs, dtype=torch.bfloat16))
        assert bool((linear(runtime, x[:, :inputs], ones) == expected).all())
    tiny = torch.full((rows, 2), small, dtype=torch.bfloat16)
    assert bool((linear(runtime, tiny, bf16_matrix(runtime, tiny)) == 0).all())


def test_the_self_check_rejects_wrong_instruction_sets() -> None:
    """A build with emulation has two instruction sets that are wrong in one number on purpose."""
    emulated = EMULATED in _native.instruction_sets()
    expected = ["wrong_bf16", "wrong_i8"] if emulated else []
    assert _native.rejected_instruction_sets() == expected
