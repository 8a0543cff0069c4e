"""The numbers of drafts per request, and the part of a proposal that is kept."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.drafters import with_newest
from torch import Tensor

from kvik.config.speculative import ResolvedSpeculation
from kvik.core.plan import NewRequest
from kvik.core.sampling_params import SamplingParams
from kvik.worker.draft_tree import DraftTree
from kvik.worker.drafters.base import DraftRows, Drafts
from kvik.worker.rejection import Chains
from kvik.worker.request_table import RequestTable
from kvik.worker.sampling_table import SamplingTable
from kvik.worker.speculator import Speculator, shared_out

VOCAB, LENGTH, BLOCK = 11, 32, 4
CPU = torch.device("cpu")
EAGER = ResolvedSpeculation("ngram", num_draft_tokens=3, max_draft_rows=8, adaptive=False)


class ScriptedDrafter:
    """Proposes what the test sets."""

    def __init__(self) -> None:
        self.answer: Callable[[DraftRows], Drafts] = lambda rows: Drafts.of(
            [[] for _ in rows.slots]
        )
        self.asked: list[DraftRows] = []
        self.events: list[tuple[str, int]] = []

    def enter(self, slot: int) -> None:
        self.events.append(("enter", slot))

    def leave(self, slot: int) -> None:
        self.events.append(("leave", slot))

    def propose(self, rows: DraftRows) -> Drafts:
        self.asked.append(rows)
        return self.answer(rows)


def as_many_as_allowed(rows: DraftRows) -> Drafts:
    return Drafts.of([[5] * limit for limit in rows.limits])


class World:
    """Four slots, and their speculator."""

    def __init__(self, speculation: ResolvedSpeculation = EAGER) -> None:
        self.table = RequestTable(4, LENGTH, 1, BLOCK)
        self.sampling = SamplingTable(4, VOCAB, CPU)
        self.drafter = ScriptedDrafter()
        self.time = 0.0
        self.speculator = Speculator(
            speculation, self.drafter, self.table, self.sampling, VOCAB, self.clock
        )

    def clock(self) -> float:
        self.time += 1.0
        return self.time

    def enter(self, slot: int, known: int = 5, **params: object) -> None:
        new = NewRequest(
            slot=slot,
            token_ids=[1] * known,
            num_prompt_tokens=known,
            num_computed_tokens=known - 1,
            block_ids=[[1 + 10 * slot + i for i in range(-(-known // BLOCK))]],
            params=SamplingParams(**{"temperature": 0.0, **params}),
            stop_ids=frozenset(),
            seed=0,
        )
        self.table.add(new)
        self.sampling.set(slot, new.params, 0, new.token_ids, [], frozenset())
        self.speculator.enter(new)

    def propose(self, *slots: int) -> list[int]:
        """Return the numbers of drafts proposed."""

        def hidden(chosen: np.ndarray) -> Tensor:
            return torch.tensor(slots)[torch.from_numpy(chosen)][:, None].float()

        where = np.array(slots, np.int64)
        self.speculator.propose(where, hidden)
        return self.speculator.num_drafts[where].tolist()

    def step(self, *slots: int) -> None:
        none = np.zeros(len(slots), np.int64)
        self.speculator.observe(np.array(slots), none, none, 1.0, pure=True)


@pytest.mark.parametrize(
    ("limits", "room", "given"),
    [
        ([3, 3], 6, [3, 3]),
        ([3, 3], 4, [2, 2]),
        ([5, 1, 5], 8, [4, 1, 3]),
        ([2, 2, 2], 2, [1, 1, 0]),
        ([2, 0, 2], 3, [2, 0, 1]),
        ([4], 0, [0]),
        ([4], -1, [0]),
    ],
)
def test_drafts_of_a_step_are_shared_among_requests(
    limits: list[int], room: int, given: list[int]
) -> None:
    assert shared_out(np.array(limits), room).tolist() == given


def test_drafts_follow_the_tokens() -> None:
    world = World()
    world.enter(0)
    world.enter(2, known=7)
    world.drafter.answer = lambda rows: Drafts.of([[3, 4], [6]])
    assert world.propose(2, 0) == [2, 1]
    assert world.table.token_ids[2, 7:9].tolist() == [3, 4]
    assert world.table.token_ids[0, 5] == 6
    (rows,) = world.drafter.asked
    assert (rows.slots.tolist(), rows.limits.tolist()) == ([2, 0], [3, 3])
    assert rows.hidden()[:, 0].tolist() == [2, 0]


def test_limits_keep_within_the_request() -> None:
    world = World()
    world.drafter.answer = as_many_as_allowed
    world.enter(0, max_tokens=3)
    world.enter(1, max_tokens=1)
    world.enter(2, known=LENGTH - 2, max_tokens=None)
    world.enter(3, speculation=False)
    # The last token of each request comes from the model itself.
    assert world.propose(0, 1, 2, 3) == [2, 0, 1, 0]
    assert world.drafter.events == [("enter", 0), ("enter", 1), ("enter", 2)]


def test_drafts_of_requests_that_wait_count() -> None:
    world = World(replace(EAGER, max_draft_rows=5))
    world.drafter.answer = as_many_as_allowed
    for slot in range(3):
        world.enter(slot)
    assert world.propose(0) == [3]
    assert world.propose(1, 2) == [1, 1]
    world.step(0, 1)
    assert world.speculator.num_drafts.tolist() == [0, 0, 1, 0]
    world.speculator.leave(2)
    assert world.speculator.num_drafts.sum() == 0


def test_checked_drafts_are_dropped() -> None:
    world = World()
    world.drafter.answer = as_many_as_allowed
    world.enter(0)
    assert world.propose(0) == [3]
    world.step(0)
    world.drafter.answer = lambda rows: Drafts.of([[]])
    assert world.propose(0) == [0]


def test_a_drafter_writes_within_the_blocks_of_its_request() -> None:
    world = World(replace(EAGER, num_lookahead_tokens=3))
    world.drafter.answer = as_many_as_allowed
    world.enter(0, known=7)  # two blocks of four: the eighth place is for the first draft
    world.enter(1, known=8)
    assert world.propose(0, 1) == [2, 1]
    world.table.add_blocks(1, 0, [9])
    world.step(0, 1)
    assert world.propose(0, 1) == [2, 3]


@pytest.mark.parametrize(
    "drafts",
    [
        [[1], [VOCAB]],
        [[1], [-1]],
        [[1]],
        [[1], [2], [3]],
        [[1] * 4, []],
    ],
)
def test_invalid_drafts_are_refused(drafts: list[list[int]], caplog) -> None:
    world = World()
    world.enter(0)
    world.enter(1)
    world.drafter.answer = lambda rows: Drafts.of(drafts)
    with caplog.at_level(logging.WARNING):
        assert world.propose(0, 1) == [0, 0]
        assert world.propose(0, 1) == [0, 0]
    assert len(caplog.records) == 1


def test_the_tree_stays_and_is_passed_to_the_control(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.enter(0)
    followed: list[tuple[int, ...]] = []
    monkeypatch.setattr(world.speculator.control, "follow", followed.append)
    tree = DraftTree((-1, 0, 0), (0, 0, 1))
    world.drafter.answer = lambda rows: Drafts.of([[3, 4]], tree)
    assert world.propose(0) == [2]
    assert world.table.draft_tree is tree
    world.step(0)
    assert world.propose(0) == [2]
    assert followed == [tree.parents]
    world.step(0)
    world.drafter.answer = lambda rows: Drafts.of([[3, 4]], DraftTree((-1, 0, 1), (0, 0, 0)))
    assert world.propose(0) == [0]
    world.drafter.answer = lambda rows: Drafts.of([[3, 4, 5]], tree)  # the tree has two nodes
    assert world.propose(0) == [0]


def test_a_broad_tree_is_used_while_any_of_its_nodes_is_right() -> None:
    world = World(replace(EAGER, adaptive=True))
    world.enter(0, max_tokens=None)
    tree = DraftTree((-1, 0, 0, 0), (0, 0, 1, 2))
    world.drafter.answer = lambda rows: Drafts.of([[3, 4, 5][: rows.limits[0]]], tree)
    asked = []
    slots, count = np.array([0]), 0
    for step in range(120):
        right = step * 2 % 3
        paths = np.zeros((1, 3), np.bool_)
        paths[0, right] = right < count
        world.speculator.observe(
            slots, np.array([count]), paths.sum(1), 100.0 + 5 * count, pure=True, paths=paths
        )
        (count,) = world.propose(0)
        asked.append(count)
    assert np.mean(asked[40:]) > 2.5


def test_probabilities_go_with_drafts_that_were_drawn() -> None:
    world = World()
    world.enter(0)
    world.enter(1, temperature=1.0)
    world.enter(2, temperature=1.0, seed=3)
    probs = torch.arange(5 * VOCAB, dtype=torch.float32).view(5, VOCAB)
    world.drafter.answer = lambda rows: Drafts.of([[1], [2, 3], [4, 5]], probs=probs)
    assert world.propose(0, 1, 2) == [1, 2, 2]
    slots, counts = np.array([2, 1, 0]), np.array([2, 1, 1])  # one of slot 1 is checked
    chains = Chains.of(counts, with_newest([2, 1, 1], [4, 5, 2, 1]))
    guesses = world.speculator.guesses(slots, chains)
    assert (guesses.rows.tolist(), guesses.token_ids.tolist()) == ([3], [2])
    assert torch.equal(guesses.probs, probs[1:2])
    world.step(0, 1, 2)
    assert world.speculator.guesses(slots, chains) is None


def test_times_of_judging_and_drafting_are_measured_separately() -> None:
    world = World()
    world.enter(0)
    world.enter(1)
    world.drafter.answer = as_many_as_allowed
    slots, none, drafts = np.array([0, 1]), np.zeros(2, np.int64), np.array([3, 3])

    def observe(drafts: np.ndarray, accepted: np.ndarray, *, pure: bool = True) -> tuple:
        times = world.speculator.observe(slots, drafts, accepted, 2.0, pure=pure)
        return times.proposing, times.checking, times.plain

    assert observe(none, none) == (0.0, 0.0, 0.0)  # no proposal was requested
    # The clock is read after each step and around proposals, and advances by a second each time.
    world.propose(0, 1)
    assert observe(drafts, np.array([3, 1])) == (2.0, 4.0, 2.0 * 3.0)  # six tokens, not two
    world.propose(0, 1)
    assert observe(none, none) == (2.0, 4.0, 2.0)  # an empty proposal
    world.propose(0, 1)
    assert observe(drafts, none, pure=False) == (2.0, 0.0, 0.0)


class StructuredText:
    """A structured text with forced tokens, or a set of allowed ones."""

    def __init__(self, forced: list[int], allowed: set[int]) -> None:
        self._forced, self._allowed = forced, allowed

    def forced(self) -> list[int]:
        return self._forced

    def valid(self, tokens: list[int]) -> int:
        wrong = (i for i, token in enumerate(tokens) if token not in self._allowed)
        return next(wrong, len(tokens))


def structured(world: World, **held: StructuredText) -> None:
    """Make the texts of some slots structured: `slot0`, `slot1`, ..."""
    by_slot = {int(name.removeprefix("slot")): one for name, one in held.items()}

    def find(slots: np.ndarray) -> dict[int, StructuredText]:
        return {row: by_slot[slot] for row, slot in enumerate(slots.tolist()) if slot in by_slot}

    world.sampling.structured = find


def test_tokens_forced_by_a_grammar_precede_drafts() -> None:
    world = World()
    for slot in range(3):
        world.enter(slot)
    structured(world, slot0=StructuredText([7, 8, 9, 10], set()), slot2=StructuredText([], {5}))
    world.drafter.answer = as_many_as_allowed
    assert world.propose(0, 1, 2) == [3, 3, 2]  # of eight in total
    assert world.table.token_ids[0, 5:8].tolist() == [7, 8, 9]
    (rows,) = world.drafter.asked
    assert rows.slots.tolist() == [1, 2]
    assert rows.hidden()[:, 0].tolist() == [1, 2]


def test_drafts_are_cut_where_they_break_the_grammar() -> None:
    world = World()
    world.enter(0)
    world.enter(1)
    structured(world, slot0=StructuredText([], {5, 6}))
    drawn = torch.arange(6 * VOCAB).reshape(6, VOCAB).float()
    world.drafter.answer = lambda rows: Drafts.of([[5, 7, 6], [1, 2, 3]], probs=drawn)
    assert world.propose(0, 1) == [1, 3]
    assert world.table.token_ids[0, 5] == 5
    assert world.table.token_ids[1, 5:8].tolist() == [1, 2, 3]


def test_trees_are_cut_behind_the_last_draft_that_the_grammar_allows() -> None:
    tree = DraftTree((-1, 0, 0, 1, 2), (0, 0, 1, 0, 0))
    world = World(replace(EAGER, method="medusa", num_draft_tokens=4, max_draft_rows=12))
    for slot in range(3):
        world.enter(slot)
    structured(world, slot0=StructuredText([5], {5, 6}), slot1=StructuredText([5], {5}))
    drafts = [[5, 7, 6, 6], [7, 7, 5, 5], [7, 7, 7, 7]]
    world.drafter.answer = lambda rows: replace(Drafts.of(drafts), tree=tree)
    assert world.propose(0, 1, 2) == [3, 0, 4]  # 5-6 is a path of the first tree; 7-5 is none
    assert world.table.token_ids[0, 5:8].tolist() == [5, 7, 6]


def test_without_a_drafter_only_forced_tokens_are_drafted() -> None:
    world = World(replace(EAGER, method="forced"))
    world.enter(0)
    world.enter(1)
    structured(world, slot1=StructuredText([4, 4], set()))
    where = np.array([0, 1])
    world.speculator.propose(where, lambda chosen: torch.zeros(len(chosen), 1), guesses=False)
    assert world.speculator.num_drafts[where].tolist() == [0, 2]
    assert not world.drafter.asked
