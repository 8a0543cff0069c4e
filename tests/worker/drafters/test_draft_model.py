"""A draft model with its own cache: its drafts, and the tokens it computes for them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from helpers.draft_world import (
    BLOCK,
    CPU,
    GREEDY,
    LENGTH,
    TEXT,
    VOCAB,
    World,
    assert_stored,
    continuation,
    plain_model,
)

from kvik.core.sampling_params import SamplingParams
from kvik.kernels.reference.ops import REFERENCE
from kvik.worker.sampler import Sampler
from kvik.worker.sampling_table import SamplingTable


def test_drafts_are_the_draft_models_own_tokens() -> None:
    world, limits = World(), {2: 4, 0: 1, 1: 3}
    prompts = {0: TEXT[:3], 1: TEXT[5:16], 2: TEXT[20:27]}
    world.enter(0, prompts[0], [9, 3])
    world.enter(1, prompts[1], [5, 4, 1, 7])
    world.enter(2, prompts[2], [11, 2, 8])
    expected = [continuation(prompts[slot], count) for slot, count in limits.items()]
    assert world.drafts(limits) == expected
    for slot, prompt in prompts.items():
        assert_stored(world, slot, len(prompt))
    for slot, drafts in zip(limits, expected, strict=True):
        world.deliver(slot, *drafts)
    again = [continuation(world.known(slot), 2) for slot in limits]
    assert world.drafts(dict.fromkeys(limits, 2)) == again
    for slot in limits:
        assert_stored(world, slot, len(world.known(slot)))


@pytest.mark.parametrize("accepted", [0, 1, 2, 3, 4])
def test_only_new_tokens_are_computed(accepted: int) -> None:
    """K and V of accepted drafts stay; the last draft was never computed."""
    world = World()
    world.enter(0, TEXT[:6], [3, 1, 2, 7])
    (drafts,) = world.drafts({0: 4})
    assert world.positions(0) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    other = (drafts[accepted] + 1) % VOCAB if accepted < 4 else 17
    world.deliver(0, *drafts[:accepted], other)
    again = world.drafts({0: 2})
    known = 6 + accepted + 1
    assert world.positions(0) == list(range(min(6 + accepted, 9), known + 1))
    assert again == [continuation(world.known(0), 2)]
    assert_stored(world, 0, known)


def test_tokens_of_steps_without_drafts_are_computed_later() -> None:
    world = World()
    world.enter(0, TEXT[:6], [3, 1, 2, 7, 9])
    (drafts,) = world.drafts({0: 3})
    for token in (*drafts, *TEXT[40:43]):  # one by one, in steps that drop drafts
        world.deliver(0, token)
    assert world.drafts({0: 3}) == [continuation(world.known(0), 3)]
    assert world.positions(0) == [8, 9, 10, 11, 12, 13]
    assert_stored(world, 0, 12)


def test_requests_without_drafts_are_not_computed() -> None:
    world = World()
    world.enter(0, TEXT[:6], [3, 1, 2])
    world.enter(1, TEXT[:9], [4, 5, 6])
    world.drafts({1: 2})
    assert world.positions(0) == []


def test_blocks_of_an_earlier_request_are_reused() -> None:
    world = World()
    world.enter(0, TEXT[:11], [3, 1, 2, 8])
    world.drafts({0: 2})
    world.drafter.leave(0)
    world.enter(1, [*TEXT[:9], 5, 6], [3, 1, 4], cached=8)
    assert world.drafts({1: 2}) == [continuation([*TEXT[:9], 5, 6], 2)]
    assert world.positions(1) == [8, 9, 10, 11]
    assert_stored(world, 1, 11)


def test_blocks_overwritten_by_drafts_are_not_reused() -> None:
    world = World()
    world.enter(0, TEXT[:9], [3, 1, 2])
    world.drafts({0: 1})
    world.drafter.leave(0)
    world.enter(1, TEXT[20:24], [5, 3])  # only drafts are written to block 3
    world.drafts({1: 3})
    world.enter(2, TEXT[:9], [3, 1, 6])
    assert world.drafts({2: 1}) == [continuation(TEXT[:9], 1)]
    assert world.positions(2) == list(range(9))


def test_one_of_simultaneous_siblings_computes_the_prompt() -> None:
    world, prompt = World(max_tokens=6), TEXT[:11]
    for slot, last in enumerate((2, 7, 8)):
        world.enter(slot, prompt, [3, 1, last], cached=10 if slot else 0)
    waiting, shared = dict.fromkeys(range(3), 2), []
    while waiting:
        found = dict(zip(waiting, world.drafts(waiting), strict=True))
        shared += [place for _, place, _ in world.graph.computed if place < 8]
        assert max(world.graph.sizes) <= 6
        for slot, drafts in found.items():
            if drafts:
                assert drafts == continuation(prompt, 2)
                del waiting[slot]
    assert sorted(shared) == list(range(8))


def test_long_texts_catch_up_while_others_draft() -> None:
    world = World(max_tokens=7)
    world.enter(0, TEXT[:30], list(range(1, 10)))
    world.enter(1, TEXT[30:34], [20, 21, 22, 23, 24, 25])
    seen: list[int] = []
    for step in range(20):
        found = world.drafts({0: 2, 1: 2})
        assert max(world.graph.sizes) <= 7
        assert found[1] == continuation(world.known(1), 2), f"step {step}"
        seen += world.positions(0)
        if found[0]:
            break
        world.deliver(1, TEXT[step])
    assert found[0] == continuation(TEXT[:30], 2)
    assert seen == list(range(31))
    assert step > 3
    assert_stored(world, 0, 30)


def test_no_draft_follows_a_position_beyond_the_models_context() -> None:
    world = World(max_context=12)
    for slot, length in enumerate((9, 12, 13)):
        world.enter(slot, TEXT[:length], [slot * 5 + i for i in range(1, 6)])
    found = world.drafts({0: 5, 1: 5, 2: 5})
    assert [len(drafts) for drafts in found] == [4, 1, 0]
    assert found[:2] == [continuation(TEXT[:9], 4), continuation(TEXT[:12], 1)]
    assert world.positions(2) == []
    assert max(position for _, position, _ in world.graph.computed) == 11


def test_drafts_reach_to_the_end_of_the_table() -> None:
    world = World()
    world.enter(0, TEXT[: LENGTH - 3], list(range(1, LENGTH // BLOCK + 1)))
    world.enter(1, TEXT[:4], [30, 31, 32, 33])
    first, others = world.drafts({0: 2, 1: 5})  # and one token of the target after them
    assert first == continuation(TEXT[: LENGTH - 3], 2)
    assert others == continuation(TEXT[:4], 5)
    world.deliver(0, *first)
    assert world.drafts({0: 1}) == [continuation(world.known(0), 1)]


def test_a_slot_is_reset() -> None:
    """After a preemption or with another request, in other blocks and without old drafts."""
    world = World()
    world.enter(0, TEXT[:6], [3, 1, 2])
    (drafts,) = world.drafts({0: 3})
    world.drafter.leave(0)
    tokens = [*TEXT[:6], *drafts[:2]]
    world.enter(0, tokens, [3, 8, 9])
    (drafts,) = world.drafts({0: 2})
    assert drafts == continuation(tokens, 2)
    assert world.positions(0) == [4, 5, 6, 7, 8]
    assert_stored(world, 0, 8)
    world.drafter.leave(0)
    world.enter(0, [drafts[0], 5], [4])  # begins as the old drafts do
    assert world.drafts({0: 1}) == [continuation([drafts[0], 5], 1)]
    assert world.positions(0) == [0, 1]


@pytest.mark.parametrize("forwards", [1, 2, 3])
def test_a_forward_that_fails_leaves_nothing_behind(forwards: int) -> None:
    world = World()
    world.enter(0, TEXT[:6], [3, 1, 2])
    world.enter(1, TEXT[7:16], [4, 5, 6])
    world.drafts({0: 1})
    world.deliver(0, 5, 6)
    world.graph.broken = forwards
    with pytest.raises(RuntimeError, match="broke"):
        world.propose({0: 4, 1: 3})
    world.deliver(0, 7)
    world.deliver(1, 8)
    found = world.drafts({0: 4, 1: 3})
    assert found == [continuation(world.known(slot), most) for slot, most in ((0, 4), (1, 3))]


def test_states_cover_only_known_tokens() -> None:
    """Whatever the target says, and after a failure at any place."""
    rng, world = random.Random(0), World(states=True, max_tokens=9)
    prompts, blocks = {0: TEXT[:3], 1: TEXT[5:16]}, {0: range(1, 13), 1: range(20, 32)}
    for slot, prompt in prompts.items():
        world.enter(slot, prompt, blocks[slot])
    drafted = 0
    for _ in range(12):
        limits = {slot: rng.randint(0, 4) for slot in rng.sample([0, 1], 2)}
        world.graph.broken = rng.choice([0, 0, rng.randint(1, 4)])
        try:
            found = dict(zip(limits, world.drafts(limits), strict=True))
        except RuntimeError:
            found = {0: [], 1: []}
        world.graph.broken = 0
        for slot, drafts in found.items():
            wanted = continuation(world.known(slot), len(drafts), states=True)
            assert drafts == wanted
            drafted += len(drafts)
            world.deliver(slot, *drafts[: rng.randint(0, len(drafts))], rng.randrange(VOCAB))
    assert drafted > 15
    world.drafter.leave(1)
    world.enter(1, TEXT[3:9], blocks[1])  # another request
    assert world.drafts({1: 3}) == [continuation(TEXT[3:9], 3, states=True)]


def test_drafts_count_once() -> None:
    """Accepted drafts count although the next forward fails, and do not count again where the same
    tokens follow."""
    world = World()
    world.enter(0, TEXT[:6], [3, 1, 2, 7, 9])
    (drafts,) = world.drafts({0: 4})
    world.deliver(0, *drafts[:3], drafts[0])
    world.graph.broken = 1
    with pytest.raises(RuntimeError, match="broke"):
        world.propose({0: 4})
    world.deliver(0, *drafts[1:3], 5)
    assert world.drafts({0: 2}) == [continuation(world.known(0), 2)]
    assert world.positions(0) == [9, 10, 11, 12, 13]


def test_rules_see_the_drafts_before() -> None:
    """For example, a token may not be repeated."""
    world, tokens = World(), TEXT[:5]
    never = SamplingParams(temperature=0.0, frequency_penalty=2.0, bad_words=((3, 4),))
    strict = never.with_changes(repetition_penalty=2.0, frequency_penalty=2.0)
    world.enter(0, tokens, [3, 1, 2, 5], params=GREEDY)
    world.enter(1, tokens, [4, 6, 7, 8], params=strict)
    plain, ruled = world.drafts({0: 5, 1: 5})
    assert len(set(ruled)) > len(set(plain)) or ruled != plain
    model, expected = plain_model(), []
    logits = model.step({0: tokens})[0][-1]
    other = SamplingTable(1, VOCAB, CPU)
    for depth in range(5):
        other.set(0, strict, 0, tokens, expected, frozenset())
        batch = other.batch(np.zeros(1, np.int64), np.array([len(tokens) + depth]))
        expected.append(int(Sampler(REFERENCE).sample(logits[None], batch).token_ids))
        logits = model.step({0: expected[-1:]})[0][-1]
    assert ruled == expected


@pytest.mark.parametrize("room", [1 << 30, 1])
def test_proposals_contain_the_distributions_of_drawn_drafts(room: int) -> None:
    """Row by row like the drafts; greedy rows have no distribution."""
    drawn = SamplingParams(temperature=1.3, top_k=7)
    world, limits = World(room=room), {3: 3, 0: 2, 2: 1, 1: 4}
    prompts = {slot: TEXT[slot * 4 : slot * 4 + 6] for slot in limits}
    for slot, prompt in prompts.items():
        params = {0: GREEDY, 2: drawn.with_changes(seed=5)}.get(slot, drawn)
        world.enter(slot, prompt, [slot * 4 + i for i in range(1, 5)], params=params)
    found = world.propose(limits)
    assert found.probs.shape == (10, VOCAB)
    rows = iter(found.probs)
    for slot, drafts in zip(limits, found.by_row(), strict=True):
        assert len(drafts) == limits[slot]
        model = plain_model()
        logits = model.step({0: prompts[slot]})[0][-1]
        for draft in drafts:
            shares = next(rows)
            if slot == 0:
                assert draft == int(logits.argmax())
            else:
                kept = logits.topk(7).indices
                expected = torch.zeros(VOCAB)
                expected[kept] = (logits[kept] / 1.3).softmax(-1)
                torch.testing.assert_close(shares, expected, rtol=1e-3, atol=1e-5)
                assert shares[draft] > 0
            logits = model.step({0: [draft]})[0][-1]
    assert world.propose({0: 2}).probs is None  # no draft is sampled
