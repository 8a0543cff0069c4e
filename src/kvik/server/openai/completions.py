"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import TokenLogprobs
from kvik.engine.output import CompletionOutput, RequestOutput, TextDelta
from kvik.errors import ParamError
from kvik.server.errors import rename_fields
from kvik.server.openai.answers import (
    Chunks,
    PromptLogprobs,
    ResponseHead,
    TokenNames,
    Usage,
    finite,
    usage_of,
)
from kvik.server.openai.requests import (
    GenerationFields,
    Logprobs,
    Prompt,
    SinglePrompt,
    all_prompt_ids,
    asked_tokens,
    check_choices,
    check_logprobs,
    check_output_fits,
    check_stream,
    generation_request,
    kept_tokens,
    limit_of,
    sampling_changes,
    split_prompts,
)
from kvik.server.responses import (
    HOLE,
    ResponseFormat,
    Template,
    encode_in_chunks,
    event,
    generation_response,
    offload,
    start_all,
)
from kvik.server.route import caller_of, post, routes_of
from kvik.server.server import Server
from kvik.server.texts import Texts
from kvik.server.unhonoured import SAMPLING, Table
from kvik.text.detokenizer import Detokenizer
from kvik.text.tokenizer import Tokenizer


class CompletionRequest(GenerationFields, kw_only=True):
    """Texts to continue."""

    prompt: Prompt
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Logprobs | None = None
    best_of: Any = None  # equal to `n`


COMPLETION: Table = {
    **SAMPLING,
    "top_logprobs": ((), "give logprobs"),
    "prompt_embeds": ((), "prompts are text or token ids"),
    **dict.fromkeys(("messages", "tools"), (([],), "it is for /v1/chat/completions")),
}


