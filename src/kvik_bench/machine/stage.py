"""Stages that time single kernels and the machine's limits at the same moment, and the effort of a
calibration.

The timed kernels are the engine's: the fields of `Ops`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from kvik.attention.base import Attend, AttentionBackend, AttentionSpec, LayerKV, store
from kvik.attention.layout import StepLayout
from kvik.attention.sdpa import SdpaAttention
from kvik.config.memory import RUNTIME_BYTES
from kvik.config.units import MIB
from kvik.kernels.ops import Ops
from kvik.kernels.torch_ops import TORCH

CPU = torch.device("cpu")
KINDS = ("fp32", "bf16", "int8", "int8-weight-only", "int4-g128", "int4-g64", "int4-g32")


@dataclass(frozen=True, slots=True)
class Effort:
    """The number of measurements of a calibration."""

    # Bytes of the working sets whose reading is timed; the last is "from memory".
    reads: tuple[int, ...]
    # Bytes of weights, and of keys, read from memory in one sample: several times the size of a
    # cache.
    streamed: int
    rows: tuple[int, ...]  # of the products
    kinds: tuple[str, ...]  # of weights
    head_dims: tuple[int, ...]  # of attention
    samples: int  # of each figure
    # At which the engine's own cost is measured, with `tokens` for each sequence.
    batches: tuple[int, ...]
    tokens: int
    flushed: tuple[int, ...]  # bytes read between two of these steps

    @property
    def memory(self) -> int:
        """Bytes of memory, rounded up: 1,261 MiB (quick) and 1,722 MiB (full) were measured."""
        return RUNTIME_BYTES["cpu"] + max(self.reads) + 8 * self.streamed


FULL = Effort(
    reads=tuple(size * MIB for size in (1, 4, 8, 16, 24, 32, 48, 64, 128, 512)),
    streamed=128 * MIB,
    rows=(1, 2, 4, 8, 16, 32, 64, 128, 512),
    kinds=KINDS,
    head_dims=(32, 48, 64, 80, 96, 128),
    samples=7,
    batches=(1, 4, 16, 32),
    tokens=64,
    flushed=tuple(size * MIB for size in (0, 8, 16, 32, 96)),
)
QUICK = replace(
    FULL,
    reads=tuple(size * MIB for size in (4, 16, 32, 64, 256)),
    streamed=96 * MIB,
    rows=(1, 4, 8, 32, 128, 512),
    kinds=("bf16", "int8", "int4-g128"),
    head_dims=(64, 128),
    samples=3,
    batches=(1, 16),
    tokens=24,
    flushed=tuple(size * MIB for size in (0, 16, 64)),
)


Call = Callable[[int], object]  # (number of rows)
Track = Callable[[int], list[float]]  # (number of rows) -> seconds of each call

BLOCK_SIZE = 16  # tokens, as the engine's default
REPEATED = 16  # calls of a small kernel in one track
MATRIX = 1024  # rows and columns of the product that measures torch's peak


class Limits(Protocol):
    def read_rate(self, num_bytes: int) -> float:
        """Return the bytes per second while `num_bytes` bytes are read repeatedly."""
        ...

    def memory_rate(self) -> float:
        """Return the bytes per second of memory, by one read of much more than a cache."""
        ...

    def peak(self, arithmetic: str) -> float:
        """Return the operations per second in "fp32", "bf16" or "int8"."""
        ...


class Stage:
    """Times the engine's kernels on this machine."""

    kernels: str  # layout of its weights: "native" or "torch"
    limits: Limits

    def __init__(self, ops: Ops, backend: AttentionBackend) -> None:
        self.ops, self.backend = ops, backend

    def track(self, calls: Sequence[Call], most_rows: int) -> Track:
        """Prepare calls, in order, to be timed over any number of rows up to `most_rows`."""
        raise NotImplementedError

    def memory(self, *shape: int) -> Tensor:
        """Return memory for a cache in bfloat16."""
        raise NotImplementedError

    def write(self, k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor) -> None:
        """Store k and v [rows, kv_heads, head_dim] at `slots` [rows]."""
        raise NotImplementedError

    def attention(self, work: Attended) -> Callable[[], float]:
        """Prepare one layer's attention, over a copy of the keys and values, to be timed."""
        blocks = work.keys, work.values
        kv = LayerKV(*(self.memory(*tensor.shape).copy_(tensor) for tensor in blocks))
        metadata = self.backend.plan(work.layout, None)
        attend = Attend(work.q, None, None, kv, metadata, AttentionSpec(work.head_dim**-0.5))
        track = self.track([lambda rows: self.backend.run(attend)], work.sequences)
        return lambda: sum(track(work.sequences))

    def store(self, keys: Tensor, slots: Sequence[Tensor]) -> Track:
        """Prepare storing keys [rows, kv_heads, head_dim], and the same as values, in a cache.

        Args:
            slots: [rows] of each call.
        """
        num_places = max(int(places.max()) for places in slots) + 1
        shape = (-(-num_places // BLOCK_SIZE), BLOCK_SIZE, *keys.shape[1:])
        kv = LayerKV(*(self.memory(*shape).fill_(1) for _ in range(2)))

        def store(to: Tensor) -> Call:
            return lambda rows: self.write(keys[:rows], keys[:rows], kv, to[:rows])

        return self.track([store(places) for places in slots], len(keys))


class Attended:
    """Sequences of equal length whose last tokens attend, in bfloat16.

    Attributes:
        queries: of each sequence; the last of them sees `context` keys.
        q: [sequences * queries, heads, head_dim].
        keys, values: [blocks, block_size, kv_heads, head_dim].
    """

    def __init__(
        self, sequences: int, queries: int, context: int, heads: tuple[int, int], head_dim: int
    ) -> None:
        self.sequences, self.queries, self.context = sequences, queries, context
        self.heads, self.kv_heads = heads
        self.head_dim = head_dim
        self.layout, blocks = random_layout([(context - queries, queries)] * sequences)
        shape = (blocks, BLOCK_SIZE, self.kv_heads, head_dim)
        self.q = torch.randn(sequences * queries, self.heads, head_dim).bfloat16()
        self.keys, self.values = (torch.randn(shape).bfloat16() for _ in range(2))

    @property
    def key_elements(self) -> int:
        """Elements of the keys that are read."""
        return self.sequences * self.context * self.kv_heads * self.head_dim

    @property
    def score_elements(self) -> int:
        """Elements of the keys, once for each query head that sees them."""
        pairs = self.queries * self.context - self.queries * (self.queries - 1) // 2
        return self.sequences * pairs * self.heads * self.head_dim


def random_layout(
    sequences: Sequence[tuple[int, int]], device: torch.device = CPU
) -> tuple[StepLayout, int]:
    """Return a step of sequences of (cached, new) tokens, their blocks in random order, and the
    number of blocks. Block 0 belongs to no sequence."""
    contexts = [cached + new for cached, new in sequences]
    lengths = [-(-context // BLOCK_SIZE) for context in contexts]
    blocks = torch.randperm(sum(lengths)).int() + 1
    table = torch.zeros(len(sequences), max(lengths), dtype=torch.int32)
    slots, first = [], 0
    for i, (cached, new) in enumerate(sequences):
        pages = blocks[first : first + lengths[i]]
        table[i, : lengths[i]] = pages
        at = torch.arange(cached, cached + new)
        slots.append(pages[at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE)
        first += lengths[i]
    starts = torch.tensor([0, *(new for _, new in sequences)]).cumsum(0)
    layout = StepLayout(
        query_start_loc=starts.int().to(device),
        seq_lens=torch.tensor(contexts, dtype=torch.int32).to(device),
        block_table=table.to(device),
        slot_mapping=torch.cat(slots).to(device),
        num_scheduled=tuple(new for _, new in sequences),
        contexts=tuple(contexts),
        block_size=BLOCK_SIZE,
    )
    return layout, 1 + sum(lengths)


def one_prompt(
    device: torch.device, dim: int, length: int, kv_heads: int, dtype: torch.dtype
) -> tuple[StepLayout, LayerKV]:
    """Return a step of one prompt, with its blocks in random order, and an empty cache for it."""
    layout, blocks = random_layout([(0, length)], device)
    shape = (blocks, BLOCK_SIZE, kv_heads, dim)
    keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
    return layout, LayerKV(keys, values)


def device_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, on the device."""
    if device.type != "cuda":
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


class TorchStage(Stage):
    """Times torch's kernels, called one by one."""

    kernels = "torch"

    def __init__(self, threads: int, max_bytes: int) -> None:
        super().__init__(TORCH, SdpaAttention(TORCH))
        torch.set_num_threads(threads)
        self.limits = TorchLimits(max_bytes)

    def track(self, calls: Sequence[Call], most_rows: int) -> Track:
        def seconds(rows: int) -> list[float]:
            return [_seconds(lambda call=call: call(rows)) for call in calls]  # type: ignore[misc]

        return seconds

    def memory(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16)

    def write(self, k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor) -> None:
        store(self.ops, k, v, kv, slots)


class TorchLimits:
    """Limits measured by torch's sum and matrix product, without the native kernels."""

    def __init__(self, max_bytes: int) -> None:
        self._data = torch.ones(max_bytes // 4)

    def read_rate(self, num_bytes: int) -> float:
        data = self._data[: num_bytes // 4]
        data.sum()
        return num_bytes / median(_seconds(data.sum) for _ in range(3))

    def memory_rate(self) -> float:
        return 4 * len(self._data) / _seconds(self._data.sum)

    def peak(self, arithmetic: str) -> float:
        a = torch.ones(MATRIX, MATRIX)
        if arithmetic == "int8":
            narrow = a.to(torch.int8)
            best = min(_seconds(lambda: torch._int_mm(narrow, narrow)) for _ in range(3))
        else:
            a = a.bfloat16() if arithmetic == "bf16" else a
            best = min(_seconds(lambda: a @ a) for _ in range(3))
        return 2 * MATRIX**3 / best


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
