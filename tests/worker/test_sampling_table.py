from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import derive_seed
from kvik.kernels.ops import Truncation
from kvik.kernels.torch_ops import TORCH
from kvik.worker.sampler import Sampler
from kvik.worker.sampling_batch import Guesses, SamplingBatch, Supposed
from kvik.worker.sampling_table import DRAFT, SamplingTable, uniform

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0)
PENALISED = SamplingParams(temperature=0, frequency_penalty=1.0)


def table() -> SamplingTable:
    return SamplingTable(4, 10, CPU)


def greedy(t: SamplingTable, slots: list[int], position: int = 5) -> list[int]:
    """Return the sampled tokens if 9, 8, 7 are nearly equally likely."""
    logits = torch.zeros(len(slots), 10)
    logits[:, 7:] = torch.tensor([1.0, 1.25, 1.5])
    batch = t.batch(np.array(slots), np.full(len(slots), position))
    return Sampler(TORCH).sample(logits, batch).token_ids.tolist()


def test_greedy_requests_need_no_plan() -> None:
    t = table()
    t.set(2, GREEDY, 0, [1], [], frozenset({0}))
    assert t.batch(np.array([2]), np.array([1])) == SamplingBatch()


def test_a_plan_contains_only_what_its_rows_need() -> None:
    t = table()
    t.set(0, SamplingParams(top_k=3), 0, [1], [], frozenset())
    t.set(1, SamplingParams(logprobs=2, temperature=0), 0, [1], [], frozenset())
    t.set(2, SamplingParams(top_k=10), 0, [1], [], frozenset())  # keeps the whole vocabulary
    batch = t.batch(np.array([1, 0]), np.array([1, 1]))
    assert batch.edits is None and batch.penalties is None and batch.logprobs == {0: 2}
    assert batch.random.rows.tolist() == [1]
    rules = batch.random.draws.truncation
    assert rules.top_k.tolist() == [3] and rules.top_p is None
    only = t.batch(np.array([2]), np.array([1]))
    assert only.random.rows is None
    assert only.random.draws.truncation == Truncation()


def test_appended_tokens_count_for_their_own_slot() -> None:
    t = table()
    for slot in (0, 1, 3):
        t.set(slot, PENALISED if slot else GREEDY, 0, [9, 9], [], frozenset())
    assert greedy(t, [0, 1, 3]) == [9, 9, 9]  # the prompt does not count
    t.append(np.array([3, 0, 1]), np.array([9, 9, 5]))
    assert greedy(t, [0, 1, 3]) == [9, 9, 8]
    t.append(np.array([3]), np.array([8]))
    assert greedy(t, [3, 1, 0]) == [7, 9, 9]


def test_a_slot_forgets_its_last_request() -> None:
    t = table()
    wild = PENALISED.with_changes(logit_bias={2: 50.0}, repetition_penalty=5.0)
    t.set(1, wild, 0, [9], [8, 8], frozenset())
    t.append(np.array([1]), np.array([9]))
    assert greedy(t, [1]) == [2]
    t.set(1, GREEDY.with_changes(repetition_penalty=5.0), 0, [0], [], frozenset())
    t.set(3, GREEDY.with_changes(logit_bias={5: 50.0}), 0, [0], [], frozenset())
    assert greedy(t, [1, 3]) == [9, 5]
    t.clear(3)
    t.clear(1)
    assert t.batch(np.array([1, 3]), np.array([3, 3])) == SamplingBatch()
    t.set(2, GREEDY.with_changes(logit_bias={6: 50.0}), 0, [0], [], frozenset())
    assert greedy(t, [1, 2, 3]) == [9, 6, 9]


def test_several_tokens_of_a_slot_count_in_their_order() -> None:
    t = table()
    t.set(0, PENALISED, 0, [0], [], frozenset())
    t.set(1, GREEDY.with_changes(bad_words=((4, 5, 9),)), 0, [4, 5], [], frozenset())
    assert greedy(t, [0, 1]) == [9, 9]  # a bad word does not begin in the prompt
    t.append(np.array([0, 1, 0, 1]), np.array([9, 4, 9, 5]))
    assert greedy(t, [0, 1]) == [8, 8]
    t.append(np.array([0, 0, 1]), np.array([8, 8, 8]))
    assert greedy(t, [0, 1]) == [7, 9]


