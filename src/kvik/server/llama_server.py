"""POST /completion, /infill and /apply-template, and GET /props, as llama.cpp's `llama-server` has
them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from kvik import __version__
from kvik.core.sampling_params import PARAMETERS, SamplingParams
from kvik.engine.output import CompletionOutput, RequestOutput, TextDelta
from kvik.errors import ParamError
from kvik.server.errors import rename_fields
from kvik.server.generation import Generation, GenerationRequest
from kvik.server.openai.chat import CHAT
from kvik.server.openai.conversation import Messages, Variable, conversation_text
from kvik.server.openai.requests import (
    TO_THE_END,
    UNSHOWN,
    Limit,
    Name,
    adapter_field,
    aliased,
    limit_of,
    parameters_of,
    parameters_struct,
    prompt_ids,
    split_prompts,
)
from kvik.server.responses import (
    ResponseFormat,
    generation_response,
    json_event,
    json_response,
    start_all,
)
from kvik.server.route import caller_of, get, post, routes_of
from kvik.server.server import Server
from kvik.server.unhonoured import SAMPLING, Table, missing

DRAWN_SEED = -1  # llama.cpp's value for a random seed
NO_SLOT = -1
# Parameters that llama.cpp lacks, or has in a different form.
LEFT_OUT = ("max_tokens", *UNSHOWN)
_PARAMETERS: Any = parameters_struct(LEFT_OUT)


class LlamaCompletionRequest(_PARAMETERS, Struct, kw_only=True):  # type: ignore[misc]
    """A prompt to continue. null means absent: the model's own default."""

    prompt: Annotated[str | list[int], Meta(description="a text, or token ids")]
    model: Name | None = None
    stream: bool = False
    # 0: the prompt is only computed for the cache
    n_predict: Limit | None = None
    max_tokens: Limit | None = None  # another name of n_predict
    return_tokens: bool = False

    cache_prompt: bool | None = None  # prompts are cached in any case
    id_slot: Any = None  # the scheduler chooses


class OtherFile(Struct):
    """A part of another file, which may help."""

    text: str
    filename: str = ""


class LlamaInfillRequest(LlamaCompletionRequest, kw_only=True):
    """A gap to fill between two texts. `prompt` is the beginning of what fills it."""

    prompt: str = ""
    input_prefix: str
    input_suffix: str
    # the most relevant one last; the first ones are left out if not all fit (`truncated`)
    input_extra: list[OtherFile] = []


UNHONOURED: Table = {
    **SAMPLING,
    **missing(LlamaCompletionRequest.__struct_fields__),
    "logit_bias": (([], {}, False), "give it to /v1/completions"),
    "n_probs": ((0, False), "give logprobs to /v1/completions"),
}


# What editors send with every request, and other routes refuse.
OF_EDITORS = ("samplers", "n_indent", "t_max_predict_ms")
INFILL: Table = {name: row for name, row in UNHONOURED.items() if name not in OF_EDITORS}


class Timings(Struct, kw_only=True):
    """Times of one answer in milliseconds; the prompt's is the time to the first token."""

    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class LlamaText(Struct, kw_only=True):
    """A whole text or that of one event, with token counts so far."""

    index: int = 0
    content: str
    id_slot: int = NO_SLOT
    tokens_predicted: int
    tokens_evaluated: int


class LlamaCompletion(LlamaText, kw_only=True):
    """A finished text, or the last event of a stream, whose `content` is empty."""

    tokens: list[int]
    stop: bool = True
    model: str
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool = False
    stop_type: str
    stopping_word: str
    tokens_cached: int
    timings: Timings


class LlamaPiece(LlamaText, kw_only=True):
    """An event of a stream."""

    tokens: list[int] | UnsetType = UNSET
    stop: bool = False


@post("/completion", UNHONOURED, answer=LlamaCompletion, note="Continue a text, as llama.cpp does.")
async def completion(server: Server, request: Request, body: LlamaCompletionRequest) -> Response:
    """Continue a prompt. A stream has `LlamaPiece` events and ends with a `LlamaCompletion`."""
    model, defaults = server.served(body.model)
    params = _params(body, defaults)
    tenant = caller_of(request).tenant
    server.generations.check_capacity(tenant, params.n)
    (prompt,) = split_prompts("prompt", body.prompt).values()
    ids = await prompt_ids(server.texts.of(tenant), prompt)
    text = prompt if isinstance(prompt, str) else ""
    return await _answer(server, request, body, ids, params, model, text)


