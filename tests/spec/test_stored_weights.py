"""quantization_config: how each layer is stored, in the format of each tool."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from typing import Any

import pytest
from helpers.configs import PUBLIC
from helpers.stored_layers import (
    NVFP4,
    auto_round_config,
    awq_config,
    bnb_config,
    compressed_config,
    fp8_config,
    gptq_config,
    modelopt_config,
    read,
)

from kvik.config.memory import (
    LOADING_BYTES,
    QUANTIZED_SCRATCH_BYTES,
    TRANSPOSED_LOADING_BYTES,
    Footprint,
)
from kvik.config.step_memory import StepSize
from kvik.errors import ModelError
from kvik.models.model_spec import ModelSpec
from kvik.spec.stored_weights import StoredScheme, stored_alike
from kvik.spec.weight_kind import WeightKind
from kvik.spec.weights import loaded_kind, matrix_kind

DOWN = "model.layers.3.mlp.down_proj"
FLOAT8 = {"num_bits": 8, "type": "float"}


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (awq_config(), StoredScheme("awq", 4, 32, symmetric=False)),
        (awq_config(group_size=-1, version="GEMM"), StoredScheme("awq", 4, symmetric=False)),
        (gptq_config(), StoredScheme("gptq", 4, 32, zeros_less_one=True)),
        (gptq_config(bits=8, sym=False, format="gptq_v2"), StoredScheme("gptq", 8, 32,
                                                                        symmetric=False)),
        (gptq_config(desc_act=True, checkpoint_format="gptq"), StoredScheme("gptq", 4, 32,
                                                                ordered=True, zeros_less_one=True)),
        (compressed_config(), StoredScheme("pack-quantized", 4, 32)),
        (compressed_config(actorder="group"), StoredScheme("pack-quantized", 4, 32, ordered=True)),
        (compressed_config(actorder="weight"), StoredScheme("pack-quantized", 4, 32)),
        (compressed_config(strategy="channel", group_size=None, symmetric=False),
         StoredScheme("pack-quantized", 4, symmetric=False)),
        (compressed_config("int-quantized", num_bits=8, strategy=None, group_size=-1,
                           activations=True),
         StoredScheme("int-quantized", 8, quantize_activations=True)),
        (compressed_config("naive-quantized", num_bits=8, strategy=None, group_size=None),
         StoredScheme("int-quantized", 8, band=0)),
        (compressed_config("float-quantized", **FLOAT8, strategy="tensor", activations=True),
         StoredScheme("fp8", 8, band=0, fp8_activations="token")),
        (compressed_config("naive-quantized", **FLOAT8, strategy="block",
                           block_structure=[128, 64]), StoredScheme("fp8", 8, 64, 128)),
        (fp8_config(), StoredScheme("fp8", 8, 128, 128, fp8_activations="group")),
        (fp8_config(scale_fmt="ue8m0"), StoredScheme("fp8", 8, 128, 128, fp8_activations="group")),
        (fp8_config(weight_block_size=None, activation_scheme="static"),
         StoredScheme("fp8", 8, band=0, fp8_activations="static")),
        (fp8_config(fmt="e5m2"), StoredScheme("fp8", 8, 128, 128, e5m2=True)),
        (fp8_config(weight_block_size=None),
         StoredScheme("fp8", 8, band=0, fp8_activations="token")),
        ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": None},
         StoredScheme("fp8", 8, fp8_activations="token")),
        (bnb_config(), StoredScheme("bnb-nf4", 4, 64)),
        ({"quant_method": "bitsandbytes", "_load_in_4bit": True}, StoredScheme("bnb-fp4", 4, 64)),
        (bnb_config(8), StoredScheme("bnb-int8", 8)),
        ({"quant_method": "bitnet"},
         StoredScheme("bitlinear", 2, band=0, quantize_activations=True)),
        ({"quant_method": "bitnet", "linear_class": "autobitlinear"},
         StoredScheme("autobitlinear", 2, band=0, quantize_activations=True)),
        (auto_round_config(), StoredScheme("gptq", 4, 32, zeros_less_one=True)),
        (auto_round_config(packing_format=None, block_name_to_quantize=None),
         StoredScheme("gptq", 4, 32, zeros_less_one=True)),
        (auto_round_config(packing_format="auto_round:gptqmodel", bits=3, sym=False, act_bits=16),
         StoredScheme("gptq", 3, 32, symmetric=False)),
        (auto_round_config(packing_format="auto_round:auto_awq"),
         StoredScheme("awq", 4, 32, symmetric=False)),
    ],
)  # fmt: skip
def test_scheme(config: dict[str, Any], scheme: StoredScheme) -> None:
    stored = read(config)
    assert stored.scheme(DOWN) == scheme
    assert stored.scheme("lm_head") is None


@pytest.mark.parametrize(
    ("inputs", "found"),
    [
        (None, "float"),
        ({"dynamic": True, "strategy": "token"}, "token"),
        ({"dynamic": True, "strategy": "tensor"}, "token"),
        ({"dynamic": True, "strategy": "group", "group_size": 128}, "group"),
        ({"dynamic": False, "strategy": "tensor"}, "static"),
        ({"strategy": "tensor"}, "static"),
        ({"dynamic": False, "strategy": "token"}, "strategy: must be one of tensor, not 'token'"),
        ({"dynamic": True, "strategy": "group", "group_size": 64},
         "group_size: must be that of the weights (128), not 64"),
        ({"dynamic": True, "type": "int"}, "type: must be one of float, not 'int'"),
        ({"dynamic": "local"}, "dynamic: must be true or false"),
        ({"num_bits": 4}, "num_bits: must be"),
    ],
)  # fmt: skip
def test_activations_of_eight_bit_floats(inputs: dict[str, Any] | None, found: str) -> None:
    config = compressed_config("float-quantized", **FLOAT8 | {"group_size": 128})
    given = None if inputs is None else {"num_bits": 8, "type": "float"} | inputs
    config["config_groups"]["group_0"]["input_activations"] = given
    if " " not in found:
        scheme = read(config).scheme(DOWN)
        assert scheme.fp8_activations == found
        return
    with pytest.raises(ModelError, match=re.escape(f"group_0 input_activations {found}")):
        read(config)


def test_a_cache_that_was_calibrated() -> None:
    assert not read(compressed_config()).kv_scales
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    assert read(compressed_config() | {"kv_cache_scheme": scheme}).kv_scales


@pytest.mark.parametrize("config", [awq_config, fp8_config])
def test_unconverted_modules(config: Any) -> None:
    names = ["model.layers.0", "mlp.gate", "o_proj", "layers.2.self_attn.q_proj"]
    stored = read(config(modules_to_not_convert=names))
    plain = (
        "model.layers.0.mlp.down_proj",
        "model.layers.7.self_attn.o_proj",
        "model.layers.2.self_attn.q_proj",
        "lm_head",
    )
    quantised = (
        "model.layers.10.mlp.down_proj",
        "model.layers.1.mlp.gate_proj",
        "model.layers.12.self_attn.q_proj",
        "model.layers.2.self_attn.k_proj",
    )
    assert [name for name in plain + quantised if stored.scheme(name) is None] == list(plain)


def test_gptq_by_module() -> None:
    stored = read(
        gptq_config(
            dynamic={r"-:.*\.k_proj": {}, r"+:.*\.3\.mlp": {"bits": 8, "group_size": -1}, "lm_": {}}
        )
    )
    assert stored.scheme("model.layers.3.self_attn.k_proj") is None
    assert stored.scheme(DOWN) == StoredScheme("gptq", 8, 0, zeros_less_one=True)
    usual = StoredScheme("gptq", 4, 32, zeros_less_one=True)
    assert stored.scheme("model.layers.4.mlp.down_proj") == usual
    assert stored.scheme("lm_head") == usual  # a name has precedence over the exclusion
    assert read(gptq_config()).scheme("embed_out") is None  # the head of GPT-NeoX
    assert read(gptq_config(lm_head=True)).scheme("lm_head") == usual
    some = read(gptq_config(modules_in_block_to_quantize=[["mlp.down_proj"], ["mlp.up_proj"]]))
    assert some.scheme(DOWN) == usual
    assert some.scheme("model.layers.3.self_attn.q_proj") is None


@pytest.mark.parametrize(
    "blocks",
    [
        "model.layers",
        "visual.blocks, model.layers",
        ["model.layers"],
        [[f"model.layers.{i}" for i in range(32)]],
        "model.language_model.layers",  # of a model with an encoder
    ],
)
def test_auto_round_by_layer(blocks: Any) -> None:
    extra = {
        DOWN: {"bits": 8, "group_size": -1, "sym": False},
        "model.layers.1.mlp.up_proj": {"bits": 16, "data_type": "fp", "act_bits": 16},
        r"layers\.[12]\.mlp": {"bits": 2},
        "lm_head": {"bits": 3},
        "model.layers.1.input_layernorm": {"bits": 16},
    }
    usual = StoredScheme("gptq", 4, 32, zeros_less_one=True)
    skipped = ["layers.5.*mlp"]
    stored = read(
        auto_round_config(
            extra_config=extra, block_name_to_quantize=blocks, modules_to_not_convert=skipped
        )
    )
    by_name = StoredScheme("gptq", 8, symmetric=False, zeros_less_one=True)
    assert stored.scheme(DOWN) == by_name
    assert stored.scheme("model.layers.1.mlp.up_proj") is None
    assert stored.scheme("model.layers.1.mlp.down_proj") == replace(usual, bits=2)
    assert stored.scheme("model.layers.12.mlp.down_proj") == usual
    assert stored.scheme("model.layers.5.mlp.down_proj") is None
    assert stored.scheme("model.layers.1.self_attn.q_proj") == usual
    assert stored.scheme("lm_head") == replace(usual, bits=3)


def test_only_some_blocks_of_auto_round() -> None:
    stored = read(auto_round_config(block_name_to_quantize=["model.layers.3", "model.layers.4"]))
    assert stored.scheme(DOWN) is not None
    assert stored.scheme("model.layers.5.mlp.down_proj") is None


def test_modules_that_bitsandbytes_skips() -> None:
    """As in transformers: a name, or a regular expression that ends where a name ends."""
    names = ["model.layers.0", "k_proj", r"model.layers.[12].mlp"]
    stored = read(bnb_config(llm_int8_skip_modules=names))
    plain = [
        "model.layers.0.mlp.down_proj",
        "model.layers.7.self_attn.k_proj",
        "model.layers.2.mlp.up_proj",
    ]
    quantised = ["model.layers.10.mlp.down_proj", "model.layers.12.mlp.up_proj", "lm_head"]
    assert [name for name in plain + quantised if stored.scheme(name) is None] == plain
    assert str(stored) == "bitsandbytes: nf4, in groups of 64"


def test_targets_of_compressed_tensors() -> None:
    """Names have precedence over patterns, these over classes; exclusions over all."""
    config = compressed_config(ignore=("re:.*lm_head", "model.layers.1.mlp.down_proj"))
    first = config["config_groups"]["group_0"]
    for bits, targets in ((8, ["re:.*down_proj$"]), (3, [DOWN, "model.layers.1.mlp.down_proj"])):
        group = first | {"targets": targets, "weights": first["weights"] | {"num_bits": bits}}
        config["config_groups"][f"group_{bits}"] = group
    names = (
        DOWN,
        "model.layers.13.mlp.down_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.3.mlp.up_proj",
        "model.lm_head",
    )
    stored = read(config, names)
    found = {name: scheme.bits if (scheme := stored.scheme(name)) else None for name in names}
    assert list(found.values()) == [3, 8, None, 4, None]
    assert read(compressed_config(ignore=("Linear",))).scheme(DOWN) is None
    assert str(stored) == (
        "compressed-tensors: 4 bits, in groups of 32; 8 bits, in groups of 32; "
        "3 bits, in groups of 32"
    )


def test_formats_of_groups() -> None:
    config = compressed_config("mixed-precision")
    config["config_groups"]["group_0"]["format"] = "pack-quantized"
    assert read(config).scheme(DOWN) == StoredScheme("pack-quantized", 4, 32)


@pytest.mark.parametrize(
    "pattern",
    [r"(a+)+$", r"(\w+\.?)+!", r"((.+)*)*!", r"(.|\w)*!", ".*" * 30 + "!", "(x?){9999}(.?){9999}!"],
)
def test_no_pattern_takes_long(pattern: str) -> None:
    """`re` would need years for some of them and one layer's name."""
    began = time.monotonic()
    stored = read(compressed_config(ignore=(f"re:{pattern}",)))
    assert stored.scheme(DOWN) is not None
    assert time.monotonic() - began < 5


