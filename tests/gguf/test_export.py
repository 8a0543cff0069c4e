"""Model specs and tokenizers to GGUF metadata and back."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.gguf_tokenizers import BYTE_LEVEL, byte_level, sentencepiece, texts
from helpers.model_cases import BESIDE
from helpers.tiny_families import ALL
from helpers.tiny_models import tiny_config
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from kvik.config.model_source import BUNDLED
from kvik.errors import ModelError
from kvik.gguf.export import (
    block_type,
    model_metadata,
    rope_divisors,
    token_id_metadata,
    tokenizer_metadata,
)
from kvik.gguf.facts import model_config
from kvik.gguf.reader import OutTensor, read_gguf, write_gguf
from kvik.gguf.tokenizer import GgufTokenizer, read_tokenizer
from kvik.gguf.types import BLOCK_TYPES
from kvik.models.model_spec import ModelSpec
from kvik.spec.experts import ExpertsSpec
from kvik.spec.layers import LayerSpec
from kvik.spec.rope import RopeSpec

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 50,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "dtype": "bfloat16",
    "bos_token_id": 3,
    "eos_token_id": [4, 6, 5],
}


def spec(name: str, options: dict[str, Any]) -> ModelSpec:
    return ModelSpec.from_config({**SIZES, "architectures": [name], **options})


def there_and_back(model: ModelSpec, path: Path) -> ModelSpec:
    """Write and read a file without most of its tensors."""

    def zeros(name: str, type: str, *shape: int) -> OutTensor:
        tensor = OutTensor(name, BLOCK_TYPES[type], shape, lambda: [bytes(tensor.size)])
        return tensor

    tensors = [zeros("token_embd.weight", "BF16", model.vocab_size, model.hidden_size)]
    if not model.tie_word_embeddings:
        tensors.append(zeros("output.weight", "BF16", model.vocab_size, model.hidden_size))
    if model.qkv_bias:
        tensors.append(zeros("blk.0.attn_q.bias", "F32", 8))
    if model.family.gguf_by_kind:
        tensors += [
            zeros(f"blk.{i}.attn_v.weight", "F32", 8)
            for i, layer in enumerate(model.layers)
            if not layer.value_is_key
        ]
    if (divisors := rope_divisors(model)) is not None:
        data = struct.pack(f"<{len(divisors)}f", *divisors)
        f32 = BLOCK_TYPES["F32"]
        tensors.append(OutTensor("rope_freqs.weight", f32, (len(divisors),), lambda: [data]))
    metadata = {**model_metadata(model, "x", "BF16"), **token_id_metadata(model)}
    write_gguf(path, metadata, tensors)
    return ModelSpec.from_config(model_config(read_gguf(path)))


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN3_MOE = {
    "num_experts": 9,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
GLM4_MOE = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "attention_bias": True}),
        ("LlamaForCausalLM", {"rope_scaling": LLAMA3}),
        ("LlamaForCausalLM", {"rope_scaling": YARN}),
        ("LlamaForCausalLM", {"rope_scaling": YARN | {"attention_factor": 1.5, "beta_fast": 20}}),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
        ("LlamaForCausalLM", {"eos_token_id": None, "bos_token_id": None}),
        ("MistralForCausalLM", {"sliding_window": 512}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    ],
)
def test_specs_survive_a_round_trip(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    model = spec(name, options)
    if options.get("eos_token_id", 0) is None:
        model = replace(model, eos_token_ids=())
    assert there_and_back(model, tmp_path / "m.gguf") == model


# Families whose layers attend over latent vectors, have states or are stored differently.
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 3,
}
LATENT = {
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
SHARED = {**QWEN3_MOE, "shared_expert_intermediate_size": 40}
EVEN = {"mscale": 0.707, "mscale_all_dim": 0.707}
GEMMA4 = {"num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 64, "sliding_window": 9}
SAME = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0}
SPARSE = {"enable_moe_block": True, "num_experts": 9, "top_k_experts": 2}
SPARSE |= {"moe_intermediate_size": 24}
SLOW = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 300.0,
        "partial_rotary_factor": 0.3,
        "factor": 2.5,
    },
}
FAST = {"rope_type": "linear", "factor": 2.0}
LOPSIDED = ["full_attention", "full_attention", "linear_attention"]
IN_ORDER = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("Qwen3_5ForCausalLM", DELTA | {"layer_types": LOPSIDED}),
    ("Qwen3_5ForCausalLM", DELTA | IN_ORDER),
    ("Qwen3NextForCausalLM", DELTA | SHARED | {"full_attention_interval": 3}),
    ("DeepseekV2ForCausalLM", LATENT | {"q_lora_rank": None, "rope_scaling": YARN | EVEN}),
    ("DeepseekV3ForCausalLM", LATENT | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    ("Lfm2ForCausalLM", {"conv_L_cache": 4, "full_attn_idxs": [1], "norm_eps": 1e-6}),
    ("Glm4MoeForCausalLM", GLM4_MOE | {"first_k_dense_replace": 0, "n_shared_experts": 0}),
    (
        "Gemma4ForCausalLM",
        GEMMA4
        | {"per_layer_config": {"05": {"head_dim": 24, "num_key_value_heads": 4}}}
        | {"attention_k_eq_v": True},
    ),
    ("Gemma4ForConditionalGeneration", GEMMA4 | SAME | SPARSE | {"rope_parameters": SLOW}),
]


@pytest.mark.parametrize(
    ("name", "options"), [*((f, None) for f in ALL if f != "Glm4MoeLite"), *OTHERS]
)
def test_layers_survive_a_round_trip(
    tmp_path: Path, name: str, options: dict[str, Any] | None
) -> None:
    """Windows, positions, experts, states and latent vectors of every layer, and all sizes."""
    if options is None:
        config = tiny_config(name.partition("-")[0], **ALL[name])
        model = ModelSpec.from_config(config.to_dict())
    else:
        model = spec(name, options)
    back = there_and_back(model, tmp_path / "m.gguf")

    def layers(model: ModelSpec) -> list[LayerSpec]:
        return [
            replace(
                layer,
                experts=_ungrouped(layer.experts),
                rope=turn and replace(turn[0], fraction=turn[0].width(turn[1])),
            )
            for layer, turn in zip(model.layers, map(model.rotation, model.layers), strict=True)
        ]

    assert layers(back) == layers(model)
    assert back.architecture == model.architecture.replace("ConditionalGeneration", "CausalLM")
    same = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
    for key in (*same, "head_dim", "max_position_embeddings", "norm_eps", "qkv_bias", "scales"):
        assert getattr(back, key) == getattr(model, key), key


def _ungrouped(experts: ExpertsSpec | None) -> ExpertsSpec | None:
    """Remove groups if all are kept."""
    if experts is None or experts.router.kept_groups < experts.router.groups:
        return experts
    return replace(experts, router=replace(experts.router, groups=1, kept_groups=1))


def test_mistral_without_a_window_is_a_llama(tmp_path: Path) -> None:
    model = spec("MistralForCausalLM", {"sliding_window": None})
    back = there_and_back(model, tmp_path / "m.gguf")
    assert back == replace(model, architecture="LlamaForCausalLM")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Qwen2ForCausalLM", {"sliding_window": 64, "use_sliding_window": True}, "sliding_window"),
        ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("LlamaForCausalLM", {"rope_scaling": YARN | {"mscale": 1.0}}, "this kind of yarn"),
        ("LlamaForCausalLM", {"rope_scaling": YARN | {"truncate": False}}, "llama files imply"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 1]}, "rope_parameters:"),
        ("GPTNeoXForCausalLM", {"num_key_value_heads": 4, "hidden_act": "gelu_new"}, "hidden_act"),
        ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 64}, "gemma3 files imply"),
        ("Qwen3MoeForCausalLM", QWEN3_MOE | {"norm_topk_prob": False}, "experts"),
        ("Qwen3MoeForCausalLM", QWEN3_MOE | {"decoder_sparse_step": 2}, "experts"),
        ("OlmoeForCausalLM", QWEN3_MOE, "experts of layers:"),
        ("DeepseekV3ForCausalLM", LATENT | {"rope_interleave": False}, "deepseek2 files imply"),
        (
            "DeepseekV3ForCausalLM",
            LATENT | {"rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
            "this kind of yarn",
        ),
        ("FalconH1ForCausalLM", BESIDE | {"mamba_rms_norm": True}, "mamba_norm_before_gate:"),
        (
            "FalconH1ForCausalLM",
            BESIDE | {"tie_word_embeddings": True, "lm_head_multiplier": 0.5},
            "lm_head_multiplier:",
        ),
        ("Lfm2ForCausalLM", {"conv_bias": True, "full_attn_idxs": [1]}, "layer_types:"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": None}, "gemma2 files imply"),
        ("FalconForCausalLM", {"alibi": True, "multi_query": False}, "alibi:"),
        ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 99}, "gemma2 files imply"),
        ("Gemma4ForCausalLM", GEMMA4 | {"attention_bias": True}, "attention_bias:"),
        ("Gemma4ForCausalLM", {"num_hidden_layers": 1}, "layer_types:"),
        (
            "Gemma4ForCausalLM",
            GEMMA4 | {"rope_parameters": SLOW | {"full_attention": FAST}},
            "this kind of linear",
        ),
        (
            "Gemma4ForCausalLM",
            GEMMA4 | {"rope_parameters": SLOW | {"sliding_attention": FAST}},
            "rope_parameters:",
        ),
        (
            "Gemma4ForCausalLM",
            GEMMA4 | {"rope_parameters": SLOW | {"sliding_attention": SLOW["full_attention"]}},
            "rope_parameters:",
        ),
        (
            "Gemma4ForCausalLM",
            GEMMA4 | {"per_layer_config": {"5": {"head_dim": 32}, "1": {"head_dim": 24}}},
            "heads of layers:",
        ),
        (
            "Gemma4ForCausalLM",
            GEMMA4 | {"per_layer_config": {"1": {"num_key_value_heads": 4}}},
            "head_count_kv:",
        ),
    ],
)
def test_models_that_gguf_cannot_describe(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model_metadata(spec(name, {"max_window_layers": 1} | options), "x", "BF16")


def test_other_architectures() -> None:
    model = replace(spec("LlamaForCausalLM", {}), architecture="OPTForCausalLM", layers=())
    with pytest.raises(ModelError, match="architectures: must be one of LlamaForCausalLM"):
        model_metadata(model, "x", "BF16")


# The place of a matrix, its width, and its blocks in files of Q4_K_M, Q5_K_M, Q6_K and Q4_0.
BLOCKS = [
    ("blk.0.attn_q.weight", 512, "Q4_K Q5_K Q6_K Q4_0"),
    ("blk.0.attn_q.weight", 64, "Q5_0 Q5_1 Q8_0 Q4_0"),
    ("blk.0.attn_q.weight", 48, "BF16 BF16 BF16 BF16"),
    ("blk.1.ffn_down.weight", 512, "Q4_K Q5_K Q6_K Q4_0"),
    ("blk.2.ffn_down.weight", 512, "Q6_K Q6_K Q6_K Q4_0"),
    ("blk.2.ffn_down.weight", 96, "Q8_0 Q8_0 Q8_0 Q4_0"),
    ("blk.2.attn_v.weight", 512, "Q6_K Q6_K Q6_K Q4_0"),
    ("blk.2.ffn_up.weight", 512, "Q4_K Q5_K Q6_K Q4_0"),
    ("token_embd.weight", 512, "Q4_K Q5_K Q6_K Q8_0"),
    ("output.weight", 512, "Q6_K Q6_K Q6_K Q8_0"),
    ("output.weight", 64, "Q8_0 Q8_0 Q8_0 Q8_0"),
]


@pytest.mark.parametrize(("name", "width", "expected"), BLOCKS)
def test_blocks_by_place_and_width(name: str, width: int, expected: str) -> None:
    model = replace(spec("LlamaForCausalLM", {}), layers=(LayerSpec(),) * 4)
    types = ("Q4_K_M", "Q5_K_M", "Q6_K", "Q4_0")
    assert [block_type(type, name, width, model) for type in types] == expected.split()


def test_an_embedding_that_is_the_head_has_its_blocks() -> None:
    model = spec("LlamaForCausalLM", {"tie_word_embeddings": True})
    assert block_type("Q4_K_M", "token_embd.weight", 512, model) == "Q6_K"


def test_attention_with_eight_experts_is_finer() -> None:
    """As llama.cpp mixes types; matrices of experts are treated like those of an MLP."""
    model = spec("MixtralForCausalLM", {"num_local_experts": 8, "num_hidden_layers": 4})
    for part, expected in {
        "attn_q": "Q4_K Q4_0 BF16",
        "attn_k": "Q8_0 Q8_0 BF16",
        "attn_v": "Q8_0 Q8_0 BF16",
        "attn_output": "Q5_K Q4_0 BF16",
        "ffn_gate_inp": "F32 F32 F32",
        "ffn_up_exps": "Q4_K Q4_0 BF16",
        "ffn_down_exps": "Q6_K Q4_0 BF16",
    }.items():
        name = f"blk.2.{part}.weight"
        types = [block_type(type, name, 512, model) for type in ("Q4_K_M", "Q4_0", "BF16")]
        assert types == expected.split(), part


@pytest.mark.parametrize(("layers", "finer"), [(6, [2, 5]), (16, [0, 1, 4, 7, 10, 13, 14, 15])])
def test_layers_that_have_finer_blocks(layers: int, finer: list[int]) -> None:
    model = replace(spec("LlamaForCausalLM", {}), layers=(LayerSpec(),) * layers)
    kinds = [block_type("Q4_K_M", f"blk.{i}.attn_v.weight", 512, model) for i in range(layers)]
    assert [i for i, kind in enumerate(kinds) if kind == "Q6_K"] == finer


def test_values_of_a_70b_have_five_bits() -> None:
    model = replace(spec("LlamaForCausalLM", {}), layers=(LayerSpec(),) * 80)
    for heads, expected in ((model.num_heads, "Q5_K"), (model.num_kv_heads, "Q4_K")):
        changed = replace(model, num_heads=heads)
        assert block_type("Q4_K_M", "blk.10.attn_v.weight", 512, changed) == expected
        assert block_type("Q4_K_M", "blk.10.attn_k.weight", 512, changed) == "Q4_K"


def test_rope_spec_defaults_are_what_files_leave_out() -> None:
    assert (
        rope_divisors(replace(spec("LlamaForCausalLM", {}), layers=(LayerSpec(None, RopeSpec()),)))
        is None
    )


# tokenizer.json to GGUF metadata and back.


def tokenizer_there_and_back(
    path: Path, library: Tokenizer, bos: int, eos: int, template: str | None = None
) -> GgufTokenizer:
    metadata = tokenizer_metadata(library, 600, bos, eos, template)
    ids = {"tokenizer.ggml.bos_token_id": bos, "tokenizer.ggml.eos_token_id": eos}
    write_gguf(path, {**metadata, **ids}, [])
    return read_tokenizer(read_gguf(path).metadata)


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_bytes(tmp_path: Path, pre: str) -> None:
    original = byte_level(pre)
    found = tokenizer_there_and_back(tmp_path / "m.gguf", original, 0, 1, "{{ x }}")
    assert (found.bos_token, found.eos_token, found.chat_template) == ("<s>", "</s>", "{{ x }}")
    for text in texts(100, seed=1):
        assert found.library.encode(text).ids == original.encode(text).ids


@pytest.mark.parametrize("prefix", [True, False])
def test_characters(tmp_path: Path, prefix: bool) -> None:
    original = sentencepiece(prefix)
    library = tokenizer_there_and_back(tmp_path / "m.gguf", original, 1, 2).library
    for text in texts(100, seed=2):
        ids = original.encode(text).ids
        assert library.encode(text).ids == ids and library.decode(ids) == original.decode(ids)


def test_characters_by_rank(tmp_path: Path) -> None:
    original = sentencepiece(False)
    metadata = tokenizer_metadata(original, 600, 1, 2, None, "gemma4")
    assert metadata["tokenizer.ggml.model"] == "gemma4" and "tokenizer.ggml.scores" not in metadata
    write_gguf(tmp_path / "m.gguf", {**metadata, "tokenizer.ggml.bos_token_id": 1}, [])
    library = read_tokenizer(read_gguf(tmp_path / "m.gguf").metadata).library
    for text in texts(100, seed=3):
        ids = original.encode(text).ids
        assert library.encode(text).ids == ids and library.decode(ids) == original.decode(ids)
    with pytest.raises(ModelError, match=r"tokenizer\.json: must not put a space before a text"):
        tokenizer_metadata(sentencepiece(True), 600, 1, 2, None, "gemma4")


@pytest.mark.parametrize(("scheme", "prefix"), [("first", True), ("never", False)])
def test_metaspace(scheme: str, prefix: bool) -> None:
    library = Tokenizer.from_str(sentencepiece(True).to_str())
    library.normalizer = None
    library.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    metadata = tokenizer_metadata(library, 600, 1, 2, None)
    assert metadata["tokenizer.ggml.add_space_prefix"] is prefix


def test_a_token_has_the_score_of_its_first_merge() -> None:
    ids = {token: index for index, token in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
    merges = [("a", "b"), ("ab", "c"), ("b", "c"), ("a", "bc")]
    library = Tokenizer(models.BPE(ids, merges, byte_fallback=True))
    library.normalizer = normalizers.Replace(" ", "▁")
    scores = tokenizer_metadata(library, 6, None, None, None)["tokenizer.ggml.scores"]
    assert isinstance(scores, list) and scores[3:] == [0.0, -2.0, -1.0]


def test_rows_without_a_token(tmp_path: Path) -> None:
    library = tokenizer_there_and_back(tmp_path / "m.gguf", byte_level("gpt-2"), 0, 1).library
    assert library.get_vocab_size() == 600 and library.id_to_token(599) == "[PAD599]"
    with pytest.raises(ModelError, match=r"tokenizer\.json: .* must be below 300"):
        tokenizer_metadata(byte_level("gpt-2"), 300, 0, 1, None)


def test_the_bundled_model(tmp_path: Path) -> None:
    original = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    metadata = tokenizer_metadata(original, 2048, 0, 0, None)
    write_gguf(tmp_path / "m.gguf", metadata, [])
    library = read_tokenizer(read_gguf(tmp_path / "m.gguf").metadata).library
    for text in texts(100):
        assert library.encode(text).ids == original.encode(text).ids


def test_tokenizers_that_gguf_cannot_describe() -> None:
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(ModelError, match="must be BPE for GGUF, not 'WordLevel'"):
        tokenizer_metadata(words, 1, None, None, None)
    text = byte_level("gpt-2").to_str()
    for change in (
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "NFC"}},
        {"normalizer": {"type": "Lowercase"}},
    ):
        other = Tokenizer.from_str(json.dumps({**json.loads(text), **change}))
        with pytest.raises(ModelError, match="cuts text into words in a way that has no name"):
            tokenizer_metadata(other, 600, 0, 1, None)
    spaces = Tokenizer.from_str(sentencepiece(True).to_str())
    spaces.normalizer = normalizers.Lowercase()
    with pytest.raises(ModelError, match="must replace spaces as SentencePiece does"):
        tokenizer_metadata(spaces, 600, 1, 2, None)
