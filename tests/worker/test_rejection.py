"""Acceptance of drafts: outputs have the target's distribution, and follow paths through trees."""

from __future__ import annotations

import random
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from helpers.drafters import with_newest
from helpers.sampling_oracle import distribution
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from kvik.core.sampling_params import SamplingParams
from kvik.kernels.torch_ops import TORCH
from kvik.worker.draft_tree import DraftTree
from kvik.worker.rejection import Chains, CheckedDrafts, Trees, coupled
from kvik.worker.sampler import Sampler
from kvik.worker.sampling_batch import Guesses, Supposed
from kvik.worker.sampling_table import ACCEPT, DRAFT, SamplingTable, uniform

CPU = torch.device("cpu")

# ------------------------------------------------------------------ one token

P = (0.5, 0.3, 0.15, 0.05)
QS = {
    "the same": P,
    "even": (0.25, 0.25, 0.25, 0.25),
    "reversed": (0.05, 0.15, 0.3, 0.5),
    "near": (0.45, 0.35, 0.1, 0.1),
    "always 0": (1.0, 0.0, 0.0, 0.0),
    "always 3": (0.0, 0.0, 0.0, 1.0),
    "never 0": (0.0, 0.5, 0.5, 0.0),
}
N = 40000


def drawn(shares: Tensor, numbers: Tensor) -> Tensor:
    mass = shares.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(mass, numbers[:, None] * mass[:, -1:], right=True)[:, 0]


@pytest.mark.parametrize("name", QS)
def test_a_coupled_token_has_the_targets_distribution(name: str) -> None:
    p, q = torch.tensor(P).expand(N, -1), torch.tensor(QS[name]).expand(N, -1)
    seeds = np.full(N, 7, np.uint64)
    number = {
        stream: torch.from_numpy(uniform(seeds, np.arange(N), stream))
        for stream in (0, ACCEPT, DRAFT)
    }
    drafts = drawn(q, number[DRAFT])
    tokens = coupled(p, q, drafts, number[ACCEPT], number[0])
    counts = np.bincount(tokens.numpy(), minlength=4)
    assert stats.chisquare(counts, np.array(P) * N).pvalue > 1e-3
    share = sum(min(a, b) for a, b in zip(P, QS[name], strict=True))
    accepted = int((tokens == drafts).sum())
    assert stats.binomtest(accepted, N, min(1.0, share)).pvalue > 1e-3


def test_equal_distributions_reject_nothing_despite_rounding() -> None:
    p = torch.rand(500, 300, generator=torch.Generator().manual_seed(0))
    p /= p.sum(-1, keepdim=True)
    largest = torch.full((500,), 1 - 2.0**-53, dtype=torch.float64)
    drafts = drawn(p, torch.rand(500, dtype=torch.float64, generator=torch.Generator()))
    assert torch.equal(coupled(p, p, drafts, largest, largest), drafts)


def test_an_empty_residual_by_rounding_draws_from_the_target() -> None:
    q = torch.tensor([[0.5, 0.5]])
    p = torch.tensor([[0.5 - 2.0**-20, 0.5]])  # sums to less than 1
    number = torch.tensor([1 - 2.0**-53], dtype=torch.float64)
    assert coupled(p, q, torch.tensor([0]), number, number).tolist() == [1]


def test_an_impossible_draft_is_rejected_by_the_smallest_number_too() -> None:
    p, q = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    zero = torch.zeros(1, dtype=torch.float64)
    assert coupled(p, q, torch.tensor([0]), zero, zero).tolist() == [1]


# ------------------------------------------------------------------ runs and paths


def chains_of(drafts: list[list[int]]) -> Chains:
    counts = [len(d) for d in drafts]
    return Chains.of(np.array(counts), with_newest(counts, list(chain.from_iterable(drafts))))


