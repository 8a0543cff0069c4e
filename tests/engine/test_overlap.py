"""Steps that begin before the previous results are read: same tokens, and failures stay with their
requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from helpers.overlapping import LateCopies, steps_in_flight

from kvik import LLM, RequestOutput, SamplingParams
from kvik.config.model_source import BUNDLED as STORIES
from kvik.core.structured import Regex
from kvik.core.types import EngineRequest, FinishReason
from kvik.kernels.torch_ops import TORCH
from kvik.worker.graphs import Eager
from kvik.worker.logits_rules import TokenRules
from kvik.worker.model_runner import ModelRunner
from kvik.worker.output_tokens import OutputTokens

CONFIG = {"dtype": "float32", "device": "cpu", "threads": 1, "max_num_seqs": 6}
CONFIG |= {"max_model_len": 96, "kernels": "torch", "num_blocks": 13, "block_size": 8, "seed": 0}
WORDS = ["Once upon a time", "The fox", "A little bird", "In the village there was", "Tom", "Lily"]


@pytest.fixture(scope="module")
def in_turn() -> Iterator[LLM]:
    with LLM("", **CONFIG) as llm:
        yield llm


# Engines have two steps in flight; what a third one shows is the same.
@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.nightly)])
def overlapping(request) -> Iterator[tuple[LLM, LateCopies]]:
    with steps_in_flight(request.param) as made, LLM("", **CONFIG) as llm:
        yield llm, made[0]


@pytest.fixture(scope="module")
def rules(in_turn: LLM) -> dict[str, SamplingParams]:
    """Parameters by what they need of previous tokens, on the host or on the device."""
    greedy = in_turn.generate(
        WORDS[0], SamplingParams(temperature=0, max_tokens=12), progress=False
    )
    said = greedy[0].outputs[0].token_ids
    common = {"max_tokens": 24, "seed": 7, "ignore_eos": True}
    return {
        "greedy": SamplingParams(temperature=0, max_tokens=24),
        "random": SamplingParams(top_k=20, top_p=0.9, min_p=0.01, **common),
        "stops": SamplingParams(temperature=0, stop_token_ids=(said[5],), max_tokens=24),
        "min_tokens": SamplingParams(
            temperature=0, stop_token_ids=(said[5],), min_tokens=9, max_tokens=24
        ),
        "penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, **common),
        "bad words": SamplingParams(
            temperature=0, bad_words=(tuple(said[3:5]), tuple(said[6:9])), max_tokens=24
        ),
        "bias": SamplingParams(logit_bias={said[2]: -4.0}, allowed_token_ids=None, **common),
        "logprobs": SamplingParams(logprobs=3, prompt_logprobs=2, **common),
        "siblings": SamplingParams(n=3, **common),
    }


def generate(llm: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    prompts = [WORDS[i % len(WORDS)] for i in range(len(params))]
    return llm.generate(prompts, params, progress=False)


def comparable(outputs: list[RequestOutput]) -> list[object]:
    return [
        (c.token_ids, c.logprobs, c.finish_reason, c.error, o.prompt_logprobs)
        for o in outputs
        for c in o.outputs
    ]


@pytest.fixture(scope="module")
def alone(in_turn: LLM, rules: dict[str, SamplingParams]) -> dict[str, list[object]]:
    """The outputs of each request alone."""
    return {name: comparable(generate(in_turn, [params])) for name, params in rules.items()}


@pytest.fixture(scope="module")
def together(in_turn: LLM, rules: dict[str, SamplingParams]) -> list[object]:
    """The outputs of two requests of each kind."""
    return comparable(generate(in_turn, [*rules.values(), *rules.values()]))


@pytest.mark.full
def test_tokens_are_those_of_steps_in_turn(overlapping, rules, alone, together) -> None:
    llm, copies = overlapping
    for name, params in rules.items():  # alone, so that no other request makes a step wait
        copies.most_unread = 0
        assert comparable(generate(llm, [params])) == alone[name], name
        if name != "bad words":
            assert copies.most_unread >= copies.depth, name
    found = generate(llm, [*rules.values(), *rules.values()])
    assert any(output.num_preemptions for output in found)
    # In other batches, so with other bits
    assert [one[0] for one in comparable(found)] == [one[0] for one in together]


@pytest.mark.full
def test_a_text_that_ends_while_its_request_is_preempted_gets_no_further_token(overlapping) -> None:
    llm, _ = overlapping
    free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    ended = range(2, 60, 4)
    whole = free.with_changes(structured=Regex("[a-z ]{22}"))
    outputs = generate(llm, [whole if i in ended else free for i in range(60)])
    assert any(outputs[i].num_preemptions for i in ended)
    found = [outputs[i].outputs[0] for i in ended]
    assert {(len(one.text), one.finish_reason) for one in found} == {(22, "stop")}


def test_banned_words_make_the_host_wait(overlapping, rules) -> None:
    llm, copies = overlapping
    copies.most_unread = 0
    generate(llm, [rules["bad words"]])
    assert copies.most_unread == 1


@pytest.mark.full
def test_arrivals_and_ends_do_not_change_other_requests(in_turn, overlapping, rules, alone) -> None:
    """Slots and blocks are reused while steps run."""
    llm, _ = overlapping
    params = [p.with_changes(n=1, max_tokens=16) for p in rules.values()]
    right = [outputs[0][0][:16] for outputs in alone.values()]
    prompt = in_turn.tokenizer.encode(WORDS[0])
    loop = llm._loop
    rng = random.Random(5)
    outputs: dict[str, list[int]] = {}
    ended: dict[str, FinishReason] = {}
    names: list[str] = []
    for _ in range(400):
        if len(names) < 60 and rng.random() < 0.4:
            kind = rng.randrange(len(params))
            name = f"{len(names)}/{kind}"
            names.append(name)
            deadline = None if rng.random() < 0.9 else loop.clock() + 0.01
            loop.add(EngineRequest(name, prompt, params[kind], deadline=deadline))
        alive = [name for name in names if name not in ended]
        if alive and rng.random() < 0.15:
            loop.end(rng.choice(alive))
        for delta in loop.poll():
            outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                ended[delta.request_id] = delta.finish_reason
        if len(names) == 60 and not loop.has_work:
            break
    assert ended.keys() == set(names) and FinishReason.ERROR not in ended.values()
    assert FinishReason.LENGTH in ended.values() and FinishReason.ABORT in ended.values()
    for name, reason in ended.items():
        found, expected = outputs.get(name, []), right[int(name.partition("/")[2])]
        whole = reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert found == (expected if whole else expected[: len(found)]), name
    assert loop.stats().kv_usage == 0


LONG = "The dog and the cat went to the park. " * 3  # no other request has as many positions


def victims(llm: LLM) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Run requests together, and return the output of the victim and of the others."""
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    some = greedy.with_changes(temperature=0.8, seed=3, min_tokens=1)
    outputs = llm.generate([LONG, *WORDS[:4]], [some] + [greedy] * 4, progress=False)
    return outputs[:1], outputs[1:]


