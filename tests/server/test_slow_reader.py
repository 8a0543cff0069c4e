"""A slow reader only affects itself."""

from __future__ import annotations

from functools import partial

import pytest
from helpers.generating import ids_of
from helpers.http_server import until
from helpers.raw_http import connect, post, read_all, read_until
from helpers.served_engine import FakeExecutor
from helpers.serving import served
from starlette.requests import Request

from kvik.core.sampling_params import SamplingParams
from kvik.engine import host
from kvik.server.generation import GenerationRequest
from kvik.server.native import GenerateFormat, GenerateRequest
from kvik.server.responses import StreamReply
from kvik.server.route import Route, read_body

PADDING = b"x" * 200_000


class Wordy(GenerateFormat):
    """Long events, so that no kernel buffer holds a stream."""

    def grow(self, position, deltas):
        return b"data: " + PADDING + b"\n\n" + super().grow(position, deltas)


def routes(parts, seconds):
    async def stream(request: Request):
        body = await read_body(request, GenerateRequest)
        wanted = GenerationRequest(ids_of(body.prompt), SamplingParams(max_tokens=body.max_tokens))
        (generation,) = await parts.generations.start_all([wanted], "", streaming=True)
        reply = StreamReply([generation], Wordy(generation))
        reply.send_seconds = seconds[body.prompt]
        return reply

    return [Route("/stream", stream)]


@pytest.fixture(autouse=True)
def _every_step_is_a_piece(monkeypatch):
    monkeypatch.setattr(host, "MAX_DELAY", 0.0)


@pytest.mark.full
def test_a_stalled_reader_loses_the_request_after_a_while():
    executor = FakeExecutor(seconds=0.004)
    with served(partial(routes, seconds={"A": 0.4, "B": 60.0}), executor) as server:
        stuck = connect(server.http.port, receive_buffer=4096)
        post(stuck, "/stream", {"prompt": "A", "max_tokens": 250})
        good = connect(server.http.port)
        post(good, "/stream", {"prompt": "B", "max_tokens": 250})
        assert b'"tokens_generated":250' in read_until(good, b"request_id")[-500:]
        until(lambda: not server.inner.generations.live)
        assert sorted(server.inner.watcher.ended.values()) in (
            ["abort", "length"],  # it was too slow while the request ran
            ["length", "length"],  # the request had ended, but was not read
        )
        assert b"tokens_generated" not in read_all(stuck)[-500:]  # the connection was closed
        server.at_rest()
        stuck.close()
        good.close()


def test_a_slow_reader_gets_everything_in_fewer_events():
    with served(partial(routes, seconds={"A": 60.0}), FakeExecutor(seconds=0.001)) as server:
        slow = connect(server.http.port, receive_buffer=4096)
        post(slow, "/stream", {"prompt": "A", "max_tokens": 200})
        until(lambda: server.inner.watcher.ended)
        seen = read_until(slow, b"request_id")
        assert b'"tokens_generated":200' in seen[-500:]
        assert seen.count(PADDING) < 100  # each of 200 tokens would have been one event
        slow.close()
