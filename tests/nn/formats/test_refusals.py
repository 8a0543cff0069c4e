"""Checkpoints whose quantization_config contradicts their tensors: one line that names both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.paged_model import PagedModel
from helpers.stored_layers import (
    awq_config,
    bnb_config,
    compressed_config,
    fp8_config,
    gptq_config,
)
from helpers.stored_models import save_quantised
from helpers.tiny_models import save_tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvik.errors import ModelError, shown
from kvik.nn.checkpoint import SINGLE

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
DOWN = "model.layers.1.mlp.down_proj"
Q = "model.layers.1.self_attn.q_proj"
FLOAT8 = {"num_bits": 8, "type": "float", "group_size": None, "strategy": "tensor"}
STATE = "weight.quant_state.bitsandbytes__"
NATURAL = torch.arange(96, dtype=torch.int32) // 32

CONFIGS: dict[str, dict[str, Any]] = {
    "awq": awq_config(),
    "gptq": gptq_config(),
    "order": gptq_config(desc_act=True),
    "packed": compressed_config(symmetric=False),
    "packed-order": compressed_config(actorder="group"),
    "int8": compressed_config("int-quantized", num_bits=8, strategy="channel", group_size=None),
    "fp8": compressed_config("float-quantized", **FLOAT8),
    "blocks": fp8_config(weight_block_size=[32, 32]),
    "static": fp8_config(weight_block_size=None, activation_scheme="static"),
    "e5m2": fp8_config(weight_block_size=[32, 32], fmt="e5m2"),
    "bnb": bnb_config(),
    "bnb-fp4": bnb_config(bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=False),
    "bnb-8": bnb_config(8),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("quantised")
    save_tiny(root / "plain", "Llama", **SIZES)
    for name, config in CONFIGS.items():
        save_quantised(root / "plain", root / name, root / "twin", config)
    return {name: root / name for name in (*CONFIGS, "plain")}


def load(
    source: Path, folder: Path, config: dict[str, Any] | None, tensors: dict[str, Tensor | None]
) -> PagedModel:
    """Load with quantization_config and some tensors replaced, or removed if None."""
    folder.mkdir(exist_ok=True)
    found: dict[str, Any] = load_file(source / SINGLE) | tensors
    save_file({n: t for n, t in found.items() if t is not None}, folder / SINGLE)
    written = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | {"quantization_config": config}))
    return PagedModel(folder)


def nan_in(source: Path, name: str, value: float = float("nan")) -> dict[str, Tensor | None]:
    tensor = load_file(source / SINGLE)[name].clone()
    tensor.view(-1)[1 if tensor.numel() > 1 else 0] = value
    return {name: tensor}


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        # another number of bits or another group than the tensors have
        ("gptq", {"bits": 8}, "qweight' must have shape [16, 64]"),
        ("gptq", {"group_size": 16}, "must have shape [4, 8]"),
        ("awq", {"group_size": 16}, "(4 bits in groups of 16)"),
        ("awq", {"group_size": 48}, "groups of 48 do not divide its 64 inputs"),
        ("packed", {"group_0": {"num_bits": 8}}, "weight_packed' must have shape [64, 16]"),
        ("blocks", {"weight_block_size": [16, 32]}, "weight_scale_inv' must have shape [4, 2]"),
        ("e5m2", {"fmt": "e4m3"}, "weight' must be F8_E4M3, not F8_E5M2"),
        ("static", {"activation_scheme": "dynamic"}, "it has an input_scale, and its activations"),
        ("blocks", {"activation_scheme": "static"}, "is stored as weight, weight_scale_inv;"),
        # tensors that the config wants, or does not
        (
            "packed-order",
            {"group_0": {"symmetric": False}},
            "is stored as weight_g_idx, weight_packed, weight_scale, weight_shape;",
        ),
        ("awq", {"quant_method": "gptq"}, "qweight' must have shape [8, 64]"),
        ("awq", {"quant_method": "fp8"}, "it must be weight, weight_scale (fp8)"),
        ("int8", {"ignore": ["lm_head", Q]}, f"layer '{Q}' is stored as weight, weight_scale"),
        ("plain", awq_config(), "is stored as weight;"),
        (
            "int8",
            {"format": "float-quantized", "group_0": {"type": "float"}},
            "weight' must be F8_E4M3, not I8",
        ),
        (
            "fp8",
            {"format": "int-quantized", "group_0": {"type": "int"}},
            "weight' must be I8, not F8_E4M3",
        ),
        (
            "bnb-fp4",
            bnb_config(),
            "is stored as weight, weight.absmax, weight.quant_map, weight.qu",
        ),
        ("bnb-fp4", bnb_config(8), "it must be weight, SCB (bnb-int8)"),
        ("bnb-8", bnb_config(), "is stored as SCB, weight, weight_format; by config.json"),
        ("order", {"desc_act": False}, "g_idx' must count up"),
        ("packed-order", {"group_0": {"actorder": "weight"}}, "weight_g_idx' must count up"),
    ],
)
def test_configs_that_do_not_match_the_tensors_are_refused(
    case: str,
    changes: dict[str, Any],
    message: str,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    config = json.loads(json.dumps(CONFIGS.get(case, {}))) | changes
    for key, value in config.pop("group_0", {}).items():
        config["config_groups"]["group_0"]["weights"][key] = value
    with pytest.raises(ModelError) as caught:
        load(folders[case], tmp_path, config, {})
    text = str(caught.value)
    assert text.startswith("model: ") and message in text
    assert "\n" not in text and len(text) < 330


@pytest.mark.parametrize(
    ("case", "tensor", "value", "message"),
    [
        ("awq", "scales", float("nan"), "holds NaN or infinity"),
        ("gptq", "scales", float("inf"), "holds NaN or infinity"),
        ("packed", "weight_scale", float("-inf"), "holds NaN or infinity"),
        ("int8", "weight_scale", float("nan"), "holds NaN or infinity"),
        ("fp8", "weight_scale", float("nan"), "holds NaN or infinity"),
        ("fp8", "weight_scale", -1.0, "holds negative scales"),
        ("blocks", "weight_scale_inv", float("inf"), "holds NaN or infinity"),
        ("static", "input_scale", float("nan"), "holds NaN or infinity"),
        ("static", "input_scale", 0.0, "must be positive, not 0"),
        ("blocks", "weight", float("nan"), "holds NaN"),
        ("e5m2", "weight", float("inf"), "holds NaN or infinity"),
        ("gptq", "qzeros", 0, "must be 8 everywhere, because sym is true"),
        ("order", "g_idx", 3, "must hold groups from 0 to 2"),
        ("order", "g_idx", -1, "must hold groups from 0 to 2"),
        ("packed-order", "weight_g_idx", 7, "must hold groups from 0 to 2"),
        ("packed", "weight_shape", 95, "must be [64, 96], not [64, 95]"),
        ("bnb-fp4", "weight.absmax", float("nan"), "holds NaN or infinity"),
        ("bnb", "weight.nested_absmax", float("inf"), "holds NaN or infinity"),
        ("bnb", "weight.nested_quant_map", float("nan"), "holds NaN or infinity"),
        ("bnb", "weight.quant_map", float("nan"), "holds NaN or infinity"),
        ("bnb-fp4", "weight.quant_map", 0.0, "must hold the numbers of fp4"),
        ("bnb-fp4", f"{STATE}fp4", 0, "must hold a JSON object"),
        ("bnb-8", "SCB", float("nan"), "holds NaN or infinity"),
        ("bnb-8", "weight_format", 1, "must be 0"),
    ],
)
def test_invalid_values(
    case: str,
    tensor: str,
    value: float,
    message: str,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    name = f"{DOWN}.{tensor}"
    with pytest.raises(ModelError) as caught:
        load(folders[case], tmp_path, CONFIGS[case], nan_in(folders[case], name, value))
    text = str(caught.value)
    assert text.startswith(f"model: tensor {shown(name)} ") and message in text and "\n" not in text


@pytest.mark.parametrize(
    ("case", "tensor", "stored", "message"),
    [
        ("awq", "qzeros", None, "is stored as qweight, scales; by config.json"),
        ("packed", "weight_zero_point", None, "it must be weight_packed, weight_scale, weight_sha"),
        ("gptq", "qweight", torch.zeros(12, 64, dtype=torch.int64), "must be I32, not I64"),
        ("gptq", "scales", torch.zeros(3, 64, dtype=torch.int8), "must be F32, BF16, F16 or F64, "),
        ("gptq", "g_idx", torch.zeros(96), "must be I64 or I32, not F32"),
        ("order", "g_idx", NATURAL.flip(0).clamp(min=1), "must give all 3 groups the same"),
        ("static", "input_scale", torch.ones(64), "must have shape [1] by config.json (static"),
        ("order", "g_idx", NATURAL[:95], "must have shape [96] by config.json, not [95]"),
        ("bnb-fp4", "weight.absmax", None, "is stored as weight, weight.quant_map"),
        ("bnb-8", "SCB", torch.ones(63), "must have shape [64] by config.json, not [63]"),
        ("bnb-fp4", f"{STATE}fp4", torch.zeros(2, 9, dtype=torch.uint8), "must have shape [18]"),
        ("bnb", f"{STATE}nf4", torch.zeros(5000, dtype=torch.uint8), "must have shape [4096]"),
    ],
)
def test_invalid_tensors_are_named(
    case: str,
    tensor: str,
    stored: Tensor | None,
    message: str,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    with pytest.raises(ModelError) as caught:
        load(folders[case], tmp_path, CONFIGS[case], {f"{DOWN}.{tensor}": stored})
    assert message in str(caught.value) and DOWN in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [96, 64]}, "must hold shape [64, 96], not [96, 64]"),
        ({"blocksize": 128}, "must hold blocksize 64, not 128"),
        ({"quant_type": "fp4"}, "must hold quant_type 'nf4', not 'fp4'"),
        ({"nested_blocksize": 64}, "must hold nested_blocksize 256, not 64"),
        ({"nested_offset": None}, "must hold a finite nested_offset, not None"),
        ({"nested_offset": float("inf")}, "must hold a finite nested_offset"),
    ],
)
def test_facts_of_bitsandbytes_that_contradict_the_tensors(
    changes: dict[str, Any], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    name = f"{DOWN}.{STATE}nf4"
    facts = json.loads(bytes(load_file(folders["bnb"] / SINGLE)[name].tolist()))
    state = torch.tensor([*json.dumps(facts | changes).encode()], dtype=torch.uint8)
    with pytest.raises(ModelError) as caught:
        load(folders["bnb"], tmp_path, CONFIGS["bnb"], {name: state})
    assert str(caught.value).startswith(f"model: tensor {shown(name)} {message}")


def test_codes_of_bitsandbytes_in_floats_of_another_size(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    name = f"{DOWN}.weight"
    codes = load_file(folders["bnb"] / SINGLE)[name]
    wide = codes.flatten().view(torch.float32)[:, None]
    same = load(folders["bnb"], tmp_path, CONFIGS["bnb"], {name: wide.clone()}).logits([1, 2])
    assert torch.equal(same, PagedModel(folders["bnb"]).logits([1, 2]))
    with pytest.raises(ModelError, match="must be of 4 bytes an element by its shape, not 2"):
        load(folders["bnb"], tmp_path, CONFIGS["bnb"], {name: wide.half()})
    with pytest.raises(ModelError, match=r"must have shape \[3072, 1\] by config.json \(nf4 in"):
        load(folders["bnb"], tmp_path, CONFIGS["bnb"], {name: codes[:3000].clone()})


def test_parts_of_a_matrix_in_different_orders(folders: dict[str, Path], tmp_path: Path) -> None:
    order = load_file(folders["order"] / SINGLE)[f"{Q}.g_idx"].flip(0)
    with pytest.raises(ModelError, match=r"self_attn\.[qkv]_proj': .* in different orders"):
        load(folders["order"], tmp_path, CONFIGS["order"], {f"{Q}.g_idx": order})


def test_nothing_is_filled_before_the_tensors_are_checked(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def filled(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr("kvik.nn.parts.Rows.put", filled)
    with pytest.raises(ModelError, match="must have shape"):
        load(folders["gptq"], tmp_path, gptq_config(bits=8), {})


def test_tensors_that_are_not_needed_are_ignored(folders: dict[str, Path], tmp_path: Path) -> None:
    """Calibrated scales of activations and of the cache, zero points of symmetric weights, a
    trivial or missing index."""
    extra: dict[str, Tensor | None] = {
        f"{DOWN}.input_scale": torch.ones(1),
        f"{DOWN}.weight_zero_point": torch.zeros(64, 1, dtype=torch.int8),
        "model.layers.1.self_attn.k_scale": torch.ones(1),
        "model.layers.1.self_attn.v_scale": torch.ones(1),
        "model.layers.1.self_attn.k_proj.k_scale": torch.ones(()),
        "model.layers.1.self_attn.v_proj.v_scale": torch.ones(()),
        "model.layers.0.self_attn.kv_scale": torch.ones(1),
        "model.layers.1.self_attn.k_proj.output_scale": torch.ones(1),
    }
    load(folders["int8"], tmp_path, CONFIGS["int8"], extra)
    extra.pop(f"{DOWN}.input_scale")
    extra.pop(f"{DOWN}.weight_zero_point")
    load(folders["fp8"], tmp_path, CONFIGS["fp8"], extra)
    load(folders["gptq"], tmp_path, CONFIGS["gptq"], {f"{DOWN}.g_idx": None})
    unset = {f"{DOWN}.weight_g_idx": torch.full((96,), -1, dtype=torch.int32)}
    load(folders["packed"], tmp_path, CONFIGS["packed"], unset)
    load(folders["gptq"], tmp_path, CONFIGS["gptq"], {f"{DOWN}.g_idx": NATURAL.long()})


def test_scales_of_a_whole_tensor_or_of_rows_in_other_shapes(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    stored = load_file(folders["fp8"] / SINGLE)
    flat = {name: t.reshape(()) for name, t in stored.items() if name.endswith("weight_scale")}
    expected = PagedModel(folders["fp8"]).logits([1, 2, 3])
    found = load(folders["fp8"], tmp_path, CONFIGS["fp8"], {**flat}).logits([1, 2, 3])
    assert torch.equal(found, expected)
    stored = load_file(folders["int8"] / SINGLE)
    flat = {name: t.flatten() for name, t in stored.items() if name.endswith("weight_scale")}
    expected = PagedModel(folders["int8"]).logits([1, 2, 3])
    found = load(folders["int8"], tmp_path, CONFIGS["int8"], {**flat}).logits([1, 2, 3])
    assert torch.equal(found, expected)
