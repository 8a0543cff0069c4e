"""The tracking of filled blocks, against a plain record of every token."""

from __future__ import annotations

import numpy as np
import pytest

from kvik.core.plan import NewRequest
from kvik.core.sampling_params import SamplingParams
from kvik.worker.drafters.filled_blocks import FilledBlocks
from kvik.worker.request_table import RequestTable

SLOTS, LENGTH, BLOCK, BLOCKS, DRAFTS = 5, 40, 4, 30, 3
TEXT = np.random.default_rng(0).integers(0, 50000, LENGTH).tolist()


class Account:
    """The plain record.

    Attributes:
        held: by block, the texts that end at its places, of which it has K and V.
        tagged: the text at the end of a block that was not written since a request filled it.
    """

    def __init__(self) -> None:
        self.held: dict[int, list[tuple[int, ...]]] = {b: [()] * BLOCK for b in range(BLOCKS)}
        self.tagged: dict[int, tuple[int, ...]] = {}

    def compute(self, tokens: list[int], blocks: list[int], first: int, last: int) -> None:
        for place in range(first, last):
            self.held[blocks[place // BLOCK]][place % BLOCK] = tuple(tokens[: place + 1])

    def least(self, tokens: list[int], blocks: list[int], end: int) -> int:
        """Return up to which place tagged blocks have these tokens, except for the last one."""
        while end + BLOCK < len(tokens):
            if self.tagged.get(blocks[end // BLOCK]) != tuple(tokens[: end + BLOCK]):
                break
            end += BLOCK
        return end

    def most(self, tokens: list[int], blocks: list[int], end: int) -> int:
        """Return the same for all blocks whose places have the tokens."""
        while end + BLOCK < len(tokens):
            texts = [tuple(tokens[: place + 1]) for place in range(end, end + BLOCK)]
            if self.held[blocks[end // BLOCK]] != texts:
                break
            end += BLOCK
        return end


class Traffic:
    """Requests that arrive, are computed in chunks, and leave; some are alike and share blocks."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.table = RequestTable(SLOTS, LENGTH, 1, BLOCK)
        self.filled = FilledBlocks(self.table, BLOCKS)
        self.account = Account()
        self.running: dict[int, tuple[list[int], list[int]]] = {}
        self.found = 0

    def enter(self, slot: int) -> None:
        count = int(self.rng.integers(2, LENGTH - DRAFTS))
        own = int(self.rng.integers(0, count))
        tokens = TEXT[: count - own] + self.rng.integers(0, 50000, own).tolist()
        blocks, others = [], [b for _, used in self.running.values() for b in used]
        free = self.rng.permutation([b for b in range(BLOCKS) if b not in others]).tolist()
        for end in range(BLOCK, count + DRAFTS + BLOCK, BLOCK):
            same = [
                used[end // BLOCK - 1]
                for text, used in self.running.values()
                if end < count and text[:end] == tokens[:end]
            ]
            if not same and not free:
                return
            blocks.append(same[0] if same else free.pop())
        new = NewRequest(
            slot=slot,
            token_ids=tokens,
            num_prompt_tokens=count,
            num_computed_tokens=0,
            block_ids=[blocks],
            params=SamplingParams(),
            stop_ids=frozenset(),
            seed=0,
        )
        self.table.add(new)
        self.filled.enter(slot)
        self.table.num_computed[slot] = 0
        self.running[slot] = tokens, blocks

    def compute(self, slot: int) -> None:
        """Compute more of a slot's tokens, and drafts once it has them all."""
        (tokens, blocks), account = self.running[slot], self.account
        first = int(self.table.num_computed[slot])
        end = int(self.rng.integers(first, len(tokens) + 1))
        drafts = DRAFTS if end == len(tokens) else 0
        touched = [blocks[place // BLOCK] for place in range(first, end + drafts)]
        self.filled.overwrite(np.array(touched, np.int64))
        for block in touched:
            account.tagged.pop(block, None)
        if self.rng.random() < 0.2:  # the forward fails half-way
            account.compute(tokens, blocks, first, int(self.rng.integers(first, end + 1)))
            return
        account.compute(tokens + [-1] * drafts, blocks, first, end + drafts)
        self.table.num_computed[slot] = end
        for index in range(first // BLOCK, end // BLOCK):
            account.tagged[blocks[index]] = tuple(tokens[: (index + 1) * BLOCK])

    def find(self, slots: list[int]) -> None:
        bounds = {}
        for slot in slots:
            first, (tokens, blocks) = int(self.table.num_computed[slot]), self.running[slot]
            bounds[slot] = first, first
            if first % BLOCK == 0:
                bounds[slot] = tuple(
                    f(tokens, blocks, first) for f in (self.account.least, self.account.most)
                )
            self.found += bounds[slot][0] - first
        self.filled.find(np.array(slots, np.int64))
        for slot, (least, most) in bounds.items():
            assert least <= self.table.num_computed[slot] <= most

    def leave(self, slot: int) -> None:
        self.filled.note(np.array([slot]))
        del self.running[slot]


@pytest.mark.parametrize("seed", range(4))
def test_exactly_the_blocks_still_filled_are_found(seed: int) -> None:
    """Only blocks that a request filled and that were not written since, and all of these, whether
    that request is still there or has left."""
    traffic = Traffic(seed)
    for _ in range(400):
        slot = int(traffic.rng.integers(SLOTS))
        if slot not in traffic.running:
            traffic.enter(slot)
            continue
        action = traffic.rng.random()
        if action < 0.5:
            traffic.compute(slot)
        elif action < 0.8:
            traffic.find([s for s in traffic.running if s == slot or traffic.rng.random() < 0.5])
        else:
            traffic.leave(slot)
    assert traffic.found > 20 * BLOCK


def test_a_tag_depends_on_every_token_and_on_all_before() -> None:
    tags = set()
    for changed in range(-1, 3 * BLOCK):
        table = RequestTable(1, LENGTH, 1, BLOCK)
        table.token_ids[0] = TEXT
        if changed >= 0:
            table.token_ids[0, changed] += 1
        table.num_tokens[0] = LENGTH
        table.num_computed[0] = 3 * BLOCK
        table.block_tables[0][0, :3] = [1, 2, 3]
        filled = FilledBlocks(table, BLOCKS)
        filled.note(np.array([0]))
        tags.add(int(filled._tags[3]))
    assert len(tags) == 3 * BLOCK + 1
