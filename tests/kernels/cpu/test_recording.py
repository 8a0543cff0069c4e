"""Replayed calls equal eager calls at every size, and nothing else can be recorded."""

from __future__ import annotations

import resource
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("kvik.kernels.cpu._native", reason="kvik was installed without native kernels")

from kvik.kernels.cpu.buffers import BufferPool, WeightMemory, zeros
from kvik.kernels.cpu.native import Native
from kvik.kernels.cpu.ops import native_ops
from kvik.kernels.cpu.recording import CaptureError

TOKENS, SAMPLES, DIM = 12, 5, 33


@pytest.fixture(params=[1, 2])
def native(request) -> Native:
    return Native(threads=request.param)


def test_a_replay_equals_an_eager_run(native):
    ops = native_ops(native)
    table, weight = torch.randn(7, DIM), torch.randn(DIM)
    ids, rows = torch.zeros(TOKENS, dtype=torch.int64), torch.zeros(SAMPLES, dtype=torch.int64)

    def network(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        x = ops.gather_rows(table, ids)
        y = ops.rms_norm(ops.add(x, x), weight, 1e-5)
        return ops.gather_rows(ops.add(x, y), rows)

    with native.record({TOKENS: 0, SAMPLES: 1}) as recording:
        out = network(ids, rows)
    for tokens, samples in ((12, 5), (1, 1), (7, 0), (3, 2)):
        ids[:tokens] = torch.randint(0, 7, (tokens,))
        rows[:samples] = torch.randint(0, tokens, (samples,))
        out.fill_(torch.nan)
        native.replay(recording, (tokens, samples))
        assert torch.equal(out[:samples], network(ids[:tokens], rows[:samples]))
        assert out[samples:].isnan().all()


def test_kernels_do_not_run_during_recording(native):
    x = torch.ones(TOKENS, DIM)
    with native.record({TOKENS: 0}):
        out = native_ops(native).add(x, x)
    assert not out.any()


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.view(TOKENS, 3, 11).transpose(0, 1).flatten(1),  # a copy
        lambda x: x.add_(1),
        lambda x: x.to(torch.bfloat16),
        lambda x: torch.zeros(3),
        lambda x: torch.cat((x, x)),
        lambda x: x[torch.tensor([0])],
    ],
)
def test_torch_may_only_make_views(native, compute):
    x = torch.ones(TOKENS, DIM)
    with (
        pytest.raises(CaptureError, match="no native kernel"),
        torch.inference_mode(),
        native.record({TOKENS: 0}),
    ):
        compute(x)


def test_views_are_allowed(native):
    x = torch.ones(TOKENS, DIM)
    with torch.inference_mode(), native.record({TOKENS: 0}):
        a, b, c = x.view(TOKENS, 3, 11).unbind(1)
        x.view(TOKENS, 3, 11).split_with_sizes((1, 1, 1), 1)[2].flatten(1)
        a[:3], b.unsqueeze(0), c.t()


def test_rows_must_be_a_size_of_the_step(native):
    x = torch.ones(TOKENS + 1, DIM)
    with pytest.raises(CaptureError, match="13 rows"), native.record({TOKENS: 0}):
        native_ops(native).add(x, x)


def test_after_a_failed_recording_kernels_run_again(native):
    x = torch.ones(2, DIM)
    with pytest.raises(CaptureError), native.record({TOKENS: 0}):
        native_ops(native).add(x, x)
    assert native_ops(native).add(x, x).eq(2).all()


def test_arguments_are_checked_by_name(native):
    with pytest.raises(TypeError, match="add takes x, x_stride"):
        native.launch("add", x=0)
    with pytest.raises(KeyError):
        native.launch("no_such_kernel")


def test_a_buffer_without_tensors_is_reused():
    pool = BufferPool()
    first = pool.take((4, 8), torch.float32)
    at, view = first.data_ptr(), first[1:].view(-1)
    del first
    second = pool.take((4, 8), torch.float32)
    assert second.data_ptr() != at  # a view of the first one still exists
    del view
    assert pool.take((8, 8), torch.bfloat16).data_ptr() == at
    assert pool.take((1,), torch.float32).data_ptr() not in (at, second.data_ptr())


def test_weight_buffers_do_not_overlap_and_are_zero():
    memory = WeightMemory()
    taken = [memory.take(size) for size in (0, 1, 5000, 40 << 20, 3)]
    assert [len(t) for t in taken] == [0, 1, 5000, 40 << 20, 3]
    assert not any(t[:5000].any() for t in taken)
    spans = sorted((t.data_ptr(), t.data_ptr() + len(t)) for t in taken if len(t))
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(t.data_ptr() % 64 == 0 for t in taken if len(t))


def test_weights_first_fill_the_given_memory():
    first = np.zeros(1 << 20, np.uint8)
    memory = WeightMemory(first)
    taken = [memory.take(size) for size in (5000, 900_000, 900_000)]
    start = first.ctypes.data
    inside = [start <= t.data_ptr() and t.data_ptr() + len(t) <= start + len(first) for t in taken]
    assert inside == [True, True, False]


def test_zeros_have_the_requested_shape():
    made = zeros(3, 5, dtype=torch.bfloat16)
    assert made.shape == (3, 5) and made.dtype == torch.bfloat16 and not made.any()
    assert made.data_ptr() % (2 << 20) == 0


@pytest.mark.full
def test_recording_does_not_load_the_compiler_of_torch():
    """It would take 46 MB and half a second at each start."""
    script = """
import sys, torch
from kvik.kernels.cpu.native import Native
from kvik.kernels.cpu.ops import native_ops
native = Native(threads=1)
x = torch.ones(3, 4)
with native.record({3: 0}):
    native_ops(native).add(x.view(3, 4), x)
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="what is in memory is read from /proc")
def test_large_buffers_of_small_pages_only_take_written_memory():
    buffer = BufferPool().take((64 << 20,), torch.uint8)
    before = resident()
    buffer[:4096] = 1
    assert resident() - before < 2 << 20


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()
