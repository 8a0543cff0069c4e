"""`kvik chat --url`: the same conversation with a server."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import Command, Printed
from helpers.fake_server import DONE, FakeServer, Received, Reply, delta, event, models, usage
from helpers.on_terminal import OnTerminal
from helpers.story_site import Site, site_fixture

from kvik.cli.chat import Chat
from kvik.cli.chat_backends import RemoteBackend, first_model
from kvik.errors import ConfigError
from kvik.remote_server import RemoteServer
from kvik.server.access import read_keys
from kvik.server.app import openai_routes

END = event(choices=[], usage=usage(7, 2, prompt_tokens_details={"cached_tokens": 3})) + DONE
HELLO = Reply([delta("Hel"), delta("lo", "stop"), END])


site = site_fixture(openai_routes, read_keys(["right"]))


def answering(reply: Reply) -> FakeServer:
    return FakeServer(lambda request: models(request) or reply)


def chat(url: str, api_key: str = "", **sampling: object) -> Chat:
    return Chat(RemoteBackend(RemoteServer.at(url, api_key), "fake", sampling))


Say = Callable[..., Printed]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, command: Command) -> Say:
    """Return a function that runs the command with these lines on its standard input."""

    def run(lines: str, *words: str, code: int = 0) -> Printed:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return command("chat", *words, code=code)

    return run


def test_a_conversation_with_a_real_server(site: Site, say: Say, tmp_path: Path) -> None:
    lines = f"Hello\n/stats\nAnd then?\n/save {tmp_path / 'talk.json'}\n"
    flags = ["--temperature", "0", "--max-tokens", "4", "--system", "Be kind"]
    captured = say(lines, "--url", site.url, "--api-key", "right", *flags)
    saved = json.loads((tmp_path / "talk.json").read_text())
    roles = [message["role"] for message in saved]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert saved[2]["content"]
    assert captured.out.startswith(saved[2]["content"] + "\nlast answer: ")
    assert " + 4 output tokens, TTFT " in captured.out
    assert f"server: {site.url}, model stories\n" in captured.out
    assert captured.err == "[cut at the limit of length]\n" * 2


@pytest.mark.full
def test_the_server_s_own_message_is_shown(site: Site, say: Say) -> None:
    site_flags = ["--url", site.url, "--model", "stories"]
    error = say("Hello\n", *site_flags, "--api-key", "wrong", code=1).err
    assert error.startswith("kvik: error: server: HTTP 401: ")
    assert error.count("\n") == 1
    error = say("Hello\n", "--url", site.url, code=2).err  # its models are not listed either
    assert error.startswith("kvik: error: --api-key: HTTP 401: ")
    lines = "word " * 3000 + "\nHello\n"
    captured = say(lines, *site_flags, "--api-key", "right", code=1)
    assert captured.err.startswith("kvik: error: server: HTTP 400: ")
    assert captured.out.strip()  # the conversation continues


def test_requests_to_the_server(say: Say) -> None:
    flags = ["--temperature", "0.5", "--stop", "x", "--seed", "3", "--max-tokens", "none"]
    flags += ["--regex", "a+"]
    with answering(HELLO) as server:
        say("Hi\n", "--url", f"{server.url}/v1/", "--api-key", "abc", *flags)
        listed, asked = server.requests
    assert (listed.method, listed.path) == ("GET", "/v1/models")
    assert (asked.method, asked.path) == ("POST", "/v1/chat/completions")
    assert asked.headers["authorization"] == "Bearer abc"
    assert asked.body == {
        "model": "fake",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": "Hi"}],
        "temperature": 0.5,
        "stop": ["x"],
        "seed": 3,
        "structured_outputs": {"regex": "a+"},
    }


def test_a_named_model_is_not_looked_up_and_no_key_is_sent(say: Say) -> None:
    with answering(HELLO) as server:
        address = server.url.removeprefix("http://")
        say("Hi\n", "--url", address, "--model", "mine")
        (asked,) = server.requests
    assert asked.body["model"] == "mine"
    assert "authorization" not in asked.headers


def test_the_history_has_the_figures_of_the_server(capsys: Any) -> None:
    with answering(HELLO) as server:
        talk = chat(server.url)
        talk.take("One")
        talk.take("/system Be brief")
        talk.take("Two")
        talk.take("/stats")
        assert server.requests[1].body["messages"] == [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": "One"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Two"},
        ]
    out = capsys.readouterr().out
    assert "last answer: 7 prompt + 2 output tokens, TTFT " in out
    assert " tokens/s, prefix-cache hit 43%\n" in out


def test_reasoning_in_its_own_field_is_shown_before_the_answer(capsys: Any) -> None:
    thoughts = [
        event(choices=[{"index": 0, "delta": {"reasoning_content": piece, "reasoning": piece}}])
        for piece in ("Hm", "m.")
    ]
    with answering(Reply([*thoughts, delta("Hel"), delta("lo", "stop"), END])) as server:
        chat(server.url).take("One")
    assert "<think>\nHmm.\n</think>\n\nHello" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("accepted", "rejected", "shown"),
    [(3, 1, ", 3 of 4 drafts right\n"), (0, 2, ", 0 of 2 drafts right\n"), (0, None, "tokens/s\n")],
)
def test_drafts_are_shown_if_there_were_any(
    accepted: int, rejected: int | None, shown: str, capsys: Any
) -> None:
    guessed = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    reported = usage(7, 2, completion_tokens_details=guessed)
    with answering(
        Reply([delta("Hello", "stop"), event(choices=[], usage=reported) + DONE])
    ) as server:
        talk = chat(server.url)
        talk.take("One")
        talk.take("/stats")
    assert shown in capsys.readouterr().out


@pytest.mark.parametrize(
    "steps",
    [
        [delta("Hel"), delta("lo", "stop")],  # no [DONE]
        [delta("Hel"), delta("lo"), DONE],  # no reason
        [b": comment\n\n", delta(role="assistant"), delta("Hello", "stop"), DONE, b"data: x\n\n"],
        [(delta("Hel") + delta("lo", "stop") + DONE)[i : i + 1] for i in range(200)],
        [event(choices=None), delta("Hello", "stop"), event(choices=[], usage=None), DONE],
    ],
)
def test_odd_streams_are_read(steps: list[float | bytes], capsys: Any) -> None:
    with answering(Reply([step for step in steps if step])) as server:
        talk = chat(server.url)
        talk.take("Hi")
        talk.take("/stats")
    captured = capsys.readouterr()
    assert captured.out.startswith("Hello\nlast answer: ")
    assert "the server does not count tokens" in captured.out
    assert captured.err == ""


def failure(message: object) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()


@pytest.mark.parametrize(
    ("reply", "line"),
    [
        (Reply([failure("too\nlong")], 400, "application/json"), "HTTP 400: too long"),
        (Reply([b'{"error": "no"}'], 503, "application/json"), "HTTP 503: no"),
        (Reply([failure("too\nmany")], 429, "application/json"), "HTTP 429: too many"),
        (Reply([b"<p>busy</p>"], 502, "text/html"), "HTTP 502: <p>busy</p>"),
        (Reply([], 500), "HTTP 500: no reason given"),
        (
            Reply([b"{}"], 200, "application/json"),
            "the answer is not a stream, but application/json",
        ),
        (Reply([b"data: {]\n\n"]), "sent an invalid event: {]"),
        (Reply([b"data: " + failure("died") + b"\n\n"]), "died"),
        (Reply([b"event: error\ndata: " + failure("gone") + b"\n\n"]), "gone"),
        (Reply([delta("Hel")]), "the answer broke off"),
        (Reply([delta("Hel")], close=True), "the answer broke off: IncompleteRead"),
    ],
)
def test_a_failure_is_one_line_and_not_in_the_history(reply: Reply, line: str, capsys: Any) -> None:
    with answering(reply) as server:
        talk = chat(server.url)
        talk.take("Hi")
        captured = capsys.readouterr()
        assert captured.err.startswith(f"kvik: error: server: {line}")
        assert captured.err.count("\n") == 1
        assert captured.out in ("", "Hel\n")
        assert talk.messages == []
        assert talk.open


def test_a_server_that_refuses_usage_is_asked_without_it(capsys: Any) -> None:
    def reply(request: Received) -> Reply:
        if "stream_options" in request.body:
            return Reply([failure("stream_options is unknown")], 422, "application/json")
        return HELLO

    with FakeServer(reply) as server:
        chat(server.url).take("Hi")
        assert len(server.requests) == 2
    assert capsys.readouterr().out == "Hello\n"


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize("said", ["", "Hel"])
@pytest.mark.full
def test_ctrl_c_closes_the_connection(said: str, capsys: Any) -> None:
    user = threading.get_ident()

    def steps() -> Iterator[float | bytes]:
        if said:
            yield delta(said)
        while said not in sys.stdout.getvalue():  # until the client has shown it
            yield 0.01
        yield 0.5
        signal.pthread_kill(user, signal.SIGINT)
        yield 0.5
        while True:  # writing fails once the client has disconnected
            yield b": still here\n\n"
            yield 0.01

    def reply(request: Received) -> Reply:
        return HELLO if len(server.requests) > 1 else Reply(steps())

    with FakeServer(reply) as server:
        talk = chat(server.url)
        talk.take("Hi")
        captured = capsys.readouterr()
        assert (captured.out, captured.err) == (f"{said}\n", "[stopped]\n")
        (stopped,) = server.requests
        deadline = time.monotonic() + 20
        count = -1
        while len(stopped.written) != count:  # it writes until the connection is closed
            assert time.monotonic() < deadline
            count = len(stopped.written)
            time.sleep(1.0)
        talk.take("Again")
        assert talk.messages[-1]["content"] == "Hello"
        assert server.connections == 2


def test_a_stopped_answer_is_aborted_by_the_server(site: Site) -> None:
    backend = RemoteBackend(RemoteServer.at(site.url, "right"), "stories", {"ignore_eos": True})
    with backend.answer([{"role": "user", "content": "Hello"}]) as answer:
        assert next(iter(answer))
    assert answer.facts is None
    site.at_rest()


def test_an_unreachable_server(say: Say) -> None:
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        first = say("Hi\n", "--url", url, code=2).err
        second = say("Hi\n", "--url", url, "--model", "mine", code=1).err
    assert first.startswith(f"kvik: error: --url: {url} cannot be reached: ")
    assert second == first.replace("--url", "url")  # in the conversation there are no flags


@pytest.mark.parametrize("body", [b"", b"[]", b'{"data": []}', b'{"data": [{}]}', b"no"])
def test_a_server_that_lists_no_model(body: bytes) -> None:
    message = "model: must be given with --model"
    server = FakeServer(lambda request: Reply([body] if body else []))
    with server, pytest.raises(ConfigError, match=message):
        first_model(RemoteServer.at(server.url))


CONTROLS = ["\x1b]0;ti", "tle\x07", "\x9b2J", "\x7f", "a\rb", "\tc\nd\r\n"]


def steering() -> FakeServer:
    return answering(Reply([*map(delta, CONTROLS), delta(".", "stop"), END]))


def test_an_answer_cannot_control_the_terminal() -> None:
    with steering() as server, OnTerminal("chat", "--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.type("Hi\r")
        terminal.wait_for("Hi\r\n")
        answer = terminal.wait_for("> ")
    assert r"\x1b]0;title\x07\x9b2J\x7fa\x0db" in answer
    assert "\tc\r\nd\r\n.\r\n" in answer  # a terminal writes \r\n for \n
    assert not any(control in answer for control in ("\x1b]", "\x07", "\x9b", "\x7f"))


def test_an_error_of_a_server_cannot_control_the_terminal() -> None:
    reply = Reply([failure("\x1b[2Jred")], 401, "application/json")
    with FakeServer(lambda _: reply) as server, OnTerminal("chat", "--url", server.url) as terminal:
        code, written = terminal.finish()
    assert code == 2 and r"\x1b[2Jred" in written and "\x1b[2J" not in written


def test_a_pipe_gets_the_unchanged_answer(say: Say) -> None:
    with steering() as server:
        assert say("Hi\n", "--url", server.url).out == "".join(CONTROLS) + ".\n"


def messages_of(server: FakeServer) -> list[str]:
    return [request.body["messages"][-1]["content"] for request in server.requests if request.raw]


def test_a_terminal_shows_who_answers_and_colours() -> None:
    for environ, coloured in (({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)):
        with answering(HELLO) as server:
            with OnTerminal("chat", "--url", server.url, **environ) as terminal:
                banner = terminal.wait_for("> ")
                terminal.type("/nonsense\r")
                error = terminal.wait_for("/help lists them")
                terminal.type("/exit\r")
                code, rest = terminal.finish()
            assert code == 0
            assert f"fake of {server.url}" in banner and "/regenerate" in banner
            assert ("\x1b[1m" in banner, "\x1b[31m" in error) == (coloured, coloured)
            if not coloured:
                assert not re.search("\x1b\\[\\d*m", banner + error + rest)


def test_a_message_of_several_lines() -> None:
    messages = {
        "one\\\rtwo\\\rthree\r": "one\ntwo\nthree",
        '"""one\r/two\r\rthree"""\r': "one\n/two\n\nthree",
        '"""\rone\rtwo\r"""\r': "one\ntwo",
        '"""one line"""\r': "one line",
        "one\x1b\rtwo\r": "one\ntwo",  # Alt+Enter
        # Bracketed pastes, as sent by a terminal; Enter is not part of them.
        '\x1b[200~"""\rone\\\x1b[201~\r': '"""\none\\',
        "\x1b[200~/* one */\rtwo\r\rthree\x1b[201~ four\r": "/* one */\ntwo\n\nthree four",
    }
    with answering(HELLO) as server, OnTerminal("chat", "--url", server.url) as terminal:
        for keys, message in messages.items():
            terminal.wait_for("> ")
            terminal.type(keys)
            terminal.wait_for("Hello")
            assert messages_of(server)[-1] == message
        assert len(messages_of(server)) == len(messages)


def test_lines_break_between_words() -> None:
    words = [f"{'word' * (1 + number % 4)} " for number in range(40)]
    text = (
        "".join(words)
        + "x" * 70
        + "\n    indented 漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字 end"
    )
    pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    reply = Reply([*map(delta, pieces[:-1]), delta(pieces[-1], "stop"), END])
    with (
        answering(reply) as server,
        OnTerminal("chat", "--url", server.url, columns=30, NO_COLOR="1") as terminal,
    ):
        terminal.wait_for("> ")
        terminal.type("Hi\r")
        terminal.wait_for("Hi\r\n")
        answer = re.sub(r"\x1b\[\?2004[hl]\r?", "", terminal.wait_for("> "))
    lines = answer.rstrip().split("\r\n")
    broken = [line for line in lines if "x" not in line]
    assert all(len(line) + sum(char in "漢字" for char in line) <= 30 for line in broken)
    assert all(word.strip("word") == "" for line in lines[:5] for word in line.split())
    assert max(len(line) for line in broken) > 20  # and not too early
    assert "".join(answer.split()) == "".join(text.split())
    assert any(line.startswith("    indented") for line in lines)


def test_regenerate_repeats_the_last_message(say: Say) -> None:
    lines = "/regenerate\nHi\n/regenerate\n/rest\nMore\n"
    with answering(HELLO) as server:
        errors = say(lines, "--url", server.url, code=1).err
        asked = [request.body["messages"] for request in server.requests if request.raw]
    hi = {"role": "user", "content": "Hi"}
    assert asked[0] == asked[1] == [hi]
    said = {"role": "assistant", "content": "Hello"}
    assert asked[2] == [hi, said, {"role": "user", "content": "More"}]
    assert "command: /regenerate needs an answer" in errors
    assert "'/rest' is unknown; did you mean /reset? /help" in errors


def test_commands_are_completed() -> None:
    with answering(HELLO) as server, OnTerminal("chat", "--url", server.url) as terminal:
        terminal.wait_for("> ")
        terminal.type("/sta\t\r")
        assert "server: " in terminal.wait_for("model fake")
