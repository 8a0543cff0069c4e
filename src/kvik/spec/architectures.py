"""The architectures kvik runs: what each name implies beyond the sizes in its config.json.

One row here, one line in `models/registry.py` and one file in `models/` make an architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum


class WindowRule(Enum):
    """Which layers have a sliding window."""

    NEVER = "never"
    ALL = "all"  # every layer, unless `sliding_window` is null
    BY_LAYER = "by_layer"  # as `layer_types` says, else from `max_window_layers` on


@dataclass(frozen=True, slots=True)
class MatrixNames:
    """The linear layers that a matrix is made of, and the vectors of tokens, by their names in
    checkpoints; {} is the block.

    `models/` declares the same ones; the memory plan reads them here, where it needs no torch.
    """

    qkv: tuple[str, ...]
    o: tuple[str, ...]
    up: tuple[str, ...]
    down: tuple[str, ...]
    embedding: str
    head: str = "lm_head"

    def linear(self, num_blocks: int) -> Iterator[str]:
        """The names of all linear layers."""
        for block in range(num_blocks):
            for name in (*self.qkv, *self.o, *self.up, *self.down):
                yield name.format(block)
        yield self.head


_LLAMA = "model.layers.{}."
LLAMA_MATRICES = MatrixNames(
    qkv=tuple(f"{_LLAMA}self_attn.{x}_proj" for x in "qkv"),
    o=(f"{_LLAMA}self_attn.o_proj",),
    up=(f"{_LLAMA}mlp.gate_proj", f"{_LLAMA}mlp.up_proj"),
    down=(f"{_LLAMA}mlp.down_proj",),
    embedding="model.embed_tokens",
)
_GPT2 = "transformer.h.{}."
GPT2_MATRICES = MatrixNames(
    qkv=(f"{_GPT2}attn.c_attn",),
    o=(f"{_GPT2}attn.c_proj",),
    up=(f"{_GPT2}mlp.c_fc",),
    down=(f"{_GPT2}mlp.c_proj",),
    embedding="transformer.wte",
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """Attributes:
    model_type: what config.json calls the family, used when it names no architecture.
    qkv_bias, o_bias, mlp_bias: a fact, or the config.json key that decides (false if absent).
    activations: the `hidden_act` values its MLP can have; the first is the default.
    rms_norm: RMSNorm, else LayerNorm with biases.
    gated_mlp: down(act(gate(x)) * up(x)), else down(act(up(x))).
    rotary: rotary positions, else learned ones.
    matrices: names of its linear layers.
    keys: config.json's own names of keys that usually have another.
    fixed: keys whose other values change the arithmetic and are refused.
    """

    model_type: str
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    window: WindowRule = WindowRule.NEVER
    activations: tuple[str, ...] = ("silu", "swish")
    rms_norm: bool = True
    gated_mlp: bool = True
    rotary: bool = True
    tied: bool = False  # `tie_word_embeddings` when config.json does not say
    head_dim: int | None = None  # when config.json does not say; None: hidden / heads
    eos_token_ids: tuple[int, ...] = ()  # when config.json does not say
    matrices: MatrixNames = LLAMA_MATRICES
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, bool] = field(default_factory=dict)


ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        model_type="llama",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias="mlp_bias",
        eos_token_ids=(2,),
    ),
    "MistralForCausalLM": Architecture(
        model_type="mistral", window=WindowRule.ALL, eos_token_ids=(2,)
    ),
    "Qwen2ForCausalLM": Architecture(model_type="qwen2", qkv_bias=True, window=WindowRule.BY_LAYER),
    "Qwen3ForCausalLM": Architecture(
        model_type="qwen3",
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        qk_norm=True,
        window=WindowRule.BY_LAYER,
        head_dim=128,
    ),
    "GPT2LMHeadModel": Architecture(
        model_type="gpt2",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        activations=("gelu_new", "gelu_pytorch_tanh"),
        rms_norm=False,
        gated_mlp=False,
        rotary=False,
        tied=True,
        eos_token_ids=(50256,),
        matrices=GPT2_MATRICES,
        keys={
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        fixed={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
}
