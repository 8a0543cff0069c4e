"""Attention by the native kernels in one process of a group, which has some of the heads."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvik.attention.base import Attend, AttendLatent, AttentionMetadata, LayerKV, StepLayout
from kvik.attention.cpu import CpuAttention
from kvik.attention.group import own_heads
from kvik.kernels.cpu.group import Group
from kvik.kernels.ops import Ops
from kvik.spec.shares import HeadShare, share_of
from kvik.spec.visible_keys import Window


class GroupAttention:
    """Attention in which each process computes some heads, and all processes get all results."""

    def __init__(self, backend: CpuAttention, ops: Ops, group: Group) -> None:
        self._backend, self._ops, self._group = backend, ops, group
        self.caps = backend.caps
        self._kv_heads: dict[int, int] = {}  # of all processes, by the id of a layer's cache

    def plan(self, layout: StepLayout, window: Window | None) -> AttentionMetadata:
        return self._backend.plan(layout, window)

    def run(self, attend: Attend) -> Tensor:
        tokens, heads, _ = attend.q.shape
        if attend.k is not None:
            self._kv_heads[id(attend.kv)] = attend.k.shape[1]
        kv_heads = self._kv_heads[id(attend.kv)]
        share = HeadShare.of(heads, kv_heads, self._group.rank, self._group.size)
        part = own_heads(attend, share)
        if part.k is not None and kv_heads < self._group.size:
            part = replace(part, k=self._copied(part.k))  # rotated in place, but shared by others
        size = attend.q.shape[2]
        out = self._group.take((tokens, heads, size), attend.q.dtype)
        self._backend.run_into(part, out[:, slice(*share.heads)])
        self._group.exchange()
        return out

    def run_latent(self, attend: AttendLatent) -> Tensor:
        tokens, heads, _ = attend.q.shape
        own = slice(*share_of(heads, self._group.rank, self._group.size))
        part = replace(
            attend,
            q=attend.q[:, own],
            q_rope=attend.q_rope[:, own],
            k_rope=self._copied(attend.k_rope),
        )
        found = self._backend.run_latent_by(self._ops, part)  # [tokens, own heads, value]
        out = self._group.take((tokens, heads, found.shape[2]), found.dtype)
        self._group.copy(found.flatten(1), out[:, own].flatten(1))
        self._group.exchange()
        return out

    def _copied(self, k: Tensor) -> Tensor:
        """Return a copy of keys [tokens, heads, dim], which each process rotates in place."""
        return self._ops.scaled(k.flatten(1), 1.0).view(k.shape)

    def move(self, kv: LayerKV, source: Tensor, target: Tensor) -> None:
        self._backend.move(kv, source, target)

    def keys(self, kv: LayerKV, at: Tensor) -> Tensor:
        return self._backend.keys(kv, at)
