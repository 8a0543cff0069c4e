"""The table of all operations of a forward pass except attention.

Each field of `Ops` is a contract; `reference/` defines it in plain torch, and faster
implementations (C++, Triton) replace it transparently. A model's forward consists only of these
operations, attention and views.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

import torch
from torch import Tensor

from kvik.kernels.weights import Activation, ExpertSet, Matrix, MatrixSpec, Weight
from kvik.spec.experts import Router

# The arguments of `Ops.draw`.


@dataclass(frozen=True, slots=True)
class Truncation:
    """Rules that drop unlikely tokens, applied in this order.

    Each is a tensor of [n] rows, or None if no row uses the rule.
    """

    top_k: Tensor | None = None  # int64 from 1; the vocabulary size means off
    # top_p, typical_p: float64 in (0, 1]; 1 means off.
    top_p: Tensor | None = field(default=None, metadata={"off": 1})
    # float32 in [0, 1]; 0 means off.
    min_p: Tensor | None = field(default=None, metadata={"off": 0})
    typical_p: Tensor | None = field(default=None, metadata={"off": 1})

    def of(self, rows: Tensor) -> Truncation:
        """Return the rules of some rows: [m] int64."""
        used = {name: values[rows] for name, values in self.used().items()}
        return Truncation(**used)

    def used(self) -> dict[str, Tensor]:
        """Return the rules that some row uses, by name."""
        every = {rule.name: getattr(self, rule.name) for rule in fields(self)}
        return {name: values for name, values in every.items() if values is not None}

    def beyond(self, applied: Collection[str]) -> Tensor | None:
        """Return which rows use a rule other than these, [n] bool; None: no row does.

        Args:
            applied: names of rules, including top_k.
        """
        asks: Tensor | None = None
        for rule in fields(self):
            values = getattr(self, rule.name)
            if values is not None and rule.name not in applied:
                uses = values != rule.metadata["off"]
                asks = uses if asks is None else asks | uses
        return asks


@dataclass(frozen=True, slots=True)
class Draws:
    """One draw for each of n rows."""

    temperature: Tensor  # [n] float32, above 0
    uniforms: Tensor  # [n] float64 in [0, 1), multiples of 2^-53; each selects the token of its row
    truncation: Truncation = field(default_factory=Truncation)

    def of(self, rows: Tensor) -> Draws:
        """Return the draws of some rows: [m] int64."""
        return Draws(self.temperature[rows], self.uniforms[rows], self.truncation.of(rows))


# The arguments of `Ops.penalize`, which makes tokens that were seen before less likely.


@dataclass(frozen=True, slots=True)
class Penalties:
    """The penalties of n rows of logits; the tokens seen by each are in a row of two tables."""

    rows: Tensor  # [n] int64, each once
    seen: Tensor  # [n] int64, their rows in the tables
    # repetition, frequency, presence: [n] float32; 1, 0 and 0 are off.
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    in_prompt: Tensor  # [m, vocab] bool
    counts: Tensor  # [m, vocab] int32, occurrences in the output


@dataclass(frozen=True, slots=True)
class Masks:
    """The tokens allowed in n rows of logits: the argument of `Ops.mask`."""

    rows: Tensor  # [n] int64, each once
    words: Tensor  # [n, at least vocab / 32] int32: bit i % 32 of word i // 32 is token i's


# An argument of `Ops.causal_conv` and `Ops.recurrence`, for layers that keep a state per request.


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a step, and the rows of their states.

    A sequence without keys before this step begins with a state of zeros; the stored state is
    ignored.

    A state cannot take back a token, so the stored one covers no draft of the last step. Next to it
    are the inputs of those drafts: the next step repeats the ones that were accepted."""

    starts: Tensor  # [n + 1] int32, first token of each in the flat batch
    lengths: Tensor  # [n] int32, tokens of each after this step, earlier steps included
    rows: Tensor  # [n] int32, row of each state; -1: there is none, and the result is undefined
    # On the host, an upper bound of the tokens of each in this step; 0 in a tape, which does not
    # know it.
    longest: int
    # [n] int32, accepted drafts of the last step, which the state does not cover; 0 for a sequence
    # that begins; None: no state has any.
    pending: Tensor | None = None
    # [n] int32, how many tokens at the end of each sequence are drafts; None: none are.
    drafts: Tensor | None = None


