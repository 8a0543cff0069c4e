"""The matrix for a window with sinks: tokens between them are dropped, and a prefix hit needs only
the rest. Log probabilities are the same to the bit, also with drafts and with quantised keys and
values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from helpers.drafted_columns import EAGER, METHODS
from helpers.matrix import (
    ALL_COLUMNS,
    ALL_OF_IT,
    FORMATS,
    STAGES,
    TWO,
    Column,
    by_name,
    by_tier,
    checked_beside,
    checked_bits,
    checked_tokens,
    make_model,
    named,
    of_bits,
    reference_outputs,
    reference_tokens,
)
from helpers.optional_native import needs_native

from kvik.engine.output import RequestOutput

WINDOW = {"window": 36, "attention_sinks": 3}
MODEL: dict[str, object] = {"model": "", **WINDOW}
NAMES = (
    *("batch", "torch", "reference attention", "sdpa", "chunks of 5", "chunks of 33"),
    *("prefix hits", "prefix hits, chunks", "no prefix cache", "preemption", "preemption, chunks"),
    *("blocks of 1", "blocks of 8", "blocks of 64", "two threads", "siblings"),
    *("siblings, preemption", "three steps in flight, siblings", "recorded", "wire, preemption"),
    *("pins", "memory tier", "disk tier", "swap", ALL_OF_IT.name),
)


def fewer_blocks(column: Column) -> Column:
    """Reduce the blocks, since requests hold only what they see."""
    config = dict(column.config)
    if "num_blocks" in config:
        config["num_blocks"] = 7 if "max_num_batched_tokens" in config else 10
    return replace(column, config=config)


EVERY = [fewer_blocks(c) for c in by_name(ALL_COLUMNS, *NAMES)]
SOME = by_name(EVERY, "prefix hits, chunks", "preemption, chunks", "siblings")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return reference_tokens(MODEL)


@cache
def alone(format: str) -> list[RequestOutput]:
    """Outputs with logprobs of one request at a time."""
    return reference_outputs({**MODEL, **FORMATS[format]})


@pytest.mark.parametrize("column", by_tier(EVERY, fast=SOME), ids=named)
def test_tokens_do_not_depend_on_how_they_are_made(expected, column):
    checked_tokens(column, MODEL, expected)


@needs_native
@pytest.mark.full
@pytest.mark.parametrize("column", SOME, ids=named)
def test_distances_of_alibi_are_the_same(column, tmp_path, caplog):
    model = {**MODEL, **make_model("alibi", tmp_path)}
    checked_bits(column, model, "bfloat16", reference_outputs({**model, **FORMATS["bfloat16"]}))
    assert not caplog.records


CASES = [(c, "bfloat16") for c in of_bits(EVERY)]
CASES += [(c, name) for c in SOME for name in ("KV in int8", "KV in int4", "KV in fp8")]


@needs_native
@pytest.mark.full
@pytest.mark.parametrize(("column", "format"), CASES, ids=named)
def test_native_logprobs_are_the_same_to_the_bit(column, format, caplog):
    checked_bits(column, MODEL, format, alone(format))
    assert not caplog.records  # every step was replayed


@needs_native
@pytest.mark.full
@pytest.mark.parametrize("column", SOME, ids=named)
@pytest.mark.parametrize("method", ["ngram", "medusa"])
def test_native_logprobs_have_the_same_bits_with_drafts(column, method, caplog):
    options = {**EAGER, "spec_method": method, **METHODS[method]}
    found = checked_bits(roomy(column), MODEL, "bfloat16", alone("bfloat16"), **options)
    assert not caplog.records
    assert sum(output.num_drafted_tokens for output in found)


# Beside layers with that window they have others, with windows of their own or with states.
OTHERS = ("windowed", "capped", "gpt-oss", "narrow", "states", "spaces", "beside")
OF_OTHERS = [
    *by_name(EVERY, "torch", "prefix hits, chunks", "disk tier"),
    *by_name(EVERY, "siblings, preemption", ALL_OF_IT.name),
    *(Column("tp2", TWO), Column("pp2", STAGES)),
]
LEFT_OUT = ("windowed", "pp2")  # it reads vectors of tokens in its layers


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Callable[[str], tuple[dict[str, object], list[RequestOutput]]]:
    """Return a model with the window, and its outputs with logprobs of one request at a time."""

    def make(name: str) -> tuple[dict[str, object], list[RequestOutput]]:
        made = {**make_model(name, tmp_path_factory.mktemp("model")), **WINDOW}
        return made, reference_outputs({**made, "dtype": "bfloat16"})

    return cache(make)


@needs_native
@pytest.mark.usefixtures("forked")
@pytest.mark.each(2)  # what a column adds hardly depends on the other layers
@pytest.mark.parametrize(
    ("name", "column"),
    [
        pytest.param(
            name,
            column,
            marks=() if column.name == "prefix hits, chunks" else pytest.mark.full,
            id=f"{name}-{column.name}",
        )
        for name in OTHERS
        for column in OF_OTHERS
        if (name, column.name) != LEFT_OUT
    ],
)
def test_other_layers_beside_them(other, name, column):
    made, alone = other(name)
    checked_beside(column, made, alone)


def roomy(column: Column) -> Column:
    return replace(column, config={**column.config, "max_num_seqs": 6})


@needs_native
@pytest.mark.full
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "processes",
    [{"tensor_parallel_size": 2, "threads": 2}, {"pipeline_parallel_size": 2, "threads": 2}],
    ids=["tp2", "pp2"],
)
def test_native_logprobs_have_the_same_bits_in_several_processes(processes, caplog):
    (column,) = by_name(EVERY, "preemption, chunks")
    format = "KV in int8"
    checked_bits(column, MODEL, format, alone(format), **processes)
    assert not caplog.records
