"""The kernels between products and attention, and sampling: all bound by bandwidth, except the
recurrences of a prompt: in chunks, and token by token, as with a draft.

At 64 tokens, where the launch dominates, and at 8192; a vocabulary of 128256. Each reads its
operands once and writes its results once: those are the bytes. Calls alternate between operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from clock import Call, Timer, copies_for, timed
from notes import Notes
from place import DEVICE, sized
from steps import Heads, cache, layout
from torch import Tensor

from kvik.kernels.ops import Draws, Sequences, StateHeads, Truncation
from kvik.kernels.triton.ops import triton_ops
from kvik.kernels.triton.rotary import rotate_and_store
from kvik.kernels.weights import Activation

BY_ROW = "delta rule by row"
HIDDEN, INNER, VOCAB = sized((4096, 14336, 128256), (64, 96, 300))
TOKENS = sized((64, 8192), (3,))
BATCHES = sized((1, 64, 256), (2,))
HEADS = sized(Heads(), Heads(4, 2, 32))
PROMPTS = sized((1024, 8192), (70,))
# Key heads, value heads, key and value channels: of Qwen3-Next, Kimi Linear and Granite 4 H Small.
RULES = {
    "delta rule": sized((16, 32, 128, 128), (1, 2, 16, 16)),
    BY_ROW: sized((32, 32, 128, 128), (2, 2, 16, 16)),
    "state space": sized((1, 128, 128, 64), (1, 2, 16, 16)),
}


def measure(notes: Notes, time: Timer = timed) -> None:
    ops = triton_ops(DEVICE)
    for tokens in TOKENS:
        weight = torch.ones(HIDDEN, device=DEVICE).bfloat16()
        for name, make, moved in (
            ("rms_norm", partial(_norm, ops.rms_norm, weight, tokens), 4 * HIDDEN),
            ("silu_and_mul", partial(_silu, ops.activate, tokens), 6 * INNER),
            ("rotate and store", partial(_rotate, tokens), _rotated_bytes()),
        ):
            title = f"{name}, {tokens} tokens"
            moves = float(tokens * moved)
            notes.attempt(title, partial(_rate, notes, time, title, make, moves, "copy"))
    for batch in BATCHES:
        for name, make in (
            ("greedy", partial(_greedy, ops.largest, batch)),
            ("draw", partial(_draw, ops.draw, batch, None)),
            ("draw, top-p", partial(_draw, ops.draw, batch, 0.9)),
        ):
            title = f"{name}, batch {batch}"
            moves = 4.0 * batch * VOCAB
            notes.attempt(title, partial(_rate, notes, time, title, make, moves, "read"))
    for tokens in PROMPTS:
        for rule in RULES:
            moves = _recurrence_bytes(rule, tokens)
            for drafts, how in ((0, "in chunks"), (1, "token by token")):
                title = f"{rule}, {tokens} tokens {how}"
                make = partial(_recurrence, ops.recurrence, rule, tokens, drafts)
                notes.attempt(title, partial(_rate, notes, time, title, make, moves, "copy"))


def _rate(
    notes: Notes,
    time: Timer,
    title: str,
    make: Callable[[], Call],
    moved: float,
    ceiling: str,
) -> None:
    found = time([make() for _ in range(copies_for(moved, 16))])
    notes.rate(title, found.seconds, ceiling, moved=moved, captured=found.captured)


def _norm(norm: Callable[..., Tensor], weight: Tensor, tokens: int) -> Call:
    x = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()
    return lambda: norm(x, weight, 1e-5)


def _silu(activate: Callable[[Tensor, Activation], Tensor], tokens: int) -> Call:
    x = torch.randn(tokens, 2 * INNER, device=DEVICE).bfloat16()
    return lambda: activate(x, "silu_and_mul")


def _rotated_bytes() -> int:
    """Return the bytes per token: q, k and v are read and written, the angles read once."""
    return 4 * (HEADS.queries + 2 * HEADS.keys) * HEADS.dim + 4 * HEADS.dim


def _rotate(tokens: int) -> Call:
    planned, blocks = layout([(0, tokens)])
    kv = cache(blocks, HEADS, torch.bfloat16)
    sizes = (HEADS.queries, HEADS.keys, HEADS.keys)
    # views of one matrix product, as in the models
    qkv = torch.randn(tokens, sum(sizes), HEADS.dim, device=DEVICE).bfloat16()
    q, k, v = qkv.split(sizes, 1)
    angles = torch.randn(tokens, HEADS.dim // 2, device=DEVICE)
    rotation = torch.cat((angles.cos(), angles.sin()), -1)
    return lambda: rotate_and_store(q, k, v, rotation, (kv.k, kv.v), None, planned.slot_mapping)


def _greedy(largest: Callable[[Tensor], object], batch: int) -> Call:
    logits = torch.randn(batch, VOCAB, device=DEVICE)
    return lambda: largest(logits)


def _draw(draw: Callable[[Tensor, Draws], Tensor], batch: int, top_p: float | None) -> Call:
    logits = torch.randn(batch, VOCAB, device=DEVICE) * 3
    kept = None if top_p is None else torch.full((batch,), top_p, device=DEVICE).double()
    uniforms = torch.rand(batch, dtype=torch.float64, device=DEVICE)
    draws = Draws(torch.ones(batch, device=DEVICE), uniforms, Truncation(top_p=kept))
    return lambda: draw(logits, draws)


def _recurrence_bytes(rule: str, tokens: int) -> float:
    """Return the bytes of inputs and outputs, and of the state, which is read and written."""
    key_heads, value_heads, key_dim, value_dim = RULES[rule]
    channels = 2 * key_heads * key_dim + 2 * value_heads * value_dim
    channels += value_heads * key_dim if rule == BY_ROW else 0
    return 2.0 * tokens * channels + 8 * value_heads * key_dim * value_dim


def _recurrence(recurrence: Callable[..., Tensor], rule: str, tokens: int, drafts: int) -> Call:
    """Return the call for a prompt that began in an earlier step."""

    def each(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

    key_heads, value_heads, key_dim, value_dim = RULES[rule]
    space = rule == "state space"
    decays = value_heads * (key_dim if rule == BY_ROW else 1)
    decay, skip = torch.randn(2, value_heads, device=DEVICE)
    bias = torch.randn(decays, device=DEVICE)
    heads = StateHeads(decay, bias, key_heads, skip if space else None)
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    columns = decays if space else value_heads + decays
    x = torch.randn(tokens, channels, device=DEVICE).bfloat16()
    gates = torch.randn(tokens, columns, device=DEVICE).bfloat16()
    state = torch.randn(1, value_heads, key_dim, value_dim, device=DEVICE)
    log = torch.zeros(1, drafts, channels + columns, device=DEVICE)
    sequences = Sequences(each(0, tokens), each(2 * tokens), each(0), tokens)
    if drafts:
        sequences = replace(sequences, pending=each(0), drafts=each(drafts))
    return lambda: recurrence(x, gates, heads, state, log, sequences)
