"""Bits by sensitivity: within the budget, together for layers of a matrix, where they help."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.calibrated import calibrated, quiet, random_windows
from helpers.tiny_models import save_tiny
from safetensors.torch import load_file, save_file

from kvik.errors import ConfigError
from kvik.models.model_spec import read_model_spec
from kvik.quantize.budget import CHOICE, choose_bits
from kvik.quantize.quantised import Quantised
from kvik.quantize.recipe import Recipe
from kvik.quantize.source import open_source


def chosen(folder: Path, recipe: Recipe, work: Path) -> Recipe:
    spec = read_model_spec(folder)
    return choose_bits(folder, spec, recipe, random_windows(6, 16), work, quiet)


def average(folder: Path, recipe: Recipe) -> float:
    layers = open_source(folder).layers
    sizes = {name: shape.inputs * shape.outputs for name, shape in layers.items()}
    total = sum(size for name, size in sizes.items() if recipe.quantises(name))
    return sum(sizes[n] * recipe.bits_of(n) for n in sizes if recipe.quantises(n)) / total


@pytest.mark.parametrize("budget", [4.0, 4.7, 6.0, 8.0])
def test_within_the_budget(tmp_path: Path, budget: float) -> None:
    save_tiny(tmp_path / "model", "Llama")
    recipe = chosen(tmp_path / "model", Recipe("rtn", 4, 8, average_bits=budget), tmp_path / "work")
    found = average(tmp_path / "model", recipe)
    assert budget - 0.5 < found <= budget
    for block in range(3):
        scope = f"model.layers.{block}."
        assert len({recipe.bits_of(f"{scope}self_attn.{x}_proj") for x in "qkv"}) == 1
        assert len({recipe.bits_of(f"{scope}mlp.{x}_proj") for x in ("gate", "up")}) == 1


def test_bits_go_where_they_help(tmp_path: Path) -> None:
    """Weights that four bits hold exactly need no eight; the others get them."""
    save_tiny(tmp_path / "model", "Llama")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if "_proj" in name and "layers.1.mlp" not in name:
            codes = torch.randint(-7, 8, tensor.shape, generator=generator)
            codes[:, ::8] = 7
            tensors[name] = codes / 16.0
    save_file(tensors, path, metadata={"format": "pt"})
    recipe = Recipe("gptq", 4, 8, average_bits=5.0)
    found = chosen(tmp_path / "model", recipe, tmp_path / "work")
    eight = {name for name in open_source(tmp_path / "model").layers if found.bits_of(name) == 8}
    assert eight
    assert eight <= {f"model.layers.1.mlp.{x}_proj" for x in ("gate", "up", "down")}
    results = calibrated(tmp_path / "model", found, random_windows(6, 16), tmp_path / "work")
    for layer in (layer for result in results for layer in result.layers):
        assert isinstance(layer.quantised, Quantised)
        assert layer.quantised.grid.bits == (8 if layer.name in eight else 4)


def test_the_choice_is_remembered(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "Llama")
    recipe = Recipe("rtn", 4, 8, average_bits=5.0)
    found = chosen(tmp_path / "model", recipe, tmp_path / "work")
    assert (tmp_path / "work" / CHOICE).is_file()
    (tmp_path / "model" / "model.safetensors").unlink()  # it is not measured again
    assert chosen(tmp_path / "model", recipe, tmp_path / "work") == found


def test_without_a_budget(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "Llama")
    recipe = Recipe("rtn", 4, 8)
    assert chosen(tmp_path / "model", recipe, tmp_path / "work") is recipe
    assert not (tmp_path / "work").exists()


def test_nothing_left_to_choose(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "Llama")
    recipe = Recipe("rtn", 4, 8, average_bits=5.0, skip=("*",))
    with pytest.raises(ConfigError, match="leaves no layer"):
        chosen(tmp_path / "model", recipe, tmp_path / "work")
