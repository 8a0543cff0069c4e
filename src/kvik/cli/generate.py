"""`kvik generate [MODEL] PROMPT`: complete one prompt, streaming, or the prompts of a file."""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvik.cli.flags import (
    OF_SERVERS,
    Parser,
    add_engine_flags,
    add_sampling_flags,
    engine_options,
    given_sampling_options,
)
from kvik.cli.report import as_json, say_decisions, stats_line
from kvik.cli.terminal import say
from kvik.config.config import EngineConfig
from kvik.config.model_source import names_model
from kvik.core.sampling_params import SamplingParams
from kvik.errors import KvikError, ParamError, shown
from kvik.files import can_write, lock, writing_whole
from kvik.prompts import Infill, PlainPrompt, one_prompt

if TYPE_CHECKING:
    from kvik.engine.output import RequestOutput
    from kvik.llm import LLM
    from kvik.prompts import Prompt

MAX_PROMPT_BYTES = 64 << 20


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "generate",
        "[MODEL] PROMPT",
        "Complete a prompt, or the prompts of a file (--prompts FILE instead of PROMPT). The text "
        "is streamed to standard output.",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="[MODEL] PROMPT",
        help="a folder, GGUF file or hub id (left out or '': the bundled model), and the prompt; - "
        "reads it from standard input. A single argument is the prompt; it is refused if it names "
        "a local file or folder, or is one word with a / in it, since the prompt is missing then",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="the model; the argument is then the prompt"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in place of text")
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help="complete many prompts: each line is a JSON string, list of token ids or object with "
        "prompt (and suffix) or messages, priority and sampling parameters, or each is a request "
        "of OpenAI's Batch API; - is standard input. One JSON object is written for each, as it "
        "finishes",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="with --prompts: file for the results (- is standard output, the default). Results "
        "already in it are kept, but for failed ones, which are computed again",
    )
    parser.add_argument(
        "--suffix",
        metavar="TEXT",
        help="text after a gap that begins after the prompt: a model of code fills it",
    )
    parser.add_argument("--echo", action="store_true", help="print the prompt before the text")
    parser.add_argument("--verbose", action="store_true", help="print each decision and its reason")
    add_sampling_flags(parser)
    add_engine_flags(parser, left_out=["chat_template", *OF_SERVERS])
    return parser


def run(arguments: argparse.Namespace) -> int:
    sampling = given_sampling_options(arguments)
    SamplingParams().with_changes(**sampling)  # refuse impossible values before anything is loaded
    if arguments.prompts is not None:
        return generate_many(arguments, sampling)
    if arguments.output is not None:
        raise ParamError("output", "is for --prompts FILE")
    model, text = _model_and_prompt(arguments.words, arguments.model)
    prompt: Prompt = text if arguments.suffix is None else Infill(text, arguments.suffix)
    if not arguments.json:
        for name in ("logprobs", "prompt_logprobs"):
            if sampling.get(name) is not None:
                raise ParamError(name, "is shown with --json only")

    from kvik.launch import check_tokenizer, resolve_config
    from kvik.llm import LLM
    from kvik.model_files import model_files
    from kvik.text.infill import Infiller

    options = engine_options(arguments, model)
    resolved = resolve_config(EngineConfig(**options))  # refuse before weights are loaded
    check_tokenizer(resolved)
    if arguments.suffix is not None:
        Infiller(model_files(Path(resolved.runner.model_path)).tokenizer())
    with LLM(**options) as llm:
        if arguments.verbose:
            say_decisions(llm.resolved)
        params = llm.default_params.with_changes(**sampling)
        if arguments.json:
            (output,) = llm.generate([prompt], params)
            _say_json(as_json(output, llm.resolved.runner.model_path))
        else:
            if arguments.echo:
                say(text, end="", flush=True)
            output = _stream(llm, prompt, params) if params.n == 1 else _all(llm, prompt, params)
            say(stats_line(output), error=True)
            if "max_tokens" not in sampling and (note := _cut_note(output, params)):
                say(note, error=True)
    return _exit_code(output)


