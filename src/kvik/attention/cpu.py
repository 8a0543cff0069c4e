"""Attention by the native kernels, over a cache laid out for vector lanes.

One kernel serves decodes, whole and chunked prefills, trees and any mix of them. It reads the
step's layout itself, so there is nothing to plan, and a query's result has the same bits whatever
it shares the step with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvik.attention.base import Attend, AttentionMetadata, BackendCaps, LayerKV, StepLayout
from kvik.kernels.cpu.native import DTYPES, Native, pointer
from kvik.kernels.ops import Ops


class CpuAttention:
    """See csrc/attention.hpp."""

    caps = BackendCaps("cpu", frozenset({"cpu"}), frozenset({torch.float32, torch.bfloat16}))

    def __init__(self, native: Native, ops: Ops) -> None:
        self.native = native
        self._ops = ops

    def plan(self, layout: StepLayout, window: int | None) -> AttentionMetadata:
        return AttentionMetadata(layout, window)

    def run(self, attend: Attend) -> Tensor:
        q, k = attend.turned(self._ops)
        v, kv, layout = attend.v, attend.kv, attend.metadata.layout
        heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
        self.native.launch(
            "store_kv",
            k=k.data_ptr(),
            k_stride=k.stride(0),
            v=v.data_ptr(),
            v_stride=v.stride(0),
            k_cache=kv.k.data_ptr(),
            v_cache=kv.v.data_ptr(),
            k_scales=pointer(kv.k_scales),
            v_scales=pointer(kv.v_scales),
            slot_mapping=layout.slot_mapping.data_ptr(),
            rows=self.native.rows(k),
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=layout.block_size,
            dtype=DTYPES[k.dtype],
            kv_dtype=DTYPES[kv.k.dtype],
        )
        out = self.native.empty(q.shape[0], heads, head_dim, dtype=q.dtype)
        self.native.launch(
            "attention",
            q=q.data_ptr(),
            q_stride=q.stride(0),
            k_cache=kv.k.data_ptr(),
            v_cache=kv.v.data_ptr(),
            k_scales=pointer(kv.k_scales),
            v_scales=pointer(kv.v_scales),
            block_table=layout.block_table.data_ptr(),
            table_stride=layout.block_table.stride(0),
            query_start_loc=layout.query_start_loc.data_ptr(),
            seq_lens=layout.seq_lens.data_ptr(),
            num_seqs=self.native.rows(layout.seq_lens),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=layout.block_size,
            window=attend.metadata.window or 0,
            tree=pointer(layout.tree),
            scale=attend.spec.scale,
            softcap=attend.spec.softcap or 0.0,
            sinks=pointer(attend.spec.sinks),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            dtype=DTYPES[q.dtype],
            kv_dtype=DTYPES[kv.k.dtype],
        )
        return out

    def move(self, kv: LayerKV, source: Tensor, target: Tensor) -> None:
        self.native.launch(
            "move_kv",
            k_cache=kv.k.data_ptr(),
            v_cache=kv.v.data_ptr(),
            k_scales=pointer(kv.k_scales),
            v_scales=pointer(kv.v_scales),
            source=source.data_ptr(),
            target=target.data_ptr(),
            rows=source.shape[0],
            kv_heads=kv.k.shape[2],
            head_dim=kv.k.shape[3] * (2 if kv.k.dtype == torch.uint8 else 1),
            block_size=kv.k.shape[1],
            kv_dtype=DTYPES[kv.k.dtype],
        )