# Functions applied to the gate of `Ops.gated`, with the numbers of csrc/arguments.hpp.
Gate = Literal["none", "silu", "sigmoid", "softplus"]


@dataclass(frozen=True, slots=True)
class StateHeads:
    """The heads of a gated delta net or of a state space, with learned parameters."""

    # [value_heads] fp32, of how fast they forget; or [value_heads, key_dim, value_dim]: each number
    # of a state has its own rate (Mamba, Gu and Dao 2023, arXiv 2312.00752).
    decay: Tensor
    # [value_heads] fp32, of the same; or [value_heads * key_dim]: each row of a state decays by its
    # own gate (Kimi Delta Attention, Kimi team 2025, arXiv 2510.26692); or [value_heads *
    # value_dim] where each number has its own rate.
    bias: Tensor
    key_heads: int  # each serves value_heads / key_heads consecutive value heads
    # [value_heads] or [value_heads * value_dim] fp32, factor with which values are added to the
    # outputs of a state space; None: a gated delta net.
    skip: Tensor | None = None
    # Multiplies the share of a value that a delta net writes; with 2, a token can reverse what the
    # state holds for its key.
    beta_scale: float = 1.0
    # Below 0: the logarithm of a decay is at least this, if each row has its own; 0: any number.
    bound: float = 0.0

    @property
    def by_row(self) -> bool:
        """Whether each row of a state has its own gate."""
        return not self.by_channel and len(self.bias) > len(self.decay)

    @property
    def by_channel(self) -> bool:
        """Whether each channel of a value has its own gate, and each number of a state its own
        rate."""
        return self.decay.dim() > 1


