"""Raise in every call made for one request: only that request fails, and nothing leaks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvik import LLM, RequestOutput, SamplingParams
from kvik.core import scheduler
from kvik.text.detokenizer import Detokenizer, StopStrings
from kvik.worker import prompt_outputs
from kvik.worker.logits_rules import TokenRules
from kvik.worker.sampling_table import SamplingTable

VICTIM_SEED = 666
PROMPTS = ["Once upon a time", "The fox", "A little bird", "In the village"]
VICTIM = 1


DRAFTS = {"speculative_config": {"method": "ngram", "ngram_max": 2, "adaptive": False}}


@pytest.fixture(scope="module", params=[{}, DRAFTS], ids=["plain", "drafts"])
def llm(request) -> Iterator[LLM]:
    config = {"max_num_seqs": 8, "max_model_len": 128, "enable_prefix_caching": False}
    config |= request.param
    with LLM("", dtype="float32", device="cpu", threads=1, **config) as llm:
        yield llm


def generate(llm: LLM) -> list[RequestOutput]:
    common = {"max_tokens": 12, "ignore_eos": True, "stop": ("never seen",), "logprobs": 1}
    params = [SamplingParams(temperature=0.0, **common) for _ in PROMPTS]
    params[VICTIM] = SamplingParams(seed=VICTIM_SEED, prompt_logprobs=1, min_tokens=1, **common)
    return llm.generate(PROMPTS, params, progress=False)


@pytest.fixture(scope="module")
def undisturbed(llm) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in generate(llm)]


def _throw_in_set_up(monkeypatch) -> None:
    genuine = SamplingTable.set

    def broken(self, slot, params, seed, *rest):
        if seed == VICTIM_SEED:
            raise MemoryError("parameters")
        genuine(self, slot, params, seed, *rest)

    monkeypatch.setattr(SamplingTable, "set", broken)


def _throw_in_sampling(monkeypatch) -> None:
    """From the third token on, when output has begun."""
    victims: set[int] = set()
    genuine_set, genuine_batch = SamplingTable.set, SamplingTable.batch
    calls = iter(range(10**6))

    def spy(self, slot, params, seed, *rest):
        if seed == VICTIM_SEED:
            victims.add(slot)
        genuine_set(self, slot, params, seed, *rest)

    def broken(self, slots, positions, *rest):
        if next(calls) > 2 and victims & set(slots.tolist()):
            raise ArithmeticError("sampling")
        return genuine_batch(self, slots, positions, *rest)

    monkeypatch.setattr(SamplingTable, "set", spy)
    monkeypatch.setattr(SamplingTable, "batch", broken)


def _throw_in_token_rules(monkeypatch) -> None:
    def broken(self, token):  # with min_tokens, the victim is the only one with such rules
        raise LookupError("token rules")

    monkeypatch.setattr(TokenRules, "append", broken)


def _throw_in_prompt_logprobs(monkeypatch) -> None:
    def broken(*_):
        raise IndexError("prompt logprobs")

    monkeypatch.setattr(prompt_outputs, "score", broken)


def _throw_where_prompt_logprobs_are_read(monkeypatch) -> None:
    def broken(*_):
        raise IndexError("prompt logprobs")

    monkeypatch.setattr(prompt_outputs, "to_host", broken)


def _throw_in_stop_check(monkeypatch) -> None:
    genuine = scheduler.finish_reason

    def broken(request, token):
        if request.seed == VICTIM_SEED:
            raise KeyError("stop check")
        return genuine(request, token)

    monkeypatch.setattr(scheduler, "finish_reason", broken)


def _throw_in_detokenising(monkeypatch) -> None:
    genuine = Detokenizer.push
    victims: list[Detokenizer] = []

    def broken(self, ids):
        if not victims:
            victims.append(self)  # the first request, whichever it is
        if self is victims[0]:
            raise UnicodeError("detokenising")
        return genuine(self, ids)

    monkeypatch.setattr(Detokenizer, "push", broken)


def _throw_in_stop_strings(monkeypatch) -> None:
    genuine = StopStrings.push
    victims: list[StopStrings] = []

    def broken(self, text, **options):
        if not victims:
            victims.append(self)
        if self is victims[0]:
            raise RecursionError("stop strings")
        return genuine(self, text, **options)

    monkeypatch.setattr(StopStrings, "push", broken)


@pytest.mark.parametrize(
    "throw",
    [
        _throw_in_set_up,
        _throw_in_sampling,
        _throw_in_token_rules,
        _throw_in_prompt_logprobs,
        _throw_where_prompt_logprobs_are_read,
        _throw_in_stop_check,
        _throw_in_detokenising,
        _throw_in_stop_strings,
    ],
)
def test_one_request_fails_alone(llm, undisturbed, throw):
    with pytest.MonkeyPatch.context() as patch:
        throw(patch)
        outputs = [output.outputs[0] for output in generate(llm)]
    failed = [i for i, output in enumerate(outputs) if output.error is not None]
    assert len(failed) == 1
    assert outputs[failed[0]].finish_reason == "error"
    assert "Error" in outputs[failed[0]].error
    for i, output in enumerate(outputs):
        if i not in failed:
            assert output.token_ids == undisturbed[i]
    assert llm.stats().kv_usage == 0
    assert [o.outputs[0].token_ids for o in generate(llm)] == undisturbed


def test_logits_that_are_not_finite_fail_their_row(llm, undisturbed):
    with pytest.MonkeyPatch.context() as patch:
        genuine = graph_of(llm).run

        def broken(batch):
            output = genuine(batch)
            output.logits[0] = output.top[0] = float("nan")
            return output

        patch.setattr(graph_of(llm), "run", broken)
        outputs = [output.outputs[0] for output in generate(llm)]
    assert all("not finite" in output.error for output in outputs if output.error)
    assert any(output.error for output in outputs)
    assert llm.stats().kv_usage == 0
    assert [o.outputs[0].token_ids for o in generate(llm)] == undisturbed


def graph_of(llm: LLM):
    return llm._loop.executor._runner.graph


def test_a_failed_forward_ends_its_requests_and_later_ones_are_served(llm, undisturbed):
    with pytest.MonkeyPatch.context() as patch:
        genuine = graph_of(llm).run
        calls = iter(range(10**6))

        def broken(batch):
            if next(calls) == 3:
                raise RuntimeError("device lost")
            return genuine(batch)

        patch.setattr(graph_of(llm), "run", broken)
        outputs = [output.outputs[0] for output in generate(llm)]
    assert all("device lost" in output.error for output in outputs)
    assert llm.stats().kv_usage == 0
    assert [o.outputs[0].token_ids for o in generate(llm)] == undisturbed
