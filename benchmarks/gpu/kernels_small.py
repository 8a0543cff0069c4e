"""The kernels between products and attention, and sampling: all bound by bandwidth.

At 64 tokens, where the launch dominates, and at 8192; a vocabulary of 128256. Each reads its
operands once and writes its results once: those are the bytes. Calls alternate between operands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from clock import Call, Timer, copies_for, timed
from notes import Notes
from place import DEVICE, sized
from steps import Heads, cache, layout
from torch import Tensor

from kvik.kernels.ops import Draws, Truncation
from kvik.kernels.triton.ops import triton_ops
from kvik.kernels.triton.rotary import rotate_and_store
from kvik.kernels.weights import Activation

HIDDEN, INNER, VOCAB = sized((4096, 14336, 128256), (64, 96, 300))
TOKENS = sized((64, 8192), (3,))
BATCHES = sized((1, 64, 256), (2,))
HEADS = sized(Heads(), Heads(4, 2, 32))


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
