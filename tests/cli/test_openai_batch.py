"""`kvik generate --prompts FILE` with a batch file of OpenAI's API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import Command
from helpers.tiny_encoders import save_encoder, save_tokenizer, words
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

from kvik import LLM
from kvik.cli.main import main

OPTIONS = ("--device", "cpu", "--threads", "1", "--max-model-len", "128")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAYS_HI = [{"role": "user", "content": "Hi"}]
SHORT = {"temperature": 0, "max_tokens": 6}


def entry(custom_id: str, url: str = COMPLETIONS, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def answer(tmp_path: Path, *lines: str, options: tuple[str, ...] = OPTIONS) -> int:
    (tmp_path / "batch").write_text("\n".join(lines))
    batch, out = str(tmp_path / "batch"), str(tmp_path / "out")
    return main(["generate", "--prompts", batch, "-o", out, *options])


def answers(tmp_path: Path) -> dict[str, Any]:
    """Return the responses by custom_id."""
    found = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    for one in found:
        assert list(one) == ["id", "custom_id", "response", "error"] and one["error"] is None
        assert list(one["response"]) == ["status_code", "request_id", "body"]
    assert len({one["id"] for one in found}) == len({one["custom_id"] for one in found})
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one["response"] for one in found}


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([entry("a"), '{"prompt": "A"}'], ["line 2", "custom_id"]),
        (['{"prompt": "A"}', entry("a")], ["line 2"]),
        ([entry("a"), entry("b"), entry("a")], ["line 1", "line 3", "'a'"]),
        ([entry("a"), "", '{"custom_id": "b", "body": {}}'], ["line 3", "url"]),
        ([entry("a"), '{"custom_id": "b", "url": "/", "body": []}'], ["line 2", "body"]),
        ([entry("a").replace("POST", "GET")], ["line 1", "method"]),
        (['{"method": "POST", "url": "/", "body": {}}'], ["line 1", "custom_id"]),
        ([entry("a"), '{"custom_id": '], ["line 2"]),
        ([entry("a").replace("{}", '{"n": 1, "n": 2}')], ["line 1", "n: is given twice"]),
        ([entry("a", prompt="\ud800")], ["line 1", "half a surrogate pair"]),
        (['{"messages": [{"custom_id": "a"}]}', '{"prompt": 1}'], ["line 2", "prompt"]),  # no batch
    ],
)
def test_bad_lines_are_named_before_anything_is_computed(
    lines: list[str], named: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(tmp_path, *lines) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in named) and not (tmp_path / "out").exists()


def test_other_outputs_and_sampling_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(tmp_path, entry("a"), options=(*OPTIONS, "--top-k", "3")) == 2
    assert "--top-k" in capsys.readouterr().err
    for mine in ('{"line": 1, "prompt": "A"}\n', '{"id": "batch_req_1", "error": null}\n'):
        (tmp_path / "out").write_text(mine)
        assert answer(tmp_path, entry("a")) == 2
        assert "--output" in capsys.readouterr().err
        assert (tmp_path / "out").read_text() == mine


@pytest.mark.full
@pytest.mark.usefixtures("forked")
def test_each_line_is_answered_as_by_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema = {"properties": {"a": {"const": "x"}}, "required": ["a"]}
    schema |= {"type": "object", "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    lines = [
        entry("chat", CHAT, model="gpt-4o-mini", messages=SAYS_HI, logprobs=True, **SHORT),
        entry("json", CHAT, messages=SAYS_HI, response_format=form, stream=False),
        entry("text", prompt=["The king", "A fox"], **SHORT),
        entry('ü"\n', "/v1/embeddings", input=["The king", "A fox"]),
        entry("response", "/v1/responses", input="Hi", max_output_tokens=16),
        entry("nowhere", "/v1/nowhere"),
        entry("stream", CHAT, messages=SAYS_HI, stream=True),
        entry("anthropic", "/v1/messages", messages=SAYS_HI, max_tokens=4, stream=True),
        entry("bad", CHAT, messages=SAYS_HI, top_p=7),
        entry("rerank", "/v1/rerank", query="A", documents=["B"]),
    ]
    assert answer(tmp_path, *lines) == 1
    assert "kvik: error: requests: 5 of 10" in capsys.readouterr().err
    found = answers(tmp_path)
    statuses = {custom_id: one["status_code"] for custom_id, one in found.items()}
    bad = {"nowhere": 404, "stream": 400, "anthropic": 400, "bad": 400, "rerank": 400}
    good = dict.fromkeys(("chat", "json", "text", 'ü"\n', "response"), 200)
    assert statuses == {**good, **bad}
    refused = found["stream"]["body"]["error"]
    assert refused["param"] == "stream" and refused["message"].startswith("stream: must be false")
    assert found["anthropic"]["body"]["type"] == "error"
    assert found["bad"]["body"]["error"]["param"] == "top_p"

    chat = ChatCompletion.model_validate(found["chat"]["body"])
    assert chat.model == "gpt-4o-mini" and chat.choices[0].logprobs is not None
    (choice,) = ChatCompletion.model_validate(found["json"]["body"]).choices
    assert json.loads(choice.message.content or "") == {"a": "x"}
    texts = Completion.model_validate(found["text"]["body"])
    vectors = CreateEmbeddingResponse.model_validate(found['ü"\n']["body"])
    assert found["response"]["body"]["usage"]["output_tokens"] <= 16
    with LLM(device="cpu", threads=1, max_model_len=128) as llm:
        params = llm.default_params.with_changes(**SHORT)
        assert chat.choices[0].message.content == llm.chat(SAYS_HI, params)[0].text
        expected = llm.generate(["The king", "A fox"], params)
        assert [one.text for one in texts.choices] == [one.text for one in expected]
        for vector, own in zip(vectors.data, llm.embed(["The king", "A fox"]), strict=True):
            assert vector.embedding == pytest.approx(own.embedding, abs=1e-5)


@pytest.mark.full
@pytest.mark.usefixtures("forked")
def test_an_interrupted_batch_continues(tmp_path: Path, command: Command) -> None:
    lines = [entry(name, prompt="A fox", **SHORT) for name in ("a", 'ü"', "c")]
    assert answer(tmp_path, *lines) == 0
    out = tmp_path / "out"
    first, second, third = out.read_text().splitlines(keepends=True)
    out.write_text(first.replace('"status_code": 200', '"status_code": 503') + second + third[:-9])
    assert answer(tmp_path, *lines) == 0
    assert out.read_text().startswith(second)
    assert answers(tmp_path).keys() == {"a", 'ü"', "c"}
    whole = out.read_text()
    assert answer(tmp_path, *lines, options=("--max-model-len", "128")) == 0  # nothing is left
    assert answer(tmp_path, *lines[:2], entry("c", prompt="A hen", **SHORT)) == 2  # another request
    assert out.read_text() == whole
    batch = str(tmp_path / "batch")
    printed = [
        json.loads(line)
        for line in command("generate", "--prompts", batch, "-o", "-", *OPTIONS).out.splitlines()
    ]
    assert {one["custom_id"] for one in printed} == {"a", 'ü"', "c"}


@pytest.mark.full
@pytest.mark.usefixtures("forked")
def test_requests_that_do_not_fit_into_the_queue_are_sent_again(tmp_path: Path) -> None:
    """The queue has room for two prompts."""
    lines = [entry(f"{i}", prompt=[5] * 60, max_tokens=20, ignore_eos=True) for i in range(4)]
    small = ("--max-num-seqs", "1", "--max-queued-tokens", "128")
    assert answer(tmp_path, *lines, options=(*OPTIONS, *small)) == 0
    assert {one["status_code"] for one in answers(tmp_path).values()} == {200}


@pytest.mark.full
@pytest.mark.usefixtures("forked")
def test_a_reranker_answers_a_batch(tmp_path: Path) -> None:
    save_encoder(tmp_path / "model", "BertForSequenceClassification")
    save_tokenizer(tmp_path / "model")
    options = ("--model", str(tmp_path / "model"), "--device", "cpu", "--threads", "1")
    query, documents = words(6), [words(20, 1), words(3, 2)]
    rerank = entry("r", "/v1/rerank", query=query, documents=documents)
    chat = entry("c", CHAT, messages=SAYS_HI)
    assert answer(tmp_path, rerank, chat, options=options) == 1
    found = answers(tmp_path)
    assert found["c"]["status_code"] == 400 and found["r"]["status_code"] == 200
    scores = {one["index"]: one["relevance_score"] for one in found["r"]["body"]["results"]}
    with LLM(str(tmp_path / "model"), device="cpu", threads=1) as llm:
        expected = [output.score for output in llm.score(query, documents)]
    assert [scores[0], scores[1]] == pytest.approx(expected, abs=1e-5)
