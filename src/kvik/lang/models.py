"""The interface of programs to a model: a local `LLM`, or a server by its URL."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Any

from kvik.core.sampling_params import MAX_N, PARAMETERS, SamplingParams
from kvik.errors import KvikError, ParamError, UnavailableError, shown
from kvik.llm import LLM
from kvik.remote_server import RemoteServer

Messages = Sequence[Mapping[str, str]]
Listener = Callable[[str], None]  # called with pieces of text as they are generated
SECONDS = 600.0  # longest silence of a server


@dataclass(frozen=True, slots=True)
class Continuation:
    """A generated text."""

    text: str
    token_ids: list[int]  # of the text, and possibly of the token that ended it
    finish_reason: str
    cut: bool  # a stop string ended it, so that the ids do not match the text


class LocalModel:
    """An `LLM` in this process; thread-safe, as `RemoteModel` with the same methods is."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return token ids, with special tokens around them or without."""
        return self._llm.tokenizer.encode(text, special)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return self._llm.tokenizer.decode(token_ids, skip_special_tokens=False)

    def render(self, messages: Messages) -> str:
        """Render a conversation with the chat template; return the prompt."""
        return self._llm.render_chat(messages)

    def generate(
        self, prompt: Sequence[int], params: Mapping[str, Any], listener: Listener | None
    ) -> Continuation:
        """Complete a prompt.

        Raises:
            KvikError: a parameter is impossible.
            RuntimeError: the engine failed.
        """
        checked = self._llm.default_params.with_changes(**params)
        with self._llm.stream(prompt, checked) as stream:
            for delta in stream:
                if listener is not None and delta.text:
                    listener(delta.text)
        assert stream.output is not None
        (output,) = stream.output.outputs
        if output.error is not None:
            raise RuntimeError(output.error)
        cut = isinstance(output.stop_reason, str)
        return Continuation(output.text, output.token_ids, output.finish_reason, cut)

    def score(self, prompts: Sequence[Sequence[int]], start: int) -> list[list[float]]:
        """Return the log probability of each token of each prompt, 0.0 for tokens before `start`
        and for the first token."""
        outputs = self._llm.score(list(prompts), start=start, progress=False)
        rows = [output.prompt_logprobs or [] for output in outputs]
        return [[0.0 if entry is None else entry.logprob for entry in row] for row in rows]


class RemoteModel:
    """A remote `kvik serve`.

    Args:
        url: with or without /v1. The key is the environment's KVIK_API_KEY.
    """

    def __init__(self, url: str) -> None:
        self._server = RemoteServer.at(url)

    def encode(self, text: str, *, special: bool) -> list[int]:
        body = {"prompt": text, "add_special_tokens": special}
        return list(self._ask("/tokenize", body)["tokens"])

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._ask("/detokenize", {"tokens": list(token_ids)})["prompt"])

    def render(self, messages: Messages) -> str:
        return str(self._ask("/apply-template", {"messages": list(messages)})["prompt"])

    def generate(
        self, prompt: Sequence[int], params: Mapping[str, Any], listener: Listener | None
    ) -> Continuation:
        checked = SamplingParams(**params)  # the server ignores names that it does not know
        options = {name: getattr(checked, name) for name in PARAMETERS if name in params}
        options["max_tokens"] = checked.max_tokens
        if checked.structured is not None:
            options["structured"] = checked.structured.to_mapping()
        body = {**options, "prompt": list(prompt), "return_token_ids": True, "stream": True}
        text, ids, finish, stop = "", list[int](), "", None
        for event in self._events("/v1/completions", body):
            for choice in event["choices"]:
                text += choice["text"]
                ids += choice.get("token_ids") or ()
                finish = choice["finish_reason"] or finish
                stop = choice.get("stop_reason", stop)
                if listener is not None and choice["text"]:
                    listener(choice["text"])
        return Continuation(text, ids, finish, isinstance(stop, str))

    def score(self, prompts: Sequence[Sequence[int]], start: int) -> list[list[float]]:
        rows = list[Sequence[dict[str, Any] | None]]()
        for first in range(0, len(prompts), MAX_N):  # a request has no more choices
            body = {
                "prompt": [list(item) for item in prompts[first : first + MAX_N]],
                "max_tokens": 0,
                "echo": True,
                "prompt_logprobs": 0,
                "prompt_logprobs_start": start,
            }
            choices = self._ask("/v1/completions", body)["choices"]
            rows += [item["prompt_logprobs"] for item in choices]
        # The entry of the token itself comes first.
        return [
            [0.0 if item is None else next(iter(item.values()))["logprob"] for item in row]
            for row in rows
        ]

    def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        with self._answer(path, body) as answer:
            return json.loads(answer.read())

    def _events(self, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
        with self._answer(path, body) as answer:
            for line in answer:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if line.startswith(b"data: "):
                    event = json.loads(data)
                    if "error" in event:
                        raise _error(event["error"], 500)
                    yield event
        raise UnavailableError("url", "the stream broke off")

    @contextmanager
    def _answer(self, path: str, body: Mapping[str, Any]) -> Iterator[HTTPResponse]:
        connection = self._server.connection(SECONDS)
        headers = {"Content-Type": "application/json", **self._server.headers}
        try:
            target = self._server.target(path)
            connection.request("POST", target, json.dumps(body).encode(), headers)
            with closing(connection.getresponse()) as answer:
                if answer.status != 200:
                    raise _refusal(answer)
                yield answer
        except (OSError, HTTPException) as error:
            raise UnavailableError("url", f"{self._server.url}: {error}") from None
        finally:
            connection.close()


ProgramModel = LocalModel | RemoteModel


def _refusal(answer: HTTPResponse) -> Exception:
    try:
        error = json.loads(answer.read())["error"]
    except (ValueError, KeyError, TypeError):
        error = {"message": f"the server answered {answer.status}"}
    return _error(error, answer.status)


def _error(error: Mapping[str, Any], status: int) -> Exception:
    message, field = str(error.get("message")), str(error.get("param") or "url")
    if field != "url":
        return ParamError(field, message.removeprefix(f"{field}: "))
    return RuntimeError(message) if status >= 500 else KvikError(field, message)


def model_of(model: LLM | str) -> ProgramModel:
    """Return the `ProgramModel` of an `LLM` or a URL; raise ParamError for anything else."""
    if isinstance(model, str):
        return RemoteModel(model)
    if isinstance(model, LLM):
        return LocalModel(model)
    raise ParamError("model", f"must be an LLM or the URL of a server, not {shown(model)}")
