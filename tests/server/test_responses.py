"""Responses: JSON in chunks, events, streams and their readers."""

from __future__ import annotations

import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx2
import msgspec
import pytest
from helpers.generating import ids_of
from helpers.http_server import until
from helpers.raw_http import connect, post, read_until
from helpers.served_engine import FakeExecutor, gated_executor
from helpers.serving import served
from helpers.stalls import assert_turns
from msgspec import UNSET
from starlette.requests import Request

from kvik.config.server_config import ServerConfig
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import TokenLogprobs
from kvik.server import generation, native
from kvik.server.generation import GenerationRequest
from kvik.server.native import GenerateFormat, GenerateRequest
from kvik.server.openai.answers import TokenNames, Usage
from kvik.server.openai.chat import AnswerMessage as Message
from kvik.server.openai.chat import ChatChoice, ChatCompletion, Delta
from kvik.server.openai.completions import Completion, CompletionChoice, CompletionLogprobs
from kvik.server.responses import (
    CHUNK_ITEMS,
    HOLE,
    LazyList,
    StreamReply,
    Template,
    encode_in_chunks,
    json_event,
)
from kvik.server.route import Route, caller_of, read_body

NAMES = TokenNames(None)


def logprobs(count: int, top: int) -> list[TokenLogprobs | None]:
    likely = tuple((token, -0.5 * token - 0.1) for token in range(top))
    return [None, *(TokenLogprobs(i, -1.5, 3, likely) for i in range(1, count))]


def completion(count: int, top: int, choices: int = 1) -> Completion:
    shown = CompletionLogprobs(
        list(range(count)), [None, -0.25] * count, ["a", 'b"\n é'] * count, None
    )
    read = [NAMES._prompt_token(one) for one in logprobs(count, top)]
    return Completion(
        id="c",
        created=1,
        model="m",
        choices=[
            CompletionChoice(i, "text", shown, prompt_logprobs=read if i else UNSET)
            for i in range(choices)
        ],
        usage=Usage(1, 2, 3),
        system_fingerprint="f",
    )


ANSWERS = [
    completion(3, 2),
    completion(CHUNK_ITEMS, 1, 2),
    completion(CHUNK_ITEMS + 1, 0, CHUNK_ITEMS + 1),
    completion(200, 3, 3),
    ChatCompletion(
        id="c",
        created=1,
        model="m",
        choices=[ChatChoice(0, Message("é"), NAMES.chat(logprobs(40, 2)[1:]), "stop")],
        usage=Usage(1, 2, 3),
        system_fingerprint="f",
    ),
    Delta(),
    [],
    {"a": [1]},
    "text",
    None,
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: type(answer).__name__)
def test_the_bytes_are_those_of_msgspec(answer: object) -> None:
    assert encode_in_chunks(answer) == msgspec.json.encode(answer)


@pytest.mark.parametrize("count", [0, 1, CHUNK_ITEMS, 3 * CHUNK_ITEMS + 1])
def test_results_encoded_in_parts_are_a_list(count: int) -> None:
    whole = msgspec.json.encode([str(i) for i in range(count)])
    assert encode_in_chunks(LazyList(range(count), str)) == whole
    assert encode_in_chunks(LazyList(range(count), str, chunk=1)) == whole


@pytest.mark.full
def test_the_event_loop_runs_while_a_large_response_is_encoded() -> None:
    """About 25 MB are encoded and sent."""
    rows = logprobs(4000, 100)
    assert len(encode_in_chunks(NAMES.prompt(rows))) > 20 << 20
    assert_turns(lambda: encode_in_chunks(NAMES.prompt(rows)))


class Chunk(msgspec.Struct):
    text: object
    index: int
    more: object = None


@pytest.mark.parametrize("text", ["", "plain", 'a "quoted" \\ line\n', "é🦊\u2028\x00", "%b", "{}"])
def test_a_filled_template_equals_the_event(text):
    one = Template(Chunk(HOLE, 3))
    assert one.fill(text) == json_event(Chunk(text, 3))
    assert Template(Chunk(HOLE, 3), "named").fill(text) == json_event(Chunk(text, 3), "named")
    assert b"\n" not in one.fill(text)[:-2]
    assert json.loads(one.fill(text)[6:])["text"] == text


def test_a_template_must_have_its_placeholder():
    with pytest.raises(ValueError, match="hole"):
        Template(Chunk("x", 1))


LONG = {"prompt": "AB", "max_tokens": 250, "ignore_eos": True}


def routes(parts, *, heartbeat=15.0, events=GenerateFormat):
    async def stream(request: Request):
        body = await read_body(request, GenerateRequest)
        wish = GenerationRequest(
            ids_of(body.prompt),
            SamplingParams(max_tokens=body.max_tokens or 8),
            deadline_ms=body.deadline_ms,
        )
        tenant = caller_of(request).tenant
        wishes = [wish, wish] if body.seed == 2 else [wish]
        started = await parts.generations.start_all(wishes, tenant, streaming=True)
        reply = StreamReply(started, events(started[0]))
        reply.heartbeat_seconds = heartbeat
        return reply

    return [*native.routes(parts), Route("/stream", stream)]


def slow(seconds: float = 0.003) -> FakeExecutor:
    return FakeExecutor(seconds=seconds)