@pytest.mark.full
def test_patterns_of_a_model_with_many_experts() -> None:
    """Those of published files, and as many names as there are layers, for 36,000 matrices: they
    are within the limit."""
    each = [f"model.layers.{i}" for i in range(94)]
    routers = [f"{layer}.mlp.gate" for layer in each]
    experts = [
        f"{layer}.mlp.experts.{e}.{part}_proj"
        for layer in each
        for e in range(128)
        for part in ("gate", "up", "down")
    ]
    last = re.compile(r".*layers\.(9[0-3])\.mlp.*").pattern
    patterns = ("lm_head", "re:.*lm_head.*", "re:.*mlp.gate$", "re:.*visual.*", f"re:{last}")
    exact = {rf"-:^{re.escape(name)}$": {} for name in routers} | {f"-:{last}": {}}
    for config in (compressed_config(ignore=patterns), gptq_config(dynamic=exact)):
        stored = read(config, [*experts, *routers, "lm_head"])
        assert {stored.scheme(name) for name in (*routers, *experts[-4 * 384 :], "lm_head")} == {
            None
        }
        assert None not in map(stored.scheme, experts[: -4 * 384])


@pytest.mark.parametrize("form", ["model.language_model.layers.", "model.layers."])
@pytest.mark.parametrize(
    "config",
    [
        compressed_config(ignore=("re:.*down_proj$", "@0.q_proj")),
        compressed_config(ignore=("re:@[0-9]+.(down|q)_proj",)),
        gptq_config(dynamic={"-:^@0\\.down_proj$": {}, "-:^@0.q_proj": {}}),
        awq_config(modules_to_not_convert=["down_proj", "@0.q_proj"]),
    ],
)
def test_files_with_images_have_other_names(form: str, config: dict[str, Any]) -> None:
    """Their names are declared in one form and stored in others. The plan asks for declared names,
    the loader for stored ones."""
    declared = "language_model.model.layers."
    text = json.dumps(config).replace("@", form)
    layers = ("0.q_proj", "0.down_proj", "0.up_proj")
    stored = read(json.loads(text), [declared + layer for layer in layers])
    for scope in (declared, form):
        floats = [stored.scheme(scope + layer) is None for layer in layers]
        assert floats == [True, True, False]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "hqq", "nbits": 4}, "quant_method:"),
        (bnb_config(load_in_4bit=False, _load_in_4bit=False), "load_in_4bit:"),
        (bnb_config(load_in_8bit=True), "load_in_4bit:"),
        (bnb_config(bnb_4bit_quant_type="int4"), "bnb_4bit_quant_type:"),
        (bnb_config(bnb_4bit_quant_storage="float64"), "bnb_4bit_quant_storage:"),
        (bnb_config(8, llm_int8_has_fp16_weight=True), "llm_int8_has_fp16_weight:"),
        (bnb_config(llm_int8_skip_modules=["("]), "llm_int8_skip_modules:"),
        (auto_round_config(packing_format="auto_round:llm_compressor"), "packing_format:"),
        (auto_round_config(data_type="mx_fp"), "data_type:"),
        (auto_round_config(act_bits=8), "act_bits:"),
        (auto_round_config(bits=5), "bits:"),
        (auto_round_config(bits=8, packing_format="auto_round:auto_awq"), "bits:"),
        (auto_round_config(extra_config={"lm_head": 4}), "extra_config:"),
        (auto_round_config(extra_config={"(": {"bits": 8}}), "extra_config:"),
        (auto_round_config(extra_config={"lm_head": {"bits": 8, "data_type": "fp"}}), "data_type:"),
        (auto_round_config(block_name_to_quantize=3), "block_name_to_quantize:"),
        (auto_round_config(rotation_config={"hadamard_type": "hadamard"}), "rotation_config:"),
        ({"bits": 4}, "quant_method:"),
        (awq_config(version="gemv"), "version:"),
        (awq_config(bits=3), "bits:"),
        (awq_config(modules_to_not_convert="mlp"), "modules_to_not_convert:"),
        (gptq_config(bits=5), "bits:"),
        (gptq_config(bits=None), "bits:"),
        (gptq_config(group_size=0), "group_size:"),
        (gptq_config(group_size=-2), "group_size:"),
        (gptq_config(sym="yes"), "sym:"),
        (gptq_config(checkpoint_format="marlin"), "checkpoint_format:"),
        (gptq_config(is_marlin_format=True), "is_marlin_format:"),
        (gptq_config(dynamic={"+:(": {}}), "dynamic:"),
        (gptq_config(dynamic={"+:a": 3}), "dynamic:"),
        (gptq_config(modules_in_block_to_quantize=[[3]]), "modules_in_block_to_quantize:"),
        (compressed_config("marlin-24"), "format:"),
        (compressed_config("nvfp4-pack-quantized"), "type:"),
        (compressed_config("nvfp4-pack-quantized", **NVFP4, symmetric=False), "symmetric:"),
        (compressed_config("nvfp4-pack-quantized", type="float"), "strategy:"),
        (modelopt_config(quant_algo="W4A8_AWQ"), "quant_algo:"),
        (modelopt_config(group_size=32), "group_size:"),
        (compressed_config(num_bits=5), "group_0 weights num_bits:"),
        (compressed_config(strategy="token"), "weights strategy:"),
        (compressed_config(group_size=None), "weights group_size:"),
        (compressed_config(type="float"), "type:"),
        (compressed_config("float-quantized"), "type:"),
        (compressed_config("float-quantized", **FLOAT8, symmetric=False), "symmetric:"),
        (compressed_config("float-quantized", type="float"), "num_bits:"),
        (compressed_config("float-quantized", **FLOAT8, strategy="block"), "block_structure:"),
        (compressed_config("mxfp4-pack-quantized"), "type:"),
        (compressed_config("mxfp4-pack-quantized", type="float", group_size=16), "group_size:"),
        (
            compressed_config("mxfp4-pack-quantized", type="float", activations=True),
            "input_activations:",
        ),
        (compressed_config(ignore=("re:[",)), "ignore:"),
        (compressed_config(ignore=(r"re:(a)\1",)), "ignore:"),
        (compressed_config(ignore=("re:(?i)a",)), "'(?i', which is not supported"),
        (compressed_config(ignore=("re:" + "(" * 5000 + ")" * 5000,)), "is nested too deeply"),
        (gptq_config(dynamic={"+:" + "a?" * 10**6: {}}), "which takes too long to match"),
        pytest.param(
            gptq_config(dynamic={f"+:(.?){{{i},}}x": {} for i in range(4 * 10**4)}),
            "x', which takes too long to match",
            marks=pytest.mark.full,
        ),
        (compressed_config() | {"config_groups": {"a": ["Linear"]}}, "config_groups a:"),
        (compressed_config() | {"transform_config": {"a": 1}}, "transform_config:"),
        (
            compressed_config() | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config format:",
        ),
        (fp8_config(fmt="e3m4"), "fmt:"),
        (fp8_config(scale_fmt="ue4m3"), "scale_fmt:"),
        (fp8_config(weight_block_size=[128]), "weight_block_size:"),
        (fp8_config(weight_block_size=[0, 128]), "weight_block_size:"),
        (fp8_config(weight_block_size=[True, 128]), "weight_block_size:"),
    ],
)
def test_refusals(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(config)
    text = str(caught.value)
    assert text.startswith("config.json quantization_config ") and message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("stored", "inputs", "loaded"),
    [
        (StoredScheme("awq", 4, 32, symmetric=False), 96, WeightKind("int4", 32, "zeros")),
        (StoredScheme("gptq", 4, 32), 96, WeightKind("int4", 32)),
        # regrouped into smaller groups, and those that no kernel multiplies
        (StoredScheme("gptq", 4), 4096, WeightKind("int4", 128)),
        (StoredScheme("gptq", 4, 1024), 4096, WeightKind("int4", 128)),
        (StoredScheme("gptq", 4), 96, WeightKind("int4", 96)),
        (StoredScheme("gptq", 4), 160, WeightKind("int4", 32)),
        (StoredScheme("gptq", 4, 12), 96, None),
        (StoredScheme("gptq", 4, 32, ordered=True), 96, WeightKind("int4", 32, ordered=True)),
        (StoredScheme("gptq", 4, 128, ordered=True), 96, WeightKind("int4", 96)),
        (StoredScheme("gptq", 8, 32), 96, WeightKind("int8", 32)),
        (StoredScheme("gptq", 8, 32, symmetric=False), 96, None),
        (StoredScheme("int-quantized", 8, quantize_activations=True), 96,
         WeightKind("int8", activations="token")),
        (StoredScheme("int-quantized", 8, 6), 96, None),
        (StoredScheme("fp8", 8, 128, 128), 96, WeightKind("fp8")),
        (StoredScheme("fp8", 8, 128, 128, fp8_activations="group"), 96,
         WeightKind("fp8", activations="token")),
        (StoredScheme("fp8", 8, 128, 128, fp8_activations="static"), 300,
         WeightKind("fp8", 128, activations="static")),
        (StoredScheme("fp8", 8, 128, 128), 300, WeightKind("fp8", 128)),
        (StoredScheme("fp8", 8, 6, 6), 96, None),
        (StoredScheme("mxfp4-pack-quantized", 4, 32), 32, WeightKind("mxfp4", 32)),
        (StoredScheme("nvfp4-modelopt", 4, 16), 32, WeightKind("nvfp4", 16)),
        (StoredScheme("bnb-nf4", 4, 64), 128, WeightKind("nf4", 64)),
        (StoredScheme("bnb-fp4", 4, 64), 64, WeightKind("bnb_fp4", 64)),
        (StoredScheme("bnb-nf4", 4, 64), 96, None),
        (StoredScheme("bnb-int8", 8), 96, WeightKind("int8")),
    ],
)  # fmt: skip
def test_the_kind_in_memory_of_a_stored_scheme(
    stored: StoredScheme, inputs: int, loaded: WeightKind | None
) -> None:
    assert loaded_kind(stored, inputs) == loaded


