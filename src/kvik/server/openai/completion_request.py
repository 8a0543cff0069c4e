"""The body of POST /v1/completions."""

from __future__ import annotations

from kvik.server.openai.fields import Generating, Logprobs, Prompt
from kvik.server.unhonoured import Unhonoured


class CompletionRequest(Generating, kw_only=True):
    """Texts to go on with."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Logprobs | None = None

    best_of: Unhonoured = None
    suffix: Unhonoured = None
    prompt_embeds: Unhonoured = None
