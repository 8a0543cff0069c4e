"""`prompt` and `input`: one text, one list of token ids, or several of either."""

from __future__ import annotations

from collections.abc import Mapping

from kvik.config.errors import ParamError
from kvik.server.errors import called
from kvik.server.texts import Texts

Given = str | list[str | int | list[int]]
One = str | list[int]
MAX_CHOICES = 128  # prompts times n, in one request
_KINDS = {str: "a text", int: "a token id", list: "a list of token ids"}


def split(name: str, given: Given) -> dict[str, One]:
    """The prompts by what errors call them: `name` alone, or `name[0]`, `name[1]`, ... of many.

    Raises:
        ParamError: one is empty, or they are of mixed kinds.
    """
    if isinstance(given, list) and len(set(map(type, given))) > 1:
        first = type(given[0])
        i = next(i for i, one in enumerate(given) if type(one) is not first)
        raise ParamError(f"{name}[{i}]", f"must be {_KINDS[first]}, as {name}[0] is")
    prompts: dict[str, One]
    if isinstance(given, str) or not given or isinstance(given[0], int):
        prompts = {name: given}  # type: ignore[dict-item]
    else:
        prompts = {f"{name}[{i}]": one for i, one in enumerate(given)}  # type: ignore[misc]
    for field, prompt in prompts.items():
        if not prompt:
            raise ParamError(field, "must not be empty")
    return prompts


def check_choices(name: str, num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_CHOICES:
        raise ParamError(
            name,
            f"{num_prompts} prompts with {n} choices each are {num_prompts * n} choices; a request "
            f"has at most {MAX_CHOICES}",
        )


async def all_prompt_ids(
    texts: Texts, prompts: Mapping[str, One], add_special_tokens: bool | None
) -> dict[str, list[int]]:
    """Token ids of each prompt, by what errors call it."""
    found = {}
    for field, prompt in prompts.items():
        with called(prompt=field):
            found[field] = await prompt_ids(texts, prompt, add_special_tokens)
    return found


async def prompt_ids(texts: Texts, prompt: One, add_special_tokens: bool | None) -> list[int]:
    """Token ids of one prompt; to a text, special tokens are added unless that is not wanted."""
    if not isinstance(prompt, str):
        return prompt
    return await texts.encode(prompt, add_special_tokens is not False)