def test_a_matrix_has_one_scheme() -> None:
    packed = StoredScheme("gptq", 4, 32)
    scheme = WeightKind("int4", 32)
    assert matrix_kind("none", 96, (packed, packed), head=False) == scheme
    assert matrix_kind("int8", 96, (packed, packed), head=False) == scheme
    assert matrix_kind("none", 96, (packed, None), head=False) is None
    assert matrix_kind("none", 96, (None, None), head=False) is None
    int8 = WeightKind("int8", activations="token")
    assert matrix_kind("int8", 96, (None, None), head=False) == int8
    # The same in memory, however it is stored.
    other = replace(packed, layout="pack-quantized", zeros_less_one=True)
    assert matrix_kind("none", 96, (packed, other), head=False) == scheme
    # What no kernel multiplies is stored as floats.
    zeros = StoredScheme("gptq", 8, 32, symmetric=False)
    assert matrix_kind("none", 96, (zeros, None), head=False) is None
    assert matrix_kind("int8", 96, (zeros, None), head=False) == int8


def test_adjacent_layers_that_are_stored_alike() -> None:
    one, other = StoredScheme("gptq", 4, 32), StoredScheme("gptq", 8, 32)
    assert stored_alike((None, None, None)) == [3]
    assert stored_alike((one, one, other)) == [2, 1]
    assert stored_alike((one, None, one)) == [1, 1, 1]


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "torch_dtype": "float16",
}


