"""The stage of the native kernels, whose limits are measured by kernels that only read or only
compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from kvik.kernels.cpu.buffers import zeros
from kvik.kernels.cpu.native import DTYPES, Native
from kvik.kernels.cpu.ops import native_ops
from kvik_bench.machine.stage import BLOCK_SIZE, Attended, Call, Track

# Arithmetic -> native kernel that measures its peak.
PEAKS = {"fp32": "peak_f32", "bf16": "peak_bf16", "int8": "peak_i8"}
PEAK_STEPS = 200_000
LEAST_READ = 32 << 20  # bytes in one sample: long enough for the clock


class NativeLimits:
    """Limits measured by native kernels that only read or only compute."""

    def __init__(self, native: Native, most_bytes: int) -> None:
        self._native = native
        self._data = zeros(most_bytes, dtype=torch.int8).fill_(1)
        self._result = torch.zeros(1, dtype=torch.float64)

    def read_rate(self, num_bytes: int) -> float:
        """Return the median of three reads."""
        assert num_bytes <= len(self._data)
        data, repeats = self._data.data_ptr(), max(1, LEAST_READ // num_bytes)

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


class NativeStage:
    """Times the native kernels."""

    kernels = "native"

    def __init__(self, threads: int, most_bytes: int) -> None:
        self.native = Native(threads)
        self.ops = native_ops(self.native)
        self.limits = NativeLimits(self.native, most_bytes)

    def track(self, calls: Sequence[Call], most_rows: int) -> Track:
        with self.native.record({most_rows: 0}) as recording:
            for call in calls:
                call(most_rows)

        alive = tuple(calls)  # the recording has pointers to their tensors

        def seconds(rows: int) -> list[float]:
            assert len(alive) == len(calls)
            return [ns * 1e-9 for _, ns in self.native.replay_timed(recording, (rows,))]

        return seconds

    def attention(self, work: Attended) -> Callable[[], float]:
        tokens, context = work.sequences * work.queries, work.context
        starts = torch.arange(0, tokens + 1, work.queries, dtype=torch.int32)
        lengths = torch.full((work.sequences,), context, dtype=torch.int32)
        keys, values = (_on_huge_pages(blocks) for blocks in (work.keys, work.values))
        with self.native.record({}) as recording:
            out = self.native.empty(*work.q.shape, dtype=work.q.dtype)
            self.native.launch(
                "attention",
                q=work.q.data_ptr(),
                q_stride=work.q.stride(0),
                q_rope=0,
                q_rope_stride=0,
                value_dim=work.head_dim,
                k_cache=keys.data_ptr(),
                v_cache=values.data_ptr(),
                k_scales=0,
                v_scales=0,
                block_table=work.table.data_ptr(),
                table_stride=work.table.stride(0),
                query_start_loc=starts.data_ptr(),
                seq_lens=lengths.data_ptr(),
                num_seqs=work.sequences,
                heads=work.heads,
                kv_heads=work.kv_heads,
                head_dim=work.head_dim,
                block_size=work.block_size,
                window=0,
                chunked=0,
                reach=0,
                tree=0,
                scale=work.head_dim**-0.5,
                softcap=0.0,
                sinks=0,
                sink_keys=0,
                sink_q=0,
                sink_q_stride=0,
                first_keys=0,
                out=out.data_ptr(),
                out_stride=out.stride(0),
                dtype=DTYPES[work.q.dtype],
                kv_dtype=DTYPES[keys.dtype],
            )

        alive = (work, starts, lengths, keys, values, out)  # the recording has pointers to these

        def seconds() -> float:
            assert alive
            return sum(ns for _, ns in self.native.replay_timed(recording, ())) * 1e-9

        return seconds

    def store(self, keys: Tensor, slots: Sequence[Tensor]) -> Track:
        most = max(int(each.max()) for each in slots) + 1
        kv_heads, head_dim = keys.shape[1:]
        shape = (-(-most // BLOCK_SIZE), BLOCK_SIZE * kv_heads * head_dim)
        caches = [zeros(*shape, dtype=keys.dtype).fill_(1) for _ in range(2)]

        def store(to: Tensor) -> Call:
            def call(count: int) -> None:
                self.native.launch(
                    "store_kv",
                    k=keys.data_ptr(),
                    k_stride=keys.stride(0),
                    v=keys.data_ptr(),
                    v_stride=keys.stride(0),
                    k_cache=caches[0].data_ptr(),
                    v_cache=caches[1].data_ptr(),
                    k_scales=0,
                    v_scales=0,
                    slot_mapping=to.data_ptr(),
                    rows=self.native.rows(keys[:count]),
                    kv_heads=kv_heads,
                    head_dim=head_dim,
                    block_size=BLOCK_SIZE,
                    dtype=DTYPES[keys.dtype],
                    kv_dtype=DTYPES[keys.dtype],
                )

            return call

        return self.track([store(each) for each in slots], len(keys))


def _on_huge_pages(values: Tensor) -> Tensor:
    return zeros(*values.shape, dtype=values.dtype).copy_(values)
