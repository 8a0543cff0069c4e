"""Attention by the native kernels, over a cache laid out for vector lanes.

One kernel serves decodes, whole and chunked prefills, trees and any mix of them. It reads the
step's layout itself, so there is nothing to plan. A query's result has the same bits for any other
content of the step.
"""

from __future__ import annotations

from dataclasses import replace

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
)
from kvik.attention.compressed import AttendCompressed
from kvik.attention.indexed import Choice, Indexed
from kvik.attention.layout import StepLayout
from kvik.kernels.cpu.native import Argument, Native
from kvik.kernels.ops import Ops
from kvik.spec.kv import ENTRY_TOKENS, IndexSpec

KEYS_OF_WORD = 64  # bits of a choice


class CpuAttention(AttentionBackend):
    """See csrc/attention.hpp."""

    caps = BackendCaps("cpu", frozenset({"cpu"}), frozenset({torch.float32, torch.bfloat16}))

    def __init__(self, native: Native, ops: Ops) -> None:
        super().__init__(ops)
        self.native = native

    def run(self, attend: Attend) -> Tensor:
        tokens, heads, size = attend.q.shape
        shape = tokens, heads, attend.spec.value_dim or size
        return self.run_into(attend, self.native.empty(*shape, dtype=attend.q.dtype))

    def run_into(self, attend: Attend, out: Tensor) -> Tensor:
        """Write the result to out, [tokens, heads, value_dim] with dense heads, and return it."""
        for_sinks = attend.for_sinks(self._ops)
        (q, k), v = attend.turned(self._ops), attend.v
        if k is not None and v is not None:
            self.store(k, v, attend.kv, attend.metadata.layout.slot_mapping)
        if attend.kv.queries is not None:
            self._keep_queries(q, attend.kv.queries, attend.metadata.layout, attend.spec.scale)
        of, chosen = (attend.kv, attend.metadata, attend.spec), _bits(attend.choice)
        return self._attend(q, None, *of, out, for_sinks, chosen)

    def run_by_head(self, attend: Attend, choice: Choice) -> Tensor:
        return self.run(replace(attend, choice=choice))

    def choice_of(self, choice: Choice, kv_heads: slice) -> Choice:
        bits = _bits(choice)
        assert bits is not None
        return [bits[:, kv_heads]]

    def store(self, k: Tensor, v: Tensor, kv: LayerKV, slot_mapping: Tensor) -> None:
        """Write k and v into the cache; see `base.store`."""
        self.native.launch(
            "store_kv",
            k=k,
            v=v,
            value_dim=v.shape[2],
            slot_mapping=slot_mapping,
            **_arguments(kv),
        )

    def _keep_queries(self, q: Tensor, ring: Tensor, layout: StepLayout, scale: float) -> None:
        assert layout.state_rows is not None
        self.native.launch(
            "keep_queries",
            q=q,
            starts=layout.query_start_loc,
            lengths=layout.seq_lens,
            state_rows=layout.state_rows,
            num_seqs=self.native.rows(layout.seq_lens),
            dim=ring.shape[2] * ring.shape[3],
            last=ring.shape[1],
            scale=scale,
            ring=ring,
        )

    def run_latent(self, attend: AttendLatent) -> Tensor:
        return self.run_latent_by(self._ops, attend)

    def run_latent_by(self, ops: Ops, attend: AttendLatent) -> Tensor:
        """Do the same as `run_latent`, with other operations for products with the matrices of
        heads."""
        q_rope, k_rope = attend.turned(ops)
        self.store_latents(attend.latent, k_rope, attend.kv, attend.metadata.layout.slot_mapping)
        q = attend.up.into_queries(ops, attend.q)
        return attend.up.to_values(ops, self.means(attend, q, q_rope))

    def store_latents(
        self, latent: Tensor, k_rope: Tensor, kv: LayerKV, slot_mapping: Tensor
    ) -> None:
        self.native.launch(
            "store_latent",
            latent=latent,
            rope=k_rope,
            cache=kv.k,
            scales=kv.k_scales,
            slot_mapping=slot_mapping,
            latent_dim=latent.shape[1],
            head_dim=kv.k.shape[3],
            block_size=kv.k.shape[1],
            kv_dtype=kv.k.dtype,
        )

    def means(self, attend: AttendLatent, q: Tensor, q_rope: Tensor) -> Tensor:
        out = self.native.empty(*q.shape, dtype=q.dtype)
        of, chosen = (attend.kv, attend.metadata, attend.spec), _bits(attend.choice)
        return self._attend(q, q_rope, *of, out, chosen=chosen)

    def choose(self, of: Indexed, kv: LayerKV, layout: StepLayout) -> Choice:
        """See `base.AttentionBackend.choose`. The choice is one tensor of bits, [tokens, words] or
        [tokens, KV heads, words]: see `choose_keys` in csrc/arguments.hpp."""
        assert kv.index is not None
        spec = of.spec
        if of.bias is not None:
            return self._choose_pools(of, of.bias, kv.index, layout)
        assert of.rotation is not None
        shape: dict[str, Argument] = {
            "rotation": of.rotation,
            "rope": of.rotation.shape[1],
            "interleaved": spec.interleaved,
            "cache": kv.index,
            "dim": spec.dim,
        }
        stored: dict[str, Argument] = {"k": of.k, "slot_mapping": layout.slot_mapping}
        self.native.launch("store_index", **stored, block_size=layout.block_size, **shape)
        return self._choose(of.q, of.weights, spec, layout, shape)

    def _choose_pools(self, of: Indexed, bias: Tensor, cache: Tensor, layout: StepLayout) -> Choice:
        """Return what `choose` does, from keys with gates."""
        (pool, dim), rows = bias.shape, cache.view(-1, cache.shape[3])
        none: dict[str, Argument] = {"rotation": None, "rope": 0}
        stored: dict[str, Argument] = {"k": of.k, "slot_mapping": layout.slot_mapping}
        self.native.launch("store_tokens", **stored, inputs=None, cache=rows, dim=2 * dim, **none)
        self.native.launch(
            "make_entries",
            cache=rows,
            inputs_at=0,
            bias=bias,
            weight=None,
            weight_dtype=bias.dtype,
            eps=0.0,
            high=None,
            low=None,
            low_rows=1,
            last=0,
            rope=0,
            table=layout.block_table,
            entries=rows,
            entry_table=layout.block_table,
            every=pool,
            overlap=False,
            entry_tokens=1,
            dim=dim,
            **self._sequences(layout),
        )
        shape = {**none, "interleaved": False, "cache": rows, "dim": dim}
        return self._choose(of.q, of.weights, of.spec, layout, shape, pool)

    def _sequences(self, layout: StepLayout) -> dict[str, Argument]:
        return {
            "block_size": layout.block_size,
            "query_start_loc": layout.query_start_loc,
            "seq_lens": layout.seq_lens,
            "num_seqs": self.native.rows(layout.seq_lens),
        }

    def _choose(
        self,
        q: Tensor,
        weights: Tensor | None,
        spec: IndexSpec,
        layout: StepLayout,
        shape: dict[str, Argument],
        every: int = 0,
    ) -> Choice:
        """Return what `choose` does.

        Args:
            shape: what else the kernel needs to know of q and the cache.
            every: tokens that each key sums up; 0: keys of tokens.
        """
        longest = layout.block_table.shape[1] * layout.block_size  # of a sequence
        if not spec.pool:
            longest //= every or 1
        if longest <= spec.top:
            return []
        words = -(-longest // KEYS_OF_WORD)
        each = (spec.heads, words) if spec.span else (words,)
        chosen = self.native.empty(q.shape[0], *each, dtype=torch.int64)
        self.native.launch(
            "choose_keys",
            q=q,
            weights=weights,
            **shape,
            block_table=layout.block_table,
            table_stride=layout.block_table.stride(0),
            **self._sequences(layout),
            tree=layout.tree,
            first_keys=layout.first_keys,
            heads=spec.heads,
            top=spec.top // (spec.span or spec.pool or 1),
            span=spec.span,
            local=spec.local,
            every=every,
            entry_tokens=1 if spec.pool else ENTRY_TOKENS,
            pools=spec.pool > 0,
            out=chosen,
        )
        return [chosen]

    def over_entries(self, attend: AttendCompressed) -> Tensor:
        of, layout, q = attend.spec, attend.layouts[0], attend.q
        entries, dim, chosen = attend.entries, q.shape[2], None
        turns: dict[str, Argument] = {"rotation": attend.rotation, "rope": of.rope}
        cache: dict[str, Argument] = {
            "cache": attend.tokens,
            "table": layout.block_table,
            "every": of.every,
            "entry_tokens": ENTRY_TOKENS,
            **self._sequences(layout),
        }
        self.native.launch(
            "store_tokens",
            k=attend.k,
            inputs=attend.inputs,
            cache=attend.tokens,
            slot_mapping=layout.slot_mapping,
            dim=dim,
            **turns,
        )
        start = dim
        for maker, made, places in zip(attend.makers, entries, attend.layouts[1:], strict=True):
            self.native.launch(
                "make_entries",
                **cache,
                inputs_at=start,
                bias=maker.bias,
                weight=maker.weight,
                weight_dtype=maker.weight.dtype,
                eps=maker.eps,
                high=maker.high,
                low=maker.low,
                low_rows=maker.low.shape[0],
                last=maker.last,
                rope=of.rope,
                entries=made,
                entry_table=places.block_table,
                overlap=of.overlap,
                dim=made.shape[1],
            )
            start += 2 * maker.bias.shape[1]
        if attend.indexed is not None and of.index is not None:
            shape = {"interleaved": True, "cache": entries[1], "dim": of.index.dim, **turns}
            indexed = *attend.indexed, of.index, attend.layouts[2]
            chosen = _bits(self._choose(*indexed, shape, of.every))
        out = self.native.empty(*q.shape, dtype=q.dtype)
        self.native.launch(
            "attend_entries",
            q=q,
            **turns,
            **cache,
            entries=entries[0] if entries else None,
            entry_table=attend.layouts[1].block_table if entries else None,
            heads=q.shape[1],
            dim=dim,
            window=attend.window,
            chosen=chosen,
            scale=attend.scale,
            sinks=attend.sinks,
            out=out,
        )
        return out

    def _attend(
        self,
        q: Tensor,
        q_rope: Tensor | None,
        kv: LayerKV,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        out: Tensor,
        for_sinks: Tensor | None = None,
        chosen: Tensor | None = None,
    ) -> Tensor:
        """Launch the kernel.

        Args:
            q: [tokens, heads, value_dim]. q_rope: for latent vectors, the other channels of q.
            for_sinks: q for sinks of the window; None: the same as for other keys.
            chosen: as `choose` returns it; None: each token reads all that it sees.
        """
        layout, window = metadata.layout, metadata.window
        self.native.launch(
            "attention",
            q=q,
            q_rope=q_rope,
            value_dim=q.shape[2],
            **_arguments(kv),
            block_table=layout.block_table,
            table_stride=layout.block_table.stride(0),
            query_start_loc=layout.query_start_loc,
            seq_lens=layout.seq_lens,
            num_seqs=self.native.rows(layout.seq_lens),
            heads=q.shape[1],
            window=window.keys if window else 0,
            chunked=window is not None and window.chunked,
            reach=spec.bidirectional or 0,
            tree=layout.tree,
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
            sinks=spec.sinks,
            biases=spec.slopes if spec.distances is None else spec.distances,
            bias_reach=0 if spec.distances is None else spec.distances.shape[1] // 2,
            sink_keys=window.sinks if window else 0,
            sink_q=for_sinks,
            first_keys=layout.first_keys,
            chosen=chosen,
            chosen_head_stride=chosen.stride(1) if chosen is not None and chosen.dim() == 3 else 0,
            out=out,
            out_dim=out.shape[2],
        )
        return out

    def move(self, kv: LayerKV, source: Tensor, target: Tensor) -> None:
        rows = source.shape[0]
        self.native.launch("move_kv", source=source, target=target, rows=rows, **_arguments(kv))
        if kv.index is not None:
            self.move(LayerKV(kv.index, kv.index[..., :0]), source, target)

    def keys(self, kv: LayerKV, at: Tensor) -> Tensor:
        cache = _arguments(kv) | {"v_cache": None}
        keys = torch.empty(len(at), kv.k.shape[2], _head_dim(kv))
        self.native.launch("load_kv", k=keys, v=None, slot_mapping=at, **cache)
        return keys


def _bits(choice: Choice | None) -> Tensor | None:
    """Return what `choose` has returned as one tensor."""
    bits = choice[0] if choice else None
    assert bits is None or isinstance(bits, Tensor)
    return bits


def _arguments(kv: LayerKV) -> dict[str, Argument]:
    """Return the arguments of kernels that a cache determines."""
    return {
        "k_cache": kv.k,
        "v_cache": None if kv.latent else kv.v,
        "k_scales": kv.k_scales,
        "v_scales": None if kv.latent else kv.v_scales,
        "kv_heads": kv.k.shape[2],
        "head_dim": _head_dim(kv),
        "block_size": kv.k.shape[1],
        "kv_dtype": kv.k.dtype,
    }


def _head_dim(kv: LayerKV) -> int:
    return kv.k.shape[3] * (2 if kv.k.dtype == torch.uint8 else 1)
