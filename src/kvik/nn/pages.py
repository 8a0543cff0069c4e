"""Pages: blocks of the KV cache as bytes, independent of their place in memory.

A page is a header of 64 bytes and the bytes of one block of one KV group, ordered by layer, tensor
(K, V, then their scales) and KV head. So a range of heads is a range of each tensor's bytes, a
range of layers is a range of the page, and a page is the same for every number of processes.

The states of a request, layer by layer, are divided into several pages of one size. Each begins
with the number of tokens that they cover, which may be fewer than the tokens of the page's hash by
accepted drafts (`RequestTable.covered`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd
from types import ModuleType
from typing import Any, Protocol
from zlib import crc32 as zlib_crc32

import numpy as np
import torch
from torch import Tensor

from kvik.kernels.upload import upload
from kvik.nn.kv_formats import KVCache
from kvik.spec.kv import PAGE_HEAD_BYTES, STATE_HEAD_BYTES, KVGroup
from kvik.spec.shares import kv_share

# Magic, version, KV group, fingerprint, hash, hash of the block before, bytes after the header, and
# CRC-32 of everything else.
_HEAD = struct.Struct("<4sHH16s16s16sII")
_CHECKED = _HEAD.size - 4
assert _HEAD.size == PAGE_HEAD_BYTES
MAGIC, VERSION = b"kvik", 1
ASSEMBLED = 16 << 20  # bytes of pages on a GPU that are copied together; no step runs meanwhile
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by bytes
FINGERPRINT_BYTES = 16


@dataclass(frozen=True, slots=True)
class PagePart:
    """The heads of each page that a process has: part `rank` of `size`."""

    block_size: int
    rank: int = 0
    size: int = 1


@dataclass(frozen=True, slots=True)
class PageName:
    """Identifies the content of a page."""

    # `FINGERPRINT_BYTES`, of everything but the tokens that keys and values depend on.
    fingerprint: bytes
    group: int
    hash: bytes


def seal(page: np.ndarray, name: PageName, parent: bytes) -> None:
    """Write the header of a page whose other bytes are complete.

    Args:
        page: [bytes] uint8, including the header.
    """
    size = len(page) - PAGE_HEAD_BYTES
    head = _HEAD.pack(MAGIC, VERSION, name.group, name.fingerprint, name.hash, parent, size, 0)
    checksum = _checksum(head, page)
    page[:PAGE_HEAD_BYTES] = np.frombuffer(head[:_CHECKED] + struct.pack("<I", checksum), np.uint8)


def is_good(page: np.ndarray, name: PageName) -> bool:
    """Return whether a page is complete and has this content.

    Args:
        page: [bytes] uint8, as read.
    """
    if len(page) < PAGE_HEAD_BYTES:
        return False
    head = page[:PAGE_HEAD_BYTES].tobytes()
    magic, version, group, fingerprint, key, _, size, checksum = _HEAD.unpack(head)
    valid = (magic, version, size) == (MAGIC, VERSION, len(page) - PAGE_HEAD_BYTES)
    if not valid or (fingerprint, group, key) != (name.fingerprint, name.group, name.hash):
        return False
    return _checksum(head, page) == checksum


def _checksum(head: bytes, page: np.ndarray) -> int:
    """Return the CRC-32 of a header without its last field, and of the bytes after it."""
    start = zlib_crc32(head[:_CHECKED])
    native = _native()
    if native is not None and native.has_crc32():
        return int(native.crc32(page[PAGE_HEAD_BYTES:], start))
    return zlib_crc32(page[PAGE_HEAD_BYTES:].data, start)


@cache
def _native() -> ModuleType | None:
    """Return the native code; None: kvik was installed without it."""
    try:
        from kvik.kernels.cpu import _native as native
    except ImportError:
        return None
    return native


class GroupPages(Protocol):
    """Copies a process's share of the blocks of one KV group from and to pages."""

    num_bytes: int  # of a page, including the header

    def copy_out(self, blocks: Sequence[int], pages: np.ndarray, rows: Sequence[int]) -> None:
        """Copy blocks to rows of pages: [pages, at least num_bytes] uint8. The headers are left
        unchanged."""
        ...

    def copy_in(self, pages: np.ndarray, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy rows of pages to blocks."""
        ...

    def complete(self, blocks: Sequence[int]) -> bool:
        """Note that all pages of a load were copied to blocks. Returns whether they fit."""
        ...


class HostPages:
    """`GroupPages` of a cache on a CPU."""

    def __init__(
        self,
        group: KVGroup,
        local_group: KVGroup,
        cache: KVCache,
        share: PagePart,
        *,
        heads_first: bool,
        first: int,
    ) -> None:
        """
        Args:
            group: with all layers and heads.
            local_group: the part of it in `cache`.
            share, heads_first: see `group_pages`.
            first: the first byte of these layers in a page.
        """
        self._shares = group.shares
        self._parts: list[tuple[np.ndarray, int, int]] = []  # [blocks, ...] uint8, first, end
        heads = group.spec.num_kv_heads
        begin, end = kv_share(heads, share.rank, share.size)
        # If several processes have the same heads, the first one writes them.
        self._writes = not share.rank or kv_share(heads, share.rank - 1, share.size) != (begin, end)
        for layer, spec in zip(group.layers, group.specs, strict=True):
            at = first
            first += spec.bytes_per_token * share.block_size
            if layer not in local_group.layers:
                continue
            kv = cache.of(layer)
            for tensor in kv.tensors:
                blocks = _bytes_of(tensor, heads_first=heads_first)
                if tensor is kv.index:  # every process has all of it
                    self._parts.append((blocks, at, at + blocks[0].size))
                    at += blocks[0].size
                    continue
                head = blocks[0].size // (end - begin)  # bytes
                self._parts.append((blocks, at + begin * head, at + end * head))
                at += heads * head
        self.num_bytes = first
        counts = [-(-len(blocks) // self._shares) for blocks, _, _ in self._parts]
        self._num_blocks = min(counts, default=0)
        copies = heads_first and bool(self._parts)  # a stage may have no layer of the group
        self._table = _table(self._parts, self._shares) if copies else None

    def copy_out(self, blocks: Sequence[int], pages: np.ndarray, rows: Sequence[int]) -> None:
        if not self._writes:
            return
        if self._table is not None:
            self._copy(blocks, pages, rows, load=False)
            return
        at, to = np.array(blocks) * self._shares, np.array(rows)
        for part, first, end in self._parts:  # all blocks at once: numpy's calls are slow
            pages[to, first:end] = part[at].reshape(len(at), -1)

    def copy_in(self, pages: np.ndarray, rows: Sequence[int], blocks: Sequence[int]) -> None:
        if self._table is not None:
            self._copy(blocks, pages, rows, load=True)
            return
        for row, block in zip(rows, blocks, strict=True):
            for part, first, end in self._parts:
                target = part[block * self._shares]
                target[...] = pages[row, first:end].reshape(target.shape)

    def complete(self, blocks: Sequence[int]) -> bool:
        return True

    def _copy(
        self, blocks: Sequence[int], pages: np.ndarray, rows: Sequence[int], *, load: bool
    ) -> None:
        """Copy in one native call, which releases the GIL: parts of blocks are ranges of bytes."""
        native = _native()
        assert native is not None and self._table is not None
        block_ids, to = np.array(blocks, np.int64), np.array(rows, np.int64)
        native.copy_pages(self._table, self._num_blocks, block_ids, pages, to, load)


class DevicePages:
    """`GroupPages` of a cache on a GPU that has all layers and heads. Pages are in pinned memory.

    Copies are put on the current stream: they see what was launched before, and are seen by what is
    launched after, but end later than a call. A block is many pieces of memory, so its page is put
    together on the GPU, and crosses the bus as a whole.
    """

    def __init__(
        self, group: KVGroup, cache: KVCache, block_size: int, first: int = PAGE_HEAD_BYTES
    ) -> None:
        """
        Args:
            first: the first byte of these layers in a page.
        """
        self.num_bytes = first + group.bytes_per_token * block_size
        self._first, self._shares = first, group.shares
        self._parts: list[tuple[Tensor, int]] = []  # [blocks, ...], the first byte in a page
        for layer in group.layers:
            for tensor in cache.of(layer).tensors:
                self._parts.append((_words_of(tensor, gcd(first, self.num_bytes, 8)), first))
                first += tensor[0].nbytes
        self._device = self._parts[0][0].device
        self._at_once = max(1, ASSEMBLED // self.num_bytes)  # pages at a time

    def copy_out(self, blocks: Sequence[int], pages: np.ndarray, rows: Sequence[int]) -> None:
        for at, assembled, hosted in self._begin(pages, rows, blocks):
            for tensor, first in self._parts:
                _within(assembled, tensor, first).copy_(tensor.index_select(0, at))
            for page, target in zip(assembled, hosted, strict=True):
                target.copy_(page[self._first :], non_blocking=True)

    def copy_in(self, pages: np.ndarray, rows: Sequence[int], blocks: Sequence[int]) -> None:
        for at, assembled, hosted in self._begin(pages, rows, blocks):
            for page, source in zip(assembled, hosted, strict=True):
                page[self._first :].copy_(source, non_blocking=True)
            for tensor, first in self._parts:
                tensor.index_copy_(0, at, _within(assembled, tensor, first))

    def complete(self, blocks: Sequence[int]) -> bool:
        return True

    def _begin(
        self, pages: np.ndarray, rows: Sequence[int], blocks: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """Yield some blocks at a time: their places in the cache, [n]; memory on the GPU for their
        pages, [n, num_bytes] uint8; the bytes of these layers in each row."""
        host = torch.from_numpy(pages)[:, self._first : self.num_bytes]
        for start in range(0, len(blocks), self._at_once):
            some = np.array(blocks[start : start + self._at_once], np.int64)
            at = upload(some * self._shares, self._device)
            assembled = torch.empty(
                len(some), self.num_bytes, dtype=torch.uint8, device=self._device
            )
            yield at, assembled, [host[row] for row in rows[start : start + self._at_once]]


class StatePages:
    """`GroupPages` of states on a CPU: "block" row * count + part is a part of a row of the
    pool."""

    def __init__(
        self,
        pool: Tensor,
        first: int,
        num_bytes: int,
        count: int,
        covered: np.ndarray | None = None,
        *,
        writes: bool = True,
    ) -> None:
        """
        Args:
            pool: [rows, numbers] fp32, the states of the layers of this process.
            first: bytes of the states of the layers before these.
            num_bytes: of a page.
            count: pages of a row.
            covered: [rows] int32, tokens that each state covers; None: another process has it.
            writes: copies rows to pages; else another process with the same layers does.
        """
        self.num_bytes, self._count, self._first, self._writes = num_bytes, count, first, writes
        self._begin = PAGE_HEAD_BYTES + STATE_HEAD_BYTES
        self._pool = self._bytes_of(pool)  # [rows, bytes] uint8
        self._covered = covered
        rows = 0 if covered is None else len(covered)
        self._loaded = np.zeros(rows * count, np.int64)  # [parts], how many tokens each covers

    def copy_out(self, blocks: Sequence[int], pages: np.ndarray, rows: Sequence[int]) -> None:
        for block, row in zip(blocks, rows, strict=True):
            if self._covered is not None:
                self._head(pages, row)[0] = self._covered[block // self._count]
            if self._writes:
                self._copy(block, pages, row, load=False)

    def copy_in(self, pages: np.ndarray, rows: Sequence[int], blocks: Sequence[int]) -> None:
        for block, row in zip(blocks, rows, strict=True):
            if self._covered is not None:
                self._loaded[block] = self._head(pages, row)[0]
            self._copy(block, pages, row, load=True)

    def complete(self, blocks: Sequence[int]) -> bool:
        """See `GroupPages.complete`. The parts of a row must be of the same state."""
        if not blocks:
            return True
        assert self._covered is not None
        covered = self._loaded[list(blocks)]
        self._covered[blocks[0] // self._count] = covered[0]
        return bool((covered == covered[0]).all())

    def _head(self, pages: np.ndarray, row: int) -> np.ndarray:
        head: np.ndarray = pages[row, PAGE_HEAD_BYTES : self._begin].view(np.int64)
        return head

    def _copy(self, block: int, pages: np.ndarray, row: int, *, load: bool) -> None:
        size, (at, part) = self.num_bytes - self._begin, divmod(block, self._count)
        start = part * size  # of the states of all layers
        begin = max(start, self._first)
        end = min(start + size, self._first + self._pool.shape[1])
        if begin >= end:
            return
        in_pool = self._pool[at, begin - self._first : end - self._first]
        in_page = pages[row, self._begin + begin - start : self._begin + end - start]
        self._move(in_page, in_pool, load=load)

    def _bytes_of(self, pool: Tensor) -> Any:
        return pool.view(torch.uint8).numpy()

    def _move(self, in_page: np.ndarray, in_pool: Any, *, load: bool) -> None:
        source, target = (in_page, in_pool) if load else (in_pool, in_page)
        target[...] = source


class DeviceStatePages(StatePages):
    """`GroupPages` of states on a GPU. Copies are put on the current stream, as by `DevicePages`;
    the host reads and writes how many tokens a state covers at once."""

    def _bytes_of(self, pool: Tensor) -> Any:
        return pool.view(torch.uint8)

    def _move(self, in_page: np.ndarray, in_pool: Any, *, load: bool) -> None:
        on_host = torch.from_numpy(in_page)
        source, target = (on_host, in_pool) if load else (in_pool, on_host)
        target.copy_(source, non_blocking=True)


class JoinedPages:
    """`GroupPages` of the layers of a KV group and, after them, of others with the same blocks."""

    def __init__(self, pages: GroupPages, others: GroupPages) -> None:
        self._both, self.num_bytes = (pages, others), others.num_bytes

    def copy_out(self, blocks: Sequence[int], pages: np.ndarray, rows: Sequence[int]) -> None:
        for part in self._both:
            part.copy_out(blocks, pages, rows)

    def copy_in(self, pages: np.ndarray, rows: Sequence[int], blocks: Sequence[int]) -> None:
        for part in self._both:
            part.copy_in(pages, rows, blocks)

    def complete(self, blocks: Sequence[int]) -> bool:
        return all(part.complete(blocks) for part in self._both)


def group_pages(
    groups: Sequence[KVGroup],
    local_groups: Sequence[KVGroup],
    cache: KVCache,
    share: PagePart,
    *,
    heads_first: bool,
    first: int = PAGE_HEAD_BYTES,
) -> tuple[GroupPages, ...]:
    """Return the `GroupPages` of each KV group.

    Args:
        groups: with all layers and heads.
        local_groups: the parts of them in `cache`.
        heads_first: a block's bytes are ordered by heads, the layout of the native kernels; else
            they are [block_size, kv_heads, ...].
        first: the first byte of their layers in a page.
    """
    if cache.storages and cache.storages[0].device.type != "cpu":
        return tuple(DevicePages(group, cache, share.block_size, first) for group in groups)
    pairs = zip(groups, local_groups, strict=True)
    return tuple(
        HostPages(*pair, cache, share, heads_first=heads_first, first=first) for pair in pairs
    )


def _table(parts: Sequence[tuple[np.ndarray, int, int]], shares: int) -> np.ndarray | None:
    """Return [parts, 4] int64 for `_native.copy_pages`; None: there are no native kernels."""
    if _native() is None:
        return None
    rows = [
        (part.ctypes.data, part.strides[0] * shares, first, end - first)
        for part, first, end in parts
    ]
    return np.array(rows, np.int64).reshape(-1, 4)


def _bytes_of(tensor: Tensor, *, heads_first: bool) -> np.ndarray:
    """[num_blocks, block_size, kv_heads, ...] -> its memory, [num_blocks, kv_heads, block_size,
    bytes] uint8, or [num_blocks, bytes] if a block has that order already."""
    if heads_first:
        return tensor.flatten(1).view(torch.uint8).numpy()
    if tensor.dim() == 3:
        tensor = tensor[..., None]
    return tensor.view(torch.uint8).permute(0, 2, 1, 3).numpy()


def _words_of(tensor: Tensor, widest: int) -> Tensor:
    """[num_blocks, block_size, kv_heads, ...] -> its memory, [num_blocks, kv_heads, block_size, n],
    in integers of at most `widest` bytes, of which a GPU copies more at a time than of bytes."""
    if tensor.dim() == 3:
        tensor = tensor[..., None]
    width = gcd(tensor.shape[-1] * tensor.itemsize, widest)
    return tensor.view(WORDS[width]).permute(0, 2, 1, 3)


def _within(pages: Tensor, tensor: Tensor, first: int) -> Tensor:
    """Return the part of pages [n, bytes] that has blocks of a tensor [num_blocks, ...], as
    [n, ...]."""
    part = pages[:, first : first + tensor[0].nbytes]
    return part.view(tensor.dtype).unflatten(1, tensor.shape[1:])
