"""When an output ends by its tokens. (Stop strings need text and are looked for by the client.)"""

from __future__ import annotations

from kvik.core.types import FinishReason, Request


def finish_reason(request: Request, token: int) -> FinishReason | None:
    """Why the request ends with `token`, its newest output token, or None."""
    if token in request.stop_ids and request.num_output_tokens >= request.params.min_tokens:
        if token in request.params.stop_token_ids:
            request.stop_reason = token  # and not for EOS, which needs no telling
        return FinishReason.STOP
    if len(request.token_ids) >= request.max_length:
        return FinishReason.LENGTH
    return None
