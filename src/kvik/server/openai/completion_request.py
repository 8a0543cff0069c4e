"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Any

from kvik.server.openai.fields import Generating, Logprobs, Prompt


class CompletionRequest(Generating, kw_only=True):
    """Texts to go on with."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Logprobs | None = None
    best_of: Any = None  # equal to `n`
