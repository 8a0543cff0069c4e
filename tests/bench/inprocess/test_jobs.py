"""Loads for an engine in this process."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from helpers.configs import ENCODER
from helpers.planned import planned

from kvik.config.model_source import find_model
from kvik.errors import ParamError
from kvik.models.model_spec import ModelSpec
from kvik.text.tokenizer import Tokenizer
from kvik_bench.inprocess.jobs import (
    Requests,
    TextPieces,
    fixed,
)


@dataclass(frozen=True)
class Growing:
    """Prompt i has i + 1 tokens, its answer twice as many."""

    def of(self, index: int, turn: int) -> tuple[int, int]:
        return index + 1, 2 * (index + 1)


def test_lengths_and_prefixes() -> None:
    load = Requests(6, Growing(), prefix_tokens=4, prefixes=2)
    jobs = load.jobs(0, 500)
    assert [len(job.prompt) for job in jobs] == [5, 6, 7, 8, 9, 10]
    assert [job.output_tokens for job in jobs] == [2, 4, 6, 8, 10, 12]
    prefixes = load.prefix_prompts(0, 500)
    assert {tuple(job.prompt[:4]) for job in jobs} == set(map(tuple, prefixes))
    assert all(0 <= token < 500 for job in jobs for token in job.prompt)
    assert (load.traffic().prompt, load.traffic().output, load.traffic().shared) == (8, 7, 4)


def test_rounds_have_different_prompts_of_equal_lengths() -> None:
    load = Requests(3, fixed(8, 2), prefix_tokens=4)
    assert load.jobs(0, 500) == load.jobs(0, 500)
    first, second = load.jobs(0, 500), load.jobs(1, 500)
    assert not {tuple(job.prompt[:4]) for job in first} & {tuple(j.prompt[:4]) for j in second}
    assert [len(job.prompt) for job in first] == [len(job.prompt) for job in second]
    assert first[0].prompt != replace(load, seed="1").jobs(0, 500)[0].prompt


@pytest.mark.parametrize(
    ("change", "problem"), [({}, "model: is an encoder"), ({"prefixes": 2}, "prefixes: needs")]
)
def test_loads_are_refused_before_a_model_is_loaded(change: dict[str, int], problem: str) -> None:
    encoder = ModelSpec.from_config(ENCODER)
    with pytest.raises(ParamError, match=problem):
        Requests(1, fixed(1, 1), **change).check(planned(encoder, device="cpu"))


# Prompts that are parts of texts.


TEXTS = (tuple(range(100, 200)), (7, 8, 9), tuple(range(300, 320)))
PIECES = TextPieces((1,), TEXTS, prompt_tokens=11, output_tokens=5, seed="0")


def test_each_text_in_turn() -> None:
    jobs = PIECES.jobs(0, 6)
    assert [job.output_tokens for job in jobs] == [5] * 6
    sources = []
    for job in jobs:
        assert job.prompt[0] == 1
        body = tuple(job.prompt[1:])
        (source,) = (i for i, text in enumerate(TEXTS) if body[0] in text)
        start = TEXTS[source].index(body[0])
        assert body == TEXTS[source][start : start + 10]
        sources.append(source)
        assert len(body) == (3 if source == 1 else 10)  # a short text is one prompt
    assert [(source - sources[0]) % 3 for source in sources] == [0, 1, 2, 0, 1, 2]


def test_the_same_for_the_same_seed_and_round() -> None:
    assert PIECES.jobs(3, 4) == PIECES.jobs(3, 4)
    assert PIECES.jobs(3, 4) != PIECES.jobs(4, 4)


def test_of_texts_as_a_tokenizer_reads_them() -> None:
    tokenizer = Tokenizer.load(find_model(""))
    prefix, text = tokenizer.encode(""), "The fox and the crow"
    pieces = TextPieces.of(tokenizer, [text, ""], 64, 5, "0")
    (job,) = pieces.jobs(0, 1)
    assert job.prompt == [*prefix, *tokenizer.encode(text, add_special_tokens=False)]
    with pytest.raises(ParamError, match=f"prompt_tokens: must be at least {len(prefix) + 1}"):
        TextPieces.of(tokenizer, [text], len(prefix), 5, "0")
