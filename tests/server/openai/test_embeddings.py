"""/v1/embeddings through OpenAI's client."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest
from helpers.story_site import MAX_MODEL_LEN

from kvik.llm import LLM

MODEL = "stories"
TEXTS = ["A small dog ran in the park.", "The big dog played outside.", "I ate soup."]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_those_of_the_library(client: openai.OpenAI, llm: LLM, pooling: str) -> None:
    answer = client.embeddings.create(
        model=MODEL, input=TEXTS, extra_body={"pooling": pooling, "normalize": True}
    )
    expected = llm.embed(TEXTS, pooling=pooling)
    assert [one.index for one in answer.data] == [0, 1, 2]
    for one, whole in zip(answer.data, expected, strict=True):
        assert one.embedding == pytest.approx(whole.embedding, abs=1e-5)
        assert sum(x * x for x in one.embedding) == pytest.approx(1, abs=1e-5)
    assert answer.usage.prompt_tokens == sum(len(one.prompt_token_ids) for one in expected)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens


def test_the_shape_of_a_vector_changes_nothing(client: openai.OpenAI) -> None:
    """The client requests base64 by default, and decodes it."""
    as_base64 = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="base64")
    as_numbers = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float")
    silent = client.embeddings.create(model=MODEL, input=TEXTS[0])
    assert isinstance(as_base64.data[0].embedding, str)
    assert silent.data[0].embedding == pytest.approx(as_numbers.data[0].embedding, abs=1e-6)


def test_token_ids(client: openai.OpenAI, llm: LLM) -> None:
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    one: Any = client.embeddings.create(model=MODEL, input=ids[0]).data
    many = client.embeddings.create(model=MODEL, input=ids).data
    assert len(one) == 1 and len(many) == 3
    assert one[0].embedding == pytest.approx(many[0].embedding, abs=1e-5)


def test_the_end_of_an_input_is_kept(http: httpx2.Client, llm: LLM) -> None:
    ids = llm.tokenizer.encode("word " * 1000)
    for asked, kept in ((5, 5), (-1, MAX_MODEL_LEN)):
        body = {"input": ["word " * 1000], "truncate_prompt_tokens": asked}
        cut = http.post("/v1/embeddings", json=body).json()
        assert cut["usage"]["prompt_tokens"] == kept
        same = http.post("/v1/embeddings", json={"input": ids[-kept:]}).json()
        expected = same["data"][0]["embedding"]
        assert cut["data"][0]["embedding"] == pytest.approx(expected, abs=1e-5)


def test_dimensions_are_the_models(client: openai.OpenAI) -> None:
    whole = client.embeddings.create(model=MODEL, input="a").data[0].embedding
    same = client.embeddings.create(model=MODEL, input="a", dimensions=len(whole))
    assert len(same.data[0].embedding) == len(whole)
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model=MODEL, input="a", dimensions=8)


@pytest.mark.parametrize(
    ("given", "param", "allowed"),
    [
        ([], "input", "must not be empty"),
        ("", "input", "must not be empty"),
        (["a", "", "b"], "input[1]", "must not be empty"),
        (["a", 1], "input[1]", "must be a text or a list of token ids"),
        ([1, "a"], "input[1]", "must be a token id"),
        ([2048], "input", "0..2047"),
        ([[1], [-1]], "input[1][0]", ">= 0"),
        ([[1], [1] * 513], "input[1]", "context length is 512"),
        (["a", "word " * 9000], "input[1]", "context length is 512"),
        (["a"] * 2049, "input", "at most 2048"),
        ({"normalize": False}, "normalize", "is not supported: vectors have length 1"),
        ({"late_chunking": True}, "late_chunking", "one by one"),
        ({"pooling": "sum"}, "pooling", 'allowed: "cls", "last", "max", "mean"'),
    ],
    ids=lambda value: str(value)[:30],
)
def test_errors_name_the_field_as_given(
    http: httpx2.Client, given: Any, param: str, allowed: str
) -> None:
    body = {"input": TEXTS, **given} if isinstance(given, dict) else {"input": given}
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: ") and allowed in error["message"]
    for word in ("prompt", "completion", "output", "max_tokens"):
        assert word not in error["message"]
