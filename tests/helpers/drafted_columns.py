"""Columns of the matrix with drafts, of scripted and of real drafters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

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
from helpers.matrix import COLUMNS, Column, by_name, checked_tokens, params

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
# Methods of users, and their options for the bundled model.
METHODS = {
    "ngram": {},
    "draft_model": {"spec_model": str(BUNDLED.parent / "stories-draft")},
    "medusa": {"spec_model": str(BUNDLED.parent / "stories-medusa")},
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
# Columns for all drafters.
SOME = by_name(
    COLUMNS,
    *("torch", "reference attention", "prefix hits, chunks", "preemption, chunks", "siblings"),
)


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
    options = TREES if drafter == "tree" else SPECULATION
    outputs = checked_tokens(with_room(column), model, expected, **options)
    drafted = sum(output.num_drafted_tokens for output in outputs)
    accepted = sum(output.num_accepted_tokens for output in outputs)
    assert drafted > 0
    if drafter == "always right" and column.siblings == 1:
        assert accepted == drafted
    if drafter == "always wrong":  # except for tokens forced by a grammar
        free = [o for o, s in zip(outputs, params(), strict=True) if s.structured is None]
        assert sum(output.num_accepted_tokens for output in free) == 0
    return drafted, accepted
