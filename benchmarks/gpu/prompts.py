"""Compare Triton's and torch's attention on prompts, as `kvik calibrate --only gpu` measures them,
and note which one the engine would choose."""

from __future__ import annotations

from functools import partial

from notes import Notes
from place import DEVICE, sized

from kvik_bench.machine.prompt_attention import HEAD_DIMS, LENGTHS, measure_prompts, thresholds

DIMS, TOKENS, WIDTH = sized((HEAD_DIMS, LENGTHS, 4096), ((16,), (20,), 64))


def measure(notes: Notes) -> None:
    for dim in DIMS:
        notes.attempt(f"heads of {dim}", partial(_measure, notes, dim))


def _measure(notes: Notes, dim: int) -> None:
    found = measure_prompts(DEVICE, (dim,), TOKENS, width=WIDTH)
    for times in found:
        # 4 dim operations for each head and each key that a query sees
        done = 2.0 * (WIDTH // dim * dim) * times.tokens * (times.tokens + 1)
        for whose, seconds in (("Triton's", times.triton), ("torch's", times.torch)):
            if seconds is not None:
                name = f"heads of {dim}, {times.tokens} tokens, {whose}"
                notes.rate(name, seconds, "bf16", operations=done, captured=False)
    notes.fact(f"torch's prompts, heads of {dim}", dict(thresholds(found)).get(dim))
