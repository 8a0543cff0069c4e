"""Speculation through the offline API: the same answers, and correct figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from helpers.drafters import (
    METHOD,
    TREE_METHOD,
    Broken,
    Scripted,
    ScriptedTree,
    always_right,
    always_wrong,
    install,
    with_probability,
)

from kvik import LLM, ConfigError, RequestOutput, SamplingParams
from kvik.config.model_source import BUNDLED
from kvik.core.types import DraftCounts
from kvik.worker.adaptive import DraftControl
from kvik.worker.draft_tree import DraftTree
from kvik.worker.drafters.base import Drafter, DraftRows, Drafts
from kvik.worker.drafters.registry import DrafterParts

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
    "max_model_len": 256,
    "max_num_seqs": 8,
}
EAGER = {"adaptive": False}
PROMPTS = ["Once upon a time", "The fox", "A little bird", "In the village there was a tree"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

# Conditions that end or change an answer, also inside a run of accepted drafts.
ASKED: dict[str, dict[str, object]] = {
    "greedy": {},
    "short": {"max_tokens": 3},
    "one token": {"max_tokens": 1},
    "EOS": {"ignore_eos": False, "logit_bias": {0: 8.0, 4: 8.0}},
    "min_tokens": {"ignore_eos": False, "logit_bias": {0: 11.0, 4: 11.0}, "min_tokens": 12},
    "stop ids": {"stop_token_ids": (18, 562, 698)},
    "stop strings": {"stop": ("the ", "dog", "was")},
    "stop string kept": {"stop": ("and",), "include_stop_str_in_output": True},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 1, "logprobs": 0},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {5: 4.0, 7: -3.0}},
    "bad words": {"bad_words": (" the", " little girl", ".")},
    "allowed": {"allowed_token_ids": tuple(range(10, 60))},
    # With few tokens, most penalties depend on tokens a few places before, which are drafts.
    "penalties among few": {"allowed_token_ids": tuple(range(300, 306)), "frequency_penalty": 2.0},
    "bad words among few": {
        "allowed_token_ids": tuple(range(300, 306)),
        "bad_words": tuple((a, b) for a in range(300, 306) for b in (a, 300, 302)),
    },
    "seeded": {"temperature": 0.9, "seed": 7},
    "seeded, all rules": {
        "temperature": 1.2,
        "seed": 8,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "min_tokens": 5,
        "logprobs": 2,
        "bad_words": (" the",),
    },
    "typical": {"temperature": 1.0, "seed": 9, "typical_p": 0.8},
    "siblings": {"n": 3, "temperature": 0.8, "seed": 11},
}


ENDED = ("EOS", "stop ids")


def asked(name: str) -> SamplingParams:
    return GREEDY.with_changes(**{"max_tokens": 25, **ASKED[name]})


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(**ENGINE) as llm:
        yield llm


def same(one: RequestOutput, other: RequestOutput) -> None:
    for a, b in zip(one.outputs, other.outputs, strict=True):
        assert a.token_ids == b.token_ids
        assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)
        for p, q in zip(a.logprobs or [], b.logprobs or [], strict=True):
            assert (p.token_id, p.rank, len(p.top)) == (q.token_id, q.rank, len(q.top))
            assert p.logprob == pytest.approx(q.logprob, abs=1e-4)


def texts_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [[*o.prompt_token_ids, *c.token_ids] for o in outputs for c in o.outputs]


@pytest.mark.full
@pytest.mark.parametrize("name", ASKED)
def test_answers_are_the_same(plain, name, monkeypatch):
    params = asked(name)
    right = plain.generate(PROMPTS, params)
    # Drafts may extend beyond the end of an answer, where they are cut.
    longer = params.with_changes(
        max_tokens=min(200, (params.max_tokens or 0) + 6),
        ignore_eos=True,
        stop=(),
        stop_token_ids=(),
    )
    texts = texts_of(plain.generate(PROMPTS, longer))
    install(monkeypatch, lambda parts: Scripted(parts, texts, with_probability(0.8)))
    with LLM(**ENGINE, spec_method=METHOD, spec_tokens=5, speculative_config=EAGER) as llm:
        found = llm.generate(PROMPTS, params)
        assert llm.stats().kv_usage == 0
    for one, other in zip(found, right, strict=True):
        same(one, other)
    if name not in ("one token", "allowed"):
        assert sum(output.num_accepted_tokens for output in found) > 0
    if name in ENDED:
        ended = [o for o in found if o.outputs[0].finish_reason == "stop"]
        assert len(ended) >= 3
        # Some end inside a run of accepted drafts, so that checks yield more tokens than were
        # delivered.
        brought = [o.speculation.drafts.rows + o.speculation.drafts.accepted for o in ended]
        assert any(n > o.num_output_tokens - 1 for o, n in zip(ended, brought, strict=True))


def test_unseeded_requests_draw_as_without_certain_drafts(plain, monkeypatch):
    params = GREEDY.with_changes(temperature=1.0)
    with LLM(**ENGINE, seed=3) as llm:
        right = llm.generate(PROMPTS, params)
    install(monkeypatch, lambda parts: Scripted(parts, texts_of(right), with_probability(0.7)))
    options = {"spec_method": METHOD, "speculative_config": EAGER}
    with LLM(**ENGINE, seed=3, **options) as llm:
        found = llm.generate(PROMPTS, params)
    assert texts_of(found) == texts_of(right)
    assert sum(output.num_accepted_tokens for output in found) > 0


@pytest.mark.full
@pytest.mark.parametrize("chance", [0.5, 0.8])
def test_tokens_of_a_step_match_the_formula(plain, chance, monkeypatch):
    drafts = 5
    params = GREEDY.with_changes(max_tokens=220)
    texts = texts_of(plain.generate(PROMPTS, params))
    install(monkeypatch, lambda parts: Scripted(parts, texts, with_probability(chance)))
    with LLM(**ENGINE, spec_method=METHOD, spec_tokens=drafts, speculative_config=EAGER) as llm:
        llm.generate(PROMPTS, params)
        counts = llm.stats().speculation.drafts
    expected = (1 - chance ** (drafts + 1)) / (1 - chance)
    assert counts.mean_length == pytest.approx(expected, rel=0.02)
    tried = [chance**i for i in range(1, drafts + 1)]
    for i, share in enumerate(tried):
        assert counts.accepted_at[i] / counts.at[i] == pytest.approx(share, abs=0.03)


def test_figures(plain, monkeypatch):
    right = plain.generate(PROMPTS, GREEDY)
    texts = texts_of(right)
    for script, share in ((always_right, 1.0), (always_wrong, 0.0)):
        install(monkeypatch, lambda parts, script=script: Scripted(parts, texts, script))
        with LLM(**ENGINE, spec_method=METHOD, spec_tokens=4, speculative_config=EAGER) as llm:
            found = llm.generate(PROMPTS, GREEDY)
            stats = llm.stats()
        drafted = sum(output.num_drafted_tokens for output in found)
        assert drafted > 0
        assert sum(output.num_accepted_tokens for output in found) == share * drafted
        counts = stats.speculation.drafts
        assert (counts.drafts, counts.accepted) == (drafted, share * drafted)
        assert counts.acceptance == share
        assert stats.speculation.proposing > 0
        assert stats.delivered_tokens == len(PROMPTS) * 40
        figures = [output.outputs[0].speculation for output in found]
        assert sum((one.drafts for one in figures), DraftCounts()) == counts
        for one in figures:  # 39 tokens after the first
            assert one.drafts.accepted_at == [share * count for count in one.drafts.at]
            assert one.drafts.rows == (8 if share else 38)
    assert plain.stats().speculation is None
    assert right[0].num_drafted_tokens == 0
    assert right[0].speculation is right[0].outputs[0].speculation is None


def test_the_speedup_of_a_single_request_is_the_engines(plain, monkeypatch):
    texts = texts_of(plain.generate(PROMPTS, GREEDY))
    install(monkeypatch, lambda parts: Scripted(parts, texts, always_right))
    with LLM(**ENGINE, spec_method=METHOD, spec_tokens=4, speculative_config=EAGER) as llm:
        # The time of a step without drafts is measured first.
        (without,) = llm.generate(PROMPTS[:1], GREEDY.with_changes(speculation=False))
        assert llm.stats().speculation.speedup is without.speculation is None
        (output,) = llm.generate(PROMPTS[:1], GREEDY)
        engine = llm.stats().speculation
    one = output.speculation
    assert one.drafts == engine.drafts == DraftCounts(8, 31, 31, [8, 8, 8, 7], [8, 8, 8, 7])
    assert (one.seconds, one.plain_seconds) == pytest.approx((engine.seconds, engine.plain_seconds))
    assert one.speedup == pytest.approx(engine.speedup)


def test_the_control_gets_the_accepted_nodes_of_a_tree(plain, monkeypatch):
    texts = texts_of(plain.generate(PROMPTS, GREEDY))
    install(monkeypatch, lambda parts: ScriptedTree(parts, texts))
    seen = []
    monkeypatch.setattr(DraftControl, "observe", lambda self, step: seen.append(step))
    options = {"spec_method": TREE_METHOD, "spec_model": str(BUNDLED), "spec_tokens": 10}
    with LLM(**ENGINE, **options, speculative_config=EAGER) as llm:
        found = llm.generate(PROMPTS, GREEDY)
        counts = llm.stats().speculation.drafts
    assert texts_of(found) == texts
    assert sum((output.speculation.drafts for output in found), DraftCounts()) == counts
    steps = [step for step in seen if step.drafts.any()]
    depths, parents = ScriptedTree.TREE.depths, np.array(ScriptedTree.TREE.parents[1:])
    reach = np.concatenate([[depths[: n + 1].max() for n in step.drafts if n] for step in steps])
    right = np.concatenate([step.accepted[step.drafts > 0] for step in steps])
    assert counts.at == [(reach > place).sum() for place in range(depths.max())]
    assert counts.accepted_at == [(right > place).sum() for place in range(depths.max())]
    for step in steps:
        assert step.paths.sum(axis=1).tolist() == step.accepted.tolist()
        known = np.concatenate([np.ones((len(step.slots), 1), bool), step.paths], axis=1)
        assert (known[:, parents] >= step.paths).all()
    assert any(step.paths[:, 1:].any() and not step.paths[:, 0].all() for step in steps)


def test_a_request_can_disable_drafts(plain, monkeypatch):
    texts = texts_of(plain.generate(PROMPTS, GREEDY))
    install(monkeypatch, lambda parts: Scripted(parts, texts, always_right))
    params = [GREEDY.with_changes(speculation=i != 1) for i in range(len(PROMPTS))]
    with LLM(**ENGINE, spec_method=METHOD, speculative_config=EAGER) as llm:
        found = llm.generate(PROMPTS, params)
    assert texts_of(found) == texts
    assert [output.num_drafted_tokens > 0 for output in found] == [True, False, True, True]


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_broken_drafter_only_loses_its_drafts(plain, every, monkeypatch, caplog):
    right = plain.generate(PROMPTS, GREEDY)
    install(monkeypatch, lambda parts: Broken(every))
    with LLM(**ENGINE, spec_method=METHOD, speculative_config=EAGER) as llm:
        for _ in range(2):
            assert texts_of(llm.generate(PROMPTS, GREEDY)) == texts_of(right)
        assert llm.stats().kv_usage == 0
    # Logged once. A machine short of memory logs other warnings, of the engine's loop.
    (record,) = [r for r in caplog.records if r.name == "kvik.worker.speculator"]
    assert record.levelname == "WARNING"


def test_drafts_fit_into_the_step(plain, monkeypatch):
    texts = texts_of(plain.generate(PROMPTS, GREEDY))
    install(monkeypatch, lambda parts: Scripted(parts, texts, always_right))
    small = {**ENGINE, "max_num_seqs": 4, "max_num_batched_tokens": 10}
    with LLM(**small, spec_method=METHOD, spec_tokens=8, speculative_config=EAGER) as llm:
        assert llm.resolved.speculation.max_draft_rows == 3
        found = llm.generate(PROMPTS, GREEDY)
    assert texts_of(found) == texts
    with pytest.raises(ConfigError, match="max_num_batched_tokens: must be at least 6 "):
        LLM(**{**small, "max_num_batched_tokens": 5}, spec_method=METHOD)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_from_lookup_do_not_change_answers(plain, method):
    prompts = [f"{prompt}. {prompt}. {prompt}" for prompt in PROMPTS]
    right = plain.generate(prompts, GREEDY)
    with LLM(**ENGINE, spec_method=method, speculative_config=EAGER) as llm:
        for _ in range(2):
            found = llm.generate(prompts, GREEDY)
            assert texts_of(found) == texts_of(right)
    assert sum(output.num_drafted_tokens for output in found) > 0


class Insistent(Drafter):
    """Always drafts the same tokens, which are seldom the likeliest and seldom unlikely."""

    TREE = DraftTree((-1, 0, 0), (0, 1, 0))

    def __init__(self, parts: DrafterParts, tokens: list[int]) -> None:
        self.tokens = tokens
        self.tree = self.TREE if parts.speculation.trees else None

    def propose(self, rows: DraftRows) -> Drafts:
        return Drafts.of([self.tokens[:limit] for limit in rows.limits.tolist()], self.tree)


class Unruly(Drafter):
    """Drafts tokens that the rules of the requests forbid, one after another."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.turn = 0

    def propose(self, rows: DraftRows) -> Drafts:
        self.turn += 1
        start = self.turn % len(self.tokens)
        drafts = (self.tokens[start:] + self.tokens[:start]) * 5
        return Drafts.of([drafts[:limit] for limit in rows.limits.tolist()])


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("typical", [False, True])
def test_rules_hold_for_drafts_that_break_them(plain, temperature, typical, monkeypatch):
    """Allowed tokens, bias, bad words and min_tokens apply to the logits of every draft."""
    eos = plain.resolved.model.eos_token_ids[0]
    [word] = plain.tokenizer.encode(" girl", add_special_tokens=False)
    rules = {
        "allowed": {"allowed_token_ids": tuple(range(10, 40))},
        "bias": {"logit_bias": {word: -100.0, 50: 3.0}},
        "bad words": {"bad_words": (" little girl", " girl")},
        "min_tokens": {"ignore_eos": False, "min_tokens": 20, "max_tokens": 25},
    }
    little = plain.tokenizer.encode(" little girl", add_special_tokens=False)
    install(monkeypatch, lambda parts: Unruly([*little, eos, word, 50, eos]))
    wish = {**EAGER, "typical_acceptance": typical, "typical_epsilon": 1e-6, "typical_delta": 1e-6}
    with LLM(**ENGINE, spec_method=METHOD, spec_tokens=5, speculative_config=wish) as llm:
        for name, rule in rules.items():
            params = SamplingParams(temperature=temperature, max_tokens=30, ignore_eos=True)
            params = params.with_changes(**rule)
            outputs = llm.generate(PROMPTS, params)
            assert sum(output.num_drafted_tokens for output in outputs) > 100
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                said = output.outputs[0].token_ids
                if name == "allowed":
                    assert set(said) <= set(range(10, 40))
                elif name == "min_tokens":
                    assert len(said) >= 20 and eos not in said[:20]
                else:
                    assert word not in said, prompt
            if temperature == 0.0:
                assert texts_of(outputs) == texts_of(plain.generate(PROMPTS, params))