@post("/infill", INFILL, answer=LlamaCompletion, note="Fill a gap in a text, as llama.cpp does.")
async def infill(server: Server, request: Request, body: LlamaInfillRequest) -> Response:
    """Write what stands between two texts, for editors of code; streams are as of /completion."""
    model, defaults = server.served(body.model)
    params = _params(body, defaults)
    tenant = caller_of(request).tenant
    server.generations.check_capacity(tenant, params.n)
    if not body.input_prefix and not body.input_suffix:
        raise ParamError("input_prefix", "must not be empty if input_suffix is")
    files = [(part.filename, part.text) for part in body.input_extra]
    num_output = params.max_tokens or SamplingParams().max_tokens or 0
    limit = server.max_model_len - num_output
    with rename_fields(prompt="input_prefix", suffix="input_suffix"):
        ids, params, num_files = await server.texts.of(tenant).infill(
            body.input_prefix, body.input_suffix, params, body.prompt, files, limit
        )
        text = server.texts.decode(ids, skip_special_tokens=False)
        truncated = num_files < len(files)
        return await _answer(server, request, body, ids, params, model, text, truncated=truncated)


async def _answer(
    server: Server,
    request: Request,
    body: LlamaCompletionRequest,
    ids: Sequence[int],
    params: SamplingParams,
    model: str,
    prompt: str = "",
    *,
    truncated: bool = False,
) -> Response:
    """Start a request, and return its response.

    Args:
        prompt: text of the prompt; "": that of its tokens.
        truncated: parts of the input were left out.
    """
    to_generate = GenerationRequest(ids, params, adapter_field=adapter_field(body))
    (generation,) = await start_all(server, request, [to_generate], stream=body.stream)
    if server.texts.tokenizer is not None and not prompt:
        prompt = server.texts.decode(ids)
    silent = aliased(body, "n_predict", "max_tokens") == 0
    tokens = body.return_tokens
    form = LlamaFormat(
        model, prompt, generation, with_tokens=tokens, silent=silent, truncated=truncated
    )
    return await generation_response(request, [generation], form, body.stream)


def _params(body: LlamaCompletionRequest, defaults: SamplingParams) -> SamplingParams:
    changes = parameters_of(body)
    if changes.get("seed") == DRAWN_SEED:
        del changes["seed"]
    limit = aliased(body, "n_predict", "max_tokens")
    limit = TO_THE_END if limit is None else limit
    changes["max_tokens"] = limit_of(limit or 1)  # for 0, the one token is not shown
    return defaults.with_changes(**changes)


