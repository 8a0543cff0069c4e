"""Known architectures, and the variants of their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.configs import PUBLIC
from helpers.model_cases import CASES
from helpers.paged_model import PagedModel
from helpers.tiny_models import (
    COMPRESSED,
    DELTA,
    IMAGE_PREFIXES,
    IN_BLOCKS,
    INDEXED,
    LATENT,
    MINIMAX,
    STEP,
    reference_logits,
    save_tiny,
    save_tiny_with_images,
    tiny_model,
    tokens,
)
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, MiMoV2FlashConfig

from kvik.errors import START_LOG
from kvik.models.model_spec import ModelSpec, read_model_spec
from kvik.models.registry import ARCHITECTURES
from kvik.nn.checkpoint import SINGLE


@pytest.mark.parametrize(("family", "prefix"), [("GPT2", "transformer."), ("Llama", "model.")])
def test_checkpoints_of_the_bare_trunk(family: str, prefix: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, family, tie_word_embeddings=True)
    stored = load_file(tmp_path / SINGLE)
    assert all(name.startswith(prefix) for name in stored)
    save_file({n.removeprefix(prefix): t for n, t in stored.items()}, tmp_path / SINGLE)
    ids = tokens(12)
    expected = reference_logits(reference, ids)
    torch.testing.assert_close(PagedModel(tmp_path).logits(ids), expected, atol=1e-4, rtol=0)


def test_an_olmo_hybrid_as_transformers_writes_it(tmp_path: Path) -> None:
    reference = tiny_model("OlmoHybrid", num_hidden_layers=4, **DELTA)
    reference.save_pretrained(tmp_path)
    assert any("attention_layer_norm" in name for name in load_file(tmp_path / SINGLE))
    ids = tokens(12)
    expected = reference_logits(reference, ids)
    torch.testing.assert_close(PagedModel(tmp_path).logits(ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        (
            "laguna",
            {
                "mlp.experts.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
                "mlp.shared_expert.": "mlp.shared_experts.",
            },
        ),
        (
            "kolibri1",
            {
                "moe.router.expert_bias": "mlp.gate.e_score_correction_bias",
                "post_attn_norm": "post_self_attn_layernorm",
                "post_ffn_norm": "post_mlp_layernorm",
            },
        ),
        ("mimo-v2-flash", {"attention_sink_bias": "sinks"}),
        ("flint", {"softmax_offset": "sinks"}),
    ],
)
def test_names_of_published_checkpoints_and_of_modules(
    name: str, published: dict[str, str], tmp_path: Path
) -> None:
    family, options = CASES[name]
    reference, ids = save_tiny(tmp_path, family, **options), tokens(12)
    expected = reference_logits(reference, ids)
    stored = load_file(tmp_path / SINGLE)
    for old, new in published.items():
        assert any(old in name for name in stored)
        stored = {name.replace(old, new): tensor for name, tensor in stored.items()}
    torch.testing.assert_close(PagedModel(tmp_path).logits(ids), expected, atol=1e-4, rtol=0)
    save_file(stored, tmp_path / SINGLE)
    torch.testing.assert_close(PagedModel(tmp_path).logits(ids), expected, atol=1e-4, rtol=0)


def test_keys_of_published_files_and_of_transformers() -> None:
    """In the former, lists of 0 and 1 and keys with a prefix describe the layers."""
    published = PUBLIC["mimo-v2-flash"]
    written = MiMoV2FlashConfig(**published).to_dict()
    for key in written.keys() & {"hybrid_layer_pattern", "moe_layer_freq", "sliding_window_size"}:
        del written[key]
    for key in [key for key in written if key.startswith("swa_") or key == "rope_theta"]:
        del written[key]
    spec, other = ModelSpec.from_config(published), ModelSpec.from_config(written)
    assert spec.layers == other.layers and spec.num_parameters == other.num_parameters


def test_masks_in_old_gpt2_checkpoints_are_ignored(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "GPT2")
    stored = load_file(tmp_path / SINGLE)
    for layer in range(3):
        scope = f"transformer.h.{layer}.attn"
        stored[f"{scope}.bias"] = torch.ones(1, 1, 128, 128)
        stored[f"{scope}.masked_bias"] = torch.tensor(-1e4)
    save_file(stored, tmp_path / SINGLE)
    ids = tokens(12)
    expected = reference_logits(reference, ids)
    torch.testing.assert_close(PagedModel(tmp_path).logits(ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "options"),
    [("HYV4", INDEXED), ("MiniMaxM3VL", IN_BLOCKS), ("DeepseekV4", COMPRESSED)],
)
def test_names_as_transformers_writes_them(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    reference, ids = tiny_model(family, **options), tokens(30)
    reference.save_pretrained(tmp_path)
    expected = reference_logits(reference, ids)
    torch.testing.assert_close(PagedModel(tmp_path).logits(ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "prefix"),
    [
        *((family, prefix) for family in ("Gemma3", "Ministral3") for prefix in IMAGE_PREFIXES),
        ("Qwen3_5", "model.language_model"),
        ("Gemma3n", "model.language_model"),
        ("CohereCompass", "model.language_model"),
        ("Llama4", "language_model.model"),
    ],
)
def test_the_text_model_of_one_that_reads_images(family: str, prefix: str, tmp_path: Path) -> None:
    """The image encoder is not loaded, nor are draft layers."""
    reference, ids = save_tiny_with_images(tmp_path, prefix, family), tokens(30)
    expected = reference_logits(reference, ids)
    torch.testing.assert_close(PagedModel(tmp_path).logits(ids), expected, atol=1e-4, rtol=0)


def test_step_3_5_has_the_files_of_the_text_model_of_3_7(tmp_path: Path) -> None:
    reference, ids = save_tiny(tmp_path, "Step3p7", **STEP), tokens(12)
    config = json.loads((tmp_path / "config.json").read_text())["text_config"]
    config["architectures"] = ["Step3p5ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = reference_logits(reference, ids)
    torch.testing.assert_close(PagedModel(tmp_path).logits(ids), expected, atol=1e-4, rtol=0)


def test_a_head_of_its_own_if_only_the_text_model_is_said_to_be_tied(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "Qwen3VL", head_dim=16)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    config["text_config"]["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = tokens(12)
    expected = reference_logits(reference, ids)
    torch.testing.assert_close(PagedModel(tmp_path).logits(ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("family", "architecture", "scope"),
    [
        ("Qwen2", "MiMoForCausalLM", "model.mtp_layers.0"),
        ("Ernie4_5_Moe", "Ernie4_5_MoeForCausalLM", "model.mtp_block.0"),
        ("ExaoneMoe", "ExaoneMoeForCausalLM", "mtp.0"),
    ],
)
def test_layers_that_predict_further_tokens_are_ignored(
    family: str,
    architecture: str,
    scope: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a note."""
    sizes = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}
    reference = save_tiny(tmp_path, family, **sizes if family != "Qwen2" else {})
    stored = load_file(tmp_path / SINGLE)
    stored[f"{scope}.x.weight"] = torch.ones(3)
    save_file(stored, tmp_path / SINGLE, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    ids = tokens(30)
    expected = reference_logits(reference, ids)
    with caplog.at_level("INFO", logger=START_LOG):
        model = PagedModel(tmp_path)
    torch.testing.assert_close(model.logits(ids), expected, atol=1e-4, rtol=0)
    assert "1 tensors are not read" in caplog.text and scope.rpartition(".")[0] in caplog.text


@pytest.mark.parametrize("method", [None, "none"])
def test_experts_without_a_correction(method: str | None, tmp_path: Path) -> None:
    """As in published checkpoints of A.X K1."""
    reference, ids = save_tiny(tmp_path, "AXK1", **LATENT), tokens(30)
    for name, buffer in reference.named_buffers():
        if name.endswith("correction_bias"):
            buffer.zero_()
    stored = load_file(tmp_path / SINGLE)
    kept = {name: t for name, t in stored.items() if not name.endswith("correction_bias")}
    assert len(kept) == len(stored) - 2
    save_file(kept, tmp_path / SINGLE, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"topk_method": method}))
    expected = reference_logits(reference, ids)
    torch.testing.assert_close(PagedModel(tmp_path).logits(ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"])
def test_published_files_of_minimax(name: str, tmp_path: Path) -> None:
    """They have other keys, and none of what transformers computes from decays."""
    alphas = {"full_attn": 1.5, "linear_attn": 2.5, "mlp": 3.5}
    factors = {f"{part}_alpha_factor": alpha for part, alpha in alphas.items()}
    reference, ids = save_tiny(tmp_path, "MiniMax", **MINIMAX, **factors), tokens(30)
    stored = load_file(tmp_path / SINGLE)
    kept = {key: t for key, t in stored.items() if not key.endswith(("_decay", "slope_rate"))}
    assert len(kept) == len(stored) - 2 * 4
    save_file(kept, tmp_path / SINGLE, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "rope_parameters", *factors):
        del config[key]
    config |= {"architectures": [name], "attn_type_list": [0, 1, 0], "postnorm": True}
    config |= {"rope_theta": 1e6, "rotary_dim": 16, "layernorm_mlp_alpha": 3.5}
    config |= {
        f"layernorm_{part}_attention_alpha": alphas[f"{part}_attn"] for part in ("full", "linear")
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = reference_logits(reference, ids)
    torch.testing.assert_close(PagedModel(tmp_path).logits(ids), expected, atol=1e-4, rtol=0)
    (tmp_path / "config.json").write_text(json.dumps(config | {"rotary_dim": 8}))
    assert [rope.fraction for rope in read_model_spec(tmp_path).ropes] == [0.5]


def test_a_tied_model_ignores_a_head_in_the_file(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama", tie_word_embeddings=True)
    ids = tokens(12)
    expected = PagedModel(tmp_path).logits(ids)
    stored = load_file(tmp_path / SINGLE)
    save_file({**stored, "lm_head.weight": torch.zeros(96, 32)}, tmp_path / SINGLE)
    assert torch.equal(PagedModel(tmp_path).logits(ids), expected)


# Values that kvik needs or that the defaults of transformers' classes contradict.
NEEDED: dict[str, dict[str, Any]] = {
    "Glm4vMoeForConditionalGeneration": {"head_dim": 128},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "BambaForCausalLM": {"attn_layer_indices": [9]},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["attention"] * 32},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Dots1ForCausalLM": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "Gemma3TextModel": {"use_bidirectional_attention": True},
    "ElectraModel": {"embedding_size": 256},
}
# These need another number of labels, are unknown to transformers, are no text models, or need
# rotary positions or null.
OTHERS = (
    "SequenceClassification",
    "MiMo",
    "Mistral3",
    "Compass",
    "NewModel",
    "Text01",
    "MiniMaxM1",
)


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name for name in ARCHITECTURES if not any(map(name.count, OTHERS))]
)
def test_absent_keys_have_the_defaults_of_transformers(name: str) -> None:
    arch = ARCHITECTURES[name]
    config = json.loads(CONFIG_MAPPING[arch.model_type]().to_json_string(use_diff=False))
    config["architectures"] = [name]
    text = config.get("text_config") or config
    text |= {"bos_token_id": None, "eos_token_id": None, "layer_types": None}
    for key in {"num_experts", "n_routed_experts", "num_local_experts"} & set(text):
        text[key] = min(text[key] or 0, 32)  # all are declared, by their names
    text |= NEEDED.get(name, {})
    expected = ModelSpec.from_config(config)
    for key in {"num_key_value_heads", "rms_norm_eps", "rope_parameters"} & set(text):
        value = text.pop(key)
        assert ModelSpec.from_config(config) == expected, key
        text[key] = value


def test_files_of_older_transformers(tmp_path: Path) -> None:
    """`torch_dtype`, `rope_theta` and `rope_scaling` in place of the newer keys."""
    scaling = {"rope_type": "linear", "factor": 2.0}
    parameters = {**scaling, "rope_theta": 500.0}
    reference = save_tiny(tmp_path, "Llama", rope_parameters=parameters)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in config and "dtype" in config
    del config["rope_parameters"], config["dtype"]
    old = {"rope_theta": 500.0, "rope_scaling": scaling, "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config | old))
    ids = tokens(30)
    expected = reference_logits(reference, ids)
    torch.testing.assert_close(PagedModel(tmp_path).logits(ids), expected, atol=1e-4, rtol=0)
