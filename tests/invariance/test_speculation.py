"""Speculation changes no token, with any drafter and whatever else the engine does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.drafters import (
    METHOD,
    TREE_METHOD,
    Broken,
    Garbage,
    Scripted,
    ScriptedTree,
    always_right,
    always_wrong,
    install,
    with_probability,
)
from helpers.matrix import (
    BITS,
    COLUMNS,
    CONTEXT,
    Column,
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
from kvik.worker.drafters.base import Drafter
from kvik.worker.drafters.registry import DrafterParts

TOKENS = 4  # drafts per step
EAGER = {"speculative_config": {"adaptive": False}}  # draft at any cost
SPECULATION = {**EAGER, "spec_method": METHOD, "spec_tokens": TOKENS}
TREES = {
    **EAGER,
    "spec_method": TREE_METHOD,
    "spec_model": str(BUNDLED),  # any folder, as the drafter is replaced
    "spec_tokens": ScriptedTree.TREE.drafts,
}
Make = Callable[[DrafterParts], Drafter]

DRAFTERS: dict[str, Callable[[list[list[int]]], Make]] = {
    "always right": lambda texts: lambda parts: Scripted(parts, texts, always_right),
    "always wrong": lambda texts: lambda parts: Scripted(parts, texts, always_wrong),
    "right now and then": lambda texts: lambda parts: Scripted(parts, texts, with_probability(0.6)),
    "tree": lambda texts: lambda parts: ScriptedTree(parts, texts),
    "garbage": lambda texts: Garbage,
    "broken": lambda texts: lambda parts: Broken(3),
    "prompt lookup": lambda texts: None,
}
# Columns for all drafters; two drafters run in every column.
SOME = [
    column
    for column in COLUMNS
    if column.name
    in ("torch", "reference attention", "prefix hits, chunks", "preemption, chunks", "siblings")
]
WITH_A_DRAFT_MODEL = ("batch", "chunks of 5", "blocks of 1", "blocks of 64", "two threads")
EVERYWHERE = ("right now and then", "tree")


def with_room(column: Column) -> Column:
    """Return the column with room for drafts in a step, and fewer blocks, so that they are as
    scarce as without drafts: requests that end sooner hold their blocks for less time."""
    config = dict(column.config)
    if "max_num_batched_tokens" in config:
        most = config["max_num_batched_tokens"] - 2
        config["max_num_seqs"] = min(config.get("max_num_seqs", 16), most)
    if column.must in ("preemptions", "swaps"):
        config["num_blocks"] -= 2
    return replace(column, config=config)


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


def check_drafts(
    model: dict[str, object],
    expected: list[list[int]],
    texts: list[list[int]],
    column: Column,
    drafter: str,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[int, int]:
    """Return the numbers of drafted and accepted tokens."""
    make = DRAFTERS[drafter](texts)
    if make is not None:
        install(monkeypatch, make)
    column = with_room(column)
    options = TREES if drafter == "tree" else SPECULATION
    outputs = run_column(column, params(column.siblings), model, dtype="float32", **options)
    check_tokens(outputs, expected)
    drafted = sum(output.num_drafted_tokens for output in outputs)
    accepted = sum(output.num_accepted_tokens for output in outputs)
    assert drafted > 0
    if drafter == "always right" and column.siblings == 1:
        assert accepted == drafted
    if drafter == "always wrong":  # except for tokens forced by a grammar
        free = [o for o, s in zip(outputs, params(), strict=True) if s.structured is None]
        assert sum(output.num_accepted_tokens for output in free) == 0
    return drafted, accepted


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