GPT_OSS: dict[str, Any] = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
}


def test_the_memory_plan_counts_stored_schemes() -> None:
    """By hand: four bits in groups of 32 with zero points, except Q of one layer, which is then a
    separate matrix, and the whole last layer."""
    config = awq_config(modules_to_not_convert=["layers.1.self_attn.q_proj", "layers.2"])
    spec = ModelSpec.from_config(LLAMA | {"quantization_config": config})
    assert spec.quantization is not None
    q, kv, o, up = 128 * 128, 2 * 128 * 64, 128 * 128, 2 * 128 * 256
    packed = 4 / 8 + 5 / 32  # bytes per weight
    quantised = 2 * (o + up + up // 2 + kv) + q
    saved = quantised * (2 - packed)
    assert spec.weight_bytes("bfloat16", "none") == 2 * spec.num_parameters - saved
    head = ModelSpec.from_config(LLAMA | {"quantization_config": gptq_config(lm_head=True)})
    assert head.linear_layers[-1].stored == (StoredScheme("gptq", 4, 32, zeros_less_one=True),)
    tied = LLAMA | {"quantization_config": gptq_config(lm_head=True), "tie_word_embeddings": True}
    assert ModelSpec.from_config(tied).linear_layers[-1].stored == (None,)


def test_the_plan_reserves_memory_to_load_whole_tensors() -> None:
    """Two at a time: eight bits of gate and up."""
    config = compressed_config("int-quantized", num_bits=8, strategy="channel", group_size=None)
    step = StepSize(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64)
    spec = ModelSpec.from_config(LLAMA)
    stored = ModelSpec.from_config(LLAMA | {"quantization_config": config})
    plain, quantised = (
        Footprint(model, "bfloat16", "none", "cpu", "sdpa", 16, runtime=0)
        for model in (spec, stored)
    )
    more = quantised.overhead(step) - plain.overhead(step)
    assert more == QUANTIZED_SCRATCH_BYTES + 2 * 128 * 2 * 256
    assert quantised.activations(step) >= plain.activations(step)


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        (LLAMA, 0),
        (PUBLIC["falcon-7b"], 0),  # two matrices, and neither is transposed
        (PUBLIC["gpt2"], 768 * 3072),
        (GPT_OSS, 128 * 2 * 256),  # gate and up of an expert
        (GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}, 0),
    ],
)
def test_the_plan_reserves_memory_to_load_transposed_matrices(
    config: dict[str, Any], numbers: int
) -> None:
    """Two at a time, in fp32 at most; of experts, also the rows read together for one matrix."""
    step = StepSize(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64)
    spec = ModelSpec.from_config(config)
    assert spec.transposed_numbers == numbers
    footprint = Footprint(spec, "bfloat16", "none", "cpu", "sdpa", 16, runtime=0)
    mapped = replace(footprint, mapped=footprint.weights)  # nothing is loaded
    loading = LOADING_BYTES + 8 * numbers
    loading += TRANSPOSED_LOADING_BYTES if spec.experts_of_token else 0
    if spec.quantization is not None:
        loading += QUANTIZED_SCRATCH_BYTES + 2 * 128 * 2 * 256 // 2  # four bits of gate and up
    assert footprint.overhead(step) - mapped.overhead(step) == loading
