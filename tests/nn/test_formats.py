"""The interface of weight formats: dense weights, and a second format unknown to models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from helpers.paged_model import PagedModel
from helpers.stored_layers import compressed_config
from helpers.tiny_models import save_tiny, tokens
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvik.kernels.weights import Weight, int8_weight
from kvik.nn.checkpoint import SINGLE
from kvik.nn.formats import registry
from kvik.nn.formats.base import Dense, LinearShape, OutputAxis, StoredTensor
from kvik.spec.stored_weights import StoredScheme


def test_dense_tensors_have_the_checkpoints_shape() -> None:
    shape = LinearShape(inputs=3, outputs=6)
    stored = Dense(shape).tensors(torch.float32)["weight"]
    assert stored == StoredTensor((6, 3), torch.float32, OutputAxis(), in_runs=True)
    weight = torch.randn(3, 3)  # a run of rows
    assert torch.equal(Dense(shape).weight({"weight": weight}, slice(1, 3)).values, weight[1:])


def test_dense_transposed() -> None:
    """There are no rows to read in runs."""
    shape = LinearShape(inputs=3, outputs=6, transposed=True)
    stored = Dense(shape).tensors(torch.float32)["weight"]
    assert stored == StoredTensor((3, 6), torch.float32, OutputAxis(1), in_runs=False)
    weight = torch.randn(3, 6)
    run = Dense(shape).weight({"weight": weight}, slice(2, 5))
    assert torch.equal(run.values, weight.t()[2:5])


class RowScaled:
    """Bytes and a scale per output row."""

    unread = ("note",)

    def __init__(
        self, scheme: StoredScheme, shape: LinearShape, stored: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.shape = shape

    def tensors(self, dtype: torch.dtype) -> dict[str, StoredTensor]:
        outputs, inputs = self.shape.outputs, self.shape.inputs
        return {
            "weight": StoredTensor((outputs, inputs), torch.int8),
            "scale": StoredTensor((outputs,), torch.float32),
        }

    def weight(self, tensors: Mapping[str, Tensor], rows: slice) -> Weight:
        scale = tensors["scale"][rows]
        return int8_weight(tensors["weight"][rows], scale, quantize_activations=False)


def test_a_new_format_is_one_registry_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layers are stored as bytes, the others stay dense, with the same model file."""
    save_tiny(tmp_path, "Llama", attention_bias=True)
    config = compressed_config("int-quantized", num_bits=8, strategy="channel", group_size=None)
    config["config_groups"]["group_0"]["targets"] = [r"re:.*layers\.1\..*_proj"]
    stored = load_file(tmp_path / SINGLE)
    plain, packed = dict(stored), dict(stored)
    for name, tensor in stored.items():
        if name.endswith("_proj.weight") and "layers.1" in name:
            scale = tensor.abs().amax(1) / 127
            packed[name] = (tensor / scale[:, None]).round().to(torch.int8)
            packed[name.replace("weight", "scale")] = scale
            packed[name.replace("weight", "note")] = scale.clone()
            plain[name] = packed[name] * scale[:, None]
    ids = tokens(20)
    save_file(plain, tmp_path / SINGLE)
    expected = PagedModel(tmp_path).logits(ids)
    save_file(packed, tmp_path / SINGLE)
    written = json.loads((tmp_path / "config.json").read_text())
    written["quantization_config"] = config
    (tmp_path / "config.json").write_text(json.dumps(written))
    formats = MappingProxyType({**registry.FORMATS, "int-quantized": RowScaled})
    monkeypatch.setattr(registry, "FORMATS", formats)
    assert torch.equal(PagedModel(tmp_path).logits(ids), expected)
