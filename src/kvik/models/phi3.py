"""Phi-3 and Phi-4 (Abdin et al. 2024): a Llama whose checkpoints store q, k and v as one matrix,
and gate and up as another. LongRoPE stretches the positions of its long variants."""

from __future__ import annotations

from functools import partial

from kvik.models.llama import Llama, LlamaAttention, LlamaLayer, feed_forward
from kvik.spec.declare import Architecture
from kvik.spec.fields import Fields
from kvik.spec.layers import LayerSpec, read_window
from kvik.spec.rope import read_rope

Phi3Layer = partial(
    LlamaLayer,
    attention=partial(LlamaAttention, qkv=("qkv_proj",)),
    feed=partial(feed_forward, gate_up=("gate_up_proj",)),
)


def phi3_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Every layer has the window of the file, if it has one."""
    window = read_window(fields) if "sliding_window" in fields else None
    return (LayerSpec(window, read_rope(fields, positions, fraction=1.0)),) * layers


PHI3 = Architecture(
    "Phi3ForCausalLM",
    "phi3",
    "Phi-3 and 3.5 mini, Phi-4 and 4-mini",
    partial(Llama, make_layer=Phi3Layer),
    layers=phi3_layers,
    eos_token_ids=(32000,),
    gguf="phi3",
    gguf_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
)
