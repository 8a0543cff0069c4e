"""`kvik top`: its requests to a server, and its errors without one."""

from __future__ import annotations

import argparse
import io
import json
import socket
from io import StringIO
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from helpers.commands import Command
from helpers.fake_server import FakeServer, Received, Reply
from helpers.http_server import ask
from helpers.on_terminal import OnTerminal
from helpers.story_site import Site, site_fixture, story_site
from rich.console import Console, RenderableType

from kvik.cli import top
from kvik.cli.top import BAR_WIDTH, frames, header, picture, plain, read, waterfall
from kvik.config.env import environment_options
from kvik.config.server_config import ServerConfig
from kvik.core.moves import MoveCounters
from kvik.engine.stats import MoveStats, TierStats
from kvik.errors import KvikError
from kvik.server import engine_view, native
from kvik.server.access import read_keys
from kvik.server.route import Route
from kvik.server.server import Server


def routes(parts: Server) -> list[Route]:
    return [*engine_view.routes(parts), *native.routes(parts)]


site = site_fixture(routes)


def live_request(number: int, **fields: Any) -> dict[str, Any]:
    """Return a decoding request that arrived at 90, was scheduled at 92 and had a token at 95."""
    request = {
        "number": number,
        "phase": "decode",
        "arrival": 90.0,
        "first_scheduled": 92.0,
        "first_token": 95.0,
        "finished": None,
        "prompt_tokens": 17,
        "output_tokens": 5,
        "cached_tokens": 0,
        "computed": 21,
        "blocks": 2,
        "preemptions": 0,
        "finish_reason": None,
    }
    return request | fields


def engine_frame(**live: Any) -> dict[str, Any]:
    """Return a frame; `live` changes parts of its view of the engine."""
    view = {
        "now": 100.0,
        "stats": {
            "num_running": 1,
            "num_waiting": 0,
            "kv_usage": 0.5,
            "steps": 1234,
            "preemptions": 3,
            "prefix_queries": 200,
            "prefix_hits": 50,
            "time": {"executor": 50.0, "host": 8.0, "idle": 6.0},
        },
        "rates": {"steps": 40.0, "prefill_tokens": 2048.0, "decode_tokens": 321.0},
        "blocks": {
            "num_blocks": 512,
            "blocks_per_cell": 1,
            "num_free": 256,
            "num_cached": 99,
            "cells": "",
        },
        "steps": {"first": 0, "prefill_tokens": [0, 8, 16], "decode_tokens": [1, 2, 4]},
        "running": [live_request(7)],
        "waiting": [],
        "finished": [],
    }
    return {"model": "stories", "state": "ready", "reason": "", "live": view | live}


@pytest.mark.full
def test_a_real_server(site: Site, command: Command) -> None:
    reply = ask(site.server, "POST", "/v1/generate", {"prompt": "Once"})
    assert reply.status == 200, reply.body
    site.at_rest()
    assert "stories" in command("top", "--url", site.url, "--once").out


def test_without_a_terminal_it_is_one_frame(site: Site, command: Command) -> None:
    # With the address of OpenAI's clients.
    out = command("top", "--url", f"{site.url}/v1/").out
    assert out.count("stories") == 1 and "\x1b" not in out


