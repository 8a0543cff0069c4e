"""Model facts: exact sizes of public models, windows and rope as transformers reads them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.configs import LLAMA3_SCALING, PUBLIC, small, small_qwen
from helpers.public_configs import config
from helpers.windows import as_window
from safetensors.torch import save_file

from kvik.errors import ModelError
from kvik.models.model_spec import ModelSpec, read_model_spec
from kvik.models.registry import DECLARED
from kvik.spec.kv import group_layers
from kvik.spec.rope import RopeSpec
from kvik.spec.visible_keys import Window


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-2-70b", 68_976_648_192),
        ("SmolLM3-3B", 3_075_098_624),
        ("GLM-4-9B-0414", 9_400_279_040),
        ("OLMo-3-7B", 7_298_011_136),
        ("EXAONE-4.0-1.2B", 1_279_391_488),
        ("Phi-4-mini", 3_836_021_760),
        ("Gemma-2B", 2_506_172_416),
        ("Gemma-2-2B", 2_614_341_888),
        ("Gemma-3-1B", 999_885_952),
        ("gemma-4-e2b", 4_628_569_379),
        ("gemma-4-26b-a4b", 25_233_141_790),
        ("gemma-4-31b", 30_697_345_340),
        ("Granite-3.1-2B", 2_533_531_648),
        ("falcon-7b", 6_921_720_704),
        ("falcon-40b", 41_303_293_952),
        ("LFM2-1.2B", 1_170_340_608),
        ("Qwen3.5-9B", 8_953_803_264),
        ("Llama-4-Scout", 107_769_861_120),
        ("Llama-4-Maverick", 400_711_848_960),
        ("Granite-4.0-micro", 3_402_836_480),
        ("Granite-4.0-350m", 352_379_904),
        ("Command-R-plus", 103_810_674_688),
        ("StableLM-2-12B", 12_143_185_920),
        ("OPT-350M", 331_196_416),
        ("Phi-3.5-MoE", 41_873_153_344),
        # The next ones as counted by transformers in models of these sizes.
        ("Gemma-3n-E2B", 4_435_182_688),
        ("Apertus-8B", 8_053_338_176),
        ("OLMo-7B", 6_888_095_744),
        ("OLMo-Hybrid-7B", 7_430_870_688),
        ("kimi-linear-48b-a3b", 49_122_681_728),
        ("MiniMax-M3", 426_174_572_928),
        ("Hy4-preview", 58_278_201_581),
        ("GLM-5.3-Flash", 313_326_828_862),
        ("DeepSeek-V4-Flash", 284_328_206_295),
        ("Ling-3.0-Flash", 124_414_211_552),
        ("MiniMax-Text-01", 456_089_655_296),
        ("Zamba2-2.7B", 2_662_214_560),
        ("LongCat-Flash", 560_664_980_480),
        ("Compass, usual sizes", 34_980_831_232),
        ("Step-3.7-Flash", 196_955_466_816),
        ("glm-5", 743_911_218_432),
        ("Laguna-XS.2", 33_442_617_088),
        ("Kolibri-1", 78_103_074_560),
        ("mimo-v2-flash", 308_778_780_864),
        ("bitnet-b1.58-2b-4t", 2_412_820_480),
        ("GPT", 116_534_784),
        ("BioGPT", 346_763_264),
        ("bloom-560m", 559_214_592),
        ("mpt-7b", 6_649_286_656),
        ("falcon-rw-1b", 1_311_625_216),
        ("dbrx", 131_596_523_520),
        ("Ettin-Decoder-150M", 149_655_232),
        ("Flint", 39_785_287_456),
        ("FlexOlmo-7x7B", 33_270_665_216),
        ("VaultGemma-1B", 1_038_741_120),
        ("Falcon-H1-0.5B", 521_411_104),
        ("Bamba-9B", 9_780_235_392),
        ("K-EXAONE-236B-A23B", 236_571_156_352),
        ("HyperCLOVAX-Think-14B", 14_748_112_896),
        ("MiniCPM3-4B", 4_073_875_968),
        ("A.X-K1", 518_983_063_808),
        ("A.X-K2-Light", 20_314_500_992),
        ("Hunyuan-A13B", 80_393_183_232),
        ("Jais-2-8B", 8_090_401_280),
        ("Qwen3-Next-80B-A3B", 79_674_391_296),
        ("Qwen3.6-35B-A3B", 34_660_610_688),
        ("MiniMax-M2", 228_689_764_864),
        ("GLM-4.7-Flash", 29_943_393_920),
        ("Command-R7B", 8_028_033_024),
        ("LFM2-8B-A1B", 8_339_930_560),
        ("ERNIE-4.5-0.3B", 360_748_032),
        ("ERNIE-4.5-21B-A3B", 21_825_437_888),
        ("Minitron-4B", 4_190_509_056),
        ("AFM-4.5B", 4_619_184_640),
        ("GLM-4-9B-chat", 9_399_951_360),
        ("Qwen2.5-VL-3B", 3_085_938_688),
        ("nemotron-3-nano-30b-a3b", 31_577_940_288),
        ("granite-4.0-h-tiny", 6_939_037_248),
        ("granite-4.0-h-small", 32_207_337_984),
        ("granite-4.0-h-micro", 3_191_396_096),
        ("Mamba-Codestral-7B", 7_285_403_648),
        ("mamba-130m", 129_135_360),
        ("falcon-mamba-7b", 7_272_665_088),
        ("Jamba-v0.1", 51_570_323_328),
        ("Persimmon-8B", 9_397_175_296),
        ("StarCoder-15B", 15_517_456_384),
        ("CodeGen-350M", 356_712_448),
        ("GPT-Neo-125M", 125_198_592),
        ("gpt-j-6b", 6_050_882_784),
    ],
)
def test_parameter_counts_of_public_models(name: str, count: int) -> None:
    spec = ModelSpec.from_config(PUBLIC[name])
    assert spec.num_parameters == count
    floats = spec.in_floats
    assert floats.weight_bytes("bfloat16", "none") == 2 * count
    assert floats.weight_bytes("float32", "none") == 4 * count


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("gemma-4-e2b", (12 * 256 + 3 * 512) * 2 * 2),
        ("gemma-4-26b-a4b", (25 * 8 * 256 + 5 * 2 * 512) * 2 * 2),
        ("gemma-4-31b", (50 * 16 * 256 + 10 * 4 * 512) * 2 * 2),
        ("LFM2-1.2B", 6 * 2 * 8 * 64 * 2),
        ("Qwen3.5-9B", 8 * 2 * 4 * 256 * 2),
        ("Qwen3-Next-80B-A3B", 12 * 2 * 2 * 256 * 2),
        ("Qwen3.6-35B-A3B", 10 * 2 * 2 * 256 * 2),
        ("MiniMax-M2", 62 * 2 * 8 * 128 * 2),
        ("GLM-4.7-Flash", 47 * (512 + 64) * 2),
        # keys; inputs of entries; and entries with their keys, in the place of four tokens
        ("DeepSeek-V4-Flash", (43 * 640 + 23 * 1024 + 20 * (2560 + 32)) * 2),
    ],
)
def test_kv_bytes_per_token_in_16_bits(name: str, size: int) -> None:
    assert ModelSpec.from_config(PUBLIC[name]).kv_bytes_per_token(2) == size


def test_state_bytes_of_a_request() -> None:
    """Three inputs of each convolved channel, and a matrix per value head, in fp32."""
    spec = ModelSpec.from_config(PUBLIC["Qwen3.6-35B-A3B"])
    channels, matrices = 2 * 16 * 128 + 32 * 128, 32 * 128 * 128
    assert spec.state_bytes == 30 * (3 * channels + matrices) * 4


def test_a_declaration_lists_the_tensors_of_a_checkpoint() -> None:
    spec = ModelSpec.from_config(PUBLIC["qwen2.5-0.5b"])
    declaration = spec.declaration
    block = {linear.role: linear for linear in declaration.of_block(3)}
    assert block["qkv"].names[2] == "model.layers.3.self_attn.v_proj"
    assert block["qkv"].num_parameters == 897 * (896 + 2 * 128)
    assert block["o"].num_parameters == 896 * 896
    assert block["gate_up"].num_parameters + block["down"].num_parameters == 3 * 896 * 4864
    assert sum(norm.num_parameters for norm in declaration.norms if norm.layer == 3) == 2 * 896
    assert declaration.embedding.num_parameters == 151936 * 896
    assert declaration.head.tied and not declaration.head.num_parameters


def test_mistral_is_one_group_of_windows() -> None:
    specs = ModelSpec.from_config(PUBLIC["mistral-7b-v0.1"]).kv_specs(2)
    assert {(s.window, s.bytes_per_token) for s in specs} == {(Window(4096), 4096)}
    assert len(group_layers(specs)) == 1


def test_head_dim_is_hidden_over_query_heads() -> None:
    spec = ModelSpec.from_config(PUBLIC["llama-3-8b"])
    assert spec.head_dim == 128
    assert ModelSpec.from_config(PUBLIC["qwen3-0.6b"]).head_dim == 128  # not 1024 / 16
    qwen3 = small(architectures=["Qwen3ForCausalLM"])
    assert ModelSpec.from_config(qwen3).head_dim == 128  # the family's own default
    assert ModelSpec.from_config({**qwen3, "head_dim": None}).head_dim == 8


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 7}, (7, 7, 7, 7)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None,) * 4),
        ({"architectures": ["MistralForCausalLM"]}, (4096,) * 4),
        ({"sliding_window": 7}, (None,) * 4),
    ],
)
def test_windows_of_mistral_and_llama(
    changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert ModelSpec.from_config(small(**changes)).windows == tuple(map(as_window, windows))


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 7, "max_window_layers": 0}, (None,) * 4),  # not enabled
        ({"use_sliding_window": True, "sliding_window": 7}, (None,) * 4),  # from layer 28 on
        (
            {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
            (None, None, 7, 7),
        ),
        ({"use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 4096)),
        (
            {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
            (None,) * 4,
        ),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 7,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 7, None, 7),
        ),
        ({"layer_types": ["full_attention"] * 4}, (None,) * 4),
    ],
)
def test_windows_of_qwen(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    found = ModelSpec.from_config(small_qwen(**changes)).windows
    assert found == tuple(map(as_window, windows))


@pytest.mark.parametrize("architecture", ["Cohere2ForCausalLM", "Exaone4ForCausalLM"])
def test_windows_by_a_pattern(architecture: str) -> None:
    config = small_qwen(sliding_window=7) | {"architectures": [architecture]}
    usual, three, letters = (
        ModelSpec.from_config(config | changes).windows
        for changes in ({}, {"sliding_window_pattern": 3}, {"sliding_window_pattern": "LLG"})
    )
    assert usual == tuple(map(as_window, (7, 7, 7, None)))
    assert three == letters == tuple(map(as_window, (7, 7, None, 7)))


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, RopeSpec("default", 10000.0, 1.0, 4096)),
        ({"rope_theta": 5e5}, RopeSpec("default", 5e5, 1.0, 4096)),
        ({"rope_scaling": None}, RopeSpec("default", 10000.0, 1.0, 4096)),
        (
            {"rope_scaling": {"type": "linear", "factor": 4}, "rope_theta": 5e5},
            RopeSpec("linear", 5e5, 4.0, 4096),
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 7.0}},
            RopeSpec("dynamic", 7.0, 2.0, 4096),
        ),
        (
            {"rope_scaling": LLAMA3_SCALING, "rope_theta": 5e5, "max_position_embeddings": 131072},
            RopeSpec("llama3", 5e5, 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
        (
            {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 5e5}, "rope_theta": 3.0},
            RopeSpec("llama3", 5e5, 32.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            RopeSpec("yarn", 10000.0, 4.0, 4096),
        ),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1024}},
            RopeSpec("yarn", 10000.0, 4.0, 1024),
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7, "truncate": False},
                "original_max_position_embeddings": 512,
            },
            RopeSpec("yarn", 10000.0, 2.0, 512, mscale=0.7, truncate=False),
        ),
    ],
)
def test_rope_in_both_spellings(changes: dict[str, Any], rope: RopeSpec) -> None:
    assert ModelSpec.from_config(small(**changes)).ropes[0] == rope


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({}, 4096),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 16384),
        (
            {
                "max_position_embeddings": 16384,
                "rope_scaling": {
                    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096,
                },
            },
            16384,
        ),
        ({"rope_scaling": LLAMA3_SCALING, "max_position_embeddings": 131072}, 131072),
    ],
)  # fmt: skip
def test_context_after_stretching(changes: dict[str, Any], length: int) -> None:
    assert ModelSpec.from_config(small(**changes)).max_context == length


def test_mistral_small_does_not_stretch_positions() -> None:
    """Ministral 3, which has the same architecture, does so."""
    text = {
        "model_type": "mistral",
        "hidden_size": 5120,
        "intermediate_size": 32_768,
        "num_hidden_layers": 40,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e9,
        "sliding_window": None,
        "vocab_size": 131_072,
    }
    name = "Mistral3ForConditionalGeneration"
    spec = ModelSpec.from_config({"architectures": [name], "text_config": text})
    assert spec.ropes == (RopeSpec("default", 1e9, 1.0, 131_072),)
    assert spec.windows == (None,) * 40 and spec.max_context == 131_072


def test_linear_scaling_of_gemma3_is_in_its_context_already() -> None:
    spec = ModelSpec.from_config(config("gemma-3-4b"))
    assert spec.max_context == 131_072


def test_absent_keys_have_the_defaults_of_transformers() -> None:
    absent = ("num_key_value_heads", "rms_norm_eps", "torch_dtype")
    spec = ModelSpec.from_config(small(**dict.fromkeys(absent, ...)))
    assert (spec.num_kv_heads, spec.norm_eps, spec.dtype) == (4, 1e-6, "float32")
    assert (spec.activation, spec.tie_word_embeddings) == ("silu", False)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm) == (False,) * 4
    assert spec.eos_token_ids == (2,)
    assert ModelSpec.from_config(small(eos_token_id=None)).eos_token_ids == ()
    assert ModelSpec.from_config(small_qwen()).eos_token_ids == ()
    gpt2 = ModelSpec.from_config(PUBLIC["gpt2"])
    assert (gpt2.intermediate_size, gpt2.activation, gpt2.ropes) == (3072, "gelu_new", ())
    assert gpt2.tie_word_embeddings and gpt2.eos_token_ids == (50256,)


def test_the_family_replaces_an_absent_architecture() -> None:
    spec = ModelSpec.from_config(small(architectures=..., model_type="mistral"))
    assert spec.architecture == "MistralForCausalLM"


def test_the_newer_dtype_key() -> None:
    spec = ModelSpec.from_config(small(dtype="float16", torch_dtype=...))
    assert spec.dtype == "float16"


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_an_absent_dtype_is_that_of_most_numbers(
    tmp_path: Path, dtype: torch.dtype, shards: int
) -> None:
    """Files of gpt-oss have none: their floats are bfloat16."""
    other = torch.float32 if dtype == torch.float16 else torch.float16
    tensors = {"codes": torch.zeros(99, dtype=torch.uint8), "bias": torch.zeros(6, dtype=other)}
    tensors |= {"weight": torch.zeros(7, 3, dtype=dtype)}
    names = ["model.safetensors"] if shards == 1 else ["model-1.safetensors", "model-2.safetensors"]
    for name in names:
        save_file(tensors, tmp_path / name)
    for given in ({}, {"dtype": "float32"}):
        text = json.dumps(small(torch_dtype=..., **given))
        (tmp_path / "config.json").write_text(text)
        expected = given.get("dtype", str(dtype).removeprefix("torch."))
        assert read_model_spec(tmp_path).dtype == expected


def test_floats_of_a_quantised_model_without_a_dtype() -> None:
    config = {key: value for key, value in PUBLIC["gpt-oss-20b"].items() if "dtype" not in key}
    assert ModelSpec.from_config(config).dtype == "bfloat16"


ONE_GROUP = {"n_group": 1, "topk_group": 1}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {"shared_expert_intermediate_size": 16}


ELECTRA = {"embedding_size": 32}
DISTILBERT = {"dim": 32, "hidden_dim": 48, "n_layers": 4, "n_heads": 4}
# Keys that some architectures need in addition to the others.
OWN_KEYS: dict[str, dict[str, Any]] = {
    "ElectraModel": ELECTRA,
    "ElectraForSequenceClassification": ELECTRA,
    "DistilBertModel": DISTILBERT,
    "DistilBertForMaskedLM": DISTILBERT,
    "DistilBertForSequenceClassification": DISTILBERT,
    "DeepseekV4ForCausalLM": {"o_groups": 2},
    "GPT2LMHeadModel": PUBLIC["gpt2"],
    "OpenAIGPTLMHeadModel": PUBLIC["GPT"],
    "GPTJForCausalLM": PUBLIC["gpt2"],
    "GPTBigCodeForCausalLM": PUBLIC["gpt2"],
    "Mamba2ForCausalLM": PUBLIC["Mamba-Codestral-7B"],
    "CodeGenForCausalLM": PUBLIC["gpt2"],
    "DbrxForCausalLM": PUBLIC["dbrx"],
    "BloomForCausalLM": PUBLIC["bloom-560m"],
    "MptForCausalLM": PUBLIC["mpt-7b"],
    "MPTForCausalLM": PUBLIC["mpt-7b"],
    "GPTNeoForCausalLM": {"num_layers": 2, "num_heads": 4, "attention_layers": ["global"] * 2},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["attention"] * 4},
    "BambaForCausalLM": {"attn_layer_indices": [1], "mamba_n_heads": 8},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M*-E"},
    "Ernie4_5_MoeForCausalLM": {"moe_k": 2},
    "HunYuanMoEV1ForCausalLM": {"moe_intermediate_size": small()["intermediate_size"]},
    "Gemma3TextModel": {"use_bidirectional_attention": True},
    "KimiLinearForCausalLM": {"num_experts_per_token": 2},
    "LongcatFlashForCausalLM": {"moe_topk": 2},
    "Zamba2ForCausalLM": {
        **{"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8},
        "hidden_act": "gelu",
    },
    "BailingHybridForCausalLM": {"layer_group_size": 2, "num_experts": 4},
    "CohereCompassForCausalLM": {"rope_parameters": {"full_attention": {}}},
    "CohereCompassForConditionalGeneration": {"rope_parameters": {"full_attention": {}}},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 1},
}


def test_slopes_are_those_of_the_heads() -> None:
    """As in the paper, which begins at 1/2 for 8 heads; Falcon scales them like scores."""
    eight = [2.0**-i for i in range(1, 9)]
    sixteen = [2 ** (-i / 2) for i in range(1, 17)]

    def slopes(**config: Any) -> tuple[float, ...]:
        first, *others = ModelSpec.from_config(config).layers
        assert all(layer.slopes == first.slopes for layer in others)
        return first.slopes

    bloom = PUBLIC["bloom-560m"] | {"n_embed": 11 * 16}
    assert slopes(**bloom) == pytest.approx(sixteen)
    newer = {"num_attention_heads": None, "n_head": 8}
    assert slopes(**bloom | newer) == tuple(eight)
    assert slopes(**bloom | {"num_attention_heads": 8}) == tuple(eight)
    assert slopes(**bloom | {"num_attention_heads": 2}) == (2.0**-4, 2.0**-8)
    assert slopes(**bloom | {"num_attention_heads": 1}) == (2.0**-8,)
    odd = bloom | {"num_attention_heads": 11}
    assert slopes(**odd) == pytest.approx([*eight, *sixteen[:6:2]])
    mpt = PUBLIC["mpt-7b"] | {"d_model": 64, "n_heads": 4, "attn_config": {"alibi_bias_max": 4}}
    assert slopes(**mpt) == (0.5, 0.25, 0.125, 0.0625)
    falcon = PUBLIC["falcon-rw-1b"] | {"num_attention_heads": 8, "hidden_size": 8 * 64}
    assert slopes(**falcon) == tuple(slope / 8 for slope in eight)


def test_the_text_model_may_name_another_architecture() -> None:
    text = {**small(), **EXPERTS, **ONE_GROUP, "model_type": "mistral4"}
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text}
    spec = ModelSpec.from_config(whole)
    assert replace(spec, with_encoders=False) == ModelSpec.from_config(
        {**text, "architectures": ["Mistral4ForCausalLM"]}
    )
    assert spec.latent is not None
    text["model_type"] = "ministral3"
    assert ModelSpec.from_config(whole).architecture == "Ministral3ForCausalLM"


def test_every_architecture_is_read() -> None:
    for name in DECLARED:
        base = {**small(), **EXPERTS, **SHARED, **ONE_GROUP, **OWN_KEYS.get(name, {})}
        assert ModelSpec.from_config({**base, "architectures": [name]}).architecture == name


# Routed experts.


def moe(architecture: str = "Qwen3MoeForCausalLM", **changes: Any) -> dict[str, Any]:
    return {**small(), **EXPERTS, "architectures": [architecture], **changes}


def test_layers_know_whether_they_have_experts() -> None:
    def sparse(**changes: Any) -> list[bool]:
        spec = ModelSpec.from_config(moe(num_hidden_layers=4, **changes))
        return [layer.experts is not None for layer in spec.layers]

    assert sparse() == [True] * 4
    assert sparse(mlp_only_layers=[0, 2]) == [False, True, False, True]
    assert sparse(decoder_sparse_step=2) == [False, True, False, True]
    assert sparse(mlp_only_layers=[1], decoder_sparse_step=2) == [False, False, False, True]
    assert sparse(first_k_dense_replace=3) == [False, False, False, True]
    assert sparse(mlp_layer_types=["dense", "sparse", "sparse", "dense"]) == [
        False,
        True,
        True,
        False,
    ]


BAD_EXPERTS = [
    ({"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok must be an integer"),
    ({"num_local_experts": 0}, "num_local_experts must be an integer"),
    ({"num_local_experts": 1025}, "num_local_experts must be an integer"),
    ({"num_local_experts": 1024, "num_hidden_layers": 65}, "num_hidden_layers must give at most"),
    ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
    ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types must have"),
    ({"mlp_layer_types": ["routed"] * 2}, "mlp_layer_types must hold sparse or dense"),
    ({"n_group": 3}, "n_group must divide the 4 experts"),
    ({"n_group": 4, "topk_group": 1}, "topk_group must leave at least 2 experts"),
    ({"n_group": 2, "topk_group": 3}, "topk_group must be an integer"),
    ({"scoring_func": "softmax"}, "scoring_func must be one of sigmoid, not 'softmax'"),
    ({"scoring_func": "sqrtsoftplus"}, "scoring_func must be one of sigmoid, not 'sqrtsoftplus'"),
    ({"topk_method": "greedy"}, "topk_method must be one of noaux_tc, not 'greedy'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_EXPERTS)
def test_invalid_experts(changes: dict[str, Any], message: str) -> None:
    values = moe("Glm4MoeForCausalLM", **{"num_hidden_layers": 2, **changes})
    with pytest.raises(ModelError) as caught:
        ModelSpec.from_config({key: v for key, v in values.items() if v is not None})
    assert message in str(caught.value).replace(":", "")


def test_the_widest_feed_forward_part_is_an_mlp_or_the_experts_beside_it() -> None:
    config = PUBLIC["gemma-4-26b-a4b"]["text_config"]
    assert ModelSpec.from_config(config).inner_width == 8 * 704
    wide = ModelSpec.from_config({**config, "intermediate_size": 21_504})
    assert wide.inner_width == 21_504