@given(st.lists(st.lists(st.integers(0, 1), max_size=4), min_size=1, max_size=5), st.data())
def test_a_run_ends_at_the_first_draft_that_differs(
    drafts: list[list[int]], data: st.DataObject
) -> None:
    chains = chains_of(drafts)
    rows = sum(len(d) + 1 for d in drafts)
    few = st.lists(st.integers(0, 1), min_size=rows, max_size=rows)
    tokens, bad = (np.array(data.draw(few)) for _ in range(2))
    found = chains.accepted(tokens, bad == 1).tolist()
    careless = chains.accepted(tokens).tolist()
    supposed = chains.supposed().by_row()
    row = 0
    for request, own in enumerate(drafts):
        rest = tokens[row : row + len(own) + 1].tolist()
        ok = [d == t for d, t in zip(own, rest, strict=False)] + [False]
        assert careless[request] == ok.index(False)
        flags = bad[row : row + len(own) + 1].tolist()
        given_ = [i for i in range(ok.index(False) + 1) if not any(flags[: i + 1])]
        assert found[request] == max(0, len(given_) - 1)  # tokens output, except the last
        for i in range(len(own) + 1):
            assert supposed.get(row + i, []) == own[:i]
        row += len(own) + 1
    rows_out, lengths = chains.output(tokens, bad == 1)
    assert lengths.tolist() == [n + 1 for n in found]
    starts = chains.starts.tolist()
    assert rows_out.tolist() == [
        start + i for start, n in zip(starts, lengths, strict=False) for i in range(n)
    ]


def test_parts_of_a_batch_keep_the_data_of_their_rows() -> None:
    supposed = chains_of([[5, 6], [], [7, 8, 9]]).supposed()
    assert supposed.by_row() == {1: [5], 2: [5, 6], 5: [7], 6: [7, 8], 7: [7, 8, 9]}
    assert supposed.part(2, 6).by_row() == {0: [5, 6], 3: [7]}
    guesses = Guesses(np.array([0, 1, 4]), np.array([5, 6, 7]), torch.eye(3))
    part = guesses.part(1, 5)
    assert part.rows.tolist() == [0, 3]
    assert part.token_ids.tolist() == [6, 7] and torch.equal(part.probs, torch.eye(3)[1:])
    assert guesses.part(2, 4) is None


# ------------------------------------------------------------------ requests

PROMPT = [0, 1, 1]


def model_of(vocab: int, seed: int, near: Tensor | None = None) -> Tensor:
    """Return [vocab, vocab] logits after each token."""
    noise = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed)) * 0.8
    return noise if near is None else near + noise / 2


class Texts:
    """Requests that continue the same prompt, with their output."""

    def __init__(self, params: list[SamplingParams], vocab: int, stop: frozenset[int]) -> None:
        self.table = SamplingTable(len(params), vocab, CPU)
        for slot, p in enumerate(params):
            self.table.set(slot, p, 1000 + slot, PROMPT, [], stop)
        self.outputs: list[list[int]] = [[] for _ in params]

    def last(self, slots: np.ndarray) -> np.ndarray:
        return np.array([self.outputs[s][-1] if self.outputs[s] else PROMPT[-1] for s in slots])

    def ends(self, slots: np.ndarray) -> np.ndarray:
        return np.array([len(PROMPT) + len(self.outputs[s]) for s in slots])

    def guess(self, slots: np.ndarray, draft: Tensor, count: int) -> tuple[np.ndarray, Tensor]:
        """Return sampled drafts [slots, count] and their distributions [slots, count, vocab]."""
        drafts = np.zeros((len(slots), 0), np.int64)
        shares = []
        for i in range(count):
            last = drafts[:, -1] if i else self.last(slots)
            rows = np.repeat(np.arange(len(slots)), i)
            batch = self.table.batch(
                slots, self.ends(slots) + i, Supposed(rows, drafts.reshape(-1)), stream=DRAFT
            )
            guess = Sampler(TORCH).guess(draft[last], batch)
            assert guess.probs is not None
            drafts = np.concatenate((drafts, guess.token_ids[:, None].numpy()), 1)
            shares.append(guess.probs)
        return drafts, torch.stack(shares, 1)

    def step(
        self, slots: np.ndarray, model: Tensor, drafts: list[list[int]], q: Tensor | None = None
    ) -> np.ndarray:
        """Check drafts and output the accepted ones. q: [drafts, vocab], if they were sampled."""
        counts = np.array([len(d) for d in drafts])
        chains = chains_of(drafts)
        of_row = np.repeat(slots, counts + 1)
        last = np.where(chains.depths() == 0, self.last(of_row), np.roll(chains.judged, 1))
        judging = np.flatnonzero(chains.judged >= 0)
        guesses = None if q is None else Guesses(judging, chains.judged[judging], q)
        batch = self.table.batch(
            of_row, self.ends(of_row) + chains.depths(), chains.supposed(), guesses
        )
        tokens = Sampler(TORCH).sample(model[last], batch).token_ids.numpy()
        accepted = chains.accepted(tokens)
        kept = chains.depths() <= np.repeat(accepted, counts + 1)
        self.table.append(of_row[kept], tokens[kept])
        for slot, token in zip(of_row[kept].tolist(), tokens[kept].tolist(), strict=True):
            self.outputs[slot].append(token)
        return accepted


