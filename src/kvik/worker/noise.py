"""Random numbers that depend on who asks and for what, never on how many were drawn before.

A generator with state would give a request other numbers when its companions change. Here the
number for (seed, position, stream) is a hash of the three: a chain of splitmix64 finalisers
(Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Uses of one position that must not share a number: its token, whether the draft of it is accepted,
# and that draft.
SAMPLE, ACCEPT, DRAFT = 0, 1, 2

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform(
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int64],
    stream: int | NDArray[np.int64] = SAMPLE,
) -> NDArray[np.float64]:
    """One number in [0, 1) for each seed and position, multiples of 2^-53.

    Args:
        seeds: [n], int64 seeds as two's complement.
        positions: [n], index of the token in its sequence.
        stream: separates the uses of one position; one for all, or [n].
    """
    state = _mix(seeds)
    state = _mix(state ^ positions.astype(np.uint64))
    state = _mix(state ^ np.asarray(stream).astype(np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z + _GAMMA  # arrays wrap around silently
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
