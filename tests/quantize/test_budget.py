"""Bits by sensitivity: within the budget, equal for layers of a matrix, where they help."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
import torch
from helpers.calibrated import FAMILIES, calibrated, quiet, random_windows
from helpers.tiny_models import save_tiny
from safetensors.torch import load_file, save_file

from kvik.errors import ConfigError
from kvik.models.model_spec import read_model_spec
from kvik.quantize import budget as module
from kvik.quantize.budget import CHOICE, Candidate, choose_bits, choose_formats
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
        assert isinstance(layer.quantised, Quantised)
        assert layer.quantised.grid.bits == (8 if layer.name in eight else 4)


def test_the_choice_is_saved(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "Llama")
    recipe = Recipe("rtn", 4, 8, average_bits=5.0)
    found = chosen(tmp_path / "model", recipe, tmp_path / "work")
    assert (tmp_path / "work" / CHOICE).is_file()
    (tmp_path / "model" / "model.safetensors").unlink()  # it is not measured again
    assert chosen(tmp_path / "model", recipe, tmp_path / "work") == found


def test_nothing_left_to_choose(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "Llama")
    recipe = Recipe("rtn", 4, 8, average_bits=5.0, skip=("*",))
    with pytest.raises(ConfigError, match="leaves no layer"):
        chosen(tmp_path / "model", recipe, tmp_path / "work")


# Choice of formats: the best of all choices, or nearly so with a bound that proves it.

Layers = list[list[Candidate]]


def made(layers: int, seed: int, unit: int = 1, most: int = 40) -> Layers:
    """Return layers whose larger formats mostly lose less."""
    draw = random.Random(seed)
    found = []
    for _ in range(layers):
        size, loss = draw.randint(1, most), draw.uniform(0.1, 10)
        found.append(
            [
                Candidate(3 * size * unit, loss * draw.uniform(0.5, 1.5)),
                Candidate(4 * size * unit, loss * draw.uniform(0.1, 0.6)),
                Candidate(8 * size * unit, loss * draw.uniform(-0.05, 0.1)),
            ]
        )
    return found


def best(layers: Layers, budget: int) -> float:
    """Return the least loss, by trying all choices."""
    return min(
        sum(c.loss for c in choice)
        for choice in itertools.product(*layers)
        if sum(c.bytes for c in choice) <= budget
    )


def lagrangian_bound(layers: Layers, budget: int) -> float:
    """Return the largest lower bound by a price of bytes: max over p >= 0 of sum of min (loss + p *
    bytes) - p * budget.

    It is concave in p, and its slope is the chosen bytes less the budget, so bisection finds the
    maximum. Every p gives a bound, so that the search may stop anywhere.
    """

    def at(price: float) -> tuple[float, int]:
        cheapest = [
            min(layer, key=lambda c: (c.loss + price * c.bytes, c.bytes)) for layer in layers
        ]
        over = sum(c.bytes for c in cheapest) - budget
        return math.fsum(c.loss for c in cheapest) + price * over, over

    bound, over = at(0.0)
    if over <= 0:
        return bound
    losses = [c.loss for layer in layers for c in layer]
    low, high = 0.0, max(losses) - min(losses)  # per byte: no byte is worth the higher price
    for _ in range(100):
        price = (low + high) / 2
        value, over = at(price)
        bound = max(bound, value)
        low, high = (price, high) if over > 0 else (low, price)
    return bound


def totals(layers: Layers, budget: int) -> tuple[int, float]:
    """Return the bytes and the loss of the chosen formats."""
    chosen = [layer[i] for layer, i in zip(layers, choose_formats(layers, budget), strict=True)]
    return sum(c.bytes for c in chosen), sum(c.loss for c in chosen)


def loss_within(layers: Layers, budget: int) -> float:
    """Check that the choice fits, and return its loss."""
    taken, loss = totals(layers, budget)
    assert taken <= budget
    assert lagrangian_bound(layers, budget) <= loss + 1e-9
    return loss


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_best_of_all_choices(seed: int, share: float) -> None:
    layers = made(7, seed, unit=1000)
    least = sum(min(c.bytes for c in layer) for layer in layers)
    most = sum(max(c.bytes for c in layer) for layer in layers)
    budget = int(least + share * (most - least))
    assert loss_within(layers, budget) == pytest.approx(best(layers, budget))


@pytest.mark.parametrize("seed", range(3))
def test_rounded_sizes_lose_at_most_the_stated_bound(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CELLS", 50)
    layers = made(6, seed, most=10**6)
    least = sum(min(c.bytes for c in layer) for layer in layers)
    most = sum(max(c.bytes for c in layer) for layer in layers)
    budget = (least + most) // 2
    unit = -(-(budget - least) // 50)
    assert loss_within(layers, budget) <= best(layers, budget - 6 * unit) + 1e-9


def test_a_large_model_is_near_its_bound() -> None:
    layers = made(200, seed=1, most=10**6)
    least = sum(min(c.bytes for c in layer) for layer in layers)
    most = sum(max(c.bytes for c in layer) for layer in layers)
    budget = int(least + 0.2 * (most - least))
    loss = loss_within(layers, budget)
    worst = sum(max(c.loss for c in layer) for layer in layers)
    bound = lagrangian_bound(layers, budget)
    assert loss - bound < 0.005 * (worst - bound)


def test_the_most_sensitive_layer_stays_higher() -> None:
    layers = [[Candidate(4, loss), Candidate(8, loss / 10)] for loss in (1.0, 9.0, 2.0)]
    assert choose_formats(layers, 16) == [0, 1, 0]
    assert choose_formats(layers, 20) == [0, 1, 1]
    assert choose_formats(layers, 10**12) == [1, 1, 1]


def test_ties_go_to_fewer_bytes_then_to_the_first() -> None:
    layers = [
        [Candidate(8, 1.0), Candidate(4, 1.0), Candidate(4, 1.0)],
        [Candidate(6, 2.0), Candidate(3, 2.0)],
    ]
    assert choose_formats(layers, 100) == [1, 1]
    one_of_two = [
        [Candidate(4, 1.0), Candidate(10, 0.0)],
        [Candidate(4, 1.0), Candidate(8, 0.0)],
    ]
    assert choose_formats(one_of_two, 15) == [0, 1]
    assert choose_formats(one_of_two[::-1], 15) == [1, 0]


def test_more_bytes_never_lose_more() -> None:
    layers = made(12, seed=3)
    least = sum(min(c.bytes for c in layer) for layer in layers)
    losses = [totals(layers, least + extra)[1] for extra in range(0, 400, 7)]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


def test_impossible_budgets_are_refused() -> None:
    layer = [Candidate(4, 1.0), Candidate(8, 0.1)]
    with pytest.raises(ValueError, match="8 bytes, the budget is 7"):
        choose_formats([layer, layer], 7)
    with pytest.raises(ValueError, match="not finite"):
        choose_formats([[*layer, Candidate(3, float("nan"))]], 8)
    with pytest.raises(ValueError, match="no candidate"):
        choose_formats([layer, []], 100)
    assert choose_formats([], 0) == []
