"""/v1/rerank, /v1/score and /v1/embeddings of encoders give the results of `LLM`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from helpers.served_engine import make_engine
from helpers.story_site import story_site
from helpers.tiny_encoders import save_encoder, save_modules, save_tokenizer, words

from kvik import LLM
from kvik.config.config import EngineConfig
from kvik.launch import launch
from kvik.server.app import openai_routes

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1}
QUERY = words(6)
DOCUMENTS = [words(n, n) for n in (20, 3, 50)]


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("reranker")
    save_encoder(folder, "BertForSequenceClassification")
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("embedder")
    save_encoder(folder, "BertModel")
    save_tokenizer(folder)
    save_modules(folder, "cls_token", ((32, 48),), prompts={"query": "w1 w2 "})
    return folder


def served(folder: Path) -> Iterator[httpx2.Client]:
    engine = launch(EngineConfig(model=str(folder), **OPTIONS))
    with (
        story_site(
            openai_routes, engine=make_engine(engine.resolved, engine.loop.executor)
        ) as site,
        httpx2.Client(base_url=site.url, timeout=60) as client,
    ):
        yield client
        site.at_rest()
    engine.loop.executor.stop()


@pytest.fixture(scope="module")
def scores(reranker: Path) -> list[float]:
    with LLM(str(reranker), **OPTIONS) as llm:
        return [output.score for output in llm.score(QUERY, DOCUMENTS)]


@pytest.fixture(scope="module")
def http(reranker: Path) -> Iterator[httpx2.Client]:
    yield from served(reranker)


@pytest.fixture(scope="module")
def vectors(embedder: Path) -> Iterator[httpx2.Client]:
    yield from served(embedder)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_documents_come_in_order(http: httpx2.Client, scores: list[float], path: str) -> None:
    body = {"model": "stories", "query": QUERY, "documents": DOCUMENTS}
    answer = http.post(path, json=body).json()
    order = sorted(range(3), key=lambda i: -scores[i])
    assert [one["index"] for one in answer["results"]] == order
    for one in answer["results"]:
        assert one["relevance_score"] == pytest.approx(scores[one["index"]], abs=1e-6)
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}
    assert answer["usage"]["total_tokens"] == sum(6 + n + 3 for n in (20, 3, 50))


def test_the_best_without_their_texts(http: httpx2.Client, scores: list[float]) -> None:
    body = {
        "query": QUERY,
        "documents": [{"text": text} for text in DOCUMENTS],
        "top_n": 2,
        "return_documents": False,
    }
    results = http.post("/v1/rerank", json=body).json()["results"]
    assert [one["index"] for one in results] == sorted(range(3), key=lambda i: -scores[i])[:2]
    assert all(one["document"] is None for one in results)


def test_scores_of_pairs(http: httpx2.Client, scores: list[float]) -> None:
    for first in (QUERY, [QUERY] * 3):
        answer = http.post("/v1/score", json={"text_1": first, "text_2": DOCUMENTS}).json()
        assert [one["score"] for one in answer["data"]] == pytest.approx(scores, abs=1e-6)
        assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    cut = {"text_1": QUERY, "text_2": words(300), "truncate_prompt_tokens": 40}
    assert http.post("/v1/score", json=cut).json()["usage"]["prompt_tokens"] == 40


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "w1", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "w1", "documents": ["w1"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "w1", "documents": ["w2", words(200)]}, "documents[1]"),
        ("/v1/rerank", {"query": "w1", "documents": ["w2"], "instruction": "w3"}, "instruction"),
        ("/v1/rerank", {"query": "w", "documents": ["w"], "activation": False}, "activation"),
        ("/v1/score", {"text_1": "w1", "text_2": "w2", "use_activation": False}, "use_activation"),
        ("/v1/score", {"text_1": ["w1"] * 2, "text_2": ["w1"] * 3}, "text_2"),
        ("/v1/embeddings", {"input": "w1"}, "model"),
        ("/v1/completions", {"prompt": "w1"}, "model"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w1"}]}, "model"),
    ],
)
def test_what_is_refused(http: httpx2.Client, path: str, body: dict[str, Any], param: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_vectors_of_an_encoder(vectors: httpx2.Client, embedder: Path) -> None:
    """With its dense layer and its prompts."""
    texts = [words(5), words(60, 1)]
    with LLM(str(embedder), **OPTIONS) as llm:
        plain = [one.embedding for one in llm.embed(texts)]
        asked = [one.embedding for one in llm.embed(texts, "mean", prompt_name="query")]
        cut = llm.embed(words(300), truncate_prompt_tokens=20)[0].embedding
    for body, wanted in (
        ({"input": texts}, plain),
        ({"input": texts, "pooling": "mean", "prompt_name": "query"}, asked),
        ({"input": words(300), "truncate_prompt_tokens": 20}, [cut]),
    ):
        data = vectors.post("/v1/embeddings", json=body).json()["data"]
        for one, vector in zip(data, wanted, strict=True):
            assert one["embedding"] == pytest.approx(vector, abs=1e-6)
    for body in ({"dimensions": 8}, {"prompt_name": "passage"}, {"input": [words(5), words(200)]}):
        answer = vectors.post("/v1/embeddings", json={"input": texts, **body})
        assert answer.status_code == 400, body
    answer = vectors.post("/v1/rerank", json={"query": "w1", "documents": ["w2"]})
    assert answer.status_code == 400 and "not a reranker" in answer.json()["error"]["message"]
