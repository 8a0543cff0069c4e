"""Checkpoints: copies of requests' states, from which a prefix hit can continue.

Some layers keep a state of fixed size per request, in the row of its slot. Past states cannot be
derived from blocks, so a prefix can be taken from the cache only up to a place where its state was
copied. Copies are made at block borders, before the step that continues from there:

- at the last block border before the last token of the prompt, or before the first one that layers
  with a budget always compute;
- where cached blocks end that a request shares, if there is no checkpoint: others will share them;
- at each border that the output passes; only the newest is kept, for the next turn. A step with
  accepted drafts may pass it: until the next step, its state can still be copied as of the border.

A step never computes past the first two, so results do not depend on where copies are made. When
all are in use, the least recently used checkpoint is replaced.

Tiers of the KV cache keep the first two as well, and the newest one of a request that ends. There a
checkpoint is several pages, each about as large as that of a block (`core/moves.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvik.core.block_pool import extend_hashes
from kvik.core.types import FinishReason, Request


@dataclass(frozen=True, slots=True)
class StateCheckpoint:
    """A copy that a plan makes. It can be found once the result of that step is known."""

    request: Request
    num_tokens: int  # tokens of the request that the state covers; whole blocks
    index: int  # of the copy, among all


class CheckpointTable:
    """Maps prefixes to checkpoints."""

    def __init__(self, count: int, block_size: int, reusable: Callable[[int], int]) -> None:
        """
        Args:
            reusable: returns how many tokens of a request may come from the prefix cache, for the
                length of its prompt.
        """
        self.count = count
        self.block_size = block_size
        self._reusable = reusable
        # Prefixes of published checkpoints that tiers should keep, since the list was last emptied;
        # None: there are no tiers.
        self.for_tiers: list[bytes] | None = None
        self._free = list(range(count - 1, -1, -1))
        self._by_hash: dict[bytes, int] = {}  # of the prefix; least recently used first

    def hit_length(self, hashes: Sequence[bytes], length: int) -> int:
        """Return the most blocks, up to `length`, after which there is a checkpoint."""
        return next((n for n in range(length, 0, -1) if hashes[n - 1] in self._by_hash), 0)

    def index_of(self, key: bytes) -> int | None:
        """Return the checkpoint of a prefix; None: there is none."""
        return self._by_hash.get(key)

    def use(self, key: bytes) -> int:
        """Return the checkpoint of a prefix and mark it as the most recently used."""
        self._by_hash[key] = index = self._by_hash.pop(key)
        return index

    def cut(self, request: Request, start: int, num_tokens: int) -> int:
        """Return how many of `num_tokens` tokens from `start` on a step may compute."""
        ends = [end - start for end in self._ends(request) if end > start]
        return min([num_tokens, *ends])

    def take(self, request: Request, accepted: int = 0) -> StateCheckpoint | None:
        """Return a checkpoint to copy the request's state to; None: it needs none here, or none is
        available.

        Args:
            accepted: drafts of its last step, which its state does not cover yet.
        """
        blocks, rest = divmod(request.num_computed_tokens, self.block_size)
        if rest > accepted or not blocks:
            return None
        tokens = blocks * self.block_size
        if tokens > self._reusable(request.num_prompt_tokens):
            return None
        if tokens < self._end_of_prompt(request) and tokens not in self._ends(request):
            return None
        hashes = request.block_hashes
        if len(hashes) >= blocks and hashes[blocks - 1] in self._by_hash:
            self.use(hashes[blocks - 1])
            return None
        if not self._free and self._by_hash:
            self._free.append(self._by_hash.pop(next(iter(self._by_hash))))
        return StateCheckpoint(request, tokens, self._free.pop()) if self._free else None

    def publish(self, checkpoint: StateCheckpoint) -> None:
        """Make a finished copy findable, unless its content is in doubt."""
        request, blocks = checkpoint.request, checkpoint.num_tokens // self.block_size
        doubted = request.is_doubted or request.finish_reason is FinishReason.ERROR
        if doubted or checkpoint.num_tokens > len(request.token_ids):
            self.free(checkpoint.index)
            return
        hashes = request.block_hashes
        extend_hashes(hashes, request.token_ids, self.block_size, request.cache_salt, blocks)
        self.add(hashes[blocks - 1], checkpoint.index)
        in_prompt = checkpoint.num_tokens <= self._end_of_prompt(request)
        if self.for_tiers is not None and (in_prompt or request.finished):
            self.for_tiers.append(hashes[blocks - 1])
        if checkpoint.num_tokens - self.block_size > self._end_of_prompt(request):
            self.forget(hashes[blocks - 2 : blocks - 1])

    def free(self, index: int) -> None:
        """Free a checkpoint that is not published."""
        self._free.append(index)

    def reserve(self, copied: Collection[int]) -> int | None:
        """Return a checkpoint to load a state into, other than those that are `copied` from or to;
        None: none is available."""
        for index in self._free:
            if index not in copied:
                self._free.remove(index)
                return index
        for key, index in self._by_hash.items():
            if index not in copied:
                del self._by_hash[key]
                return index
        return None

    def add(self, key: bytes, index: int) -> None:
        """Make a checkpoint findable by its prefix, or free it if that has one."""
        if key in self._by_hash:
            self._free.append(index)
        else:
            self._by_hash[key] = index

    def forget(self, hashes: Collection[bytes]) -> None:
        """Free the checkpoints of some prefixes."""
        self._free += [self._by_hash.pop(key) for key in hashes if key in self._by_hash]

    def forget_copies(self, indices: Collection[int]) -> list[bytes]:
        """Free the checkpoints with these indices, if they are published. Returns their
        prefixes."""
        keys = [key for key, index in self._by_hash.items() if index in indices]
        self.forget(keys)
        return keys

    def clear(self) -> None:
        self.forget(list(self._by_hash))
        if self.for_tiers:
            self.for_tiers.clear()

    def indices(self) -> list[int]:
        """Return the indices of checkpoints that are free or published."""
        return [*self._free, *self._by_hash.values()]

    def _end_of_prompt(self, request: Request) -> int:
        prompt = request.num_prompt_tokens
        return min(prompt - 1, self._reusable(prompt)) // self.block_size * self.block_size

    def _ends(self, request: Request) -> tuple[int, int]:
        """Return the numbers of tokens at which a step must end, as the next begins with a copy."""
        if not self.count:
            return 0, 0
        return request.num_shared_tokens, self._end_of_prompt(request)
