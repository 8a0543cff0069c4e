"""GPU work of a step, captured once for each size and replayed as a whole.

While the engine is idle, all sizes are captured one after another. Sizes still missing are captured
between steps: the most frequently requested first, after enough requests, and within a small share
of the time. Captures stop when the memory reserved for them is used up. The largest size comes
first, because the others share its memory.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from kvik.collector import uncollected
from kvik.config.units import show_bytes
from kvik.core.plan import GraphCounts

# Memory of captured graphs, compared with the memory reserved for them.


class GraphMemory:
    """Memory of all graphs of an engine together. How much the driver needs for a graph is not
    known beforehand, so the plan estimates it, and captures stop when the estimate is used up.
    """

    def __init__(self, planned: int, step: int) -> None:
        """
        Args:
            step: bytes that a step may need and that must stay free.
        """
        # planned, used: bytes.
        self.planned = planned
        self.used = 0
        self.graphs = 0  # number of captured graphs
        self._step = step
        self.shared = 0  # bytes of `used` that all graphs share: those of the first, and `share`
        self._full = self._reported = False

    def changes(self) -> GraphCounts | None:
        """Return the counts; None if they have not changed since the last call."""
        if self._reported:
            return None
        self._reported = True
        return GraphCounts(self.graphs, self.used, self.planned)

    def share(self, size: int) -> None:
        """Count bytes that were allocated for all graphs, outside of captures."""
        self.used += size
        self.shared += size
        self._reported = False

    def has_room(self) -> bool:
        """Return whether a graph of average size still fits. If not, logs it once: sizes that are
        not captured run eagerly."""
        num_others = self.graphs - 1
        expected = (self.used - self.shared) // num_others if num_others > 0 else 0
        if not self._full and self.used + max(expected, 1) > self.planned:
            self._close(expected)
        return not self._full

    def allows(self, size: int, free: int) -> bool:
        """Return whether a captured graph can be kept. A graph that exceeds the plan is kept only
        if enough memory for a step is left.

        Args:
            size: bytes that it took. free: free bytes of the device.
        """
        if self.used + size > self.planned and free < self._step:
            self._close(size)
            return False
        return True

    def keep(self, size: int) -> None:
        """Count a captured graph, which takes `size` bytes."""
        if not self.graphs:
            self.shared += size
        self.graphs += 1
        self.used += size
        self._reported = False

    def _close(self, next_size: int) -> None:
        """next_size: bytes of the graph that is not captured; 0: unknown."""
        self._full = True
        log.warning(
            "no more steps are captured: %d CUDA graphs take %s of the GPU%s, and %s are planned "
            "for all of them. Others run eagerly, which takes longer; a larger graph_memory "
            "(KVIK_GRAPH_MEMORY) has room for more",
            self.graphs,
            show_bytes(self.used),
            f", one more about {show_bytes(next_size)}" if next_size else "",
            show_bytes(self.planned),
        )


log = logging.getLogger(__name__)

# Requests for a size before it is captured; by then its kernels are compiled.
MIN_MISSES = 4
TIME_SHARE = 0.1  # largest share of the time that capturing may take
MAX_PADDING = 2  # a step is padded to at most this many times the size that fits best


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured graph."""

    replay: Callable[[], None]  # launches the same kernels again
    size: int  # bytes of the device that the capture added
    free: int  # free bytes of the device after it


class NotCaptured(Exception):
    """A function cannot be captured; others may be. In a group no process has captured it."""


class CapturePeers:
    """The processes of a group, which capture and replay the same sizes. This class is for a
    process without a group."""

    def capturing(self, number: int) -> AbstractContextManager[None]:
        """Return a context in which this process captures the size of this number, and the others
        do too."""
        return nullcontext()

    def agree(self, done: bool) -> bool:
        """Return whether `done` holds in all processes, which all call this."""
        return done


NO_CAPTURE_PEERS = CapturePeers()


