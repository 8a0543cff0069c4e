"""The work of a GPU in a step, captured once and replayed as a whole: by size, where it pays.

While the engine is idle all sizes are captured, one after the other. What is missing then is
captured between steps: a size when it has been wanted often enough, the most frequent first, and
never for more than a small share of the time. No more are captured than fit into the memory that
was reserved for them: the largest first, whose memory the others share.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from kvik.config.units import show_bytes
from kvik.core.plan import GraphCounts

# Memory that captured graphs take, compared with what was reserved for them.


class GraphMemory:
    """Memory of all graphs of an engine together. How much a driver keeps for one is not known
    beforehand, so the plan estimates it, and no more are captured than fit into the plan.

    Attributes:
        planned, taken: bytes.
        graphs: how many were captured.
    """

    def __init__(self, planned: int, step: int) -> None:
        """
        Args:
            step: bytes that a step may take, which must be left to it.
        """
        self.planned = planned
        self.taken = 0
        self.graphs = 0
        self._step = step
        self._shared = 0  # bytes of those: what comes with the first one, and `share`
        self._full = self._reported = False

    def news(self) -> GraphCounts | None:
        """Return the counts; None if they have not changed since the last call."""
        if self._reported:
            return None
        self._reported = True
        return GraphCounts(self.graphs, self.taken, self.planned)

    def share(self, size: int) -> None:
        """Count bytes that were allocated for all graphs, outside of captures."""
        self.taken += size
        self._shared += size
        self._reported = False

    def has_room(self) -> bool:
        """For one that takes as much as others did on average. The log says once if there is none:
        what is not captured runs eagerly."""
        others = self.graphs - 1
        expected = (self.taken - self._shared) // others if others > 0 else 0
        if not self._full and self.taken + max(expected, 1) > self.planned:
            self._close(expected)
        return not self._full

    def keeps(self, size: int, left: int) -> bool:
        """One more was captured. One that is larger than expected is only kept where a step
        could still be allocated as a whole.

        Args:
            size: bytes that it took. left: bytes of the device that are free.
        """
        if self.taken + size > self.planned and left < self._step:
            self._close(size)
            return False
        if not self.graphs:
            self._shared += size
        self.graphs += 1
        self.taken += size
        self._reported = False
        return True

    def _close(self, next_size: int) -> None:
        """next_size: bytes of the one that is not captured; 0: unknown."""
        self._full = True
        log.warning(
            "no more steps are captured: %d CUDA graphs take %s of the GPU%s, and %s are planned "
            "for all of them. Others run eagerly, which takes longer; a larger graph_memory "
            "(KVIK_GRAPH_MEMORY) has room for more",
            self.graphs,
            show_bytes(self.taken),
            f", one more about {show_bytes(next_size)}" if next_size else "",
            show_bytes(self.planned),
        )


log = logging.getLogger(__name__)

OFTEN = 4  # times that a size was wanted after which it is captured: its kernels are compiled then
SHARE = 0.1  # of the time that capturing may take
SPARSEST = 2  # nothing is padded to more than this many times the size that fits best


@dataclass(frozen=True, slots=True)
class Captured:
    """
    Attributes:
        replay: begins the same kernels again.
        size: bytes of the device that the capture took, and that no other had taken before.
        left: bytes of the device that are free now.
    """

    replay: Callable[[], None]
    size: int
    left: int


class Capturer(Protocol):
    """How a device records what a function begins."""

    def capture(self, call: Callable[[], None]) -> Captured:
        """Calls the function at least once, and may replay it.

        Args:
            call: begins kernels on memory that stays where it is, and waits for none of them.

        Raises:
            Exception: it cannot be captured. Others may still be.
        """
        ...


class CudaCapturer:
    """By CUDA graphs, which share the memory between their kernels: they run one after another, and
    nothing in it is looked at when one has run.

    What a graph writes between its kernels lies in a separate pool, which the memory plan counts.
    The first call, which only warms up, is made on the stream that steps run on: the allocator
    keeps what is freed for the stream that it was allocated on, so that this call takes what eager
    steps have left there, and leaves it to them. On the capturing stream, or any other, it would
    leave behind as much again unused. A library's workspace is of a stream too: that of
    the capturing one is allocated within the first capture, in the pool, and serves the others. So
    an engine has one capturer for all that it captures.

    A driver brings a graph to the device when it is first launched, so that is done at once: then
    what a capture took is known, and no request waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: torch.cuda._POOL_HANDLE | None = None
        self._broken: list[torch.cuda.CUDAGraph] = []

    def capture(self, call: Callable[[], None]) -> Captured:
        call()  # kernels are compiled and libraries set up here, which cannot be captured
        before = torch.cuda.current_stream()
        free, _ = torch.cuda.mem_get_info(self._device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self._stream.wait_stream(before)
        graph = torch.cuda.CUDAGraph()
        try:
            with _uncollected(), torch.cuda.stream(self._stream):
                self._record(graph, call, self._pool)
            before.wait_stream(self._stream)
            graph.replay()
            left, _ = torch.cuda.mem_get_info(self._device)
        except BaseException:
            self._clean_up(graph, self._pool)
            raise
        return Captured(graph.replay, max(0, free - left), left)

    @staticmethod
    def _record(
        graph: torch.cuda.CUDAGraph, call: Callable[[], None], pool: torch.cuda._POOL_HANDLE
    ) -> None:
        # Not `torch.cuda.graph`, which waits for the device and gives its memory back first.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            call()
        except BaseException:
            with suppress(Exception):
                graph.capture_end()
            raise
        graph.capture_end()

    def _clean_up(self, graph: torch.cuda.CUDAGraph, pool: torch.cuda._POOL_HANDLE) -> None:
        """After a capture that failed. Where something cannot be captured, `capture_end` ends the
        capture of the stream and raises before it has told anybody else. The allocator would go on
        believing in it: `empty_cache` would fail, nothing would be freed where memory runs out, and
        the next capture into the pool be refused. Nor could the device draw random numbers. torch
        (2.11 and 2.13) has no public way to say so. A graph that did end is undone by `reset`."""
        index = self._device.index
        with suppress(RuntimeError):  # of the allocator, which knows of no capture: it did end
            torch._C._cuda_endAllocateToPool(index, pool)
            self._broken.append(graph)  # the allocator of pinned memory still knows where it is
            torch._C._cuda_releasePool(index, pool)
            numbers = torch.cuda.default_generators[index]
            numbers.graphsafe_set_state(numbers.clone_state())
        with suppress(RuntimeError):
            graph.reset()
        self._pool = None  # a pool whose last graph is gone cannot be used again


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected meanwhile: an old graph, event or module of kernels in it would be
    destroyed within a capture, which breaks that one."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


Size = TypeVar("Size", bound=Hashable)


class Captures(Generic[Size]):
    """
    Attributes:
        captured: by size; each begins its kernels again.
        sizes: that are captured, may be, or cannot be, ascending.
    """

    def __init__(
        self,
        capturer: Capturer,
        sizes: Sequence[Size],
        call_of: Callable[[Size], Callable[[], None]],
        clock: Callable[[], float],
        memory: GraphMemory,
    ) -> None:
        """
        Args:
            sizes: ascending.
            call_of: what is to be captured of a size, at this moment.
            memory: of all that the engine captures.
        """
        self.captured: dict[Size, Callable[[], None]] = {}
        self.sizes = list(sizes)
        self._capturer = capturer
        self._call_of = call_of
        self._clock = clock
        self._memory = memory
        self._missed: Counter[Size] = Counter()
        self._over = False  # nothing more can be captured
        self._next = float("-inf")  # when something may be captured again

    def miss(self, size: Size) -> None:
        """It was wanted, and is not captured."""
        if not self._over:
            self._missed[size] += 1

    def prepare(self) -> None:
        """Capture the size that is missed most, if it is time."""
        if not self._missed:
            return
        size, times = self._missed.most_common(1)[0]
        started = self._clock()
        if times < OFTEN or started < self._next:
            return
        self._capture(size)
        now = self._clock()
        self._next = now + (now - started) / SHARE

    def rest(self) -> bool:
        """Capture one more; there is time. Returns whether any is missing after that."""
        missing = [size for size in self.sizes if size not in self.captured]
        if not missing or self._over:
            return False
        if not self.captured:
            size = missing[-1]  # the largest, whose memory all others share
        else:
            size = self._missed.most_common(1)[0][0] if self._missed else missing[0]
        self._capture(size)
        return len(missing) > 1 and not self._over

    def _capture(self, size: Size) -> None:
        if not self._memory.has_room():
            self._give_up()
            return
        try:
            found = self._capturer.capture(self._call_of(size))
        except Exception:
            self._give_up()
            log.warning("not all steps can be captured; others run eagerly", exc_info=True)
            return
        if not self._memory.keeps(found.size, found.left):
            self._give_up()
            return
        self.captured[size] = found.replay
        del self._missed[size]

    def _give_up(self) -> None:
        """What is captured goes on."""
        self._over = True
        self._missed.clear()
