"""Which keys the queries of a layer see: all, those of a window, or those that a budget keeps.

Each kind is three pure functions, by which `core` allocates blocks: how many a request needs
(`max_blocks`), which ones it can drop (`hidden_blocks`), and how many it can take from the prefix
cache (`hit_length`). Where a kind drops keys that queries have seen, cuts say when; `pairs` and
`keys_read` count work. `core` calls these methods whatever the kind is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from math import gcd
from typing import TYPE_CHECKING, Protocol, overload

if TYPE_CHECKING:
    from torch import Tensor

NEVER = sys.maxsize  # number of tokens that no request has


class VisibleKeys(Protocol):
    """Which keys the queries of a layer see. The defaults are those of kinds that drop nothing."""

    @property
    def salt(self) -> str:
        """What keys and values depend on in addition to tokens: part of the hashes of blocks."""
        return ""

    @property
    def slides(self) -> bool:
        """Whether blocks become invisible as a request grows."""
        return False

    def first_key(self, position: int, prompt: int | None = None) -> int:
        """Return the position of the first key that the query at `position` sees, except sinks.

        Args:
            prompt: length of the prompt, which decides the cuts of a budget; None: before any cut.
        """
        return 0

    def hidden_blocks(self, position: int, block_size: int, prompt: int | None = None) -> range:
        """Return the blocks before `position` that hold no key visible to its query. No later query
        sees them either; the start of the range never changes. Arguments as in `first_key`."""
        return range(self.first_key(position, prompt) // block_size)

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Return the largest number of blocks that a request of `num_tokens` holds, if a step adds
        at most `chunk` tokens."""
        return -(-num_tokens // block_size)

    def blocks_of_all(self, requests: int, num_tokens: int, chunk: int, block_size: int) -> int:
        """Return the largest number of blocks that several requests of `num_tokens` hold together,
        if a step adds at most `chunk` tokens to all of them."""
        return requests * self.max_blocks(num_tokens, chunk, block_size)

    def hit_length(self, cached: Callable[[int], bool], length: int, block_size: int) -> int:
        """Return the largest number of blocks, up to `length`, that a request can take from the
        prefix cache: every block that its next query sees must be cached.

        Args:
            cached: whether block i of the prefix is cached.
        """
        return next((i for i in range(length) if not cached(i)), length)

    def reusable(self, prompt: int) -> int:
        """Return how many tokens of a request may come from the prefix cache."""
        return NEVER

    def next_cut(self, position: int, prompt: int) -> int:
        """Return the number of tokens, at least `position`, after which keys are next dropped."""
        return NEVER

    def cut_blocks(self, end: int, block_size: int) -> range:
        """Return the blocks to which the kept tokens move in the cut after `end` tokens."""
        return range(0)

    def pairs(self, first: int, end: int, prompt: int) -> int:
        """Return the total number of keys that the queries at positions first .. end - 1 see."""
        return _triangle(end) - _triangle(first)

    def keys_read(self, first: int, end: int, prompt: int) -> int:
        """Return the number of keys that at least one of these queries sees."""
        return end - self.first_key(first, prompt)


@dataclass(frozen=True, slots=True)
class AllKeys(VisibleKeys):
    """A query sees all keys up to its own."""


ALL_KEYS = AllKeys()


@dataclass(frozen=True, slots=True)
class Window(VisibleKeys):
    """A query sees the last keys, and perhaps the first ones."""

    keys: int  # the largest number that a query sees, including its own
    # A query sees keys from the last multiple of `keys` (Llama 4); else the last `keys` ones.
    chunked: bool = False
    # Number of first keys of the sequence that a query also sees, at positions just before the
    # window ("attention sinks"; StreamingLLM, Xiao et al. 2023, section 3.2). Not with `chunked`.
    sinks: int = 0

    @property
    def max_keys(self) -> int:
        """The largest number of keys that a query sees."""
        return self.keys + self.sinks

    @overload
    def first(self, position: int) -> int: ...
    @overload
    def first(self, position: Tensor) -> Tensor: ...
    def first(self, position: int | Tensor) -> int | Tensor:
        """Return the first key that the query at `position` sees, except sinks; below 0: it sees
        all."""
        return position - (position % self.keys if self.chunked else self.keys - 1)

    @property
    def salt(self) -> str:
        return f"{self.sinks}+{self.keys} " if self.sinks else ""

    @property
    def slides(self) -> bool:
        return True

    def first_key(self, position: int, prompt: int | None = None) -> int:
        return max(0, self.first(position))

    def hidden_blocks(self, position: int, block_size: int, prompt: int | None = None) -> range:
        sinks = -(-self.sinks // block_size)
        return range(sinks, self.first_key(position) // block_size)

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        if not self.chunked:
            # keys - 1 earlier keys and the step's own, with partial blocks at both ends
            seen = -(-(self.keys - 1 + chunk) // block_size) + 1
            return min(-(-num_tokens // block_size), -(-self.sinks // block_size) + seen)
        # The worst case is a step that begins with the last query of a chunk. The alignment of
        # chunks and blocks repeats after a few chunks.
        largest, period = 0, block_size // gcd(self.keys, block_size)
        for first in range(0, num_tokens, self.keys)[:period]:
            end = min(num_tokens, first + self.keys - 1 + chunk)
            largest = max(largest, -(-end // block_size) - first // block_size)
        return largest

    def hit_length(self, cached: Callable[[int], bool], length: int, block_size: int) -> int:
        while length:
            hidden = self.hidden_blocks(length * block_size, block_size)
            sinks = range(min(hidden.start, length))
            seen = chain(reversed(range(max(len(sinks), hidden.stop), length)), reversed(sinks))
            missing = next((i for i in seen if not cached(i)), None)
            if missing is None:
                break
            length = missing  # every longer prefix up to here needs this block
        return length

    def pairs(self, first: int, end: int, prompt: int) -> int:
        return self._pairs_before(end) - self._pairs_before(first)

    def _pairs_before(self, end: int) -> int:
        if self.chunked:
            chunks, rest = divmod(end, self.keys)
            return chunks * _triangle(self.keys) + _triangle(rest)
        return _triangle(min(end, self.max_keys)) + max(0, end - self.max_keys) * self.max_keys

    def keys_read(self, first: int, end: int, prompt: int) -> int:
        seen = self.first_key(first)
        return end - seen + min(seen, self.sinks)


@dataclass(frozen=True, slots=True)
class Budget(VisibleKeys):
    """A layer keeps a limited number of tokens of a request.

    A prompt is computed whole. At the end of a prompt that exceeds the budget, and again after each
    `every` further tokens, the layer keeps `tokens` of its tokens: the first, the last, and of the
    others the ones that the last queries attend to most (SnapKV, Li et al. 2024, arXiv 2404.14469,
    section 4). They move to the places directly before the next token, and no query sees anything
    before them. The positions of these cuts depend only on the length of the prompt."""

    tokens: int  # number of kept tokens
    # first, last: numbers of tokens that are always kept; the `last` queries choose the others.
    first: int = 4
    last: int = 32
    every: int = 256  # number of further tokens before the next cut

    @property
    def min_tokens(self) -> int:
        """The smallest allowed `tokens`."""
        return self.first + self.last

    def first_cut(self, prompt: int) -> int:
        """Return the number of tokens after which the first cut happens.

        Args:
            prompt: length of the prompt.
        """
        return prompt if prompt > self.tokens else self.tokens + self.every

    def first_key(self, position: int, prompt: int | None = None) -> int:
        if prompt is None or position < self.first_cut(prompt):
            return 0
        return position - (position - self.first_cut(prompt)) % self.every - self.tokens

    def max_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        blocks = -(-num_tokens // block_size)
        if num_tokens <= self.tokens:
            return blocks
        # A prompt is computed whole, and kept tokens are copied before the rest is freed.
        return blocks + -(-(self.tokens - 1) // block_size) + 1

    def blocks_of_all(self, requests: int, num_tokens: int, chunk: int, block_size: int) -> int:
        # Prompts are computed one after another: those of a step, and of the one in flight before
        # it, are whole, and perhaps one that began earlier.
        longest, others = self.max_blocks(num_tokens, chunk, block_size), requests - 1
        kept = -(-(self.tokens + self.every) // block_size) + 1
        return longest + min(others * longest, others * kept + -(-2 * chunk // block_size))

    def reusable(self, prompt: int) -> int:
        # The last queries before the first cut choose what is kept, so they are computed.
        return max(0, self.first_cut(prompt) - self.last)

    def next_cut(self, position: int, prompt: int) -> int:
        first = self.first_cut(prompt)
        return first + max(0, -(-(position - first) // self.every)) * self.every

    def cut_blocks(self, end: int, block_size: int) -> range:
        return range((end - self.tokens) // block_size, -(-end // block_size))

    def pairs(self, first: int, end: int, prompt: int) -> int:
        return self._pairs_before(end, prompt) - self._pairs_before(first, prompt)

    def _pairs_before(self, end: int, prompt: int) -> int:
        first = self.first_cut(prompt)
        total = _triangle(min(end, first))
        num_cuts, rest = divmod(max(0, end - first), self.every)
        total += num_cuts * (_triangle(self.every) + self.tokens * self.every)
        return total + _triangle(rest) + self.tokens * rest


def first_visible(position: int, window: Window | None) -> int:
    """Return the first key that the query at `position` sees, except sinks.

    Args:
        window: None: it sees all.
    """
    return (window or ALL_KEYS).first_key(position)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2
