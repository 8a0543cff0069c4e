"""Maps the names of tensors between GGUF files and Hugging Face checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvik.spec.architecture import gguf_experts

_NUMBER, _LAST = r"(0|[1-9][0-9]{0,5})", r"(weight|bias)"
_BLOCK = re.compile(rf"blk\.{_NUMBER}\.(.+)")
LAYER = re.compile(rf"blk\.{_NUMBER}\.([\w.]+)\.{_LAST}")

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
HEAD = "output.weight"
EMBEDDING, POSITIONS = "token_embd.weight", "position_embd.weight"
TOKEN_INPUTS, INPUTS_PROJECTION = "per_layer_token_embd.weight", "per_layer_model_proj.weight"

_BLOCKS = "blk"
# Layers outside blocks.
OUTER: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "",  # only in architectures that give its name
    "position_embd": "",
    "token_types": "",
    "cls": "",
    "cls.output": "",
    "per_layer_token_embd": "",
    "per_layer_model_proj": "",
    "per_layer_proj_norm": "",
    "output_norm": "model.norm",
    "output": "lm_head",
    _BLOCKS: "model.layers",
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
    **gguf_experts("mlp"),
}
_WHOLE = (".weight", ".bias", ".")  # suffixes of names that denote one tensor, not a layer


def hf_name(name: str, names: Mapping[str, str]) -> str | None:
    """Return the checkpoint name of a tensor; None if there is none.

    In the name of a tensor that stacks all experts of a layer, or all heads, {} is the number.

    Args:
        names: `gguf_names` of the architecture.
    """
    outer, inner = {**OUTER, **names}, {**_INNER, **names}
    block = _BLOCK.fullmatch(name)
    layer, _, last = (name if block is None else block[2]).rpartition(".")
    is_parameter = last in ("weight", "bias") and layer != _BLOCKS
    if block is None:
        stem = outer[layer] if is_parameter and layer in OUTER else ""
        return f"{stem}.{last}" if stem else None
    inner_name = inner.get(block[2] if is_parameter else f"{block[2]}.")
    if inner_name is None and is_parameter and layer not in OUTER and layer in inner:
        inner_name = f"{inner[layer]}.{last}"
    return inner_name and f"{outer[_BLOCKS]}.{block[1]}.{inner_name}"


def gguf_name(name: str, names: Mapping[str, str]) -> str | None:
    """Return the GGUF name of a checkpoint's tensor; None if there is none.

    The experts of a layer share one name, and so do heads.

    Args:
        names: `gguf_names` of the architecture.
    """
    outer, inner = {**OUTER, **names}, {**_INNER, **names}
    block = re.fullmatch(rf"{re.escape(outer[_BLOCKS])}\.{_NUMBER}\.(.+)", name)
    layer, _, last = (name if block is None else block[2]).rpartition(".")
    is_parameter = layer and last in ("weight", "bias")
    if block is None:
        stem = next((key for key in OUTER if outer[key] == layer), _BLOCKS)
        return f"{stem}.{last}" if is_parameter and stem != _BLOCKS else None
    back = {hf: key for key, hf in inner.items() if key not in OUTER}
    inner_name = back.get(block[2], "")
    if inner_name.endswith(_WHOLE):
        return f"{_BLOCKS}.{block[1]}.{inner_name.removesuffix('.')}"
    scope = back.get(layer) or back.get(numberless(layer)) or "."
    good = is_parameter and not scope.endswith(_WHOLE)
    return f"{_BLOCKS}.{block[1]}.{scope}.{last}" if good else None


def numberless(name: str) -> str:
    """Return the name of an expert's layer with {} in place of its number."""
    return re.sub(rf"\.{_NUMBER}(?=\.|$)", ".{}", name)


def block_of(name: str) -> int | None:
    """Return the number of the block that a tensor of a file belongs to; None: it is in none."""
    match = _BLOCK.fullmatch(name)
    return None if match is None else int(match[1])
