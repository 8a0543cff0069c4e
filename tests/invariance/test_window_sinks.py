"""The matrix for a window with sinks: tokens between them are dropped, and a prefix hit needs only
the rest. Log probabilities are the same to the bit, also with drafts and with quantised keys and
values."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.matrix import (
    ALL_OF_IT,
    BITS,
    COLUMNS,
    FORMATS,
    SERVED,
    Column,
    check_bits,
    check_tokens,
    params,
    params_with_logprobs,
    reference_outputs,
    reference_tokens,
    run_column,
)
from helpers.optional_native import needs_native

from kvik.config.model_source import BUNDLED
from kvik.engine.output import RequestOutput

MODEL: dict[str, object] = {"model": "", "window": 36, "attention_sinks": 3}
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


EVERY = [fewer_blocks(c) for c in [*COLUMNS, *SERVED, ALL_OF_IT] if c.name in NAMES]
SOME = [c for c in EVERY if c.name in ("prefix hits, chunks", "preemption, chunks", "siblings")]
EAGER = {"speculative_config": {"adaptive": False}}
MEDUSA = {**EAGER, "spec_method": "medusa", "spec_model": str(BUNDLED.parent / "stories-medusa")}


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return reference_tokens(MODEL)


@pytest.fixture(scope="module")
def alone() -> dict[str, list[RequestOutput]]:
    """Outputs with logprobs of one request at a time, in each of some formats."""
    names = ("bfloat16", "KV in int8", "KV in int4", "KV in fp8")
    return {name: reference_outputs({**MODEL, **FORMATS[name]}) for name in names}


@pytest.mark.parametrize(
    "column",
    [c if c in SOME else pytest.param(c, marks=pytest.mark.full) for c in EVERY],
    ids=lambda column: column.name,
)
def test_tokens_do_not_depend_on_how_they_are_made(expected, column):
    outputs = run_column(column, params(column.siblings), MODEL, dtype="float32")
    check_tokens(outputs, expected)


def checked(column, alone, **options):
    found = run_column(column, params_with_logprobs(column.siblings), MODEL, **options)
    check_bits(found, alone)
    return found


BIT_COLUMNS = [c for c in EVERY if c.name in {b.name for b in BITS}]
CASES = [(c, "bfloat16") for c in BIT_COLUMNS]
CASES += [(c, name) for c in SOME for name in ("KV in int8", "KV in int4", "KV in fp8")]


@needs_native
@pytest.mark.full
@pytest.mark.parametrize(("column", "weights"), CASES, ids=lambda c: getattr(c, "name", c))
def test_native_logprobs_are_the_same_to_the_bit(alone, column, weights, caplog):
    checked(column, alone[weights], **FORMATS[weights])
    assert not caplog.records  # every step was replayed


@needs_native
@pytest.mark.full
@pytest.mark.parametrize("column", SOME, ids=lambda column: column.name)
@pytest.mark.parametrize(
    "options", [{**EAGER, "spec_method": "ngram"}, MEDUSA], ids=["ngram", "medusa"]
)
def test_native_logprobs_have_the_same_bits_with_drafts(alone, column, options, caplog):
    found = checked(roomy(column), alone["bfloat16"], dtype="bfloat16", **options)
    assert not caplog.records
    assert sum(output.num_drafted_tokens for output in found)


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
def test_native_logprobs_have_the_same_bits_in_several_processes(alone, processes, caplog):
    (column,) = (c for c in EVERY if c.name == "preemption, chunks")
    found = replace(column, config={**column.config, **processes})
    checked(found, alone["KV in int8"], **FORMATS["KV in int8"])
    assert not caplog.records
