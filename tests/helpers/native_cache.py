"""A paged cache in the layout of the native kernels, and attention over it step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from helpers.native import Poisoned, Runtime, call
from helpers.windows import Seen, as_window
from torch import Tensor

from kvik.kernels.kv_rounding import SCALES


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return bytes 0xff: NaN, or -1 in integers."""
    return torch.full((*shape, dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype).squeeze(-1)


class NativeCache:
    """Keys and values of one layer. Before they are stored, they or their scales are NaN.

    Attributes:
        k, v: [blocks, kv_heads, block_size * head_dim]; with four bits half as many bytes.
        k_scales, v_scales: [blocks, kv_heads, block_size]; None for a cache of floats.
        value_dim: head_dim; of latent vectors, the number of columns of k that serve as v.
    """

    def __init__(
        self,
        blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        latent: int = 0,
    ) -> None:
        shape = (blocks, kv_heads, block_size * head_dim // (2 if dtype == torch.uint8 else 1))
        self.k, self.v = poisoned(*shape, dtype=dtype), poisoned(*shape, dtype=dtype)
        self.kv_heads, self.block_size, self.head_dim = kv_heads, block_size, head_dim
        self.dtype = dtype
        self.k_scales = self.v_scales = None
        if dtype in SCALES:
            self.k_scales = poisoned(blocks, kv_heads, block_size, dtype=SCALES[dtype])
            self.v_scales = poisoned(blocks, kv_heads, block_size, dtype=SCALES[dtype])
        self.value_dim = latent or head_dim
        if latent:
            self.v = self.v_scales = None

    @property
    def tensors(self) -> list[Tensor]:
        every = (self.k, self.v, self.k_scales, self.v_scales)
        return [tensor for tensor in every if tensor is not None]

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments that all cache kernels share."""
        return {
            "k_cache": self.k,
            "v_cache": self.v,
            "k_scales": self.k_scales,
            "v_scales": self.v_scales,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "block_size": self.block_size,
            "kv_dtype": self.dtype,
        }

    def store(self, runtime: Runtime, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store k, v [rows, kv_heads, head_dim], dense except between rows, at slots [rows]
        int64."""
        if self.v is None:
            row = k.flatten(1)
            call(
                runtime,
                "store_latent",
                latent=row,
                latent_stride=row.stride(0),
                rope=row[:, self.value_dim :],
                rope_stride=row.stride(0),
                cache=self.k,
                scales=self.k_scales,
                slot_mapping=slots,
                rows=len(slots),
                latent_dim=self.value_dim,
                head_dim=self.head_dim,
                block_size=self.block_size,
                dtype=k.dtype,
                kv_dtype=self.dtype,
            )
            return
        self._copy(runtime, "store_kv", k, v, slots, value_dim=v.shape[2])

    def load(self, runtime: Runtime, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k = poisoned(len(slots), self.kv_heads, self.head_dim, dtype=dtype)
        v = poisoned(len(slots), self.kv_heads, self.head_dim, dtype=dtype)
        self._copy(runtime, "load_kv", k, v, slots)
        return k, v

    def move(self, runtime: Runtime, source: Tensor, target: Tensor) -> None:
        call(
            runtime,
            "move_kv",
            source=source,
            target=target,
            rows=len(source),
            **self.arguments,
        )

    def _copy(
        self, runtime: Runtime, kernel: str, k: Tensor, v: Tensor, slots: Tensor, **more: int
    ) -> None:
        assert k.dtype == v.dtype and slots.dtype == torch.int64
        call(
            runtime,
            kernel,
            k=k,
            k_stride=k.stride(0),
            v=v,
            v_stride=v.stride(0),
            slot_mapping=slots,
            rows=len(slots),
            dtype=k.dtype,
            **more,
            **self.arguments,
        )


@dataclass(frozen=True)
class Part:
    """One sequence in a step.

    Attributes:
        q: [queries, heads, head_dim], the last ones of the context.
        blocks: [blocks] int32.
        tree: [queries, queries] bool: which tokens of the step each token sees.
    """

    q: Tensor
    context: int
    blocks: Tensor
    tree: Tensor | None = None
    first_key: int = 0  # the first that any query sees


def attend(
    runtime: Runtime,
    cache: NativeCache,
    parts: list[Part],
    scale: float,
    window: Seen = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    *,
    distances: Tensor | None = None,
    reach: int = 0,
    negated: bool = False,
) -> list[Tensor]:
    """Compute one step of attention, and return the result of each part.

    Args:
        negated: queries are multiplied by -1 for sinks of the window.
    """
    every = torch.cat([part.q for part in parts])  # [tokens, heads, head_dim]
    value_dim, seen = cache.value_dim, as_window(window)
    q, q_rope = every[..., :value_dim].flatten(1), every[..., value_dim:].flatten(1)
    tokens, heads = len(q), parts[0].q.shape[1]
    padded = torch.full((tokens, q.shape[1] + 5), float("nan"), dtype=q.dtype)
    padded[:, : q.shape[1]] = q
    starts = torch.tensor([0, *(len(part.q) for part in parts)]).cumsum(0).int()
    contexts = torch.tensor([part.context for part in parts], dtype=torch.int32)
    # Beyond a sequence's blocks, entries of the table would crash if used.
    table = torch.full((len(parts), max(len(part.blocks) for part in parts) + 1), 2**30).int()
    for row, part in zip(table, parts, strict=True):
        row[: len(part.blocks)] = part.blocks
    trees = None
    if any(part.tree is not None for part in parts):
        trees = torch.cat([pack_bits(part.tree, len(part.q)) for part in parts])
    firsts = None
    if any(part.first_key for part in parts):
        firsts = torch.tensor([part.first_key for part in parts], dtype=torch.int32)
    out = Poisoned(max(tokens, 1), heads, value_dim, dtype=q.dtype, gap=3)
    call(
        runtime,
        "attention",
        q=padded,
        q_stride=padded.stride(0),
        q_rope=q_rope,
        q_rope_stride=q_rope.stride(0),
        value_dim=value_dim,
        block_table=table,
        table_stride=table.stride(0),
        query_start_loc=starts,
        seq_lens=contexts,
        num_seqs=len(parts),
        heads=heads,
        window=seen.keys if seen else 0,
        chunked=int(seen is not None and seen.chunked),
        reach=reach,
        tree=trees,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        biases=slopes if distances is None else distances,
        bias_reach=0 if distances is None else distances.shape[1] // 2,
        sink_keys=seen.sinks if seen else 0,
        sink_q=-padded if negated else None,
        sink_q_stride=padded.stride(0),
        chosen=None,
        chosen_stride=0,
        chosen_head_stride=0,
        first_keys=firsts,
        out=out.view,
        out_stride=out.stride,
        out_dim=out.view.shape[2],
        dtype=q.dtype,
        **cache.arguments,
    )
    out.assert_rest_untouched()
    return list(out.view[:tokens].clone().split([len(part.q) for part in parts]))


def pack_bits(tree: Tensor | None, queries: int) -> Tensor:
    """Pack [queries, queries] bool to [queries] int64, bit j for token j; 0 without a tree."""
    if tree is None:
        return torch.zeros(queries, dtype=torch.int64)
    return (tree.long() << torch.arange(queries)).sum(1)
