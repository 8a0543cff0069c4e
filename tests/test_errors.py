"""Properties common to all errors for users."""

from __future__ import annotations

import pickle

import pytest

from kvik.errors import CapacityError, ConfigError, KvikError, ModelError, ParamError


@pytest.mark.parametrize("kind", [CapacityError, ConfigError, KvikError, ModelError, ParamError])
def test_an_error_is_one_line_and_can_be_sent_between_processes(kind: type[KvikError]) -> None:
    error = pickle.loads(pickle.dumps(kind("top_p", "must be in (0, 1]")))
    assert type(error) is kind
    assert isinstance(error, ValueError)
    assert str(error) == "top_p: must be in (0, 1]"
    assert (error.field, error.message) == ("top_p", "must be in (0, 1]")
