"""`kvik chat [MODEL]` or `kvik chat --url URL`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from kvik.cli.chat_backends import Backend, Facts
from kvik.cli.flags import (
    OF_SERVERS,
    Parser,
    add_engine_flags,
    add_model,
    add_sampling_flags,
    engine_options,
    given_engine_options,
    given_sampling_options,
)
from kvik.cli.terminal import Flow, say, styled
from kvik.core.sampling_params import SamplingParams
from kvik.core.structured import Structure
from kvik.errors import ConfigError, KvikError, ParamError
from kvik.options import did_you_mean
from kvik.remote_server import RemoteServer, add_key_flag

# command -> its argument, what it does; `Chat` has a method of the same name
COMMANDS: Mapping[str, tuple[str, str]] = {
    "/help": ("", "this list"),
    "/system": ("[TEXT]", "set the system message (nothing: show it; - : remove it)"),
    "/regenerate": ("", "answer the last message again"),
    "/reset": ("", "forget the conversation"),
    "/save": ("FILE", "write the conversation as JSON"),
    "/stats": ("", "figures of the last answer and of the engine or server"),
    "/exit": ("", "leave (so does Ctrl-D); Ctrl-C stops an answer"),
}
HELP = "\n".join(
    [
        *(f"{f'{name} {rest}':16}{what}" for name, (rest, what) in COMMANDS.items()),
        'A message of several lines: end a line with \\, or begin and end it with """,',
        "or press Alt+Enter between the lines. A pasted text is one message.",
    ]
)
PROMPT, MORE = "> ", ". "
QUOTES = '"""'


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "chat",
        "[MODEL | --url URL]",
        "Talk to a model in this process or on a server. /help lists commands.",
    )
    add_model(parser, "a folder, GGUF file or hub id; with --url: the server's name for it")
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message")
    server = parser.add_argument_group("a server that answers instead of an engine here")
    server.add_argument("--url", help="URL of an OpenAI-compatible API, with or without /v1")
    add_key_flag(server)
    add_sampling_flags(
        parser, left_out=["n", "logprobs", "prompt_logprobs", "prompt_logprobs_start"]
    )
    add_engine_flags(parser, left_out=OF_SERVERS)
    return parser


def run(arguments: argparse.Namespace) -> int:
    changes = given_sampling_options(arguments)
    SamplingParams().with_changes(**changes)  # refuse impossible values before anything is loaded
    if arguments.url is None:
        return _with_engine(arguments, changes)
    return _with_server(arguments, changes)


def _with_engine(arguments: argparse.Namespace, changes: Mapping[str, object]) -> int:
    if arguments.api_key:
        raise ConfigError("api_key", "needs --url")

    from kvik.cli.chat_backends import LocalBackend
    from kvik.config.config import EngineConfig
    from kvik.launch import check_tokenizer, resolve_config
    from kvik.llm import LLM

    options = engine_options(arguments, arguments.model)
    resolved = resolve_config(EngineConfig(**options))
    resolved.model.check_writes()  # before weights are loaded
    check_tokenizer(resolved)
    with LLM(**options) as llm:
        # A model without a template is an error now, not at the first message.
        llm.render_chat([{"role": "user", "content": "Hello"}])
        params = llm.default_params.with_changes(**{"max_tokens": None, **changes})
        return _converse(Chat(LocalBackend(llm, params), arguments.system))


def _with_server(arguments: argparse.Namespace, changes: Mapping[str, object]) -> int:
    for name in given_engine_options(arguments):
        raise ConfigError(name, "is for an engine in this process; a server (--url) has its own")

    from kvik.cli.chat_backends import RemoteBackend, first_model

    server = RemoteServer.at(arguments.url, arguments.api_key)
    sampling = {name: value for name, value in changes.items() if value is not None}
    if "structured" in sampling:  # other servers know only vLLM's name
        constraint = Structure().checked(sampling.pop("structured"))
        sampling["structured_outputs"] = constraint.to_mapping()
    model = arguments.model or first_model(server)
    return _converse(Chat(RemoteBackend(server, model, sampling), arguments.system))


def _converse(chat: Chat) -> int:
    """Read and answer lines until the input ends. Return the exit code: 1 if a line of a script
    failed; a user at a terminal has seen the error."""
    interactive = sys.stdin.isatty()
    read = _line_editor() if interactive else input
    if interactive:
        say(chat.backend.banner, style="bold")
        say(f"/help lists the commands: {' '.join(COMMANDS)}", style="dim")
    while chat.open:
        try:
            chat.take(_read_message(read) if interactive else read(""))
        except EOFError:
            break
        except KeyboardInterrupt:  # at the prompt, or a second time while an answer is stopped
            if not interactive:
                raise
            say("\n/exit or Ctrl-D leaves")
    return 1 if chat.failed and not interactive else 0


