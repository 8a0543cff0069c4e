"""Falcon-H1 (TII 2025, arXiv 2507.22448): in each layer attention and Mamba-2 side by side, then an
MLP, with a constant factor at nearly every part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvik.errors import ModelError
from kvik.models import bamba, mamba2
from kvik.models.decoder import Decoder, GroupedQueryAttention, feed_forward
from kvik.spec.architecture import Architecture
from kvik.spec.declare import LayerBuilder
from kvik.spec.fields import MAX_HEAD_DIM, MAX_HEADS, MAX_WIDTH, Fields
from kvik.spec.layers import LayerSpec
from kvik.spec.model import ModelFacts, ModelScales
from kvik.spec.network import ForwardContext, Sum
from kvik.spec.rope import read_rope

if TYPE_CHECKING:
    from torch import Tensor

MLP_FACTORS, STATE_FACTORS = "mlp_multipliers", "ssm_multipliers"
SMALLEST, LARGEST = 1e-6, 1e6  # of a factor


class FalconH1Layer:
    """Attention and Mamba-2 read the same normalised residual stream and add to it, then an MLP.

    The factor of the MLP's gate is in the gain of the norm before it, and so multiplies `up` too;
    the factor of its output makes up for that.
    """

    def __init__(self, spec: ModelFacts, builder: LayerBuilder, layer: int) -> None:
        scales, state = spec.scales, spec.layers[layer].state
        assert state is not None
        norm = partial(builder.rms_norm, dim=spec.hidden_size, eps=spec.norm_eps)
        self.norm = norm("input_layernorm", before="qkv")
        self.fed_norm = norm("pre_ff_layernorm", before="gate_up", scale=scales.gate)
        self.attention = GroupedQueryAttention(spec, builder, layer)
        self.mixer = mamba2.Mamba2(
            spec, builder.at("mamba"), layer, state, scales.state_in, NORMED[spec.wiring]
        )
        self.mlp = feed_forward(spec, builder, layer, scope="feed_forward")
        factors = scales.attention_out, scales.state_out, scales.down / scales.gate
        self.sums: list[Sum] = [builder.scaled_sum(factor) for factor in factors]

    def __call__(self, x: Tensor, rotation: Tensor | None, ctx: ForwardContext) -> Tensor:
        """Take the residual stream x [tokens, hidden] one layer further."""
        normed, (add_attended, add_mixed, add_fed) = self.norm(x), self.sums
        x = add_mixed(self.mixer(normed, None, rotation, ctx), x)
        x = add_attended(self.attention(normed, None, rotation, ctx), x)
        return add_fed(self.mlp(self.fed_norm(x), ctx), x)


AFTER, BEFORE, UNNORMED = "norm after gate", "norm before gate", "no norm"
NORMED: dict[str, mamba2.Normed] = {AFTER: "after", BEFORE: "before", UNNORMED: ""}


def norm_of_outputs(fields: Fields) -> str:
    """Return how the outputs of Mamba-2 are normalised."""
    first = fields.boolean("mamba_norm_before_gate", True)
    if not fields.boolean("mamba_rms_norm", False):
        return UNNORMED
    return BEFORE if first else AFTER


def falcon_h1_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Every layer attends to all keys and keeps a state; its channels are `mamba_d_ssm`, or if that
    is null a multiple of the hidden size."""
    bamba.check_limits(fields)
    if fields.is_null("mamba_d_ssm"):
        hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
        inner = hidden * fields.integer("mamba_expand", 1, 64, 2)
    else:
        inner = fields.integer("mamba_d_ssm", 1, MAX_WIDTH, 1024)
    state = mamba2.mamba2_state(fields, bamba.KEYS, "mamba_conv_bias", inner)
    return (LayerSpec(None, read_rope(fields, positions), state=state, beside=True),) * layers


