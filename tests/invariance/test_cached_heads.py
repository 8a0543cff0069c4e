"""The matrix with drafts of heads that read all hidden states: of the own heads of a model with
states and of one with latent vectors and experts, and of EAGLE-3; and with an assistant that reads
the model's keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from helpers.assistants import save_assistant
from helpers.drafted_columns import EAGER, TOKENS, with_room
from helpers.eagle3 import save_eagle3
from helpers.matrix import (
    ALL_COLUMNS,
    ALL_OF_IT,
    BOTH,
    MEMORY_TIER,
    SQUEEZED,
    STAGES,
    TWO,
    Column,
    by_name,
    by_tier,
    checked_bits,
    checked_tokens,
    of_bits,
    reference_outputs,
    reference_tokens,
)
from helpers.optional_native import needs_native
from helpers.predicting import save_predicting

from kvik.config.draft_heads import is_assistant
from kvik.engine.output import RequestOutput
from kvik.spec.fields import read_json

NAMES = (
    *("torch", "sdpa", "chunks of 5", "prefix hits, chunks", "no prefix cache", "preemption"),
    *("preemption, chunks", "blocks of 8", "two threads", "siblings", "siblings, preemption"),
    *("three steps in flight, siblings", "wire, preemption", "recorded", ALL_OF_IT.name),
    *("swap, siblings, three steps in flight", "disk tier", "moved"),
)
EVERY = by_name(ALL_COLUMNS, *NAMES)
DIVIDED = [
    Column("tp2, hits, chunks", {**TWO, "max_num_batched_tokens": 16}, rounds=2, must="hits"),
    Column("tp2, preemption, siblings", {**TWO, **SQUEEZED}, siblings=2, must="preemptions"),
    Column("tp2, swap, siblings", {**SQUEEZED, **MEMORY_TIER, **TWO}, siblings=2, must="swaps"),
    Column("pp2, hits, chunks", {**STAGES, "max_num_batched_tokens": 16}, rounds=2, must="hits"),
    Column("pp2, preemption, siblings", {**STAGES, **SQUEEZED}, siblings=2, must="preemptions"),
    Column("pp2, swap, siblings", {**SQUEEZED, **MEMORY_TIER, **STAGES}, siblings=2, must="swaps"),
    Column("tp2 pp2, preemption", {**BOTH, **SQUEEZED}, siblings=2, must="preemptions"),
]
APART = {"eagle3": save_eagle3, "assistant": save_assistant}  # in a folder of their own
FAST = (
    *("torch", "prefix hits, chunks", "preemption, chunks"),
    *("tp2, hits, chunks", "pp2, hits, chunks"),
)
LEFT_OUT = (
    # The steps in flight of a pipeline change a state before it can be kept.
    ("qwen3.5", "pp2, swap, siblings"),
    # On a busy machine the few preempted requests find their blocks still in the cache.
    ("eagle3", "swap, siblings, three steps in flight"),
)


def pairs(columns: Sequence[object]) -> list[object]:
    """Return the pairs of a model and a column."""
    return [
        pytest.param(case, *column.values, marks=column.marks, id=f"{case}-{column.values[0].name}")
        for case in ("qwen3.5", "glm-5", "eagle3", "assistant")
        for column in columns
        if (case, column.values[0].name) not in LEFT_OUT
    ]


def save(case: str, folder: Path) -> dict[str, object]:
    if case in APART:
        APART[case](folder)
        return {"model": str(folder / "model")}
    save_predicting(folder, case)
    return {"model": str(folder)}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory) -> Callable[[str], dict[str, object]]:
    return cache(lambda case: save(case, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def tokens_of(model_of) -> Callable[[str], list[list[int]]]:
    return cache(lambda case: reference_tokens(model_of(case)))


@pytest.fixture(scope="module")
def outputs_of(model_of) -> Callable[[str], list[RequestOutput]]:
    return cache(lambda case: reference_outputs({**model_of(case), "dtype": "bfloat16"}))


def options(model: dict[str, object]) -> dict[str, object]:
    head = Path(str(model["model"])).with_name("head")
    drafting = {"spec_method": "mtp"}
    if head.exists():
        assists = is_assistant(read_json(head / "config.json"))
        method = "assistant" if assists else "eagle3"
        drafting = {"spec_method": method, "spec_model": str(head)}
    return {**EAGER, **drafting, "spec_tokens": TOKENS}


def check(outputs: list[RequestOutput]) -> None:
    accepted = sum(output.num_accepted_tokens for output in outputs)
    assert 0 < accepted < sum(output.num_drafted_tokens for output in outputs)


ON_ALL = by_tier(EVERY, [c for c in EVERY if c.name in FAST])
IN_BITS = [
    pytest.param(c, marks=() if c.name in FAST else pytest.mark.full)
    for c in [*of_bits(EVERY), *DIVIDED]
]


@pytest.mark.each(1)  # what a column adds hardly depends on the kind of head
@pytest.mark.parametrize(("case", "column"), pairs(ON_ALL))
def test_tokens_do_not_depend_on_the_head(case, model_of, tokens_of, column):
    model = model_of(case)
    check(checked_tokens(with_room(column), model, tokens_of(case), **options(model)))


@needs_native
@pytest.mark.usefixtures("forked")
@pytest.mark.each(1)
@pytest.mark.parametrize(("case", "column"), pairs(IN_BITS))
def test_native_logprobs_have_the_same_bits(case, model_of, outputs_of, column, caplog):
    model = model_of(case)
    alone = outputs_of(case)
    check(checked_bits(with_room(column), model, "bfloat16", alone, **options(model)))
    assert not caplog.records  # every step was replayed
