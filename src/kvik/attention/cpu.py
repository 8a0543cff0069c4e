"""Attention by the native kernels, over a cache laid out for vector lanes.

One kernel serves decodes, whole and chunked prefills, trees and any mix of them. It reads the
step's layout itself, so there is nothing to plan. A query's result has the same bits for any other
content of the step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvik.attention.base import (
    Attend,
    AttendLatent,
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    BackendCaps,
    LayerKV,
    StepLayout,
)
from kvik.kernels.cpu.native import DTYPES, Native, pointer, strided
from kvik.kernels.ops import Ops


class CpuAttention(AttentionBackend):
    """See csrc/attention.hpp."""

    caps = BackendCaps("cpu", frozenset({"cpu"}), frozenset({torch.float32, torch.bfloat16}))

    def __init__(self, native: Native, ops: Ops) -> None:
        super().__init__(ops)
        self.native = native

    def run(self, attend: Attend) -> Tensor:
        return self.run_into(attend, self.native.empty(*attend.q.shape, dtype=attend.q.dtype))

    def run_into(self, attend: Attend, out: Tensor) -> Tensor:
        """Write the result to out, [tokens, heads, head_dim] with dense heads, and return it."""
        for_sinks = attend.for_sinks(self._ops)
        (q, k), v = attend.turned(self._ops), attend.v
        if k is not None and v is not None:
            self.store(k, v, attend.kv, attend.metadata.layout.slot_mapping)
        if attend.kv.queries is not None:
            self._keep_queries(q, attend.kv.queries, attend.metadata.layout, attend.spec.scale)
        keys = attend.kv.k.shape[2], q.shape[2]
        return self._attend(q, None, attend.kv, attend.metadata, attend.spec, keys, out, for_sinks)

    def store(self, k: Tensor, v: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        """Write k and v into the cache; see `base.store`."""
        self.native.launch(
            "store_kv",
            **strided(k=k, v=v),
            k_cache=kv.k.data_ptr(),
            v_cache=kv.v.data_ptr(),
            k_scales=pointer(kv.k_scales),
            v_scales=pointer(kv.v_scales),
            slot_mapping=slot_mapping.data_ptr(),
            rows=self.native.rows(k),
            kv_heads=k.shape[1],
            head_dim=k.shape[2],
            block_size=kv.k.shape[1],
            dtype=DTYPES[k.dtype],
            kv_dtype=DTYPES[kv.k.dtype],
        )

    def _keep_queries(self, q: Tensor, ring: Tensor, layout: StepLayout, scale: float) -> None:
        assert layout.state_rows is not None
        self.native.launch(
            "keep_queries",
            **strided(q=q),
            starts=layout.query_start_loc.data_ptr(),
            lengths=layout.seq_lens.data_ptr(),
            state_rows=layout.state_rows.data_ptr(),
            num_seqs=self.native.rows(layout.seq_lens),
            dim=ring.shape[2] * ring.shape[3],
            last=ring.shape[1],
            scale=scale,
            ring=ring.data_ptr(),
            dtype=DTYPES[q.dtype],
        )

    def run_latent(self, attend: AttendLatent) -> Tensor:
        return self.run_latent_by(self._ops, attend)

    def run_latent_by(self, ops: Ops, attend: AttendLatent) -> Tensor:
        """Do the same as `run_latent`, with other operations for products with the matrices of
        heads."""
        q_rope, k_rope = ops.rotary(attend.q_rope, attend.k_rope, attend.rotation)
        latent, kv, layout = attend.latent, attend.kv, attend.metadata.layout
        width = latent.shape[1] + k_rope.shape[2]
        self.native.launch(
            "store_latent",
            **strided(latent=latent, rope=k_rope),
            cache=kv.k.data_ptr(),
            scales=pointer(kv.k_scales),
            slot_mapping=layout.slot_mapping.data_ptr(),
            rows=self.native.rows(latent),
            latent_dim=latent.shape[1],
            head_dim=width,
            block_size=layout.block_size,
            dtype=DTYPES[latent.dtype],
            kv_dtype=DTYPES[kv.k.dtype],
        )
        q = attend.up.into_queries(ops, attend.q)
        out = self.native.empty(*q.shape, dtype=q.dtype)
        means = self._attend(q, q_rope, kv, attend.metadata, attend.spec, (1, width), out)
        return attend.up.to_values(ops, means)

    def _attend(
        self,
        q: Tensor,
        q_rope: Tensor | None,
        kv: LayerKV,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        keys: tuple[int, int],
        out: Tensor,
        for_sinks: Tensor | None = None,
    ) -> Tensor:
        """Launch the kernel.

        Args:
            q: [tokens, heads, value_dim]. q_rope: for latent vectors, the other channels of q.
            for_sinks: q for sinks of the window; None: the same as for other keys.
            keys: number of kv heads, and channels of a key.
        """
        layout, window = metadata.layout, metadata.window
        (_, heads, value_dim), (kv_heads, head_dim) = q.shape, keys
        self.native.launch(
            "attention",
            **strided(q=q, out=out, sink_q=for_sinks),
            q_rope=pointer(q_rope),
            q_rope_stride=0 if q_rope is None else q_rope.stride(0),
            value_dim=value_dim,
            k_cache=kv.k.data_ptr(),
            v_cache=0 if kv.latent else kv.v.data_ptr(),
            k_scales=pointer(kv.k_scales),
            v_scales=0 if kv.latent else pointer(kv.v_scales),
            block_table=layout.block_table.data_ptr(),
            table_stride=layout.block_table.stride(0),
            query_start_loc=layout.query_start_loc.data_ptr(),
            seq_lens=layout.seq_lens.data_ptr(),
            num_seqs=self.native.rows(layout.seq_lens),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=layout.block_size,
            window=window.keys if window else 0,
            chunked=int(window is not None and window.chunked),
            reach=spec.bidirectional or 0,
            tree=pointer(layout.tree),
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
            sinks=pointer(spec.sinks),
            sink_keys=window.sinks if window else 0,
            first_keys=pointer(layout.first_keys),
            dtype=DTYPES[q.dtype],
            kv_dtype=DTYPES[kv.k.dtype],
        )
        return out

    def move(self, kv: LayerKV, source: Tensor, target: Tensor) -> None:
        self.native.launch(
            "move_kv",
            k_cache=kv.k.data_ptr(),
            v_cache=0 if kv.latent else kv.v.data_ptr(),
            k_scales=pointer(kv.k_scales),
            v_scales=0 if kv.latent else pointer(kv.v_scales),
            source=source.data_ptr(),
            target=target.data_ptr(),
            rows=source.shape[0],
            kv_heads=kv.k.shape[2],
            head_dim=kv.k.shape[3] * (2 if kv.k.dtype == torch.uint8 else 1),
            block_size=kv.k.shape[1],
            kv_dtype=DTYPES[kv.k.dtype],
        )

    def keys(self, kv: LayerKV, at: Tensor) -> Tensor:
        heads, width = kv.k.shape[2], kv.k.shape[3] * (2 if kv.k.dtype == torch.uint8 else 1)
        keys = torch.empty(len(at), heads, width)
        self.native.launch(
            "load_kv",
            **strided(k=keys),
            v=0,
            v_stride=0,
            k_cache=kv.k.data_ptr(),
            v_cache=0,
            k_scales=pointer(kv.k_scales),
            v_scales=0,
            slot_mapping=at.data_ptr(),
            rows=len(at),
            kv_heads=heads,
            head_dim=width,
            block_size=kv.k.shape[1],
            dtype=DTYPES[keys.dtype],
            kv_dtype=DTYPES[kv.k.dtype],
        )
        return keys