@pytest.fixture(scope="module")
def unbroken(in_turn: LLM) -> tuple[list[RequestOutput], list[RequestOutput]]:
    return victims(in_turn)


@pytest.mark.parametrize("what", ["logits", "rules", "forward"])
def test_a_failure_ends_only_the_affected_requests(
    overlapping, unbroken, what, monkeypatch
) -> None:
    llm, _ = overlapping
    victim_right, others_right = unbroken
    length = len(victim_right[0].prompt_token_ids)
    forward, steps = Eager.forward, iter(range(10**6))

    def broken(self, step):
        if what == "forward" and next(steps) == 6:
            raise MemoryError("no room")
        output = forward(self, step)
        at = step.positions.index_select(0, step.logits_indices)
        if what == "logits":
            output.logits[at == length + 3] = torch.nan
            output.top[at == length + 3] = torch.nan
        return output

    def broken_rules(self, token):
        raise LookupError("token rules")

    with monkeypatch.context() as patch:
        patch.setattr(Eager, "forward", broken)
        if what == "rules":
            patch.setattr(TokenRules, "append", broken_rules)
        (victim,), others = victims(llm)
    (completion,) = victim.outputs
    assert completion.finish_reason == FinishReason.ERROR and completion.error
    found = completion.token_ids
    assert found == victim_right[0].outputs[0].token_ids[: len(found)]
    if what == "forward":
        assert all(o.outputs[0].finish_reason == FinishReason.ERROR for o in others)
        assert "no room" in completion.error
    else:
        assert len(found) == {"logits": 4, "rules": 0}[what]
        assert comparable(others) == comparable(others_right)
    assert comparable([output for part in victims(llm) for output in part]) == comparable(
        [*victim_right, *others_right]
    )  # and the engine continues
    assert llm.stats().kv_usage == 0


def participant(runner: ModelRunner, kind: type):
    (found,) = [each for each in runner.participants if isinstance(each, kind)]
    return found


class DeviceReads:
    """Forbids calls that would wait for a device. Calls inside kernels do not count; here these are
    torch's for CPUs."""

    NAMES = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__")

    def __init__(self) -> None:
        self.forbidden = False

    def install(self, patch: pytest.MonkeyPatch, runner: ModelRunner) -> None:
        for name in self.NAMES:
            patch.setattr(torch.Tensor, name, self._checked(name, getattr(torch.Tensor, name)))
        sampler = participant(runner, OutputTokens).sampler._sampler
        rows = {name: self.around(getattr(TORCH, name), False) for name in ("draw", "largest")}
        patch.setattr(sampler, "_ops", replace(TORCH, **rows))

    def around(self, call, forbidden: bool):
        def run(*arguments):
            before, self.forbidden = self.forbidden, forbidden
            try:
                return call(*arguments)
            finally:
                self.forbidden = before

        return run

    def _checked(self, name: str, call):
        def look(*arguments):
            assert not self.forbidden, f"Tensor.{name} waits for the device"
            return call(*arguments)

        return look


