"""The text models of Qwen2-VL, Qwen2.5-VL (Bai et al. 2025, arXiv 2502.13923) and Qwen3-VL: Qwen 2
and 3 with three positions per token (M-RoPE, Wang et al. 2024, arXiv 2409.12191, section 2.1),
which are equal for text."""

from __future__ import annotations

from dataclasses import replace

from kvik.models.llama import QWEN2
from kvik.models.qwen3 import QWEN3, QWEN3_MOE
from kvik.spec.fields import Fields
from kvik.spec.layers import LayerSpec, switched_layers

QWEN3_VL = replace(
    QWEN3,
    name="Qwen3VLForConditionalGeneration",
    model_type="qwen3_vl",
    models="Qwen3-VL, dense, text alone",
    defaults={"rope_theta": 5e5},
    gguf=None,
)


QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    name="Qwen3VLMoeForConditionalGeneration",
    model_type="qwen3_vl_moe",
    models="Qwen3-VL, with experts, text alone",
    head_dim=128,
    defaults={"num_key_value_heads": 16, "rope_theta": 5e5, "norm_topk_prob": True},
    gguf=None,
)


def text_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """The kind of rotary positions may be "mrope", which for text equals the default kind."""
    key = "rope_scaling" if fields.mapping("rope_scaling") else "rope_parameters"
    rope = dict(fields.mapping(key) or {})
    kinds = {name for name in ("type", "rope_type") if rope.get(name) == "mrope"}
    plain = {key: rope | dict.fromkeys(kinds, "default")}
    return switched_layers(fields.changed(plain), layers, positions)


QWEN2_5_VL = replace(
    QWEN2,
    name="Qwen2_5_VLForConditionalGeneration",
    model_type="qwen2_5_vl",
    models="Qwen2.5-VL, text alone",
    layers=text_layers,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_window_layers": 80,
    },
    eos_token_ids=(151_645,),
    gguf=None,
)
QWEN2_VL = replace(
    QWEN2_5_VL,
    name="Qwen2VLForConditionalGeneration",
    model_type="qwen2_vl",
    models="Qwen2-VL, text alone",
)
