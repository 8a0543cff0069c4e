"""What a GPU is told to do, captured once and begun again as a whole: by size, when it is worth it.

While nobody asks for anything all sizes are captured, one after the other. What is missing then is
captured between steps: a size when it has been wanted often enough, the most frequent first, and
never for more than a small share of the time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import torch

log = logging.getLogger(__name__)

OFTEN = 4  # times that a size was wanted after which it is captured: its kernels are compiled then
SHARE = 0.1  # of the time that capturing may take


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
    """By CUDA graphs, which share the memory between their kernels: they run one after another.

    What a graph writes between its kernels lies in a pool of its own, which the memory plan counts.
    The first call, which only warms up, is made on the stream that steps run on: the allocator
    keeps what is freed for the stream that it was allocated on, so that this call takes what eager
    steps have left there, and leaves it to them. On the capturing stream, or any other, it would
    leave behind as much again that nobody uses. A library's workspace is of a stream too: that of
    the capturing one is allocated within the first capture, in the pool, and serves the others.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        call()  # kernels are compiled and libraries set up here, which cannot be captured
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
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


Size = TypeVar("Size", bound=Hashable)


class Captures(Generic[Size]):
    """
    Attributes:
        captured: by size; each begins its kernels again.
        sizes: that are captured or may be, ascending.
    """

    def __init__(
        self,
        capturer: Capturer,
        sizes: Sequence[Size],
        call_of: Callable[[Size], Callable[[], None]],
        clock: Callable[[], float],
    ) -> None:
        """
        Args:
            sizes: ascending.
            call_of: what is to be captured of a size, at this moment.
        """
        self.captured: dict[Size, Callable[[], None]] = {}
        self.sizes = list(sizes)
        self._capturer = capturer
        self._call_of = call_of
        self._clock = clock
        self._missed: Counter[Size] = Counter()
        self._next = float("-inf")  # when something may be captured again

    def miss(self, size: Size) -> None:
        """It was wanted, and is not captured."""
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
        if not missing:
            return False
        if not self.captured:
            size = missing[-1]  # the largest, in whose memory all others find room
        else:
            size = self._missed.most_common(1)[0][0] if self._missed else missing[0]
        self._capture(size)
        return len(self.captured) < len(self.sizes)

    def _capture(self, size: Size) -> None:
        try:
            self.captured[size] = self._capturer.capture(self._call_of(size))
        except Exception:
            self.sizes = [size for size in self.sizes if size in self.captured]  # those go on
            self._missed.clear()
            log.warning("not all steps can be captured; others run eagerly", exc_info=True)
            return
        del self._missed[size]
