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
    ALL_COLUMNS,
    ALL_OF_IT,
    BOTH,
    CONTEXT,
    FORMATS,
    SQUEEZED,
    STAGES,
    TIGHT,
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
FOUR = {"tensor_parallel_size": 4, "threads": 4}
EVERY = 4  # further tokens, so that most requests drop some, the longer ones in all layers
NAMES = (
    *("torch", "reference attention", "sdpa", "chunks of 5", "chunks of 33"),
    *("prefix hits, chunks", "no prefix cache"),
    *("preemption, chunks", "blocks of 1", "blocks of 8", "blocks of 64"),
    *("two threads", "siblings", "siblings, preemption", "three steps in flight, siblings"),
    *("recorded", "shuffled arrival", ALL_OF_IT.name),
    *("disk tier", "memory and disk tiers, chunks, siblings", "roles", "moved"),
    *("memory tier, chunks, two steps in flight", "swap, siblings, three steps in flight"),
)


def without_hits(column: Column) -> Column:
    """Expect no block of 64 to be reused, since the last queries before a cut are computed. So a
    preempted request of these lengths has nothing to load, either."""
    if column.must == "swaps":
        return replace(column, must="preemptions")
    return replace(column, must="") if column.config.get("block_size") == 64 else column


ALL = [without_hits(c) for c in by_name(ALL_COLUMNS, *NAMES)]
SOME = by_name(ALL, "prefix hits, chunks", "preemption, chunks", "siblings")
# `with_room` takes two blocks of each group away, which the longest request needs here.
DRAFTED = [
    replace(c, config={**c.config, "num_blocks": c.config["num_blocks"] + 2})
    if c.must == "preemptions"
    else c
    for c in SOME
]


@pytest.fixture(scope="module", autouse=True)
def frequent_cuts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolve, "Budget", partial(Budget, every=EVERY))
        yield


def with_budgets(model: dict[str, object], folder: Path) -> dict[str, object]:
    """Return the options of a model with budgets of `TOKENS` in the layers that see all keys."""
    spec = model_files(Path(str(model["model"]) or BUNDLED)).spec()
    of_layers = dict(zip(spec.full_layers, TOKENS, strict=False))
    budgets = tuple(map(of_layers.get, range(spec.num_layers)))
    scores = tuple(tokens and 1.0 for tokens in budgets)
    facts = spec.architecture, fingerprint_of(spec), "entropy", 0.25, CONTEXT, "", 0
    save_budgets(KVBudgets(*facts, scores=scores, budgets=budgets), folder / "b.json")
    return {**model, "kv_budget": str(folder / "b.json")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return with_budgets({"model": ""}, tmp_path_factory.mktemp("budgets"))


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


CASES = [(c, "bfloat16") for c in of_bits(ALL)]
CASES += [(c, name) for c in SOME for name in ("KV in int8", "KV in int4")]
STAGED = [
    Column("pp2, hits, chunks", {**STAGES, "max_num_batched_tokens": 16}, rounds=2, must="hits"),
    Column("pp3", {"pipeline_parallel_size": 3, "threads": 3}),
    Column("pp2, preemption, siblings", {**STAGES, **SQUEEZED}, siblings=2, must="preemptions"),
    Column("pp2, drafts", {**STAGES, "spec_method": "ngram", **EAGER}),
]
DIVIDED = [
    Column("tp2, hits, chunks", {**TWO, "max_num_batched_tokens": 16}, rounds=2, must="hits"),
    Column("tp4, preemption, siblings", {**FOUR, **SQUEEZED}, siblings=2, must="preemptions"),
    Column("tp2 pp2, preemption", {**BOTH, **SQUEEZED}, siblings=2, must="preemptions"),
    Column("tp2, drafts", {**TWO, "spec_method": "ngram", **EAGER}),
]
DIVIDED += [
    Column(f"{name}, memory tier", {**TIGHT, **way}, rounds=2, must="loads")
    for name, way in (("tp2", TWO), ("pp2", {**STAGES, "max_num_seqs": 4}))
]
CASES += [(c, "bfloat16") for c in (*STAGED, *DIVIDED)]
CASES += [(c, "KV in int8") for c in (STAGED[0], DIVIDED[0])]


@pytest.mark.each(2)
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


@needs_native
@pytest.mark.full
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("cut", ["exact", "fast"])
def test_tokens_do_not_depend_on_groups_with_torchs_kernels(model, expected, cut):
    config = {**TWO, "kernels": "torch", "max_num_batched_tokens": 33, "tensor_parallel_cut": cut}
    checked_tokens(Column("a group", config), model, expected)


# Beside layers that drop tokens they have others, with windows of their own or with states. Scores
# of the first are capped; heads of the third have learned sinks.
OTHERS = ("capped", "chunked", "gpt-oss", "narrow", "states", "spaces", "beside")
OF_OTHERS = [
    *by_name(ALL, "torch", "prefix hits, chunks", "siblings, preemption"),
    *by_name(ALL, "memory tier, chunks, two steps in flight", "moved"),
    *by_name(ALL, "three steps in flight, siblings", ALL_OF_IT.name),
    *by_name([*STAGED, *DIVIDED], "pp2, hits, chunks", "tp2, hits, chunks"),
]


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Callable[[str], tuple[dict[str, object], list[RequestOutput]]]:
    """Return a model with budgets, and its outputs with logprobs of one request at a time."""

    def make(name: str) -> tuple[dict[str, object], list[RequestOutput]]:
        folder = tmp_path_factory.mktemp("model")
        made = with_budgets(make_model(name, folder), folder)
        return made, reference_outputs({**made, "dtype": "bfloat16"})

    return cache(make)


@needs_native
@pytest.mark.usefixtures("forked")
@pytest.mark.each(2)  # what a column adds hardly depends on the other layers
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    "column",
    [
        pytest.param(c, marks=() if c.name == "prefix hits, chunks" else pytest.mark.full)
        for c in OF_OTHERS
    ],
    ids=named,
)
def test_other_layers_beside_them(other, name, column):
    made, alone = other(name)
    checked_beside(column, made, alone)


def test_trees_of_heads_have_no_branches(model, monkeypatch):
    """Two drafts of one position would share the place of a kept query."""
    monkeypatch.setattr(resolve, "Budget", Budget)  # cuts are further apart than a tree is large
    options = {**EAGER, "spec_method": "medusa", **METHODS["medusa"], "spec_tokens": 16}
    outputs = run_column(Column("batch"), params(), model, **options)
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