def falcon_h1_scales(fields: Fields) -> ModelScales:
    """Return the factors. Those of keys and of the inputs of attention are in the scale of scores
    and in the factor of its outputs."""

    def factor(key: str) -> float:
        return fields.number(key, SMALLEST, LARGEST, 1.0)

    def factors(key: str, count: int) -> tuple[float, ...]:
        values = fields.numbers(key, SMALLEST, LARGEST) if key in fields else (1.0,) * count
        if len(values) != count:
            raise fields.error(key, f"must have {count} numbers, not {len(values)}")
        return values

    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    heads = fields.integer("num_attention_heads", 1, MAX_HEADS)
    size = fields.integer("head_dim", 1, MAX_HEAD_DIM, max(1, hidden // heads))
    entering, into_state = factor("attention_in_multiplier"), factor("ssm_in_multiplier")
    if entering != 1.0 and fields.boolean("attention_bias", False):
        reason = f"must be 1 with attention_bias, not {entering:g}"
        raise fields.error("attention_in_multiplier", reason)
    gate, down = factors(MLP_FACTORS, 2)
    return ModelScales(
        embedding=factor("embedding_multiplier"),
        attention=factor("key_multiplier") * entering**2 * size**-0.5,
        logits=factor("lm_head_multiplier"),
        attention_out=factor("attention_out_multiplier") * entering,
        state_out=factor("ssm_out_multiplier"),
        gate=gate,
        down=down,
        state_in=tuple(value * into_state for value in factors(STATE_FACTORS, 5)),
    )


def factors_in_files(spec: ModelFacts) -> dict[str, list[tuple[int, float]]]:
    """Return the factors that GGUF files have in the weights."""
    scales, state, hidden = spec.scales, spec.states[0], spec.hidden_size
    assert scales.attention is not None
    entering = scales.state_in or (1.0,) * 5
    keys = spec.num_kv_heads * spec.head_dim
    return {
        "model.embed_tokens.weight": [(spec.vocab_size, scales.embedding)],
        "lm_head.weight": [(spec.vocab_size, scales.logits)],
        "self_attn.k_proj.weight": [(keys, scales.attention * spec.head_dim**0.5)],
        "self_attn.o_proj.weight": [(hidden, scales.attention_out)],
        "mamba.in_proj.weight": [*zip(mamba2.input_widths(state), entering, strict=True)],
        "mamba.out_proj.weight": [(hidden, scales.state_out)],
        "feed_forward.gate_proj.weight": [(spec.intermediate_size, scales.gate)],
        "feed_forward.down_proj.weight": [(hidden, scales.down)],
    }


def check_for_files(spec: ModelFacts) -> dict[str, float | Sequence[int]]:
    """Raise `ModelError` if GGUF files cannot have the model."""
    if spec.wiring == BEFORE:
        raise ModelError("mamba_norm_before_gate", "must be false for GGUF")
    if spec.tie_word_embeddings and spec.scales.logits != spec.scales.embedding:
        raise ModelError("lm_head_multiplier", "must be embedding_multiplier for GGUF, if tied")
    return {}


FALCON_H1 = Architecture(
    "FalconH1ForCausalLM",
    "falcon_h1",
    "Falcon-H1",
    partial(
        Decoder,
        make_layer=FalconH1Layer,
        names=("embed_tokens", "layers", "final_layernorm", "lm_head"),
    ),
    layers=falcon_h1_layers,
    qkv_bias="attention_bias",
    o_bias="attention_bias",
    scales=falcon_h1_scales,
    wiring=norm_of_outputs,
    eos_token_ids=(2,),
    keys=bamba.KEYS,
    fixed={**bamba.FIXED, "mlp_bias": False, "projectors_bias": False},
    gguf="falcon-h1",
    gguf_names={
        "output_norm": "model.final_layernorm",
        "ffn_norm": "pre_ff_layernorm",  # llama.cpp writes the other one
        "ffn_norm.": "pre_ff_layernorm.weight",
        **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        **mamba2.gguf_mamba2("mamba"),
    },
    gguf_shapes=partial(mamba2.gguf_mamba2_shapes, scope="mamba"),
    gguf_factors=factors_in_files,
    gguf_present={"ssm_norm": "mamba_rms_norm"},
    gguf_extra=check_for_files,
    gguf_implied=lambda fields: {
        "mamba_d_ssm": mamba2.mamba2_state(fields, bamba.KEYS, "mamba_conv_bias").values,
        "mamba_norm_before_gate": False,
    },
    defaults={**bamba.BAMBA.defaults, "max_position_embeddings": 8192},
)
