"""Native operations of one process among several that compute a model together.

Every matrix is divided by its outputs, never by its inputs: each process computes some columns of a
product, writes them into memory that all share, and waits for the others. No sum is divided, so a
result has the same bits as in one process, in every format. (The usual division, by inputs in every
second matrix, adds partial sums: Shoeybi et al. 2019, section 3.)
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvik.kernels.cpu.barrier import BARRIER_BYTES, Barrier, BrokenGroup
from kvik.kernels.cpu.buffers import ALIGNMENT
from kvik.kernels.cpu.experts import CpuExperts
from kvik.kernels.cpu.matrix import TILE, TILES, CpuMatrices, CpuPacked, ceil_div
from kvik.kernels.cpu.native import Native
from kvik.kernels.cpu.ops import scale
from kvik.kernels.ops import Ops
from kvik.kernels.packing import Packing, Parts
from kvik.kernels.weights import SHARED, ExpertSet, Matrix, MatrixSpec, Weight
from kvik.spec.shares import share_of


class Group:
    """The processes, as seen by one of them.

    All make the same calls in the same order, so that shared memory is at the same place in each.
    """

    def __init__(
        self,
        native: Native,
        memory: np.ndarray,
        rank: int,
        size: int,
        *,
        whole_experts: bool = False,
    ) -> None:
        """
        Args:
            memory: [bytes] uint8, shared by all, initially zeros.
            whole_experts: each expert belongs to one process, undivided.
        """
        self.rank, self.size, self.whole_experts = rank, size, whole_experts
        self._native = native
        self.barrier = Barrier(memory)  # where they wait for each other
        self.barrier.open(size)
        rest = memory[BARRIER_BYTES:]
        half = len(rest) // (2 * ALIGNMENT) * ALIGNMENT
        self._recorded, self._aside = SharedPool(rest[:half]), rest[half:]
        self._used = 0  # bytes of `_aside`
        self.exchanges = 0  # number recorded

    @property
    def digest(self) -> str:
        """Digest of the recording: if it differs between processes, their recordings do not
        match."""
        return f"{self.exchanges} exchanges, {self._recorded.size} bytes shared"

    def own_experts(self, count: int) -> range:
        """Return the numbers of the experts of this process, if experts are whole."""
        return range(*share_of(count, self.rank, self.size))

    def fixed(self, shape: tuple[int, ...], dtype: type) -> np.ndarray:
        """Return zeros in shared memory that is never freed."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return self._recorded.keep(size).view(dtype).reshape(shape)

    def begin(self) -> None:
        """Begin calls that are not recorded; they reuse the memory of earlier ones."""
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return shared memory. It is valid until its tensor is deleted and the processes have
        synchronised; if nothing is being recorded, until `begin`."""
        if self._native.recording:
            return self._recorded.take(shape, dtype)
        first, size = self._used, math.prod(shape) * dtype.itemsize
        self._used = first + ceil_div(max(1, size), ALIGNMENT) * ALIGNMENT
        if self._used > len(self._aside):
            raise MemoryError(f"processes share {len(self._aside)} bytes, which are too few")
        return torch.from_numpy(self._aside[first : first + size]).view(dtype).view(shape)

    def share(self, hidden: Tensor) -> Tensor:
        """See `OtherRanks.share`."""
        self.begin()
        return self.take(tuple(hidden.shape), hidden.dtype).copy_(hidden)

    def spread(self, hidden: Tensor) -> Tensor:
        """Return `hidden`: the others have it already."""
        return hidden

    def give_up(self) -> None:
        """Stop all waiting between processes."""
        self.barrier.give_up()

    def close(self) -> None:
        """Do nothing: the processes own the memory."""

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy [rows, columns] to shared memory, where others will read it."""
        scale(self._native, source, 1.0, target)

    def exchange(self) -> None:
        """Wait for the others: after this call, their writes are visible."""
        self._native.launch("exchange", barrier=self.barrier.address, rank=self.rank)
        self.exchanges += self._native.recording
        self._recorded.met()


