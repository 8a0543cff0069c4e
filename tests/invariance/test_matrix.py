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
    ALL_OF_IT,
    BITS,
    COLUMNS,
    LATENT_COLUMNS,
    SERVED,
    check_bits,
    check_tokens,
    params,
    params_with_logprobs,
    run_column,
)
from helpers.optional_native import needs_native


@pytest.mark.parametrize("column", [*COLUMNS, *SERVED, ALL_OF_IT], ids=lambda column: column.name)
def test_tokens_do_not_depend_on_how_they_are_made(model, expected, column):
    outputs = run_column(column, params(column.siblings), model, dtype="float32")
    check_tokens(outputs, expected)


@needs_native
@pytest.mark.parametrize("column", BITS, ids=lambda column: column.name)
def test_native_logprobs_are_the_same_to_the_bit(model, weights, one_at_a_time, column, caplog):
    sampling = params_with_logprobs(column.siblings)
    found = run_column(column, sampling, model, **weights)
    assert not caplog.records  # every step was replayed
    check_bits(found, one_at_a_time)


@needs_native
@pytest.mark.parametrize("column", LATENT_COLUMNS, ids=lambda column: column.name)
def test_latent_attention_has_the_same_bits_in_all_columns(latent_alone, column, caplog):
    model, alone = latent_alone
    found = run_column(column, params_with_logprobs(), model)
    assert not caplog.records  # every step was replayed
    check_bits(found, alone)
