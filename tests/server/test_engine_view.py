"""`/v1/engine` and `/v1/engine/live`: their content, access, and number of watchers."""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

from helpers.http_server import ask
from helpers.served_engine import engine_in_thread
from helpers.story_site import Site, every_route, site_fixture, story_site

from kvik.engine.remote import EngineState
from kvik.server import native
from kvik.server.access import read_keys
from kvik.server.engine_view import EngineFeed, EngineView
from kvik.server.route import Route
from kvik.server.server import Server

MAX_WATCHERS = 2
SECRET = "a prompt that nobody else may read"


def routes(parts: Server) -> list[Route]:
    """Return the view's routes, with a shorter interval and fewer watchers than by default."""
    view = EngineView(parts)
    view.feed.interval, view.max_watchers = 0.01, MAX_WATCHERS
    return [
        Route("/v1/engine", view.facts, "GET"),
        Route("/v1/engine/live", view.live, "GET"),
        *native.routes(parts),
    ]


async def drain(site: Site) -> None:
    site.parts.drain.start()


site = site_fixture(routes)


@contextmanager
def watch(site: Site, key: str = "") -> Iterator[HTTPResponse]:
    """Open the stream after those of earlier tests have ended."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    while True:
        connection = HTTPConnection("127.0.0.1", site.server.port, timeout=30)
        connection.request("GET", "/v1/engine/live", headers=headers)
        response = connection.getresponse()
        if response.status != 503:
            break
        connection.close()
        time.sleep(0.01)
    try:
        yield response
    finally:
        connection.close()


def next_frame(stream: HTTPResponse) -> Any:
    """Return the next frame with a view; a slow answer of the engine gives a frame without one."""
    while True:
        data, blank = stream.readline(), stream.readline()
        assert data.startswith(b"data: ") and blank == b"\n"
        frame = json.loads(data[6:])
        if frame["view"] is not None:
            return frame


def facts_of(site: Site) -> Any:
    """Return the facts with a view, see `next_frame`."""
    while True:
        reply = ask(site.server, "GET", "/v1/engine")
        assert reply.status == 200
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["cache-control"] == "no-store"
        if reply.json["live"] is not None:
            return reply.json


def until(stream: HTTPResponse, holds: Callable[[Any], bool]) -> Any:
    for _ in range(3000):
        if holds(found := next_frame(stream)):
            return found
    raise AssertionError("it never came")


def generate(site: Site, prompt: str = "Once upon a time") -> None:
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True}
    reply = ask(site.server, "POST", "/v1/generate", body)
    assert reply.status == 200, reply.body
    site.at_rest()


# -- content -------------------------------------------------------------------------------------


def test_facts(site: Site) -> None:
    generate(site)
    facts = facts_of(site)
    assert list(facts) == [
        "model", "state", "reason", "decisions", "memory", "total", "scheduler", "live", "replicas",
    ]  # fmt: skip
    assert (facts["model"], facts["state"], facts["reason"]) == ("stories", "ready", "")
    assert facts["decisions"] and set(facts["decisions"][0]) == {"name", "value", "reason"}
    parts = ("weights", "activations", "kv_cache", "overhead")
    assert facts["total"] == sum(facts["memory"][part] for part in parts) > 0
    assert facts["scheduler"]["max_num_seqs"] == 8


def test_the_view_in_the_facts(site: Site) -> None:
    generate(site)
    live = facts_of(site)["live"]
    assert list(live) == [
        "now", "stats", "rates", "blocks", "steps", "running", "waiting", "finished",
    ]  # fmt: skip
    assert live["stats"]["steps"] == live["steps"]["first"] + len(live["steps"]["ended"]) > 0
    assert len({len(column) for name, column in live["steps"].items() if name != "first"}) == 1
    assert live["blocks"]["num_blocks"] == live["blocks"]["num_free"] == 512
    assert len(b64decode(live["blocks"]["cells"])) == 2 * 512
    over = live["finished"][-1]
    assert (over["phase"], over["finish_reason"], over["output_tokens"]) == (
        "finished",
        "length",
        4,
    )
    assert over["arrival"] <= over["first_scheduled"] <= over["first_token"] <= over["finished"]


def test_the_view_has_no_text_and_no_tenant(site: Site) -> None:
    generate(site, SECRET)
    body = ask(site.server, "GET", "/v1/engine").body
    with watch(site) as stream:
        frame = json.dumps(next_frame(stream)).encode()
    for text in (body, frame):
        assert SECRET.encode() not in text
        assert not {b"prompt_token_ids", b"token_ids", b"tenant", b"request_id"} & set(
            text.replace(b'"', b" ").split()
        )


def test_a_stream_of_frames(site: Site) -> None:
    with watch(site) as stream:
        assert stream.status == 200
        assert stream.getheader("content-type", "").startswith("text/event-stream")
        assert stream.getheader("cache-control") == "no-store"
        first = next_frame(stream)
        assert list(first) == ["state", "reason", "view", "replicas"] and first["state"] == "ready"
        seen = first["view"]["steps"]["first"] + len(first["view"]["steps"]["ended"])
        last = max((request["number"] for request in first["view"]["finished"]), default=-1)

        generate(site)
        frames = []
        until(stream, lambda frame: bool(frames.append(frame) or frame["view"]["finished"]))
    # Every step and every finished request is reported once, in order.
    for frame in frames:
        steps = frame["view"]["steps"]
        assert steps["first"] == seen
        seen += len(steps["ended"])
    assert [r["number"] for frame in frames for r in frame["view"]["finished"]] == [last + 1]
    times = [first["view"]["now"], *(frame["view"]["now"] for frame in frames)]
    assert times == sorted(set(times))


def test_a_watcher_that_connects_late_gets_the_whole_state(site: Site) -> None:
    with watch(site) as early:
        finished = next_frame(early)["view"]["finished"]
        generate(site)

        def ends(frame: dict[str, Any]) -> bool:
            finished.extend(frame["view"]["finished"])
            return bool(frame["view"]["finished"])

        until(early, ends)
        with watch(site) as late:
            seen = next_frame(late)["view"]["finished"]
    assert seen and seen == finished[-len(seen) :]


# -- access --------------------------------------------------------------------------------------


def test_only_administrators_where_there_are_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("operator: boss admin\nuser: common\n")
    with story_site(every_route, read_keys([], str(file))) as site:
        for path in ("/v1/engine", "/v1/engine/live", "/metrics"):
            assert ask(site.server, "GET", path).status == 401
            assert ask(site.server, "GET", path, authorization="Bearer wrong").status == 401
            reply = ask(site.server, "GET", path, authorization="Bearer common")
            assert (reply.status, reply.error["code"]) == (403, "admin_key_needed")
        for path in ("/v1/engine", "/metrics"):
            assert ask(site.server, "GET", path, authorization="Bearer boss").status == 200
        with watch(site, "boss") as stream:
            assert next_frame(stream)["state"] == "ready"


def test_operators_can_watch_a_stopping_server() -> None:
    with story_site(every_route) as site:
        site.server.call(drain(site))
        assert ask(site.server, "GET", "/v1/engine").status == 200
        figures = ask(site.server, "GET", "/metrics")
        assert figures.status == 200 and b"kvik:num_requests_running" in figures.body
        for path in ("/v1/engine/live", "/v1/models"):
            assert ask(site.server, "GET", path).status == 503


# -- number of watchers --------------------------------------------------------------------------


def test_the_number_of_watchers_is_bounded(site: Site) -> None:
    with watch(site) as one:
        next_frame(one)
        with watch(site) as two:
            next_frame(two)
            reply = ask(site.server, "GET", "/v1/engine/live")
            assert reply.status == 503 and int(reply.headers["retry-after"]) >= 1
            assert f"has {MAX_WATCHERS} watchers already" in reply.error["message"]
            assert ask(site.server, "GET", "/v1/engine").status == 200  # it ends at once
            next_frame(one)
            next_frame(two)
    with watch(site) as again:  # it waits until an ended stream makes room
        assert again.status == 200


async def test_the_engine_is_queried_once_for_all_watchers() -> None:
    async with engine_in_thread() as served:
        served.client.start(lambda deltas: None)
        await served.ready()
        interval, clock = 0.05, asyncio.get_running_loop().time
        feed = EngineFeed(served.client)
        feed.interval = interval
        began = clock()
        first = await asyncio.gather(*(feed.after(None) for _ in range(10)))
        # Once, or more often if this process was delayed for longer than the interval.
        assert len({id(frame) for frame in first}) <= 1 + (clock() - began) / interval
        began = clock()
        second = await asyncio.gather(*(feed.after(first[-1]) for _ in range(10)))
        assert len({id(frame) for frame in second}) <= 1 + (clock() - began) / interval
        assert all(frame is not first[-1] for frame in second)


async def test_an_engine_that_is_not_ready_has_no_view() -> None:
    async with engine_in_thread() as served:
        frame = await EngineFeed(served.client).after(None)
        assert frame.view is None and frame.state is not EngineState.READY


def test_a_server_that_stops_does_not_wait_for_watchers() -> None:
    with story_site(routes) as site, watch(site) as stream:
        next_frame(stream)
        site.server.call(drain(site))
        drained = time.monotonic()
        frames = [json.loads(one[6:]) for one in stream.read().split(b"\n\n") if one]  # it ends
        assert sum(frame["view"]["now"] > drained for frame in frames) <= 2