class SharedPool:
    """Shared memory of a recording. Memory that no tensor uses any more may still be read by other
    processes, until the next exchange."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory, self.size = memory, 0
        self._free: list[tuple[int, int]] = []  # bytes, first
        self._released: list[tuple[int, int]] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the smallest free part that fits without wasting half, or a new one."""
        size = math.prod(shape) * dtype.itemsize
        padded = ceil_div(max(1, size), ALIGNMENT) * ALIGNMENT
        fitting = [part for part in self._free if padded <= part[0] <= 2 * padded]
        if fitting:
            part = min(fitting)
            self._free.remove(part)
        else:
            part = padded, self.size
            self.keep(padded)
        view = self._memory[part[1] : part[1] + size]  # lives as long as a tensor uses its storage
        weakref.finalize(view, self._released.append, part).atexit = False
        return torch.from_numpy(view).view(dtype).view(shape)

    def keep(self, size: int) -> np.ndarray:
        """Return a part that is never freed."""
        first = self.size
        self.size += ceil_div(size, ALIGNMENT) * ALIGNMENT
        if self.size > len(self._memory):
            raise MemoryError(f"processes share {len(self._memory)} bytes, which are too few")
        return self._memory[first : first + size]

    def met(self) -> None:
        self._free += self._released
        self._released.clear()