def _line_editor() -> Callable[[str], str]:
    """Return a function that reads a line with line editing and history, given a prompt."""
    import readline

    if "libedit" in (readline.__doc__ or ""):  # lacks the settings below, and coloured prompts
        return input
    # Python turns this off; a paste of n lines would then be n messages.
    readline.parse_and_bind("set enable-bracketed-paste on")
    readline.parse_and_bind(r'"\e\C-m": "\C-v\C-j"')  # Alt+Enter: a line end within the message
    readline.set_completer_delims(" ")
    readline.set_completer(_complete_command)
    readline.parse_and_bind("tab: complete")

    def read(prompt: str) -> str:
        # Codes between \001 and \002 have no width on the line.
        return input(re.sub("(\x1b[^m]*m)", "\001\\1\002", styled(prompt, "green")))

    return read if sys.stdout.isatty() else input


def _complete_command(text: str, number: int) -> str | None:
    matches = [name for name in COMMANDS if text.startswith("/") and name.startswith(text)]
    return matches[number] if number < len(matches) else None


def _read_message(read: Callable[[str], str]) -> str:
    """Read a message: one line, or several after a backslash or between triple quotes."""
    line = read(PROMPT)
    if "\n" in line:  # pasted, or with Alt+Enter: kept unchanged
        return line
    if not line.lstrip().startswith(QUOTES):
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{read(MORE)}"
        return line
    lines = [line.lstrip().removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(read(MORE))
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")


class Chat:
    """A conversation; `take` handles a line from the user."""

    def __init__(self, backend: Backend, system: str = "") -> None:
        self.backend = backend
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.open = True
        self.failed = False  # whether any line has failed
        self.last: Facts | None = None

    def take(self, line: str) -> None:
        """Run a command or answer a message. Errors are printed, and the conversation continues."""
        line = line.strip()
        if not line:
            return
        try:
            name, *rest = line.split(maxsplit=1)
            if name in COMMANDS:
                self._run(name, "".join(rest))
            elif name.startswith("/") and "\n" not in line:  # a pasted text may begin with "/"
                hint = f"{did_you_mean(name, COMMANDS)} /help lists them".lstrip()
                raise ParamError("command", f"{name[:60]!r} is unknown; {hint}")
            else:
                self._answer(line)
        except KvikError as error:
            self.failed = True
            say(f"kvik: error: {error}", error=True, style="red")

    def _run(self, command: str, rest: str) -> None:
        match command:
            case "/help":
                say(HELP)
            case "/system":
                self._set_system(rest)
            case "/regenerate":
                self._regenerate()
            case "/reset":
                self._reset()
            case "/save":
                self._save(rest)
            case "/stats":
                self._stats()
            case "/exit":
                self.open = False

    def _answer(self, text: str) -> None:
        messages = [*self.messages, {"role": "user", "content": text}]
        chunks: list[str] = []
        flow = Flow()
        with self.backend.answer(self._with_system(messages)) as answer:
            try:
                for piece in answer:
                    chunks.append(piece)
                    flow.write(piece)
            except KeyboardInterrupt:  # arrives between steps: a local engine stays consistent
                pass
            except KvikError:
                if chunks:
                    flow.end()
                    say(flush=True)
                self.last = answer.facts
                raise
        flow.end()
        say(flush=True)
        self.last = answer.facts
        # A stopped answer is kept too: the user has read it and may refer to it.
        self.messages = [*messages, {"role": "assistant", "content": "".join(chunks)}]
        note = "stopped" if self.last is None else self.last.note
        if note:
            say(f"[{note}]", error=True, style="dim")

    def _with_system(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        if not self.system:
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def _set_system(self, text: str) -> None:
        if text:
            self.system = "" if text == "-" else text
        say(f"system message: {self.system or '(none)'}")

    def _regenerate(self) -> None:
        if not self.messages:
            raise ParamError("command", "/regenerate needs an answer to replace")
        before = self.messages
        *self.messages, question, _ = before
        try:
            self._answer(question["content"])
        except KvikError:
            self.messages = before  # keep the old answer
            raise

    def _reset(self) -> None:
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

    def _stats(self) -> None:
        if self.last is not None:
            say(f"last answer: {self.last.figures}")
        say(self.backend.stats())
