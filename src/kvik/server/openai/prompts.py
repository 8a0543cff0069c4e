"""`prompt` and `input`: one text, one list of token ids, or several of either."""

from __future__ import annotations

from kvik.config.errors import ParamError
from kvik.server.texts import Texts

Given = str | list[str | int | list[int]]
One = str | list[int]
MAX_CHOICES = 128  # prompts times n, in one request
_SHAPES = "must be a text, a list of token ids, or a list of texts or of lists of token ids"


def split(name: str, given: Given) -> list[One]:
    """One or many, as many.

    Raises:
        ParamError: it is empty, or of mixed kinds.
    """
    kinds = {str} if isinstance(given, str) else set(map(type, given))
    if isinstance(given, str) or kinds <= {int}:
        prompts: list[One] = [given]  # type: ignore[list-item]
    elif kinds in ({str}, {list}):
        prompts = given  # type: ignore[assignment]
    else:
        raise ParamError(name, f"{_SHAPES}, not of both")
    if not all(prompts):
        raise ParamError(name, "must not be empty")
    return prompts


def check_choices(name: str, num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_CHOICES:
        raise ParamError(
            name,
            f"{num_prompts} prompts with {n} choices each are {num_prompts * n} choices; a request "
            f"has at most {MAX_CHOICES}",
        )


async def prompt_ids(texts: Texts, prompt: One, add_special_tokens: bool | None) -> list[int]:
    """Token ids of one prompt; to a text, special tokens are added unless that is not wanted."""
    if not isinstance(prompt, str):
        return prompt
    return await texts.encode(prompt, add_special_tokens is not False)
