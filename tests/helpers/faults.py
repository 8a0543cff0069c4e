"""Faults in calls that are made for one request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


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
