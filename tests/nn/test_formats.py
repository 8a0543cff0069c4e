"""The weight-format seam: dense weights, and a second format that models know nothing of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from helpers.paged_model import PagedModel
from helpers.tiny_models import save_tiny, tokens
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvik.kernels.weights import Int8Weight
from kvik.nn.checkpoint import SINGLE
from kvik.nn.formats import registry
from kvik.nn.formats.base import LinearShape, Param, Shard, WeightFormat
from kvik.nn.formats.dense import Dense

CPU = torch.device("cpu")


def test_dense_parts_are_views_with_the_checkpoints_shape() -> None:
    shape = LinearShape(inputs=3, outputs=(4, 2), transposed=False)
    param = Dense().params(shape, "column", torch.float32, CPU)["weight"]
    assert param.tensor.shape == (6, 3) and [p.shape for p in param.parts] == [(4, 3), (2, 3)]
    transposed = LinearShape(inputs=3, outputs=(6,), transposed=True)
    param = Dense().params(transposed, "column", torch.float32, CPU)["weight"]
    stored = torch.randn(3, 6)
    param.parts[0].copy_(stored)
    weight = Dense().weight({"weight": param.tensor})
    torch.testing.assert_close(weight.dequantized(), stored.t())


class RowScaled:
    """Bytes and a scale for each output row."""

    name = "row-scaled"

    def match(self, tensors: frozenset[str], quantization: Mapping[str, object] | None) -> bool:
        return tensors == {"weight", "scale"}

    def params(
        self, shape: LinearShape, shard: Shard, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Param]:
        rows = sum(shape.outputs)
        weight = torch.empty(rows, shape.inputs, dtype=torch.int8, device=device)
        scale = torch.empty(rows, dtype=torch.float32, device=device)
        return {
            "weight": Param(weight, tuple(weight.split(shape.outputs)), 0),
            "scale": Param(scale, tuple(scale.split(shape.outputs)), 0),
        }

    def weight(self, params: dict[str, Tensor]) -> Int8Weight:
        return Int8Weight(params["weight"], params["scale"], quantize_activations=False)


def test_a_new_format_is_one_registry_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layers are stored as bytes, the others stay dense; the model file is the same."""
    save_tiny(tmp_path, "Llama", attention_bias=True)
    stored = load_file(tmp_path / SINGLE)
    plain, packed = dict(stored), dict(stored)
    for name, tensor in stored.items():
        if name.endswith("_proj.weight") and "layers.1" in name:
            scale = tensor.abs().amax(1) / 127
            packed[name] = (tensor / scale[:, None]).round().to(torch.int8)
            packed[name.replace("weight", "scale")] = scale
            plain[name] = packed[name] * scale[:, None]
    ids = tokens(20)
    save_file(plain, tmp_path / SINGLE)
    expected = PagedModel(tmp_path).logits(ids)
    save_file(packed, tmp_path / SINGLE)
    formats: tuple[WeightFormat, ...] = (RowScaled(), *registry.FORMATS)
    monkeypatch.setattr(registry, "FORMATS", formats)
    assert torch.equal(PagedModel(tmp_path).logits(ids), expected)
