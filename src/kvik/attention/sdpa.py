"""Attention by torch's fused scaled_dot_product_attention over gathered keys and values.

Decoding rows are batched: the keys each row sees are gathered into [rows, keys, ...], and the query
heads that share a KV head become the query length, so K and V are read once per group. Shorter
rows are padded with their own last key, masked, so nothing unwritten or foreign is ever read. Rows
of very different lengths are split into several batches (`split`). Prefilling sequences run
one by one. The nodes of a tree are decoding rows, each of which gathers the keys of its own path,
so it computes the same as a plain decode at its position.

torch's kernels support neither capped scores nor sinks, learned ones or those of a window, and
slopes would need a mask for each head: layers that have these use the reference.

All index tensors and masks depend only on the step and are made in `plan`, not per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvik.attention.base import (
    Attend,
    AttentionBackend,
    AttentionMetadata,
    BackendCaps,
    LayerKV,
    keep_queries,
    read_both,
)
from kvik.attention.layout import StepLayout
from kvik.attention.reference import ReferenceAttention, distance_biases, within_reach
from kvik.kernels.ops import Ops
from kvik.kernels.upload import upload
from kvik.spec.visible_keys import Window, first_visible

# Batches of decoding rows with a common padded width, such that padding costs little.

ALIGNMENT = 16  # keys; see `DecodeRow.padded_width`
MAX_PADDING = 1024  # padded keys of a batch: they cost about as much as another batch
MAX_KEYS = 16384  # gathered keys of a batch with several rows: bounds the workspace


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One query."""

    # seq, token: index of its sequence, and of the query in the flat batch.
    seq: int
    token: int
    # first, visible: the first position that it sees, and the number of positions.
    first: int
    visible: int
    # For a node of a tree, the places in the sequence of the nodes on the path to it, which replace
    # the last positions.
    path: tuple[int, ...] = ()

    @property
    def padded_width(self) -> int:
        """Width in whole vectors: with a partial last vector, torch's kernels sum a row in another
        order when it is padded further, so the result would depend on the other rows."""
        return -(-self.visible // ALIGNMENT) * ALIGNMENT


def split(rows: list[DecodeRow]) -> list[list[DecodeRow]]:
    """Split rows into batches, the widest row of each first unless all rows share one batch.

    A batch grows, from wide rows to narrow ones, until its padding or its size is at the limit.
    """
    batches: list[list[DecodeRow]] = []
    width = padding = 0
    for row in sorted(rows, key=lambda row: row.padded_width, reverse=True):
        padding += width - row.padded_width
        full = not batches or padding > MAX_PADDING or (len(batches[-1]) + 1) * width > MAX_KEYS
        if full:
            batches.append([])
            width, padding = row.padded_width, 0
        batches[-1].append(row)
    return [rows] if len(batches) == 1 else batches


# Memory for gathered keys and values, kept between layers and steps.
#
# New memory from the system costs a page fault per 4 KiB, several times the cost of the gather.


class Workspace:
    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def gather(self, kv: LayerKV, keys: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return K and V of some positions; valid until the next call.

        Args:
            keys: [n] int64, KV positions.

        Returns:
            Each [n, kv_heads, head_dim] of `dtype`; for latent vectors they are the same.
        """
        if kv.k.dtype != dtype:
            k, v = read_both(kv, keys)
            return k.to(dtype), v.to(dtype)
        token_shape = kv.k.shape[2:]
        parts = 1 if kv.latent else 2
        shape = (parts, keys.shape[0], *token_shape)
        size = parts * keys.shape[0] * token_shape.numel()
        buffer = self._buffer
        if buffer.numel() < size or buffer.dtype != kv.k.dtype or buffer.device != kv.k.device:
            self._buffer = kv.k.new_empty(size)
        gathered = self._buffer[:size].view(shape).unbind()
        for stored, out in zip((kv.k, kv.v), gathered, strict=False):
            torch.index_select(stored.view(-1, *token_shape), 0, keys, out=out)
        return gathered[0], gathered[-1]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """Queries of decoding rows."""

    width: int
    # [rows] int64, flat index of each query; None: the step's tokens in order.
    tokens: Tensor | None
    keys: Tensor  # [rows * width] int64, KV positions
    mask: Tensor | None  # [rows, 1, 1, width], or None if every key is visible


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """A sequence with several queries."""

    # start, end: its tokens in the flat batch.
    start: int
    end: int
    keys: Tensor | None  # [width] int64, KV positions; None if there are only this step's tokens
    mask: Tensor | None  # [1, 1, end - start, width], or None for a plain causal square


@dataclass(frozen=True, slots=True)
class SdpaMetadata(AttentionMetadata):
    decode: tuple[DecodeBatch, ...]
    prefill: tuple[PrefillRow, ...]


class SdpaAttention(AttentionBackend):
    caps = BackendCaps(
        name="sdpa",
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
    )

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops)
        self._reference = ReferenceAttention(ops)
        self._workspace = Workspace()

    def plan(self, layout: StepLayout, window: Window | None) -> SdpaMetadata:
        decoding: list[DecodeRow] = []
        prefill: list[PrefillRow] = []
        if window is not None and window.sinks:
            return SdpaMetadata(layout, window, (), ())
        start = 0
        for i, (length, context) in enumerate(
            zip(layout.num_scheduled, layout.contexts, strict=True)
        ):
            nodes = layout.nodes(start, length)
            if nodes:
                decoding += _tree_rows(i, start, context - length, nodes, window)
            elif length == 1:
                first = max(layout.first_key(i), first_visible(context - 1, window))
                decoding.append(DecodeRow(i, start, first, context - first))
            else:
                prefill.append(_plan_prefill(layout, i, start, window))
            start += length
        decode = tuple(_plan_decode(layout, batch, start) for batch in split(decoding))
        return SdpaMetadata(layout, window, decode, tuple(prefill))

    def run(self, attend: Attend) -> Tensor:
        window = attend.metadata.window
        if attend.spec.options - {"distances"} == {"bidirectional"}:
            return self._bidirectional(attend)
        if attend.spec.options or (window is not None and window.sinks):
            return self._reference.run(attend)
        q, k, v = attend.stored(self._ops)
        kv, metadata, scale = attend.kv, attend.metadata, attend.spec.scale
        if kv.queries is not None:
            keep_queries(q, kv.queries, metadata.layout, scale)
        assert isinstance(metadata, SdpaMetadata)
        if len(metadata.decode) == 1 and metadata.decode[0].tokens is None:
            return attend.narrowed(self._decode(q, kv, metadata.decode[0], scale))
        out = torch.empty_like(q)
        for batch in metadata.decode:
            assert batch.tokens is not None
            rows = self._decode(q.index_select(0, batch.tokens), kv, batch, scale)
            out.index_copy_(0, batch.tokens, rows)
        for row in metadata.prefill:
            part = slice(row.start, row.end)
            fresh = None if k is None or v is None else (k[part], v[part])
            keys = row.keys
            if keys is None and fresh is None:
                keys = metadata.layout.slot_mapping[part]
            pair = self._workspace.gather(kv, keys, q.dtype) if keys is not None else fresh
            assert pair is not None
            out[part] = self._prefill(q[part], *pair, row.mask, scale)
        return attend.narrowed(out)

    def _bidirectional(self, attend: Attend) -> Tensor:
        """Attend among the tokens of the step, which has whole sequences."""
        (q, k), v, reach = attend.turned(self._ops), attend.v, attend.spec.bidirectional
        assert k is not None and v is not None and reach is not None
        parts, start, table = [], 0, attend.spec.distances
        for length in attend.metadata.layout.num_scheduled:
            part = slice(start, start + length)
            mask = within_reach(reach, length, length).to(q.device) if reach < length - 1 else None
            if table is not None:
                position = torch.arange(length, device=q.device)
                biases = distance_biases(table, position - position[:, None]).to(q.dtype)
                if mask is not None:
                    biases = biases.masked_fill(~mask, -torch.inf)
                mask = biases.unflatten(0, (k.shape[1], -1))  # [kv_heads, group, queries, keys]
            parts.append(self._prefill(q[part], k[part], v[part], mask, attend.spec.scale, False))
            start += length
        return torch.cat(parts)

    def _decode(self, q: Tensor, kv: LayerKV, batch: DecodeBatch, scale: float) -> Tensor:
        """Attend for a batch of q [rows, heads, head_dim]; returns the same shape."""
        rows, heads, dim = q.shape
        kv_heads = kv.k.shape[2]
        k, v = self._workspace.gather(kv, batch.keys, q.dtype)
        out = _attended(
            q.view(rows, kv_heads, heads // kv_heads, dim),
            k.view(rows, batch.width, kv_heads, dim).transpose(1, 2),
            v.view(rows, batch.width, kv_heads, dim).transpose(1, 2),
            batch.mask,
            scale,
        )  # [rows, kv_heads, group, head_dim]
        return out.reshape(rows, heads, dim)

    def _prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scale: float,
        causal: bool = True,
    ) -> Tensor:
        """q: [length, heads, head_dim] -> the same shape; k, v: [width, kv_heads, head_dim].

        Args:
            mask: of a `PrefillRow`.
            causal: if there is no mask.
        """
        length, heads, dim = q.shape
        kv_heads = k.shape[1]
        group = heads // kv_heads
        # KV heads are the batch dimension.
        out = _attended(
            q.view(length, kv_heads, group, dim).permute(1, 2, 0, 3),
            _for_each_head(k, group),
            _for_each_head(v, group),
            mask,
            scale,
            causal=causal and mask is None,
        )  # [kv_heads, group, length, head_dim]
        return out.permute(2, 0, 1, 3).reshape(length, heads, dim)


# Kernels on a GPU. Without cuDNN's, which torch prefers on Hopper: they are planned again for each
# shape, and here nearly every step has a new one.
ON_GPU = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _attended(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, causal: bool = False
) -> Tensor:
    """q: [batch, heads, queries, head_dim] -> the same shape; k, v with keys for queries."""
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)
    with sdpa_kernel(ON_GPU):
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)


def _for_each_head(x: Tensor, group: int) -> Tensor:
    """Repeat [keys, kv_heads, head_dim] for each head of a group: [kv_heads, group, keys,
    head_dim]. A view, but a copy on a GPU: there the kernel with masks, up to torch 2.12, reads
    some lengths wrongly if heads share memory."""
    shared = x.transpose(0, 1)[:, None].expand(-1, group, -1, -1)
    return shared if group == 1 or x.device.type == "cpu" else shared.contiguous()


def _tree_rows(
    seq: int, start: int, cached: int, nodes: tuple[int, ...], window: Window | None
) -> list[DecodeRow]:
    rows = []
    for node, word in enumerate(nodes):
        path = tuple(cached + i for i in range(len(nodes)) if word >> i & 1)
        context = cached + len(path)
        first = first_visible(context - 1, window)
        rows.append(DecodeRow(seq, start + node, first, context - first, path))
    return rows


def _plan_decode(layout: StepLayout, rows: list[DecodeRow], num_tokens: int) -> DecodeBatch:
    table, block_size = layout.block_table, layout.block_size
    device = table.device
    width = max(row.padded_width for row in rows)
    everything = len(rows) == num_tokens
    plain = everything and len(table) == num_tokens  # one query of each sequence
    columns = [[row.first for row in rows], [row.visible for row in rows]]
    if not plain:
        columns += [[row.seq for row in rows], [row.token for row in rows]]
        if any(row.path for row in rows):
            columns += _paths(rows)
    # The numbers known on the host, [numbers, rows], in one copy.
    numbers = upload(np.array(columns, np.int64), device)
    first, visible = numbers[0][:, None], numbers[1][:, None]
    column = torch.arange(width, device=device)
    position = first + torch.minimum(column, visible - 1)  # [rows, width]
    if len(columns) > 4:
        position = _on_paths(numbers[4], numbers[5:], position)
    rows_table = table if plain else table.index_select(0, numbers[2])
    block = rows_table.gather(1, position // block_size).long()
    keys = block * block_size + position % block_size
    mask = None
    if any(row.visible < width for row in rows):
        mask = _mask(column < visible)[:, None, None, :]
    tokens = None if everything else numbers[3]
    return DecodeBatch(width, tokens, keys.view(-1), mask)


def _paths(rows: list[DecodeRow]) -> list[list[int]]:
    """Return [1 + longest, rows]: the position at which the path of each row begins, then the
    path."""
    begins = [row.first + row.visible - len(row.path) for row in rows]
    return [begins, *map(list, zip_longest(*(row.path for row in rows), fillvalue=0))]


def _on_paths(begins: Tensor, paths: Tensor, position: Tensor) -> Tensor:
    """Return [rows, width]: each row's positions as places in the sequence.

    Args:
        begins, paths: see `_paths`.
    """
    behind = position - begins[:, None]
    # Without a path this is always below 0, as no position reaches first + visible.
    places = paths.t().gather(1, behind.clamp(min=0))
    return torch.where(behind >= 0, places, position)


def _plan_prefill(layout: StepLayout, seq: int, start: int, window: Window | None) -> PrefillRow:
    length, context, block_size = layout.num_scheduled[seq], layout.contexts[seq], layout.block_size
    device = layout.block_table.device
    end = start + length
    if length == context and first_visible(length - 1, window) == 0:
        return PrefillRow(start, end, None, None)
    cached = context - length
    first = max(layout.first_key(seq), first_visible(cached, window))
    key = torch.arange(first, context, device=device)
    query = torch.arange(cached, context, device=device)[:, None]
    visible = key <= query
    if window is not None:
        visible &= key >= window.first(query)
    keys = None
    if cached:
        block = layout.block_table[seq].index_select(0, key // block_size).long()
        keys = block * block_size + key % block_size
    return PrefillRow(start, end, keys, _mask(visible)[None, None])


def _mask(visible: Tensor) -> Tensor:
    """Return a mask for SDPA. On a CPU it is additive, since SDPA would convert a boolean mask to
    that in every layer."""
    if visible.device.type != "cpu":
        return visible
    return torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)
