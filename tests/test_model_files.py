"""Sampling defaults from generation_config.json."""

from __future__ import annotations

import json
import shutil

import pytest

from kvik import LLM
from kvik.config.model_source import BUNDLED
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
    "name",
    [
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("special_tokens_map.json", "chat_template.jinja", "model.safetensors", "modules.json"),
    ],
)
def test_a_link_to_nothing_is_not_a_file_that_a_model_lacks(tmp_path, name):
    """As in a hub cache that lost a file: the model would run with other settings."""
    model = tmp_path / "model"
    shutil.copytree(BUNDLED, model)
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(tmp_path / "lost")
    with pytest.raises(ModelError, match=f"^{name}: .*(link to a missing|cannot be read)"):
        LLM(str(model), device="cpu", max_model_len=64)


@pytest.mark.parametrize(
    "stored",
    [
        {"do_sample": False, "temperature": 0.6},
        {"do_sample": True, "temperature": 1e-6},
        {"top_p": 0, "temperature": 0.7},
    ],
)
def test_decoding_is_greedy_if_the_file_says_so(tmp_path, stored):
    assert read(tmp_path, **stored).greedy


def test_counts_may_be_written_with_a_fraction_of_zero(tmp_path):
    assert read(tmp_path, top_k=50.0).top_k == 50


def test_tokens_that_must_not_come_are_bad_words(tmp_path):
    params = read(tmp_path, bad_words_ids=[[5, 6]], suppress_tokens=[7, 8])
    assert params.bad_words == ((5, 6), (7,), (8,))
    assert read(tmp_path, suppress_tokens=None, bad_words_ids=None).bad_words == ()


def test_without_a_file_defaults_stay(tmp_path):
    assert Folder(tmp_path).default_params() == SamplingParams()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1),
        ("max_new_tokens", 0),
        ("top_p", "x"),
        ("top_k", 1.5),
        ("bad_words_ids", 5),
    ],
)
def test_impossible_values_name_the_key(tmp_path, key, value):
    with pytest.raises(ModelError, match=f"generation_config.json: {key}"):
        read(tmp_path, **{key: value})
