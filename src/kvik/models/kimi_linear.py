"""Kimi Linear (Kimi team 2025, arXiv 2510.26692): three layers with a delta net whose states forget
each channel of the keys by its own gate, for each layer with latent attention without positions;
and routed experts after the first layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from kvik.models.decoder import QKV, Decoder, PreNormLayer, feed_forward, mixer
from kvik.models.deepseek import DeepseekAttention
from kvik.spec.architecture import Architecture
from kvik.spec.declare import ExpertNames, LayerBuilder
from kvik.spec.experts import ExpertsSpec, corrected_router, listed_layers, read_experts
from kvik.spec.fields import MAX_HEADS, MAX_WIDTH, Fields
from kvik.spec.kv import MAX_TAPS, StateSpec
from kvik.spec.layers import FULL, LINEAR, LayerSpec, layer_types, layers_with_states, read_latent
from kvik.spec.model import ModelFacts
from kvik.spec.network import FeedForward, ForwardContext

if TYPE_CHECKING:
    from torch import Tensor

MLP, EXPERTS = "mlp", "block_sparse_moe"
NAMES = ExpertNames(gate_up=("experts.{}.w1", "experts.{}.w3"), down="experts.{}.w2")
DELTA = "linear_attn_config"  # key of the sizes of delta nets in published files
# Keys of other families -> their names in this one.
KEYS = {
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "scoring_func": "moe_router_activation_func",
}


class NarrowGates:
    """Computes what a delta net reads; the gates of channels come from narrow vectors."""

    def __init__(self, builder: LayerBuilder, hidden: int, state: StateSpec) -> None:
        heads, dim, width = state.value_heads, state.key_dim, state.values
        self.parts = dim, dim, heads
        linear = partial(builder.linear, bias=False)
        self.qkv = linear(QKV, hidden, (width,) * 3, role="qkv")
        narrow = ("f_a_proj", "g_a_proj", "b_proj")
        self.gates = linear(narrow, hidden, self.parts, role="gates")
        self.forget = linear("f_b_proj", dim, width, role="wide_gates")
        self.output_gate = linear("g_b_proj", dim, width, role="wide_gates")
        self.join = builder.joined()

    def __call__(self, x: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """x [tokens, hidden] -> queries, keys and values [tokens, 3 * width], gates [tokens, heads
        * (1 + dim)], and the gates of outputs [tokens, width]."""
        forget, gate, beta = self.gates(x, ctx).split_with_sizes(self.parts, 1)
        gates = self.join(beta, self.forget(forget, ctx))
        return self.qkv(x, ctx), gates, self.output_gate(gate, ctx)


# x [tokens, hidden] -> what `NarrowGates` returns
DeltaInputs: TypeAlias = "Callable[[Tensor, ForwardContext], tuple[Tensor, Tensor, Tensor]]"


class KimiDeltaNet:
    """Kimi Delta Attention (section 3): a short convolution, then the gated delta rule, with a
    decay for each channel of the keys; the output of its heads is normalised and gated.

    Args:
        make_inputs: makes what computes its inputs.
        o: name of the output projection.
        decay_shape: of the rates in checkpoints; (): [heads].
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        state: StateSpec,
        make_inputs: Callable[[LayerBuilder, int, StateSpec], DeltaInputs] = NarrowGates,
        o: str = "o_proj",
        decay_shape: tuple[int, ...] = (),
    ) -> None:
        dim, width = state.key_dim, state.values
        self.heads = state.value_heads, dim
        self.inputs = make_inputs(builder, spec.hidden_size, state)
        parts = dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), width)
        self.conv = builder.causal_conv("conv1d", layer, state, silu=True, parts=parts)
        self.delta = builder.recurrence("A_log", "dt_bias", layer, state, decay_shape=decay_shape)
        self.norm = builder.rms_norm("o_norm", dim, spec.norm_eps, before="o")
        self.gated = builder.gated("sigmoid")
        self.o = builder.linear(o, width, spec.hidden_size, bias=False, role="o")

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]."""
        qkv, gates, gate = self.inputs(x, ctx)
        values = self.delta(self.conv(qkv, ctx), gates, ctx)
        normed = self.norm(values.view(-1, *self.heads)).flatten(1)
        return self.o(self.gated(normed, gate), ctx, residual)


def kimi_delta_net(
    spec: ModelFacts, builder: LayerBuilder, layer: int, state: StateSpec
) -> KimiDeltaNet:
    return KimiDeltaNet(spec, builder, layer, state, decay_shape=(1, 1, state.value_heads, 1))


def feed(spec: ModelFacts, builder: LayerBuilder, layer: int) -> FeedForward:
    """Return the experts or the MLP of a layer; transformers writes both in one scope."""
    scopes = (EXPERTS,) if spec.layers[layer].experts is not None else (MLP, EXPERTS)
    return feed_forward(spec, builder.at(*scopes), layer, scope="", names=NAMES)


def read_delta(fields: Fields, heads: int, bound: float = 0.0) -> StateSpec:
    """Return the state of delta nets, by `linear_attn_config` or the keys of transformers.

    Args:
        heads: if the file has none. bound: see `StateSpec`.
    """
    delta = fields.inside(DELTA)

    def size(key: str, other: str, low: int, high: int, default: int) -> int:
        return delta.integer(key, low, high, fields.integer(other, low, high, default))

    heads = size("num_heads", "linear_num_heads", 1, MAX_HEADS, heads)
    dim = size("head_dim", "linear_head_dim", 1, MAX_WIDTH, 128)
    taps = size("short_conv_kernel_size", "linear_conv_kernel_dim", 2, MAX_TAPS, 4)
    return StateSpec.recurrent(heads, heads, dim, dim, taps, gates=1 + dim, bound=bound)


def kimi_layers(fields: Fields, layers: int, positions: int) -> tuple[LayerSpec, ...]:
    """Delta nets and latent attention, by `layer_types` or by the lists of published files."""
    delta, state = fields.inside(DELTA), read_delta(fields, 32)
    key = "full_attn_layers"
    if "layer_types" not in fields and key in delta:
        full = listed_layers(delta, key)  # from 1
        if not full or full - {*range(1, layers + 1)}:
            raise delta.error(key, f"must hold numbers from 1 to {layers}, not {sorted(full)}")
        types = tuple(FULL if i + 1 in full else LINEAR for i in range(layers))
    else:
        types = layer_types(fields, layers, 4, LINEAR)
    attends, keeps = LayerSpec(latent=read_latent(fields)), LayerSpec(state=state)
    return layers_with_states(fields, attends, LINEAR, keeps, types)


def kimi_experts(
    fields: Fields, layers: int, first_dense: int = 1
) -> tuple[ExpertsSpec | None, ...]:
    """Read the experts, whose keys have other names than in other families.

    Args:
        first_dense: as in `read_experts`.
    """
    return read_experts(
        fields.named(KEYS),
        layers,
        router=corrected_router,
        shared="n_shared_experts",
        first_dense=first_dense,
    )


KimiLayer = partial(
    PreNormLayer,
    attention=partial(mixer, attention=DeepseekAttention, keeper=kimi_delta_net, scope="self_attn"),
    feed=feed,
)


KIMI_LINEAR = Architecture(
    "KimiLinearForCausalLM",
    "kimi_linear",
    "Kimi Linear",
    partial(Decoder, make_layer=KimiLayer),
    layers=kimi_layers,
    experts=kimi_experts,
    fixed={"mla_use_nope": True},
    keys={"max_position_embeddings": "model_max_length"},
    eos_token_ids=(163_586,),
    defaults={
        "vocab_size": 163_840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "model_max_length": 1_048_576,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": None,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.446,
    },
)
