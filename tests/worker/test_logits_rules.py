from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from kvik.core.sampling_params import SamplingParams
from kvik.worker.logits_rules import TokenRules, gather_edits

CPU = torch.device("cpu")


def edited(
    logits: Tensor, *requests: tuple[int, SamplingParams, Sequence[int]], stop: frozenset[int]
) -> Tensor:
    """Apply the rules; each request: its row, its parameters, its output so far."""
    rules = [(row, [TokenRules(p, (), output, stop)], len(output)) for row, p, output in requests]
    out = logits.clone()
    gather_edits(rules, CPU, {}).apply(out)
    return out


def possible(row: Tensor) -> list[int]:
    return row.isfinite().nonzero()[:, 0].tolist()


def one(params: SamplingParams, output: Sequence[int] = (), stop: frozenset[int] = frozenset()):
    return edited(torch.arange(6.0)[None], (0, params, output), stop=stop)[0]


def test_bias_is_added() -> None:
    found = one(SamplingParams(logit_bias={1: 2.5, 5: -100.0}))
    assert found.tolist() == [0.0, 3.5, 2.0, 3.0, 4.0, -95.0]


def test_only_allowed_tokens_stay_and_keep_their_bias() -> None:
    found = one(SamplingParams(allowed_token_ids=(4, 2, 2), logit_bias={2: 1.0, 3: 1.0}))
    assert possible(found) == [2, 4]
    assert found[2] == 3.0 and found[4] == 4.0


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ((), [3]),
        ((0,), [1, 3]),
        ((0, 1), [2, 3]),
        ((1,), [3]),
        ((2, 0, 1), [2, 3]),
        ((1, 0), [1, 3]),
    ],
)
def test_bad_words_end_where_their_beginning_was_put_out(output, banned) -> None:
    words = ((3,), (0, 1), (0, 1, 2))
    found = one(SamplingParams(bad_words=words), output)
    assert possible(found) == [t for t in range(6) if t not in banned]


def test_bad_words_match_transformers() -> None:
    words = [[3], [0, 1], [0, 1, 2], [5, 5], [2, 4, 0, 1]]
    theirs = NoBadWordsLogitsProcessor(words, eos_token_id=torch.tensor([-1]))
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(bad_words=tuple(map(tuple, words)))
    for _ in range(100):
        output = torch.randint(6, (1, 5), generator=generator)
        expected = theirs(output, torch.zeros(1, 6))
        found = edited(torch.zeros(1, 6), (0, params, output[0].tolist()), stop=frozenset())
        assert torch.equal(found, expected)


def test_bad_words_follow_appended_tokens() -> None:
    rules = TokenRules(SamplingParams(bad_words=((7, 8, 9),)), (), [7], frozenset())
    assert rules.banned(1) == []
    rules.append(8)
    assert rules.banned(2) == [9]
    rules.append(7)
    assert rules.banned(3) == []


def test_a_word_begun_in_the_prompt_is_not_bad() -> None:
    """Only the output counts, and it is shorter than the word."""
    assert TokenRules(SamplingParams(bad_words=((1, 2, 3),)), (), [2], frozenset()).banned(1) == []


@pytest.mark.parametrize(("length", "banned"), [(0, [1, 4]), (2, [1, 4]), (3, []), (9, [])])
def test_stop_ids_wait_for_min_tokens(length: int, banned: list[int]) -> None:
    found = one(SamplingParams(min_tokens=3), [0] * length, frozenset({1, 4}))
    assert possible(found) == [t for t in range(6) if t not in banned]


def test_each_row_has_its_own_edits() -> None:
    logits = torch.zeros(4, 6)
    found = edited(
        logits,
        (3, SamplingParams(logit_bias={0: 1.0}), ()),
        (0, SamplingParams(allowed_token_ids=(5,)), ()),
        (2, SamplingParams(bad_words=((1,),), logit_bias={0: 2.0, 2: 3.0}), ()),
        stop=frozenset(),
    )
    assert possible(found[0]) == [5]
    assert found[1].tolist() == [0.0] * 6
    assert possible(found[2]) == [0, 2, 3, 4, 5] and found[2, 0] == 2.0 and found[2, 2] == 3.0
    assert found[3].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
