"""Bits by sensitivity: within the budget, equal for layers of a matrix, where they help."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from helpers.calibrated import FAMILIES, calibrated, quiet, random_windows
from helpers.tiny_models import save_tiny
from safetensors.torch import load_file, save_file

from kvik.models.model_spec import read_model_spec
from kvik.quantize import budget as module
from kvik.quantize.budget import CHOICE, Upgrade, choose_bits, choose_upgrades
from kvik.quantize.recipe import Recipe
from kvik.quantize.source import keeping_floats, open_source


def chosen(folder: Path, recipe: Recipe, work: Path) -> Recipe:
    spec = read_model_spec(folder)
    recipe = keeping_floats(recipe, spec)
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


def test_experts_of_a_layer_have_equal_bits(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "Qwen3Moe", **FAMILIES["Qwen3Moe"])
    recipe = chosen(tmp_path / "model", Recipe("rtn", 4, 8, average_bits=5.5), tmp_path / "work")
    assert 5.0 < average(tmp_path / "model", recipe) <= 5.5
    for block in (0, 2):
        scope = f"model.layers.{block}.mlp"
        bits = {
            name: recipe.bits_of(f"{scope}.experts.{e}.{name}_proj")
            for e in range(6)
            for name in ("up", "down")
        }
        for name, one in bits.items():
            assert {recipe.bits_of(f"{scope}.experts.{e}.{name}_proj") for e in range(6)} == {one}
        assert not recipe.quantises(f"{scope}.gate")


def test_bits_are_assigned_where_they_reduce_the_error(tmp_path: Path) -> None:
    """Weights that are exact in four bits need no eight; the others get them."""
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
        assert layer.quantised.grid.bits == (8 if layer.name in eight else 4)


def test_the_choice_is_saved(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "Llama")
    recipe = Recipe("rtn", 4, 8, average_bits=5.0)
    found = chosen(tmp_path / "model", recipe, tmp_path / "work")
    assert (tmp_path / "work" / CHOICE).is_file()
    (tmp_path / "model" / "model.safetensors").unlink()  # it is not measured again
    assert chosen(tmp_path / "model", recipe, tmp_path / "work") == found


# Choice of upgrades: the best of all choices, or nearly so.


def drawn(count: int, seed: int, unit: int = 1, most: int = 40) -> list[Upgrade]:
    """Return upgrades that mostly help."""
    draw = random.Random(seed)
    return [Upgrade(draw.randint(1, most) * unit, draw.uniform(-0.5, 10)) for _ in range(count)]


def best(upgrades: list[Upgrade], budget: int) -> float:
    """Return the largest gain, by trying all choices."""
    some = itertools.product((False, True), repeat=len(upgrades))
    found = (list(itertools.compress(upgrades, choice)) for choice in some)
    return max(gain_of(made) for made in found if sum(one.bits for one in made) <= budget)


def gain_of(made: Iterable[Upgrade]) -> float:
    return sum(one.gain for one in made)


def gain_within(upgrades: list[Upgrade], budget: int) -> float:
    """Check that the choice fits, and return its gain."""
    made = list(itertools.compress(upgrades, choose_upgrades(upgrades, budget)))
    assert sum(one.bits for one in made) <= budget
    return gain_of(made)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_best_of_all_choices(seed: int, share: float) -> None:
    upgrades = drawn(10, seed, unit=1000)
    budget = int(share * sum(one.bits for one in upgrades))
    assert gain_within(upgrades, budget) == pytest.approx(best(upgrades, budget))


@pytest.mark.parametrize("seed", range(3))
def test_rounded_sizes_lose_at_most_the_stated_bound(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CELLS", 50)
    upgrades = drawn(9, seed, most=10**6)
    budget = sum(one.bits for one in upgrades) // 2
    unit = -(-budget // 50)
    assert gain_within(upgrades, budget) >= best(upgrades, budget - 9 * unit) - 1e-9


def test_ties_go_to_fewer_bits_then_to_the_first() -> None:
    assert choose_upgrades([Upgrade(4, 0.0), Upgrade(3, 0.0)], 100) == [False, False]
    assert choose_upgrades([Upgrade(4, 1.0), Upgrade(4, 1.0)], 7) == [True, False]
    one_of_two = [Upgrade(6, 1.0), Upgrade(4, 1.0)]
    assert choose_upgrades(one_of_two, 7) == [False, True]
    assert choose_upgrades(one_of_two[::-1], 7) == [True, False]


def test_losses_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        choose_upgrades([Upgrade(4, 1.0), Upgrade(3, float("nan"))], 8)
    assert choose_upgrades([], 0) == []