@dataclass(frozen=True, slots=True)
class CutMatrix:
    """The rows of a matrix that this process multiplies."""

    local: Matrix  # a matrix of only these rows, or without rows
    first: int  # column of the product of the first one; for gate and up, in each of them


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a matrix that one process has."""

    spec: MatrixSpec  # of its rows, without biases
    first: int  # see `CutMatrix`
    tiles: slice  # of this process, of `count` in total
    count: int

    def of(self, name: str, part: Tensor) -> Tensor:
        """Return the section of these rows of a part of the packed matrix."""
        if name in SHARED:
            return part
        return part.view(self.count, -1)[self.tiles].flatten()  # a view: tiles are neighbours

    def cut(self, spec: MatrixSpec, local: Matrix, bias: Tensor | None) -> Matrix:
        """Return the matrix `spec`, whose weight this process has in part, with all biases."""
        if bias is not None:
            assert isinstance(local.data, CpuPacked)
            data = replace(local.data, bias_pair=spec.outputs)
            local = Matrix(replace(local.spec, bias=True), bias[self.first :], data)
        return Matrix(spec, bias, CutMatrix(local, self.first))


class CutMatrices:
    """Matrices divided by rows among the processes; all get all columns of products."""

    def __init__(self, matrices: CpuMatrices, group: Group) -> None:
        self._matrices, self._group = matrices, group

    def matrix(self, spec: MatrixSpec) -> Matrix:
        """See `Ops.matrix`. Rows are divided by tiles, so that parts are packed as in the whole.

        Raises:
            ValueError: see `CpuMatrices.matrix`.
        """
        share = self._share(spec)
        bias = torch.empty(spec.rows, dtype=torch.float32) if spec.bias else None
        return share.cut(spec, self._matrices.matrix(share.spec), bias)

    def over(self, spec: MatrixSpec, parts: Parts) -> Matrix:
        """See `Packing`: takes the rows of this process from parts with all rows."""
        share = self._share(spec)
        local = {name: share.of(name, part) for name, part in parts.items() if name != "bias"}
        return share.cut(spec, TILES.over(share.spec, local), parts.get("bias"))

    def _share(self, spec: MatrixSpec) -> Share:
        piece = TILE // 2 if spec.paired else TILE
        if spec.heads:
            piece = spec.outputs // spec.heads
        num_pieces, tiles = ceil_div(spec.outputs, piece), max(1, piece // TILE)
        begin, end = share_of(num_pieces, self._group.rank, self._group.size)
        if spec.expert is not None and self._group.whole_experts:
            number, count = spec.expert
            begin, end = 0, num_pieces if number in self._group.own_experts(count) else 0
        last = min(end * piece, spec.outputs)
        first = min(begin * piece, last)
        rows = (last - first) * (2 if spec.paired else 1)
        local = replace(spec, rows=rows, bias=False)
        return Share(local, first, slice(begin * tiles, end * tiles), num_pieces * tiles)

    def owned(self, matrix: Matrix, first: int, count: int) -> list[tuple[int, int]]:
        """See `Ops.owned`."""
        return [(low, high) for low, high, _ in self._runs(matrix, first, count)]

    def pack_rows(self, matrix: Matrix, first: int, weight: Weight) -> None:
        """See `Ops.pack_rows`.

        Raises:
            BrokenGroup: the group is lost, so loading need not continue.
        """
        if self._group.barrier.broken:
            raise BrokenGroup
        cut, count = _cut(matrix), weight.outputs
        self._matrices.share(cut.local, weight)
        for low, high, place in self._runs(matrix, first, count):
            rows = weight
            if (low, high) != (first, first + count):
                rows = weight.rows(torch.arange(low - first, high - first))
            self._matrices.pack_rows(cut.local, place, rows)

    def _runs(self, matrix: Matrix, first: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield the runs of these rows that this process has: first, end, and their place in its
        matrix."""
        cut, spec = _cut(matrix), matrix.spec
        outputs = cut.local.spec.outputs
        places = [(cut.first, 0)]  # start of a run of rows in the whole matrix, and here
        if spec.paired:
            places.append((spec.outputs + cut.first, outputs))
        for begin, place in places:
            low, high = max(first, begin), min(first + count, begin + outputs)
            if low < high:
                yield low, high, place + low - begin

    def linear(self, x: Tensor, matrix: Matrix, residual: Tensor | None) -> Tensor:
        """See `Ops.linear`."""
        cut, spec = _cut(matrix), matrix.spec
        y = self._group.take((x.shape[0], spec.outputs), spec.out_dtype)
        if cut.local.spec.rows:
            columns = slice(cut.first, cut.first + cut.local.spec.outputs)
            some = None if residual is None else residual[:, columns]
            self._matrices.linear(x, cut.local, some, y[:, columns])
        self._group.exchange()
        return y

    def linear_each(self, x: Tensor, matrix: Matrix, outputs: int) -> Tensor:
        """See `Ops.linear_each`; x and the result have this process's heads."""
        return self._matrices.linear_each(x, _cut(matrix).local, outputs)

    def rows(self, matrix: Matrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Ops.matrix_rows`."""
        cut = _cut(matrix)
        y = self._group.take((ids.shape[0], matrix.spec.inputs), dtype)
        if cut.local.spec.rows:
            self._matrices.rows(cut.local, ids, dtype, y, cut.first)
        self._group.exchange()
        return y


@dataclass(frozen=True, slots=True)
class CutExperts:
    """The part of each expert that this process multiplies."""

    local: ExpertSet  # the same rows of all experts
    # up, down: which columns of the intermediate result, and of the result, it computes.
    up: slice
    down: slice


class GroupExperts:
    """Experts divided by the rows of their matrices, so that all processes are equally busy for any
    choice of experts."""

    def __init__(self, experts: CpuExperts, group: Group) -> None:
        self._experts, self._group = experts, group

    def expert_set(self, up: Sequence[Matrix], down: Sequence[Matrix]) -> ExpertSet:
        """See `Ops.expert_set`."""
        ups, downs = ([_cut(matrix) for matrix in matrices] for matrices in (up, down))
        local = self._experts.expert_set(
            [matrix.local for matrix in ups], [matrix.local for matrix in downs]
        )
        parts = (
            slice(matrix.first, matrix.first + matrix.local.spec.outputs)
            for matrix in (ups[0], downs[0])
        )
        return ExpertSet(tuple(up), tuple(down), CutExperts(local, *parts))

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor | None,
        experts: ExpertSet,
        residual: Tensor | None,
    ) -> Tensor:
        """See `Ops.experts`."""
        cut, group = experts.data, self._group
        assert isinstance(cut, CutExperts)
        local = replace(cut.local, weigh_inputs=experts.weigh_inputs)
        inner, pairs = experts.up[0].spec.outputs, x.shape[0] * ids.shape[1]
        made = group.take((pairs, inner), x.dtype)
        y = group.take((x.shape[0], experts.outputs), x.dtype)
        mine = y[:, cut.down]
        if local.up[0].spec.rows:
            self._experts.launch(1, x, ids, weights, local, None, made[:, cut.up], mine)
        group.exchange()
        if local.down[0].spec.rows:
            some = None if residual is None else residual[:, cut.down]
            self._experts.launch(2, x, ids, weights, local, some, made, mine)
        group.exchange()
        return y


class OwnedExperts:
    """Whole experts, divided among the processes. Each process sums the results of all experts, in
    their order, as a single process does."""

    def __init__(self, experts: CpuExperts, group: Group) -> None:
        self._experts, self._group = experts, group

    def expert_set(self, up: Sequence[Matrix], down: Sequence[Matrix]) -> ExpertSet:
        """See `Ops.expert_set`."""
        numbers = self._group.own_experts(len(up))
        ups, downs = (
            [_cut(matrices[number]).local for number in numbers] for matrices in (up, down)
        )
        return ExpertSet(tuple(up), tuple(down), self._experts.expert_set(ups, downs))

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor | None,
        experts: ExpertSet,
        residual: Tensor | None,
    ) -> Tensor:
        """See `Ops.experts`."""
        assert isinstance(experts.data, ExpertSet)
        group, count = self._group, len(experts.up)
        local = replace(experts.data, weigh_inputs=experts.weigh_inputs)
        among = group.own_experts(count), count
        outputs = group.take((x.shape[0] * ids.shape[1], experts.outputs), torch.float32)
        self._experts.launch(3, x, ids, weights, local, None, None, outputs, among)
        group.exchange()
        y = self._experts.native.empty(x.shape[0], experts.outputs, dtype=x.dtype)
        self._experts.launch(4, x, ids, weights, local, residual, outputs, y, among)
        return y


def _cut(matrix: Matrix) -> CutMatrix:
    assert isinstance(matrix.data, CutMatrix)
    return matrix.data


def group_packing(native: Native, group: Group) -> Packing:
    """Return the layout of files with whole matrices; each process takes its rows from them."""
    return replace(TILES, over=CutMatrices(CpuMatrices(native), group).over, divided=True)


def own_ops(native: Native, ops: Ops) -> Ops:
    """Return the operations of a process alone, on inputs that it shares with others."""
    return replace(ops, experts=CpuExperts(native, shared=True).experts)


def group_ops(native: Native, ops: Ops, group: Group) -> Ops:
    """Return the operations whose products are divided among the processes."""
    cut = CutMatrices(CpuMatrices(native), group)
    experts = (OwnedExperts if group.whole_experts else GroupExperts)(CpuExperts(native), group)

    def nothing(x: Tensor, cap: float) -> None:
        """Do nothing: logits are shared, and only the first process changes them in place."""

    def unread(logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return a placeholder: only the first process needs the largest logits."""
        return logits[:, 0], logits[:, 0]

    return replace(
        ops,
        softcap=nothing if group.rank else ops.softcap,
        largest=unread if group.rank else ops.largest,
        matrix=cut.matrix,
        pack_rows=cut.pack_rows,
        owned=cut.owned,
        linear=cut.linear,
        linear_each=cut.linear_each,
        matrix_rows=cut.rows,
        expert_set=experts.expert_set,
        experts=experts.experts,
    )
