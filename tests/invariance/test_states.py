"""The matrix for layers with a state: a prefix hit continues from a copy of a state, and so does a
preempted request. Log probabilities are the same to the bit."""

from __future__ import annotations

import json

import pytest
from helpers.matrix import (
    ALL_OF_IT,
    BITS,
    COLUMNS,
    SERVED,
    by_tier,
    checked_bits,
    checked_tokens,
    named,
    reference_outputs,
    reference_tokens,
)
from helpers.optional_native import needs_native

from kvik.engine.output import RequestOutput

STATES = {  # a delta net, attention, a delta net
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "torch_dtype": "float32",
}
NAMES = (
    *("torch", "chunks of 5", "prefix hits, chunks", "no prefix cache", "preemption"),
    *("preemption, chunks", "blocks of 8", "two threads", "siblings", "siblings, preemption"),
    *("three steps in flight, siblings", "two steps in flight, preemption, chunks"),
    *("wire, preemption", "pins", ALL_OF_IT.name),
)
EVERY = [c for c in [*COLUMNS, *SERVED, ALL_OF_IT] if c.name in NAMES]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("states")
    (folder / "config.json").write_text(json.dumps(STATES))
    return {"model": str(folder), "load_format": "random", "seed": 3}


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    return reference_tokens(model)


@pytest.fixture(scope="module")
def one_at_a_time(model) -> list[RequestOutput]:
    return reference_outputs({**model, "dtype": "bfloat16"})


@pytest.mark.parametrize("column", by_tier(EVERY), ids=named)
def test_tokens_do_not_depend_on_how_they_are_made(model, expected, column):
    checked_tokens(column, model, expected)


@needs_native
@pytest.mark.parametrize(
    "column", [c for c in EVERY if c.name in {c.name for c in BITS}], ids=named
)
def test_native_logprobs_are_the_same_to_the_bit(model, one_at_a_time, column, caplog):
    checked_bits(column, model, "bfloat16", one_at_a_time)
    assert not caplog.records  # every step was replayed
