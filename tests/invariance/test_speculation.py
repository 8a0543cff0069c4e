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
    MODELS,
    by_name,
    checked_bits,
    checked_tokens,
    named,
    params,
    prompts,
)
from helpers.optional_native import needs_native

from kvik.config.model_source import BUNDLED
from kvik.model_files import model_files

# Of a draft model, in the full tier.
FURTHER = by_name(COLUMNS, "batch", "chunks of 5", "blocks of 1", "blocks of 64", "two threads")
EVERYWHERE = ("right now and then", "tree")  # drafters that run in every column
TWO_MODELS = pytest.mark.parametrize("name", MODELS[:2])


@pytest.fixture
def texts(model, expected) -> list[list[int]]:
    """Return prompts with their answers."""
    vocab = model_files(Path(model["model"] or BUNDLED)).spec().vocab_size
    return [[*p, *tokens] for p, tokens in zip(prompts(vocab), expected, strict=True)]


@pytest.mark.parametrize("name", ["entries"])
@pytest.mark.parametrize("drafter", ["right now and then", "always wrong"])
@pytest.mark.parametrize("column", by_name(COLUMNS, "preemption, chunks", "siblings"), ids=named)
def test_rejected_drafts_leave_no_entries(model, expected, texts, column, drafter, monkeypatch):
    check_drafts(model, expected, texts, column, drafter, monkeypatch)


@TWO_MODELS  # with each model, the next test runs some columns
@pytest.mark.each(1)  # a drafter needs no more of a column than room for its tokens
@pytest.mark.parametrize("drafter", EVERYWHERE)
@pytest.mark.parametrize(
    "column",
    [c if c in SOME else pytest.param(c, marks=pytest.mark.full) for c in COLUMNS],
    ids=named,
)
def test_tokens_do_not_depend_on_drafts(model, expected, texts, column, drafter, monkeypatch):
    drafted, accepted = check_drafts(model, expected, texts, column, drafter, monkeypatch)
    assert 0 < accepted < drafted


@pytest.mark.each(3)  # a drafter does not know the model
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("column", SOME, ids=named)
def test_tokens_do_not_depend_on_the_drafter(model, expected, texts, column, drafter, monkeypatch):
    check_drafts(model, expected, texts, column, drafter, monkeypatch)


@TWO_MODELS
@pytest.mark.parametrize("column", [*by_name(COLUMNS, "batch"), *SOME], ids=named)
def test_tokens_do_not_depend_on_forced_drafts(model, expected, column):
    """Only structured requests get forced drafts."""
    outputs = checked_tokens(with_room(column), model, expected, spec_method="forced")
    for output, sampling in zip(outputs, params(), strict=True):
        structured = sampling.structured is not None and model["model"] == ""
        assert (output.num_drafted_tokens > 0) == structured
        assert output.num_accepted_tokens == output.num_drafted_tokens


@pytest.fixture
def draft(model, tmp_path) -> str:
    """Return the bundled model's own draft model, or the random target itself with shorter
    windows."""
    if model["model"] == "":
        return str(BUNDLED.parent / "stories-draft")
    config = json.loads((Path(model["model"]) / "config.json").read_text())
    shorter = {"sliding_window": 12, "attention_chunk_size": 12}
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text(json.dumps({**config, **shorter}))
    return str(tmp_path / "draft")


@pytest.mark.each(1)  # a column decides when blocks are shared, a model what they hold
@pytest.mark.parametrize("name", MODELS[:3])  # the cache of the last has no further kind of layer
@pytest.mark.parametrize(
    "column",
    [*SOME, *(pytest.param(c, marks=pytest.mark.full) for c in FURTHER)],
    ids=named,
)
def test_tokens_do_not_depend_on_a_draft_model(model, expected, draft, column):
    """It shares the blocks of its target through prefix hits, preemptions and forks."""
    options = {**EAGER, "spec_method": "draft_model", "spec_model": draft, "spec_tokens": TOKENS}
    outputs = checked_tokens(with_room(column), model, expected, **options)
    accepted = sum(output.num_accepted_tokens for output in outputs)
    assert 0 < accepted < sum(output.num_drafted_tokens for output in outputs)


@needs_native
@pytest.mark.each(1)
@pytest.mark.parametrize("drafter", EVERYWHERE)
@pytest.mark.parametrize(
    "column",
    by_name(BITS, "batch", "chunks of 16", "prefix hits", "preemption, chunks"),
    ids=named,
)
def test_native_logprobs_have_the_same_bits_with_drafts(
    model, format, one_at_a_time, column, drafter, caplog, monkeypatch
):
    texts = [[*out.prompt_token_ids, *out.outputs[0].token_ids] for out in one_at_a_time]
    install(monkeypatch, DRAFTERS[drafter](texts))
    options = TREES if drafter == "tree" else SPECULATION
    found = checked_bits(with_room(column), model, format, one_at_a_time, **options)
    assert not caplog.records  # every step was replayed
    assert sum(output.num_accepted_tokens for output in found) > 0


@needs_native
@pytest.mark.full
@pytest.mark.parametrize("name", ["indexed", "alibi", "blocks"])
@pytest.mark.parametrize("format", ["bfloat16"])
@pytest.mark.parametrize("drafter", EVERYWHERE)
def test_drafts_have_keys_and_distances_of_their_own(
    model, format, one_at_a_time, drafter, monkeypatch
):
    texts = [[*out.prompt_token_ids, *out.outputs[0].token_ids] for out in one_at_a_time]
    install(monkeypatch, DRAFTERS[drafter](texts))
    options = TREES if drafter == "tree" else SPECULATION
    (column,) = by_name(BITS, "preemption, chunks")
    found = checked_bits(with_room(column), model, format, one_at_a_time, **options)
    assert sum(output.num_accepted_tokens for output in found) > 0