RULES = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 1.5},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8, "temperature": 1.5},
    "both, cold": {"top_k": 4, "top_p": 0.9, "temperature": 0.5},
    "min_p": {"min_p": 0.2},
    "typical_p": {"typical_p": 0.7},
    "penalties": {"frequency_penalty": 1.2, "repetition_penalty": 1.5, "presence_penalty": -0.5},
    "edits": {"bad_words": ((2, 3), (0, 0)), "min_tokens": 2, "logit_bias": {1: 1.0}},
}


@pytest.mark.parametrize("name", RULES)
def test_two_tokens_have_the_joint_distribution_of_the_target(name: str) -> None:
    n, vocab, stop = 6000, 5, frozenset({4})
    params = SamplingParams(**RULES[name])
    model = model_of(vocab, 2)
    draft = model_of(vocab, 1, near=model)
    texts = Texts([params] * n, vocab, stop)
    slots = np.arange(n)
    runs = 0
    while len(slots):
        drafts, q = texts.guess(slots, draft, 3)
        runs += int(texts.step(slots, model, drafts.tolist(), q.reshape(-1, vocab)).sum())
        slots = np.array([s for s in slots if len(texts.outputs[s]) < 2], np.int64)
    assert runs > n // 2  # many drafts were accepted, and many rejected
    found = Counter(tuple(output[:2]) for output in texts.outputs)
    expected = {}
    for first, share in distribution(model[PROMPT[-1]].tolist(), params, PROMPT, [], stop).items():
        rest = distribution(model[first].tolist(), params, PROMPT, [first], stop)
        expected |= {(first, second): share * p for second, p in rest.items()}
    assert set(found) <= set(expected)
    likely = {pair: p * n for pair, p in expected.items() if p * n >= 5}
    assert len(likely) > 3
    counts = [*(found[pair] for pair in likely), n - sum(found[pair] for pair in likely)]
    shares = [*likely.values(), n - sum(likely.values())]
    if shares[-1] < 5:
        counts, shares = counts[:-1], shares[:-1]
        shares = [share * sum(counts) / sum(shares) for share in shares]
    assert stats.chisquare(counts, shares).pvalue > 1e-3


MANY = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=0, frequency_penalty=1.5, presence_penalty=0.5),
    SamplingParams(temperature=0, bad_words=((1, 2), (3, 4, 5), (2,)), min_tokens=6),
    SamplingParams(seed=1),
    SamplingParams(seed=2, temperature=1.5, top_k=4, top_p=0.9, min_p=0.05, typical_p=0.9),
    SamplingParams(seed=3, repetition_penalty=1.4, frequency_penalty=0.8, temperature=0.7),
    SamplingParams(seed=4, bad_words=((0, 1), (4, 4), (1, 2, 3)), min_tokens=4),
    SamplingParams(),
]


@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
def test_drafts_without_distribution_change_no_token(right: float) -> None:
    """Drafts are right with this probability, else arbitrary, in different numbers in one step."""
    vocab, length, stop = 7, 24, frozenset({5, 6})
    model, slots = model_of(vocab, 3), np.arange(len(MANY))
    plain = Texts(MANY, vocab, stop)
    for _ in range(length):
        plain.step(slots, model, [[] for _ in MANY])
    texts = Texts(MANY, vocab, stop)
    rng = np.random.default_rng(0)
    accepted = steps = 0
    while min(map(len, texts.outputs)) < length:
        slots = np.array([s for s in slots if len(texts.outputs[s]) < length])
        drafts = []
        for slot in slots:
            known = len(texts.outputs[slot])
            ahead = plain.outputs[slot][known : min(known + rng.integers(0, 5), length - 1)]
            drafts.append([t if rng.random() < right else int(rng.integers(vocab)) for t in ahead])
        taken = texts.step(slots, model, drafts)
        if right == 1.0:
            assert taken.tolist() == [len(d) for d in drafts]
        accepted, steps = accepted + int(taken.sum()), steps + len(slots)
    assert [output[:length] for output in texts.outputs] == plain.outputs
    assert accepted + steps == length * len(MANY)


