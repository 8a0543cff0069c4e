"""From the body of a request to what the engine is asked: what all routes have in common."""

from __future__ import annotations

from collections.abc import Sequence

from kvik.config.errors import Overflow, ParamError
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import Pin, TokenLogprobs
from kvik.engine.output import RequestOutput
from kvik.server.intake import GenerationRequest
from kvik.server.openai.fields import Generating
from kvik.server.parts import Parts

# How long a prompt is kept that shall be; each use begins the time anew.
RETENTION = {"in_memory": 300.0, "5m": 300.0, "1h": 3600.0, "24h": 3600.0}
_DEFAULT = "in_memory"
MAX_LOGPROB_VALUES = 1 << 19


def generation_request(
    body: Generating, prompt_ids: Sequence[int], params: SamplingParams, field: str
) -> GenerationRequest:
    """What the body wants with one prompt. Errors call that `field`."""
    return GenerationRequest(
        prompt=prompt_ids,
        params=params,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        deadline_ms=body.deadline_ms,
        pins=_pins(body, len(prompt_ids)),
        field=field,
    )


def _pins(body: Generating, num_tokens: int) -> tuple[Pin, ...]:
    """Who names a key, or wants a prompt kept for long, has the whole of it pinned."""
    retention = body.prompt_cache_retention
    if retention is not None and retention not in RETENTION:
        raise ParamError("prompt_cache_retention", f"must be one of {', '.join(RETENTION)}")
    if body.prompt_cache_key is None and retention in (None, _DEFAULT):
        return ()
    return (Pin(num_tokens, RETENTION[retention or _DEFAULT]),)


def check_room(parts: Parts, num_prompt: int, asked: int | None, name: str) -> None:
    """Whether the output that was asked for fits behind the prompt. The engine would give less.

    Raises:
        ParamError: it does not, though the prompt itself fits.
    """
    limit = parts.engine.config.scheduler.max_model_len
    if asked is not None and num_prompt < limit < num_prompt + asked:
        raise ParamError(
            name,
            f"{asked} tokens do not fit behind a prompt of {num_prompt} tokens in the context of "
            f"{limit}: at most {limit - num_prompt} do",
            overflow=Overflow(limit, num_prompt, asked),
        )


def check_logprobs(
    parts: Parts, prompts: Sequence[Sequence[int]], params: SamplingParams, of_prompt: str, of: str
) -> None:
    """Whether the log probabilities that may come of one request can be held.

    Args:
        of_prompt, of: fields that ask for those of the prompts and of the output.

    Raises:
        ParamError: they are too many.
    """
    limit = parts.engine.config.scheduler.max_model_len
    most = limit if params.max_tokens is None else params.max_tokens
    for name, top, num_tokens in (
        (of_prompt, params.prompt_logprobs, sum(map(len, prompts))),
        (of, params.logprobs, sum(params.n * min(most, limit - len(ids)) for ids in prompts)),
    ):
        if top is not None and num_tokens * (1 + top) > MAX_LOGPROB_VALUES:
            raise ParamError(
                name,
                f"would be up to {num_tokens * (1 + top)} values of {num_tokens} tokens; a request "
                f"has at most {MAX_LOGPROB_VALUES}",
            )


def num_logprobs(output: RequestOutput) -> int:
    """Values to write of a finished request."""
    rows: list[Sequence[TokenLogprobs | None]] = [one.logprobs or () for one in output.completions]
    rows.append(output.prompt_logprobs or ())
    # The last entry is as wide as all; the first of a prompt is none.
    return sum(len(row) * (1 + len(row[-1].top)) for row in rows if row and row[-1] is not None)
