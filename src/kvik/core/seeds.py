"""Seeds of requests that share one: siblings, and requests that bring none."""

from __future__ import annotations

_MASK = 2**64 - 1


def derive_seed(seed: int, index: int) -> int:
    """An independent int64 seed for the `index`-th user of `seed`; index 0 keeps it.

    One round of splitmix64 (Steele, Lea, Flood 2014), so that neighbours share no pattern.
    """
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z
