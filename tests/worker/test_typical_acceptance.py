"""Typical acceptance of drafts: which ones, for which requests, and in place of which tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers.drafters import with_newest

from kvik.config.speculative import Typical
from kvik.core.sampling_params import SamplingParams
from kvik.kernels.torch_ops import TORCH
from kvik.worker.draft_tree import DraftTree
from kvik.worker.rejection import Chains, Trees, typical
from kvik.worker.sampler import Sampler
from kvik.worker.sampling_batch import Offers
from kvik.worker.sampling_table import SamplingTable

P = (0.5, 0.3, 0.15, 0.05)  # its entropy is 1.142 nats, exp(-1.142) = 0.319
SURE = (0.97, 0.02, 0.01, 0.0)  # exp(-entropy) = 0.858
EVEN = (0.25, 0.25, 0.25, 0.25)  # exp(-entropy) = 0.25
RULE = Typical(0.09, 0.3)


@pytest.mark.parametrize(
    ("p", "rule", "taken"),
    [
        (P, RULE, {0, 1, 2}),  # above 0.09
        (P, Typical(1.0, 0.1), {0, 1, 2, 3}),  # above 0.0319
        (P, Typical(1.0, 0.3), {0, 1, 2}),  # above 0.0957
        (P, Typical(0.2, 1.0), {0, 1}),  # above 0.2
        (P, Typical(1.0, 1.0), {0}),  # above 0.319
        (SURE, RULE, {0}),
        (SURE, Typical(0.015, 0.3), {0, 1}),
        (SURE, Typical(1e-9, 1e-9), {0, 1, 2}),  # never impossible tokens
        (EVEN, Typical(1.0, 0.3), {0, 1, 2, 3}),
        (EVEN, Typical(1.0, 1.0 - 1e-3), {0, 1, 2, 3}),
        ((1.0, 0.0, 0.0, 0.0), RULE, {0}),
    ],
)
def test_a_draft_is_accepted_above_the_bound_of_entropy(
    p: tuple[float, ...], rule: Typical, taken: set[int]
) -> None:
    entropy = -sum(x * math.log(x) for x in p if x)
    bound = min(rule.epsilon, rule.delta * math.exp(-entropy))
    assert {i for i, share in enumerate(p) if share > bound} == taken  # the rule as defined
    drafts = torch.arange(4)
    drawn = torch.full((4,), 99)  # no draft
    found = typical(torch.tensor(p).expand(4, -1), drawn, torch.arange(4), drafts, rule)
    assert found.tolist() == [i if i in taken else 99 for i in range(4)]


def test_the_likeliest_draft_is_taken_unless_one_was_sampled() -> None:
    offered = [
        # row, drafts, drawn, token
        (P, [2, 1, 3], 0, 1),
        (P, [2, 1, 3], 2, 2),
        (P, [2, 1, 3], 3, 3),  # not likely enough, but sampled
        (P, [3], 0, 0),
        (EVEN, [3, 1, 3], 0, 3),
        (SURE, [], 1, 1),
    ]
    p = torch.tensor([row for row, *_ in offered])
    owners = torch.tensor([i for i, (_, drafts, *_) in enumerate(offered) for _ in drafts])
    drafts = torch.tensor([draft for _, drafts, *_ in offered for draft in drafts])
    drawn = torch.tensor([drawn for *_, drawn, _ in offered])
    assert typical(p, drawn, owners, drafts, RULE).tolist() == [token for *_, token in offered]


def test_rows_are_offered_the_drafts_after_them() -> None:
    chains = Chains.of(np.array([2, 0, 1]), with_newest([2, 0, 1], [7, 8, 9]))
    rows, drafts = chains.offers()
    assert (rows.tolist(), drafts.tolist()) == ([0, 1, 4], [7, 8, 9])
    tree = DraftTree((-1, 0, 0, 1, 1, 2), (0, 0, 1, 0, 1, 0))
    trees = Trees.of(
        tree, np.array([5, 0, 2]), with_newest([5, 0, 2], [10, 11, 12, 13, 14, 20, 21])
    )
    rows, drafts = trees.offers()
    assert rows.tolist() == [0, 0, 1, 1, 2, 7, 7]
    assert drafts.tolist() == [10, 11, 12, 13, 14, 20, 21]
    offers = Offers(rows, drafts, RULE)
    part = offers.part(1, 3)
    assert part.rows.tolist() == [0, 0, 1]
    assert part.token_ids.tolist() == [12, 13, 14] and offers.part(3, 7) is None


def test_only_requests_that_sample_without_a_seed_take_them() -> None:
    table = SamplingTable(4, 4, torch.device("cpu"))
    every = [
        SamplingParams(logprobs=0),
        SamplingParams(temperature=0),
        SamplingParams(seed=5),
        SamplingParams(temperature=0.5, top_k=2),
    ]
    for slot, params in enumerate(every):
        table.set(slot, params, slot, [1], [], frozenset())
    slots = np.arange(4).repeat(2)
    offers = Offers(np.arange(0, 8, 2), np.array([2, 2, 2, 2]), RULE)
    logits = torch.tensor(P).log().expand(8, -1).clone()
    # At position 1, none of these seeds samples the offered token.
    positions = np.tile([1, 2], 4)
    plain = Sampler(TORCH).sample(logits, table.batch(slots, positions))
    assert 2 not in plain.token_ids[::2].tolist()
    batch = table.batch(slots, positions, judged=offers)
    assert batch.typical.rows.tolist() == [0, 6]
    found = Sampler(TORCH).sample(logits, batch)
    expected = plain.token_ids.tolist()
    expected[0] = 2  # not row 6, where 2 is not among the two likeliest
    assert found.token_ids.tolist() == expected
    arrays = [tensor.numpy() for tensor in found.tensors]
    logprobs = found.read(found.token_ids.numpy(), arrays).logprobs
    assert logprobs[0].token_id == 2
    assert logprobs[0].logprob == pytest.approx(math.log(0.15), abs=1e-5)
    for first in range(0, 8, 2):
        part = slice(first, first + 2)
        alone = table.batch(slots[part], positions[part], judged=offers.part(first, first + 2))
        tokens = Sampler(TORCH).sample(logits[part], alone).token_ids
        assert tokens.tolist() == expected[part]
    greedy = table.batch(slots[2:4], positions[2:4], judged=offers.part(2, 4))
    assert greedy.typical is None
