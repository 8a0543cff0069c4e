"""What a model can never serve, told from its configuration alone, on either side of the wire."""

from __future__ import annotations

from collections.abc import Sequence

from kvik.config.config import ResolvedConfig
from kvik.config.errors import CapacityError, Overflow, ParamError
from kvik.config.kv_spec import max_blocks
from kvik.core.types import POOLINGS, EngineRequest


def check_request(config: ResolvedConfig, request: EngineRequest) -> None:
    """Refuse what can never succeed.

    Raises:
        ParamError: the prompt or a parameter is impossible for this model.
        CapacityError: it can never fit.
    """
    prompt, params = request.prompt_token_ids, request.params
    scheduler, vocab_size = config.scheduler, config.model.vocab_size
    limit = scheduler.max_model_len
    if not prompt:
        raise ParamError("prompt", "must have at least one token")
    _check_pooling(request)
    samples = request.pooling is None and params.max_tokens != 0
    if len(prompt) + samples > limit:
        room = ", which leaves no room for output in" if samples else ", which do not fit into"
        raise ParamError(
            "prompt",
            f"has {len(prompt)} tokens{room} the context of {limit} (max_model_len)",
            overflow=Overflow(limit, len(prompt), (params.max_tokens or 1) if samples else 0),
        )
    _check_tokens(prompt, vocab_size)
    params.check_against(vocab_size, limit)
    if params.min_tokens > limit - len(prompt):
        raise ParamError(
            "min_tokens",
            f"{params.min_tokens} do not fit behind a prompt of {len(prompt)} tokens in the "
            f"context of {limit}",
        )
    most = scheduler.max_queued_requests
    if params.n > most:
        raise CapacityError("n", f"must be at most max_queued_requests ({most}), not {params.n}")
    _check_blocks(config, max_length(config, request), "max_tokens" if samples else "prompt")


def max_length(config: ResolvedConfig, request: EngineRequest) -> int:
    """Prompt + output at most: what was asked for, never past the context."""
    limit = config.scheduler.max_model_len
    if request.pooling is not None:
        return len(request.prompt_token_ids)
    if request.params.max_tokens is None:
        return limit
    return min(limit, len(request.prompt_token_ids) + request.params.max_tokens)


def _check_tokens(prompt: Sequence[int], vocab_size: int) -> None:
    # The whole at once, as prompts are long and this runs between steps and in event loops.
    if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < vocab_size:
        return
    for token in prompt:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ParamError("prompt", f"token id {token!r} is outside 0..{vocab_size - 1}")


def _check_pooling(request: EngineRequest) -> None:
    if request.pooling not in (None, *POOLINGS):
        raise ParamError(
            "pooling", f"must be one of {', '.join(POOLINGS)}, not {request.pooling!r}"
        )
    if request.pooling is not None and request.params.n > 1:
        raise ParamError("n", f"must be 1 where hidden states are pooled, not {request.params.n}")


def _check_blocks(config: ResolvedConfig, longest: int, field: str) -> None:
    cache, chunk = config.cache, config.scheduler.max_num_batched_tokens
    needed = sum(max_blocks(g.spec, longest, chunk, cache.block_size) for g in cache.groups)
    available = cache.num_blocks - 1  # but for the null block
    if needed > available:
        raise CapacityError(
            field,
            f"{longest} tokens need {needed} KV blocks of {cache.block_size}, the whole cache has "
            f"{available}",
        )
