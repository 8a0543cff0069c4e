"""Products and attention divided among processes, here threads with shared memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kvik.kernels.cpu.barrier import Barrier, BrokenGroup
from kvik.kernels.cpu.group import Group, group_ops
from kvik.kernels.cpu.native import Native
from kvik.kernels.cpu.ops import native_ops
from kvik.kernels.ops import Ops
from kvik.kernels.rounding import round_int4, round_int8
from kvik.kernels.weights import Matrix, MatrixSpec, Weight, float_weight
from kvik.spec.shares import HeadShare, share_of

CPU = torch.device("cpu")


def in_turn(
    size: int, call: Callable[[Ops, Group], Tensor], *, whole_experts: bool = False
) -> list[Tensor]:
    """Return the results of all members of a group for the same calls."""
    memory = np.zeros(1 << 22, np.uint8)

    def one(rank: int) -> Tensor:
        native = Native(1)
        group = Group(native, memory, rank, size, whole_experts=whole_experts)
        return call(group_ops(native, native_ops(native), group), group)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


def filled(ops: Ops, weight: Weight, spec: MatrixSpec, bias: Tensor | None) -> Matrix:
    """Fill in runs of odd sizes, the last first."""
    matrix = ops.matrix(spec)
    for first in reversed(range(0, spec.rows, 37)):
        rows = torch.arange(first, min(first + 37, spec.rows))
        ops.pack_rows(matrix, first, weight.rows(rows))
    if bias is not None:
        matrix.bias.copy_(bias)
    return matrix


WEIGHTS: dict[str, Callable[[Tensor], Weight]] = {
    "float32": float_weight,
    "bfloat16": lambda w: float_weight(w.bfloat16()),
    "int8": lambda w: round_int8(w, True),
    "int4": lambda w: round_int4(w, 32),
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("rows", [320, 75, 9])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("activation", [None, "silu_and_mul"])
def test_products_are_those_of_one_process(kind, rows, size, activation) -> None:
    generator = torch.Generator().manual_seed(rows)
    rows += rows % 2 if activation else 0
    weight = WEIGHTS[kind](torch.randn(rows, 64, generator=generator))
    bias = None if activation else torch.randn(rows, generator=generator)
    spec = MatrixSpec(weight.kind, rows, 64, bias is not None, activation, torch.float32, CPU)
    x = torch.randn(5, 64, generator=generator)
    residual = torch.randn(5, spec.outputs, generator=generator)

    def call(ops: Ops, group: Group) -> Tensor:
        matrix = filled(ops, weight, spec, bias)
        found = ops.linear(x, matrix, residual).clone()
        if activation:
            return found
        ids = torch.tensor([0, rows - 1, rows // 2])
        return torch.cat((found.flatten(), ops.matrix_rows(matrix, ids, torch.float32).flatten()))

    native = Native(1)
    whole = call(native_ops(native), None)
    for found in in_turn(size, call):
        assert torch.equal(found, whole)


EXPERTS, HIDDEN, INNER = 5, 96, 64


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("size", "rows", "weighed"), [(2, 7, False), (3, 1, False), (5, 40, True)])
def test_experts_give_the_results_of_one_process(kind, whole, size, rows, weighed) -> None:
    """Some experts are chosen by no row, including all of one process."""
    generator = torch.Generator().manual_seed(size)
    up = [torch.randn(2 * INNER, HIDDEN, generator=generator) for _ in range(EXPERTS)]
    down = [torch.randn(HIDDEN, INNER, generator=generator) for _ in range(EXPERTS)]
    x, residual = torch.randn(2, rows, HIDDEN, generator=generator)
    ids = torch.rand(rows, EXPERTS - 1, generator=generator).argsort(1)[:, :2].contiguous() + 1
    weights = torch.rand(rows, 2, generator=generator)

    def call(ops: Ops, group: Group | None) -> Tensor:
        sets: list[list[Matrix]] = []
        for each, activation in ((up, "silu_and_mul"), (down, None)):
            made = []
            for i, values in enumerate(each):
                weight = WEIGHTS[kind](values)
                shape = (weight.kind, *values.shape)
                spec = MatrixSpec(
                    *shape, False, activation, torch.float32, CPU, expert=(i, EXPERTS)
                )
                made.append(filled(ops, weight, spec, None))
            sets.append(made)
        experts = replace(ops.expert_set(*sets), weigh_inputs=weighed)
        given = residual.clone() if group is None else residual  # one process may overwrite it
        return ops.experts(x, ids, weights, experts, given).clone()

    alone = call(native_ops(Native(1)), None)
    for found in in_turn(size, call, whole_experts=whole):
        assert torch.equal(found, alone)


def test_a_broken_group_ends_waits() -> None:
    memory, native = np.zeros(1 << 20, np.uint8), Native(1)
    group = Group(native, memory, 0, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(group.exchange)
        Group(Native(1), memory, 1, 2).barrier.give_up()
        waiting.result(timeout=10)
    assert group.barrier.broken


def test_memory_is_reused_after_an_exchange() -> None:
    native = Native(1)
    group = Group(native, np.zeros(1 << 20, np.uint8), 0, 1)
    with native.record({4: 0}):
        first = group.take((4, 16), torch.float32)
        place = first.data_ptr()
        del first
        other = group.take((4, 16), torch.float32)
        assert other.data_ptr() != place, "another process may still read it"
        group.exchange()
        assert group.take((4, 16), torch.float32).data_ptr() == place


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (9, 3), (14, 2), (6, 1), (5, 5)])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_every_head_is_in_one_process_with_its_keys(heads, kv_heads, size) -> None:
    shares = [HeadShare.of(heads, kv_heads, rank, size) for rank in range(size)]
    assert [head for share in shares for head in range(*share.heads)] == list(range(heads))
    each = heads // kv_heads
    for share in shares:
        own, keys = range(*share.heads), range(*share.kv_heads)
        assert own and len(own) % len(keys) == 0
        for i, head in enumerate(own):
            assert keys[i // (len(own) // len(keys))] == head // each


def test_shares_differ_by_one_at_most() -> None:
    for count in range(20):
        for size in range(1, 8):
            sizes = [b - a for a, b in (share_of(count, rank, size) for rank in range(size))]
            assert sum(sizes) == count and max(sizes) - min(sizes) <= 1


def test_a_broken_group_ends_loading() -> None:
    native = Native(1)
    group = Group(native, np.zeros(1 << 16, np.uint8), 0, 2)
    ops = group_ops(native, native_ops(native), group)
    weight = float_weight(torch.ones(64, 32))
    matrix = ops.matrix(MatrixSpec(weight.kind, 64, 32, False, None, torch.float32, CPU))
    ops.pack_rows(matrix, 0, weight)
    group.barrier.give_up()
    with pytest.raises(BrokenGroup):
        ops.pack_rows(matrix, 0, weight)


@pytest.mark.full
def test_heartbeats_continue_without_the_gil() -> None:
    barrier = Barrier(np.zeros(1 << 16, np.uint8))
    beating = barrier.beat(3)
    time.sleep(0.05)
    begun = barrier.beats(3)
    ctypes.PyDLL(None).usleep(1_000_000)  # with the GIL held
    assert barrier.beats(3) >= begun + 3
    assert not barrier.beats(2) and not barrier.broken
    del beating
    ended = barrier.beats(3)
    time.sleep(0.5)
    assert barrier.beats(3) == ended
