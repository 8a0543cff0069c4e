"""States of fixed size, which some layers keep of a request in place of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TAPS = 8  # inputs of a short convolution that kernels take
STATE_BYTES = 4  # of a number: states are fp32, since every token adds to them


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one layer keeps of a request, however long that is.

    Attributes:
        channels, width: of a short convolution, which keeps the last width - 1 inputs.
        bias: the convolution and its projections have biases.
        key_heads, value_heads, key_dim, value_dim: of a gated delta net behind it, which keeps a
            matrix [key_dim, value_dim] for each value head; all 0: there is none.
    """

    channels: int
    width: int
    bias: bool = False
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0

    @staticmethod
    def delta(
        key_heads: int, value_heads: int, key_dim: int, value_dim: int, width: int
    ) -> StateSpec:
        """Return the state of a gated delta net, whose queries, keys and values are convolved."""
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        return StateSpec(channels, width, False, key_heads, value_heads, key_dim, value_dim)

    @property
    def values(self) -> int:
        """Width of the values of all heads of the delta net."""
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Numbers that the convolution keeps."""
        return (self.width - 1) * self.channels

    @property
    def size(self) -> int:
        """Numbers that a request keeps."""
        return self.convolved + self.key_dim * self.values

    @property
    def flops(self) -> int:
        """Operations of a token: of the convolution, and of the delta rule, in which each number of
        the matrices fades, is multiplied by a key, changes, and is multiplied by a query."""
        return 2 * self.width * self.channels + 7 * self.key_dim * self.values

    @property
    def step_width(self) -> int:
        """Numbers of a token that a step holds beside the residual stream, at most."""
        if self.value_heads:
            return 2 * self.channels + 4 * self.values + 2 * self.value_heads
        return 6 * self.channels
