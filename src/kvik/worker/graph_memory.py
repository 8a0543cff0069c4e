"""What captured graphs take of a device, beside what was put aside for them."""

from __future__ import annotations

import logging

from kvik.config.units import show_bytes
from kvik.core.plan import GraphCounts

log = logging.getLogger(__name__)


class GraphMemory:
    """Of all graphs of an engine together. What a driver keeps of one nobody says beforehand, so
    the plan guesses; whatever the truth is, no more are captured than fit into the plan.

    Attributes:
        planned, taken: bytes.
        graphs: so many were captured.
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
        self._full = self._told = False

    def news(self) -> GraphCounts | None:
        """How it stands; None if it was told already."""
        if self._told:
            return None
        self._told = True
        return GraphCounts(self.graphs, self.taken, self.planned)

    def share(self, size: int) -> None:
        """So many bytes were allocated for all graphs, outside of what captures take."""
        self.taken += size
        self._shared += size
        self._told = False

    def has_room(self) -> bool:
        """For one that takes as much as others did on average. The log says once if there is none:
        what is not captured runs eagerly."""
        others = self.graphs - 1
        expected = (self.taken - self._shared) // others if others > 0 else 0
        if not self._full and self.taken + max(expected, 1) > self.planned:
            self._close(expected)
        return not self._full

    def keeps(self, size: int, left: int) -> bool:
        """One more was captured. One that nobody expected to be so large is only kept where a step
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
        self._told = False
        return True

    def _close(self, next_size: int) -> None:
        """next_size: bytes of the one that is not captured; 0: nobody knows."""
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
