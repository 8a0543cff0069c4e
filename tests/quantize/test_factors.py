"""Factors that move between layers leave the block's outputs as they were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.calibrated import FAMILIES, random_windows
from helpers.tiny_models import save_tiny
from torch import Tensor

from kvik.models.model_spec import ModelSpec, read_model_spec
from kvik.nn.checkpoint import open_checkpoint
from kvik.quantize.block import Block, unwatched
from kvik.quantize.calibrate import ModelBlocks
from kvik.quantize.factors import Folded, fold_block
from kvik.quantize.source import Fold, folds
from kvik.quantize.statistics import InputStatistics


def first_block(
    folder: Path, dtype: torch.dtype = torch.float32
) -> tuple[ModelSpec, Block, Tensor]:
    """The spec, the first block, and what it is given."""
    spec = read_model_spec(folder)
    model = ModelBlocks(open_checkpoint(folder), spec, 9, dtype, torch.device("cpu"))
    return spec, model.block(0), next(model.embed(random_windows(4, 9), 4))


def of_block(spec: ModelSpec) -> list[Fold]:
    return [
        replace(f, readers=tuple(r.format(0) for r in f.readers), source=f.source.format(0))
        for f in folds(spec)
    ]


def drawn(fold: Fold, weights: Mapping[str, Tensor], statistics: InputStatistics) -> Tensor:
    """Factors from 0.2 to 5, equal where they must be."""
    generator = torch.Generator().manual_seed(len(fold.readers))
    by_channel = torch.empty(fold.num_channels).uniform_(-1.6, 1.6, generator=generator).exp()
    return by_channel[fold.channels]


def put(block: Block, folded: Folded) -> None:
    for name, weight in folded.weights.items():
        block.set_weight(name, weight)
    for name, values in folded.tensors.items():
        block.set_tensor(name, values)


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_stay(tmp_path: Path, family: str) -> None:
    save_tiny(tmp_path, family, **FAMILIES[family])
    spec, block, x = first_block(tmp_path)
    statistics = {layer.matrix: InputStatistics(layer.weight.shape[1]) for layer in block.layers}
    expected = block.run(x, unwatched)
    seen: list[dict[int, Tensor]] = [{}, {}]
    block.run(x, seen[0].setdefault)
    folded = fold_block(block, of_block(spec), statistics, lambda name: True, drawn)
    put(block, folded)
    torch.testing.assert_close(block.run(x, unwatched), expected, rtol=1e-4, atol=1e-4)
    # and they did move: all but the inputs behind a GELU, and those that no norm gives
    block.run(x, seen[1].setdefault)
    assert len(folded.scales) == {"GPT2": 3, "Olmo2": 2}.get(family, 4)
    for matrix, given in seen[0].items():
        scaled = given / folded.scales[matrix] if matrix in folded.scales else given
        torch.testing.assert_close(seen[1][matrix], scaled, rtol=1e-4, atol=1e-4)
        # and what was gathered before stands for what they are given now
        before, after = (InputStatistics(given.shape[1]) for _ in range(2))
        before.add(given)
        after.add(scaled)
        torch.testing.assert_close(folded.sample(matrix, before), after.sample)


def test_factors_serve_all_layers_that_are_rounded(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    spec, block, _ = first_block(tmp_path)
    statistics = {layer.matrix: InputStatistics(layer.weight.shape[1]) for layer in block.layers}
    served: list[list[str]] = []

    def find(fold: Fold, weights: Mapping[str, Tensor], inputs: InputStatistics) -> Tensor:
        served.append([name.rpartition(".")[2] for name in weights])
        return drawn(fold, weights, inputs)

    fold_block(block, of_block(spec), statistics, lambda name: not name.endswith("k_proj"), find)
    assert served == [["o_proj"], ["down_proj"], ["q_proj", "v_proj"], ["gate_proj", "up_proj"]]


def test_in_bfloat16_the_gain_is_not_rounded(tmp_path: Path) -> None:
    """Layers are multiplied with what the gain's rounding left of the factors."""
    save_tiny(tmp_path, "Llama", dtype="bfloat16")
    model = tmp_path / "model.safetensors"
    from safetensors.torch import load_file, save_file

    save_file({k: v.bfloat16() for k, v in load_file(model).items()}, model)
    spec, block, _ = first_block(tmp_path)
    statistics = {layer.matrix: InputStatistics(layer.weight.shape[1]) for layer in block.layers}
    folded = fold_block(block, of_block(spec), statistics, lambda name: True, drawn)
    name = "model.layers.0.input_layernorm.weight"
    q = block.layers[0]
    assert folded.tensors[name].dtype == torch.bfloat16
    before = block.tensors[name].float() * q.weight.float()
    after = folded.tensors[name].float() * folded.weights[q.name]
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-7)


def test_heads_that_share_a_value_share_its_factors() -> None:
    fold = Fold((), "v", True, 0, torch.tensor([0, 1, 0, 1, 2, 3, 2, 3]))
    values = torch.tensor([1.0, 2.0, 3.0, 6.0, 5.0, 5.0, 9.0, 1.0])
    assert fold.average(values).tolist() == [2.0, 4.0, 2.0, 4.0, 7.0, 3.0, 7.0, 3.0]
    assert fold.of_channels(fold.average(values)).tolist() == [2.0, 4.0, 7.0, 3.0]
