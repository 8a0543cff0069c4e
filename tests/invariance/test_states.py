"""The matrix for layers with a state: a prefix hit continues from a copy of a state, and so does a
preempted request. Tiers and other engines keep copies too. Drafts are in no state until they are
accepted. Log probabilities are the same to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.drafted_columns import (
    DRAFTERS,
    EAGER,
    SPECULATION,
    TOKENS,
    check_drafts,
    with_room,
)
from helpers.drafters import ScriptedTree, install
from helpers.matrix import (
    ALL_COLUMNS,
    ALL_OF_IT,
    STATES,
    by_name,
    by_tier,
    checked_bits,
    checked_tokens,
    make_model,
    named,
    of_bits,
    params,
    prompts,
    reference_outputs,
    reference_tokens,
)
from helpers.optional_native import needs_native
from helpers.untrained_heads import save_heads

from kvik.core.types import SamplingParams
from kvik.engine.output import RequestOutput
from kvik.llm import LLM
from kvik.worker.draft_tree import DraftTree

NAMES = (
    *("torch", "chunks of 5", "prefix hits, chunks", "no prefix cache", "preemption"),
    *("preemption, chunks", "blocks of 8", "two threads", "siblings", "siblings, preemption"),
    *("three steps in flight, siblings", "two steps in flight, preemption, chunks"),
    *("wire, preemption", "pins", ALL_OF_IT.name),
    *("memory tier, chunks, two steps in flight", "memory and disk tiers, chunks, siblings"),
    *("swap", "swap to the disk", "roles", "moved"),
)
EVERY = by_name(ALL_COLUMNS, *NAMES)
(PLAIN,) = by_name(EVERY, "prefix hits, chunks")


# Layers without a state, which only the second has, are in other matrices.
@pytest.fixture(
    scope="module",
    params=[
        "states",
        pytest.param("spaces", marks=pytest.mark.nightly),
        "beside",
        pytest.param("rows", marks=pytest.mark.full),
        pytest.param("pure", marks=pytest.mark.full),
        pytest.param("channels", marks=pytest.mark.full),
        pytest.param("decays", marks=pytest.mark.full),
        pytest.param("turns", marks=pytest.mark.full),
    ],
)
def model(request, tmp_path_factory) -> dict[str, object]:
    return make_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    return reference_tokens(model)


@pytest.fixture(scope="module")
def one_at_a_time(model) -> list[RequestOutput]:
    return reference_outputs({**model, "dtype": "bfloat16"})


# What a column adds hardly depends on the kind of state.
TWO_MODELS = pytest.mark.each(2)


@TWO_MODELS
@pytest.mark.parametrize("column", by_tier(EVERY), ids=named)
def test_tokens_do_not_depend_on_how_they_are_made(model, expected, column):
    checked_tokens(column, model, expected)


@needs_native
@TWO_MODELS
@pytest.mark.parametrize("column", of_bits(EVERY), ids=named)
def test_native_logprobs_are_the_same_to_the_bit(model, one_at_a_time, column, caplog):
    checked_bits(column, model, "bfloat16", one_at_a_time)
    assert not caplog.records  # every step was replayed


@pytest.fixture(scope="module")
def texts(expected) -> list[list[int]]:
    """Return prompts with their answers."""
    found = zip(prompts(STATES["vocab_size"]), expected, strict=True)
    return [[*prompt, *tokens] for prompt, tokens in found]


@TWO_MODELS
@pytest.mark.parametrize("column", by_tier(EVERY), ids=named)
def test_tokens_do_not_depend_on_drafts(model, expected, texts, column, monkeypatch):
    drafted, accepted = check_drafts(
        model, expected, texts, column, "right now and then", monkeypatch
    )
    assert 0 < accepted < drafted


@pytest.mark.parametrize("drafter", ["always right", "always wrong", "prompt lookup"])
def test_tokens_do_not_depend_on_the_drafter(model, expected, texts, drafter, monkeypatch):
    check_drafts(model, expected, texts, PLAIN, drafter, monkeypatch)


@pytest.mark.parametrize(
    "column",
    by_name(EVERY, "prefix hits, chunks", "preemption, chunks", "siblings"),
    ids=named,
)
def test_a_draft_model_with_states_guesses_what_it_would_say(model, expected, column):
    """It is the target itself, so greedy drafts are right."""
    options = {**EAGER, "spec_method": "draft_model", "spec_model": model["model"]}
    outputs = checked_tokens(with_room(column), model, expected, spec_tokens=TOKENS, **options)
    assert any(output.num_drafted_tokens for output in outputs)
    for output, sampling in zip(outputs, params(), strict=True):
        if sampling.temperature == 0.0:
            assert output.num_accepted_tokens == output.num_drafted_tokens


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_trees_of_heads_have_no_branches(model, expected, kind, tmp_path):
    save_heads(tmp_path, kind, hidden=32)
    options = {**EAGER, "spec_method": kind, "spec_model": str(tmp_path), "spec_tokens": 16}
    (column,) = by_name(EVERY, "no prefix cache")
    outputs = checked_tokens(column, model, expected, **options)
    completions = [completion for output in outputs for completion in output.outputs]
    drafts = [c.speculation.drafts for c in completions if c.speculation is not None]
    assert 0 < sum(d.drafts for d in drafts) <= 3 * sum(d.rows for d in drafts)


def test_a_tree_without_branches(model, expected, texts, monkeypatch):
    monkeypatch.setattr(ScriptedTree, "TREE", DraftTree.best([[0.5]] * 4, 4))
    drafted, accepted = check_drafts(model, expected, texts, PLAIN, "tree", monkeypatch)
    assert 0 < accepted < drafted


@pytest.mark.parametrize(
    "model", ["states", pytest.param("beside", marks=pytest.mark.full)], indirect=True
)
def test_a_second_turn_continues_from_a_state_with_drafts(model, expected, texts, monkeypatch):
    """The copy of a state was made after a step whose drafts passed the border of a block."""
    install(monkeypatch, DRAFTERS["always right"](texts))
    options = {**model, "block_size": 8}
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    hits = set()
    with LLM(**options, **SPECULATION) as llm, LLM(**options) as plain:
        for text, answer in list(zip(texts, expected, strict=True))[1:6]:  # greedy ones
            for length in range(5, 13):
                prompt = text[: -len(answer)]
                (first,) = llm.generate([prompt], [replace(greedy, max_tokens=length)])
                again = [*prompt, *first.outputs[0].token_ids, 5, 6]
                (found,), (wanted,) = (one.generate([again], [greedy]) for one in (llm, plain))
                assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
                hits.add(found.num_cached_tokens - (len(prompt) - 1) // 8 * 8)
    assert max(hits) >= 8  # beyond the prompt


@needs_native
@TWO_MODELS
@pytest.mark.parametrize("column", of_bits(EVERY), ids=named)
def test_native_logprobs_have_the_same_bits_with_drafts(
    model, one_at_a_time, column, caplog, monkeypatch
):
    texts = [[*out.prompt_token_ids, *out.outputs[0].token_ids] for out in one_at_a_time]
    install(monkeypatch, DRAFTERS["right now and then"](texts))
    found = checked_bits(with_room(column), model, "bfloat16", one_at_a_time, **SPECULATION)
    assert not caplog.records  # every step was replayed
    assert sum(output.num_accepted_tokens for output in found) > 0
