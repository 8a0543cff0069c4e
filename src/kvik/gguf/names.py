"""Names of tensors: those of GGUF files and those of Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NUMBER, _LAST = r"(0|[1-9][0-9]{0,5})", r"(weight|bias)"
LAYER = re.compile(rf"blk\.{_NUMBER}\.(\w+)\.{_LAST}")
HF_LAYER = re.compile(rf"model\.layers\.{_NUMBER}\.(.+)\.{_LAST}")

ROPE_FACTORS = "rope_freqs.weight"
HEAD = "output.weight"
EMBEDDING = "token_embd.weight"

_OUTER: Mapping[str, str] = {
    EMBEDDING: "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
_INNER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_BACK = {hf: name for name, hf in _OUTER.items()}
_INNER_BACK = {hf: name for name, hf in _INNER.items()}


def hf_name(name: str) -> str | None:
    """The checkpoint name of a tensor of llama, qwen2 or qwen3; None if there is none."""
    layer = LAYER.fullmatch(name)
    if layer is None:
        return _OUTER.get(name)
    inner = _INNER.get(layer[2])
    return f"model.layers.{layer[1]}.{inner}.{layer[3]}" if inner else None


def gguf_name(name: str) -> str | None:
    """The other way: the GGUF name of a checkpoint's tensor; None if there is none."""
    layer = HF_LAYER.fullmatch(name)
    if layer is None:
        return _OUTER_BACK.get(name)
    inner = _INNER_BACK.get(layer[2])
    return f"blk.{layer[1]}.{inner}.{layer[3]}" if inner else None


def has_rotary_rows(name: str) -> bool:
    """Whether the rows of a GGUF tensor are those of queries or keys, which files of llama models
    hold in another order: the two numbers that are rotated together are neighbours there and half
    a head apart in checkpoints."""
    layer = LAYER.fullmatch(name)
    return layer is not None and layer[2] in ("attn_q", "attn_k")
