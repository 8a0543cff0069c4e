"""/v1/classify gives the results of `LLM`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from helpers.served_engine import make_engine
from helpers.story_site import story_site
from helpers.tiny_encoders import save_encoder, word_tokenizer, words

from kvik import LLM
from kvik.config.config import EngineConfig
from kvik.launch import launch
from kvik.server.app import openai_routes

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1}
TEXTS = [words(n, n) for n in (20, 3, 50)]
CHAT = "{% for m in messages %}[CLS] {{ m.content }} [SEP] {% endfor %}"
MESSAGES = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder, which has a chat template, as a classifier."""
    folder: Path = tmp_path_factory.mktemp("classifier")
    names = {0: "bad", 1: "good", 2: "neither"}
    save_encoder(folder, "LlamaForSequenceClassification", num_labels=3, id2label=names)
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def http(folder: Path) -> Iterator[httpx2.Client]:
    engine = launch(EngineConfig(model=str(folder), **OPTIONS))
    served = make_engine(engine.resolved, engine.loop.executor)
    with (
        story_site(openai_routes, engine=served) as site,
        httpx2.Client(base_url=site.url, timeout=60) as client,
    ):
        yield client
        site.at_rest()
    engine.loop.executor.stop()


def test_the_classes_of_texts(http: httpx2.Client, llm: LLM) -> None:
    answer = http.post("/v1/classify", json={"input": TEXTS}).json()
    outputs = llm.classify(TEXTS)
    assert [one["label"] for one in answer["data"]] == [output.label for output in outputs]
    for i, (one, output) in enumerate(zip(answer["data"], outputs, strict=True)):
        assert (one["index"], one["num_classes"]) == (i, 3)
        assert one["probs"] == pytest.approx(output.probs, abs=1e-6)
    total = sum(len(output.prompt_token_ids) for output in outputs)
    assert answer["usage"] == {"prompt_tokens": total, "total_tokens": total}


def test_outputs_of_the_model_and_pairs(http: httpx2.Client, llm: LLM) -> None:
    body = {"input": TEXTS[0], "text_pair": TEXTS[1:], "use_activation": False}
    data = http.post("/v1/classify", json=body).json()["data"]
    wanted = llm.classify(TEXTS[0], TEXTS[1:], use_activation=False)
    for one, output in zip(data, wanted, strict=True):
        assert one["probs"] == pytest.approx(output.probs, abs=1e-5)


def test_a_conversation(http: httpx2.Client, llm: LLM) -> None:
    (one,) = http.post("/v1/classify", json={"messages": MESSAGES}).json()["data"]
    text = llm.render_chat(MESSAGES, add_generation_prompt=False)
    (wanted,) = llm.classify(text, add_special_tokens=False)
    assert len(wanted.prompt_token_ids) == 7
    assert one["probs"] == pytest.approx(wanted.probs, abs=1e-6)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": "w1", "messages": MESSAGES}, "input"),
        ({"input": []}, "input"),
        ({"input": ["w1", "w2"], "text_pair": ["w1", "w2", "w3"]}, "text_pair"),
        ({"input": "w1", "text_pair": []}, "text_pair"),
        ({"input": [[2, 5]], "text_pair": ["w1"]}, "input"),
        ({"messages": MESSAGES, "text_pair": "w1"}, "text_pair"),
        ({"input": "w1", "activation": False}, "activation"),
        ({"input": ["w1", words(200)]}, "input[1]"),
    ],
)
def test_bodies_that_are_refused(http: httpx2.Client, body: dict[str, Any], field: str) -> None:
    answer = http.post("/v1/classify", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/score", {"text_1": "w1", "text_2": "w2"}, "3 classes, and no single score"),
        ("/v1/embeddings", {"input": "w1"}, "no vectors"),
        ("/v1/completions", {"prompt": "w1"}, "writes no text"),
        ("/v1/chat/completions", {"messages": MESSAGES}, "writes no text"),
    ],
)
def test_a_classifier_gives_nothing_else(
    http: httpx2.Client, path: str, body: dict[str, Any], reason: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]
