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

from kvik.kernels.weights import Int8Kind, Int8Weight
from kvik.nn.checkpoint import SINGLE
from kvik.nn.formats import registry
from kvik.nn.formats.base import LinearShape, Shard, StoredTensor, WeightFormat
from kvik.nn.formats.dense import Dense


def test_dense_tensors_have_the_checkpoints_shape() -> None:
    shape = LinearShape(inputs=3, outputs=6)
    stored = Dense().tensors(shape, "column", torch.float32)["weight"]
    assert stored == StoredTensor((6, 3), torch.float32, 0, in_runs=True)
    weight = torch.randn(2, 3)  # a run of rows
    assert torch.equal(Dense().weight({"weight": weight}, shape).values, weight)


def test_dense_transposed() -> None:
    """There are no rows that could come in runs, and the axes of ranks are turned."""
    shape = LinearShape(inputs=3, outputs=6, transposed=True)
    stored = Dense().tensors(shape, "column", torch.float32)["weight"]
    assert stored == StoredTensor((3, 6), torch.float32, 1, in_runs=False)
    assert Dense().tensors(shape, "row", torch.float32)["weight"].shard_axis == 0
    weight = torch.randn(3, 6)
    assert torch.equal(Dense().weight({"weight": weight}, shape).values, weight.t())


class RowScaled:
    """Bytes and a scale for each output row."""

    name = "row-scaled"

    def match(self, tensors: frozenset[str], quantization: Mapping[str, object] | None) -> bool:
        return tensors == {"weight", "scale"}

    def kind(self, dtype: torch.dtype) -> Int8Kind:
        return Int8Kind(quantize_activations=False)

    def tensors(
        self, shape: LinearShape, shard: Shard, dtype: torch.dtype
    ) -> dict[str, StoredTensor]:
        return {
            "weight": StoredTensor((shape.outputs, shape.inputs), torch.int8, 0, in_runs=False),
            "scale": StoredTensor((shape.outputs,), torch.float32, 0, in_runs=False),
        }

    def weight(self, tensors: Mapping[str, Tensor], shape: LinearShape) -> Int8Weight:
        return Int8Weight(tensors["weight"], tensors["scale"], quantize_activations=False)


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
