"""Exchanges in shared memory give the results of torch's over gloo, in separate processes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from mmap import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("kvik.kernels.cpu._native", reason="kvik has no native kernels here")

from kvik.files import shared_memory
from kvik.kernels.cpu.group import Group, group_ops
from kvik.kernels.cpu.native import Native
from kvik.kernels.cpu.ops import native_ops
from kvik.kernels.torch_group import connect
from kvik.kernels.weights import MatrixSpec, float_weight

SIZE, SHARED = 3, 1 << 20


def product(rank: int, file: int, store: str, outputs: int) -> None:
    """In a process, compute a product with divided columns in both ways."""
    torch.set_num_threads(1)
    joined = connect(torch.device("cpu"), store, rank, SIZE, lambda: False)
    native = Native(1)
    group = Group(native, np.frombuffer(mmap(file, SHARED), np.uint8), rank, SIZE)
    ops, plain = group_ops(native, native_ops(native), group), native_ops(native)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(outputs, 64, generator=generator)
    x = torch.randn(5, 64, generator=generator)
    weight = float_weight(values)
    spec = MatrixSpec(weight.kind, outputs, 64, False, None, torch.float32, torch.device("cpu"))
    matrix = ops.matrix(spec)
    ops.pack_rows(matrix, 0, weight)
    ((first, end),) = ops.owned(matrix, 0, outputs) or [(0, 0)]
    found = ops.linear(x, matrix, None).clone()
    widths = joined.gather(torch.tensor(end - first))
    own = torch.empty(5, 0)
    if end > first:
        part = plain.matrix(replace(spec, rows=end - first))
        plain.pack_rows(part, 0, weight.rows(torch.arange(first, end)))
        own = plain.linear(x, part, None)
    assert torch.equal(found, joined.gather_columns(own, widths.tolist()))
    sent = torch.full((3,), float(rank))
    assert not joined.spread(sent).any()  # the first process has zeros
    assert joined.add_up(torch.full((1, 2), 0.5 + rank), None, x.dtype).tolist() == [[4.5, 4.5]]
    torch.manual_seed(rank)
    part, residual = torch.randn(5, 7), torch.ones(5, 7)
    ways = (joined.add_up, joined.add_up_shared)
    for dtype in (torch.float32, torch.bfloat16):
        once, again = (way(part, residual, dtype) for way in ways)
        assert once.dtype == dtype and torch.equal(once, again)
        assert len(joined.gather(once).unique(dim=0)) == 1


@pytest.mark.full
@pytest.mark.parametrize(
    "outputs",
    [
        pytest.param(96, marks=pytest.mark.nightly),
        pytest.param(75, marks=pytest.mark.nightly),
        40,  # one process has none
    ],
)
def test_exchanges_are_those_of_gloo(outputs: int, tmp_path: Path) -> None:
    file = shared_memory(SHARED)
    command = [sys.executable, __file__, str(file), str(tmp_path / "store"), str(outputs)]
    children = [
        subprocess.Popen([*command, str(rank)], pass_fds=(file,), stderr=subprocess.PIPE, text=True)
        for rank in range(SIZE)
    ]
    for child in children:
        _, errors = child.communicate(timeout=60)
        assert child.returncode == 0, errors


if __name__ == "__main__":
    product(int(sys.argv[4]), int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
