"""The matrix for encoders: embeddings and scores have the same bits in any batch.

Texts are not cached, and each is computed in one step. So the columns vary the rest of that step:
nothing, all other texts in any order, as many as fit in a step, and other numbers of threads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.optional_native import needs_native
from helpers.tiny_encoders import ENCODERS, RERANKERS, save_encoder, save_tokenizer, words
from helpers.tiny_models import tokens

from kvik import LLM

pytestmark = needs_native

LENGTHS = (1, 7, 33, 64, 90, 126, 14, 62)
TEXTS = [[2, *(4 + i for i in tokens(n, seed=n, vocab=90)), 3] for n in LENGTHS]
PAIRS = [(words(n, n), words(m, m)) for n, m in ((3, 9), (1, 60), (40, 40), (9, 3), (20, 70))]
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
# Engine options, and the order of texts.
COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({}, "given"),
    "reversed": ({}, "reversed"),
    "shuffled": ({}, "shuffled"),
    "two at a time": ({"max_num_seqs": 2}, "given"),
    "steps of 128": ({"max_num_batched_tokens": 128}, "given"),
    "steps of 300, shuffled": ({"max_num_batched_tokens": 300}, "shuffled"),
    "two threads": ({"threads": 2}, "given"),
    "two threads, steps of 200": ({"threads": 2, "max_num_batched_tokens": 200}, "reversed"),
}
EVERY = [
    name if name in ("BertModel", "ModernBertModel") else pytest.param(name, marks=pytest.mark.full)
    for name in (*ENCODERS, *RERANKERS)
]


def outputs(folder: Path, name: str, order: str = "given", **options: Any) -> list[Any]:
    """Return the embedding of each text, or the score of each pair, by a new engine.

    Args:
        order: "alone": one at a time.
    """
    asked: list[Any] = PAIRS if name in RERANKERS else TEXTS
    places = list(range(len(asked)))
    if order == "reversed":
        places.reverse()
    elif order == "shuffled":
        random.Random(1).shuffle(places)
    found: dict[int, Any] = {}
    engine = {"device": "cpu", "threads": 1, "kernels": "native", **options}
    with LLM(str(folder), **engine) as llm:
        assert llm.resolved.runner.attention_backend == "cpu"
        for batch in [[i] for i in places] if order == "alone" else [places]:
            if name in RERANKERS:
                scores = llm.score([asked[i][0] for i in batch], [asked[i][1] for i in batch])
                found.update(zip(batch, (one.score for one in scores), strict=True))
            else:
                vectors = llm.embed([asked[i] for i in batch])
                found.update(zip(batch, (one.embedding for one in vectors), strict=True))
        steps = llm.stats().steps
        assert steps == len(asked) if order == "alone" else steps < len(asked)
    return [found[i] for i in range(len(asked))]


@pytest.fixture(scope="module", params=EVERY)
def encoder(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[str, Path]:
    """With heads of 32 channels, as the AMX tiles require."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_encoder(folder, request.param, hidden_size=64, head_dim=32)
    if request.param in RERANKERS:
        save_tokenizer(folder, typed=request.param.startswith("Bert"))
    return request.param, folder


@pytest.fixture(scope="module", params=FORMATS)
def alone(
    request: pytest.FixtureRequest, encoder: tuple[str, Path]
) -> Iterator[tuple[str, list[Any]]]:
    name, folder = encoder
    yield request.param, outputs(folder, name, "alone", **FORMATS[request.param])


@pytest.mark.each(4)  # what a column adds depends neither on the layers nor on the format
@pytest.mark.parametrize("column", COLUMNS)
def test_results_do_not_depend_on_the_batch(encoder, alone, column) -> None:
    (name, folder), (format, expected) = encoder, alone
    options, order = COLUMNS[column]
    found = outputs(folder, name, order, **FORMATS[format], **options)
    assert found == expected
    assert len({str(one) for one in found}) == len(found)
