"""A draft model with random traffic, and its draws independent of their plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.draft_world import (
    BLOCK,
    BLOCKS,
    GREEDY,
    LENGTH,
    SLOTS,
    TEXT,
    VOCAB,
    World,
    continuation,
)

from kvik.core.sampling_params import SamplingParams


def test_draws_do_not_depend_on_the_batch_size_of_their_plan() -> None:
    """For all drafts at once, or one draft and few rows at a time if memory is scarce."""
    drawn = SamplingParams(temperature=1.2, top_p=0.9)
    kinds = [drawn, GREEDY, drawn.with_changes(seed=8), drawn.with_changes(top_k=5, top_p=1.0)]
    found = []
    for room in (1 << 30, 1, 2 * VOCAB * 100):
        world = World(room=room)
        for slot, params in enumerate(kinds):
            blocks = [slot * 4 + i for i in range(1, 5)]
            world.enter(slot, TEXT[slot * 3 : slot * 3 + 6], blocks, params=params)
        for limits in ({0: 4, 1: 4, 2: 4, 3: 4}, {3: 1, 1: 2, 0: 4, 2: 3}, {1: 2, 2: 2}):
            proposed = world.propose(limits)
            probs = proposed.probs
            if probs is not None:  # for rows with a seed and greedy rows, nothing is read
                free = np.isin(list(limits), (0, 3)).repeat(proposed.counts)
                probs = probs[torch.from_numpy(free)]
            found.append((proposed.by_row(), probs))
            for slot in limits:
                world.deliver(slot, TEXT[slot])
    runs = [found[i : i + 3] for i in range(0, 9, 3)]
    assert [probs is None for _, probs in runs[0]] == [False, False, True]
    for run in runs[1:]:
        for (tokens, probs), (expected, wanted) in zip(run, runs[0], strict=True):
            assert tokens == expected
            assert (probs is None) == (wanted is None)
            if probs is not None and wanted is not None:
                torch.testing.assert_close(probs, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_any_traffic(seed: int) -> None:
    """Requests arrive, some with a previous prompt, get drafts or none, and leave. Drafts are the
    model's tokens, and only missing tokens are computed."""
    rng = np.random.default_rng(seed)
    world = World(max_tokens=13)
    done: dict[int, list[int]] = {}  # tokens computed in each slot, including drafts
    free, proposals = list(range(1, BLOCKS)), 0
    for _ in range(60):
        slot, known = int(rng.integers(SLOTS)), {s: world.known(s) for s in done}
        if slot not in done:
            alike = int(rng.integers(0, 20))
            own = rng.integers(0, VOCAB, int(rng.integers(1, 6))).tolist()
            tokens, blocks = TEXT[:alike] + own, []
            sharing = [s for s in done if known[s][:alike] == TEXT[:alike]]
            if sharing and rng.random() < 0.7:
                whole = (alike - 1) // BLOCK if alike else 0
                blocks = world.table.block_tables[1][sharing[0], :whole].tolist()
            need = LENGTH // BLOCK - len(blocks)
            if len(free) >= need:
                blocks += [free.pop(int(rng.integers(len(free)))) for _ in range(need)]
                world.enter(slot, tokens, blocks)
                done[slot] = []
            continue
        if rng.random() < 0.15 or len(known[slot]) > LENGTH - 12:
            world.drafter.leave(slot)
            del done[slot]
            used = {b for s in done for b in world.table.block_tables[1][s].tolist()}
            free = [b for b in range(1, BLOCKS) if b not in used]
            continue
        room = [s for s in done if len(known[s]) <= LENGTH - 12]
        asked = [s for s in room if s == slot or rng.random() < 0.6]
        limits = {s: int(rng.integers(1, 6)) for s in asked}
        found = world.drafts(limits)
        for s, drafts in zip(asked, found, strict=True):
            tokens, places = known[s], world.positions(s)
            own = [i for i, (a, b) in enumerate(zip(done[s], tokens, strict=False)) if a != b]
            valid = min(own[0] if own else len(done[s]), len(tokens) - 1)
            assert places == list(range(places[0], places[0] + len(places))) if places else True
            if len(tokens) - valid <= BLOCK:
                assert drafts and places[0] == valid
            elif places:
                assert places[0] >= valid
            if drafts:
                proposals += 1
                assert len(drafts) == limits[s]
                assert drafts == continuation(tokens, limits[s])
                done[s] = [*tokens, *drafts[:-1]]
                right = int(rng.integers(0, len(drafts) + 1))
                world.deliver(s, *drafts[:right], int(rng.integers(VOCAB)))
            elif places:
                done[s] = tokens[: places[-1] + 1]
    assert proposals > 25
