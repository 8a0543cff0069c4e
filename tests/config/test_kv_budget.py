"""Budgets of layers by their scores, and the file format."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.configs import PUBLIC
from hypothesis import given, settings
from hypothesis import strategies as st

from kvik.config.kv_budget import (
    ENTROPY,
    LEAST,
    MAX_CLASSES,
    PYRAMID,
    ROUND,
    UNIFORM,
    KVBudgets,
    allot,
    check_model,
    fingerprint_of,
    read_budgets,
    save_budgets,
    scores_of,
)
from kvik.errors import ConfigError
from kvik.models.model_spec import ModelSpec

SPEC = ModelSpec.from_config(PUBLIC["llama-3.2-1b"])
LAYERS = SPEC.num_layers
MADE = KVBudgets(
    architecture=SPEC.architecture,
    fingerprint=fingerprint_of(SPEC),
    by=UNIFORM,
    bytes=0.25,
    context=1024,
    data="a.txt",
    tokens=100,
    scores=(0.5,) * LAYERS,
    budgets=(256,) * LAYERS,
)


@given(
    scores=st.lists(st.floats(0.01, 1), min_size=1, max_size=40),
    share=st.floats(0.05, 1),
    context=st.integers(1024, 20_000),
    wide=st.booleans(),
)
@settings(max_examples=100)
def test_budgets_use_their_bytes_by_score(scores, share, context, wide):
    sizes = [2 + wide * (i % 2) for i in range(len(scores))]
    found = allot(scores, sizes, share, context)
    cap = share * context * sum(sizes)
    taken = sum(a * b for a, b in zip(found, sizes, strict=True))
    assert taken <= cap
    full = all(tokens > context - ROUND for tokens in found)
    assert full or taken > cap - ROUND * sum(sizes)
    assert all(LEAST <= tokens <= context and tokens % ROUND == 0 for tokens in found)
    assert len(set(found)) <= MAX_CLASSES
    ranked = [tokens for _, tokens in sorted(zip(scores, found, strict=True))]
    assert all(b >= a - ROUND for a, b in pairwise(ranked))


def test_baselines():
    even = allot(scores_of(UNIFORM, (), 8), [4] * 8, 0.25, 1024)
    falling = allot(scores_of(PYRAMID, (), 8), [4] * 8, 0.25, 1024)
    assert even == (256,) * 8
    assert list(falling) == sorted(falling, reverse=True) and len(set(falling)) == 4
    assert sum(falling) == sum(even)
    assert scores_of(ENTROPY, (0.1, 0.2), 2) == (0.1, 0.2)


def test_layers_of_a_class_have_equal_budgets():
    found = allot([0.1, 0.9, 0.2, 0.8, 0.4, 0.5], [1] * 6, 0.5, 1024)
    assert [found.count(tokens) for tokens in found] == [2] * 6


def test_too_few_bytes():
    with pytest.raises(ConfigError, match="^bytes: "):
        allot([1.0], [1], 0.01, 1024)


def test_a_file_is_read_back(tmp_path):
    save_budgets(MADE, tmp_path / "b.json")
    assert read_budgets(tmp_path / "b.json", SPEC) == MADE


def test_layers_that_do_not_see_all_keys_have_none(tmp_path):
    spec = ModelSpec.from_config(PUBLIC["Qwen3.5-9B"])
    full = spec.full_layers
    assert 0 < len(full) < spec.num_layers
    numbers = tuple(256 if i in full else None for i in range(spec.num_layers))
    made = replace(
        MADE,
        architecture=spec.architecture,
        fingerprint=fingerprint_of(spec),
        scores=tuple(n and 0.5 for n in numbers),
        budgets=numbers,
    )
    save_budgets(made, tmp_path / "b.json")
    assert read_budgets(tmp_path / "b.json", spec) == made
    for wrong in ((256,) * spec.num_layers, numbers[::-1], (None,) * spec.num_layers):
        save_budgets(replace(made, budgets=wrong), tmp_path / "b.json")
        with pytest.raises(ConfigError, match="^kv_budget: budgets "):
            read_budgets(tmp_path / "b.json", spec)


WRONG: list[dict[str, Any]] = [
    {"kv_budget": 2},
    {"fingerprint": "0" * 32},
    {"by": 3},
    {"budgets": [256] * (LAYERS + 1)},
    {"budgets": [35] + [256] * (LAYERS - 1)},
    {"budgets": [36.5] + [256] * (LAYERS - 1)},
    {"budgets": [True] * LAYERS},
    {"budgets": "256"},
    {"scores": [-1.0] * LAYERS},
    {"bytes": None},
]


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_a_wrong_file_is_refused_in_one_line(tmp_path, change):
    file = tmp_path / "b.json"
    file.write_text(json.dumps({"kv_budget": 1, **asdict(MADE), **change}))
    with pytest.raises(ConfigError, match=r"^kv_budget: .*\Z"):
        read_budgets(file, SPEC)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b"[" * 100_000, b"{}"])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "b.json").write_bytes(content)
    for path in (tmp_path / "b.json", tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError):
            read_budgets(Path(path), SPEC)


def test_another_shape_is_another_model():
    layer = replace(SPEC.layers[0], kv_heads=7)
    for other in (
        replace(SPEC, hidden_size=7),
        replace(SPEC, layers=SPEC.layers[1:]),
        replace(SPEC, layers=(layer, *SPEC.layers[1:])),
    ):
        assert fingerprint_of(other) != fingerprint_of(SPEC)
    assert fingerprint_of(replace(SPEC, dtype="float16")) == fingerprint_of(SPEC)


@pytest.mark.parametrize(
    "facts",
    [
        *(PUBLIC[name] for name in ("mistral-7b-v0.1", "gemma-4-e2b", "bloom-560m")),
        {
            **PUBLIC["llama-2-7b"],
            "architectures": ["DeepseekV3ForCausalLM"],
            "first_k_dense_replace": 32,
        },
    ],
    ids=lambda facts: facts["architectures"][0],
)
def test_unsupported_models(facts):
    with pytest.raises(ConfigError, match="^kv_budget: "):
        check_model(ModelSpec.from_config(facts))
