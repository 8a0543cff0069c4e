"""A linear layer: its product, and the stages between it and the activation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers.kernel_cases import filled_matrix
from helpers.paged_model import PagedModel
from helpers.stored_layers import awq_config
from helpers.stored_models import save_quantised
from helpers.tiny_models import save_tiny, tiny_model
from torch import Tensor

from kvik.kernels.ops import Ops
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.torch_ops import TORCH
from kvik.kernels.weights import Activation, float_weight
from kvik.nn.layers import Linear, Stage
from kvik.spec.declare import ForwardContext


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


@pytest.mark.parametrize("ops", [REFERENCE, TORCH], ids=["reference", "torch"])
@pytest.mark.parametrize("activation", [None, "gelu_tanh", "silu_and_mul"])
def test_a_sum_over_ranks_stands_before_activation_and_residual(
    ops: Ops, activation: Activation | None
) -> None:
    """Each of two ranks has half of the inputs; the first one has the bias."""
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(s, generator=generator) for s in ((8, 6), (8,), (5, 6)))
    outputs = 4 if activation == "silu_and_mul" else 8
    residual = torch.randn(5, outputs, generator=generator)
    first, second = (
        filled_matrix(ops, float_weight(part.contiguous()), own, None, torch.float32)
        for part, own in ((weight[:, :3], bias), (weight[:, 3:], None))
    )
    other = Linear(ops, second)(x[:, 3:])
    layer = Linear(ops, first, [lambda x, y, ctx: y + other], activation)
    whole = Linear(ops, filled_matrix(ops, float_weight(weight), bias, activation, torch.float32))
    torch.testing.assert_close(
        layer(x[:, :3], residual=residual.clone()), whole(x, residual=residual.clone())
    )


class LowRank:
    """Adapters for all matrices of blocks: y + x A B, separate for the parts of fused layers."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}  # layer -> [outputs, inputs], added to the weights

    def __call__(self, names: Sequence[str], inputs: int, outputs: Sequence[int]) -> list[Stage]:
        parts = []
        for name, width in zip(names, outputs, strict=True):
            generator = torch.Generator().manual_seed(len(self.found))
            a = torch.randn(inputs, 2, generator=generator) * 0.2
            b = torch.randn(2, width, generator=generator) * 0.2
            self.found[name] = (a @ b).t()
            parts.append((a, b))

        def add(x: Tensor, y: Tensor, ctx: ForwardContext | None) -> Tensor:
            assert len(ctx.positions) == len(x)
            return y + torch.cat([x @ a @ b for a, b in parts], 1)

        return [add]


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPT2", "Olmo2"])
def test_adapters_reach_every_matrix_of_a_block(tmp_path: Path, family: str) -> None:
    """A model with adapters equals the model with adapters merged into its weights."""
    reference = tiny_model(family)
    reference.save_pretrained(tmp_path / "plain")
    adapters, ids = LowRank(), list(range(1, 12))
    adapted = PagedModel(tmp_path / "plain", stages=adapters).logits(ids)
    with torch.no_grad():
        weights = dict(reference.named_parameters())
        for name, delta in adapters.found.items():
            weights[f"{name}.weight"] += delta.t() if family == "GPT2" else delta
    reference.save_pretrained(tmp_path / "merged")
    plain = PagedModel(tmp_path / "plain").logits(ids)
    merged = PagedModel(tmp_path / "merged").logits(ids)
    assert len(adapters.found) >= 4 * reference.config.num_hidden_layers
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, merged, atol=1e-2)


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
