"""config.json files of public models give their real sizes; invalid ones give one clear error."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.public_configs import NAMES, config, facts
from helpers.public_configs import public_shape as shape
from helpers.tiers import examples
from helpers.windows import as_window
from hypothesis import given, settings
from hypothesis import strategies as st

from kvik.config import model_source
from kvik.config.model_source import BUNDLED
from kvik.errors import ModelError
from kvik.models.model_spec import ModelSpec
from kvik.planner.families import FOREIGN_KEYS, public_name, read_shape, shape_from_config
from kvik.planner.formats import weight_format
from kvik.spec.model import DTYPE_BYTES
from kvik.spec.visible_keys import Window
from kvik.spec.weights import SCHEMES

PUBLISHED = facts("published.json")
KV = facts("kv_reference.json")

UNRUN: dict[str, Any] = {"architectures": ["UnknownForCausalLM"]}  # only planned, from its sizes


def changed(name: str, **changes: Any) -> dict[str, Any]:
    """Return a public config with changes; a value of `...` removes the key."""
    return {k: v for k, v in {**config(name), **changes}.items() if v is not ...}


# Real sizes


def test_weights_are_those_published() -> None:
    ratios = {n: shape(n).parameters / known["parameters"] for n, known in PUBLISHED.items()}
    wrong = {name: ratio for name, ratio in ratios.items() if ratio != 1.0}
    assert wrong.keys() == {"llama-2-70b", "gpt-j-6b"}  # these count buffers
    assert list(wrong.values()) == pytest.approx([1.0, 1.0], rel=5e-4)
    assert len(ratios) > 20


def test_contexts_are_those_published() -> None:
    known = {name: facts["context"] for name, facts in PUBLISHED.items() if "context" in facts}
    assert known == {name: shape(name).max_context for name in known}


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "active" in PUBLISHED[name]])
def test_active_parameters_are_those_published(name: str) -> None:
    model, known = shape(name), PUBLISHED[name]
    active = model.active_parameters
    if known["active_counts_embedding"]:
        active += model.vocab_size * model.hidden_size
    assert active == pytest.approx(known["active"], rel=0.025)  # published with two or three digits


@pytest.mark.parametrize("name", KV)
def test_cache_bytes_are_those_of_the_reference(name: str) -> None:
    known = KV[name]
    if known["config"]:
        model = shape(known["config"])
    else:  # known only by these figures
        sizes = {
            "hidden_size": known["q_heads"] * known["head_dim"],
            "num_hidden_layers": known["layers"],
            "num_attention_heads": known["q_heads"],
            "num_key_value_heads": known["kv_heads"],
        }
        model = shape_from_config(changed("llama-2-7b", **sizes), name)
    assert model.num_layers == known["layers"]
    if "cached_dims" in known:
        assert model.attention == "MLA"
        ((cache, layers),) = model.caches
        assert (layers, cache.numbers) == (known["layers"], known["cached_dims"])
    else:
        found = (model.num_heads, model.num_kv_heads, model.head_dim)
        assert found == (known["q_heads"], known["kv_heads"], known["head_dim"])
    for kv_format in ("fp16", "bf16"):
        assert model.kv_bytes_per_token(kv_format) == known["fp16_bytes_per_token"]


# What this engine runs


ALIKE = ("llama-3.2-1b", "gpt2", "falcon-7b", "gemma-4-e2b", "deepseek-v2-lite", "gpt-oss-20b")


@pytest.mark.parametrize("name", ALIKE)
def test_a_model_the_engine_runs_has_the_engines_counts(name: str) -> None:
    spec, model = ModelSpec.from_config(config(name)), shape(name)
    assert model.spec == spec
    assert model.parameters == spec.num_parameters
    assert model.max_context == spec.max_context
    plain = replace(spec, quantization=None)
    for dtype, item in DTYPE_BYTES.items():
        for scheme in SCHEMES:
            stored = weight_format(dtype, scheme)
            if spec.quantization is not None and stored == model.stored:
                continue  # as in the checkpoint, which keeps more in floats
            for kernels in ("torch", "native", "triton"):
                found = replace(model, kernels=kernels).weight_bytes(stored)
                assert found == plain.weight_bytes(model.working_dtype(stored), scheme, kernels)
        assert model.kv_bytes_per_token(weight_format(dtype)) == spec.kv_bytes_per_token(item)
    windows = Counter[Window | None]()
    for cache, layers in model.caches:
        windows[cache.window] += layers * cache.readers
    assert windows == Counter(spec.windows)


def test_a_model_the_engine_does_not_run_has_no_spec() -> None:
    assert shape_from_config(changed("mixtral-8x7b-v0.1", **UNRUN), "m").spec is None


# Families


def test_kinds_of_attention() -> None:
    names = ("llama-2-7b", "llama-3-8b", "falcon-7b", "deepseek-v2-lite")
    assert [shape(name).attention for name in names] == ["MHA", "GQA", "MQA", "MLA"]


def test_first_layers_without_experts() -> None:
    v3 = shape("deepseek-v3")
    counts = {m.role: m.count for m in v3.matrices}
    assert counts["gate_up"] == 3
    assert counts["router"] == 58
    assert counts["expert_down"] == 58 * 256
    assert counts["shared_down"] == 58
    assert v3.like.inner_width == 9 * 2048  # eight routed experts and a shared one
    assert v3.notes == ("layers for multi-token prediction count only with --draft mtp: 1",)


MIXTRAL = changed("mixtral-8x7b-v0.1", **UNRUN, sliding_window=2047)
TYPES = ["full_attention"] * 8 + ["sliding_attention"] * 24
GEMMA = config("gemma-3-4b")["text_config"]


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        (MIXTRAL, {2047: 32}),
        (MIXTRAL | {"sliding_window": None}, {None: 32}),
        (changed("mixtral-8x7b-v0.1", **UNRUN, sliding_window=...), {None: 32}),
        (MIXTRAL | {"use_sliding_window": False}, {None: 32}),
        (MIXTRAL | {"layer_types": TYPES}, {None: 8, 2047: 24}),
        (config("gemma-3-4b"), {1024: 29, None: 5}),  # every sixth of 34 layers sees all keys
        ({"text_config": GEMMA | {"sliding_window_pattern": 2}}, {1024: 17, None: 17}),
        (changed("gemma-2-9b", sliding_window=None), {None: 42}),  # overrides the family's
    ],
)
def test_windows(values: dict[str, Any], windows: dict[int | None, int]) -> None:
    found = {cache.window: layers for cache, layers in shape_from_config(values, "m").caches}
    assert found == {as_window(window): layers for window, layers in windows.items()}


def test_a_nested_text_model_is_read_and_noted() -> None:
    gemma = shape("gemma-3-4b")
    assert gemma.architecture == "Gemma3ForCausalLM"
    assert (gemma.num_heads, gemma.num_kv_heads, gemma.head_dim) == (8, 4, 256)
    assert gemma.dtype == "bfloat16"  # from the outer config
    assert gemma.tied
    assert "only text_config is read" in gemma.notes[0]


def test_a_known_family_needs_no_name_in_its_text_config() -> None:
    whole = config("gemma-3-4b")
    bare = {k: v for k, v in GEMMA.items() if k not in ("architectures", "model_type")}
    found, expected = (
        shape_from_config(values, "m") for values in ({**whole, "text_config": bare}, whole)
    )
    assert (found.like, found.runs, found.layers) == (expected.like, True, expected.layers)


def test_a_nested_model_of_a_known_family_is_only_planned() -> None:
    nested = {"architectures": ["VoxtralForConditionalGeneration"], "text_config": config("gpt2")}
    model = shape_from_config(nested, "m")
    assert model.parameters == 124_439_808
    assert model.spec is None


NORMS = 2 * 128  # of queries and keys in each layer, which Qwen 3 has


def test_an_unknown_decoder_is_counted_like_a_similar_one_with_a_note() -> None:
    values = changed("llama-3-8b", architectures=["NovelForCausalLM"], model_type="novel")
    model = shape_from_config(values, "novel")
    assert model.parameters == 8_030_261_248 + 32 * NORMS
    assert (model.architecture, model.spec) == ("NovelForCausalLM", None)
    assert model.notes == ("'NovelForCausalLM' is not known: counted like Qwen3ForCausalLM",)


def test_an_unknown_decoder_may_have_shared_experts() -> None:
    known, model = (
        shape_from_config(changed("glm-4.5-air", **more), "novel") for more in ({}, UNRUN)
    )
    assert "shared_down" in {matrix.role for matrix in model.matrices}
    assert set(model.matrices) == set(known.matrices)


def test_an_unknown_decoder_may_have_latent_attention() -> None:
    known, model = (
        shape_from_config(changed("deepseek-v2-lite", **more), "novel") for more in ({}, UNRUN)
    )
    assert model.caches == known.caches
    assert model.attention == "MLA"
    dense = changed("deepseek-v2-lite", **UNRUN, n_routed_experts=...)
    assert {m.role for m in shape_from_config(dense, "m").matrices if m.experts} == set()


QWEN = ("qwen3-30b-a3b", 30_532_122_624)


@pytest.mark.parametrize(
    ("name", "parameters", "changes"),
    [
        (*QWEN, {"num_experts": ..., "num_local_experts": 128}),  # a newer name
        (*QWEN, UNRUN),
        (*QWEN, {**UNRUN, "num_experts": ..., "num_local_experts": 128}),
        (*QWEN, {**UNRUN, "num_experts": ..., "n_routed_experts": 128}),
        ("phi-2", 2_779_683_840, {"architectures": ...}),  # known by its model_type
        ("gpt2", 124_439_808, {"architectures": None}),
    ],
)
def test_other_ways_to_write_a_config(name: str, parameters: int, changes: dict[str, Any]) -> None:
    assert shape_from_config(changed(name, **changes), "m").parameters == parameters


def packed(num_bits: int, *, format: str = "pack-quantized", type: str = "int") -> dict[str, Any]:
    weights = {"num_bits": num_bits, "type": type, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    fields = {"format": format, "ignore": ["lm_head"], "config_groups": groups}
    return {"quant_method": "compressed-tensors", **fields}


def test_what_a_quantised_checkpoint_leaves_in_floats_counts_so() -> None:
    llama = shape_from_config(changed("llama-3-8b", quantization_config=packed(8)), "m")
    rounded = shape("llama-3-8b")  # its head has 8 bits, and a scale for each output
    saved = 128_256 * (4096 - 4)
    stored = llama.weight_bytes("int8-weight-only")
    assert stored == rounded.weight_bytes("int8-weight-only") + saved
    attention = next(matrix for matrix in shape("gpt-oss-20b").matrices if matrix.role == "qkv")
    assert shape("gpt-oss-20b").kind_of(attention, "mxfp4") is None


HQQ = {"quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}}
AO = {"_type": "Int8DynamicActivationInt4WeightConfig", "_data": {"group_size": 32}}
FP8 = {"dtype": "fp8_e4m3"}
AQLM = {"in_group_size": 8, "num_codebooks": 1, "nbits_per_codebook": 16}


@pytest.mark.parametrize(
    ("quantization", "stored", "runs"),
    [
        (None, "bf16", True),
        ({"quant_method": "fp8"}, "fp8", True),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "fp8", True),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "int8", True),
        ({"quant_method": "gptq", "bits": 4}, "int4", True),
        ({"quant_method": "awq", "bits": 8}, "int8-weight-only", False),
        ({"quant_method": "mxfp4"}, "mxfp4", True),
        ({"quant_method": "gptq", "bits": 3}, "int4", True),
        (packed(4), "int4", True),
        (packed(8), "int8-weight-only", True),
        (packed(8, format="naive-quantized", type="float"), "fp8", True),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4", True),
        ({"quant_method": "bitsandbytes", "_load_in_8bit": True}, "int8-weight-only", True),
        ({"quant_method": "auto-round", "bits": 2, "sym": False}, "int4", True),
        ({"quant_method": "hqq", **HQQ}, "int4", False),
        ({"quant_method": "sinq", "nbits": 8}, "int8-weight-only", False),
        ({"quant_method": "eetq", "weights": "int8"}, "int8-weight-only", False),
        ({"quant_method": "quanto", "weights": "float8"}, "fp8", False),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "int4", False),
        ({"quant_method": "torchao", "quant_type": {"default": AO}}, "int4", False),
        ({"quant_method": "quark", "global_quant_config": {"weight": FP8}}, "fp8", False),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "int4", True),
        ({"quant_method": "aqlm", **AQLM}, "int4", False),
        ({"quant_method": "bitnet"}, "int8", True),
        ({"quant_method": "vptq"}, "bf16", False),
        ({"quant_method": "new", "bits": 5}, "bf16", False),
        ({"quant_method": ["fp8"], "bits": {}}, "bf16", False),
    ],
)
def test_the_stored_format_of_a_checkpoint(
    quantization: dict[str, Any] | None, stored: str, runs: bool
) -> None:
    """A format that the engine guesses is noted, and so is a checkpoint that it cannot load."""
    model = shape_from_config(changed("llama-3-8b", quantization_config=quantization), "m")
    assert (model.dtype, model.stored) == ("bfloat16", stored)
    assert model.parameters == 8_030_261_248
    assert (model.spec is not None) == runs
    guessed = quantization is not None and stored != "fp8"
    assert len(model.notes) == guessed + (not runs)
    assert not guessed or stored in model.notes[0]


def test_a_missing_dtype_is_noted() -> None:
    model = shape_from_config(changed("mixtral-8x7b-v0.1", torch_dtype=...), "m")
    assert (model.dtype, model.stored) == ("float32", "fp32")
    assert model.notes == ("no dtype is given: float32 taken",)


# Finding a model


def test_the_default_is_the_bundled_model() -> None:
    model = read_shape("")
    assert model.name == "stories"
    assert model.parameters == ModelSpec.from_config(model_config(BUNDLED)).num_parameters


def model_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def test_a_folder_with_only_a_config_and_a_plain_file(tmp_path: Path) -> None:
    folder = tmp_path / "My-Mixtral"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config("mixtral-8x7b-v0.1")))
    other = tmp_path / "shape-of-phi.json"
    other.write_text(json.dumps(config("phi-2")))
    for model in (folder, folder / "config.json"):
        found = read_shape(str(model))
        assert (found.name, found.parameters) == ("My-Mixtral", 46_702_792_704)
    found = read_shape(str(other))
    assert (found.name, found.parameters) == ("shape-of-phi", 2_779_683_840)


def test_a_hub_id_names_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("phi-2")))
    monkeypatch.setattr(model_source, "_download", lambda *asked: tmp_path)
    found = read_shape("someone/Phi-2-tuned")
    assert (found.name, found.parameters) == ("Phi-2-tuned", 2_779_683_840)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"[1]", "must hold a JSON object"), (b"{", "is not valid JSON"), (b"\xff", "valid JSON")],
)
def test_a_file_that_is_not_a_config(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"^weights\.bin: .*{message}"):
        read_shape(str(path))


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^config\.json: is missing in"):
        read_shape(str(tmp_path))


# Invalid configs

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("mixtral-8x7b-v0.1", {"text_config": 4}, "text_config:"),
    ("mixtral-8x7b-v0.1", {**UNRUN, "layer_types": ["full_attention"]}, "layer_types:"),
    ("mixtral-8x7b-v0.1", {**UNRUN, "layer_types": ["mamba"] * 32}, "layer_types:"),
    ("qwen1.5-moe-a2.7b", {"mlp_only_layers": 3}, "mlp_only_layers:"),
    ("deepseek-v3", {"kv_lora_rank": -1}, "kv_lora_rank:"),
    ("deepseek-v3", {"qk_rope_head_dim": 63}, "qk_rope_head_dim:"),
    ("deepseek-v3", {"first_k_dense_replace": "3"}, "first_k_dense_replace:"),
    ("deepseek-v3", {"n_shared_experts": 10**9}, "n_shared_experts:"),
    ("falcon-40b", {"num_kv_heads": 7}, "num_kv_heads:"),
    ("falcon-7b", {"multi_query": "yes"}, "multi_query:"),
    ("gpt-j-6b", {"n_embd": None}, "n_embd:"),
    ("gpt-oss-20b", {"swiglu_limit": 5.0}, "swiglu_limit:"),
    ("llama-3-8b", {"architectures": [], "model_type": ...}, "architectures:"),
    ("llama-3-8b", {"architectures": None, "model_type": 7}, "architectures:"),
    ("llama-3-8b", {"architectures": ["BertForMaskedLM"]}, "architectures:"),
    ("llama-3-8b", {"architectures": ["T5ForConditionalGeneration"]}, "is not a text decoder"),
    (
        "llama-3-8b",
        {"architectures": ["BartForCausalLM"], "is_encoder_decoder": True},
        "is_encoder_decoder:",
    ),
    ("llama-3-8b", {**UNRUN, FOREIGN_KEYS[0]: 2}, f"{FOREIGN_KEYS[0]}: means layers"),
    ("llama-3-8b", {**UNRUN, "num_attention_heads": 0}, "num_attention_heads:"),
]


@pytest.mark.parametrize(("name", "changes", "message"), BAD)
def test_an_invalid_config_is_one_clear_error(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError) as caught:
        shape_from_config(changed(name, **changes), "m")
    assert str(caught.value).startswith("config.json ")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_bad_field_of_a_nested_model_is_named_with_its_path() -> None:
    values = config("gemma-3-4b")
    values["text_config"]["hidden_size"] = "large"
    with pytest.raises(ModelError, match=r"^config\.json text_config hidden_size: must be an"):
        shape_from_config(values, "m")


@pytest.mark.full
@settings(max_examples=examples(400))
@given(st.data())
def test_any_value_in_any_field_is_read_or_refused_at_once(data: st.DataObject) -> None:
    scalars = st.none() | st.booleans() | st.integers(-5, 10**12) | st.floats() | st.text()
    values = config(data.draw(st.sampled_from(NAMES)))
    target = values.get("text_config", values)
    key = data.draw(st.sampled_from(sorted(target)))
    target[key] = data.draw(scalars | st.lists(scalars, max_size=3))
    start = time.process_time()
    try:
        model = shape_from_config(values, "m")
        assert model.parameters > 0
        assert model.kv_bytes_per_token("bf16") > 0
        assert 0 < model.read_bytes("int4", 1) <= model.weight_bytes("int4")
        assert model.attention_flops(1, 2) > 0
    except ModelError as error:
        assert "\n" not in str(error)
    assert time.process_time() - start < 5  # the largest takes 0.2, and more while it is traced


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b-instruct"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("allenai/OLMo-2-7B", "olmo-2-7b"),
    ],
)
def test_public_models_need_no_network(
    model: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_source, "_download", pytest.fail)
    found = read_shape(model)
    assert found.parameters == shape(name).parameters
    assert any(name in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("Qwen2.5-7B", 131_072),
        ("Qwen/Qwen2.5-7B-Instruct", 32_768),
        ("Qwen/Qwen3-8B-Base", 32_768),
        ("Qwen/Qwen3-30B-A3B-Base", 32_768),
        ("Qwen/Qwen3-8B", 40_960),
    ],
)
def test_base_and_tuned_models_have_their_own_context(name: str, context: int) -> None:
    assert read_shape(name).max_context == context


@pytest.mark.parametrize("model", ["llama-3.1", "llama-3.1-8b-awq", "someone/finetune-8b", "x"])
def test_other_names_are_looked_up_at_the_hub(model: str) -> None:
    assert public_name(model) is None
