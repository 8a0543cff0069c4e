"""gpt-oss (OpenAI 2025, arXiv 2508.10925): routed experts stored in MXFP4, a short window in every
second layer, and a learned sink in each head."""

from __future__ import annotations

from functools import partial

from kvik.models.decoder import Decoder, GroupedQueryAttention, PreNormLayer
from kvik.spec.architecture import SEPARATE, Architecture, FilePart, separate_wiring
from kvik.spec.declare import ExpertNames, LayerBuilder
from kvik.spec.experts import normalised_router, read_experts
from kvik.spec.fields import Fields
from kvik.spec.layers import LayerSpec, mixed_layers
from kvik.spec.model import ModelFacts
from kvik.spec.network import FeedForward

NAMES = ExpertNames(router="router", gate_up=("experts.{}.gate_up_proj",), mixed=True)
SEPARATE_NAMES = ExpertNames(router="router")
# The only supported constants of the experts' activation, "clamped_swiglu".
SWIGLU = {"swiglu_limit": 7.0, "swiglu_alpha": 1.702}


def experts(spec: ModelFacts, builder: LayerBuilder, layer: int) -> FeedForward:
    of_layer = spec.layers[layer].experts
    assert of_layer is not None
    names = SEPARATE_NAMES if spec.wiring == SEPARATE else NAMES
    return builder.at("mlp").experts(
        spec.hidden_size, of_layer, names, bias=True, activation="clamped_swiglu"
    )


def check_swiglu(fields: Fields) -> None:
    """Check the constants of "clamped_swiglu"."""
    for key, value in SWIGLU.items():
        if fields.number(key, 0.0, 1e6, value) != value:
            raise fields.error(key, f"must be {value}")


def gpt_oss_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    check_swiglu(fields)
    return mixed_layers(fields, layers, positions, every=2)


def file_parts(spec: ModelFacts) -> dict[str, tuple[FilePart, ...]]:
    """Return the parts that files store separately: gate and up rows are interleaved in
    checkpoints."""
    inner = max(layer.experts.inner for layer in spec.layers if layer.experts)
    gate, up, down = (*SEPARATE_NAMES.gate_up, SEPARATE_NAMES.down)
    return {
        f"mlp.{NAMES.gate_up[0]}": (
            FilePart(f"mlp.{gate}", range(0, 2 * inner, 2), transposed=True),
            FilePart(f"mlp.{up}", range(1, 2 * inner, 2), transposed=True),
        ),
        f"mlp.{NAMES.down}": (FilePart(f"mlp.{down}", transposed=True),),
    }


def gpt_oss_implied(fields: Fields) -> dict[str, object]:
    """Return the facts of position scaling that no file gives."""
    scaling = fields.mapping("rope_scaling")
    if scaling is None:
        return {SEPARATE: True, "rope_parameters": None}
    return {SEPARATE: True, "rope_scaling": {**scaling, "truncate": False}}


GPT_OSS = Architecture(
    "GptOssForCausalLM",
    "gpt_oss",
    "gpt-oss",
    partial(
        Decoder,
        make_layer=partial(
            PreNormLayer, attention=partial(GroupedQueryAttention, sinks=True), feed=experts
        ),
    ),
    layers=gpt_oss_layers,
    experts=partial(read_experts, inner="intermediate_size", router=normalised_router),
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    defaults={
        "attention_bias": True,
        "sliding_window": 128,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    },
    wiring=separate_wiring,
    head_dim=64,
    eos_token_ids=(200_002, 199_999, 200_012),
    gguf="gpt-oss",
    gguf_names={
        "attn_sinks.weight": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    gguf_parts=file_parts,
    gguf_implied=gpt_oss_implied,
)
