"""The worker's table of running requests, one slot each, so that a plan contains only changes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from kvik.core.plan import BudgetCut, NewRequest
from kvik.frozen import frozen
from kvik.spec.adapters import NO_ADAPTER
from kvik.worker.draft_tree import DraftTree
from kvik.worker.group import CutKeys


@frozen
class Expected:
    """Tokens that the table counts but does not know yet, one for each of some slots."""

    # slots, places: [rows], their slots and their indices in the sequences.
    slots: np.ndarray
    places: np.ndarray
    entered: int  # number of requests that had entered the table by then


class RequestTable:
    """Tokens and block tables by slot, on the host."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        num_groups: int,
        block_size: int,
        *,
        states: bool = False,
        covered: int = 0,
        type_stride: int = 0,
        shares: Sequence[int] = (),
        budgeted: Sequence[int] = (),
        adapters: bool = False,
    ) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_size = block_size
        self.states = states  # layers keep a state of each request, in the row of its slot
        # [rows of states] int32, tokens that each state covers, which are fewer than `num_computed`
        # where drafts were accepted; None: states have no drafts.
        self.covered = np.zeros(covered, np.int32) if covered else None
        # Offset of positions in the second text of a prompt (`ModelFacts.type_stride`); 0: the
        # model does not distinguish the texts.
        self.type_stride = type_stride
        # [slots] int32, where the second text begins.
        self.second_text = np.zeros(max_num_seqs, np.int32)
        # [slots, max_model_len] int32, prompt and output so far, then drafts.
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)
        # num_tokens, num_computed: [slots] int32, known tokens and those with K/V.
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_computed = np.zeros(max_num_seqs, np.int32)
        self.num_prompt = np.zeros(max_num_seqs, np.int32)  # [slots] int32
        self.tenants = [""] * max_num_seqs  # the cache salt of each slot's request
        # Of each KV group (`KVGroup.shares`); (): all 1.
        self.shares = tuple(shares) or (1,) * num_groups
        # Per KV group [slots, max_blocks] int32.
        self.block_tables = [
            np.zeros((max_num_seqs, max_blocks), np.int32) for _ in range(num_groups)
        ]
        # [groups, slots] int32, filled entries of each block table.
        self.num_blocks = np.zeros((num_groups, max_num_seqs), np.int32)
        # KV group with a budget -> [slots] int32, index of the first key that is left of a request.
        self.first_keys = {group: np.zeros(max_num_seqs, np.int32) for group in budgeted}
        # [slots] int64, slot of each request's adapter, or `NO_ADAPTER`; None: the model has none.
        self.adapters = np.full(max_num_seqs, NO_ADAPTER, np.int64) if adapters else None
        # The drafts of every row are its first nodes after the root; None: each draft follows the
        # one before it.
        self.draft_tree: DraftTree | None = None
        self.entered = 0  # total number of requests that entered a slot
        self._entry_number = np.zeros(max_num_seqs, np.int64)  # [slots], running number

    def add(self, new: NewRequest) -> None:
        slot, count = new.slot, len(new.token_ids)
        self.entered += 1
        self._entry_number[slot] = self.entered
        self.token_ids[slot, :count] = new.token_ids
        self.num_tokens[slot] = count
        self.num_computed[slot] = new.num_computed_tokens
        self.num_prompt[slot] = new.num_prompt_tokens
        self.second_text[slot] = new.second_text or len(new.token_ids)
        self.tenants[slot] = new.cache_salt
        if self.adapters is not None:
            self.adapters[slot] = new.adapter
        self.num_blocks[:, slot] = 0
        for first_keys in self.first_keys.values():
            first_keys[slot] = 0
        for group, ids in enumerate(new.block_ids):
            self.add_blocks(slot, group, ids)

    def compute(self, slots: np.ndarray, ends: np.ndarray, drafts: list[int]) -> None:
        """Count the tokens of a step as computed.

        Args:
            slots, ends: [rows], of the step, and the tokens of each after it.
            drafts: how many of them are drafts.
        """
        self.num_computed[slots] = ends
        if self.covered is not None:
            self.covered[slots] = ends - np.array(drafts)

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Record that states are copied, in order, from rows to other rows."""
        if self.covered is not None:
            for source, target in pairs:
                self.covered[target] = self.covered[source]

    def add_blocks(self, slot: int, group: int, ids: list[int]) -> None:
        first = self.num_blocks[group, slot]
        self.block_tables[group][slot, first : first + len(ids)] = ids
        self.num_blocks[group, slot] = first + len(ids)

    def cut(self, cut: BudgetCut) -> CutKeys:
        """Replace blocks of a request in a group by those for its kept tokens."""
        before = int(self.first_keys[cut.group][cut.slot])
        source = self.positions(cut.group, cut.slot, np.arange(before, cut.end))
        first = cut.first_key // self.block_size
        table = self.block_tables[cut.group][cut.slot]
        table[first : first + len(cut.block_ids)] = cut.block_ids
        self.first_keys[cut.group][cut.slot] = cut.first_key
        target = self.positions(cut.group, cut.slot, np.arange(cut.first_key, cut.end))
        return CutKeys(cut.group, cut.slot, cut.end, source.tobytes(), target.tobytes())

    def positions(self, group: int, slots: int | np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the KV positions of some places: [places] int64.

        Args:
            slots: of the places' requests: one for all, or [places].
        """
        block, offset = np.divmod(places, self.block_size)
        return self.blocks(group, (slots, block)).astype(np.int64) * self.block_size + offset

    def blocks(self, group: int, where: tuple[int | np.ndarray, np.ndarray | slice]) -> np.ndarray:
        """Return some block ids of a group, as its layers number them."""
        ids, shares = self.block_tables[group][where], self.shares[group]
        return ids if shares == 1 else ids * np.int32(shares)

    def view(self, group: int, num_groups: int) -> RequestTable:
        """Return a table with the same tokens for another model, whose groups all have this group's
        block tables; it has a separate `num_computed`."""
        view = copy(self)
        view.num_computed = np.zeros_like(self.num_computed)
        view.block_tables = [self.block_tables[group]] * num_groups
        view.shares = (1,) * num_groups
        return view

    def expect(self, slots: np.ndarray) -> Expected:
        """Count one sampled token for each of some slots; the tokens will be known later."""
        expected = Expected(slots, self.num_tokens[slots], self.entered)
        self.num_tokens[slots] += 1
        return expected

    def still(self, expected: Expected) -> np.ndarray | None:
        """Return which rows' requests are still in their slots: [rows] bool; None: all are."""
        if self.entered == expected.entered:
            return None
        present: np.ndarray = self._entry_number[expected.slots] <= expected.entered
        return present

    def learn(self, expected: Expected, tokens: np.ndarray) -> None:
        """Fill in expected tokens. Tokens of requests that have left their slots are dropped.

        Args:
            tokens: [rows].
        """
        slots, places = expected.slots, expected.places
        present = self.still(expected)
        if present is not None:
            slots, places, tokens = slots[present], places[present], tokens[present]
        self.token_ids[slots, places] = tokens

    def append_runs(self, slots: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> None:
        """Append sampled tokens to some slots.

        Args:
            slots, counts: [rows]. tokens: [sum of counts], row after row.
        """
        self.put_drafts(slots, counts, tokens)
        self.num_tokens[slots] += counts.astype(np.int32)

    def put_drafts(self, slots: np.ndarray, counts: np.ndarray, tokens: np.ndarray) -> None:
        """Do the same, but without counting the tokens: they are drafts after the known ones."""
        ends = counts.cumsum()
        # Index in the flattened table of each row's first token, minus its index in `tokens`.
        first = slots * self.token_ids.shape[1] + self.num_tokens[slots] - (ends - counts)
        places = first.repeat(counts) + np.arange(ends[-1])
        self.token_ids.reshape(-1)[places] = tokens.astype(np.int32)