def test_greedy_rows_and_rows_without_drafts_in_a_batch_with_drawn_drafts() -> None:
    vocab = 5
    model = model_of(vocab, 2)
    params = [SamplingParams(), SamplingParams(temperature=0), SamplingParams()]
    texts, plain = Texts(params, vocab, frozenset()), Texts(params, vocab, frozenset())
    slots = np.array([0, 1, 2])
    plain.step(slots, model, [[], [], []])
    greedy = int(model[PROMPT[-1]].argmax())
    chains = chains_of([[3], [greedy], []])
    of_row = np.array([0, 0, 1, 1, 2])
    never = torch.eye(vocab)[3][None]  # draft 3 was sampled with probability 1
    guesses = Guesses(np.array([0]), np.array([3]), never)
    batch = texts.table.batch(
        of_row, texts.ends(of_row) + chains.depths(), chains.supposed(), guesses
    )
    last = np.array([PROMPT[-1], 3, PROMPT[-1], greedy, PROMPT[-1]])
    tokens = Sampler(TORCH).sample(model[last], batch).token_ids
    assert tokens[2] == greedy and tokens[3] == model[greedy].argmax()
    assert tokens[4] == plain.outputs[2][0]
    assert chains.accepted(tokens.numpy())[1] == 1


def test_requests_that_must_match_get_no_drawn_drafts() -> None:
    table = Texts(MANY, 7, frozenset()).table
    assert table.must_match(np.arange(len(MANY))).tolist() == [True] * 7 + [False]


# The accepted path through a tree of drafts, compared with a walk down the tree.

TREE = DraftTree((-1, 0, 0, 1, 1, 2, 4, 6), (0, 0, 1, 0, 1, 0, 0, 0))


def walk(tree: DraftTree, drafts: list[int], tokens: list[int], bad: list[bool]) -> list[int]:
    """Return the nodes whose tokens are output."""
    path = [0]
    while True:
        node = path[-1]
        children = [c for c in range(1, len(drafts) + 1) if tree.parents[c] == node]
        right = [c for c in children if drafts[c - 1] == tokens[node] and not bad[node]]
        if not right:
            break
        path.append(right[0])
    if bad[path[-1]] and len(path) > 1:
        path.pop()
    return path


@given(st.lists(st.integers(0, 7), max_size=8), st.integers(0))
def test_paths_are_those_of_a_walk(parents: list[int], seed: int) -> None:
    parents = [-1, *(parent % (node + 1) for node, parent in enumerate(parents))]
    tree, rng = DraftTree(tuple(parents), tuple(range(len(parents)))), random.Random(seed)
    counts = [rng.randint(0, tree.drafts) for _ in range(5)]
    drafts = [[rng.randrange(3) for _ in range(count)] for count in counts]
    tokens = [[rng.randrange(3) for _ in range(count + 1)] for count in counts]
    bad = [[rng.random() < 0.1 for _ in range(count + 1)] for count in counts]
    trees = Trees.of(tree, np.array(counts), with_newest(counts, list(chain(*drafts))))
    rows, lengths = trees.output(np.concatenate(tokens), np.concatenate(bad))
    paths = [walk(tree, *case) for case in zip(drafts, tokens, bad, strict=True)]
    assert lengths.tolist() == [len(path) for path in paths]
    starts = trees.starts[:-1].tolist()
    assert rows.tolist() == [s + n for s, path in zip(starts, paths, strict=True) for n in path]


def test_a_row_follows_the_drafts_on_its_path() -> None:
    drafts = [10, 11, 12, 13, 14, 15, 16]
    trees = Trees.of(TREE, np.array([0, 7, 2]), with_newest([0, 7, 2], [*drafts, 20, 21]))
    assert trees.starts.tolist() == [0, 1, 9, 12]
    assert trees.supposed().by_row() == {
        2: [10],
        3: [11],
        4: [10, 12],
        5: [10, 13],
        6: [11, 14],
        7: [10, 13, 15],
        8: [10, 13, 15, 16],
        10: [20],
        11: [21],
    }


def test_paths_are_the_drafts_whose_rows_are_output() -> None:
    # Three requests with 4, 0 and 3 drafts; nodes 2 and 4 of the first were right.
    first, rows = np.array([0, 5, 6]), np.array([0, 2, 4, 5, 6, 7])
    checked = CheckedDrafts(first, rows, np.array([3, 1, 2]))
    assert checked.newest.tolist() == [4, 5, 7]
    assert checked.paths(4).astype(int).tolist() == [[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]
