"""The HTTP client with a server that records its own times, and with misbehaving servers."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from http.client import HTTPConnection
from itertools import pairwise
from statistics import median
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
import pytest
from aiohttp import ClientSession
from helpers.fake_server import (
    DONE,
    FakeServer,
    Received,
    Reply,
    delta,
    event,
    models,
    stream,
    text,
    usage,
)
from hypothesis import example, given
from hypothesis import strategies as st

from kvik.errors import ConfigError
from kvik_bench.load.metrics import RequestRecord, gaps
from kvik_bench.load.openai_target import (
    AnswerReader,
    BrokenAnswer,
    Chunk,
    Dialect,
    OpenAITarget,
    TargetServer,
    accepted,
    connected,
    first_model,
    joined,
)
from kvik_bench.load.workload import LoadRequest

T = TypeVar("T")
ASK = LoadRequest((("user", "hello"),), 1, 6)
EXACT = 0.002  # seconds


def in_session(server: TargetServer, use: Callable[[ClientSession], Awaitable[T]]) -> T:
    async def main() -> T:
        async with connected(server) as session:
            return await use(session)

    return asyncio.run(main())


def ask(
    server: TargetServer, count: int = 1, request: LoadRequest = ASK
) -> list[tuple[RequestRecord, str | None]]:
    """Send the request repeatedly, one after another."""

    async def send(session: ClientSession) -> list[tuple[RequestRecord, str | None]]:
        found, target = [], OpenAITarget(server, session)
        for _ in range(count):
            record = RequestRecord(request.prompt_tokens, 0.0, 0.0)
            found.append((record, await target.send(request, record)))
        return found

    return in_session(server, send)


def answered(reply: Reply, endpoint: str = "completions") -> tuple[RequestRecord, str | None]:
    with FakeServer(lambda request: reply) as fake:
        (found,) = ask(TargetServer(fake.url, endpoint, "m", timeout=5.0))
    return found


def test_conversations_take_one_of_several_models() -> None:
    server = TargetServer("http://x", "chat", "a,b")

    def model(*words: str) -> str:
        messages = [("system", "the same"), *zip(("user", "assistant") * 2, words, strict=False)]
        return json.loads(server.body(LoadRequest(tuple(messages), 9, 9)))["model"]

    first = [model(f"{i}") for i in range(40)]
    assert {*first} == {"a", "b"}
    assert [model(f"{i}", "then", "next") for i in range(40)] == first


def worst_error(records: list[RequestRecord], requests: list[Received]) -> float:
    """Return the largest difference between medians of the client's times and the server's."""
    pairs = list(zip(records, requests, strict=True))
    stamps = [
        abs(seen - written)
        for record, request in pairs
        for seen, written in zip(record.times, request.written[:8], strict=True)
    ]
    errors = [median(stamps)]
    for seen, true in (
        ([r.sent for r, _ in pairs], [q.arrived for _, q in pairs]),
        ([r.finished for r, _ in pairs], [q.written[7] for _, q in pairs]),
        ([r.ttft for r, _ in pairs], [q.written[0] - q.arrived for _, q in pairs]),
        ([r.tpot for r, _ in pairs], [(q.written[7] - q.written[0]) / 7 for _, q in pairs]),
        ([r.e2e for r, _ in pairs], [q.written[7] - q.arrived for _, q in pairs]),
        (gaps(records), [b - a for _, q in pairs for a, b in pairwise(q.written[:8])]),
    ):
        errors.append(median(abs(a - b) for a, b in zip(seen, true, strict=True)))
    return max(errors)


def delay_of(fake: FakeServer) -> float:
    """Return how long a plain request takes to arrive, on this machine and now."""
    url, delays = urlsplit(fake.url), []
    for _ in range(5):
        connection, sent = HTTPConnection(url.hostname or "", url.port), time.monotonic()
        connection.request("POST", "/v1/completions", b"{}", {"content-type": "application/json"})
        connection.getresponse().read()
        connection.close()
        delays.append(fake.requests.pop().arrived - sent)
    return median(delays)


def test_times_match_the_servers_to_two_milliseconds() -> None:
    """With known delays and the server's own time stamps. Medians and several attempts, as any one
    chunk may meet a busy processor; on a slow machine each message takes longer."""
    for _ in range(10):
        with FakeServer(lambda request: stream(8, first=0.05, gap=0.01)) as fake:
            exact = EXACT + 2 * max(0.0, delay_of(fake) - EXACT)
            records = [
                record for record, _ in ask(TargetServer(fake.url, "completions", "m"), count=3)
            ]
        if worst_error(records, fake.requests) < exact:
            break
    assert worst_error(records, fake.requests) < exact
    assert min(record.ttft for record in records) >= 0.049
    assert min(record.tpot for record in records) >= 0.009
    assert sum(len(record.times) for record in records) == 24


def test_the_request_that_is_sent() -> None:
    with FakeServer(lambda request: stream(2)) as fake:
        server = TargetServer(fake.url + "/", "completions", "m", "secret", {"temperature": 0.5})
        ask(server)
        request = LoadRequest((("system", [1, 2]), ("user", [3])), 3, 6)
        ask(
            TargetServer(fake.url + "/v1", "completions", "m", dialect=Dialect(usage=False)),
            1,
            request,
        )
        plain = Dialect("max_completion_tokens", ignore_eos=False, running_usage=False)
        ask(TargetServer(fake.url, "chat", "m", dialect=plain))
    first, second, third = fake.requests
    assert (first.method, first.path) == ("POST", "/v1/completions")
    assert first.headers["authorization"] == "Bearer secret"
    assert first.headers["content-type"] == "application/json"
    assert first.headers["accept-encoding"] == "identity"
    assert first.body == {
        "model": "m", "stream": True, "prompt": "hello", "max_tokens": 6, "ignore_eos": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "temperature": 0.5,
    }  # fmt: skip
    assert second.path == "/v1/completions" and "authorization" not in second.headers
    assert second.body == {
        "model": "m", "stream": True, "prompt": [1, 2, 3], "max_tokens": 6, "ignore_eos": True
    }  # fmt: skip
    assert third.path == "/v1/chat/completions"
    assert third.body == {
        "model": "m", "stream": True, "messages": [{"role": "user", "content": "hello"}],
        "max_completion_tokens": 6, "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_the_key_is_not_shown() -> None:
    assert "secret" not in repr(TargetServer("http://x", "chat", "m", "secret"))


def test_a_connection_serves_many_requests() -> None:
    with FakeServer(lambda request: stream(2)) as fake:
        assert all(record.completed for record, _ in ask(TargetServer(fake.url, "chat", "m"), 5))
        assert fake.connections == 1


def test_answers_of_both_endpoints() -> None:
    record, words = answered(stream(3, prompt_tokens=9))
    assert (words, record.prompt_tokens, record.output_tokens) == (" t0 t1 t2", 9, 3)
    chat = [delta("", role="assistant"), delta("a"), delta("b", "stop"), DONE]
    record, words = answered(Reply(chat), "chat")
    assert (words, len(record.times)) == ("ab", 2)


def json_reply(status: int, body: bytes) -> Reply:
    return Reply([body] if body else [], status=status, content_type="application/json")


@pytest.mark.parametrize(
    ("reply", "error", "detail"),
    [
        (json_reply(500, b'{"error": {"message": "it broke"}}'), "HTTP 500", "it broke"),
        (json_reply(429, b"slow\n  down"), "HTTP 429", "slow down"),
        (json_reply(200, b"{}"), "not a stream", "it is application/json"),
        (Reply([text("a")]), "no [DONE]", "the stream ended early"),
        (Reply([DONE]), "empty answer", "no output came"),
        (Reply([text("a"), b"data: {\n\n", DONE]), "bad chunk", "{"),
        (Reply([text("a"), event(error={"code": 3})]), "error event", '{"code": 3}'),
    ],
)
def test_misbehaviour_has_a_name(reply: Reply, error: str, detail: str) -> None:
    record, words = answered(reply)
    assert (record.error, record.detail, words) == (error, detail, None)
    assert not record.completed and record.finished is None


def test_a_connection_that_closes_early_is_lost() -> None:
    for steps in ([text("a")], []):
        record, _ = answered(Reply(steps, close=True))
        assert record.error == "connection lost"
        assert len(record.times) == len(steps)


def test_a_server_that_hangs_runs_into_the_timeout() -> None:
    for steps in ([text("a"), 60.0], [60.0]):
        with FakeServer(lambda request, steps=steps: Reply(steps)) as fake:
            ((record, _),) = ask(TargetServer(fake.url, "completions", "m", timeout=0.3))
        assert record.error == "timeout"


def test_a_stream_that_stays_open_after_its_end_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvik_bench.load.openai_target.AFTER_DONE_SECONDS", 0.05)
    with FakeServer(lambda request: Reply([*stream(3).steps, 60.0])) as fake:
        found = ask(TargetServer(fake.url, "completions", "m"), 2)
        assert fake.connections == 2
    assert all(record.completed and record.e2e < 30 for record, _ in found)


def unused_url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_a_refused_connection_is_a_connect_error() -> None:
    ((record, _),) = ask(TargetServer(unused_url(), "completions", "m"))
    assert record.error == "connect"


def test_after_an_error_the_next_request_is_fine() -> None:
    replies = [json_reply(500, b"x" * 100_000), Reply([b"data: {\n\n"]), stream(2)]
    with FakeServer(lambda request: replies[len(fake.requests) - 1]) as fake:
        found = ask(TargetServer(fake.url, "completions", "m"), 3)
        assert len(fake.requests) == 3  # nothing is retried
    assert [record.error for record, _ in found] == ["HTTP 500", "bad chunk", None]
    assert len(found[0][0].detail) <= 200


def accepting(url: str) -> Dialect:
    server = TargetServer(url, "chat", "m")
    return in_session(server, lambda session: accepted(server, session, ASK)).dialect


def negotiated(refuses: Callable[[dict], str | None]) -> Dialect:
    """What remains when a server refuses bodies with these words."""

    def reply(request: Received) -> Reply:
        words = refuses(request.body)
        return stream(2) if words is None else json_reply(400, words.encode())

    with FakeServer(reply) as fake:
        return accepting(fake.url)


def like_openai(body: dict) -> str | None:
    if "max_tokens" in body:
        return "'max_tokens' is not supported. Use 'max_completion_tokens' instead."
    if "ignore_eos" in body:
        return "Unrecognized request argument supplied: ignore_eos"
    if "continuous_usage_stats" in body["stream_options"]:
        return "Unknown parameter: 'stream_options.continuous_usage_stats'"
    return None


@pytest.mark.parametrize(
    ("refuses", "dialect"),
    [
        (lambda body: None, Dialect()),
        (like_openai, Dialect("max_completion_tokens", False, True, False)),
        (
            lambda body: "stream_options?" if "stream_options" in body else None,
            Dialect(usage=False),
        ),
        # The refused field is not named.
        (
            lambda body: "extra fields" if "ignore_eos" in body else None,
            Dialect(ignore_eos=False, running_usage=False),
        ),
        (
            lambda body: "no" if "stream_options" in body else None,
            Dialect(usage=False, ignore_eos=False, running_usage=False),
        ),
    ],
)
def test_fields_that_a_server_refuses_are_left_out(
    refuses: Callable[[dict], str | None], dialect: Dialect
) -> None:
    assert negotiated(refuses) == dialect


def test_a_server_that_refuses_everything() -> None:
    with pytest.raises(ConfigError, match=r"url: HTTP 400 \(prompt too long\)"):
        negotiated(lambda body: "prompt too long")


@pytest.mark.parametrize(("status", "hint"), [(401, "--api-key"), (404, "--endpoint chat")])
def test_a_refusal_comes_with_a_hint(status: int, hint: str) -> None:
    with (
        FakeServer(lambda request: json_reply(status, b"no")) as fake,
        pytest.raises(ConfigError, match=hint),
    ):
        accepting(fake.url)
    with pytest.raises(ConfigError, match="cannot be reached"):
        accepting(unused_url())


def test_temporary_errors_are_not_refusals() -> None:
    with FakeServer(lambda request: json_reply(503, b"busy")) as fake:
        assert accepting(fake.url) == Dialect()


def test_the_first_model_is_used() -> None:
    def listed(url: str) -> str:
        server = TargetServer(url, "completions", "")
        return in_session(server, lambda session: first_model(server, session))

    with FakeServer(models) as fake:
        assert listed(fake.url) == "fake"
    for body in (b'{"data": []}', b"[]", b"no JSON", b"null", b"[" * 5000):
        with (
            FakeServer(lambda request, body=body: json_reply(200, body)) as fake,
            pytest.raises(ConfigError, match="model: must be given"),
        ):
            listed(fake.url)
    with (
        FakeServer(lambda request: json_reply(401, b'{"error": {"message": "no key"}}')) as fake,
        pytest.raises(ConfigError, match="url: HTTP 401"),
    ):
        listed(fake.url)
    with pytest.raises(ConfigError, match="cannot be reached"):
        listed(unused_url())


def test_contents_are_joined() -> None:
    assert joined(["a", "b"]) == "a\n\nb"
    assert joined([[1, 2], [3]]) == [1, 2, 3]


# Output in a stream: which chunks, when, and how many tokens.


END = event(choices=[], usage=usage(7, 3, prompt_tokens_details={"cached_tokens": 4}))


def read(*chunks: bytes, end: bool = True) -> tuple[RequestRecord, str]:
    """Return the record of a stream whose chunks arrive at 1.0, 2.0, 3.0, ..."""
    record = RequestRecord(prompt_tokens=5, due=0.0, sent=0.0)
    reader = AnswerReader(record, msgspec.json.Decoder(Chunk))
    for i, chunk in enumerate(chunks):
        reader.feed(chunk, 1.0 + i)
    if end:
        reader.end()
    return record, reader.text


def kind(*chunks: bytes) -> str:
    with pytest.raises(BrokenAnswer) as caught:
        read(*chunks)
    return caught.value.kind


CALL = [{"index": 0, "function": {"arguments": "{"}}]

# What the server sends, and what is recorded of it.
STREAMS: dict[str, tuple[list[bytes], dict[str, object]]] = {
    "a plain answer": (
        [text("a"), text("b"), text("c", "length"), END + DONE],
        {"times": [1.0, 2.0, 3.0], "tokens": [1, 1, 1], "finished": 3.0, "output_tokens": 3}
        | {"prompt_tokens": 7, "cached_tokens": 4, "assumed": False, "even": True}
        | {"completed": True, "text": "abc"},
    ),
    "without usage a chunk is assumed to be a token": (
        [text("a"), text("b", "stop"), DONE],
        {"assumed": True, "output_tokens": None, "num_output_tokens": 2, "cached_tokens": None}
        | {"prompt_tokens": 5},  # as planned
    ),
    "a role and empty chunks are no output": (
        [delta("", role="assistant"), delta(None), event(choices=[]), delta("a"),
         delta("b", "stop"), DONE],
        {"times": [4.0, 5.0], "text": "ab"},
    ),
    **{
        f"{field} is output, but not the answer": (
            [delta(None, **{field: "hm"}), delta("a", "stop"), DONE],
            {"times": [1.0, 2.0], "text": "a"},
        )
        for field in ("reasoning_content", "reasoning", "refusal")
    },
    "tool calls are output": (
        [delta(None, tool_calls=CALL), delta(None, "tool_calls"), DONE],
        {"times": [1.0], "finished": 2.0},
    ),
    "an end-of-text token came with the finish reason": (
        [text("a"), text("b"), text("", "stop"), END + DONE],
        {"times": [1.0, 2.0, 3.0], "tokens": [1, 1, 1], "even": True},
    ),
    "a finish reason alone is no token": (
        [text("a"), text("b"), text("c"), text("", "length"), END + DONE],
        {"tokens": [1, 1, 1], "finished": 4.0},
    ),
    "chunks of several tokens without running counts": (
        [text("a b c"), text("d e", "stop"), event(choices=[], usage=usage(7, 9)) + DONE],
        {"tokens": [1, 1], "output_tokens": 9, "even": False},
    ),
    "running counts give the tokens of a chunk": (
        [text("", usage=usage(7, 0)), text("a b c", usage=usage(7, 3)),
         text("", usage=usage(7, 4)),  # half of a character
         text("é", usage=usage(7, 5)), text("f", "stop", usage=usage(7, 6)),
         event(choices=[], usage=usage(7, 6)) + DONE],
        {"times": [2.0, 4.0, 5.0], "tokens": [3, 2, 1], "even": True, "output_tokens": 6},
    ),
    "running counts with an end-of-text token": (
        [text("a", usage=usage(7, 1)), text("", "stop", usage=usage(7, 2)), DONE],
        {"times": [1.0, 2.0], "tokens": [1, 1], "even": True},
    ),
    "withheld text counts as no new token": (
        [text("a", usage=usage(7, 1)), text("b", usage=usage(7, 3)),
         text("c", "stop", usage=usage(7, 3)), DONE],
        {"tokens": [1, 2], "text": "abc", "finished": 3.0},
    ),
    "counts that do not increase are ignored": (
        [text("a", usage=usage(7, 0)), text("b", usage={"prompt_tokens": 7}), text("c", "stop"),
         END, DONE],
        {"tokens": [1, 1, 1], "even": True},
    ),
    "counts in some chunks": (
        [text("a"), text("b", usage=usage(7, 2)), text("c"), text("d e", usage=usage(7, 5)),
         text("f", "stop", usage=usage(7, 6)), DONE],
        {"tokens": [1, 1, 1, 2, 1], "even": True},
    ),
    **{
        f"usage of {count} with the finish reason only, after {len(words)} chunks": (
            [*map(text, words), text(last, "stop", usage=usage(7, count)), DONE],
            {"tokens": tokens, "even": sum(tokens) == count},
        )
        for words, last, count, tokens in (
            ("ab", "c", 3, [1, 1, 1]),
            ("ab", "", 2, [1, 1]),
            (("a b", "c d"), "e f", 6, [1, 1, 1]),
            ("", "a b c", 3, [3]),
        )
    },
    "nothing after the end counts": (
        [text("a", "stop"), DONE + text("b") + b"data: rubbish\n\n"],
        {"times": [1.0], "text": "a"},
    ),
    "without a finish reason an answer ends with its last output": (
        [text("a"), text("b"), END, DONE],
        {"finished": 2.0},
    ),
    "an error of null is none": (
        [event(choices=[{"text": "a"}], error=None), DONE],
        {"completed": True},
    ),
    "choices may be null": (
        [text("a"), event(choices=None, usage=usage(1, 1)) + DONE],
        {"completed": True, "output_tokens": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_is_recorded(name: str) -> None:
    chunks, expected = STREAMS[name]
    record, words = read(*chunks)
    lists = {"times": list(record.times), "tokens": list(record.tokens), "text": words}
    facts = {fact: lists[fact] if fact in lists else getattr(record, fact) for fact in expected}
    assert facts == expected


def test_broken_answers() -> None:
    assert kind(text("a"), text("b", "stop")) == "no [DONE]"
    assert kind() == "no [DONE]"
    assert kind(DONE) == "empty answer"
    assert kind(text("", "stop"), END + DONE) == "empty answer"
    assert kind(text("a"), b'data: {"choices": [\n\n') == "bad chunk"
    assert kind(b"data: hello\n\n") == "bad chunk"
    assert kind(b'data: {"choices": 3}\n\n') == "bad chunk"
    assert kind(b'data: {"choices": [{"text": "\xff"}]}\n\n') == "bad chunk"
    assert kind(b"data: " + b"[" * 100_000 + b"\n\n") == "bad chunk"
    assert kind(b'data: {"x": ' + b"[" * 100_000 + b"\n\n") == "bad chunk"  # it is skipped
    assert kind(b'data: {"error": ' + b"[" * 100_000 + b"\n\n") == "bad chunk"
    assert kind(text("a"), event(error={"message": "out of memory"})) == "error event"
    assert kind(text("a"), b'event: error\ndata: "x"\n\n') == "error event"
    assert kind(b"data: " + b"x" * (17 << 20)) == "bad chunk"


STREAM = (
    b": hello\r\n\r\n"
    + delta("", role="assistant")
    + b"".join(
        b"data: " + json.dumps({"choices": [{"delta": {"content": piece}}]}, ensure_ascii=False)
        .encode() + b"\r\n\r\n"
        for piece in ("Größe", "漢", "字 🙂")
    )
    + delta(None, "stop")
    + END
    + DONE
)  # fmt: skip


@pytest.mark.full
@example(list(range(len(STREAM))))
@given(st.lists(st.integers(0, len(STREAM)), max_size=10))
def test_answers_do_not_depend_on_chunks(cuts: list[int]) -> None:
    places = sorted({0, len(STREAM), *cuts})
    pieces = [STREAM[a:b] for a, b in pairwise(places)]
    record, words = read(*pieces)
    assert words == "Größe漢字 🙂"
    assert (list(record.tokens), record.prompt_tokens) == ([1, 1, 1], 7)


def test_invalid_counts() -> None:
    for count in (-1, 1 << 31, 10**30, 2.5, "many"):
        assert kind(text("a", usage={"completion_tokens": count})) == "bad chunk"
        assert kind(text("a"), event(choices=[], usage={"prompt_tokens": count})) == "bad chunk"
