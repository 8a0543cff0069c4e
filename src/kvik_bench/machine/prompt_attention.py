"""Measures whether torch's or Triton's attention is faster for fresh prompts on a GPU, by head
dimension.

The timed work is a layer of the engine: storing keys and values in the cache, then attention;
alternately with Triton alone and with torch's kernels for attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby, takewhile
from statistics import median

import torch
from torch import Tensor

from kvik.attention.base import Attend, AttentionSpec
from kvik.attention.fresh_prompts import FreshPrompts
from kvik.attention.triton import TritonAttention
from kvik.config.hardware import Thresholds
from kvik.kernels.triton.ops import triton_ops
from kvik_bench.machine.stage import device_seconds, one_prompt

LENGTHS = (1024, 2048, 4096, 8192)
HEAD_DIMS = (64, 80, 96, 128, 256)
QUICK_LENGTHS, QUICK_HEAD_DIMS = (2048, 8192), (64, 128)
WIDTH, GROUP = 4096, 4  # of the queries of all heads; query heads of a KV head
ROUNDS = 9
GAIN = 1.05  # least speed-up that is worth a second set of kernels
TOLERANCE = 0.02  # of results in bfloat16, absolute and relative

Tell = Callable[[str, float], None]  # next measurement, share done
Clock = Callable[[Callable[[], object], torch.device], float]  # seconds of a call


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """Seconds of a layer. torch: None if its kernels failed or gave other results."""

    head_dim: int
    tokens: int
    triton: float
    torch: float | None


def measure_prompts(
    device: torch.device,
    head_dims: Sequence[int] = HEAD_DIMS,
    lengths: Sequence[int] = LENGTHS,
    tell: Tell = lambda label, share: None,
    clock: Clock = device_seconds,
    width: int = WIDTH,
) -> tuple[PromptTimes, ...]:
    """Return the times, ordered by head_dim, then length."""
    torch.manual_seed(0)
    cells = [(dim, length) for dim in head_dims for length in lengths]
    measurements = []
    # Triton launches on the current device, regardless of its arguments
    where = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(), where:
        for done, (dim, length) in enumerate(cells):
            tell(f"prompts of {length} tokens, heads of {dim}", done / len(cells))
            measurements.append(_pace(device, dim, length, clock, max(GROUP, width // dim)))
    tell("", 1.0)
    return tuple(measurements)


def thresholds(measurements: Sequence[PromptTimes]) -> Thresholds:
    """Return by head_dim the length from which torch's kernels are always faster."""
    every = []
    for dim, measured in groupby(measurements, lambda times: times.head_dim):
        falling = sorted(measured, key=lambda times: -times.tokens)
        gaining = list(takewhile(_gains, falling))
        if gaining:
            every.append((dim, gaining[-1].tokens))
    return tuple(every)


def _gains(times: PromptTimes) -> bool:
    return times.torch is not None and times.triton > GAIN * times.torch


def _pace(device: torch.device, dim: int, length: int, clock: Clock, heads: int) -> PromptTimes:
    ops = triton_ops(device)
    layout, kv = one_prompt(device, dim, length, heads // GROUP, torch.bfloat16)
    sizes = (heads, heads // GROUP, heads // GROUP)
    q, k, v = (torch.randn(length, n, dim, device=device).bfloat16() for n in sizes)

    def layer_of(attention: TritonAttention) -> Callable[[], Tensor]:
        metadata = attention.plan(layout, None)
        return lambda: attention.run(Attend(q, k, v, kv, metadata, AttentionSpec(dim**-0.5)))

    triton_call = layer_of(TritonAttention(ops))
    torch_call = layer_of(TritonAttention(ops, FreshPrompts(length)))
    expected = triton_call()
    agree = True
    try:
        agree = torch.allclose(torch_call(), expected, TOLERANCE, TOLERANCE)
    except RuntimeError:  # there is no fused kernel for such heads, or a library is missing
        agree = False
    by_triton, by_torch = [], []
    for _ in range(ROUNDS):
        by_triton.append(clock(triton_call, device))
        if agree:
            by_torch.append(clock(torch_call, device))
    return PromptTimes(dim, length, median(by_triton), median(by_torch) if agree else None)
