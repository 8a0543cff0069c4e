"""Sampling defaults from generation_config.json."""

from __future__ import annotations

import json

import pytest

from kvik.core.sampling_params import SamplingParams
from kvik.errors import ModelError
from kvik.model_files import Folder


def read(tmp_path, **stored) -> SamplingParams:
    (tmp_path / "generation_config.json").write_text(json.dumps(stored))
    return Folder(tmp_path).default_params()


def test_values_of_the_file_are_defaults(tmp_path):
    params = read(tmp_path, temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=99, foo=1)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (
        0.6,
        20,
        0.95,
        99,
    )


@pytest.mark.parametrize(
    "stored",
    [{"do_sample": False, "temperature": 0.6}, {"do_sample": True, "temperature": 1e-6}],
)
def test_decoding_is_greedy_if_do_sample_is_false_or_the_temperature_tiny(tmp_path, stored):
    assert read(tmp_path, **stored).greedy


def test_without_a_file_defaults_stay(tmp_path):
    assert Folder(tmp_path).default_params() == SamplingParams()


@pytest.mark.parametrize(
    ("key", "value"), [("temperature", -1), ("max_new_tokens", 0), ("top_p", "x")]
)
def test_impossible_values_name_the_key(tmp_path, key, value):
    with pytest.raises(ModelError, match=f"generation_config.json: {key}"):
        read(tmp_path, **{key: value})
