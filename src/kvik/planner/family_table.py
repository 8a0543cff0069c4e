"""The decoder families whose shape is known though this engine does not run them.

A row says what a family has beyond the sizes in its config.json, with the defaults transformers
gives absent keys. `decoder.py` makes the shape of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvik.spec.fields import Fields

LARGEST = 1 << 20  # of any width


@dataclass(frozen=True, slots=True)
class ExpertFields:
    """Routed experts. How many layers have them `layers.py` reads from config.json.

    Attributes:
        total, active, width: keys of experts in a layer, of those a token uses, of their width.
        shared: key of how many experts every token uses.
    """

    total: str = "num_experts"
    active: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"
    shared: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """Attributes:
    model_types: what config.json calls the family, used when it names no architecture.
    keys: config.json's own names of keys that usually have another.
    defaults: values of keys that config.json may leave out.
    computed: keys whose value follows from others.
    qkv_bias, o_bias, mlp_bias: a fact, or the key that decides.
    gated_mlp: down(act(gate(x)) * up(x)), else down(act(up(x))).
    norms: of the hidden size in a layer.
    norm_vectors: weights, and biases, of a norm: 1, 2, or 0 for a norm without any.
    embedding_norm: a norm behind the embedding.
    positions: learned positions beyond `max_position_embeddings`; None: rotary or no table.
    windows: layers have a sliding window where config.json says so.
    """

    model_types: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, int] = field(default_factory=dict)
    computed: Mapping[str, Callable[[Fields], int]] = field(default_factory=dict)
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    gated_mlp: bool = True
    norms: int = 2
    norm_vectors: int = 1
    embedding_norm: bool = False
    positions: int | None = None
    windows: bool = False
    tied: bool = False
    experts: ExpertFields | None = None


def _integer(fields: Fields, key: str, default: int | None = None) -> int:
    return fields.integer(key, 1, LARGEST, default)


def _four_times(key: str, hidden: str) -> Callable[[Fields], int]:
    """The width of an MLP that is four times the hidden size when config.json leaves it out."""
    return lambda fields: _integer(fields, key, 4 * _integer(fields, hidden))


def _falcon_kv_heads(fields: Fields) -> int:
    heads = _integer(fields, "num_attention_heads")
    if fields.boolean("new_decoder_architecture", False):
        return _integer(fields, "num_kv_heads", heads)
    return 1 if fields.boolean("multi_query", True) else heads


def _falcon_norms(fields: Fields) -> int:
    if fields.boolean("new_decoder_architecture", False):
        return _integer(fields, "num_ln_in_parallel_attn", 2)
    return 1 if fields.boolean("parallel_attn", True) else 2


def _bigcode_kv_heads(fields: Fields) -> int:
    return 1 if fields.boolean("multi_query", True) else _integer(fields, "n_head")


def _qwen_width(fields: Fields) -> int:
    return fields.integer("intermediate_size", 2, LARGEST) // 2  # of gate and up together


_GPT_KEYS: Mapping[str, str] = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}

# What a decoder is taken for that no row names.
LLAMA_LIKE = Family(
    qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias", windows=True
)

FAMILIES: Mapping[str, Family] = {
    # Variants of it that do not run.
    "FalconForCausalLM": Family(
        ("falcon", "RefinedWeb", "RefinedWebModel"),
        keys={"num_key_value_heads": "num_kv_heads"},
        defaults={"max_position_embeddings": 2048},
        computed={
            "num_key_value_heads": _falcon_kv_heads,
            "intermediate_size": _four_times("ffn_hidden_size", "hidden_size"),
            "norms": _falcon_norms,
        },
        qkv_bias="bias",
        o_bias="bias",
        mlp_bias="bias",
        gated_mlp=False,
        norm_vectors=2,
        tied=True,
    ),
    # dense, as Llama with small differences
    "InternLMForCausalLM": Family(
        ("internlm",), defaults={"bias": True}, qkv_bias="bias", o_bias="bias"
    ),
    "InternLM2ForCausalLM": Family(("internlm2",), qkv_bias="bias", o_bias="bias"),
    "QWenLMHeadModel": Family(
        ("qwen",),
        keys={"max_position_embeddings": "seq_length"},
        computed={"intermediate_size": _qwen_width},
        qkv_bias=True,
    ),
    "BaichuanForCausalLM": Family(("baichuan",), defaults={"max_position_embeddings": 4096}),
    "OlmoForCausalLM": Family(
        ("olmo",), qkv_bias="attention_bias", o_bias="attention_bias", norm_vectors=0
    ),
    # dense, of GPT's kind: LayerNorm, two matrices in the MLP
    "GPTBigCodeForCausalLM": Family(
        ("gpt_bigcode",),
        keys=_GPT_KEYS,
        computed={
            "num_key_value_heads": _bigcode_kv_heads,
            "intermediate_size": _four_times("n_inner", "n_embd"),
        },
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        norm_vectors=2,
        positions=0,
        tied=True,
    ),
    "BloomForCausalLM": Family(
        ("bloom",),
        keys={
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "seq_length",
        },
        computed={"intermediate_size": lambda fields: 4 * _integer(fields, "hidden_size")},
        defaults={"seq_length": 2048},
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        norm_vectors=2,
        embedding_norm=True,
        tied=True,
    ),
}