class CudaCapturer:
    """Captures CUDA graphs that share one pool for their intermediate results. They can share it,
    because they run one after another and intermediate results are not read after a run.

    The memory plan counts this pool separately. The first call, a warm-up, runs on the stream of
    the steps: the allocator keeps freed memory for the stream that allocated it, so the call reuses
    the memory of eager steps. On any other stream it would leave the same amount allocated and
    unused. Library workspaces belong to a stream too: that of the capturing stream is allocated in
    the pool by the first capture and serves the others. So an engine has one capturer for
    everything.

    The driver uploads a graph to the device when it is first launched, so a capture also launches
    it: then its memory is known, and no request waits for the upload.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool: torch.cuda._POOL_HANDLE | None = None
        self._broken: list[torch.cuda.CUDAGraph] = []

    def capture(self, call: Callable[[], None], peers: CapturePeers = NO_CAPTURE_PEERS) -> Captured:
        """Call a function twice and record the kernels that it launches the second time.

        Args:
            call: launches kernels on memory that is never moved, and waits for none of them.
            peers: they capture the same function. A recording has no effect on others, but calls
                and replays exchange data: there is a replay only if all have recorded.

        Raises:
            NotCaptured: the function cannot be captured.
            Exception: a call or a replay failed.
        """
        call()  # compiles kernels and initialises libraries, which cannot be captured
        before = torch.cuda.current_stream()
        free, _ = torch.cuda.mem_get_info(self._device)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        self._stream.wait_stream(before)
        graph = torch.cuda.CUDAGraph()
        try:
            try:
                # Destroying an old graph, event or kernel module during a capture breaks it.
                with uncollected(), torch.cuda.stream(self._stream):
                    self._record(graph, call, self._pool)
            except Exception as error:
                peers.agree(False)
                raise NotCaptured("an operation cannot be captured") from error
            before.wait_stream(self._stream)
            if not peers.agree(True):
                raise NotCaptured("another process cannot capture it")
            graph.replay()
            free_after, _ = torch.cuda.mem_get_info(self._device)
        except BaseException:
            self._clean_up(graph, self._pool)
            raise
        return Captured(graph.replay, max(0, free - free_after), free_after)

    @staticmethod
    def _record(
        graph: torch.cuda.CUDAGraph, call: Callable[[], None], pool: torch.cuda._POOL_HANDLE
    ) -> None:
        # Not `torch.cuda.graph`, which first synchronises and empties the allocator's cache.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            call()
        except BaseException:
            with suppress(Exception):
                graph.capture_end()
            raise
        graph.capture_end()

    def _clean_up(self, graph: torch.cuda.CUDAGraph, pool: torch.cuda._POOL_HANDLE) -> None:
        """Restore torch's state after a failed capture. If an operation cannot be captured,
        `capture_end` ends the capture of the stream and raises before it notifies the allocator and
        the random number generator. The allocator would still assume a capture: `empty_cache` would
        fail, nothing would be freed when memory runs out, and the next capture into the pool would
        be refused. Random numbers could not be drawn on the device either. torch (2.11 and 2.13)
        has no public function for this. A graph whose capture did end is undone by `reset`."""
        index = self._device.index
        with suppress(RuntimeError):  # raised by the allocator if the capture did end
            torch._C._cuda_endAllocateToPool(index, pool)
            self._broken.append(graph)  # the pinned-memory allocator still has a pointer to it
            torch._C._cuda_releasePool(index, pool)
            numbers = torch.cuda.default_generators[index]
            numbers.graphsafe_set_state(numbers.clone_state())
        with suppress(RuntimeError):
            graph.reset()
        self._pool = None  # a pool without graphs cannot be used again


Size = TypeVar("Size", bound=Hashable)


class Captures(Generic[Size]):
    """The captured sizes of one function, and the choice of the size to capture next."""

    def __init__(
        self,
        capturer: CudaCapturer,
        sizes: Sequence[Size],
        call_of: Callable[[Size], Callable[[], None]],
        clock: Callable[[], float],
        memory: GraphMemory,
        peers: CapturePeers = NO_CAPTURE_PEERS,
    ) -> None:
        """
        Args:
            sizes: ascending.
            call_of: returns the function to capture for a size; called right before its capture.
            memory: of all captures of the engine.
            peers: other processes, which have the same `sizes`. The first process decides what is
                captured; a size is kept in all processes or in none.
        """
        self.captured: dict[Size, Callable[[], None]] = {}  # replay functions by size
        self.sizes = list(sizes)  # all sizes, captured or not, ascending
        self._capturer = capturer
        self._call_of = call_of
        self._clock = clock
        self._memory = memory
        self._peers = peers
        self._missed: Counter[Size] = Counter()
        self._finished = False  # nothing more can be captured
        self._next = float("-inf")  # time of the next capture at the earliest

    def replay_of(
        self, sizes: Iterable[Size], count: Callable[[Size], int]
    ) -> Callable[[], None] | None:
        """Return the replay of a captured size; None: run the step eagerly.

        Args:
            sizes: that are large enough, ascending. Without the first, the next ones are used if
                they are not much larger.
            count: returns how large a size is.
        """
        best: Size | None = None
        for size in sizes:
            if best is None:
                best = size
            elif count(size) > MAX_PADDING * count(best):
                break
            if size in self.captured:
                if size is not best:
                    self._miss(best)
                return self.captured[size]
        if best is not None:
            self._miss(best)
        return None

    def _miss(self, size: Size) -> None:
        """Count a request for a size that is not captured."""
        if not self._finished:
            self._missed[size] += 1

    def prepare(self) -> None:
        """Capture the size with the most misses, if it has enough and time allows."""
        if not self._missed:
            return
        size, times = self._missed.most_common(1)[0]
        started = self._clock()
        if times < MIN_MISSES or started < self._next:
            return
        self._try(size)
        now = self._clock()
        self._next = now + (now - started) / TIME_SHARE

    def idle_step(self) -> bool:
        """Capture one more size while the engine is idle, and return whether any is missing
        afterwards."""
        missing = [size for size in self.sizes if size not in self.captured]
        if not missing or self._finished:
            return False
        if not self.captured:
            size = missing[-1]  # the largest, whose memory all others share
        else:
            size = self._missed.most_common(1)[0][0] if self._missed else missing[0]
        self._try(size)
        return len(missing) > 1 and not self._finished

    def _try(self, size: Size) -> None:
        captured = False
        if self._memory.has_room():
            try:
                with self._peers.capturing(self.sizes.index(size)):
                    captured = self.capture(size)
            except Exception:
                log.warning("not all steps can be captured; others run eagerly", exc_info=True)
        if not captured:
            self._stop()

    def capture(self, size: Size) -> bool:
        """Capture a size, and return whether it is kept.

        Raises:
            Exception: a call or a replay failed.
        """
        captured: Captured | None = None
        try:
            captured = self._capturer.capture(self._call_of(size), self._peers)
        except NotCaptured as error:
            log.warning("not all steps can be captured; others run eagerly", exc_info=error)
        allowed = captured is not None and self._memory.allows(captured.size, captured.free)
        if not self._peers.agree(allowed) or captured is None:
            return False
        self._memory.keep(captured.size)
        self.captured[size] = captured.replay
        del self._missed[size]
        return True

    def _stop(self) -> None:
        """Capture no more sizes; the captured ones stay in use."""
        self._finished = True
        self._missed.clear()
