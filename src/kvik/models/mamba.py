"""Mamba (Gu and Dao 2023, arXiv 2312.00752): layers that keep a state in which each number decays
at its own rate, and the models of such layers alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvik.models.decoder import Decoder
from kvik.models.pure_mamba2 import MambaLayer
from kvik.spec.architecture import Architecture
from kvik.spec.declare import LayerBuilder
from kvik.spec.fields import MAX_WIDTH, Fields
from kvik.spec.kv import MAX_TAPS, StateSpec
from kvik.spec.layers import LayerSpec
from kvik.spec.model import ModelFacts
from kvik.spec.network import ForwardContext, Norm

if TYPE_CHECKING:
    from torch import Tensor


class Mamba:
    """A short convolution, then a state space for each channel; its output is gated. Steps, keys
    and queries are computed from the convolved values.

    Args:
        norms: names of the norms of the vectors that steps are computed from, of keys and of
            queries (dt, B and C in the paper), if `StateSpec.eps` says that they are normalised;
            (): norms without gains.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        state: StateSpec,
        norms: tuple[str, ...] = (),
    ) -> None:
        hidden, inner, size = spec.hidden_size, state.values, state.key_dim
        self.widths, self.parts = (inner, inner), (state.rank, size, size)
        self.inputs = builder.linear("in_proj", hidden, 2 * inner, bias=spec.qkv_bias, role="qkv")
        self.conv = builder.causal_conv("conv1d", layer, state, silu=True)
        narrow = partial(builder.linear, bias=False, role="wide_gates")
        self.narrow = narrow("x_proj", inner, sum(self.parts))
        self.norms: list[Norm] = []
        if state.eps is not None:
            eps = state.eps
            self.norms = [
                builder.rms_norm(norms[i], width, eps) if norms else builder.plain_norm(width, eps)
                for i, width in enumerate(self.parts)
            ]
        self.steps = narrow("dt_proj", state.rank, inner)
        self.joined = builder.joined()
        self.space = builder.recurrence("A_log", "dt_proj.bias", layer, state, skip="D")
        self.gated = builder.gated("silu")
        self.out = builder.linear("out_proj", inner, hidden, bias=spec.o_bias, role="o")

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]."""
        values, gate = self.inputs(x, ctx).split_with_sizes(self.widths, 1)
        values = self.conv(values, ctx)
        narrow = self.narrow(values, ctx)
        if self.norms:
            parts = narrow.split_with_sizes(self.parts, 1)
            steps, keys, queries = (
                norm(part) for norm, part in zip(self.norms, parts, strict=True)
            )
            read = self.joined(keys, queries)
        else:
            steps, read = narrow.tensor_split((self.parts[0],), 1)
        y = self.space(self.joined(values, read), self.steps(steps, ctx), ctx)
        return self.out(self.gated(y, gate), ctx, residual)


# Names of a family's sizes in `Architecture.keys`, by those of pure models.
SIZE, TAPS, RANK, CONV_BIAS = "state_size", "conv_kernel", "time_step_rank", "use_conv_bias"


def mamba_state(fields: Fields, inner: int, eps: float | None) -> StateSpec:
    """Return the state of a Mamba layer.

    Args:
        inner: its channels.
        eps: as in `StateSpec`.
    """
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    rank = -(-hidden // 16)
    if fields.raw(RANK) not in (None, "auto"):
        rank = fields.integer(RANK, 1, MAX_WIDTH)
    taps, bias = fields.integer(TAPS, 2, MAX_TAPS, 4), fields.boolean(CONV_BIAS, True)
    return StateSpec.by_channels(
        inner, fields.integer(SIZE, 1, MAX_WIDTH, 16), taps, rank, bias=bias, eps=eps
    )


def mamba_layers(
    fields: Fields, layers: int, positions: int, eps: str = ""
) -> tuple[LayerSpec, ...]:
    """Every layer keeps a state.

    Args:
        eps: the key of `StateSpec.eps`; "": None.
    """
    hidden = fields.integer("hidden_size", 1, MAX_WIDTH)
    width = hidden * fields.integer("expand", 1, 64, 2)
    inner = fields.integer("intermediate_size", 1, MAX_WIDTH, width)
    small = fields.number(eps, 0.0, 1.0, 1e-6) if eps else None
    return (LayerSpec(state=mamba_state(fields, inner, small)),) * layers


MAMBA = Architecture(
    "MambaForCausalLM",
    "mamba",
    "Mamba",
    partial(
        Decoder,
        make_layer=partial(MambaLayer, keeper=Mamba),
        scopes=("backbone", ""),
        names=("embeddings", "layers", "norm_f", "lm_head"),
    ),
    layers=mamba_layers,
    inner=lambda fields: 0,
    qkv_bias="use_bias",
    o_bias="use_bias",
    tied=True,
    head_dim=16,  # of no head
    keys={"rms_norm_eps": "layer_norm_epsilon"},
    eos_token_ids=(0,),
    defaults={
        "vocab_size": 50_280,
        "hidden_size": 768,
        "num_hidden_layers": 32,
        "num_attention_heads": 1,
        "max_position_embeddings": 1_048_576,
        "layer_norm_epsilon": 1e-5,
    },
)
# Falcon Mamba (TII 2024, arXiv 2410.05355): steps, keys and queries are normalised.
FALCON_MAMBA = replace(
    MAMBA,
    name="FalconMambaForCausalLM",
    model_type="falcon_mamba",
    models="Falcon Mamba",
    layers=partial(mamba_layers, eps="mixer_rms_eps"),
)
