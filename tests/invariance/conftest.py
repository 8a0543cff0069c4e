"""Models and reference outputs of the invariance tests."""

from __future__ import annotations

import pytest
from helpers.matrix import FORMATS, MODELS, make_model, outputs_of, tokens_of

from kvik.engine.output import RequestOutput


@pytest.fixture(params=MODELS)
def name(request) -> str:
    return request.param


@pytest.fixture
def model(name, tmp_path) -> dict[str, object]:
    return make_model(name, tmp_path)


@pytest.fixture
def expected(name) -> list[list[int]]:
    return tokens_of(name)


@pytest.fixture(params=FORMATS)
def format(request) -> str:
    return request.param


@pytest.fixture
def one_at_a_time(name, format) -> list[RequestOutput]:
    return outputs_of(name, format)
