"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import TokenLogprobs
from kvik.engine.output import CompletionOutput, RequestOutput, TextDelta
from kvik.errors import ParamError
from kvik.server.body import read_body
from kvik.server.errors import rename_fields
from kvik.server.exchange import caller_of, trace_parent_of
from kvik.server.openai.answers import (
    FINGERPRINT,
    CompletionLogprobs,
    CompletionTokens,
    PromptLogprobs,
    ResponseHead,
    TokenNames,
    Usage,
    usage_of,
    usage_so_far,
)
from kvik.server.openai.fields import Generating, Logprobs, Prompt, limit_of
from kvik.server.openai.requests import (
    SinglePrompt,
    all_prompt_ids,
    asked_tokens,
    check_choices,
    check_logprobs,
    check_output_fits,
    check_stream,
    generation_request,
    num_logprobs,
    sampling_changes,
    split_prompts,
)
from kvik.server.responses import (
    DONE,
    StreamReply,
    Template,
    degraded_header,
    encode_in_chunks,
    event,
    json_event,
    large_response,
    offload,
    wait_for_outputs,
)
from kvik.server.route import Route
from kvik.server.server import Server
from kvik.server.unhonoured import SAMPLING, Table


class CompletionRequest(Generating, kw_only=True):
    """Texts to go on with."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Logprobs | None = None
    best_of: Any = None  # equal to `n`


COMPLETION: Table = {
    **SAMPLING,
    "max_completion_tokens": ((), "give max_tokens"),
    "top_logprobs": ((), "give logprobs"),
    "suffix": (("",), "insertion is not supported"),
    "prompt_embeds": ((), "prompts are text or token ids"),
}


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(Struct, kw_only=True):
    """An answer, or a chunk of a stream of them."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str


async def completions(server: Server, request: Request) -> Response:
    """Go on with one text or many."""
    body = await read_body(request, CompletionRequest, COMPLETION)
    return await answer_completions(server, request, body)


async def answer_completions(server: Server, request: Request, body: CompletionRequest) -> Response:
    """The same, once the body is read."""
    server.check_model(body.model)
    params = completion_params(body, server.default_params)
    given = split_prompts("prompt", body.prompt)
    check_choices("n" if len(given) == 1 else "prompt", len(given), params.n)
    tenant = caller_of(request).tenant
    server.generations.check_room(tenant, len(given) * params.n)
    ids = await all_prompt_ids(server.texts.of(tenant), given, body.add_special_tokens)
    prompts = list(ids.values())
    name, asked = asked_tokens(body)
    for field in ids:
        with rename_fields(prompt=field):
            check_output_fits(server, len(ids[field]), asked, name)
    of_prompt = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
    check_logprobs(server, prompts, params, of_prompt, "logprobs")
    with rename_fields(tokens="echo"):
        num_echoed = sum(map(len, prompts)) if body.echo else 0
        echoes = await offload(
            num_echoed, lambda: [_echo(server, body, one) for one in given.values()]
        )
    wishes = [generation_request(body, ids[field], params, field) for field in ids]
    streaming = bool(body.stream)
    with rename_fields(max_tokens=name):
        generations = await server.generations.start_all(
            wishes, tenant, streaming=streaming, trace_parent=trace_parent_of(request)
        )
    shape = CompletionFormat(
        ResponseHead(f"cmpl-{generations[0].request_id}", server.model_name),
        body,
        TokenNames(server.texts.tokenizer),
        prompts,
        echoes,
    )
    if streaming:
        return StreamReply(generations, CompletionStream(shape, body))
    finished = await wait_for_outputs(request, generations)
    answer = await large_response(sum(map(num_logprobs, finished)), lambda: shape.whole(finished))
    answer.headers.update(degraded_header(generations))
    return answer


def _echo(server: Server, body: CompletionRequest, prompt: SinglePrompt) -> str:
    """What stands before the completions of a prompt."""
    if not body.echo:
        return ""
    if isinstance(prompt, str):
        return prompt
    return server.texts.decode(prompt, body.skip_special_tokens is not False)


