"""The loops that measure the machine."""

from __future__ import annotations

import pytest
import torch
from helpers.native import Runtime, call, runtimes


@pytest.mark.parametrize("runtime", runtimes())
@pytest.mark.parametrize("peak", ["peak_f32", "peak_bf16", "peak_i8"])
def test_operations_grow_with_steps_and_threads(runtime: Runtime, peak: str) -> None:
    counts = []
    for threads, steps in ((1, 1), (1, 10), (runtime.threads, 10)):
        result = torch.zeros(1, dtype=torch.float64)
        call(Runtime(runtime.isa, threads), peak, steps=steps, result=result)
        counts.append(result.item())
    assert counts[0] > 0
    assert counts[1:] == [10 * counts[0], 10 * counts[0] * runtime.threads]


@pytest.mark.parametrize("runtime", runtimes())
def test_reads_any_number_of_bytes(runtime: Runtime) -> None:
    data, result = torch.ones(3 << 20, dtype=torch.uint8), torch.zeros(1, dtype=torch.float64)
    for count in (0, 1, 63, (1 << 20) + 7, 3 << 20):
        call(runtime, "read_memory", data=data, bytes=count, result=result)
        assert result.item() == count
