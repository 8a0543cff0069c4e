"""Speculation changes no token, with any drafter and whatever else the engine does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.drafted_columns import (
    DRAFTERS,
    EAGER,
    SOME,
    SPECULATION,
    TOKENS,
    TREES,
    check_drafts,
    with_room,
)
from helpers.drafters import install
from helpers.matrix import (
    BITS,
    COLUMNS,
    CONTEXT,
    check_bits,
    check_tokens,
    params,
    params_with_logprobs,
    prompts,
    run_column,
)
from helpers.optional_native import needs_native

from kvik import LLM
from kvik.config.model_source import BUNDLED

WITH_A_DRAFT_MODEL = ("batch", "chunks of 5", "blocks of 1", "blocks of 64", "two threads")
EVERYWHERE = ("right now and then", "tree")  # drafters that run in every column


@pytest.fixture(scope="module")
def texts(model, expected) -> list[list[int]]:
    """Return prompts with their answers."""
    with LLM(**model, device="cpu", threads=1, max_model_len=CONTEXT) as llm:
        vocab_size = llm.resolved.model.vocab_size
    return [[*p, *tokens] for p, tokens in zip(prompts(vocab_size), expected, strict=True)]


@pytest.mark.parametrize("drafter", EVERYWHERE)
@pytest.mark.parametrize(
    "column",
    [c if c in SOME else pytest.param(c, marks=pytest.mark.full) for c in COLUMNS],
    ids=lambda column: column.name,
)
def test_tokens_do_not_depend_on_drafts(model, expected, texts, column, drafter, monkeypatch):
    drafted, accepted = check_drafts(model, expected, texts, column, drafter, monkeypatch)
    assert 0 < accepted < drafted


@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name not in EVERYWHERE])
@pytest.mark.parametrize("column", SOME, ids=lambda column: column.name)
def test_tokens_do_not_depend_on_the_drafter(model, expected, texts, column, drafter, monkeypatch):
    check_drafts(model, expected, texts, column, drafter, monkeypatch)


@pytest.mark.parametrize(
    "column", [c for c in COLUMNS if c in SOME or c.name == "batch"], ids=lambda column: column.name
)
def test_tokens_do_not_depend_on_forced_drafts(model, expected, column):
    """Only structured requests get forced drafts."""
    outputs = run_column(
        with_room(column), params(column.siblings), model, dtype="float32", spec_method="forced"
    )
    check_tokens(outputs, expected)
    for output, sampling in zip(outputs, params(), strict=True):
        structured = sampling.structured is not None and model["model"] == ""
        assert (output.num_drafted_tokens > 0) == structured
        assert output.num_accepted_tokens == output.num_drafted_tokens


@pytest.fixture(scope="module")
def draft(model, tmp_path_factory) -> str:
    """Return the bundled model's own draft model, or the random target itself with shorter
    windows."""
    if model["model"] == "":
        return str(BUNDLED.parent / "stories-draft")
    folder = tmp_path_factory.mktemp("draft")
    config = json.loads((Path(model["model"]) / "config.json").read_text())
    shorter = {"sliding_window": 12, "attention_chunk_size": 12}
    (folder / "config.json").write_text(json.dumps({**config, **shorter}))
    return str(folder)


@pytest.mark.parametrize(
    "column",
    [column for column in COLUMNS if column in SOME or column.name in WITH_A_DRAFT_MODEL],
    ids=lambda column: column.name,
)
def test_tokens_do_not_depend_on_a_draft_model(model, expected, draft, column):
    """It shares the blocks of its target through prefix hits, preemptions and forks."""
    column = with_room(column)
    options = {**EAGER, "spec_method": "draft_model", "spec_model": draft, "spec_tokens": TOKENS}
    outputs = run_column(column, params(column.siblings), model, dtype="float32", **options)
    check_tokens(outputs, expected)
    accepted = sum(output.num_accepted_tokens for output in outputs)
    assert 0 < accepted < sum(output.num_drafted_tokens for output in outputs)


@needs_native
@pytest.mark.parametrize("drafter", EVERYWHERE)
@pytest.mark.parametrize(
    "column",
    [c for c in BITS if c.name in ("batch", "chunks of 16", "prefix hits", "preemption, chunks")],
    ids=lambda column: column.name,
)
def test_native_logprobs_have_the_same_bits_with_drafts(
    model, weights, one_at_a_time, column, drafter, caplog, monkeypatch
):
    texts = [[*out.prompt_token_ids, *out.outputs[0].token_ids] for out in one_at_a_time]
    install(monkeypatch, DRAFTERS[drafter](texts))
    sampling = params_with_logprobs(column.siblings)
    options = TREES if drafter == "tree" else SPECULATION
    found = run_column(with_room(column), sampling, model, **weights, **options)
    assert not caplog.records  # every step was replayed
    assert sum(output.num_accepted_tokens for output in found) > 0
    check_bits(found, one_at_a_time)
