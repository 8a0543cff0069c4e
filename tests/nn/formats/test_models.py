"""Whole checkpoints in each layout give the same logits and tokens as their dequantised twins."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import stored_models
from helpers.paged_model import Packing, PagedModel
from helpers.stored_layers import (
    NVFP4,
    awq_config,
    compressed_config,
    fp8_config,
    gptq_config,
    modelopt_config,
)
from helpers.stored_models import STATIC, save_quantised
from helpers.tiny_models import COMPRESSED, STEP, save_tiny, tokens
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvik.errors import ModelError
from kvik.kernels.fp8 import round_activations
from kvik.kernels.reference.ops import REFERENCE
from kvik.kernels.torch_ops import TORCH
from kvik.kernels.weights import Matrix
from kvik.nn.checkpoint import INDEX, SINGLE
from kvik.spec.weight_kind import WeightKind

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
FP8 = {"num_bits": 8, "type": "float", "group_size": None}
INT8 = {"num_bits": 8, "group_size": None}
Q = "model.layers.1.self_attn.q_proj"

CONFIGS: dict[str, dict[str, Any]] = stored_models.CONFIGS | {
    "awq-rows": awq_config(group_size=-1),
    "awq-some": awq_config(modules_to_not_convert=["layers.1.self_attn.q_proj", "layers.2.mlp"]),
    "gptq-v2": gptq_config(sym=False, checkpoint_format="gptq_v2"),
    "gptq-asym": gptq_config(sym=False),
    "gptq-3": gptq_config(bits=3),
    "gptq-8-rows": gptq_config(bits=8, group_size=-1),
    "gptq-8-asym": gptq_config(bits=8, sym=False),
    "gptq-8-order": gptq_config(bits=8, desc_act=True),
    "gptq-head": gptq_config(lm_head=True),
    "gptq-mixed": gptq_config(
        dynamic={r"+:.*down_proj": {"bits": 8}, r"-:.*layers\.0\..*k_proj": {}}
    ),
    "packed": compressed_config(),
    "packed-asym": compressed_config(symmetric=False),
    "packed-head": compressed_config(ignore=()),
    "packed-some": compressed_config(ignore=("re:.*lm_head", Q)),
    "packed-w4a8": compressed_config(activations=True),
    "int8-asym": compressed_config("int-quantized", **INT8, strategy="channel", symmetric=False),
    "int8-groups": compressed_config("int-quantized", num_bits=8),
    "int8-one": compressed_config("int-quantized", **INT8, strategy="tensor"),
    "mxfp4": compressed_config("mxfp4-pack-quantized", type="float"),
    "nvfp4": compressed_config("nvfp4-pack-quantized", **NVFP4, activations=True),
    "nvfp4-modelopt": modelopt_config(ignore=["lm_head", "model.layers.1.mlp*", Q]),
    "fp8-modelopt": modelopt_config(quant_algo="FP8", ignore=["lm_head"]),
    "fp8-one": compressed_config("float-quantized", **FP8, strategy="tensor", activations=True),
    "fp8-rows": compressed_config("naive-quantized", **FP8, strategy="channel"),
    "fp8-odd-blocks": fp8_config(weight_block_size=[20, 36]),
    "fp8-cut-blocks": fp8_config(),
    "fp8-e5m2": fp8_config(fmt="e5m2"),
    "fp8-old": fp8_config(weight_block_size=None, ignored_layers=["lm_head", Q]),
}


MULTIPLIED_OUT = ("gptq-8-asym", "int8-asym", "fp8-odd-blocks", "fp8-e5m2")
SMALL = (torch.int32, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save_tiny(folder, "Llama", **SIZES)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("case", CONFIGS)
def test_logits_are_those_of_the_twin(
    case: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to rounding in fp32, with unrounded activations; and the same greedy tokens."""
    monkeypatch.setattr("kvik.kernels.reference.ops.round_activations", lambda x, *_: x.float())
    save_quantised(plain, tmp_path / "q", tmp_path / "twin", CONFIGS[case])
    ids = tokens(24)
    twin = PagedModel(tmp_path / "twin")
    expected = twin.logits(ids)
    assert float((PagedModel(plain).logits(ids) - expected).norm() / expected.norm()) > 1e-3
    for ops in (REFERENCE, TORCH):
        model = PagedModel(tmp_path / "q", ops=ops)
        found = model.logits(ids)
        assert float((found - expected).norm() / expected.norm()) < 2e-6
        assert model.greedy(ids[:6], 8, sequence=1) == twin.greedy(ids[:6], 8, sequence=1)
        twin = PagedModel(tmp_path / "twin")
    shapes = load_file(tmp_path / "q" / SINGLE)
    assert any(tensor.dtype in SMALL for tensor in shapes.values())


