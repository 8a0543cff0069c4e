"""Wishes that cannot be are refused at once, each by its field."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvik.errors import ConfigError
from kvik.quantize.quantised import recipe_grid
from kvik.quantize.recipe import Recipe, check_groups, dividing

MODEL = torch.bfloat16


@pytest.mark.parametrize(
    ("wishes", "field", "message"),
    [
        ({"method": "nf4"}, "method", "must be one of rtn, gptq, awq, smoothquant, fp8, not 'nf4'"),
        ({"bits": 5}, "bits", "must be one of 2, 3, 4, 8 with gptq, not 5"),
        ({"method": "fp8"}, "bits", "must be one of 8 with fp8, not 4"),
        ({"method": "fp8", "bits": 8, "activation_scheme": "none"}, "activation_scheme",
         "must be dynamic or static, not 'none'"),
        ({"method": "fp8", "bits": 8, "fp8_format": "e3m4"}, "fp8_format",
         "must be e4m3 or e5m2, not 'e3m4'"),
        ({"method": "rtn", "activation_scheme": "static"}, "activation_scheme",
         "static is of fp8, not of rtn"),
        ({"method": "gptq", "fp8_format": "e5m2"}, "fp8_format", "e5m2 is of fp8, not of gptq"),
        ({"method": "fp8", "bits": 8, "activation_scheme": "static"}, "activation_scheme",
         "must be dynamic with blocks of 128 x 128"),
        ({"method": "fp8", "bits": 8, "group_size": 0, "activation_scheme": "static",
          "fp8_format": "e5m2"}, "activation_scheme", "must be dynamic with e5m2"),
        ({"method": "fp8", "bits": 8, "group_size": -1, "fp8_format": "e5m2"}, "group_size",
         "with e5m2: no layout has a scale for each output"),
        ({"method": "smoothquant", "bits": 4}, "bits", "must be one of 8 with smoothquant, not 4"),
        ({"group_size": 0}, "group_size", "-1 .* or a multiple of 8, not 0"),
        ({"group_size": -2}, "group_size", "multiple of 8, not -2"),
        ({"group_size": 100}, "group_size", "multiple of 8, not 100"),
        ({"method": "fp8", "bits": 8, "group_size": 64}, "group_size", "with fp8, not 64"),
        ({"method": "smoothquant", "bits": 8}, "group_size", "must be -1 with smoothquant"),
        (
            {"method": "fp8", "bits": 8, "group_size": -1, "symmetric": False},
            "sym", "must be true with fp8",
        ),
        ({"method": "awq", "act_order": True}, "act_order", "awq has no order"),
        ({"static_groups": True}, "static_groups", "needs act_order"),
        ({"damping": 0.0}, "damping", r"in \(0, 1\], not 0.0"),
        ({"damping": float("nan")}, "damping", "not nan"),
        ({"smoothing": 1.5}, "smoothing", r"in \[0, 1\], not 1.5"),
        ({"smoothing": float("nan")}, "smoothing", "not nan"),
        ({"average_bits": 9.0}, "budget_bits", r"in \[4, 8\]"),
        ({"average_bits": 3.5}, "budget_bits", r"in \[4, 8\]"),
        ({"average_bits": float("nan")}, "budget_bits", "not nan"),
        ({"average_bits": 5, "act_order": True}, "static_groups", "must be true"),
        (
            {"method": "fp8", "bits": 8, "group_size": -1, "average_bits": 8},
            "budget_bits", "is not of fp8",
        ),
    ],
)  # fmt: skip
def test_refusals(wishes: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Recipe(**{"method": "gptq"} | wishes)
    assert caught.value.field == field


def test_which_layers() -> None:
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
    check_groups(Recipe("fp8", bits=8, group_size=128), inputs)  # blocks may be cut at the ends
    with pytest.raises(ConfigError, match=r"128 does not divide .* 'b': take 64 or 32 or -1"):
        check_groups(Recipe("rtn", group_size=128), inputs)
    assert dividing([256, 704]) == (64, 32)
    assert dividing([256]) == (128, 64, 32)
    assert dividing([100]) == ()
