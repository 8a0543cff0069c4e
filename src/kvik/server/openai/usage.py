"""`usage`: the tokens of a request, counted as the engine counted them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from kvik.engine.output import RequestOutput
from kvik.server.openai.answers import CompletionDetails, PromptDetails, Usage
from kvik.server.speculation import speculation_of


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """Of finished requests together. A prompt counts once, whatever its `n`."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(output.num_output_tokens for output in outputs)
    drafted = sum(output.num_drafted_tokens for output in outputs)
    accepted = sum(output.num_accepted_tokens for output in outputs)
    return Usage(
        prompt,
        completion,
        prompt + completion,
        PromptDetails(sum(output.num_cached_tokens for output in outputs)),
        CompletionDetails(accepted, drafted - accepted) if drafted else UNSET,
        speculation_of(outputs),
    )


def usage_so_far(prompt_tokens: int, completion_tokens: int) -> Usage:
    """In the middle of a stream."""
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)