def test_experts_of_a_layer_in_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their values and their scales, as in published files of Step in FP8."""
    monkeypatch.setattr("kvik.kernels.reference.ops.round_activations", lambda x, *_: x.float())
    plain, path = tmp_path / "plain", tmp_path / "q" / SINGLE
    save_tiny(plain, "Step3p7", **STEP | {"hidden_size": 64, "moe_intermediate_size": 32})
    stored = load_file(plain / SINGLE)
    for name in [name for name in stored if ".moe." in name and stored[name].dim() == 3]:
        layer = name.removesuffix(".weight")
        for expert, rows in enumerate(stored.pop(name)):
            stored[f"{layer}.{expert}.weight"] = rows.clone()
    text = {name: tensor for name, tensor in stored.items() if not name.startswith("vi")}
    save_file(text, plain / SINGLE)
    left = ["lm_head", "moe.gate", "g_proj"]
    config = fp8_config(weight_block_size=[32, 32], modules_to_not_convert=left)
    save_quantised(plain, tmp_path / "q", tmp_path / "twin", config)
    apart, parts = load_file(path), dict[str, list[Tensor]]()
    for expert in range(STEP["n_routed_experts"]):
        for name in [name for name in apart if f"_proj.{expert}." in name]:
            parts.setdefault(name.replace(f".{expert}.w", ".w"), []).append(apart.pop(name))
    assert any(name.endswith("moe.up_proj.weight_scale_inv") for name in parts)
    save_file(apart | {name: torch.stack(each) for name, each in parts.items()}, path)
    ids = tokens(24)
    expected = PagedModel(tmp_path / "twin").logits(ids)
    torch.testing.assert_close(PagedModel(tmp_path / "q").logits(ids), expected)


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_files_of_deepseek_v4(
    experts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As published: E8M0 scales, experts in four bits, and layers in floats that no field names."""
    monkeypatch.setattr("kvik.kernels.reference.ops.round_activations", lambda x, *_: x.float())
    widths = {"hidden_size": 64, "q_lora_rank": 32, "o_lora_rank": 16, "moe_intermediate_size": 32}
    widths |= {"intermediate_size": 32}
    save_tiny(tmp_path / "plain", "DeepseekV4", **COMPRESSED | widths)
    config = fp8_config(weight_block_size=[32, 32], scale_fmt="ue8m0", expert_dtype=experts)
    left = {"modules_to_not_convert": ["head", "gate", "compressor", "weights_proj"]}
    save_quantised(tmp_path / "plain", tmp_path / "q", tmp_path / "twin", config | left)
    path = tmp_path / "q" / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"expert_dtype": experts, "quantization_config": config}))
    stored = load_file(tmp_path / "q" / SINGLE)
    expert = "layers.1.ffn.experts.2.w1."
    dtypes = {"fp4": torch.int8, "fp8": torch.float8_e4m3fn}
    assert stored[f"{expert}weight"].dtype == dtypes[experts]
    assert stored["layers.0.attn.wq_a.scale"].dtype == torch.float8_e8m0fnu
    ids = tokens(24)
    expected = PagedModel(tmp_path / "twin").logits(ids)
    found = PagedModel(tmp_path / "q").logits(ids)
    assert float((found - expected).norm() / expected.norm()) < 2e-6
    stored[f"{expert}scale"] = stored[f"{expert}scale"].float()
    save_file(stored, tmp_path / "q" / SINGLE)
    assert torch.equal(PagedModel(tmp_path / "q").logits(ids), found)
    stored[f"{expert}scale"] = stored[f"{expert}scale"] * torch.nan
    save_file(stored, tmp_path / "q" / SINGLE)
    with pytest.raises(ModelError, match=f"{expert}scale.* holds NaN"):
        PagedModel(tmp_path / "q")


def test_older_files_of_modelopt_tell_the_format_apart(plain: Path, tmp_path: Path) -> None:
    config = CONFIGS["nvfp4-modelopt"]
    save_quantised(plain, tmp_path / "q", tmp_path / "twin", config)
    expected = PagedModel(tmp_path / "q").logits(tokens(24))
    path = tmp_path / "q" / "config.json"
    values = json.loads(path.read_text())
    del values["quantization_config"]
    path.write_text(json.dumps(values))
    stored = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": config["ignore"]}
    older = {"producer": {"name": "modelopt"}, "quantization": stored}
    path.with_name("hf_quant_config.json").write_text(json.dumps(older))
    assert torch.equal(PagedModel(tmp_path / "q").logits(tokens(24)), expected)


@pytest.mark.parametrize("case", CONFIGS)
def test_the_plan_counts_the_bytes_that_are_loaded(case: str, plain: Path, tmp_path: Path) -> None:
    save_quantised(plain, tmp_path / "q", tmp_path / "twin", CONFIGS[case])
    packing = Packing()
    model = PagedModel(tmp_path / "q", ops=packing.ops, dtype=torch.bfloat16)
    loaded = packing.loaded_bytes(model.spec.num_parameters)
    assert loaded == model.spec.weight_bytes("bfloat16", "none")
    assert loaded < 2 * model.spec.num_parameters or case in MULTIPLIED_OUT