class LlamaFormat(ResponseFormat):
    """The `ResponseFormat` of llama.cpp's answers.

    Args:
        model: its name in the answer.
        prompt: text of the prompt.
        with_tokens: whether to include token ids.
        silent: whether to leave the output out.
        truncated: whether parts of the input were left out.
    """

    def __init__(
        self,
        model: str,
        prompt: str,
        generation: Generation,
        *,
        with_tokens: bool,
        silent: bool,
        truncated: bool,
    ) -> None:
        self._model = model
        self._prompt = prompt
        self._generation = generation
        self._with_tokens = with_tokens
        self._silent = silent
        self._truncated = truncated
        self._num_tokens = 0

    def complete(self, outputs: Sequence[RequestOutput]) -> LlamaCompletion:
        return self._finished(outputs, outputs[0].text, outputs[0].outputs[0].token_ids)

    def events(self, position: int, delta: TextDelta) -> Iterator[bytes]:
        if self._silent:
            return
        self._num_tokens += len(delta.token_ids)
        if delta.text or (self._with_tokens and delta.token_ids):
            yield json_event(
                LlamaPiece(
                    content=delta.text,
                    tokens=delta.token_ids if self._with_tokens else UNSET,
                    tokens_predicted=self._num_tokens,
                    tokens_evaluated=len(self._generation.prompt_token_ids),
                )
            )

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        return json_event(self._finished(outputs, "", []))

    def _finished(
        self, outputs: Sequence[RequestOutput], text: str, token_ids: list[int]
    ) -> LlamaCompletion:
        (output,) = outputs
        (answer,) = output.outputs
        used = settings(self._generation.record.params)
        if self._silent:
            answer, text, token_ids = CompletionOutput(0, "", [], "length"), "", []
            used.update(n_predict=0, max_tokens=0)
        word = answer.stop_reason if isinstance(answer.stop_reason, str) else ""
        ended_by = "word" if word else "limit" if answer.finish_reason == "length" else "eos"
        return LlamaCompletion(
            content=text,
            tokens=token_ids if self._with_tokens else [],
            model=self._model,
            tokens_predicted=len(answer.token_ids),
            tokens_evaluated=len(output.prompt_token_ids),
            generation_settings=used,
            prompt=self._prompt,
            has_new_line="\n" in answer.text,
            truncated=self._truncated,
            stop_type=ended_by,
            stopping_word=word,
            tokens_cached=output.num_cached_tokens,
            timings=self._timings(output, len(answer.token_ids)),
        )

    def _timings(self, output: RequestOutput, num_output: int) -> Timings:
        record, now = self._generation.record, time.monotonic()
        first = now if record.first_token is None else record.first_token
        num_prompt = len(output.prompt_token_ids) - output.num_cached_tokens
        return Timings(
            prompt_n=num_prompt,
            prompt_ms=_ms(first - record.arrived),
            prompt_per_second=_rate(num_prompt, first - record.arrived),
            predicted_n=num_output,
            predicted_ms=_ms(now - first),
            predicted_per_second=_rate(num_output, now - first),
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _rate(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0


def settings(params: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters under llama.cpp's names."""
    names = [(param.facts["alias"] or param.name, param.name) for param in PARAMETERS.values()]
    shown = {name: getattr(params, field) for name, field in names if field not in LEFT_OUT}
    shown["seed"] = DRAWN_SEED if params.seed is None else params.seed
    limit = TO_THE_END if params.max_tokens is None else params.max_tokens
    return {**shown, "n_predict": limit, "max_tokens": limit}


class TemplateRequest(Struct, kw_only=True):
    """A conversation to render."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Variable] | None = None
    add_special_tokens: bool | None = None  # ignored: it is about tokens, and this returns text


class RenderedPrompt(Struct):
    prompt: str


@post(
    "/apply-template",
    {
        "chat_template": CHAT["chat_template"],
        "tools": (([],), "give them to /v1/chat/completions"),
        "tool_choice": (("none", "auto"), "give it to /v1/chat/completions"),
    },
    answer=RenderedPrompt,
    note="The prompt of a conversation, as text.",
)
async def apply_template(server: Server, request: Request, body: TemplateRequest) -> Response:
    """Return the prompt that the chat template makes of a conversation."""
    texts = server.texts.of(caller_of(request).tenant)
    return json_response(RenderedPrompt(await conversation_text(texts, body.messages, body)))


class Properties(Struct, kw_only=True):
    """Facts that clients of llama.cpp read before their first request."""

    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str  # the model's name, as the path of its files is private
    modalities: Mapping[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str


@get(
    "/props",
    answer=Properties,
    note="Facts of the model and defaults of requests, as llama.cpp names them.",
)
async def properties(server: Server, request: Request) -> Response:
    """Return facts of the model and the defaults of requests."""
    tokenizer = server.texts.tokenizer
    defaults = {"n_ctx": server.max_model_len, "params": settings(server.default_params)}
    answer = Properties(
        default_generation_settings=defaults,
        total_slots=server.engine.config.scheduler.max_num_seqs,
        model_alias=server.model_name,
        model_path=server.model_name,
        modalities={"vision": False, "audio": False},
        chat_template=(tokenizer.chat_template or "") if tokenizer else "",
        bos_token=(tokenizer.bos_token or "") if tokenizer else "",
        eos_token=(tokenizer.eos_token or "") if tokenizer else "",
        build_info=f"kvik-{__version__}",
    )
    return json_response(answer)


routes = routes_of(completion, infill, apply_template, properties)