tokens = st.lists(st.integers(0, 3), max_size=4)
RULES = SamplingParams(
    temperature=0.5,
    repetition_penalty=1.5,
    frequency_penalty=0.5,
    bad_words=((1,), (0, 1), (2, 2), (0, 1, 2), (1, 1, 3)),
    min_tokens=4,
    seed=3,
)


@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=3))
def test_supposed_tokens_count_like_appended_ones(
    requests: list[tuple[list[int], list[int]]],
) -> None:
    """Rows of several requests, each with an output and supposed next tokens."""
    supposing, appended = table(), table()
    for slot, (output, more) in enumerate(requests):
        params = RULES if slot % 2 == 0 else RULES.with_changes(bad_words=(), min_tokens=0)
        supposing.set(slot, params, slot, [3], output, frozenset({3}))
        appended.set(slot, params, slot, [3], output, frozenset({3}))
        appended.append(np.full(len(more), slot), np.array(more, np.int64))
    lengths = [len(more) for _, more in requests]
    slots = np.arange(len(requests))
    supposed = Supposed(
        np.repeat(slots, lengths), np.array([t for _, more in requests for t in more], np.int64)
    )
    positions = np.array([1 + len(output) + len(more) for output, more in requests])
    logits = torch.randn(len(requests), 10, generator=torch.Generator().manual_seed(0))
    found, expected = logits.clone(), logits.clone()
    for batch, shaped in (
        (supposing.batch(slots, positions, supposed), logits.clone()),
        (supposing.batch(slots, positions, supposed), found),  # the first call changed nothing
        (appended.batch(slots, positions), expected),
    ):
        assert batch.penalties is not None
        batch.edits.apply(shaped)
        TORCH.penalize(shaped, batch.penalties)
    assert torch.equal(found, expected)


def test_a_row_that_checks_a_sampled_draft_is_not_sampled() -> None:
    t = table()
    for slot, params in enumerate((SamplingParams(), GREEDY, SamplingParams(top_k=2))):
        t.set(slot, params, 7 + slot, [1], [], frozenset())
    slots, positions = np.array([0, 0, 1, 2]), np.array([1, 2, 1, 1])
    guesses = Guesses(np.array([0, 3]), np.array([4, 5]), torch.eye(10)[4:6])
    batch = t.batch(slots, positions, judged=guesses)
    assert batch.random.rows.tolist() == [1]
    assert batch.guessed.rows.tolist() == [0, 3]
    assert batch.guessed.token_ids.tolist() == [4, 5]
    numbers = {batch.guessed.accept[0].item(), batch.guessed.draws.uniforms[0].item()}
    drawn = t.batch(slots[:1], positions[:1], stream=DRAFT).random
    numbers.add(drawn.draws.uniforms[0].item())
    assert len(numbers) == 3  # each use has its own number
    expected = uniform(np.array([7], np.uint64), np.array([1]), DRAFT)[0]
    assert drawn.draws.uniforms[0].item() == expected
    assert batch.guessed.draws.truncation.top_k.tolist() == [10, 2]
    everything = t.batch(slots[:1], positions[:1], judged=guesses.part(0, 1))
    assert everything.random is None and everything.guessed is not None


def test_min_tokens_counts_from_the_end_of_the_prompt() -> None:
    t = table()
    t.set(0, GREEDY.with_changes(min_tokens=2), 0, [1, 2, 3], [], frozenset({9}))
    assert [greedy(t, [0], position)[0] for position in (3, 4, 5, 6)] == [8, 8, 9, 9]


@pytest.mark.parametrize(
    "asked", [{"temperature": 1.0}, {"logprobs": 0}, {"presence_penalty": 0.5}, {"min_tokens": 1}]
)
def test_plain_requests_need_no_rules(asked: dict[str, float]) -> None:
    t = table()
    t.set(0, GREEDY, 0, [1], [], frozenset({9}))
    t.set(2, GREEDY.with_changes(**asked), 0, [1], [], frozenset({9}))
    assert t.plain(np.array([0])) and not t.plain(np.array([0, 2]))
    assert not t.plain(np.array([2]))