class CompletionLogprobs(Struct):
    """One entry per token; the first token of a prompt has no log probability."""

    text_offset: list[int]  # where in `text` each token begins, in characters
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """A response, or one chunk of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str


@post("/v1/completions", COMPLETION, answer=Completion, note="Continue texts.")
async def completions(server: Server, request: Request, body: CompletionRequest) -> Response:
    """Continue one text or many."""
    model, defaults = server.served(body.model)
    params = completion_params(body, defaults)
    inputs = split_prompts("prompt", body.prompt)
    name, max_tokens = asked_tokens(body)
    keep = kept_tokens(server, body.truncate_prompt_tokens, params.max_tokens)
    several = "n" if len(inputs) == 1 else "prompt"
    check_choices(several, len(inputs), params.n)
    tenant = caller_of(request).tenant
    server.generations.check_capacity(tenant, len(inputs) * params.n, several)
    texts = server.texts.of(tenant)
    if body.suffix:
        ids, params = await _infilled(texts, inputs, body, params)
    else:
        ids = await all_prompt_ids(texts, inputs, body.add_special_tokens, keep)
    prompts = list(ids.values())
    for field in ids:
        with rename_fields(prompt=field):
            check_output_fits(server, len(ids[field]), max_tokens, name)
    of_prompt = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    check_logprobs(server, prompts, params, of_prompt, "logprobs")
    with rename_fields(tokens="echo"):
        num_echoed = sum(map(len, prompts)) if body.echo else 0
        shown = list(inputs.values()) if keep is None else prompts
        echoes = await offload(
            num_echoed, lambda: [_echo(server, body, prompt) for prompt in shown]
        )
    with rename_fields(max_tokens=name):
        requests = [generation_request(body, ids[field], params, field) for field in ids]
        generations = await start_all(server, request, requests, stream=body.stream)
    head = ResponseHead(f"cmpl-{generations[0].request_id}", model, generations[0].created)
    form = CompletionFormat(head, body, server.texts.tokenizer, prompts, echoes)
    return await generation_response(request, generations, form, body.stream)


async def _infilled(
    texts: Texts,
    prompts: Mapping[str, SinglePrompt],
    body: CompletionRequest,
    params: SamplingParams,
) -> tuple[dict[str, list[int]], SamplingParams]:
    """Return the token ids of prompts before a suffix, and the parameters of their answers."""
    contradicts = {
        "echo": bool(body.echo),
        "truncate_prompt_tokens": body.truncate_prompt_tokens is not None,
        "add_special_tokens": body.add_special_tokens is False,
    }
    for name in filter(contradicts.get, contradicts):
        raise ParamError(name, "cannot be combined with suffix")
    ids, changed = dict[str, list[int]](), params
    for field, prompt in prompts.items():
        if not isinstance(prompt, str):
            raise ParamError(field, "must be a text if there is a suffix")
        with rename_fields(prompt=field):
            ids[field], changed, _ = await texts.infill(prompt, body.suffix or "", params)
    return ids, changed


def _echo(server: Server, body: CompletionRequest, prompt: str | Sequence[int]) -> str:
    """Return the text of the prompt that is echoed before its completions."""
    if not body.echo:
        return ""
    if isinstance(prompt, str):
        return prompt
    return server.texts.decode(prompt, body.skip_special_tokens is not False)


COMPLETION_TOKENS = 16  # default of the API


def completion_params(body: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Return the sampling parameters of a body.

    `max_tokens` may be 0 with `echo`: the prompt is read, and scored if it asks for `logprobs`.

    Raises:
        ParamError: a value is impossible, or nothing that the engine honours.
    """
    check_stream(body)
    n = body.n or 1
    if body.best_of is not None and (type(body.best_of) is not int or body.best_of != n):
        raise ParamError("best_of", f"is not supported, unless it equals n ({n})")
    name, max_tokens = asked_tokens(body)
    if max_tokens == 0 and not (body.echo and n == 1):
        raise ParamError(name, "must be at least 1, or 0 with echo and n = 1")
    changes = sampling_changes(body)
    changes["max_tokens"] = COMPLETION_TOKENS if max_tokens is None else limit_of(max_tokens)
    changes["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        num_top = max(body.logprobs, body.prompt_logprobs or 0)
        changes["prompt_logprobs"] = num_top
    elif max_tokens == 0 and body.prompt_logprobs is None:
        changes["prompt_logprobs"] = 0  # makes the engine process the prompt; not shown
    of_prompt = "echo" if body.prompt_logprobs is None else "prompt_logprobs"
    with rename_fields(prompt_logprobs=of_prompt):
        return defaults.with_changes(**changes)


class CompletionFormat(ResponseFormat):
    """The `ResponseFormat` of completions; choices are in the order of their prompts.

    Args:
        prompts: token ids of each prompt.
        echoes: the text of each prompt, shown before its completions; "" unless `echo`.
    """

    def __init__(
        self,
        head: ResponseHead,
        body: CompletionRequest,
        tokenizer: Tokenizer | None,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str],
    ) -> None:
        num_tokens = sum(map(len, prompts))
        self._chunks = Chunks(head, Completion, body.stream_options, num_tokens)
        self._names = TokenNames(tokenizer, by_id=bool(body.return_tokens_as_token_ids))
        self._n = body.n or 1
        self._prompts = prompts
        self._echoes = echoes
        self._num_top = body.logprobs
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._token_ids = bool(body.return_token_ids)
        self._echo_logprobs = bool(body.echo) and body.logprobs is not None
        self._skip_special = body.skip_special_tokens is not False
        self._templates: dict[int, Template] = {}  # by choice, once it has begun
        self._tokens: dict[int, CompletionTokens] = {}  # by choice
        self._of_prompts: dict[int, list[TokenLogprobs | None]] = {}  # logprobs, by position

    def complete(self, outputs: Sequence[RequestOutput]) -> Completion:
        choices = [
            self._choice(position, output, completion)
            for position, output in enumerate(outputs)
            for completion in output.outputs
        ]
        answer: Completion = self._chunks.chunk(choices, usage_of(outputs))
        return answer

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        return self._chunks.end(outputs)

    def _choice(
        self, position: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice:
        of_prompt: Sequence[TokenLogprobs | None] = output.prompt_logprobs or []
        logprobs = None
        if self._num_top is not None:
            if self._echo_logprobs:
                logprobs = self._of_echo(position, of_prompt)
            tokens = self._completion_tokens(position)
            logprobs = tokens.show(completion.token_ids, completion.logprobs or [], logprobs)
        with_prompt = self._prompt_logprobs and output.prompt_logprobs is not None
        return CompletionChoice(
            index=position * self._n + completion.index,
            text=self._echoes[position] + completion.text,
            logprobs=logprobs,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            prompt_logprobs=self._names.prompt(of_prompt) if with_prompt else UNSET,
            token_ids=completion.token_ids if self._token_ids else UNSET,
            prompt_token_ids=self._prompt_ids(position),
        )

    def events(self, position: int, delta: TextDelta) -> Iterator[bytes]:
        index = position * self._n + delta.index
        if delta.prompt_logprobs is not None:  # only the first completion of a prompt has them
            self._of_prompts[position] = delta.prompt_logprobs
        self._chunks.count(len(delta.token_ids))
        if index not in self._templates:
            self._templates[index] = Template(self._chunks.chunk([CompletionChoice(index, HOLE)]))
            first = self._first_choice(index, position)
            if first is not None:
                yield event(encode_in_chunks(self._chunks.of(first)))
        logprobs = None
        if self._num_top is not None and delta.token_ids:
            if index not in self._tokens:
                self._tokens[index] = self._completion_tokens(position)
            # There are none of what another server has sent, which only moves offsets.
            of_tokens: Sequence[TokenLogprobs | None] = delta.logprobs or ()
            of_tokens = of_tokens or [None] * len(delta.token_ids)
            logprobs = self._tokens[index].show(delta.token_ids, of_tokens)
        token_ids = delta.token_ids if self._token_ids and delta.token_ids else UNSET
        if logprobs is not None or token_ids or (delta.text and self._chunks.with_usage):
            yield self._chunks.event(
                CompletionChoice(index, delta.text, logprobs, token_ids=token_ids)
            )
        elif delta.text:
            yield self._templates[index].fill(delta.text)
        if delta.finish_reason is not None:
            yield self._chunks.event(
                CompletionChoice(
                    index, "", finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
                )
            )

    def _first_choice(self, index: int, position: int) -> CompletionChoice | None:
        """Return the part of the prompt that a stream shows before a completion, if any."""
        echo = self._echoes[position]
        if not (echo or self._echo_logprobs or self._prompt_logprobs or self._token_ids):
            return None
        logprobs = self._of_prompts.get(position, [])
        return CompletionChoice(
            index,
            echo,
            logprobs=self._of_echo(position, logprobs) if self._echo_logprobs else None,
            prompt_logprobs=self._names.prompt(logprobs) if self._prompt_logprobs else UNSET,
            prompt_token_ids=self._prompt_ids(position),
        )

    def _prompt_ids(self, position: int) -> list[int] | UnsetType:
        return list(self._prompts[position]) if self._token_ids else UNSET

    def _of_echo(
        self, position: int, logprobs: Sequence[TokenLogprobs | None]
    ) -> CompletionLogprobs:
        """Return the log probabilities of an echoed prompt."""
        top, echo = self._num_top or 0, self._echoes[position]
        tokens = CompletionTokens(self._names, top, self._skip_special, (), echo=echo)
        return tokens.show(self._prompts[position], logprobs)

    def _completion_tokens(self, position: int) -> CompletionTokens:
        prompt, offset = self._prompts[position], len(self._echoes[position])
        top = self._num_top or 0
        return CompletionTokens(self._names, top, self._skip_special, prompt, offset)


class CompletionTokens:
    """Builds the `CompletionLogprobs` of one completion, token by token.

    Args:
        num_top: number of alternatives to show at each position; more may have been computed.
        skip_special: whether special tokens are left out of the text.
        prompt_ids: the tokens before the completion.
        offset: characters before it.
        echo: the text of the tokens if they are a prompt. As the caller gives it, it has special
            tokens, except those that the tokenizer adds.
    """

    def __init__(
        self,
        names: TokenNames,
        num_top: int,
        skip_special: bool,
        prompt_ids: Sequence[int],
        offset: int = 0,
        echo: str = "",
    ) -> None:
        self._names = names
        self._echo = echo
        self._num_top = num_top
        self._offset = offset
        self._text: Detokenizer | None = None
        if names.tokenizer is not None:
            self._text = names.tokenizer.new_stream(prompt_ids, skip_special)

    def show(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        before: CompletionLogprobs | None = None,
    ) -> CompletionLogprobs:
        """Return the next tokens, after those of `before`; `logprobs` has one entry for each."""
        shown = before or CompletionLogprobs([], [], [], [] if self._num_top else None)
        for token, entry in zip(token_ids, logprobs, strict=True):
            shown.text_offset.append(self._offset)
            shown.tokens.append(self._names.name(token, "bytes:"))
            shown.token_logprobs.append(None if entry is None else finite(entry.logprob))
            if shown.top_logprobs is not None:
                shown.top_logprobs.append(None if entry is None else self._top(entry))
            self._offset += self._width(token)
        return shown

    def _width(self, token: int) -> int:
        """Return how many characters the next token adds to the text."""
        tokenizer = self._names.tokenizer
        if tokenizer is None or self._text is None:
            return 0
        width = len(self._text.push([token]))
        if self._echo and token in tokenizer.special_ids:
            special = tokenizer.token(token)
            return len(special) if self._echo.startswith(special, self._offset) else 0
        return width

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return log probabilities by token text, including the token itself. If several tokens
        have the same text, the most likely one counts."""
        by_text: dict[str, float] = {}
        for token, value in entry.top[: self._num_top]:
            by_text.setdefault(self._names.name(token, "bytes:"), finite(value))
        by_text.setdefault(self._names.name(entry.token_id, "bytes:"), finite(entry.logprob))
        return by_text


routes = routes_of(completions)
