"""Greedy and seeded tokens are the same however the engine produces them.

The reference is a plain run: one request at a time, torch's operations, plain torch attention, no
prefix cache, no chunking. Each column of the matrix enables features; every new feature adds a
column.

This holds in fp32, where rounding hardly ever decides between two tokens. The native kernels
guarantee more: log probabilities are the same to the bit, in every format of weights and KV cache.
"""

from __future__ import annotations

import pytest
from helpers.matrix import (
    ALL_COLUMNS,
    BITS,
    FORMATS,
    LATENT_COLUMNS,
    MODELS,
    by_name,
    by_tier,
    checked_bits,
    checked_tokens,
    named,
)
from helpers.optional_native import needs_native


@pytest.mark.each(2)  # what a column adds hardly depends on the layers of a model
@pytest.mark.parametrize("column", by_tier(ALL_COLUMNS), ids=named)
def test_tokens_do_not_depend_on_how_they_are_made(model, expected, column):
    checked_tokens(column, model, expected)


ENTRIES = [
    *by_name(ALL_COLUMNS, "prefix hits, chunks", "siblings, preemption"),
    *(
        pytest.param(column, marks=pytest.mark.full)
        for column in by_name(
            ALL_COLUMNS,
            *("chunks of 5", "preemption, chunks", "memory tier, chunks, two steps in flight"),
            *("blocks of 64", "sdpa"),
        )
    ),
]


@pytest.mark.parametrize("name", ["entries", "pools"])
@pytest.mark.parametrize("column", ENTRIES, ids=named)
def test_tokens_do_not_depend_on_when_entries_are_made(model, expected, column):
    checked_tokens(column, model, expected)


OF_BITS = by_name(BITS, "prefix hits, chunks", "chunks of 5", "preemption, chunks", "two threads")


@needs_native
@pytest.mark.parametrize("name", ["entries", "pools"])
@pytest.mark.parametrize("format", ["bfloat16"])
@pytest.mark.parametrize("column", OF_BITS, ids=named)
def test_bits_do_not_depend_on_when_entries_are_made(model, one_at_a_time, format, column, caplog):
    checked_bits(column, model, format, one_at_a_time)
    assert not caplog.records  # every step was replayed


OF_THE_CACHE = ("bfloat16", *(name for name in FORMATS if name.startswith("KV")))


@needs_native
@pytest.mark.each(2)  # the models and formats differ in what kernels read, the columns in when
@pytest.mark.parametrize("format", OF_THE_CACHE)
@pytest.mark.parametrize("column", BITS, ids=named)
def test_native_logprobs_are_the_same_to_the_bit(model, format, one_at_a_time, column, caplog):
    checked_bits(column, model, format, one_at_a_time)
    assert not caplog.records  # every step was replayed


# Products of matrices depend on nothing but the number of rows, and on threads.
ROWS = by_name(BITS, "batch", "chunks of 5", "chunks of 33", "two threads")


@needs_native
@pytest.mark.each(2)
@pytest.mark.parametrize("name", MODELS[:2])
@pytest.mark.parametrize("format", [f for f in FORMATS if f not in OF_THE_CACHE])
@pytest.mark.parametrize("column", ROWS, ids=named)
def test_formats_of_weights_have_the_same_bits(model, format, one_at_a_time, column, caplog):
    checked_bits(column, model, format, one_at_a_time)
    assert not caplog.records  # every step was replayed


@needs_native
@pytest.mark.parametrize("name", ["latent", "indexed", "narrow", "alibi", "blocks", "shortcuts"])
@pytest.mark.parametrize("format", ["bfloat16", "KV in int8"])
@pytest.mark.parametrize("column", LATENT_COLUMNS, ids=named)
def test_other_vectors_have_the_same_bits(model, format, one_at_a_time, column, caplog):
    checked_bits(column, model, format, one_at_a_time)
    assert not caplog.records  # every step was replayed
