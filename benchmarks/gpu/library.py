"""Minimal checks of the GPU-only features of torch and Triton that kvik uses.

When an engine fails, they show whether the library is at fault. Each function is a self-contained
reproduction: it needs nothing from this repository, and its source is printed when it fails. Each
raises if the answer is wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

from notes import Notes
from place import REHEARSED


def measure(notes: Notes) -> None:
    for probe in PROBES:
        notes.attempt(probe.__name__, partial(_run, notes, probe))


def _run(notes: Notes, probe: Callable[[], None]) -> None:
    try:
        if not REHEARSED:
            probe()
    except BaseException:
        print(f"-- alone:\nimport torch\n\n\n{inspect.getsource(probe)}\n\n{probe.__name__}()")
        notes.check(probe.__name__, False, "see the failure", op="library")
        raise
    notes.check(probe.__name__, True, op="library")


def floats_to_wider_logits() -> None:
    """Multiply bf16 by bf16 into fp32, without rounding the sums."""
    import torch

    x, y = (torch.randn(n, 256, device="cuda").bfloat16() for n in (3, 1000))
    found = torch.mm(x, y.t(), out_dtype=torch.float32)
    torch.testing.assert_close(found, x.float() @ y.float().t(), rtol=1e-4, atol=1e-3)


def sums_into_the_residual() -> None:
    """Add a product in place."""
    import torch

    x, y = (torch.randn(n, 256, device="cuda").bfloat16() for n in (5, 384))
    residual = torch.randn(5, 384, device="cuda").bfloat16()
    expected = residual.float() + x.float() @ y.float().t()
    found = residual.addmm_(x, y.t())
    assert found.data_ptr() == residual.data_ptr()
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-1)


def e4m3_with_scales_of_rows() -> None:
    """Multiply with scales [tokens, 1] and [1, outputs], for unaligned numbers of tokens."""
    import torch
    from torch.nn.functional import ScalingType, scaled_mm

    for tokens in (65, 128, 1000):
        x = torch.randn(tokens, 512, device="cuda").to(torch.float8_e4m3fn)
        y = torch.randn(384, 512, device="cuda").to(torch.float8_e4m3fn)
        of_x, of_y = (torch.rand(n, device="cuda") + 0.5 for n in (tokens, 384))
        row = ScalingType.RowWise
        found = scaled_mm(
            x, y.t(), of_x[:, None], row, of_y[None, :], row, output_dtype=torch.bfloat16
        )
        expected = (x.float() * of_x[:, None]) @ (y.float() * of_y[:, None]).t()
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-1)


def e4m3_with_one_scale_each() -> None:
    import torch
    from torch.nn.functional import ScalingType, scaled_mm

    x = torch.randn(65, 512, device="cuda").to(torch.float8_e4m3fn)
    y = torch.randn(384, 512, device="cuda").to(torch.float8_e4m3fn)
    of_x, of_y = (torch.tensor([scale], device="cuda") for scale in (0.5, 0.75))
    one = ScalingType.TensorWise
    found = scaled_mm(x, y.t(), of_x, one, of_y, one, output_dtype=torch.bfloat16)
    expected = x.float() @ y.float().t() * 0.375
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-1)


def e4m3_with_scales_of_blocks() -> None:
    """Multiply with scales of 128 inputs of a token and of 128 x 128 weights; five blocks, padded
    to eight."""
    import torch
    from torch.nn.functional import ScalingType, scaled_mm

    tokens, inputs, outputs = 68, 640, 384
    x = torch.randn(tokens, inputs, device="cuda").to(torch.float8_e4m3fn)
    y = torch.randn(outputs, inputs, device="cuda").to(torch.float8_e4m3fn)
    of_x = torch.rand(inputs // 128, tokens, device="cuda") + 0.5
    of_y = torch.rand(outputs // 128, 8, device="cuda") + 0.5
    few, square = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    found = scaled_mm(x, y.t(), of_x.t(), few, of_y.t(), square, output_dtype=torch.bfloat16)
    wide_x = x.float() * of_x.t().repeat_interleave(128, 1)
    wide_y = y.float() * of_y[:, :5].repeat_interleave(128, 0).repeat_interleave(128, 1)
    torch.testing.assert_close(found.float(), wide_x @ wide_y.t(), rtol=2e-2, atol=3e-1)


def a_captured_step() -> None:
    """Capture two graphs that share a pool on a side stream; warm up and replay them on the usual
    one. The second graph takes no more memory: it reuses the pool."""
    import torch

    side, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    weight = torch.randn(256, 256, device="cuda").bfloat16()
    x, y = (torch.zeros(8, 256, device="cuda").bfloat16() for _ in range(2))
    replays, reserved = [], []
    with torch.inference_mode():
        for rows in (8, 4):
            y[:rows].copy_(x[:rows] @ weight)
            before = torch.cuda.current_stream()
            side.wait_stream(before)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.stream(side):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                y[:rows].copy_(x[:rows] @ weight)
                graph.capture_end()
            before.wait_stream(side)
            replays.append((rows, graph))
            reserved.append(torch.cuda.memory_reserved())
        assert reserved[1] == reserved[0], reserved
        for rows, graph in replays:
            x.normal_()
            y.zero_()
            graph.replay()
            expected = x[:rows].float() @ weight.float()
            torch.testing.assert_close(y[:rows].float(), expected, rtol=2e-2, atol=2e-1)


def a_late_copy() -> None:
    """Copy to pinned memory after the kernels that make the data, and read after its event."""
    import torch

    there = torch.arange(1000, device="cuda") * 3
    here = torch.empty(1000, dtype=torch.int64, pin_memory=True)
    here.copy_(there, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    arrived.synchronize()
    assert here.tolist() == list(range(0, 3000, 3))


def integers_of_eight_bits() -> None:
    import torch

    x, y = (torch.randint(-127, 128, (64, 64), dtype=torch.int8, device="cuda") for _ in range(2))
    found = torch._int_mm(x, y.t())
    assert torch.equal(found.cpu(), x.cpu().int() @ y.cpu().int().t())


PROBES: tuple[Callable[[], None], ...] = (
    floats_to_wider_logits,
    sums_into_the_residual,
    integers_of_eight_bits,
    a_late_copy,
    a_captured_step,
    e4m3_with_one_scale_each,
    e4m3_with_scales_of_rows,
    e4m3_with_scales_of_blocks,
)
