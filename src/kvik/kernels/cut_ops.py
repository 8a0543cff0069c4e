"""Operations of one process among several that compute a model together, over any `Ops`.

**Exact**: every matrix is divided by its outputs; a process computes some columns of a product, and
all processes gather all columns. No sum is divided, so a result is as accurate as in one process,
in every format.

**Fast** (Shoeybi et al. 2019, section 3): for two matrices with heads or channels between them, the
first is divided by outputs, which stay with their process, and the second by inputs; the results of
all processes are added in the order of their ranks. So a pair has one exchange instead of two or
three. Tensors keep the width of all columns, but a process writes only its own, so models and
layers need not be aware of this. Matrices that cannot be divided by inputs, because of groups of
quantised inputs, are divided as in the exact mode, and so are matrices outside of pairs, such as
the head and the embedding. Small matrices (`MatrixSpec.replicable`) are whole in each process.

**Whole experts**, an option of the fast mode: each expert belongs to one process, undivided, in any
format; the sums of all processes over their experts are added (Lepikhin et al. 2020, GShard).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvik.kernels.ops import Ops
from kvik.kernels.reference.experts import experts_by
from kvik.kernels.weights import ExpertSet, Matrix, MatrixSpec, Weight, in_nibbles
from kvik.spec.shares import TILE, share_of
from kvik.spec.weight_kind import WeightKind

if TYPE_CHECKING:
    from kvik.kernels.torch_group import TorchGroup

Runs = list[tuple[int, int]]  # first and end of each


@dataclass(slots=True)
class MatrixPart:
    """The part of a matrix that a process has."""

    # A matrix of only this part; without rows or inputs, there is nothing to multiply.
    local: Matrix
    rows: Runs  # of the whole matrix, in the order of the rows of `local`
    columns: Runs  # of the product, likewise
    # The range that it reads, so its product is a partial sum; None: all.
    inputs: tuple[int, int] | None
    # Columns that each process computes, which all gather; (): they are not gathered.
    widths: tuple[int, ...] = ()
    # Inputs that each process has, which are gathered first; (): all have all inputs.
    read: tuple[int, ...] = ()
    filled: bool = False  # whether the bias of `local` is set

    @property
    def empty(self) -> bool:
        return not self.local.spec.rows or not self.local.spec.inputs

    def ready(self, matrix: Matrix) -> Matrix:
        """Return `local` with its bias, which is taken from the loaded bias of the whole matrix."""
        if not self.filled:
            if self.local.bias is not None and matrix.bias is not None:
                self.local.bias.copy_(
                    torch.cat([matrix.bias[first:end] for first, end in self.rows])
                )
            self.filled = True
        return self.local


def cuts_inputs(kind: WeightKind, inputs: int, runs: Runs) -> bool:
    """Return whether a matrix can be divided by inputs, at the borders of these runs."""
    if kind.ordered:
        return False
    unit = max(kind.group, 2 if in_nibbles(kind) else 1)
    return all(border % unit == 0 or border == inputs for run in runs for border in run)


class DividedMatrices:
    """Matrices divided among the processes."""

    def __init__(self, ops: Ops, group: TorchGroup, *, fast: bool, whole_experts: bool) -> None:
        self._ops, self._group, self.fast = ops, group, fast
        self._whole_experts = whole_experts

    def matrix(self, spec: MatrixSpec) -> Matrix:
        """See `Ops.matrix`."""
        group = self._group
        group.matrices += 1
        group.numbers += spec.rows * spec.inputs
        part = self._part(spec)
        bias = None
        if spec.bias:
            dtype = torch.float32 if part.local.bias is None else part.local.bias.dtype
            bias = torch.empty(spec.rows, dtype=dtype, device=spec.device)
        return Matrix(spec, bias, part)

    def _part(self, spec: MatrixSpec) -> MatrixPart:
        rank, size, between = self._group.rank, self._group.size, spec.between
        if self.fast and spec.replicable:
            return self._of_rows(spec, [(0, spec.outputs)])
        if spec.expert is not None and self._whole_experts:
            number, count = spec.expert
            first, end = whole_experts_of(self._group, count)
            return self._of_rows(spec, [(0, spec.outputs)] if first <= number < end else [])
        if between is not None and self.fast:
            inputs_of_ranks = [between.of_rank(other, size) for other in range(size)]
            if not between.read:
                columns = between.made(rank, size)
                return self._of_rows(spec, columns)
            if cuts_inputs(spec.kind, spec.inputs, inputs_of_ranks) and spec.activation is None:
                first, end = inputs_of_ranks[rank]
                # The last process always has something to multiply, so it adds the bias.
                bias = spec.bias and rank == size - 1
                local = replace(spec, inputs=end - first, bias=bias)
                all_rows = [(0, spec.rows)]
                return MatrixPart(self._local_matrix(local), all_rows, all_rows, (first, end))
            part = self._by_outputs(spec)
            part.read = tuple(end - first for first, end in inputs_of_ranks)
            return part
        return self._by_outputs(spec)

    def _by_outputs(self, spec: MatrixSpec) -> MatrixPart:
        piece = spec.outputs // spec.heads if spec.heads else TILE
        num_pieces, size = -(-spec.outputs // piece), self._group.size
        shares = (share_of(num_pieces, rank, size) for rank in range(size))
        columns = [(min(a * piece, spec.outputs), min(b * piece, spec.outputs)) for a, b in shares]
        part = self._of_rows(spec, [columns[self._group.rank]])
        part.widths = tuple(end - first for first, end in columns)
        return part

    def _of_rows(self, spec: MatrixSpec, columns: Runs) -> MatrixPart:
        rows = list(columns)
        if spec.paired:  # gate, then up
            rows += [(spec.outputs + first, spec.outputs + end) for first, end in columns]
        local = replace(spec, rows=sum(end - first for first, end in rows))
        return MatrixPart(self._local_matrix(local), rows, columns, None)

    def _local_matrix(self, spec: MatrixSpec) -> Matrix:
        if spec.rows and spec.inputs:
            return self._ops.matrix(spec)
        return Matrix(spec, None, None)  # there is nothing to multiply

    def owned(self, matrix: Matrix, first: int, count: int) -> Runs:
        """See `Ops.owned`."""
        runs = sorted((low, high) for low, high, _ in _runs(part_of(matrix), first, count))
        joined: Runs = []
        for low, high in runs:
            begin = joined.pop()[0] if joined and low == joined[-1][1] else low
            joined.append((begin, high))
        return joined

    def pack_rows(self, matrix: Matrix, first: int, weight: Weight) -> None:
        """See `Ops.pack_rows`."""
        part, count = part_of(matrix), weight.outputs
        if part.empty:
            return
        if part.inputs is not None:
            weight = weight.columns(*part.inputs)
        self._ops.pack_rows(part.local, 0, weight.rows(slice(0, 0)))  # what all rows share
        for low, high, place in _runs(part, first, count):
            self._ops.pack_rows(part.local, place, weight.rows(slice(low - first, high - first)))

    def linear(self, x: Tensor, matrix: Matrix, residual: Tensor | None) -> Tensor:
        """See `Ops.linear`."""
        part, spec, group = part_of(matrix), matrix.spec, self._group
        if part.inputs is not None:
            first, end = part.inputs
            made = self._product(part, x[:, first:end], matrix, None)
            return group.add_up(made, residual, spec.out_dtype)
        if part.read:
            first = sum(part.read[: group.rank])
            x = group.gather_columns(x[:, first : first + part.read[group.rank]], part.read)
        some = None
        if residual is not None:
            some = torch.cat([residual[:, first:end] for first, end in part.columns], 1)
        made = self._product(part, x, matrix, some)
        if part.widths:
            return group.gather_columns(made, part.widths)
        return _spread_out(made, part.columns, spec.outputs)

    def _product(
        self, part: MatrixPart, x: Tensor, matrix: Matrix, residual: Tensor | None
    ) -> Tensor:
        if part.empty:
            width = part.local.spec.outputs
            return torch.zeros(len(x), width, dtype=matrix.spec.out_dtype, device=x.device)
        return self._ops.linear(x, part.ready(matrix), residual)

    def linear_each(self, x: Tensor, matrix: Matrix, outputs: int) -> Tensor:
        """See `Ops.linear_each`; x and the result have this process's heads."""
        return self._ops.linear_each(x, part_of(matrix).local, outputs)

    def rows(self, matrix: Matrix, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """See `Ops.matrix_rows`. For each id, only one process adds a row that is not zero."""
        part = part_of(matrix)
        ((first, end),) = part.rows
        if part.empty:
            local = torch.zeros(len(ids), matrix.spec.inputs, dtype=dtype, device=ids.device)
        else:
            inside = (ids >= first) & (ids < end)
            local = self._ops.matrix_rows(
                part.local, (ids - first).clamp_(0, end - first - 1), dtype
            )
            local = local.masked_fill(~inside[:, None], 0.0)
        return self._group.add_up(local, None, dtype)


class DividedExperts:
    """Experts divided by channels, so that all processes are equally busy for any choice of
    experts: one exchange for all of a token's experts. Experts that cannot be divided like this use
    `experts_by`, with two exchanges per expert."""

    def __init__(self, ops: Ops, matrices: DividedMatrices, group: TorchGroup) -> None:
        self._ops, self._group = ops, group
        self._fast, self._one_by_one = matrices.fast, experts_by(matrices.linear)

    def expert_set(self, up: Sequence[Matrix], down: Sequence[Matrix]) -> ExpertSet:
        """See `Ops.expert_set`."""
        parts = [[part_of(matrix) for matrix in matrices] for matrices in (up, down)]
        local = None
        if self._fast and parts[1][0].inputs is not None:
            local = (
                None
                if parts[1][0].empty
                else self._ops.expert_set(
                    *([part.local for part in matrices] for matrices in parts)
                )
            )
        return ExpertSet(tuple(up), tuple(down), local)

    def experts(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor | None,
        experts: ExpertSet,
        residual: Tensor | None,
    ) -> Tensor:
        """See `Ops.experts`."""
        if not self._fast or part_of(experts.down[0]).inputs is None:
            return self._one_by_one(x, ids, weights, experts, residual)
        made = x.new_zeros(len(x), experts.outputs)
        if isinstance(experts.data, ExpertSet):
            for matrix in (*experts.up, *experts.down):
                part_of(matrix).ready(matrix)
            local = replace(experts.data, weigh_inputs=experts.weigh_inputs)
            made = self._ops.experts(x, ids, weights, local, None)
        return self._group.add_up(made, residual, x.dtype)


class UndividedExperts:
    """Whole experts, divided among the processes: one exchange for all of a token's experts, after
    which a process has waited for the one whose experts most tokens chose."""

    def __init__(self, ops: Ops, group: TorchGroup) -> None:
        self._ops, self._group = ops, group

    def expert_set(self, up: Sequence[Matrix], down: Sequence[Matrix]) -> ExpertSet:
        """See `Ops.expert_set`."""
        first, end = whole_experts_of(self._group, len(up))
        ups, downs = (
            [part_of(matrix).local for matrix in matrices[first:end]] for matrices in (up, down)
        )
        return ExpertSet(tuple(up), tuple(down), self._ops.expert_set(ups, downs))

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
        first, end = whole_experts_of(self._group, len(experts.up))
        for matrix in (*experts.up[first:end], *experts.down[first:end]):
            part_of(matrix).ready(matrix)
        inside = (ids >= first) & (ids < end)
        local = replace(experts.data, weigh_inputs=experts.weigh_inputs)
        made = self._ops.experts(x, (ids - first).where(inside, -1), weights, local, None)
        return self._group.add_up(made, residual, x.dtype)


def whole_experts_of(group: TorchGroup, count: int) -> tuple[int, int]:
    """Return the first of `count` whole experts that this process has, and the end."""
    return share_of(count, group.rank, group.size)


def _spread_out(made: Tensor, columns: Runs, width: int) -> Tensor:
    """Write columns to their places in a tensor of all columns; the others are not written."""
    if made.shape[1] == width:
        return made
    spread = made.new_empty(len(made), width)
    begin = 0
    for first, end in columns:
        spread[:, first:end] = made[:, begin : begin + end - first]
        begin += end - first
    return spread


def _runs(part: MatrixPart, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of these rows that a process has: first, end, and their place in `own`."""
    place = 0
    for begin, end in part.rows:
        low, high = max(first, begin), min(first + count, end)
        if low < high:
            yield low, high, place + low - begin
        place += end - begin


def part_of(matrix: Matrix) -> MatrixPart:
    """Return the part of a matrix made by `cut_ops`."""
    assert isinstance(matrix.data, MatrixPart)
    return matrix.data


def cut_ops(ops: Ops, group: TorchGroup, *, fast: bool, whole_experts: bool) -> Ops:
    """Return the operations whose matrices are divided among the processes.

    Args:
        ops: of this process.
        fast, whole_experts: see the module's docstring.
    """
    matrices = DividedMatrices(ops, group, fast=fast, whole_experts=whole_experts)
    experts = (
        UndividedExperts(ops, group) if whole_experts else DividedExperts(ops, matrices, group)
    )
    return replace(
        ops,
        matrix=matrices.matrix,
        pack_rows=matrices.pack_rows,
        owned=matrices.owned,
        linear=matrices.linear,
        linear_each=matrices.linear_each,
        matrix_rows=matrices.rows,
        expert_set=experts.expert_set,
        experts=experts.experts,
    )