def test_the_rest_may_be_quantised_at_load(plain: Path, tmp_path: Path) -> None:
    save_quantised(plain, tmp_path / "q", tmp_path / "twin", CONFIGS["gptq"])
    model = PagedModel(tmp_path / "q", quantization="int8").model
    assert model.lm_head.matrix.data.kind.codes == "int8"
    assert model.layers[0].mlp.down.matrix.spec.kind.codes == "int4"


def test_activations_are_rounded_by_the_config(plain: Path, tmp_path: Path) -> None:
    rows = {"num_bits": 8, "group_size": None, "strategy": "channel"}
    for activations in (False, True):
        config = compressed_config("int-quantized", activations=activations, **rows)
        save_quantised(plain, tmp_path / "q", tmp_path / "twin", config)
        down = PagedModel(tmp_path / "q").model.layers[0].mlp.down.matrix.data
        assert (down.kind.activations != "float") is activations


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("fp8-rows", WeightKind("fp8")),
        ("fp8-one", WeightKind("fp8", activations="token")),
        ("fp8-blocks", WeightKind("fp8", 32, activations="group")),
        ("fp8-static", WeightKind("fp8", activations="static")),
    ],
)
def test_activations_of_eight_bit_floats(
    case: str, kind: WeightKind, plain: Path, tmp_path: Path
) -> None:
    """Inputs are rounded as the checkpoint states, like those given to the twin's matrices."""
    save_quantised(plain, tmp_path / "q", tmp_path / "twin", CONFIGS[case])
    model = PagedModel(tmp_path / "q", ops=TORCH)
    assert model.model.layers[1].mlp.down.matrix.spec.kind == kind

    def rounding(x: Tensor, matrix: Matrix, residual: Tensor | None) -> Tensor:
        if matrix.spec.rows != model.spec.vocab_size and kind.activations != "float":
            scale = STATIC if kind.activations == "static" else None
            x = round_activations(x, kind.group, scale)
        return TORCH.linear(x, matrix, residual)

    ids = tokens(24)
    expected = PagedModel(tmp_path / "twin", ops=replace(TORCH, linear=rounding)).logits(ids)
    found, floats = model.logits(ids), PagedModel(tmp_path / "twin", ops=TORCH).logits(ids)
    off = float((found - expected).norm() / expected.norm())
    rounded = float((floats - expected).norm() / expected.norm())
    # A sum in another order may be rounded differently.
    assert off < (2e-6 if kind.activations == "float" else rounded / 4)
    assert (rounded == 0) == (kind.activations == "float")


def test_layers_of_one_matrix_share_the_largest_scale(plain: Path, tmp_path: Path) -> None:
    save_quantised(plain, tmp_path / "q", tmp_path / "twin", CONFIGS["fp8-static"])
    tensors = load_file(tmp_path / "q" / SINGLE)
    for name, scale in (("q", 0.02), ("k", 0.5), ("v", 0.01)):
        tensors[f"model.layers.1.self_attn.{name}_proj.input_scale"] = torch.tensor(scale)
    save_file(tensors, tmp_path / "q" / SINGLE)
    (qkv,) = PagedModel(tmp_path / "q").model.layers[1].attention.qkv.linears
    assert qkv.matrix.data.input_scale.tolist() == [0.5]


def test_a_tied_embedding_is_not_quantised(tmp_path: Path) -> None:
    """Even if the config says that every linear layer is quantised."""
    save_tiny(tmp_path / "plain", "Qwen2", **SIZES, tie_word_embeddings=True)
    config = compressed_config(ignore=())
    save_quantised(tmp_path / "plain", tmp_path / "q", tmp_path / "twin", config)
    ids = tokens(12)
    expected = PagedModel(tmp_path / "twin").logits(ids)
    found = PagedModel(tmp_path / "q").logits(ids)
    assert float((found - expected).norm() / expected.norm()) < 2e-6


def test_layers_in_shards_and_sorted_by_type(plain: Path, tmp_path: Path) -> None:
    """As in large files: parts of a layer are read together, and may be in two files."""
    save_quantised(plain, tmp_path / "q", tmp_path / "twin", CONFIGS["gptq"])
    expected = PagedModel(tmp_path / "q").logits([1, 2, 3])
    tensors = load_file(tmp_path / "q" / SINGLE)
    parts = [dict(list(tensors.items())[i::2]) for i in range(2)]
    index = {}
    for i, part in enumerate(parts):
        save_file(part, tmp_path / "q" / f"{i}.safetensors")
        index |= dict.fromkeys(part, f"{i}.safetensors")
    (tmp_path / "q" / SINGLE).unlink()
    (tmp_path / "q" / INDEX).write_text(json.dumps({"weight_map": index}))
    assert torch.equal(PagedModel(tmp_path / "q").logits([1, 2, 3]), expected)
