"""Raise in every call made for one request: only that request fails, and nothing leaks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
from helpers.faults import fail

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


class First:
    """Whether a method is called of the first object of which it was called."""

    def __init__(self) -> None:
        self.seen: object = None

    def __call__(self, called: object, *rest: object) -> bool:
        self.seen = called if self.seen is None else self.seen
        return called is self.seen


def of_victim(table: SamplingTable, slot: int, params: SamplingParams, seed: int, *_) -> bool:
    return seed == VICTIM_SEED


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


THROWS = {
    "set up": lambda patch: fail(patch, SamplingTable, "set", MemoryError("full"), of_victim),
    "sampling": _throw_in_sampling,
    # With min_tokens, the victim is the only one with such rules.
    "token rules": lambda patch: fail(patch, TokenRules, "append", LookupError("rules")),
    "prompt logprobs": lambda patch: fail(patch, prompt_outputs, "score", IndexError("row")),
    "reading them": lambda patch: fail(patch, prompt_outputs, "to_host", IndexError("row")),
    "stop check": lambda patch: fail(
        patch, scheduler, "finish_reason", KeyError("stop"), lambda one, _: one.seed == VICTIM_SEED
    ),
    "detokenising": lambda patch: fail(patch, Detokenizer, "push", UnicodeError("text"), First()),
    "stop strings": lambda patch: fail(patch, StopStrings, "push", RecursionError("stop"), First()),
}


@pytest.mark.parametrize("where", THROWS)
def test_one_request_fails_alone(llm, undisturbed, where):
    with pytest.MonkeyPatch.context() as patch:
        THROWS[where](patch)
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


def no_numbers(step: int, output: Any) -> None:
    output.logits[0] = output.top[0] = float("nan")


def lost_device(step: int, output: Any) -> None:
    if step == 3:
        raise RuntimeError("device lost")


@pytest.mark.parametrize(
    ("spoil", "message", "failed"),
    [(no_numbers, "not finite", 1), (lost_device, "device lost", len(PROMPTS))],
)
def test_a_failed_forward_ends_its_requests_and_later_ones_are_served(
    llm, undisturbed, spoil, message, failed
):
    graph = llm._loop.executor._runner.graph
    genuine, steps = graph.run, count()

    def broken(batch):
        output = genuine(batch)
        spoil(next(steps), output)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "run", broken)
        errors = [output.outputs[0].error for output in generate(llm)]
    assert sum(message in str(error) for error in errors) >= failed
    assert all(error is None or message in error for error in errors)
    assert llm.stats().kv_usage == 0
    assert [o.outputs[0].token_ids for o in generate(llm)] == undisturbed