@pytest.mark.parametrize("stream", [True, False])
def test_a_deadline_in_the_queue(stream):
    executor = gated_executor()
    with served(routes, executor, max_num_seqs=1) as server:
        first = connect(server.http.port)
        post(first, "/v1/generate", LONG)
        until(lambda: server.inner.generations.live)
        body = {**LONG, "stream": stream, "deadline_ms": 50}
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(
                httpx2.post, f"{server.http.url}/v1/generate", json=body, timeout=60
            )
            until(lambda: len(server.inner.generations.live) == 2)
            time.sleep(0.06)
            executor.gate.set()
            answer = asked.result()
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        assert answer.headers["x-should-retry"] == "false"
        first.close()


def test_later_failures_are_the_last_event():
    with served(routes, slow(0.025)) as server:
        for deadline_ms in (200, 1000, 5000):  # the engine may be delayed for longer than the first
            body = {**LONG, "deadline_ms": deadline_ms}
            answer = httpx2.post(f"{server.http.url}/stream", json=body, timeout=60)
            if answer.text.count("text") > 1:
                break
        assert answer.status_code == 200
        *pieces, last, end = answer.text.split("\n\n")
        assert end == ""
        assert all('"text"' in piece for piece in pieces)
        assert len(pieces) > 1
        assert "[DONE]" not in answer.text
        assert json.loads(last[6:])["error"]["code"] == "deadline_exceeded"
        assert set(server.inner.watcher.ended.values()) == {"deadline"}


def test_an_error_in_formatting_a_stream_is_reported_without_its_cause(caplog):
    class Broken(GenerateFormat):
        def grow(self, position, deltas):
            if self._generation.record.num_output_tokens > 5:
                raise RuntimeError("secret\n2026 INFO forged \x1b[31m")
            return super().grow(position, deltas)

    executor = gated_executor(after=3)
    with served(partial(routes, events=Broken), executor) as server:
        with httpx2.stream("POST", f"{server.http.url}/stream", json=LONG, timeout=60) as answer:
            executor.gate.set()
            answer.read()
        assert answer.status_code == 200
        assert "internal error" in answer.text.split("\n\n")[-2]
        assert "secret" not in answer.text
    (record,) = [r for r in caplog.records if r.name == "kvik.server.responses"]
    _, *lines = logging.Formatter().format(record).split("\n")
    assert any("secret" in line for line in lines)
    assert all(line.startswith("    ") and line.isprintable() for line in lines)


def test_keepalive_comments_precede_the_first_token():
    executor = gated_executor()
    with served(partial(routes, heartbeat=0.1), executor) as server:
        sock = connect(server.http.port)
        post(sock, "/stream", {"prompt": "A", "max_tokens": 3})
        seen = read_until(sock, b": alive\n\n")
        assert seen.startswith(b"HTTP/1.1 200")
        executor.gate.set()
        seen = read_until(sock, b"0\r\n\r\n")
        assert b"tokens_generated" in seen
        sock.close()


def test_reductions_by_the_server_are_in_a_header(monkeypatch):
    monkeypatch.setattr(generation, "PRESSURE", 0.0)
    with served(routes, server_config=ServerConfig(pressure_max_tokens=2)) as server:
        for stream in (True, False):
            body = {"prompt": "A", "max_tokens": 50, "stream": stream}
            answer = httpx2.post(f"{server.http.url}/v1/generate", json=body)
            assert answer.headers["x-kvik-degraded"] == "max_tokens=2"
            assert '"tokens_generated":2' in answer.text
            answer = httpx2.post(f"{server.http.url}/v1/generate", json={**body, "max_tokens": 1})
            assert "x-kvik-degraded" not in answer.headers


def test_generations_that_were_started_together_are_one_stream():
    class Both(GenerateFormat):
        def grow(self, position, deltas):
            return b"data: %d %d\n\n" % (position, sum(len(d.token_ids) for d in deltas))

        def end(self, outputs):
            return b"data: %d outputs\n\n" % len(outputs)

    with served(partial(routes, events=Both)) as server:
        answer = httpx2.post(f"{server.http.url}/stream", json={**LONG, "seed": 2})
        *pieces, last, _ = answer.text.split("\n\n")
        assert last == "data: 2 outputs"
        tokens = {"0": 0, "1": 0}
        for piece in pieces:
            _, position, count = piece.split()
            tokens[position] += int(count)
        assert tokens == {"0": 250, "1": 250}


def test_the_connection_serves_the_next_request_after_a_stream():
    with served(routes) as server, httpx2.Client(base_url=server.http.url) as client:
        for _ in range(3):
            answer = client.post("/stream", json={"prompt": "A", "max_tokens": 5})
            assert "tokens_generated" in answer.text
            assert client.post("/v1/generate", json={"prompt": "A"}).status_code == 200


def test_a_pipelined_request_is_answered():
    """Waiting for a disconnect must not consume the next request on the same connection."""
    with served(routes, slow()) as server:
        sock = connect(server.http.port)
        post(sock, "/v1/generate", {"prompt": "A", "max_tokens": 20})
        post(sock, "/v1/generate", {"prompt": "B", "max_tokens": 3})  # before the first answer
        seen = b""
        while seen.count(b"tokens_generated") < 2:
            seen += read_until(sock, b"tokens_generated")
        sock.close()
