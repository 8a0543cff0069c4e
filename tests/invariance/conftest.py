"""Models and reference outputs of the invariance tests."""

from __future__ import annotations

import pytest
from helpers.matrix import FORMATS, MODELS, make_model, reference_outputs, reference_tokens

from kvik.engine.output import RequestOutput


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory) -> dict[str, object]:
    return make_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    return reference_tokens(model)


@pytest.fixture(scope="module", params=FORMATS)
def weights(request) -> dict[str, object]:
    return FORMATS[request.param]


@pytest.fixture(scope="module")
def one_at_a_time(model, weights) -> list[RequestOutput]:
    return reference_outputs({**model, **weights})


@pytest.fixture(scope="module", params=[{"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}], ids=str)
def latent_alone(request, tmp_path_factory) -> tuple[dict[str, object], list[RequestOutput]]:
    """A model that attends over latent vectors, and its outputs one request at a time."""
    model = {**make_model("latent", tmp_path_factory.mktemp("latent")), **request.param}
    return model, reference_outputs(model)
