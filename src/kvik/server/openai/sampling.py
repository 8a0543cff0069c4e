"""Request fields -> sampling parameters: what is silent takes the model's own defaults."""

from __future__ import annotations

from kvik.config.errors import ParamError
from kvik.core.sampling_params import SamplingParams
from kvik.server.asking import either
from kvik.server.openai.chat_request import ChatRequest
from kvik.server.openai.completion_request import CompletionRequest
from kvik.server.openai.fields import Generating, limit_of

# Fields that mean what the sampling parameter of the same name means.
_ALIKE = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "seed",
    "prompt_logprobs",
    "speculation",
)
COMPLETION_TOKENS = 16  # of a completion that does not say; as the API has it


def chat_params(body: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    """Without a limit an answer may fill the context.

    Raises:
        ParamError: a value is impossible, or nothing that the engine honours.
    """
    _check_stream(body)
    if body.top_logprobs and not body.logprobs:
        raise ParamError("top_logprobs", "needs logprobs to be true")
    name, asked = asked_tokens(body)
    if asked == 0:
        raise ParamError(name, "must be at least 1")
    # The default limit is for callers in Python, who can ask for more; the file may have another.
    own = defaults.max_tokens if defaults.max_tokens != SamplingParams().max_tokens else None
    changes = _alike(body)
    changes["max_tokens"] = own if asked is None else limit_of(asked)
    if body.logprobs:
        changes["logprobs"] = body.top_logprobs or 0
    return defaults.with_changes(**changes)


def asked_tokens(body: Generating) -> tuple[str, int | None]:
    """How many tokens an answer may have, with the field that says so; the newest goes before."""
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        return "max_completion_tokens", body.max_completion_tokens
    asked: int | None = either(body, "max_tokens", "n_predict")
    return "max_tokens" if body.n_predict is None else "n_predict", asked


def completion_params(body: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """`max_tokens` 0 only with `echo`: the prompt is read, and scored if `logprobs` are wanted.

    Raises:
        ParamError: a value is impossible, or nothing that the engine honours.
    """
    _check_stream(body)
    n = body.n or 1
    if body.best_of is not None and (type(body.best_of) is not int or body.best_of != n):
        raise ParamError("best_of", f"is not supported, unless it equals n ({n})")
    name, asked = asked_tokens(body)
    if asked == 0 and not (body.echo and n == 1):
        raise ParamError(name, "must be at least 1, or 0 with echo and n = 1")
    changes = _alike(body)
    changes["max_tokens"] = COMPLETION_TOKENS if asked is None else limit_of(asked)
    changes["logprobs"] = body.logprobs
    if body.echo and body.logprobs is not None:
        wanted = max(body.logprobs, body.prompt_logprobs or 0)
        changes["prompt_logprobs"] = wanted
    elif asked == 0 and body.prompt_logprobs is None:
        changes["prompt_logprobs"] = 0  # for the engine's sake; nobody sees them
    return defaults.with_changes(**changes)


def _alike(body: Generating) -> dict[str, object]:
    given = {name: getattr(body, name) for name in _ALIKE}
    given["repetition_penalty"] = either(body, "repetition_penalty", "repeat_penalty")
    return {name: value for name, value in given.items() if value is not None}


def _check_stream(body: Generating) -> None:
    if body.stream_options is not None and not body.stream:
        raise ParamError("stream_options", "needs stream to be true")