def test_the_only_key_of_a_server(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server and its watchers take it from the same variable."""
    monkeypatch.setenv("KVIK_API_KEY", "sesame")
    keys = environment_options(kind=ServerConfig)["api_key"]
    with story_site(routes, read_keys(keys)) as site:
        url = ("--url", site.url, "--once")
        assert "ready" in command("top", *url).out
        assert command.refusal("top", *url, "--api-key", "wrong").startswith("--api-key: ")
        monkeypatch.delenv("KVIK_API_KEY")
        assert command.refusal("top", *url).startswith("--api-key: ")
        command("top", *url, "--api-key", "sesame")


def test_keys(command: Command, tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("operator: boss admin\nuser: common\n")
    with story_site(routes, read_keys([], str(file))) as site:
        url = ("--url", site.url, "--once")
        assert command.refusal("top", *url).startswith("--api-key: ")
        assert command.refusal("top", *url, "--api-key", "wrong").startswith("--api-key: ")
        error = command.refusal("top", *url, "--api-key", "common")
        assert error == "--api-key: the key of an administrator is needed"
        assert "ready" in command("top", *url, "--api-key", "boss").out


def test_no_server_at_the_address(command: Command) -> None:
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"no server answers at http://{where}" in command.refusal(
            "top", "--url", f"http://{where}"
        )


def test_another_program_at_the_address(command: Command) -> None:
    def reply(request: Received) -> Reply:
        return Reply([b"<html>\x1b[2J"])

    with FakeServer(reply) as fake:
        assert "is not kvik" in command.refusal("top", "--url", fake.url)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, [], "url:"),
        (404, {"error": {"message": "unknown"}}, "url:"),
        (401, {"error": "odd"}, "api_key:"),
        (403, {"error": {"message": "host", "code": None}}, "url:"),
        (503, {"error": {"message": "a\x1bb"}}, "url:"),
        (307, None, "url:"),
    ],
)
def test_invalid_answers(status: int, body: object, message: str) -> None:
    with pytest.raises(KvikError) as caught:
        read(status, json.dumps(body).encode())
    assert str(caught.value).startswith(message)


def test_it_continues_while_the_server_is_unreachable() -> None:
    answers: list[Any] = [KvikError("url", "gone"), {"n": 2}, KvikError("url", "again")]
    rests: list[bool] = []

    def leaves() -> bool:
        rests.append(False)
        return len(rests) > 3

    def ask_next() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    seen = list(frames(ask_next, {"n": 1}, leaves))
    assert seen == [
        ({"n": 1}, ""),
        ({"n": 1}, "url: gone"),
        ({"n": 2}, ""),
        ({"n": 2}, "url: again"),
    ]
    assert not answers


@pytest.mark.parametrize("keys", ["q", "xQ"])
def test_a_key_leaves(keys: str) -> None:
    """It needs no Enter, nor the end of the pause between frames."""
    with (
        FakeServer(lambda request: Reply([json.dumps(engine_frame()).encode()])) as fake,
        OnTerminal("top", "--url", fake.url, "--interval", "30") as terminal,
    ):
        for key in keys:
            terminal.wait_for("queue:")
            terminal.type(key)
        code, rest = terminal.finish()
        assert code == 0 and "\x1b[?1049l" in rest


def test_ctrl_c_restores_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal it draws until then, and restores the screen."""
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=100, height=30)
    rests: list[float] = []

    def rest(seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(top, "output_console", lambda: terminal)
    # Not in the module: threads of other tests sleep too.
    monkeypatch.setattr(top, "time", SimpleNamespace(sleep=rest))
    monkeypatch.setattr(top, "ask", lambda server: engine_frame())
    arguments = argparse.Namespace(url="http://a", api_key="", interval=0.2, once=False)
    assert top.run(arguments) == 0
    assert rests == [0.2] * 3 and "1,234 steps" in out.getvalue()
    assert out.getvalue().rindex("\x1b[?1049l") > out.getvalue().index("\x1b[?1049h")


# The picture that `kvik top` draws from an answer of the server.


def shown(picture: RenderableType, width: int = 120) -> str:
    file = StringIO()
    Console(file=file, width=width, height=40).print(picture)
    return file.getvalue()


def several_engines() -> dict[str, Any]:
    frame = engine_frame()
    stats, rates = frame["live"]["stats"], frame["live"]["rates"]
    one = {"number": 0, "state": "ready", "reason": "", "draining": False, "starts": 1}
    away = {"number": 1, "state": "restarting", "stats": None, "rates": None}
    frame["replicas"] = [
        {**one, "unfinished": 1, "stats": stats, "rates": rates},
        {**one, "unfinished": 0, **away},
        {**one, "number": 2, "draining": True, "stats": stats, "rates": rates},
    ]
    return frame


def nothing_to_do() -> dict[str, Any]:
    frame = engine_frame(running=[], steps={"prefill_tokens": [], "decode_tokens": []})
    frame["live"]["stats"] |= {"prefix_queries": 0, "kv_usage": 0.0}
    return frame


def with_tiers() -> dict[str, Any]:
    frame = engine_frame()
    memory = TierStats("memory", 2, 1 << 30, 4 << 30, 3, 2, 0, 1, 2.5e9)
    totals = MoveCounters(loaded_tokens=1234, swapped_in=7)
    moved = MoveStats((memory,), totals, "no space is left")
    frame["live"]["stats"]["moves"] = msgspec.to_builtins(moved)
    return frame


FRAMES = {
    "busy": engine_frame(steps={"prefill_tokens": [9] * 200, "decode_tokens": [1] * 200}),
    "no time": engine_frame(running=[live_request(1, arrival=100.0, first_scheduled=None)]),
    "long queue": engine_frame(waiting=[live_request(i, arrival=98.0) for i in range(20)]),
    "no request": nothing_to_do(),
    "several engines": several_engines(),
    "tiers": with_tiers(),
    "away": engine_frame() | {"state": "restarting", "reason": "it crashed", "live": None},
}


@pytest.mark.parametrize("width", [20, 80, 200])
@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
def test_no_line_is_wider_than_the_terminal(frame: dict[str, Any], width: int) -> None:
    for trouble in ("", "url: no server answers"):
        lines = shown(picture(frame, width, trouble=trouble), width).splitlines()
        assert max(map(len, lines)) <= width
        assert width < 80 or trouble in "".join(lines)


def test_the_number_of_requests_is_bounded() -> None:
    frame = engine_frame(running=[live_request(1000 + i) for i in range(50)])
    text = shown(picture(frame, 120, rows=4))
    assert "1003" in text and "1004" not in text


@pytest.mark.parametrize(
    ("fields", "bar"),
    [
        ({}, "░" * 5 + "▒" * 7 + "█" * 12),
        ({"arrival": 95.0, "first_scheduled": None, "first_token": None}, " " * 12 + "░" * 12),
        ({"first_token": None}, "░" * 5 + "▒" * 19),
        ({"first_scheduled": 90.0, "first_token": 90.1}, "▒" + "█" * 23),
        # A request that has just begun is visible.
        ({"first_scheduled": 90.0, "first_token": 100.0 - 1e-6}, "▒" * 24),
        ({"arrival": 99.999, "first_scheduled": None, "first_token": None}, " " * 23 + "░"),
    ],
)
def test_a_waterfall(fields: dict[str, Any], bar: str) -> None:
    assert waterfall(live_request(0, **fields), 90.0, 100.0).plain == bar
    assert len(bar) == BAR_WIDTH


def test_a_server_does_not_command_the_terminal() -> None:
    frame = engine_frame() | {"model": "a\x1b[2Jb\n[red]c", "reason": "x\x9b1m"}
    text = header(frame).plain
    assert r"a\x1b[2Jb [red]c" in text and "\x1b" not in text and "\x9b" not in text
    assert len(plain("x" * 10_000)) == 200
