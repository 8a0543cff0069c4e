"""Checkpoints of BitNet, whose weights are -1, 0 and 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.paged_model import PagedModel
from helpers.tiny_models import reference_logits, save_tiny, tokens
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from kvik import LLM, SamplingParams
from kvik.errors import ModelError
from kvik.models.model_spec import read_model_spec
from kvik.nn.checkpoint import SINGLE
from kvik.spec.weight_kind import WeightKind

KEY = "quantization_config"


class Ternary(nn.Module):
    """A product of inputs rounded to eight bits, by definition."""

    def __init__(self, weight: Tensor, scale: float) -> None:
        super().__init__()
        self.kept, self.scale = weight, scale

    def forward(self, x: Tensor) -> Tensor:
        step = x.abs().amax(-1, keepdim=True) / 127
        return (x / step).round() @ self.kept.t() * step * self.scale


def packed(weight: Tensor) -> Tensor:
    """Pack [outputs, inputs] of -1, 0 and 1 to [outputs / 4, inputs]."""
    quarters = (weight + 1).to(torch.uint8).chunk(4)
    return sum(quarter << 2 * i for i, quarter in enumerate(quarters))


def save_ternary(folder: Path, linear_class: str) -> nn.Module:
    """Save a BitNet and return the same model by transformers."""
    model = save_tiny(folder, "BitNet", hidden_size=64)
    tensors, generator = load_file(folder / SINGLE), torch.Generator().manual_seed(0)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            numbers = torch.randint(-1, 2, layer.weight.shape, generator=generator).float()
            scale = torch.rand(1, generator=generator) * 0.1 + 0.1
            tensors[f"{name}.weight"] = packed(numbers)
            divided = linear_class == "bitlinear"
            tensors[f"{name}.weight_scale"] = 1 / scale if divided else scale
            model.set_submodule(name, Ternary(numbers, float(scale)))
    save_file(tensors, folder / SINGLE)
    config = json.loads((folder / "config.json").read_text())
    config[KEY] = {"quant_method": "bitnet", "linear_class": linear_class}
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("linear_class", ["bitlinear", "autobitlinear"])
def test_logits(linear_class: str, tmp_path: Path) -> None:
    reference, ids = save_ternary(tmp_path, linear_class), tokens(20)
    model = PagedModel(tmp_path)
    expected = reference_logits(reference, ids)
    torch.testing.assert_close(model.logits(ids), expected, atol=1e-4, rtol=1e-4)
    kinds = {kind for matrix in model.spec.linear_layers for kind in matrix.stored}
    assert {str(kind) for kind in kinds if kind} == {"2 bits, one scale, activations in 8 bits"}
    assert model.model.layers[0].mlp.up.matrix.spec.kind == WeightKind("int8", activations="token")


@pytest.mark.full
def test_processes_that_share_a_model(tmp_path: Path) -> None:
    save_ternary(tmp_path, "autobitlinear")
    common = {"device": "cpu", "dtype": "float32", "max_model_len": 64, "num_blocks": 64}
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2)
    found = []
    for count in (1, 2):
        with LLM(str(tmp_path), tensor_parallel_size=count, threads=count, **common) as llm:
            (output,) = llm.generate([tokens(24)], params)
        found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    assert found[0] == found[1]


def test_a_number_that_is_none_of_the_three(tmp_path: Path) -> None:
    save_ternary(tmp_path, "bitlinear")
    tensors = load_file(tmp_path / SINGLE)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] |= 3
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight.* from 0 to 2"):
        PagedModel(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("quantization_mode", "online"), ("use_rms_norm", True), ("linear_class", "linear")],
)
def test_what_is_refused(key: str, value: object, tmp_path: Path) -> None:
    save_ternary(tmp_path, "autobitlinear")
    config = json.loads((tmp_path / "config.json").read_text())
    config[KEY][key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"{KEY} {key}"):
        read_model_spec(tmp_path)
