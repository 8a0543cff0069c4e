"""`kvik chat`: the conversation and its commands."""

from __future__ import annotations

import io
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import Command
from helpers.configs import ENCODER

from kvik.cli.chat import HELP, Chat
from kvik.cli.chat_backends import LocalBackend
from kvik.engine.output import RequestOutput, TextDelta
from kvik.llm import LLM, Stream

Loads = list[dict[str, Any]]


def chat(llm: LLM, **changes: Any) -> Chat:
    params = llm.default_params.with_changes(**{"max_tokens": 6, "seed": 1, **changes})
    return Chat(LocalBackend(llm, params))


@pytest.fixture
def prompts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, str]]]:
    """Record the conversations that the model is asked to continue."""
    seen: list[list[dict[str, str]]] = []
    real = llm.stream_chat

    def stream_chat(messages: Any, params: Any) -> Any:
        seen.append([dict(message) for message in messages])
        return real(messages, params)

    monkeypatch.setattr(llm, "stream_chat", stream_chat)
    return seen


def test_later_prompts_have_the_history(llm: LLM, prompts: list[Any], capsys: Any) -> None:
    talk = chat(llm)
    talk.take("Hello there")
    answer = talk.messages[1]["content"]
    assert capsys.readouterr().out == answer + "\n"
    talk.take("  And then?  ")
    assert prompts[1] == [
        {"role": "user", "content": "Hello there"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And then?"},
    ]
    assert len(talk.messages) == 4


def test_an_empty_line_is_ignored(llm: LLM, prompts: list[Any]) -> None:
    chat(llm).take("   ")
    assert prompts == []


def test_the_system_message(llm: LLM, prompts: list[Any], capsys: Any) -> None:
    talk = chat(llm)
    talk.take("/system Be brief")
    talk.take("/system")
    talk.take("Hello")
    assert prompts[0][0] == {"role": "system", "content": "Be brief"}
    talk.take("/system -")
    talk.take("Hello")
    assert prompts[1][0]["role"] == "user"
    out = capsys.readouterr().out
    assert out.count("system message: Be brief") == 2
    assert "system message: (none)" in out


def test_reset_and_stats(llm: LLM, prompts: list[Any], capsys: Any) -> None:
    talk = chat(llm)
    talk.take("Hello")
    talk.take("/stats")
    out = capsys.readouterr().out
    assert "last answer: " in out
    assert "6 output tokens" in out
    assert "engine: " in out
    talk.take("/reset")
    assert talk.messages == []
    talk.take("Again")
    assert prompts[1] == [{"role": "user", "content": "Again"}]


def test_save(llm: LLM, tmp_path: Path, capsys: Any) -> None:
    talk = chat(llm)
    talk.take("/system Be brief")
    talk.take("Hello")
    talk.take(f"/save {tmp_path / 'talk.json'}")
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [message["role"] for message in saved] == ["system", "user", "assistant"]
    assert saved[2]["content"] == talk.messages[1]["content"]
    talk.take(f"/save {tmp_path / 'no' / 'such' / 'folder'}")
    talk.take("/save ~nobody-here/talk.json")
    talk.take("/save a\0b")
    talk.take("/save")
    errors = capsys.readouterr().err
    assert "kvik: error: file: cannot be written (No such file or directory)" in errors
    assert errors.count("cannot be written") == 3
    assert "kvik: error: file: must be named" in errors


def test_help_exit_and_what_is_unknown(llm: LLM, capsys: Any) -> None:
    talk = chat(llm)
    talk.take("/help")
    assert capsys.readouterr().out == HELP + "\n"
    talk.take("/quit now")
    assert "command: '/quit' is unknown; /help lists them" in capsys.readouterr().err
    assert talk.open
    talk.take("/exit")
    assert not talk.open


class PressingCtrlC:
    """A stream whose user presses Ctrl-C after the first delta."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[TextDelta]:
        yield next(self.stream)
        signal.raise_signal(signal.SIGINT)
        yield from self.stream

    def __enter__(self) -> PressingCtrlC:
        return self

    def __exit__(self, *error: object) -> None:
        self.stream.close()

    @property
    def output(self) -> RequestOutput | None:
        return self.stream.output


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_stops_the_answer_and_not_the_program(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    real = llm.stream_chat
    with monkeypatch.context() as patch:
        patch.setattr(llm, "stream_chat", lambda *asked: PressingCtrlC(real(*asked)))
        talk = chat(llm, max_tokens=None)
        talk.take("Hello")
    captured = capsys.readouterr()
    assert captured.err == "[stopped]\n"
    assert talk.messages[1] == {"role": "assistant", "content": captured.out.removesuffix("\n")}
    assert llm.stats().num_running == 0
    talk.backend = chat(llm, max_tokens=3).backend
    talk.take("Go on")
    assert len(talk.messages) == 4


def test_a_conversation_longer_than_the_context(llm: LLM, capsys: Any) -> None:
    talk = chat(llm)
    talk.take("Hello")
    before = list(talk.messages)
    talk.take("word " * 3000)
    error = capsys.readouterr().err
    assert "prompt: the conversation outgrew the context of 128 tokens; /reset" in error
    assert talk.messages == before
    talk.take("/reset")
    talk.take("word " * 3000)
    assert "prompt: has " in capsys.readouterr().err  # a single message: a reset would not help


def test_why_an_answer_ended(llm: LLM, capsys: Any) -> None:
    chat(llm).take("Hello")
    assert "[cut at max_tokens]" in capsys.readouterr().err
    chat(llm, max_tokens=None, ignore_eos=True).take("word " * 50)
    assert "[the context of 128 tokens is full" in capsys.readouterr().err


def test_the_command_reads_lines(
    loads: Loads, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/stats\n"))
    flags = ["--max-tokens", "4", "--temperature", "0", "--system", "Be kind"]
    assert "4 output tokens" in command("chat", "--max-num-seqs", "2", *flags).out
    assert loads == [{"max_num_seqs": 2}]


def test_ctrl_c_at_the_prompt_only_gives_a_hint(
    loads: Loads, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def stopped(talk: Chat, line: str) -> None:
        if line == "Hello":
            raise KeyboardInterrupt
        take(talk, line)

    take = Chat.take
    monkeypatch.setattr(Chat, "take", stopped)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def lines() -> Iterator[BaseException | str]:
        yield KeyboardInterrupt()
        yield "Hello"
        yield "/exit"

    script = lines()

    def read(prompt: str) -> str:
        line = next(script)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", read)
    assert command("chat").out.count("/exit or Ctrl-D leaves") == 2


def test_an_encoder_is_refused_before_it_is_loaded(
    loads: Loads, tmp_path: Path, command: Command
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(ENCODER))
    assert command.refusal("chat", str(tmp_path)).startswith("model: is an encoder")
    assert loads == []


def test_a_model_without_a_template_is_refused_at_the_start(
    llm: LLM, loads: Loads, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr(llm, "_chat_template", None)
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    assert command.refusal("chat").startswith("--chat-template: ")
