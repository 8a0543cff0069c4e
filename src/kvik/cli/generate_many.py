"""`kvik generate [MODEL] --prompts FILE`: a batch from a file, which may be interrupted."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvik.cli.flags import engine_options
from kvik.cli.report import as_json, say_decisions
from kvik.cli.terminal import say
from kvik.core.sampling_params import SamplingParams
from kvik.errors import KvikError, ParamError, shown
from kvik.files import can_write

if TYPE_CHECKING:
    from kvik.engine.output import RequestOutput
    from kvik.llm import LLM, Prompt

OWN = ("prompt", "messages", "priority")  # of a line, beside sampling parameters


@dataclass(frozen=True, slots=True)
class Line:
    """One prompt of the file.

    Attributes:
        number: of its line, from 1.
        prompt: None: it is a conversation.
    """

    number: int
    prompt: Prompt | None
    messages: Sequence[Mapping[str, Any]] | None
    priority: int
    sampling: Mapping[str, Any]


def generate_many(arguments: argparse.Namespace, given: Mapping[str, Any]) -> int:
    """Complete the prompts of a file.

    Args:
        given: sampling parameters of all that do not say their own.

    Returns:
        The exit code: 1 if a request failed.
    """
    words = [*filter(None, [arguments.model]), *arguments.words]
    if len(words) > 1:
        raise ParamError("prompts", f"takes the place of the prompt, but {words[-1][:60]!r} is one")
    if arguments.echo:
        raise ParamError("echo", "is for one prompt; with --prompts each object has its own")
    lines = _read(arguments.prompts)
    for line in lines:  # before a model is loaded in vain
        with _in_line(line.number):
            SamplingParams().with_changes(**{**given, **line.sampling})
    if arguments.output is not None and not can_write(Path(arguments.output)):
        raise ParamError("output", f"cannot write {arguments.output!r}")
    done = _numbers_in(arguments.output)
    left = [line for line in lines if line.number not in done]
    if not left:
        return 0

    from kvik.llm import LLM, BatchProgress  # brings in torch

    failed = 0
    with LLM(**engine_options(arguments, words[0] if words else "")) as llm:
        if arguments.verbose:
            say_decisions(llm.resolved)
        prompts, params = _requests(llm, left, given)
        outputs = _begin(llm, left, prompts, params)
        model = llm.resolved.runner.model_path
        with _writing(arguments.output) as write, BatchProgress(len(left), None) as bar:
            for index, output in outputs:
                found = {"line": left[index].number, **as_json(output, model)}
                write(json.dumps(found, ensure_ascii=False))
                bar.finished(output)
                failed += any(one.finish_reason == "error" for one in output.outputs)
    return 1 if failed else 0


def _requests(
    llm: LLM, lines: Sequence[Line], given: Mapping[str, Any]
) -> tuple[list[Prompt], list[SamplingParams]]:
    prompts: list[Prompt] = []
    for line in lines:
        with _in_line(line.number):
            if line.prompt is not None:
                prompts.append(line.prompt)
            else:
                text = llm.render_chat(line.messages or ())
                prompts.append(llm.tokenizer.encode(text, False))
    defaults = llm.default_params.with_changes(**given)
    return prompts, [defaults.with_changes(**line.sampling) for line in lines]


def _begin(
    llm: LLM, lines: Sequence[Line], prompts: list[Prompt], params: list[SamplingParams]
) -> Iterator[tuple[int, RequestOutput]]:
    """Check all requests, and return the iterator over their outputs."""
    try:
        return llm.as_completed(prompts, params, priority=[line.priority for line in lines])
    except KvikError:
        for line, prompt, one in zip(lines, prompts, params, strict=True):
            with _in_line(line.number):
                llm.as_completed([prompt], one, priority=line.priority)
        raise


def _read(path: str) -> list[Line]:
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        texts = data.decode("utf-8").splitlines()
    except OSError as error:
        raise ParamError("prompts", f"{path!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ParamError("prompts", f"{path!r} must be UTF-8 text") from None
    found = [_line(number, text) for number, text in enumerate(texts, 1) if text.strip()]
    if not found:
        raise ParamError("prompts", f"{path!r} has no prompt")
    return found


def _line(number: int, text: str) -> Line:
    with _in_line(number):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ParamError("prompts", f"must be JSON: {error}") from None
        if not isinstance(value, dict):
            value = {"prompt": value}
        prompt, messages = value.get("prompt"), value.get("messages")
        if (prompt is None) == (messages is None):
            raise ParamError("prompts", "needs either prompt or messages")
        if prompt is not None and not isinstance(prompt, str | list):
            raise ParamError(
                "prompt", f"must be a text or a list of token ids, not {shown(prompt)}"
            )
        priority = value.get("priority", 0)
        sampling = {name: value[name] for name in value if name not in OWN}
        return Line(number, prompt, messages, priority, sampling)


@contextmanager
def _in_line(number: int) -> Iterator[None]:
    """Name the line in errors."""
    try:
        yield
    except KvikError as error:
        message = error.message if error.field == "prompts" else str(error)
        raise ParamError("prompts", f"line {number}: {message}") from None


def _numbers_in(path: str | None) -> set[int]:
    """Return the lines that an output has already; a torn last line is cut off."""
    if path is None or not Path(path).exists():
        return set()
    found, whole = set(), 0
    with open(path, "rb+") as file:
        for text in file:
            number = re.match(rb'\{"line": (\d+), .*\}\n', text)
            if number is not None:
                found.add(int(number[1]))
                whole += len(text)
            elif text.endswith(b"\n") or not b'{"line": '.startswith(text[:9]):
                raise ParamError("output", f"{path!r} exists, and is no output of --prompts")
        os.ftruncate(file.fileno(), whole)
    return found


@contextmanager
def _writing(path: str | None) -> Iterator[Callable[[str], None]]:
    """Yield what writes a line at once, to the end of a file or to standard output."""
    if path is None:
        yield partial(say, flush=True)
        return
    with open(path, "a", encoding="utf-8") as file:
        yield partial(print, file=file, flush=True)