@pytest.mark.whole  # each case reads in another part of the worker
@pytest.mark.parametrize(
    "name", ["greedy", "random", "penalties", "bias", "min_tokens", "logprobs", "mean", "last"]
)
def test_nothing_is_read_before_a_step_is_finished(in_turn, overlapping, rules, name) -> None:
    llm, _ = overlapping
    runner, guard = llm._loop.executor._runner, DeviceReads()
    tokens, steps = participant(runner, OutputTokens), []
    calls = [(tokens.newest, "fill"), *((each, "launch") for each in runner.participants)]

    def unseen(what: str, call):
        return lambda *arguments: steps.append(what) or guard.around(call, True)(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        guard.install(patch, runner)
        for owner, call in calls:
            patch.setattr(
                owner, call, unseen(f"{type(owner).__name__}.{call}", getattr(owner, call))
            )
        if name in ("mean", "last"):
            found = llm.embed([LONG, "Tom"], pooling=name, progress=False)
        else:
            outputs = generate(llm, [rules[name]])
    if name in ("mean", "last"):
        right = in_turn.embed([LONG, "Tom"], pooling=name, progress=False)
        assert [one.embedding for one in found] == [one.embedding for one in right]
        return
    assert comparable(outputs)[0][3] is None
    assert (outputs[0].prompt_logprobs is None) == (name != "logprobs")
    assert steps.count("OutputTokens.launch") >= 10 and steps.count("NewestTokens.fill") >= 10


class Grammar(TokenRules):
    """After a token, only two may follow: its remainder and the one after it."""

    MODULUS = 5

    def __init__(self, params, prompt_token_ids, output_token_ids, stop_ids) -> None:
        super().__init__(params, prompt_token_ids, output_token_ids, stop_ids)
        self.reads_output = bool(params.logit_bias)
        for token in output_token_ids[-1:]:
            self.append(token)

    def append(self, token: int) -> None:
        if self.reads_output:
            first = (token + 1) % self.MODULUS
            self.allowed = np.arange(first, 1000, self.MODULUS)


def test_masks_are_filled_while_a_forward_runs(in_turn, overlapping, monkeypatch) -> None:
    """The allowed tokens depend on the last sampled token: the host reads it and fills the mask
    while the next forward runs, before sampling."""
    llm, copies = overlapping
    monkeypatch.setattr("kvik.worker.sampling_table.RULES", (Grammar,))
    params = SamplingParams(logit_bias={3: 0.5}, seed=7, max_tokens=12, ignore_eos=True)
    (right,) = generate(in_turn, [params])
    ids = right.outputs[0].token_ids
    assert len(ids) == 12 and all((b - a) % Grammar.MODULUS == 1 for a, b in pairwise(ids))
    runner, events = llm._loop.executor._runner, []

    def noted(event: str, call):
        return lambda *arguments: events.append(event) or call(*arguments)

    for owner, call, event in (
        (runner.graph, "run", "forward"),
        (Grammar, "append", "hear"),
        (Grammar, "banned", "fill"),
        (participant(runner, OutputTokens).sampler._sampler, "sample", "sample"),
    ):
        monkeypatch.setattr(owner, call, noted(event, getattr(owner, call)))
    copies.most_unread = 0
    (found,) = generate(llm, [params])
    assert found.outputs[0].token_ids == ids
    assert copies.most_unread == 1
    first, every = ["forward", "fill", "sample"], ["forward", "hear", "fill", "sample"]
    assert events == first + every * 11 + ["hear"]


DRAFTS = {
    "spec_method": "draft_model",
    "spec_model": str(STORIES.parent / "stories-draft"),
    "spec_tokens": 3,
    "speculative_config": {"adaptive": False},
}


def test_steps_with_drafts_overlap_with_delivery_only(monkeypatch) -> None:
    """Each is planned when the previous one is known, and runs while its deltas are delivered."""
    greedy = SamplingParams(temperature=0, max_tokens=16, logprobs=2, prompt_logprobs=1)
    params = [greedy, SamplingParams(max_tokens=24), SamplingParams(seed=3, max_tokens=9)]
    with LLM("", **CONFIG, **DRAFTS) as llm:
        right = generate(llm, params)
    left: list[int] = []  # steps in flight while the host does other work
    with steps_in_flight(2) as made, LLM("", **CONFIG, **DRAFTS) as llm:
        loop = llm._loop
        step = loop.step
        monkeypatch.setattr(loop, "step", lambda: (step(), left.append(len(loop._in_flight)))[0])
        found = generate(llm, params)
    assert comparable(found) == comparable(right)
    assert sum(output.num_accepted_tokens for output in found) > 0
    assert set(left) == {0, 1} and left.count(0) == 1 and made[0].unread == 0
