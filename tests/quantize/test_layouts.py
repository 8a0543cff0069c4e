"""Layers in the bytes of public tools, and the keys of their configs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.stored_layers import golden
from torch import Tensor

from kvik.errors import ConfigError
from kvik.nn.formats.base import LinearShape
from kvik.nn.formats.bits import subtract_one
from kvik.quantize.quantised import Float8, Grid, Quantised, Scales, float8
from kvik.quantize.recipe import Recipe
from kvik.quantize.save import layouts, quantization_config

LAYER = "model.layers.0.mlp.down_proj"
SHAPE = LinearShape(inputs=96, outputs=32)

# By the tool's name of the case: the recipe, and the dtype of the tool's model.
INTEGERS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "awq": ({"method": "awq", "symmetric": False}, torch.bfloat16),
    "pack-quantized-3-group-asym": (
        {"method": "rtn", "bits": 3, "symmetric": False}, torch.float32,
    ),
}  # fmt: skip
for bits in (2, 3, 4, 8):
    for word in ("sym", "asym"):
        wishes = {"method": "gptq", "bits": bits, "symmetric": word == "sym"}
        INTEGERS[f"gptq-{bits}-{word}"] = (wishes, torch.bfloat16)
        INTEGERS[f"gptq-{bits}-{word}-order"] = (wishes | {"act_order": True}, torch.float16)
for name, wishes in (
    ("pack-quantized-4-group-sym", {"method": "rtn"}),
    ("pack-quantized-4-group-asym", {"method": "rtn", "symmetric": False}),
    ("pack-quantized-8-group-sym", {"method": "awq", "bits": 8}),
    ("int-quantized-8-channel-sym", {"method": "smoothquant", "bits": 8, "group_size": -1}),
):
    INTEGERS[name] = (wishes, torch.float32)


@pytest.mark.parametrize("case", INTEGERS)
def test_integers_have_the_bytes_of_the_tools(case: str) -> None:
    given, stored = golden(case)
    wishes, _ = INTEGERS[case]
    recipe = Recipe(**{"group_size": 32} | wishes)
    scales = Scales(given["scales"].float(), given.get("zeros"))
    grid = Grid(recipe.bits, recipe.group_size, recipe.symmetric)
    groups = given.get("groups")
    quantised = Quantised(given["q"], scales, grid, None if groups is None else groups.long())
    layout = layouts(recipe, {LAYER: SHAPE}, given["scales"].dtype)[LAYER]
    written = layout.tensors(quantised)
    if case.startswith("gptq") and not recipe.symmetric:
        # AutoGPTQ only has the older format.
        written["qzeros"] = subtract_one(written["qzeros"], recipe.bits)
    same(written, stored)
    if not case.startswith("gptq"):  # its index may be omitted, or be wider
        assert layout.num_bytes == sum(tensor.nbytes for tensor in written.values())


@pytest.mark.parametrize(
    ("case", "group", "dtype"),
    [
        ("float-quantized-channel", -1, torch.float32),
        ("float-quantized-tensor", 0, torch.float32),
        ("float-quantized-channel", -1, torch.bfloat16),
    ],
)
def test_floats_have_the_bytes_of_the_tools(case: str, group: int, dtype: torch.dtype) -> None:
    given, stored = golden(case)
    recipe = Recipe("fp8", bits=8, group_size=group)
    scales = given["scales"].to(dtype).float().reshape(-1, 1)
    written = layouts(recipe, {LAYER: SHAPE}, dtype)[LAYER].tensors(
        Float8(given["values"], scales, recipe.block)
    )
    stored["weight_scale"] = stored["weight_scale"].to(dtype)
    same(written, stored)


def same(written: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    assert set(written) == set(stored)
    for name, tensor in written.items():
        assert tensor.dtype == stored[name].dtype and tensor.shape == stored[name].shape, name
        assert torch.equal(tensor.view(torch.uint8), stored[name].view(torch.uint8)), name
        assert tensor.is_contiguous()


def test_symmetric_awq_has_zero_points_in_the_middle() -> None:
    q = torch.randint(1, 16, (32, 96), generator=torch.Generator().manual_seed(0)).byte()
    grid = Grid(4, 32, True)
    quantised = Quantised(q, Scales(torch.ones(32, 3), None), grid)
    layout = layouts(Recipe("awq", group_size=32), {LAYER: SHAPE}, torch.bfloat16)[LAYER]
    written = layout.tensors(quantised)
    assert bool((written["qzeros"] == -0x77777778).all())  # 8 in each four bits
    assert torch.equal(
        layout.format.weight(written, slice(0, 32)).dequantized(), quantised.dequantised()
    )


def test_fp8_blocks_have_the_scales_of_deepseek() -> None:
    shape = LinearShape(inputs=300, outputs=200)
    recipe = Recipe("fp8", bits=8, group_size=128)
    values = torch.ones(200, 300).to(torch.float8_e4m3fn)
    found = layouts(recipe, {LAYER: shape}, torch.bfloat16)[LAYER]
    written = found.tensors(Float8(values, torch.ones(2, 3), recipe.block))
    assert {name: (tuple(t.shape), t.dtype) for name, t in written.items()} == {
        "weight": ((200, 300), torch.float8_e4m3fn),
        "weight_scale_inv": ((2, 3), torch.float32),
    }


NAMES = [f"model.layers.{i}.{x}" for i in (0, 1, 11) for x in ("self_attn.q_proj", "mlp.up_proj")]


def test_the_keys_of_awq() -> None:
    recipe = Recipe("awq", group_size=64, symmetric=False, skip=("*.1.*",))
    assert quantization_config(recipe, NAMES) == {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "version": "gemm",
        "zero_point": True,
        "modules_to_not_convert": ["lm_head", NAMES[2], NAMES[3]],
    }


def test_the_keys_of_gptq() -> None:
    recipe = Recipe("gptq", bits=3, act_order=True, damping=0.05, skip=("*.up_proj",))
    config = quantization_config(recipe, NAMES[:2])
    assert config == {
        "quant_method": "gptq",
        "bits": 3,
        "group_size": 128,
        "damp_percent": 0.05,
        "desc_act": True,
        "static_groups": False,
        "sym": True,
        "true_sequential": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
        "dynamic": {r"-:^model\.layers\.0\.mlp\.up_proj$": {}},
    }
    config = quantization_config(Recipe("gptq", symmetric=False), NAMES)
    assert config["checkpoint_format"] == "gptq_v2" and "dynamic" not in config


def test_the_keys_of_fp8() -> None:
    assert quantization_config(Recipe("fp8", bits=8, group_size=128), NAMES) == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }


def test_the_keys_of_e5m2() -> None:
    recipe = Recipe("fp8", bits=8, group_size=0, fp8_format="e5m2")
    config = quantization_config(recipe, NAMES)
    assert config["fmt"] == "e5m2" and config["weight_block_size"] is None
    written = layouts(recipe, {LAYER: SHAPE}, torch.bfloat16)[LAYER].tensors(
        float8(torch.ones(32, 96), recipe.block, dtype=torch.float8_e5m2)
    )
    assert {name: (tuple(t.shape), t.dtype) for name, t in written.items()} == {
        "weight": ((32, 96), torch.float8_e5m2),
        "weight_scale": ((1,), torch.float32),
    }


def test_the_keys_of_static_activations() -> None:
    recipe = Recipe("fp8", bits=8, group_size=-1, activation_scheme="static")
    config: Any = quantization_config(recipe, NAMES)
    assert config["format"] == "float-quantized"
    assert config["config_groups"]["group_0"]["input_activations"] == {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False,
    }  # fmt: skip
    found = float8(torch.ones(32, 96), (1, 0), input_absmax=torch.ones(96))
    written = layouts(recipe, {LAYER: SHAPE}, torch.bfloat16)[LAYER].tensors(found)
    assert written["input_scale"].shape == (1,) and written["input_scale"].dtype == torch.bfloat16


def test_the_keys_of_compressed_tensors() -> None:
    recipe = Recipe("smoothquant", bits=8, group_size=-1)
    config: Any = quantization_config(recipe, NAMES)
    assert config["format"] == "int-quantized" and config["ignore"] == ["lm_head"]
    (group,) = config["config_groups"].values()
    assert group["targets"] == ["Linear"]
    assert group["weights"] == {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None,
        "actorder": None, "dynamic": False,
    }  # fmt: skip
    assert group["input_activations"] == {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
    }  # fmt: skip


def test_a_budget_makes_a_group_for_each_number_of_bits() -> None:
    bits = {NAMES[0]: 8, NAMES[1]: 4, NAMES[2]: 8, NAMES[4]: 8}
    recipe = Recipe("gptq", average_bits=5, skip=("*.1.*",)).with_layer_bits(bits)
    config: Any = quantization_config(recipe, NAMES)
    groups = config["config_groups"]
    assert [group["targets"] for group in groups.values()] == [["Linear"], [NAMES[0], NAMES[4]]]
    assert [group["weights"]["num_bits"] for group in groups.values()] == [4, 8]
    assert config["ignore"] == ["lm_head", NAMES[2], NAMES[3]]


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_words_that_are_not_filled(method: str) -> None:
    shapes = {
        LAYER: SHAPE,
        "model.layers.0.mlp.up_proj": LinearShape(96, 36 if method == "awq" else 33),
    }
    recipe = Recipe(method, group_size=32)
    if method == "awq":
        with pytest.raises(ConfigError, match=r"awq cannot store 'model.layers.0.mlp.up_proj'"):
            layouts(recipe, shapes, torch.bfloat16)
    else:
        with pytest.raises(ConfigError, match=r"gptq cannot store .* 33 outputs"):
            layouts(recipe, shapes, torch.bfloat16)


def test_act_order_over_whole_rows_still_has_an_index() -> None:
    recipe = Recipe("gptq", group_size=96, act_order=True)
    q = torch.full((32, 96), 8, dtype=torch.uint8)
    quantised = Quantised(q, Scales(torch.ones(32, 1), None), Grid(4, 96, True))
    written = layouts(recipe, {LAYER: SHAPE}, torch.bfloat16)[LAYER].tensors(quantised)
    assert not written["g_idx"].any()
