"""Decoding steps as replays of forwards that were captured, at a ladder of batch sizes.

A decoding step of a GPU is hundreds of short kernels, and Python takes longer to begin them than
they run. Captured once, they begin together. A captured forward has one size, so a step runs as one
of the next larger size, padded with requests that have no keys and tokens that are stored nowhere.
All other steps (chunks of prompts, drafts to be judged) run eagerly: their kernels are longer.

Nothing is captured before the first step: each size is when steps of it have run often enough, the
most frequent first, and never for more than a small share of the time.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from kvik.attention.base import StepLayout
from kvik.worker.device_inputs import COUNTING, DeviceInputs
from kvik.worker.graphs import Eager, Network, StepOutput
from kvik.worker.input_batch import InputBatch

log = logging.getLogger(__name__)

OFTEN = 4  # steps of a size after which it is captured: its kernels are compiled by then
SHARE = 0.1  # of the time that capturing may take
SPARSEST = 2  # a step is not padded to more than so many times its size in the ladder


class Capturer(Protocol):
    """How a device records what a function begins."""

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        """Calls the function at least once.

        Args:
            call: begins kernels on memory that stays where it is, and waits for none of them.

        Returns:
            Begins the same kernels again.

        Raises:
            Exception: it cannot be captured.
        """
        ...


class CudaCapturer:
    """By CUDA graphs, which share the memory between their kernels: they run one after another."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            call()  # kernels are compiled and libraries set up here, which cannot be captured
            # Not `torch.cuda.graph`, which waits for the device and gives its memory back first.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                call()
            except BaseException:
                with suppress(Exception):
                    graph.capture_end()
                raise
            graph.capture_end()
        before.wait_stream(self._stream)
        return graph.replay


class DecodeGraphs:
    def __init__(
        self,
        network: Network,
        inputs: DeviceInputs,
        capturer: Capturer,
        sizes: tuple[int, ...],
        block_size: int,
        max_context: int,
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            inputs: where every batch lies, padded as far as the largest size.
            sizes: the ladder, ascending.
            max_context: keys of a request, at most.
        """
        self.network = network
        self.inputs = inputs
        self.captured: dict[int, Callable[[], None]] = {}  # by size
        self._capturer = capturer
        self._sizes = sizes
        self._block_size = block_size
        self._max_context = max_context
        self._clock = clock
        self._eager = Eager(network)
        self._missed: Counter[int] = Counter()  # steps that would have been of a size
        self._next = float("-inf")  # when something may be captured again
        self._output: StepOutput | None = None  # of every size, in the first rows

    def prepare(self) -> None:
        """Capture the size that is missed most, if it is time. Nobody needs what lies in the inputs
        any more."""
        if not self._missed:
            return
        size, steps = self._missed.most_common(1)[0]
        started = self._clock()
        if steps < OFTEN or started < self._next:
            return
        try:
            self._lay_out_padding()
            self.captured[size] = self._capturer.capture(lambda: self._forward(size))
        except Exception:
            self._sizes = tuple(self.captured)  # those that there are go on
            self._missed.clear()
            log.warning("not all steps can be captured; others run eagerly", exc_info=True)
            return
        del self._missed[size]
        now = self._clock()
        self._next = now + (now - started) / SHARE

    def run(self, batch: InputBatch) -> StepOutput:
        size = self._size_of(batch)
        if size is None or self._output is None:
            return self._eager.run(batch)
        self.captured[size]()
        rows, output = len(batch.slots), self._output
        return StepOutput(
            output.hidden[:rows], output.logits[:rows], output.top[:rows], output.top_ids[:rows]
        )

    def _size_of(self, batch: InputBatch) -> int | None:
        """The captured size that serves a batch; None: there is none."""
        rows = len(batch.slots)
        decodes = len(batch.input_ids) == rows == len(batch.logits_indices)
        if not decodes or batch.layouts[0].tree is not None:
            return None
        at = bisect_left(self._sizes, rows)
        if at == len(self._sizes):
            return None
        best = self._sizes[at]
        if best not in self.captured:
            self._missed[best] += 1
        return next(
            (s for s in self._sizes[at:] if s in self.captured and s <= SPARSEST * best), None
        )

    def _lay_out_padding(self) -> None:
        """A step without requests."""
        nothing = torch.empty(0, dtype=torch.int64).numpy()
        for name in ("input_ids", "positions", "seq_lens", *COUNTING, *self._mappings):
            self.inputs.put(name, nothing)
        self.inputs.send()

    @property
    def _mappings(self) -> list[str]:
        return [f"slot_mapping {group}" for group in range(len(self.network.groups))]

    def _forward(self, size: int) -> None:
        """Of a decoding step of so many requests, into the output."""
        inputs = self.inputs
        layouts = [
            StepLayout(
                query_start_loc=inputs.whole("query_start_loc", size + 1),
                seq_lens=inputs.whole("seq_lens", size),
                block_table=inputs.whole(f"block_table {group}", size),
                slot_mapping=inputs.whole(mapping, size),
                num_scheduled=(1,) * size,
                contexts=(self._max_context,) * size,  # what they are is read on the device
                block_size=self._block_size,
            )
            for group, mapping in enumerate(self._mappings)
        ]
        found = self.network.forward(
            inputs.whole("input_ids", size),
            inputs.whole("positions", size),
            layouts,
            inputs.whole("logits_indices", size),
        )
        if self._output is None:
            most = self._sizes[-1]
            self._output = StepOutput(
                hidden=_rows(most, found.hidden),
                logits=_rows(most, found.logits),
                top=_rows(most, found.top),
                top_ids=_rows(most, found.top_ids),
            )
        output = self._output
        for whole, part in (
            (output.hidden, found.hidden),
            (output.logits, found.logits),
            (output.top, found.top),
            (output.top_ids, found.top_ids),
        ):
            whole[:size].copy_(part)


def _rows(count: int, like: Tensor) -> Tensor:
    """Room for [count, ...]. It is shared by all sizes: a step's output is read before the next."""
    return torch.zeros(count, *like.shape[1:], dtype=like.dtype, device=like.device)
