"""Attention by the native kernels in one process of a group, which has some of the heads."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from kvik.attention.base import Attend, AttendLatent
from kvik.attention.cpu import CpuAttention
from kvik.attention.group import DividedHeads, own_heads
from kvik.kernels.cpu.group import Group
from kvik.kernels.ops import Ops
from kvik.spec.shares import HeadShare, share_of


class GroupAttention(DividedHeads):
    """Attention divided by heads, with native kernels; all processes get all results."""

    def __init__(self, backend: CpuAttention, ops: Ops, group: Group) -> None:
        super().__init__(backend)
        self._native, self._ops, self._group = backend, ops, group

    def run(self, attend: Attend) -> Tensor:
        tokens, heads, size = attend.q.shape
        kv_heads = self.kv_heads(attend)
        share = HeadShare.of(heads, kv_heads, self._group.rank, self._group.size)
        part = own_heads(attend, share)
        if part.k is not None and kv_heads < self._group.size:
            part = replace(part, k=self._copied(part.k))  # rotated in place, but shared by others
        out = self._group.take((tokens, heads, size), attend.q.dtype)
        self._native.run_into(part, out[:, slice(*share.heads)])
        self._group.exchange()
        return out

    def run_latent(self, attend: AttendLatent) -> Tensor:
        tokens, heads, _ = attend.q.shape
        own_heads = slice(*share_of(heads, self._group.rank, self._group.size))
        part = replace(
            attend,
            q=attend.q[:, own_heads],
            q_rope=attend.q_rope[:, own_heads],
            k_rope=self._copied(attend.k_rope),
        )
        own_out = self._native.run_latent_by(self._ops, part)  # [tokens, own heads, value]
        out = self._group.take((tokens, heads, own_out.shape[2]), own_out.dtype)
        self._group.copy(own_out.flatten(1), out[:, own_heads].flatten(1))
        self._group.exchange()
        return out

    def _copied(self, k: Tensor) -> Tensor:
        """Return a copy of keys [tokens, heads, dim], which each process rotates in place."""
        return self._ops.scaled(k.flatten(1), 1.0).view(k.shape)
