"""Steps over a paged cache of random numbers, laid out on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from place import DEVICE
from torch import Tensor

from kvik.attention.base import LayerKV
from kvik.attention.layout import StepLayout
from kvik.kernels.kv_rounding import SCALES, round_vectors
from kvik_bench.machine.stage import BLOCK_SIZE, random_layout


@dataclass(frozen=True, slots=True)
class Heads:
    queries: int = 32
    keys: int = 8
    dim: int = 128


def layout(sequences: Sequence[tuple[int, int]]) -> tuple[StepLayout, int]:
    return random_layout(sequences, DEVICE)


def cache(blocks: int, heads: Heads, dtype: torch.dtype) -> LayerKV:
    """Return a cache of normal numbers, quantised for a low-bit `dtype`. They are generated in
    pieces, as the whole cache may not fit in fp32."""
    width = heads.dim // 2 if dtype == torch.uint8 else heads.dim
    places = (blocks, BLOCK_SIZE, heads.keys)
    every: list[Tensor] = []
    scales: list[Tensor] = []
    for _ in range(2):
        whole = torch.empty(*places, width, dtype=dtype, device=DEVICE)
        if dtype not in SCALES:
            every.append(whole.normal_())
            continue
        scale = torch.empty(places, dtype=SCALES[dtype], device=DEVICE)
        for first in range(0, blocks, 1024):
            part = slice(first, min(blocks, first + 1024))
            drawn = torch.randn(part.stop - first, *places[1:], heads.dim, device=DEVICE)
            numbers, found = round_vectors(drawn, dtype)
            whole.view(torch.uint8)[part] = numbers.view(torch.uint8)
            scale[part] = found
        every.append(whole)
        scales.append(scale)
    return LayerKV(*every, *scales) if scales else LayerKV(*every)


def token_bytes(kv: LayerKV) -> float:
    """Return the bytes of K and V of one token of one layer, scales included."""
    return sum(tensor.nbytes / (len(tensor) * BLOCK_SIZE) for tensor in kv.tensors)
