"""MXFP4 in the layouts of checkpoints, compared with transformers' dequantisation of gpt-oss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvik.nn.formats.base import LinearShape, TensorError
from kvik.nn.formats.fp4 import Mxfp4Blocks, Mxfp4Packed
from kvik.spec.stored_weights import StoredScheme

mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")


def stored(outputs: int, groups: int) -> tuple[Tensor, Tensor]:
    """Return blocks and scales with every code and every power of two."""
    g = torch.Generator().manual_seed(outputs)
    blocks = torch.randint(0, 256, (outputs, groups, 16), generator=g, dtype=torch.uint8)
    scales = torch.arange(outputs * groups).view(outputs, groups) % 255
    return blocks, scales.to(torch.uint8)


def blocked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantise an expert of gpt-oss to [outputs, inputs] fp32."""
    outputs, groups, _ = blocks.shape
    scheme = StoredScheme("mxfp4-blocks", 4, 32)
    format = Mxfp4Blocks(scheme, LinearShape(groups * 32, outputs), {})
    tensors = {"blocks": blocks, "scales": scales}
    wanted = format.tensors(torch.bfloat16)
    assert {name: t.shape for name, t in wanted.items()} == {
        name: t.shape for name, t in tensors.items()
    }
    return format.weight(tensors, slice(0, outputs)).dequantized()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_expert_is_that_of_transformers(dtype: torch.dtype) -> None:
    blocks, scales = stored(64, 4)
    # [experts, inputs, outputs]
    (expected,) = mxfp4.convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)
    found = blocked(blocks, scales).to(dtype)
    assert torch.equal(found, expected.t())


def test_packed_codes_and_their_scales() -> None:
    blocks, scales = stored(64, 4)
    scheme = StoredScheme("mxfp4-pack-quantized", 4, 32)
    format = Mxfp4Packed(scheme, LinearShape(128, 64), {})
    tensors = {"weight_packed": blocks.flatten(1), "weight_scale": scales}
    wanted = format.tensors(torch.bfloat16)
    assert {name: (t.shape, t.dtype) for name, t in wanted.items()} == {
        name: (t.shape, t.dtype) for name, t in tensors.items()
    }
    found = format.weight(tensors, slice(3, 40)).dequantized()
    assert torch.equal(found, blocked(blocks, scales)[3:40])
    scales[7, 1] = 255
    with pytest.raises(TensorError, match="holds NaN"):
        format.weight(tensors, slice(3, 40))
    with pytest.raises(ValueError, match="groups of 32 do not divide its 100 inputs"):
        Mxfp4Packed(scheme, LinearShape(100, 64), {})
