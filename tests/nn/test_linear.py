"""A linear layer: its product, and how layers share a matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.kernel_cases import filled_matrix
from helpers.paged_model import PagedModel
from helpers.stored_layers import awq_config
from helpers.stored_models import save_quantised
from helpers.tiny_models import save_tiny

from kvik.kernels.ops import Ops
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.torch_ops import TORCH
from kvik.kernels.weights import float_weight
from kvik.nn.layers import Linear


@pytest.mark.parametrize("ops", [REFERENCE, TORCH], ids=["reference", "torch"])
def test_product_activation_and_residual(ops: Ops) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias, x, residual = (
        torch.randn(shape, generator=generator) for shape in ((8, 6), (8,), (5, 6), (5, 4))
    )
    matrix = filled_matrix(ops, float_weight(weight), bias, "silu_and_mul", torch.float32)
    gate, up = F.linear(x, weight, bias).chunk(2, -1)
    layer = Linear(ops, matrix)
    torch.testing.assert_close(layer(x), F.silu(gate) * up)
    torch.testing.assert_close(layer(x, residual=residual), F.silu(gate) * up + residual)


# Queries, keys and values: one matrix if their weights are stored alike, else several.


SIZES = {"hidden_size": 64, "intermediate_size": 96, "attention_bias": True}


def test_one_matrix(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", **SIZES)
    heads = PagedModel(tmp_path).model.layers[0].attention.qkv
    assert len(heads.linears) == 1
    x = torch.randn(5, 64)
    with torch.inference_mode():
        q, k, v = heads(x, None)
        whole = heads.linears[0](x)
    assert (q.shape, k.shape, v.shape) == ((5, 4, 16), (5, 2, 16), (5, 2, 16))
    assert torch.equal(torch.cat((q, k, v), dim=1).flatten(1), whole)


def test_each_keeps_its_own_format(tmp_path: Path) -> None:
    source, folder = tmp_path / "plain", tmp_path / "q"
    save_tiny(source, "Llama", **SIZES)
    config = awq_config(modules_to_not_convert=["layers.1.self_attn.v_proj"])
    save_quantised(source, folder, tmp_path / "twin", config)
    found, twin = (PagedModel(path).model.layers for path in (folder, tmp_path / "twin"))
    assert len(found[0].attention.qkv.linears) == 1
    kinds = [linear.matrix.spec.kind.codes for linear in found[1].attention.qkv.linears]
    assert kinds == ["int4", "float32"]
    x = torch.randn(5, 64)
    with torch.inference_mode():
        parts = zip(found[1].attention.qkv(x, None), twin[1].attention.qkv(x, None), strict=True)
        for part, expected in parts:
            assert part.shape == expected.shape
            assert torch.allclose(part, expected, atol=1e-5)
