"""Models with experts, latent attention and states, quantised by each method and run by the
engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import tiny_models
from helpers.calibrated import LEFT, calibrated, quiet, random_windows, save_multiplied_out
from helpers.optional_native import NATIVE
from helpers.paged_model import PagedModel
from helpers.tiny_models import greedy_and_scores, save_tiny, tokens
from safetensors.torch import load_file, save_file

from kvik.kernels.torch_ops import TORCH
from kvik.nn.checkpoint import SINGLE
from kvik.quantize.recipe import Recipe
from kvik.quantize.save import Output, quantise_folder
from kvik.quantize.source import open_source

# All inputs are multiples of 32. All experts are active where a different choice of experts, some
# nearly as good in a random model, would matter more than rounding.
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 6, "moe_intermediate_size": 32}
LATENT: dict[str, Any] = {
    **tiny_models.LATENT,
    **{"q_lora_rank": 32, "qk_nope_head_dim": 24, "v_head_dim": 8, "moe_intermediate_size": 32},
    **{"n_routed_experts": 6, "num_experts_per_tok": 6},
}
STATES: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "shared_expert_intermediate_size": 32,
    **EXPERTS,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [1], **EXPERTS},
    "GptOss": {  # rows of gate and up alternate, and floats are transposed
        "head_dim": 16,
        "sliding_window": 9,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "DeepseekV2": {**LATENT, "q_lora_rank": None},
    "DeepseekV3": LATENT,
    "Glm4MoeLite": {**LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "Lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_bias": True},
    "Qwen3_5Moe": STATES,
    "Qwen3Next": STATES,
    "BailingHybrid": {  # matrices of one name are rounded in some layers, and floats in others
        **{key: LATENT[key] for key in LATENT if key not in ("q_lora_rank", "n_routed_experts")},
        **{"head_dim": 16, "num_local_experts": 6, "layer_group_size": 2},
    },
    "Step3p7": {
        **tiny_models.STEP,
        **{"moe_intermediate_size": 32, "share_expert_dim": 32},
        **{"n_routed_experts": 6, "num_experts_per_tok": 6},
        **{"swiglu_limits": [0.0, 7.0, 0.0], "swiglu_limits_shared": [1.0, 1.0, 0.0]},
    },
}
LIKE = ("DeepseekV2", "Glm4MoeLite", "Qwen3Next", "BailingHybrid", "Step3p7")  # another model
RECIPES = {
    recipe.method: recipe
    for recipe in (
        Recipe("rtn", 8, 32),
        Recipe("gptq", 8, 32, act_order=True),
        Recipe("awq", 8, 32),
        Recipe("smoothquant", 8, -1),
        Recipe("fp8", 8, -1, activation_scheme="static"),
    )
}
KERNELS = ["torch", *(["native"] if NATIVE else [])]


def centre_gains(folder: Path) -> None:
    """Subtract 1 from the gains of norms that add 1, except after delta nets. Doubled gains make a
    random model of three layers so sensitive that no rounding is small."""
    tensors = load_file(folder / SINGLE)
    for name, values in tensors.items():
        if name.endswith("norm.weight") and ".linear_attn." not in name:
            tensors[name] = values - 1.0
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a folder for each model."""
    folders = {}
    for family, options in MODELS.items():
        folders[family] = tmp_path_factory.mktemp(family)
        save_tiny(folders[family], family, hidden_size=64, intermediate_size=96, **options)
        if options is STATES or family == "Step3p7":
            centre_gains(folders[family])
    return folders


@pytest.mark.each(1)  # a format of a matrix does not depend on the family
@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.full if name in LIKE else ()) for name in MODELS],
)
@pytest.mark.parametrize("method", RECIPES)
def test_a_quantised_model_is_read_and_generates_the_same(
    family: str, method: str, plain: dict[str, Path], tmp_path: Path
) -> None:
    recipe, windows, folder = RECIPES[method], random_windows(16, 32), tmp_path / "q"
    source = open_source(plain[family])
    saved = quantise_folder(source, recipe, windows, Output(folder, source), quiet)
    assert saved.unreached == 0
    bits = {layer.name.rpartition(".")[2]: layer.bits for layer in saved.layers}
    assert {name for name in bits if bits[name] is None} == LEFT.get(family, set())
    assert set(bits.values()) - {None} == {8}
    _, expected = greedy_and_scores(plain[family], dtype="float32")
    for kernels in KERNELS:
        found, scores = greedy_and_scores(folder, dtype="float32", kernels=kernels)
        assert len(found) == 12
        off = (scores - expected).abs().mean()
        assert 0.0 < float(off) < (0.7 if method == "fp8" else 0.2)


@pytest.mark.full
@pytest.mark.each(1)
@pytest.mark.parametrize("family", [family for family in MODELS if family != "GptOss"])
@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
def test_the_weights_are_those_of_the_quantiser(
    family: str, method: str, plain: dict[str, Path], tmp_path: Path
) -> None:
    recipe, windows, folder = RECIPES[method], random_windows(16, 32), tmp_path / "q"
    source = open_source(plain[family])
    quantise_folder(source, recipe, windows, Output(folder, source), quiet)
    results = calibrated(plain[family], recipe, windows, tmp_path / "work")
    save_multiplied_out(plain[family], results, tmp_path / "twin")
    ids = tokens(24)
    expected = PagedModel(tmp_path / "twin", ops=TORCH).logits(ids)
    found = PagedModel(folder, ops=TORCH).logits(ids)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
