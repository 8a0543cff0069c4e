"""The stage of the native kernels, whose limits are measured by kernels that only read or only
compute."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from kvik.attention.base import LayerKV
from kvik.attention.cpu import CpuAttention
from kvik.kernels.cpu.buffers import zeros
from kvik.kernels.cpu.native import Native
from kvik.kernels.cpu.ops import native_ops
from kvik_bench.machine.stage import Call, Stage, Track

# Arithmetic -> native kernel that measures its peak.
PEAKS = {"fp32": "peak_f32", "bf16": "peak_bf16", "int8": "peak_i8"}
PEAK_STEPS = 200_000
MIN_READ = 32 << 20  # bytes in one sample: long enough for the clock


class NativeLimits:
    """Limits measured by native kernels that only read or only compute."""

    def __init__(self, native: Native, max_bytes: int) -> None:
        self._native = native
        self._data = zeros(max_bytes, dtype=torch.int8).fill_(1)
        self._result = torch.zeros(1, dtype=torch.float64)

    def read_rate(self, num_bytes: int) -> float:
        """Return the median of three reads."""
        assert num_bytes <= len(self._data)
        data, repeats = self._data.data_ptr(), max(1, MIN_READ // num_bytes)

        def once() -> float:
            return sum(
                self._run("read_memory", {"data": data, "bytes": num_bytes}) for _ in range(repeats)
            )

        once()
        return num_bytes * repeats / median(once() for _ in range(3))

    def memory_rate(self) -> float:
        size = len(self._data)
        return size / self._run("read_memory", {"data": self._data.data_ptr(), "bytes": size})

    def peak(self, arithmetic: str) -> float:
        """Return the best of three runs: in the first, a core may be asleep."""
        kernel = PEAKS[arithmetic]
        seconds = min(self._run(kernel, {"steps": PEAK_STEPS}) for _ in range(3))
        return self._result.item() / seconds

    def _run(self, kernel: str, arguments: dict[str, int]) -> float:
        started = time.perf_counter()
        self._native.launch(kernel, **arguments, result=self._result.data_ptr())
        return time.perf_counter() - started


class NativeStage(Stage):
    """Times the native kernels."""

    kernels = "native"
    backend: CpuAttention

    def __init__(self, threads: int, max_bytes: int, isa: str | None = None) -> None:
        self.native = Native(threads, isa)
        ops = native_ops(self.native)
        super().__init__(ops, CpuAttention(self.native, ops))
        self.limits = NativeLimits(self.native, max_bytes)

    def track(self, calls: Sequence[Call], most_rows: int) -> Track:
        with self.native.record({most_rows: 0}) as recording:
            for call in calls:
                call(most_rows)

        alive = tuple(calls)  # the recording has pointers to their tensors

        def seconds(rows: int) -> list[float]:
            assert len(alive) == len(calls)
            return [ns * 1e-9 for _, ns in self.native.replay_timed(recording, (rows,))]

        return seconds

    def memory(self, *shape: int) -> Tensor:
        return zeros(*shape, dtype=torch.bfloat16)

    def write(self, k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor) -> None:
        self.backend.store(k, v, kv, slots)
