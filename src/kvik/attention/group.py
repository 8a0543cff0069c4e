"""Attention in one process of a group, which has some of the heads.

Heads attend independently, so each process computes those that read its KV heads, over a cache of
these (Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, section 3). The results of all heads are
then exchanged, unless the product that reads them is divided in the same way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from kvik.attention.base import (
    Attend,
    AttendLatent,
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    LayerKV,
)
from kvik.attention.compressed import AttendCompressed
from kvik.attention.indexed import Choice, Indexed
from kvik.attention.layout import StepLayout
from kvik.kernels.ops import Ops
from kvik.spec.shares import HeadShare, share_of
from kvik.spec.visible_keys import Window

if TYPE_CHECKING:
    from kvik.attention.cpu import CpuAttention
    from kvik.kernels.cpu.group import Group
    from kvik.kernels.torch_group import TorchGroup


def heads_of(backend: AttentionBackend, attend: Attend, share: HeadShare) -> Attend:
    """Return attention of the heads of one process."""
    heads, kv_heads = slice(*share.heads), slice(*share.kv_heads)
    return replace(
        attend,
        q=attend.q[:, heads],
        choice=None if attend.choice is None else backend.choice_of(attend.choice, kv_heads),
        k=None if attend.k is None else attend.k[:, kv_heads],
        v=None if attend.v is None else attend.v[:, kv_heads],
        spec=attend.spec.of_heads(heads),
    )


class DividedHeads(AttentionBackend):
    """Attention in which each process computes some heads by another backend, which plans steps and
    has the cache."""

    def __init__(self, backend: AttentionBackend, rank: int, size: int) -> None:
        self._backend, self._rank, self._size = backend, rank, size
        self.caps = backend.caps
        # Query and kv heads of all processes, by the id of a layer's cache.
        self._heads: dict[int, tuple[int, int]] = {}

    def plan(self, layout: StepLayout, window: Window | None) -> AttentionMetadata:
        return self._backend.plan(layout, window)

    def move(self, kv: LayerKV, source: Tensor, target: Tensor) -> None:
        self._backend.move(kv, source, target)

    def keys(self, kv: LayerKV, at: Tensor) -> Tensor:
        return self._backend.keys(kv, at)

    def choose(self, of: Indexed, kv: LayerKV, layout: StepLayout) -> Choice:
        return self._backend.choose(of, kv, layout)

    def run_by_head(self, attend: Attend, choice: Choice) -> Tensor:
        return self.run(replace(attend, choice=choice))

    def kv_heads(self, attend: Attend) -> int:
        """Return the number of kv heads of a layer, in all processes."""
        if attend.k is not None:
            self._heads[id(attend.kv)] = attend.q.shape[1], attend.k.shape[1]
        return self._heads[id(attend.kv)][1]

    def rank_heads(self, heads: int, kv_heads: int) -> int:
        first, end = self._share(heads, kv_heads).heads
        return end - first

    def key_weights(self, kv: LayerKV, at: Tensor, queries: Tensor, spec: AttentionSpec) -> Tensor:
        heads, kv_heads = self._heads[id(kv)]
        rank_heads = slice(*self._share(heads, kv_heads).heads)
        part = self._backend.key_weights(kv, at, queries, spec.of_heads(rank_heads))
        return self._all_weights(part, heads, kv_heads)

    def _share(self, heads: int, kv_heads: int) -> HeadShare:
        return HeadShare.of(heads, kv_heads, self._rank, self._size)

    def _all_weights(self, part: Tensor, heads: int, kv_heads: int) -> Tensor:
        """Return the `key_weights` of all processes: [heads of this process, keys] -> [heads,
        keys]."""
        raise NotImplementedError


class SharedHeads(DividedHeads):
    """Attention divided by heads, over any backend. Results are gathered, unless their consumer is
    divided in the same way; then each process keeps its own part."""

    def __init__(self, backend: AttentionBackend, group: TorchGroup, *, fast: bool) -> None:
        super().__init__(backend, group.rank, group.size)
        self._group, self._fast = group, fast

    def run(self, attend: Attend) -> Tensor:
        heads, kv_heads, group = attend.q.shape[1], self.kv_heads(attend), self._group
        shares = [HeadShare.of(heads, kv_heads, rank, group.size) for rank in range(group.size)]
        part = heads_of(self._backend, attend, shares[group.rank])
        if part.choice is None:
            part_out = self._backend.run(part)
        else:
            part_out = self._backend.run_by_head(part, part.choice)
        return self._all_heads(
            part_out, [share.heads for share in shares], apart=attend.spec.local_heads
        )

    def run_latent(self, attend: AttendLatent) -> Tensor:
        heads, size = attend.q.shape[1], self._group.size
        shares = [share_of(heads, rank, size) for rank in range(size)]
        rank_heads = slice(*shares[self._group.rank])
        part = replace(
            attend,
            q=attend.q[:, rank_heads],
            q_rope=attend.q_rope[:, rank_heads],
            spec=attend.spec.of_heads(rank_heads),
        )
        return self._all_heads(
            self._backend.run_latent(part), shares, apart=attend.spec.local_heads
        )

    def run_compressed(self, attend: AttendCompressed) -> Tensor:
        groups, size = attend.spec.groups, self._group.size
        shares = [share_of(groups, rank, size) for rank in range(size)]
        part_out = self._backend.run_compressed(attend.of_groups(*shares[self._group.rank]))
        return self._all_heads(part_out, shares, apart=attend.local_heads)

    def _all_heads(self, part_out: Tensor, shares: list[tuple[int, int]], *, apart: bool) -> Tensor:
        """Return the results of all heads, [tokens, heads, dim].

        Args:
            part_out: [tokens, heads of this process, dim]; or groups of heads.
            shares: the first head of each process, and the one after its last.
            apart: their consumer is divided in the same way, so in the fast cut those of other
                processes are left unset.
        """
        (tokens, _, dim), heads = part_out.shape, shares[-1][1]
        if apart and self._fast:
            out = part_out.new_empty(tokens, heads, dim)
            out[:, slice(*shares[self._group.rank])] = part_out
            return out
        widths = [(end - first) * dim for first, end in shares]
        return self._group.gather_columns(part_out.flatten(1), widths).view(tokens, heads, dim)

    def _all_weights(self, part: Tensor, heads: int, kv_heads: int) -> Tensor:
        size = self._group.size
        shares = (HeadShare.of(heads, kv_heads, rank, size).heads for rank in range(size))
        widths = [end - first for first, end in shares]
        return self._group.gather_columns(part.t(), widths).t()


class GroupAttention(DividedHeads):
    """Attention divided by heads, with native kernels; all processes get all results."""

    def __init__(self, backend: CpuAttention, ops: Ops, group: Group) -> None:
        super().__init__(backend, group.rank, group.size)
        self._native, self._ops, self._group = backend, ops, group

    def run(self, attend: Attend) -> Tensor:
        tokens, heads, size = attend.q.shape
        kv_heads = self.kv_heads(attend)
        share = self._share(heads, kv_heads)
        part = heads_of(self._native, attend, share)
        if part.k is not None and kv_heads < self._group.size:
            part = replace(part, k=self._copied(part.k))  # rotated in place, but shared by others
        shape = tokens, heads, attend.spec.value_dim or size
        out = self._group.take(shape, attend.q.dtype)
        self._native.run_into(part, out[:, slice(*share.heads)])
        self._group.exchange()
        return out

    def run_latent(self, attend: AttendLatent) -> Tensor:
        heads = attend.q.shape[1]
        rank_heads = slice(*share_of(heads, self._group.rank, self._group.size))
        part = replace(
            attend,
            q=attend.q[:, rank_heads],
            q_rope=attend.q_rope[:, rank_heads],
            k_rope=attend.k_rope if attend.rotation is None else self._copied(attend.k_rope),
            spec=attend.spec.of_heads(rank_heads),
        )
        return self._all_heads(self._native.run_latent_by(self._ops, part), heads)

    def run_compressed(self, attend: AttendCompressed) -> Tensor:
        groups = attend.spec.groups
        part = attend.of_groups(*share_of(groups, self._group.rank, self._group.size))
        results = part.grouped(self._ops, self._native.over_entries(part))
        return self._all_heads(results, groups)

    def _all_heads(self, part_out: Tensor, heads: int) -> Tensor:
        """Return the results of all heads, or groups of heads: [tokens, those of this process, dim]
        -> [tokens, heads, dim]."""
        out = self._group.take((len(part_out), heads, part_out.shape[2]), part_out.dtype)
        rank_heads = slice(*share_of(heads, self._group.rank, self._group.size))
        self._group.copy(part_out.flatten(1), out[:, rank_heads].flatten(1))
        self._group.exchange()
        return out

    def _all_weights(self, part: Tensor, heads: int, kv_heads: int) -> Tensor:
        self._group.begin()
        out = self._group.take((heads, part.shape[1]), part.dtype)
        out[slice(*self._share(heads, kv_heads).heads)] = part
        self._group.exchange()
        every = out.clone()
        self._group.exchange()  # all have read what the next layer overwrites
        return every

    def _copied(self, k: Tensor) -> Tensor:
        """Return a copy of keys [tokens, heads, dim], which each process rotates in place."""
        return self._ops.scaled(k.flatten(1), 1.0).view(k.shape)
