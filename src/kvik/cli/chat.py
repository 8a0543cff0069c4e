"""`kvik chat [MODEL]`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvik.cli.flags import (
    Parser,
    add_engine_flags,
    add_sampling_flags,
    engine_options,
    given_sampling_options,
)
from kvik.cli.report import stats_line
from kvik.config.errors import KvikError, ParamError
from kvik.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvik.engine.output import RequestOutput
    from kvik.llm import LLM

HELP = """\
/help           this list
/system [TEXT]  set the system message (nothing: show it; - : remove it)
/reset          forget the conversation
/save FILE      write the conversation as JSON
/stats          figures of the last answer and of the engine
/exit           leave (so does Ctrl-D); Ctrl-C stops an answer"""


def build_parser() -> argparse.ArgumentParser:
    parser = Parser("chat", "[MODEL]", "Talk to a model. /help lists the commands.")
    parser.add_argument(
        "model", nargs="?", default="", help="a folder or hub id (default: bundled)"
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="the system message")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    given = given_sampling_options(arguments)
    SamplingParams().with_changes(**given)  # refuse what is impossible before anything is loaded
    for name, allowed in (("n", 1), ("logprobs", None), ("prompt_logprobs", None)):
        if given.get(name, allowed) != allowed:
            raise ParamError(name, "has no place in a chat; kvik generate takes it")

    from kvik.llm import LLM  # brings in torch

    with LLM(**engine_options(arguments, arguments.model)) as llm:
        llm.render_chat([{"role": "user", "content": "Hello"}])  # a model without a template: now
        params = llm.default_params.with_changes(**{"max_tokens": None, **given})
        chat = Chat(llm, params, arguments.system)
        interactive = sys.stdin.isatty()
        if interactive:
            import readline  # noqa: F401  line editing and history for input()

            print("/help lists the commands")
        while chat.open:
            try:
                chat.take(input("> " if interactive else ""))
            except EOFError:
                break
            except KeyboardInterrupt:  # at the prompt, or once more while an answer is stopped
                if not interactive:
                    raise
                print("\n/exit or Ctrl-D leaves")
    return 0


class Chat:
    """A conversation: every line of the user goes to `take`."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str = "") -> None:
        self.llm = llm
        self.params = params
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.open = True
        self.last: RequestOutput | None = None
        self._commands: Mapping[str, Callable[[str], None]] = {
            "/help": self._help,
            "/system": self._set_system,
            "/reset": self._reset,
            "/save": self._save,
            "/stats": self._stats,
            "/exit": self._exit,
        }

    def take(self, line: str) -> None:
        """A command or something to say. Errors are printed; the conversation goes on."""
        line = line.strip()
        if not line:
            return
        try:
            if line.startswith("/"):
                name, _, rest = line.partition(" ")
                if name not in self._commands:
                    raise ParamError("command", f"{name[:60]!r} is unknown; /help lists them")
                self._commands[name](rest.strip())
            else:
                self._answer(line)
        except KvikError as error:
            print(f"kvik: error: {error}", file=sys.stderr)

    def _answer(self, text: str) -> None:
        asked = [*self.messages, {"role": "user", "content": text}]
        limit = self.llm.resolved.scheduler.max_model_len
        try:
            stream = self.llm.stream_chat(self._with_system(asked), self.params)
        except ParamError as error:
            if error.field != "prompt" or not self.messages:
                raise
            message = f"the conversation outgrew the context of {limit} tokens; /reset starts over"
            raise ParamError("prompt", message) from None
        said = []
        with stream:
            try:
                for delta in stream:
                    said.append(delta.text)
                    print(delta.text, end="", flush=True)
            except KeyboardInterrupt:  # arrives between steps: the engine is in order
                pass
        print(flush=True)
        self.last = stream.output
        # What was stopped is kept too: the user has read it and may refer to it.
        self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        if stream.output is None:
            print("[stopped]", file=sys.stderr)
            return
        (completion,) = stream.output.completions
        if completion.finish_reason == "error":
            self.messages = asked[:-1]
            raise KvikError("request", completion.error or "failed")
        used = len(stream.output.prompt_token_ids) + len(completion.token_ids)
        if completion.finish_reason == "length" and used >= limit:
            print(f"[the context of {limit} tokens is full; /reset starts over]", file=sys.stderr)
        elif completion.finish_reason == "length":
            print("[cut at max_tokens]", file=sys.stderr)

    def _with_system(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        if not self.system:
            return messages
        return [{"role": "system", "content": self.system}, *messages]

    def _help(self, rest: str) -> None:
        print(HELP)

    def _set_system(self, text: str) -> None:
        if text:
            self.system = "" if text == "-" else text
        print(f"system message: {self.system or '(none)'}")

    def _reset(self, rest: str) -> None:
        self.messages.clear()
        self.last = None
        print("the conversation is forgotten")

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
        print(f"saved {len(self.messages)} messages to {name}")

    def _stats(self, rest: str) -> None:
        if self.last is not None:
            print(f"last answer: {stats_line(self.last)}")
        stats = self.llm.stats()
        print(
            f"engine: {stats.steps} steps, {stats.delivered_tokens} tokens, "
            f"prefix-cache hit {stats.prefix_hit_rate:.0%}, {stats.cached_blocks} of "
            f"{stats.num_blocks} blocks cached, {stats.preemptions} preemptions"
        )

    def _exit(self, rest: str) -> None:
        self.open = False
