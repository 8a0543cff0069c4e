"""Comparison of torch's and Triton's attention for prompts: measurements and thresholds."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.optional_triton import INTERPRETED_ONLY, NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

import torch

from kvik.attention.fresh_prompts import FreshPrompts
from kvik_bench.machine.prompt_attention import PromptTimes, measure_prompts, thresholds

CPU = torch.device("cpu")


@pytest.mark.full
@INTERPRETED_ONLY
def test_both_are_timed_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's takes 3 seconds here, torch's 2."""
    attended = Counter()
    attend = FreshPrompts.attend

    def noted(self, *args):
        attended["torch"] += 1
        return attend(self, *args)

    def clock(call, device):
        attended.clear()
        call()
        return 2.0 if attended else 3.0

    monkeypatch.setattr(FreshPrompts, "attend", noted)
    monkeypatch.setattr("kvik_bench.machine.prompt_attention.ROUNDS", 1)
    found = measure_prompts(CPU, (16, 32), (20,), clock=clock, width=64)
    assert found == (PromptTimes(16, 20, 3.0, 2.0), PromptTimes(32, 20, 3.0, 2.0))


@INTERPRETED_ONLY
@pytest.mark.parametrize("broken", ["wrong", "missing"])
def test_wrong_results_have_no_time(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    attend = FreshPrompts.attend

    def worse(self, *args):
        if broken == "missing":
            raise RuntimeError("No available kernel")
        return attend(self, *args) + 0.1

    monkeypatch.setattr(FreshPrompts, "attend", worse)
    monkeypatch.setattr("kvik_bench.machine.prompt_attention.ROUNDS", 1)
    (times,) = measure_prompts(CPU, (16,), (20,), clock=lambda call, device: 1.0, width=64)
    assert times == PromptTimes(16, 20, 1.0, None)


def test_torch_is_used_from_the_length_where_it_is_always_faster() -> None:
    def measured(dim: int, **times: float | None):
        """Return torch's times, where Triton's takes one second."""
        return [PromptTimes(dim, int(tokens[1:]), 1.0, time) for tokens, time in times.items()]

    found = [
        *measured(64, _1024=0.5, _2048=0.97, _4096=0.9, _8192=0.8),
        *measured(80, _1024=0.5, _2048=0.5, _4096=0.5, _8192=1.0),
        *measured(96, _1024=0.9, _2048=0.9, _4096=0.9, _8192=0.9),
        *measured(128, _1024=None, _2048=None, _4096=0.9, _8192=0.9),
        *measured(256, _1024=None, _2048=None, _4096=None, _8192=None),
    ]
    assert thresholds(found) == ((64, 4096), (96, 1024), (128, 4096))
