"""Beam search by the offline API and the server, compared with transformers and by definition."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from math import log

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvik import LLM, SamplingParams
from kvik.config.model_source import BUNDLED
from kvik.core.structured import Constraint

TEXTS = ("Once upon a time", "The king said to his daughter that she must", "A fox")
COMMA, STOP = 14, 16  # tokens that end many outputs


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", device="cpu", threads=1, max_model_len=256, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def theirs() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ({"num_beams": 4, "n": 4}, {}),
        ({"num_beams": 3, "n": 2, "length_penalty": 0.0}, {"length_penalty": 0.0}),
        ({"num_beams": 5, "length_penalty": 2.5}, {"length_penalty": 2.5}),
        ({"num_beams": 3, "n": 3, "early_stopping": True}, {"early_stopping": True}),
        ({"num_beams": 2, "length_penalty": -1.0}, {"length_penalty": -1.0}),
    ],
)
@pytest.mark.parametrize("ends", [(), (COMMA, STOP)])
def test_outputs_are_those_of_transformers(llm, theirs, params, options, ends):
    sampling = SamplingParams(
        max_tokens=24, ignore_eos=True, stop_token_ids=ends, logprobs=0, **params
    )
    prompts = [llm.tokenizer.encode(text) for text in TEXTS]
    for prompt, output in zip(prompts, llm.generate(prompts, sampling), strict=True):
        right = theirs.generate(
            torch.tensor([prompt]),
            num_beams=sampling.num_beams,
            num_return_sequences=sampling.n,
            max_new_tokens=24,
            do_sample=False,
            repetition_penalty=1.0,
            eos_token_id=list(ends) or None,
            pad_token_id=COMMA,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        for row, score, made in zip(
            right.sequences, right.sequences_scores, output.outputs, strict=True
        ):
            tokens = row[len(prompt) :].tolist()
            assert made.token_ids == tokens[: len(made.token_ids)]
            assert set(tokens[len(made.token_ids) :]) <= {COMMA}  # what it fills up with
            total = sum(entry.logprob for entry in made.logprobs)
            length = len(made.token_ids) ** sampling.length_penalty
            assert total / length == pytest.approx(score.item(), rel=1e-4)


def test_a_search_with_room_for_all_outputs_finds_the_best(llm):
    """Rules count, and log probabilities are those after them."""
    prompt, allowed = llm.tokenizer.encode(TEXTS[0]), (20, 30, 40)
    rules = {"allowed_token_ids": allowed, "logit_bias": {30: 2.0}, "ignore_eos": True}

    def next_logprobs(tokens: tuple[int, ...]) -> dict[int, float]:
        """The model's, of the allowed tokens, with the bias."""
        found = {}
        for token in allowed:
            scored = llm.score([[*prompt, *tokens, token]])[0].prompt_logprobs[-1]
            found[token] = scored.logprob + (2.0 if token == 30 else 0.0)
        total = log(sum(torch.tensor(list(found.values())).exp().tolist()))
        return {token: value - total for token, value in found.items()}

    sums = {
        pair: next_logprobs(())[pair[0]] + next_logprobs(pair[:1])[pair[1]]
        for pair in itertools.product(allowed, repeat=2)
    }
    params = SamplingParams(num_beams=9, n=9, max_tokens=2, logprobs=1, **rules)
    outputs = llm.generate([prompt], params)[0].outputs
    assert [tuple(o.token_ids) for o in outputs] == sorted(sums, key=lambda pair: -sums[pair])
    for output in outputs:
        total = sum(entry.logprob for entry in output.logprobs)
        assert total == pytest.approx(sums[tuple(output.token_ids)], abs=1e-3)
        assert all(entry.rank <= 3 and len(entry.top) == 1 for entry in output.logprobs)


@pytest.mark.parametrize("regex", ["(yes|no|perhaps) [a-c]{1,2}", "[a-z]{2,4} king", "(ab)?"])
def test_outputs_satisfy_a_constraint(llm, regex):
    """Also those that are complete without a token that ends them."""
    params = SamplingParams(
        num_beams=6, n=3, max_tokens=12, logprobs=0, structured=Constraint("regex", regex)
    )
    (output,) = llm.generate([TEXTS[0]], params)
    scores = []
    for made in output.outputs:
        assert (made.finish_reason, made.error) == ("stop", None)
        assert re.fullmatch(regex, made.text)
        scores.append(sum(entry.logprob for entry in made.logprobs) / len(made.token_ids))
    assert scores == sorted(scores, reverse=True)


def test_a_search_does_not_depend_on_sampling(llm):
    plain = SamplingParams(num_beams=3, n=2, max_tokens=8)
    drawn = plain.with_changes(temperature=1.7, top_k=2, seed=5)
    first, second = llm.generate([TEXTS[0]] * 2, [plain, drawn])
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]


def test_a_stream_gives_all_of_a_search_at_its_end(llm):
    params = SamplingParams(num_beams=3, n=2, max_tokens=8)
    stream = llm.stream(TEXTS[0], params)
    deltas = list(stream)
    assert [(d.index, d.finish_reason) for d in deltas] == [(0, "length"), (1, "length")]
    (whole,) = llm.generate([TEXTS[0]], params)
    assert [d.text for d in deltas] == [o.text for o in whole.outputs]
    assert stream.output.metrics.ttft <= stream.output.metrics.e2e