COMPLETION_TOKENS = 16  # of a completion that does not say; as the API has it


def completion_params(body: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """`max_tokens` 0 only with `echo`: the prompt is read, and scored if `logprobs` are wanted.

    Raises:
        ParamError: a value is impossible, or nothing that the engine honours.
    """
    check_stream(body)
    n = body.n or 1
    if body.best_of is not None and (type(body.best_of) is not int or body.best_of != n):
        raise ParamError("best_of", f"is not supported, unless it equals n ({n})")
    name, asked = asked_tokens(body)
    if asked == 0 and not (body.echo and n == 1):
        raise ParamError(name, "must be at least 1, or 0 with echo and n = 1")
    changes = sampling_changes(body)
    changes["max_tokens"] = COMPLETION_TOKENS if asked is None else limit_of(asked)
    changes["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        wanted = max(body.logprobs, body.prompt_logprobs or 0)
        changes["prompt_logprobs"] = wanted
    elif asked == 0 and body.prompt_logprobs is None:
        changes["prompt_logprobs"] = 0  # for the engine's sake; nobody sees them
    return defaults.with_changes(**changes)


_HOLE = "\ue000text\ue000"


class CompletionFormat:
    """How the completions of one request are shown, in one piece or in many.

    Args:
        prompts: token ids of each.
        echoes: text of each, to stand before its completions; "" unless `echo`.
    """

    def __init__(
        self,
        heading: ResponseHead,
        body: CompletionRequest,
        names: TokenNames,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str],
    ) -> None:
        self.heading = heading
        self.n = body.n or 1
        self.prompts = prompts
        self.echoes = echoes
        self.logprobs = body.logprobs
        self.prompt_logprobs = body.prompt_logprobs
        self._echo = bool(body.echo)
        self._names = names
        self._skip_special = body.skip_special_tokens is not False

    def whole(self, outputs: Sequence[RequestOutput]) -> Completion:
        """Of finished requests; the choices of the first prompt come first."""
        choices = [
            self._choice(position, output, one)
            for position, output in enumerate(outputs)
            for one in output.completions
        ]
        return self.completion(choices, usage_of(outputs))

    def completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            id=self.heading.id,
            created=self.heading.created,
            model=self.heading.model,
            choices=choices,
            usage=usage,
            system_fingerprint=FINGERPRINT,
        )

    def tokens(self, position: int) -> CompletionTokens:
        """Of one completion of a prompt, in the order in which they are shown."""
        prompt = self.prompts[position]
        shown = CompletionTokens(self._names, self.logprobs or 0, self._skip_special, prompt)
        shown.skip(len(self.echoes[position]))
        return shown

    def _choice(
        self, position: int, output: RequestOutput, one: CompletionOutput
    ) -> CompletionChoice:
        asked = self.prompt_logprobs is not None and output.prompt_logprobs is not None
        return CompletionChoice(
            index=position * self.n + one.index,
            text=self.echoes[position] + one.text,
            logprobs=None if self.logprobs is None else self._logprobs(position, output, one),
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
            prompt_logprobs=self._names.prompt(output.prompt_logprobs or []) if asked else UNSET,
        )

    def before(
        self, index: int, position: int, logprobs: Sequence[TokenLogprobs | None] | None
    ) -> CompletionChoice | None:
        """What a stream shows of the prompt before a completion of it, if anything was asked for.

        Args:
            logprobs: of the prompt's tokens, if they were computed.
        """
        echoed = self._echo and self.logprobs is not None
        asked = self.prompt_logprobs is not None
        if not (self.echoes[position] or echoed or asked):
            return None
        return CompletionChoice(
            index,
            self.echoes[position],
            logprobs=self._read(position, logprobs or []) if echoed else None,
            prompt_logprobs=self._names.prompt(logprobs or []) if asked else UNSET,
        )

    def _read(self, position: int, logprobs: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """Of an echoed prompt."""
        shown = CompletionTokens(self._names, self.logprobs or 0, self._skip_special, ())
        return shown.show(self.prompts[position], logprobs)

    def _logprobs(
        self, position: int, output: RequestOutput, one: CompletionOutput
    ) -> CompletionLogprobs:
        own = self.tokens(position).show(one.token_ids, one.logprobs or [])
        if not self._echo:
            return own
        return _both(self._read(position, output.prompt_logprobs or []), own)


class CompletionStream:
    """Deltas -> events."""

    def __init__(self, shape: CompletionFormat, body: CompletionRequest) -> None:
        options = body.stream_options
        self._shape = shape
        self._final_usage = options is not None and bool(options.include_usage)
        self._each_usage = (
            self._final_usage and options is not None and bool(options.continuous_usage_stats)
        )
        self._num_prompt_tokens = sum(len(prompt) for prompt in shape.prompts)
        self._num_tokens = 0
        self._templates: dict[int, Template] = {}  # of the completions that have begun
        self._tokens: dict[int, CompletionTokens] = {}
        self._prompts: dict[int, list[TokenLogprobs | None]] = {}  # log probabilities, by position

    def begin(self) -> bytes:
        return b""

    def grow(self, position: int, deltas: Sequence[TextDelta]) -> bytes:
        return b"".join(one for delta in deltas for one in self._events(position, delta))

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        usage = b""
        if self._final_usage:
            usage = json_event(self._shape.completion([], usage_of(outputs)))
        return usage + DONE

    def _events(self, position: int, delta: TextDelta) -> Iterator[bytes]:
        index = position * self._shape.n + delta.index
        if delta.prompt_logprobs is not None:  # the others of a prompt begin after the first one
            self._prompts[position] = delta.prompt_logprobs
        self._num_tokens += len(delta.token_ids)
        if index not in self._templates:
            self._templates[index] = self._template(index)
            before = self._shape.before(index, position, self._prompts.get(position))
            if before is not None:
                yield event(encode_in_chunks(self._shape.completion([before], self._usage())))
        logprobs = self._logprobs(position, index, delta)
        if logprobs is not None or (delta.text and self._each_usage):
            yield self._event(CompletionChoice(index, delta.text, logprobs))
        elif delta.text:
            yield self._templates[index].fill(delta.text)
        if delta.finish_reason is not None:
            yield self._event(
                CompletionChoice(
                    index,
                    "",
                    finish_reason=delta.finish_reason,
                    stop_reason=delta.stop_reason,
                )
            )

    def _logprobs(self, position: int, index: int, delta: TextDelta) -> CompletionLogprobs | None:
        if self._shape.logprobs is None or not delta.logprobs:
            return None
        if index not in self._tokens:
            self._tokens[index] = self._shape.tokens(position)
        return self._tokens[index].show(delta.token_ids, delta.logprobs)

    def _template(self, index: int) -> Template:
        usage = None if self._final_usage else UNSET
        chunk = self._shape.completion([CompletionChoice(index, _HOLE)], usage)
        return Template(chunk, [_HOLE])

    def _event(self, choice: CompletionChoice) -> bytes:
        return json_event(self._shape.completion([choice], self._usage()))

    def _usage(self) -> Usage | UnsetType | None:
        if self._each_usage:
            return usage_so_far(self._num_prompt_tokens, self._num_tokens)
        return None if self._final_usage else UNSET


def _both(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    top = None
    if first.top_logprobs is not None and second.top_logprobs is not None:
        top = first.top_logprobs + second.top_logprobs
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        top,
    )


def routes(server: Server) -> list[Route]:
    return [
        Route(
            "/v1/completions",
            partial(completions, server),
            body=CompletionRequest,
            answer=Completion,
            note="Go on with texts.",
        ),
    ]