def all_rows(matrix: Matrix, first: int, count: int) -> Sequence[tuple[int, int]]:
    """See `Ops.owned`."""
    return [(first, first + count)]


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of each operation.

    matrix(spec) -> Matrix, unfilled: pack_rows fills its weight; its bias is written to directly
    pack_rows(matrix, first, weight [n, inputs]) -> None; rows first.. of the matrix, which may come
        in runs of any size and order. The weight is of the matrix's kind, floats of any float
        dtype; its memory is not used afterwards
    linear(x [tokens, inputs], matrix, residual [tokens, outputs] or None) -> [tokens, outputs],
        activation(x W^T + bias) + residual in the matrix's out_dtype; rows of x may be strided. The
        residual may be overwritten and returned.
        If the kind of the weight says so, x is first rounded to x_scale * (-127..127), half to
        even. x_scale = absmax / 127 of a token (of each group if the weight has groups), or 1 if
        that is 0
    route(logits [tokens, experts] fp32, router, correction, scales [experts] fp32 or None,
        given_ids [tokens, active] int64 or None) -> (ids [tokens, active] int64, weights [tokens,
        active] fp32), the best first; see `Router`. With `given_ids` these are chosen. If
        `Router.zero`, logits and correction are [.., experts + zero], ids of experts that return
        their input are -1, and there is a further column: -1, and the sum of their weights
    expert_set(up, down) -> ExpertSet, of matrices as `matrix` makes them
    experts(x [tokens, inputs], ids, weights or None, experts, residual [tokens, outputs] or None)
        -> [tokens, outputs], residual + the sum over a token's experts of weight * down(up(x)), in
        fp32 and by ascending id; if `ExpertSet.weigh_inputs`, of down(up(weight * x)), with weight
        * x in the dtype of x. ids and weights as returned by `route`; an id below 0 is no expert;
        weights None: all 1. The residual may be overwritten and returned
    linear_each(x [tokens, heads, inputs], matrix, outputs) -> [tokens, heads, outputs], dense, in
        the dtype of x: head h times rows h R .. h R + outputs of the matrix, which has heads * R
        rows of floats and no bias. R is a multiple of 32
    matrix_rows(matrix, ids [n] int64, dtype) -> [n, inputs], rows of the weight; only of a matrix
        without activation
    gather_rows(table [rows, dim], ids [n] int64) -> [n, dim]
    add(x, y of the same shape and dtype) -> x + y
    largest(logits [rows, vocab]) -> (top [rows] fp32, ids [rows] int64), of equal ones the first;
        NaN anywhere in a row makes its top NaN, and its id arbitrary
    penalize(logits [rows, vocab] fp32, penalties) -> None; in place. The logit of a token that a
        row has seen is divided by repetition if it is above 0, else multiplied; then it falls by
        frequency for each time the token was generated, and by presence if it ever was
    mask(logits [rows, vocab] fp32, masks) -> None; in place: -inf for tokens that are not allowed
    draw(logits [n, vocab], draws) -> ids [n] int64. Weights are exp((logit - top) / temperature).
        top_k, top_p, min_p and typical_p drop tokens in this order, each from what the one before
        left, of equal ones the higher ids. The token is the first at which the running sum of
        weights exceeds u times their total. A row's token depends only on that row. Logits are
        finite or -inf, and at least one of a row is finite
    probabilities(logits [n, vocab], temperature [n], truncation) -> [n, vocab] fp32, the
        probability of drawing each token: the weights that `draw` leaves, over their total
    rms_norm(x [..., dim], weight [dim] of the dtype of x or fp32, or [heads, dim] of x [tokens,
        heads, dim], eps) -> [..., dim]
    layer_norm(x [..., dim], weight, bias, eps) -> [..., dim]; weight and bias are [dim], or [heads,
        dim] of x [tokens, heads, dim]
    rescaled(x [tokens, parts, dim], like [tokens, dim], least_square) -> [tokens, parts, dim]: x *
        rms(like) / sqrt(max(mean of x^2, least_square)), each part over its dim
    rotations(high [multiples, head_dim], low [n, head_dim], positions [tokens] int64, last) ->
        [tokens, head_dim] fp32, cosines and then sines of sums of angles: the product, as complex
        numbers, of row p // n of high and row p % n of low. Positions beyond `last` count as `last`
    rotary(q [tokens, heads, head_dim], k [tokens, kv_heads, head_dim], rotation [tokens, head_dim]
        fp32: cosines, then sines) -> (q, k), rotated in halves (not interleaved); may overwrite
        and return its arguments, so the caller must use only the results
    activate(x [tokens, dim], activation) -> [tokens, dim], or [tokens, dim / 2] if it is paired
    activate_top(x [tokens, dim], activation, deviations) -> [tokens, dim / 2], a paired activation
        of x, whose gate first becomes max(0, gate - mean - deviations * std) of its token
    xielu(x [tokens, dim], positive, negative) -> [tokens, dim]: x / 2, plus positive * x^2 above 0,
        else plus negative * (e^x - 1 - x)
    scaled(x [tokens, dim], factor) -> x * factor
    clipped(x [tokens, dim], limit) -> [tokens, dim]: -limit for what is below it, limit for what is
        above it
    joined(x [tokens, dim], y [tokens, other]) -> [tokens, dim + other], the columns of x, then of y
    weighted_sums(x [tokens, parts * dim], weights [tokens, sums, parts] fp32, residual [tokens,
        sums * dim] or None) -> [tokens, sums * dim], residual + for each sum the parts of x times
        weights
    stream_weights(x [tokens, dim], logits [tokens, n] fp32, factors [4, n] fp32: gains, biases,
        largest and smallest, eps, streams, rounds) -> [tokens, n] fp32: largest * sigmoid(gain *
        logits / rms(x) + bias) + smallest. The last streams^2 of them are a matrix, and the result
        has its transpose: the softmax of its rows plus smallest, whose columns, then rows and
        columns by turns, are divided by their sums plus smallest, `rounds` times those of columns
    softcap(x [rows, dim] fp32, cap) -> None; in place: cap * tanh(x / cap)
    gated(x [tokens, dim], gate [tokens, gates] of the dtype of x or fp32, by) -> x * by(gate), or x
        * gate if `by` is "none"; each gate is for dim / gates columns
    causal_conv(x [tokens, channels], weight [width, channels], bias [channels] or None, state
        [rows, width - 1 + most drafts, channels] fp32, sequences, silu) -> [tokens, channels]: for
        each channel the sum of the last `width` inputs of the sequence times weight, the newest
        times its last row, plus bias; then SiLU if `silu`. The state holds the inputs before this
        step, those of drafts last, and is updated
    recurrence(x [tokens, channels], gates [tokens, columns], heads, state [rows, value_heads,
        key_dim, value_dim] fp32, log [rows, most drafts, channels + columns] fp32, sequences) ->
        [tokens, value_heads * value_dim], token by token in fp32, with t = softplus(a + bias):
        the gated delta rule (Yang et al. 2024). x: queries and keys of all key heads, then values
            of all value heads; q and k are divided by their norms and q by sqrt(key_dim). gates: b,
            then a of all value heads. For each head S = S * exp(-exp(decay) * t); S = S + k
            (beta_scale * sigmoid(b) * (v - S^T k))^T; its output is S^T q. If each row of S has its
            own decay, a has key_dim numbers for each head, and so have t and the factor of S;
            with a `bound` this is exp(bound * sigmoid(exp(decay) * (a + bias)))
        or a state space (Mamba-2, Dao and Gu 2024), if `heads` has `skip`. x: values, then keys (B
            in the paper), then queries (C). gates: a of all value heads. For each head S = S *
            exp(-exp(decay) * t); S = S + k (t * v)^T; its output is S^T q + skip * v. If each
            number of S has its own rate (Mamba, Gu and Dao 2023), a has value_dim numbers for each
            head, one for each column of S, and so have t and skip
        The state is updated, and the log, which holds x and gates of drafts
    store_kv(k, v [tokens, kv_heads, head_dim], k_cache, v_cache [blocks, block_size, kv_heads,
        head_dim], slot_mapping [tokens]) -> None
    copy_blocks(cache [blocks, ...], source [n], target [n]) -> None
    owned(matrix, first, count) -> the runs (first, end) of rows first .. first + count that
        `pack_rows` keeps: all, unless other processes have some
    """

    matrix: Callable[[MatrixSpec], Matrix]
    pack_rows: Callable[[Matrix, int, Weight], None]
    linear: Callable[[Tensor, Matrix, Tensor | None], Tensor]
    route: Callable[
        [Tensor, Router, Tensor | None, Tensor | None, Tensor | None], tuple[Tensor, Tensor]
    ]
    expert_set: Callable[[Sequence[Matrix], Sequence[Matrix]], ExpertSet]
    experts: Callable[[Tensor, Tensor, Tensor | None, ExpertSet, Tensor | None], Tensor]
    linear_each: Callable[[Tensor, Matrix, int], Tensor]
    matrix_rows: Callable[[Matrix, Tensor, torch.dtype], Tensor]
    gather_rows: Callable[[Tensor, Tensor], Tensor]
    add: Callable[[Tensor, Tensor], Tensor]
    largest: Callable[[Tensor], tuple[Tensor, Tensor]]
    penalize: Callable[[Tensor, Penalties], None]
    mask: Callable[[Tensor, Masks], None]
    draw: Callable[[Tensor, Draws], Tensor]
    probabilities: Callable[[Tensor, Tensor, Truncation], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rescaled: Callable[[Tensor, Tensor, float], Tensor]
    rotations: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    activate: Callable[[Tensor, Activation], Tensor]
    activate_top: Callable[[Tensor, Activation, float], Tensor]
    xielu: Callable[[Tensor, float, float], Tensor]
    scaled: Callable[[Tensor, float], Tensor]
    clipped: Callable[[Tensor, float], Tensor]
    joined: Callable[[Tensor, Tensor], Tensor]
    weighted_sums: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    stream_weights: Callable[[Tensor, Tensor, Tensor, float, int, int], Tensor]
    softcap: Callable[[Tensor, float], None]
    gated: Callable[[Tensor, Tensor, Gate], Tensor]
    causal_conv: Callable[[Tensor, Tensor, Tensor | None, Tensor, Sequences, bool], Tensor]
    recurrence: Callable[[Tensor, Tensor, StateHeads, Tensor, Tensor, Sequences], Tensor]
    store_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    copy_blocks: Callable[[Tensor, Tensor, Tensor], None]
    owned: Callable[[Matrix, int, int], Sequence[tuple[int, int]]] = all_rows
