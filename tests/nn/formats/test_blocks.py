"""GGUF blocks as weights, in runs, compared with the public package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.gguf_files import some_rows, weights_of
from torch import Tensor

from kvik.gguf.facts import SCHEMES
from kvik.nn.formats.base import LinearShape, OutputAxis, StoredTensor, TensorError
from kvik.nn.gguf_blocks import Blocks
from kvik.spec.stored_weights import BLOCK_LAYOUTS

SHAPE = LinearShape(inputs=512, outputs=24)
KINDS = dict.fromkeys(("Q5_1", "Q5_K"), ("float32", ""))
KINDS |= dict.fromkeys(("Q4_0", "Q3_K"), ("int4", ""))
KINDS |= dict.fromkeys(("Q8_0", "Q5_0", "Q6_K"), ("int8", ""))
KINDS |= {"MXFP4": ("mxfp4", ""), "IQ4_NL": ("iq4", ""), "IQ4_XS": ("iq4", "")}
KINDS |= dict.fromkeys(("Q4_1", "Q4_K", "Q2_K"), ("int4", "minima"))


def stored(type: str) -> Tensor:
    values = np.random.default_rng(1).normal(size=(24, 512)).astype(np.float32)
    return torch.from_numpy(some_rows(type, values))


@pytest.mark.parametrize("type", BLOCK_LAYOUTS)
def test_weights_match_the_gguf_package(type: str) -> None:
    format, rows = Blocks(SCHEMES[type], SHAPE, {}), stored(type)
    expected = torch.from_numpy(weights_of(type, rows.numpy()))
    for some in (slice(0, 24), slice(3, 11)):
        weight = format.weight({"weight": rows}, some)
        assert (weight.kind.codes, weight.kind.offsets) == KINDS[type]
        assert torch.equal(weight.dequantized(), expected[some])


def test_a_row_of_one_group() -> None:
    """A scale of a group is then one of an output."""
    rows = torch.from_numpy(some_rows("Q8_0", np.ones((4, 32), np.float32)))
    weight = Blocks(SCHEMES["Q8_0"], LinearShape(32, 4), {}).weight({"weight": rows}, slice(0, 4))
    assert weight.kind.codes == "int8" and weight.scales.shape == (4,)
    assert torch.allclose(weight.dequantized(), torch.ones(4, 32), atol=1e-3)


def test_powers_of_two_are_finite() -> None:
    rows = stored("MXFP4")
    rows[5, 17] = 255
    with pytest.raises(TensorError, match="holds NaN"):
        Blocks(SCHEMES["MXFP4"], SHAPE, {}).weight({"weight": rows}, slice(0, 24))


def test_bytes_of_rows() -> None:
    (found,) = Blocks(SCHEMES["Q4_K"], SHAPE, {}).tensors(torch.bfloat16).values()
    assert found == StoredTensor((24, 288), torch.uint8, OutputAxis(), True, "Q4_K, in bytes")
    with pytest.raises(ValueError, match="its 300 inputs do not fill blocks of 256"):
        Blocks(SCHEMES["Q4_K"], LinearShape(300, 24), {})


@pytest.mark.parametrize(("type", "at"), [("Q8_0", 0), ("Q4_K", 0), ("Q4_K", 2), ("Q5_K", 2)])
def test_scales_and_minima_must_be_finite(type: str, at: int) -> None:
    rows = stored(type)
    rows[5, at : at + 2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)  # infinity
    format = Blocks(SCHEMES[type], SHAPE, {})
    format.weight({"weight": rows}, slice(6, 24))
    with pytest.raises(TensorError, match="holds NaN or infinity") as caught:
        format.weight({"weight": rows}, slice(0, 24))
    assert caught.value.name == "weight"
