"""The matrix for layers with budgets: they keep the same tokens however a request is computed. Log
probabilities are the same to the bit, also with quantised keys and values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from helpers.drafted_columns import DRAFTERS, EAGER, METHODS, SPECULATION, check_drafts, with_room
from helpers.drafters import install
from helpers.matrix import (
    ALL_OF_IT,
    BITS,
    COLUMNS,
    CONTEXT,
    FORMATS,
    SERVED,
    SQUEEZED,
    STAGES,
    Column,
    by_tier,
    checked_bits,
    checked_tokens,
    named,
    params,
    prompts,
    reference_outputs,
    reference_tokens,
    run_column,
    tokens_of,
)
from helpers.optional_native import needs_native
from safetensors.torch import save_file

from kvik.config import resolve
from kvik.config.kv_budget import KVBudgets, fingerprint_of, save_budgets
from kvik.config.model_source import BUNDLED
from kvik.engine.output import RequestOutput
from kvik.model_files import model_files
from kvik.spec.visible_keys import Budget

TOKENS = (36, 36, 40, 40, 44, 44)  # of each layer: three KV groups
EVERY = 4  # further tokens, so that most requests drop some, the longer ones in all layers
NAMES = (
    *("batch", "torch", "reference attention", "sdpa", "chunks of 5", "chunks of 33"),
    *("prefix hits", "prefix hits, chunks", "no prefix cache"),
    *("preemption", "preemption, chunks", "blocks of 1", "blocks of 8", "blocks of 64"),
    *("two threads", "siblings", "siblings, preemption", "three steps in flight, siblings"),
    *("two steps in flight, preemption, chunks", "recorded", "wire, preemption", "pins"),
    *("tenants, preemption", "shuffled arrival", ALL_OF_IT.name),
)


def without_hits(column: Column) -> Column:
    """Expect no block of 64 to be reused, since the last queries before a cut are computed."""
    return replace(column, must="") if column.config.get("block_size") == 64 else column


ALL = [without_hits(c) for c in [*COLUMNS, *SERVED, ALL_OF_IT] if c.name in NAMES]
SOME = [c for c in ALL if c.name in ("prefix hits, chunks", "preemption, chunks", "siblings")]
# `with_room` takes two blocks of each group away, which the longest request needs here.
DRAFTED = [
    replace(c, config={**c.config, "num_blocks": c.config["num_blocks"] + 2})
    if c.must == "preemptions"
    else c
    for c in SOME
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    spec = model_files(Path(BUNDLED)).spec()
    file = tmp_path_factory.mktemp("budgets") / "b.json"
    facts = spec.architecture, fingerprint_of(spec), "entropy", 0.25, CONTEXT, "", 0
    save_budgets(KVBudgets(*facts, scores=(1.0,) * len(TOKENS), budgets=TOKENS), file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "Budget", partial(Budget, every=EVERY))
        yield {"model": "", "kv_budget": str(file)}


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    return reference_tokens(model)


@pytest.fixture(scope="module")
def texts(expected) -> list[list[int]]:
    """Prompts with their answers."""
    known = prompts(model_files(Path(BUNDLED)).spec().vocab_size)
    return [[*prompt, *tokens] for prompt, tokens in zip(known, expected, strict=True)]


@pytest.fixture(scope="module")
def alone(model) -> Callable[[str], list[RequestOutput]]:
    """Outputs with logprobs of one request at a time, in a format."""
    return cache(lambda format: reference_outputs({**model, **FORMATS[format]}))


def test_dropped_tokens_change_answers(expected):
    assert expected != tokens_of("bundled")


@pytest.mark.parametrize("column", by_tier(ALL, fast=SOME), ids=named)
def test_tokens_do_not_depend_on_how_they_are_made(model, expected, column):
    checked_tokens(column, model, expected)


BIT_COLUMNS = [c for c in ALL if c.name in {b.name for b in BITS}]
CASES = [(c, "bfloat16") for c in BIT_COLUMNS]
CASES += [(c, name) for c in SOME for name in ("KV in int8", "KV in int4")]
STAGED = [
    Column("pp2", STAGES),
    Column("pp2, hits, chunks", {**STAGES, "max_num_batched_tokens": 16}, rounds=2, must="hits"),
    Column("pp3", {"pipeline_parallel_size": 3, "threads": 3}),
    Column("pp2, preemption, siblings", {**STAGES, **SQUEEZED}, siblings=2, must="preemptions"),
    Column("pp2, drafts", {**STAGES, "spec_method": "ngram", **EAGER}),
]
CASES += [(c, "bfloat16") for c in STAGED] + [(STAGED[1], "KV in int8")]


@pytest.mark.parametrize("drafter", ["always right", "right now and then", "prompt lookup"])
@pytest.mark.parametrize("column", by_tier(DRAFTED, fast=DRAFTED[:1]), ids=named)
def test_tokens_do_not_depend_on_drafts(model, expected, texts, column, drafter, monkeypatch):
    """No step computes drafts past a cut, as their keys would be dropped with others."""
    drafted, accepted = check_drafts(model, expected, texts, column, drafter, monkeypatch)
    assert 0 < accepted <= drafted


@needs_native
@pytest.mark.full
@pytest.mark.usefixtures("forked")
def test_tokens_do_not_depend_on_stages_with_torchs_kernels(model, expected):
    config = {**STAGES, "kernels": "torch", "max_num_batched_tokens": 33}
    checked_tokens(Column("stages", config), model, expected)


def test_trees_of_heads_have_no_branches(model, monkeypatch):
    """Two drafts of one position would share the place of a kept query."""
    monkeypatch.setattr(resolve, "Budget", Budget)  # cuts are further apart than a tree is large
    options = {**EAGER, "spec_method": "medusa", **METHODS["medusa"], "spec_tokens": 16}
    outputs = run_column(ALL[0], params(), model, **options)
    drafts = [c.speculation.drafts for o in outputs for c in o.outputs if c.speculation]
    assert 0 < sum(d.drafts for d in drafts) <= 4 * sum(d.rows for d in drafts)


def test_tokens_do_not_depend_on_an_eagle_head(model, expected, tmp_path):
    sizes = {"fc.weight": (256, 512), "fc.bias": (256,), "norm.weight": (256,)}
    sizes |= {f"mlp.{name}_proj.weight": (16, 256) for name in ("gate", "up")}
    sizes["mlp.down_proj.weight"] = (256, 16)
    rng = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(*size, generator=rng) for name, size in sizes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    facts = {"model_type": "eagle", "hidden_size": 256, "vocab_size": 2048, "num_steps": 3}
    (tmp_path / "config.json").write_text(json.dumps({**facts, "intermediate_size": 16}))
    options = {**EAGER, "spec_method": "eagle", "spec_model": str(tmp_path)}
    outputs = checked_tokens(with_room(SOME[0]), model, expected, **options)
    assert sum(output.num_drafted_tokens for output in outputs)


@needs_native
@pytest.mark.full
@pytest.mark.parametrize("column", DRAFTED, ids=named)
def test_native_logprobs_have_the_same_bits_with_drafts(model, alone, column, caplog, monkeypatch):
    outputs = alone("bfloat16")
    texts = [[*out.prompt_token_ids, *out.outputs[0].token_ids] for out in outputs]
    install(monkeypatch, DRAFTERS["right now and then"](texts))
    found = checked_bits(with_room(column), model, "bfloat16", outputs, **SPECULATION)
    assert not [r for r in caplog.records if "lossy" not in r.getMessage()]  # all were replayed
    assert sum(output.num_accepted_tokens for output in found) > 0


@needs_native
@pytest.mark.full
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("column", "format"), CASES, ids=named)
def test_native_logprobs_are_the_same_to_the_bit(model, alone, column, format, caplog):
    checked_bits(column, model, format, alone(format))
    assert not [r for r in caplog.records if "lossy" not in r.getMessage()]  # all were replayed
