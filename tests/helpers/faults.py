"""Calls that fail, and the errors that requests end with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvik import LLM, SamplingParams
from kvik.errors import GroupLost


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a function that always raises."""

    def broken(*_: object, **__: object) -> Any:
        raise error

    return broken


def fail(
    patch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    error: BaseException,
    concerned: Callable[..., bool] = lambda *arguments: True,
) -> None:
    """Make calls of `owner.name` raise if their arguments are concerned."""
    genuine = getattr(owner, name)

    def broken(*arguments: Any, **options: Any) -> Any:
        if concerned(*arguments):
            raise error
        return genuine(*arguments, **options)

    patch.setattr(owner, name, broken)


def errors_of(llm: LLM, sampling: SamplingParams, count: int = 1) -> set[str]:
    """Return the errors of the requests of a call, or of the call itself if the loss of a process
    was known before."""
    try:
        outputs = llm.generate(["Once upon a time"] * count, sampling)
    except GroupLost as error:
        return {str(error)}
    return {str(completion.error) for output in outputs for completion in output.outputs}
