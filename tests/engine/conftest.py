"""An engine without a model: plans are answered by a function."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest
import uvloop
from helpers.scripted_engine import Rig as ScriptedRig

from kvik.config.config import ResolvedConfig, RunnerConfig
from kvik.config.memory import MemoryPlan
from kvik.core.config import CacheConfig, SchedulerConfig
from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.engine.core import EngineCore
from kvik.engine.loop import EngineLoop
from kvik.engine.remote import EngineState
from kvik.engine.wire import Ready
from kvik.models.model_spec import ModelSpec
from kvik.spec.kv import group_layers

EOS = 63


def make_config(**scheduler: object) -> ResolvedConfig:
    spec = ModelSpec.from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 64,
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 64,
            "eos_token_id": EOS,
        }
    )
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, **scheduler}
    groups = group_layers(spec.kv_specs(4))
    return ResolvedConfig(
        model=spec,
        cache=CacheConfig(block_size=4, num_blocks=33, groups=groups),
        scheduler=SchedulerConfig(**options),
        runner=RunnerConfig("", "float32", "cpu", "sdpa", 1),
        memory=MemoryPlan(0, 0, 0, 0, 0),
        seed=0,
        decisions=(),
    )


@dataclass
class FakeExecutor:
    """Answers each sampling row with `token(step, row)`; keeps the plans it saw."""

    token: Callable[[int, int], int] = lambda step, row: 1
    depth: int = 1
    in_turn: bool = False
    plans: list[SchedulerOutput] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)  # rows of the next step
    raises: BaseException | None = None  # from the next submit
    raises_late: BaseException | None = None  # from the next result
    stopped: int = 0

    def submit(self, plan: SchedulerOutput) -> object:
        self.plans.append(plan)
        if self.raises is not None:
            error, self.raises = self.raises, None
            raise error
        tokens = [[self.token(plan.step, row)] if s else [] for row, s in enumerate(plan.samples)]
        errors, self.errors = self.errors, {}
        return ModelRunnerOutput(plan.step, tokens, errors=errors)

    def result(self, handle: object) -> ModelRunnerOutput:
        if self.raises_late is not None:
            error, self.raises_late = self.raises_late, None
            raise error
        assert isinstance(handle, ModelRunnerOutput)
        return handle

    def rest(self) -> bool:
        return False

    def stop(self) -> None:
        self.stopped += 1


class Clock:
    """Time that moves when it is told to."""

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
            FakeExecutor(depth=depth),
            Clock(),
        )
        return Rig(core, executor, EngineLoop(core, executor, clock), clock)

    return make


@pytest.fixture(params=["asyncio", "uvloop"])
def with_rig(request) -> Callable[[Callable[[ScriptedRig], Awaitable[None]]], None]:
    """Run a test in an event loop, with a client that is ready."""

    async def whole(test: Callable[[ScriptedRig], Awaitable[None]]) -> None:
        rig = ScriptedRig()
        rig.client.start(rig.calls.append)
        assert rig.client.state is EngineState.STARTING
        rig.source.say(Ready())
        await rig.settle()
        assert (rig.client.state, rig.client.reason) == (EngineState.READY, "")
        await asyncio.wait_for(test(rig), 30)
        await rig.client.close()
        rig.source.sock.close()

    def run(test: Callable[[ScriptedRig], Awaitable[None]]) -> None:
        factory = uvloop.new_event_loop if request.param == "uvloop" else None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(whole(test))

    return run
