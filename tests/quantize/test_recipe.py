"""Impossible recipes are refused at once, by field."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvik.errors import ConfigError
from kvik.quantize.quantised import recipe_grid
from kvik.quantize.recipe import Recipe, check_groups, dividing

MODEL = torch.bfloat16


@pytest.mark.parametrize(
    ("wishes", "field"),
    [
        ({"method": "nf4"}, "method"),
        ({"bits": 5}, "bits"),
        ({"method": "fp8"}, "bits"),
        ({"method": "fp8", "bits": 8, "activation_scheme": "none"}, "activation_scheme"),
        ({"method": "fp8", "bits": 8, "fp8_format": "e3m4"}, "fp8_format"),
        ({"method": "rtn", "activation_scheme": "static"}, "activation_scheme"),
        ({"method": "gptq", "fp8_format": "e5m2"}, "fp8_format"),
        ({"method": "fp8", "bits": 8, "activation_scheme": "static"}, "activation_scheme"),
        (
            {
                "method": "fp8",
                "bits": 8,
                "group_size": 0,
                "activation_scheme": "static",
                "fp8_format": "e5m2",
            },
            "activation_scheme",
        ),
        ({"method": "fp8", "bits": 8, "group_size": -1, "fp8_format": "e5m2"}, "group_size"),
        ({"method": "smoothquant", "bits": 4}, "bits"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": -2}, "group_size"),
        ({"group_size": 100}, "group_size"),
        ({"method": "fp8", "bits": 8, "group_size": 64}, "group_size"),
        ({"method": "smoothquant", "bits": 8}, "group_size"),
        ({"method": "fp8", "bits": 8, "group_size": -1, "symmetric": False}, "sym"),
        ({"method": "awq", "act_order": True}, "act_order"),
        ({"static_groups": True}, "static_groups"),
        ({"damping": 0.0}, "damping"),
        ({"damping": float("nan")}, "damping"),
        ({"smoothing": 1.5}, "smoothing"),
        ({"smoothing": float("nan")}, "smoothing"),
        ({"method": "rtn", "damping": 0.5}, "damping"),
        ({"method": "awq", "smoothing": 0.2}, "smoothing"),
        ({"average_bits": 9.0}, "budget_bits"),
        ({"average_bits": 3.5}, "budget_bits"),
        ({"average_bits": float("nan")}, "budget_bits"),
        ({"average_bits": 5, "act_order": True}, "static_groups"),
        ({"method": "fp8", "bits": 8, "group_size": -1, "average_bits": 8}, "budget_bits"),
    ],
)
def test_refusals(wishes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        Recipe(**{"method": "gptq"} | wishes)


def test_quantised_layers() -> None:
    recipe = Recipe("rtn", skip=("*.down_proj", "model.layers.?.self_attn.k_proj"))
    assert recipe.quantises("model.layers.1.mlp.up_proj")
    assert not recipe.quantises("model.layers.1.mlp.down_proj")
    assert not recipe.quantises("model.layers.1.self_attn.k_proj")
    assert recipe.quantises("model.layers.11.self_attn.k_proj")


@pytest.mark.parametrize(
    ("wishes", "layout", "scales"),
    [
        ({"method": "rtn"}, "compressed-tensors", torch.bfloat16),
        ({"method": "gptq"}, "gptq", torch.float16),
        ({"method": "awq"}, "awq", torch.float16),
        ({"method": "awq", "bits": 8}, "compressed-tensors", torch.bfloat16),
        ({"method": "awq", "average_bits": 5}, "compressed-tensors", torch.bfloat16),
        (
            {"method": "smoothquant", "bits": 8, "group_size": -1},
            "compressed-tensors", torch.bfloat16,
        ),
        ({"method": "fp8", "bits": 8, "group_size": -1}, "compressed-tensors", torch.bfloat16),
        ({"method": "fp8", "bits": 8, "group_size": 128}, "fp8", torch.float32),
        ({"method": "fp8", "bits": 8, "group_size": 0, "fp8_format": "e5m2"}, "fp8", torch.float32),
    ],
)  # fmt: skip
def test_layouts_and_their_scales(wishes: dict[str, Any], layout: str, scales: torch.dtype) -> None:
    recipe = Recipe(**wishes)
    assert recipe.layout == layout
    assert recipe.scale_dtype(MODEL) == scales
    narrow = torch.float32 if recipe.method == "fp8" else torch.float16
    assert recipe.scale_dtype(torch.float16) == recipe.scale_dtype(torch.float32) == narrow


def test_the_grid_of_a_layer() -> None:
    recipe = Recipe("rtn", group_size=64, symmetric=False, average_bits=5).with_layer_bits({"a": 8})
    grid = recipe_grid(recipe, "a", MODEL)
    assert (grid.bits, grid.group, grid.symmetric) == (8, 64, False)
    assert grid.scale_dtypes == (torch.bfloat16,)
    assert recipe_grid(recipe, "b", MODEL).bits == 4


def test_methods_that_need_data() -> None:
    assert not Recipe("rtn").needs_data
    assert not Recipe("fp8", bits=8, group_size=-1).needs_data
    assert Recipe("fp8", bits=8, group_size=-1, activation_scheme="static").needs_data
    assert Recipe("rtn", average_bits=5).needs_data
    assert Recipe("gptq").needs_data and Recipe("awq").needs_data


def test_groups_that_do_not_divide() -> None:
    inputs = {"a": 256, "b": 704}
    check_groups(Recipe("rtn", group_size=64), inputs)
    check_groups(Recipe("rtn", group_size=-1), inputs)
    check_groups(Recipe("rtn", group_size=128, skip=("b",)), inputs)
    check_groups(Recipe("fp8", bits=8, group_size=128), inputs)  # the last blocks may be smaller
    with pytest.raises(ConfigError, match=r"128 does not divide .* 'b': take 64 or 32 or -1"):
        check_groups(Recipe("rtn", group_size=128), inputs)
    assert dividing([256, 704]) == (64, 32)
    assert dividing([256]) == (128, 64, 32)
    assert dividing([100]) == ()
