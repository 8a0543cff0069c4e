"""Prompts that are pieces of texts."""

from __future__ import annotations

import pytest

from kvik.config.model_source import find_model
from kvik.errors import ParamError
from kvik.text.tokenizer import Tokenizer
from kvik_bench.inprocess.pieces import Pieces, RandomPieces

TEXTS = (tuple(range(100, 200)), (7, 8, 9), tuple(range(300, 320)))
PIECES = Pieces((1,), TEXTS, prompt_tokens=11, output_tokens=5, seed="0")


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
    random = RandomPieces(5000, 11, 5, "0")
    assert random.jobs(3, 4) == random.jobs(3, 4)
    assert [len(job.prompt) for job in random.jobs(0, 2)] == [11, 11]


def test_of_texts_as_a_tokenizer_reads_them() -> None:
    tokenizer = Tokenizer.load(find_model(""))
    prefix, text = tokenizer.encode(""), "The fox and the crow"
    pieces = Pieces.of(tokenizer, [text, ""], 64, 5, "0")
    (job,) = pieces.jobs(0, 1)
    assert job.prompt == [*prefix, *tokenizer.encode(text, add_special_tokens=False)]
    with pytest.raises(ParamError, match=f"prompt_tokens: must be at least {len(prefix) + 1}"):
        Pieces.of(tokenizer, [text], len(prefix), 5, "0")