def _stream(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    last = ""
    with llm.stream(prompt, params) as stream:
        for delta in stream:
            if delta.text:
                say(delta.text, end="", flush=True)
                last = delta.text
    if not last.endswith("\n"):
        say(flush=True)
    assert stream.output is not None
    return stream.output


def _all(llm: LLM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    """Generate several completions and print them one after another."""
    (output,) = llm.generate([prompt], params)
    for completion in output.outputs:
        say(f"[{completion.index}]{completion.text}", flush=True)
    return output


def _cut_note(output: RequestOutput, params: SamplingParams) -> str | None:
    """Return a note on which limit cut the text, or None."""
    cut = [len(c.token_ids) for c in output.outputs if c.finish_reason == "length"]
    if not cut:
        return None
    if params.max_tokens in cut:
        return f"stopped at --max-tokens {params.max_tokens} (the default)"
    return "stopped at the end of the context (--max-model-len)"


def _exit_code(output: RequestOutput) -> int:
    errors = [c.error or "failed" for c in output.outputs if c.finish_reason == "error"]
    for error in errors:
        say(f"kvik: error: request: {error}", error=True)
    return 1 if errors else 0


def _model_and_prompt(words: list[str], named: str | None) -> tuple[str, str]:
    """Return (model, prompt). `named`: the model from the flag, if given."""
    words = words if named is None else [named, *words]
    if not words or (len(words) == 1 and named is not None):
        raise ParamError("prompt", "is missing: kvik generate [MODEL] PROMPT, or --prompts FILE")
    if len(words) > 2:
        raise ParamError("prompt", f"must be one argument (quote it), not {len(words) - 1}")
    model, prompt = words if len(words) == 2 else ("", words[0])
    if len(words) == 1 and prompt != "-" and names_model(prompt):
        raise ParamError(
            "prompt",
            f"is missing: {prompt[:60]!r} names a model; write kvik generate MODEL PROMPT, or "
            "kvik generate '' PROMPT if this is the prompt",
        )
    if prompt == "-":
        prompt = _read_standard_input()
    if not prompt:
        raise ParamError("prompt", "must not be empty")
    return model, prompt


def _read_standard_input() -> str:
    data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise ParamError("prompt", f"must be at most {MAX_PROMPT_BYTES >> 20} MiB")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ParamError("prompt", "must be UTF-8 text") from None
    return text.removesuffix("\n")  # the line end that `echo` adds


OWN = ("prompt", "suffix", "messages", "priority")  # fields that are not sampling parameters


@dataclass(frozen=True, slots=True)
class Line:
    """One prompt of the file."""

    number: int  # its line number, from 1
    prompt: PlainPrompt | None  # None if the line has messages
    messages: Sequence[Mapping[str, Any]] | None
    priority: int
    sampling: Mapping[str, Any]

    @property
    def question(self) -> tuple[str, object]:
        """The field of the result that repeats what is asked, and its value."""
        if self.prompt is None:
            return "messages", self.messages
        if isinstance(self.prompt, Infill):
            return "prompt", asdict(self.prompt)
        return "prompt" if isinstance(self.prompt, str) else "prompt_token_ids", self.prompt


def generate_many(arguments: argparse.Namespace, sampling: Mapping[str, Any]) -> int:
    """Complete the prompts of a file.

    Args:
        sampling: sampling parameters for lines that do not set their own.

    Returns:
        The exit code: 1 if a request failed.
    """
    words = [*filter(None, [arguments.model]), *arguments.words]
    if len(words) > 1:
        raise ParamError("prompts", f"replaces the prompt, but {words[-1][:60]!r} is also given")
    if arguments.suffix is not None:
        raise ParamError(
            "suffix", "is for a single prompt; with --prompts each object may have one"
        )
    if arguments.echo:
        raise ParamError(
            "echo", "is for a single prompt; with --prompts each object has its prompt"
        )
    texts = _read(arguments.prompts)
    path = None if arguments.output == "-" else arguments.output
    if path is not None and not can_write(Path(path)):
        raise ParamError("output", f"cannot write {path!r}")
    options = engine_options(arguments, words[0] if words else "")
    if _is_of_batch(texts[0][1]):
        if sampling:
            raise ParamError(next(iter(sampling)), "must be in the body of each line of a batch")
        return _answer_batch(texts, path, options, verbose=arguments.verbose)
    from kvik.launch import check_tokenizer, resolve_config
    from kvik.llm import LLM, batch_bar, check_priority

    config = EngineConfig(**options)
    lines = [_line(number, text) for number, text in texts]
    for line in lines:  # before the model is loaded
        with _in_line(line.number):
            SamplingParams().with_changes(**{**sampling, **line.sampling})
            check_priority(line.priority, config.policy)
    questions = {line.number: line.question for line in lines}
    with closing(ResultFile(path)) as results:
        done = results.done(b'{"line": ', rb"(\d+)", questions, _has_error)
        rest = [line for line in lines if line.number not in done]
        if not rest:
            return 0
        if not all(isinstance(line.prompt, list) for line in rest):
            check_tokenizer(resolve_config(config))

        failed = 0
        with LLM(**options) as llm:
            if arguments.verbose:
                say_decisions(llm.resolved)
            prompts, params = _requests(llm, rest, sampling)
            outputs = _begin(llm, rest, prompts, params)
            model = llm.resolved.runner.model_path
            with batch_bar(len(rest), None) as finished:
                for index, output in outputs:
                    line = rest[index]
                    result = {"line": line.number, **as_json(output, model)}
                    result.update([line.question])
                    results.write(result)
                    finished(output.num_output_tokens)
                    failed += _has_error(result)
    return _exit_code_of_batch(failed, len(rest))


def _answer_batch(
    texts: Sequence[tuple[int, str]], path: str | None, options: dict[str, Any], *, verbose: bool
) -> int:
    """Answer the lines of a batch file of OpenAI's API, and return the exit code."""
    from kvik.cli.openai_batch import answer_all, read_request  # imports the server
    from kvik.llm import batch_bar

    entries, numbers = [], dict[str, int]()
    for number, text in texts:
        with _in_line(number):
            entry = read_request(text)
            if (first := numbers.setdefault(entry.custom_id, number)) != number:
                reason = f"has the custom_id of line {first}, {shown(entry.custom_id)}"
                raise ParamError("prompts", reason)
        entries.append(entry)
    key = rb'\w+", "custom_id": ("(?:[^"\\]|\\.)*")'
    with closing(ResultFile(path)) as results:
        questions = {entry.custom_id: ("id", entry.id) for entry in entries}
        done = results.done(b'{"id": "batch_req_', key, questions, _is_refusal)
        rest = [entry for entry in entries if entry.custom_id not in done]
        if not rest:
            return 0
        failed = 0
        with batch_bar(len(rest), None) as finished:

            def answered(answer: dict[str, Any]) -> None:
                nonlocal failed
                results.write(answer)
                usage = answer["response"]["body"].get("usage") or {}
                finished(usage.get("completion_tokens", usage.get("output_tokens", 0)))
                failed += _is_refusal(answer)

            asyncio.run(answer_all(rest, options, answered, verbose=verbose))
    return _exit_code_of_batch(failed, len(rest))


def _exit_code_of_batch(failed: int, total: int) -> int:
    if failed:
        reasons = "their lines in the output say why"
        say(f"kvik: error: requests: {failed} of {total} failed; {reasons}", error=True)
    return 1 if failed else 0


def _requests(
    llm: LLM, lines: Sequence[Line], sampling: Mapping[str, Any]
) -> tuple[list[Prompt], list[SamplingParams]]:
    prompts: list[Prompt] = []
    for line in lines:
        with _in_line(line.number):
            if line.prompt is not None:
                prompts.append(line.prompt)
            else:
                text = llm.render_chat(line.messages or ())
                prompts.append(llm.tokenizer.encode(text, False))
    defaults = llm.default_params.with_changes(**sampling)
    return prompts, [defaults.with_changes(**line.sampling) for line in lines]


def _begin(
    llm: LLM, lines: Sequence[Line], prompts: list[Prompt], params: list[SamplingParams]
) -> Iterator[tuple[int, RequestOutput]]:
    """Check all requests, and return the iterator over their outputs."""
    try:
        return llm.as_completed(prompts, params, priority=[line.priority for line in lines])
    except KvikError:
        for line, prompt, sampling in zip(lines, prompts, params, strict=True):
            with _in_line(line.number):
                llm.as_completed([prompt], sampling, priority=line.priority)
        raise


def _read(path: str) -> list[tuple[int, str]]:
    """Return the lines that are not empty, with their numbers."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        texts = data.decode("utf-8-sig").split("\n")  # splitlines splits at U+2028 too
    except OSError as error:
        raise ParamError("prompts", f"{path!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ParamError("prompts", f"{path!r} must be UTF-8 text") from None
    lines = [(number, text) for number, text in enumerate(texts, 1) if text.strip()]
    if not lines:
        raise ParamError("prompts", f"{path!r} has no prompt")
    return lines


def _is_of_batch(text: str) -> bool:
    """Return whether a line is a request in the format of OpenAI's Batch API."""
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        return isinstance(value, dict) and ("custom_id" in value or value.keys() >= {"url", "body"})
    return False


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
        if "suffix" in value:
            prompt = {"prompt": prompt, "suffix": value["suffix"]}
        prompt = None if prompt is None else one_prompt(prompt)
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


def _has_error(result: Mapping[str, Any]) -> bool:
    return any(choice["finish_reason"] == "error" for choice in result.get("completions", ()))


def _is_refusal(answer: Mapping[str, Any]) -> bool:
    return bool(answer["response"]["status_code"] >= 400)


class ResultFile:
    """The output: an object a line, in a file, which is locked for other processes, or on standard
    output if `path` is None. A file is created by the first object."""

    def __init__(self, path: str | None) -> None:
        """
        Raises:
            ParamError: another process is writing the file.
        """
        self._path = path
        self._file: int | None = None  # descriptor
        self._is_new = path is not None and not os.path.lexists(path)
        if path is not None and os.path.isfile(path):
            self._file = self._open(path)

    def done(
        self,
        start: bytes,
        key: bytes,
        questions: Mapping[Any, tuple[str, object]],
        failed: Callable[[Mapping[str, Any]], bool],
    ) -> set[int | str]:
        """Return what identifies the lines already in the file; remove failed ones from it, and an
        incomplete last one.

        Args:
            start: of each object in the output.
            key: a pattern for what follows, whose group is what identifies the line, in JSON.
            questions: for each line, a field of its object and the value there, which tell whether
                the object answers the line as it is now.
            failed: whether an object of the output must be computed again.

        Raises:
            ParamError: the file is not an output of such lines, or of lines with these questions.
        """
        path = self._path
        if path is None or self._file is None:  # nothing, or a device or pipe
            return set()
        done, failures, size = set(), set(), 0
        whole_line = re.compile(re.escape(start) + key + rb", .*\}\n")
        no_output = f"{path!r} exists and is not an output of --prompts with such lines"
        with open(path, "rb") as file:
            for index, text in enumerate(file):
                if (match := whole_line.fullmatch(text)) is not None:
                    try:
                        line, result = json.loads(match[1]), json.loads(text)
                    except ValueError:  # damaged in a crash of the machine, for instance
                        raise ParamError("output", no_output) from None
                    size += len(text)
                    field, question = questions.get(line) or (None, None)
                    if failed(result):
                        failures.add(index)
                    elif field is None or result.get(field) == question:
                        done.add(line)
                    else:
                        message = f"answers another prompt than that of line {shown(line)}"
                        raise ParamError("output", f"{path!r} {message}; name another file")
                elif text.endswith(b"\n") or not start.startswith(text[: len(start)]):
                    raise ParamError("output", no_output)
        os.ftruncate(self._file, size)
        if failures:
            with writing_whole(Path(path)) as copy, open(path, "rb") as file:
                copy.writelines(text for index, text in enumerate(file) if index not in failures)
                os.dup2(copy.fileno(), self._file, inheritable=False)  # it is locked as well
        if done:  # perhaps with other options
            say(f"kvik: results kept from before in {path}: {len(done)}", error=True)
        return done

    def write(self, value: Mapping[str, Any]) -> None:
        """Write and flush an object.

        Raises:
            ParamError: another process has begun the file.
            OSError: it cannot be written, or the file was deleted.
        """
        path = self._path
        if path is None:
            _say_json(value)
            return
        if self._file is None:
            self._file = self._open(path)
        data = f"{json.dumps(value, ensure_ascii=False)}\n".encode()
        try:
            while data:
                data = data[os.write(self._file, data) :]
            if self._is_linked and not os.fstat(self._file).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "was deleted while it was written")
        except OSError as error:
            error.filename = path
            raise

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)

    def _open(self, path: str) -> int:
        """Open the file for appending, and lock it."""
        busy = ParamError("output", f"{path!r} is being written by another process")
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | (os.O_EXCL if self._is_new else 0)
        try:
            file = os.open(path, flags, 0o666)
        except FileExistsError:
            raise busy from None
        self._is_linked = os.fstat(file).st_nlink > 0  # /dev/fd may be a file without a name
        try:
            if stat.S_ISREG(os.fstat(file).st_mode):
                lock(file)
            if not os.path.samestat(os.fstat(file), os.stat(path)):  # replaced before it was locked
                raise BlockingIOError
        except BlockingIOError:
            os.close(file)
            raise busy from None
        except OSError:  # no locks on this file system
            pass
        return file


def _say_json(value: Mapping[str, Any]) -> None:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding)
    except UnicodeEncodeError:  # a "?" would make it another text
        text = json.dumps(value)
    say(text, flush=True)
