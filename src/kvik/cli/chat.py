"""`kvik chat [MODEL]` or `kvik chat --url URL`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from kvik.cli.chat_backends import Backend, Facts
from kvik.cli.flags import (
    Parser,
    add_engine_flags,
    add_model,
    add_sampling_flags,
    engine_options,
    given_engine_options,
    given_sampling_options,
)
from kvik.cli.remote_server import RemoteServer, add_key_flag
from kvik.cli.terminal import say
from kvik.core.sampling_params import SamplingParams
from kvik.errors import ConfigError, KvikError, ParamError

HELP = """\
/help           this list
/system [TEXT]  set the system message (nothing: show it; - : remove it)
/reset          forget the conversation
/save FILE      write the conversation as JSON
/stats          figures of the last answer and of the engine or server
/exit           leave (so does Ctrl-D); Ctrl-C stops an answer"""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "chat", "[MODEL | --url URL]", "Talk to a model, here or of a server. /help lists commands."
    )
    add_model(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message")
    server = parser.add_argument_group("a server that answers instead of an engine here")
    server.add_argument("--url", help="of an OpenAI-compatible API, with or without /v1")
    server.add_argument(
        "--model",
        dest="served_model",
        default="",
        metavar="NAME",
        help="as the server calls it (its first)",
    )
    add_key_flag(server)
    add_sampling_flags(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    given = given_sampling_options(arguments)
    SamplingParams().with_changes(**given)  # refuse what is impossible before anything is loaded
    for name, allowed in (("n", 1), ("logprobs", None), ("prompt_logprobs", None)):
        if given.get(name, allowed) != allowed:
            raise ParamError(name, "has no place in a chat; kvik generate takes it")
    if arguments.url is None:
        _with_engine(arguments, given)
    else:
        _with_server(arguments, given)
    return 0


def _with_engine(arguments: argparse.Namespace, given: Mapping[str, object]) -> None:
    if arguments.served_model:
        raise ConfigError("model", "is named without --model, which goes with --url")
    if arguments.api_key:
        raise ConfigError("api_key", "goes with --url")

    from kvik.cli.chat_backends import LocalBackend
    from kvik.llm import LLM  # brings in torch

    with LLM(**engine_options(arguments, arguments.model)) as llm:
        llm.render_chat([{"role": "user", "content": "Hello"}])  # a model without a template: now
        params = llm.default_params.with_changes(**{"max_tokens": None, **given})
        _converse(Chat(LocalBackend(llm, params), arguments.system))


def _with_server(arguments: argparse.Namespace, given: Mapping[str, object]) -> None:
    for name in given_engine_options(arguments):
        raise ConfigError(name, "is for an engine here; with --url the server has its own")
    if arguments.model:
        raise ConfigError("model", f"of a server is named by --model {arguments.model[:60]}")

    from kvik.cli.chat_backends import RemoteBackend, first_model

    server = RemoteServer.at(arguments.url, arguments.api_key)
    sampling = {name: value for name, value in given.items() if value is not None}
    model = arguments.served_model or first_model(server)
    _converse(Chat(RemoteBackend(server, model, sampling), arguments.system))


def _converse(chat: Chat) -> None:
    """Read and answer lines until the user leaves."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # line editing and history for input()

        # Python turns this off: a paste of several lines would be as many messages.
        readline.parse_and_bind("set enable-bracketed-paste on")
        say("/help lists the commands")
    while chat.open:
        try:
            chat.take(input("> " if interactive else ""))
        except EOFError:
            break
        except KeyboardInterrupt:  # at the prompt, or once more while an answer is stopped
            if not interactive:
                raise
            say("\n/exit or Ctrl-D leaves")


class Chat:
    """A conversation; `take` handles a line of the user."""

    def __init__(self, backend: Backend, system: str = "") -> None:
        self.backend = backend
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.open = True
        self.last: Facts | None = None
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/help": self._help,
            "/system": self._set_system,
            "/reset": self._reset,
            "/save": self._save,
            "/stats": self._stats,
            "/exit": self._exit,
        }

    def take(self, line: str) -> None:
        """Run a command or answer a message. Errors are printed, and the conversation goes on."""
        line = line.strip()
        if not line:
            return
        try:
            name, *rest = line.split(maxsplit=1)
            if name in self._commands:
                self._commands[name]("".join(rest))
            elif name.startswith("/") and "\n" not in line:  # a pasted text may begin with "/"
                raise ParamError("command", f"{name[:60]!r} is unknown; /help lists them")
            else:
                self._answer(line)
        except KvikError as error:
            say(f"kvik: error: {error}", error=True)

    def _answer(self, text: str) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        said: list[str] = []
        with self.backend.answer(self._with_system(asked)) as answer:
            try:
                for piece in answer:
                    said.append(piece)
                    say(piece, end="", flush=True)
            except KeyboardInterrupt:  # arrives between steps: an engine here is in order
                pass
            except KvikError:
                if said:
                    say(flush=True)
                self.last = answer.facts
                raise
        say(flush=True)
        self.last = answer.facts
        # What was stopped is kept too: the user has read it and may refer to it.
        self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        note = "stopped" if self.last is None else self.last.note
        if note:
            say(f"[{note}]", error=True)

    def _with_system(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        if not self.system:
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def _help(self, rest: str) -> None:
        say(HELP)

    def _set_system(self, text: str) -> None:
        if text:
            self.system = "" if text == "-" else text
        say(f"system message: {self.system or '(none)'}")

    def _reset(self, rest: str) -> None:
        self.messages.clear()
        self.last = None
        say("the conversation is forgotten")

    def _save(self, name: str) -> None:
        if not name:
            raise ParamError("file", "must be named: /save FILE")
        text = json.dumps(self._with_system(self.messages), ensure_ascii=False, indent=2)
        try:
            Path(os.path.expanduser(name)).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ParamError("file", f"cannot be written ({error.strerror})") from None
        except ValueError as error:  # a name with a null character
            raise ParamError("file", f"cannot be written ({error})") from None
        say(f"saved {len(self.messages)} messages to {name}")

    def _stats(self, rest: str) -> None:
        if self.last is not None:
            say(f"last answer: {self.last.figures}")
        say(self.backend.stats())

    def _exit(self, rest: str) -> None:
        self.open = False
