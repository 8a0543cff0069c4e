"""An engine without a model; a function computes the results of plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from helpers.served_engine import FakeExecutor, tiny_config

from kvik.config.config import ResolvedConfig
from kvik.engine.core import EngineCore
from kvik.engine.loop import EngineLoop


def make_config(**scheduler: object) -> ResolvedConfig:
    """Return `tiny_config` with smaller limits."""
    least = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}
    return tiny_config(num_blocks=32, **{**least, **scheduler})


class Clock:
    """A clock advanced by the test."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@dataclass
class Rig:
    core: EngineCore
    executor: FakeExecutor
    loop: EngineLoop
    clock: Clock


@pytest.fixture
def rig() -> Callable[..., Rig]:
    def make(depth: int = 1, **scheduler: object) -> Rig:
        core, executor, clock = (
            EngineCore(make_config(**scheduler)),
            FakeExecutor(lambda step, row: 1, depth=depth),
            Clock(),
        )
        return Rig(core, executor, EngineLoop(core, executor, clock), clock)

    return make