def test_rows_are_sampled_in_parts_where_memory_is_short() -> None:
    """Vocabulary of 10: a row sampled with typical_p needs 1,000 bytes, one without 80."""
    table = SamplingTable(8, 10, CPU, draw_bytes=4)
    every, room = np.arange(8), 2000
    for slot in range(8):
        table.set(slot, SamplingParams(temperature=0.0), 0, [1], [], frozenset())
    assert table.rows_at_once(every, room) == 8
    table.set(3, SamplingParams(temperature=1.0), 0, [1], [], frozenset())
    assert table.rows_at_once(every, room) == 2000 // 80
    table.set(5, SamplingParams(temperature=1.0, typical_p=0.5), 0, [1], [], frozenset())
    assert table.rows_at_once(every, room) == 2
    assert table.rows_at_once(np.array([3]), room) == 2000 // 80
    assert table.rows_at_once(every, 1) == 1
    assert table.rows_at_once(np.array([3]), room, shares=True) == 2


# The random numbers of seeds and positions.

N = 1 << 16
COUNT = np.arange(N)
ZERO = np.zeros(N, np.uint64)

# Sequences that a weak hash would turn into patterns.
SEQUENCES = {
    "consecutive positions": lambda: uniform(ZERO, COUNT),
    "consecutive positions, large seed": lambda: uniform(ZERO + np.uint64(2**63 + 12345), COUNT),
    "consecutive seeds": lambda: uniform(COUNT.astype(np.uint64), np.full(N, 17)),
    "seeds that differ in their highest bits": lambda: uniform(
        COUNT.astype(np.uint64) << np.uint64(48), np.full(N, 3)
    ),
    "seed and position move together": lambda: uniform(COUNT.astype(np.uint64), COUNT),
    "seed and position move apart": lambda: uniform(COUNT.astype(np.uint64), N - COUNT),
    "consecutive streams": lambda: np.concatenate(
        [uniform(ZERO[:64], COUNT[:64], stream) for stream in range(N // 64)]
    ),
    "siblings": lambda: uniform(
        np.array([derive_seed(5, i) % 2**64 for i in range(N)], np.uint64), np.full(N, 9)
    ),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_is_uniform_and_uncorrelated(name: str) -> None:
    u = SEQUENCES[name]()
    assert u.dtype == np.float64 and u.shape == (N,)
    assert u.min() >= 0.0 and u.max() < 1.0
    assert stats.chisquare(np.bincount((u * 256).astype(int), minlength=256)).pvalue > 1e-3
    for lag in (1, 2, 3, 64):
        correlation = np.corrcoef(u[:-lag], u[lag:])[0, 1]
        assert abs(correlation) * np.sqrt(N) < 3.5
    pairs = (u[0::2] * 32).astype(int) * 32 + (u[1::2] * 32).astype(int)
    assert stats.chisquare(np.bincount(pairs, minlength=1024)).pvalue > 1e-3
    low_bits = ((u * 2**53).astype(np.uint64) % np.uint64(64)).astype(int)
    assert stats.chisquare(np.bincount(low_bits, minlength=64)).pvalue > 1e-3
    assert len(np.unique(u)) == N


def test_streams_and_seeds_are_independent_of_each_other() -> None:
    base = uniform(ZERO, COUNT)
    for other in (uniform(ZERO, COUNT, 1), uniform(ZERO + np.uint64(1), COUNT)):
        assert abs(np.corrcoef(base, other)[0, 1]) * np.sqrt(N) < 3.5


def test_random_numbers_never_change() -> None:
    """Other numbers would change the text of every seeded request."""
    found = uniform(np.array([0, 0, 1, 2**64 - 1], np.uint64), np.array([0, 1, 0, 5]))
    expected = [0.13870941014555427, 0.2691303195904541, 0.6935121390102292, 0.9277262799198309]
    assert found.tolist() == expected
