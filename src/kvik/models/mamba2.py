"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): a layer that keeps a state whose decay depends on
its inputs. Hybrid models have it in place of most attention layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from kvik.spec.declare import LayerBuilder
from kvik.spec.declared import Role
from kvik.spec.fields import MAX_HEADS, MAX_WIDTH, Fields
from kvik.spec.kv import MAX_TAPS, StateSpec
from kvik.spec.model import ModelFacts
from kvik.spec.network import ForwardContext, Norm, Scale

if TYPE_CHECKING:
    from torch import Tensor


Normed: TypeAlias = Literal["after", "before", ""]


class Mamba2:
    """A short convolution, then a state space; its output is gated and normalised.

    Args:
        factors: of the inputs of gates, values, keys, queries and steps; (): all 1.
        normed: how the output is normalised: after the gate, before it, or not at all.
        eps: of that norm; None: the model's.
    """

    def __init__(
        self,
        spec: ModelFacts,
        builder: LayerBuilder,
        layer: int,
        state: StateSpec,
        factors: Sequence[float] = (),
        normed: Normed = "after",
        eps: float | None = None,
    ) -> None:
        hidden, inner = spec.hidden_size, state.values
        self.widths = inner, state.channels, state.value_heads
        self.groups = state.key_heads, inner // state.key_heads  # normalised separately
        self.inputs = builder.linear("in_proj", hidden, sum(self.widths), bias=False, role="qkv")
        self.scaled: Scale | None = None
        if any(factor != 1.0 for factor in factors):
            runs = zip(input_widths(state), factors, strict=True)
            self.scaled = builder.scaled_columns([*runs])
        self.conv = builder.causal_conv("conv1d", layer, state, silu=True)
        self.space = builder.recurrence("A_log", "dt_bias", layer, state, skip="D")
        self.gated = builder.gated("silu")
        self.norm: Norm | None = None
        self.normed_first = normed == "before"
        if normed:
            before: Role = "" if spec.layers[layer].beside else "o"  # attention has its own
            self.norm = builder.rms_norm(
                "norm", inner, eps or spec.norm_eps, before=before, groups=state.key_heads
            )
        self.out = builder.linear("out_proj", inner, hidden, bias=False, role="o")

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Tensor | None, ctx: ForwardContext
    ) -> Tensor:
        """x, residual [tokens, hidden] -> [tokens, hidden]."""
        inputs = self.inputs(x, ctx)
        if self.scaled is not None:
            inputs = self.scaled(inputs)
        gate, mixed, steps = inputs.split_with_sizes(self.widths, 1)
        y = self.space(self.conv(mixed, ctx), steps, ctx)
        if self.normed_first:
            y = self.gated(self._normalised(y), gate)
        else:
            y = self._normalised(self.gated(y, gate))
        return self.out(y, ctx, residual)

    def _normalised(self, y: Tensor) -> Tensor:
        """y [tokens, values] -> [tokens, values]."""
        return y if self.norm is None else self.norm(y.view(-1, *self.groups)).flatten(1)


def input_widths(state: StateSpec) -> tuple[int, ...]:
    """Return the widths of the inputs: gates, values, keys, queries and steps."""
    keys = state.key_heads * state.key_dim
    return state.values, state.values, keys, keys, state.value_heads


# Names of a family's sizes in `Architecture.keys`, which are those of every recurrent layer. Value
# heads are Mamba-2's heads; groups of them share a key head (B and C in the paper).
HEADS, HEAD_DIM = "linear_num_value_heads", "linear_value_head_dim"
GROUPS, SIZE, TAPS = "linear_num_key_heads", "linear_key_head_dim", "linear_conv_kernel_dim"


def mamba2_state(
    fields: Fields, keys: Mapping[str, str], bias: str, inner: int | None = None
) -> StateSpec:
    """Return the state of a Mamba-2 layer.

    Args:
        keys: of the family.
        bias: the key that gives the convolution a bias (true if absent).
        inner: channels of all heads, which give the size of a head if it is "auto"; None: any.
    """
    heads = fields.integer(keys[HEADS], 1, MAX_HEADS, 128)
    groups = fields.integer(keys[GROUPS], 1, MAX_HEADS, 8)
    if heads % groups:
        raise fields.error(keys[GROUPS], f"must divide {keys[HEADS]} ({heads}), not {groups}")
    if inner is not None and fields.raw(keys[HEAD_DIM]) in (None, "auto"):
        head_dim = max(1, inner // heads)
    else:
        head_dim = fields.integer(keys[HEAD_DIM], 1, MAX_WIDTH, 64)
    if inner not in (None, heads * head_dim):
        reason = f"must give {inner} channels in {heads} heads, not {heads * head_dim}"
        raise fields.error(keys[HEAD_DIM], reason)
    return StateSpec.recurrent(
        groups,
        heads,
        fields.integer(keys[SIZE], 1, MAX_WIDTH, 128),
        head_dim,
        fields.integer(keys[TAPS], 2, MAX_TAPS, 4),
        gates=1,
        bias=fields.boolean(bias, True),
    )


def gguf_mamba2(scope: str) -> dict[str, str]:
    """Return the rows of `Architecture.gguf_names` for Mamba-2 in a scope."""
    return {
        "ssm_in": f"{scope}.in_proj",
        "ssm_conv1d": f"{scope}.conv1d",
        "ssm_dt.bias": f"{scope}.dt_bias",
        "ssm_a.": f"{scope}.A_log",
        "ssm_d.": f"{scope}.D",
        "ssm_norm": f"{scope}.norm",
        "ssm_out": f"{scope}.out_proj",
    }


def gguf_mamba2_shapes(spec: ModelFacts, scope: str) -> dict[str, tuple[int, ...]]:
    """Return `Architecture.gguf_shapes` for Mamba-2 in a scope."""
    state = spec.states[0]
    heads, groups = (state.value_heads, 1), (state.key_heads, state.values // state.key_heads)
    return {f"{scope}.A_log": heads, f"{scope}.D": heads, f"{scope}.norm.weight": groups}
