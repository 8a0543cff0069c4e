"""DRY against its definition, token by token."""

from __future__ import annotations

import random

import pytest
from helpers.tiers import seed

from kvik import LLM, ParamError, SamplingParams
from kvik.worker.dry import LARGEST, Dry


def definition(text: list[int], params: SamplingParams) -> dict[int, float]:
    """Return the penalties on the logits of the next token."""
    breakers = {ids[-1] for ids in params.word_ids("dry_sequence_breakers")}
    if params.dry_penalty_last_n > 0:
        text = text[-params.dry_penalty_last_n :]
    longest: dict[int, int] = {}
    for end in range(len(text) - 1):
        length = 0
        while (
            length <= end
            and text[end - length] == text[-1 - length]
            and text[end - length] not in breakers
        ):
            length += 1
        follower = text[end + 1]
        if length >= params.dry_allowed_length and follower not in breakers:
            longest[follower] = max(longest.get(follower, 0), length)
    return {
        token: params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
        for token, length in longest.items()
    }


def penalties(rule: Dry, supposed: list[int]) -> dict[int, float]:
    ids, values = rule.bias(supposed)
    return {int(token): -float(value) for token, value in zip(ids, values, strict=True)}


@pytest.mark.parametrize("last_n", [-1, 1, 5, 12])
@pytest.mark.parametrize("breakers", [(), ((0,),), ((9, 1), (3,))])
@pytest.mark.parametrize("allowed_length", [1, 2, 4])
def test_penalties_match_the_definition(last_n: int, breakers: tuple, allowed_length: int) -> None:
    draw = random.Random(f"{seed()} {last_n} {breakers} {allowed_length}")
    params = SamplingParams(
        dry_multiplier=0.8,
        dry_base=1.5,
        dry_allowed_length=allowed_length,
        dry_penalty_last_n=last_n,
        dry_sequence_breakers=breakers,
    )
    found = 0
    for _ in range(40):
        vocab = draw.choice([2, 4])
        text = [draw.randrange(vocab) for _ in range(draw.randrange(1, 40))]
        prompt, output = text[: len(text) // 3], text[len(text) // 3 :]
        kept = draw.randrange(len(output) + 1)
        rule = Dry(params, prompt, output[:kept], frozenset())
        drafts = draw.randrange(len(output) - kept + 1)
        for token in output[kept : len(output) - drafts]:
            rule.append(token)
        expected = definition(text, params)
        assert penalties(rule, output[len(output) - drafts :]) == pytest.approx(expected)
        found += len(expected)
    assert found or breakers or last_n > 0


def test_a_long_repetition_stays_finite() -> None:
    params = SamplingParams(dry_multiplier=5.0, dry_base=4.0, dry_sequence_breakers=())
    rule = Dry(params, [7] * 3000, [], frozenset())
    assert penalties(rule, []) == {7: pytest.approx(LARGEST)}


def test_breakers_are_spelt_by_their_last_token() -> None:
    with LLM(device="cpu", max_model_len=128) as llm:
        ids = llm.tokenizer.encode("a.", False)
        text = "the fox. the fox. the fox. the"
        plain = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        dry = plain.with_changes(dry_multiplier=50.0, dry_sequence_breakers=())
        cut = dry.with_changes(dry_sequence_breakers=(".",))
        (repeats,), (differs,) = llm.generate([text], plain), llm.generate([text], dry)
        (as_words,) = llm.generate([text], cut)
        (as_ids,) = llm.generate([text], dry.with_changes(dry_sequence_breakers=((ids[-1],),)))
    assert repeats.text != differs.text
    assert as_words.outputs[0].token_ids == as_ids.outputs[0].token_ids


def test_breaker_words_need_a_tokenizer_only_while_dry_is_on() -> None:
    assert SamplingParams().words == {}
    assert "dry_sequence_breakers" in SamplingParams(dry_multiplier=1.0).words
    with pytest.raises(ParamError, match="dry_sequence_breakers: must be token ids"):
        SamplingParams(dry_multiplier=1.0).word_ids("dry_sequence_breakers")
