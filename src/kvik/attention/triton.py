"""Attention by Triton kernels over the paged cache, for GPUs.

The kernels read the step's layout on the device, so a plan is a summary of it in plain integers,
and a step can be captured in a CUDA graph. A mixed step is a few launches, by number of queries:
`kernels/triton/attention_paged.py` says which kernel takes which sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvik.attention.base import (
    AttentionMetadata,
    BackendCaps,
    HeadNorms,
    LayerKV,
    StepLayout,
    turned,
)
from kvik.attention.stored import move, store
from kvik.kernels.ops import Ops
from kvik.kernels.triton.attention_paged import PagedCache, PagedStep, paged_attention, runs_of
from kvik.kernels.triton.rotary import rotate_and_store


@dataclass(frozen=True, slots=True)
class TritonMetadata(AttentionMetadata):
    step: PagedStep


class TritonAttention:
    """See kernels/triton/attention_decode.py and attention_prefill.py."""

    caps = BackendCaps(
        name="triton",
        devices=frozenset({"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    )

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def plan(self, layout: StepLayout, window: int | None) -> TritonMetadata:
        step = PagedStep(
            layout.query_start_loc,
            layout.seq_lens,
            layout.block_table,
            layout.tree,
            layout.block_size,
            window,
            runs_of(layout.num_scheduled, layout.contexts),
        )
        return TritonMetadata(layout, window, step)

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: LayerKV,
        metadata: AttentionMetadata,
        scale: float,
        rotation: Tensor | None = None,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        assert isinstance(metadata, TritonMetadata)
        slots = metadata.layout.slot_mapping
        # The kernel turns and rounds halves of a head, which hold whole bytes.
        if q.shape[2] % (4 if kv.k.dtype == torch.uint8 else 2):
            q, k = turned(self._ops, q, k, rotation, norms)
            store(self._ops, k, v, kv, slots)
        else:
            scales = None
            if kv.k_scales is not None and kv.v_scales is not None:
                scales = kv.k_scales, kv.v_scales
            by = None if norms is None else (norms.q, norms.k, norms.eps)
            q = rotate_and_store(q, k, v, rotation, (kv.k, kv.v), scales, slots, by)
        cache = PagedCache(kv.k, kv.v, kv.k_scales, kv.v_scales)
        return paged_attention(q, cache, metadata.step, scale)

    def move(self, kv: LayerKV, source: Tensor, target: Tensor) -> None:
        move(kv, source, target)
