"""Properties common to all errors for users."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from kvik.errors import (
    CapacityError,
    ConfigError,
    KvikError,
    ModelError,
    OverloadError,
    ParamError,
    UnavailableError,
)

OVERLOAD = {"retry_after": 2.0, "of_caller": True}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *((k, {}) for k in (CapacityError, ConfigError, KvikError, ModelError, ParamError)),
        (UnavailableError, {}),
        (ParamError, {"code": "too_complex"}),
        (OverloadError, OVERLOAD),
    ],
)
def test_an_error_is_one_line_and_can_be_sent_between_processes(
    kind: type[KvikError], more: dict[str, Any]
) -> None:
    error = pickle.loads(pickle.dumps(kind("top_p", "must be in (0, 1]", **more)))
    assert type(error) is kind
    assert {name: getattr(error, name) for name in more} == more
    assert isinstance(error, ValueError)
    assert str(error) == "top_p: must be in (0, 1]"
    assert (error.field, error.message) == ("top_p", "must be in (0, 1]")