@pytest.mark.full
@pytest.mark.parametrize("method", [METHOD, TREE_METHOD])
def test_typical_acceptance_is_for_requests_that_sample_without_a_seed(
    plain, method, monkeypatch, caplog
):
    texts = texts_of(plain.generate(PROMPTS, GREEDY))
    words = plain.tokenizer.encode(", the", add_special_tokens=False)
    install(monkeypatch, lambda parts: Insistent(parts, words))
    hot = GREEDY.with_changes(temperature=1.0, logprobs=0)
    options = {"spec_method": method, "spec_tokens": 2}
    if method == TREE_METHOD:
        options["spec_model"] = str(BUNDLED)  # not loaded: the drafter is replaced
    with LLM(**ENGINE, **options, speculative_config=EAGER) as llm:
        lossless = llm.generate(PROMPTS, hot)
    assert "lossy" not in caplog.text
    wish = {**EAGER, "typical_acceptance": True, "typical_epsilon": 0.001, "typical_delta": 0.01}
    with LLM(**ENGINE, **options, speculative_config=wish) as llm:
        [said] = [d for d in llm.resolved.decisions if d.name == "typical_acceptance"]
        assert "lossy: changes the distribution" in said.reason
        assert "typical_acceptance is lossy" in caplog.text
        found = llm.generate(PROMPTS, hot)
        assert texts_of(llm.generate(PROMPTS, GREEDY)) == texts
        seeded = hot.with_changes(seed=5)
        assert texts_of(llm.generate(PROMPTS, seeded)) == texts_of(plain.generate(PROMPTS, seeded))
    accepted, without = (
        sum(output.num_accepted_tokens for output in outputs) for outputs in (found, lossless)
    )
    assert accepted > 2 * without
    for output in found:  # statistics agree with the output
        answer = output.outputs[0]
        assert [entry.token_id for entry in answer.logprobs or ()] == list(answer.token_ids)
