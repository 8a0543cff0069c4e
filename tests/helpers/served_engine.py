"""An engine behind a socket, in a thread of this process, for server tests.

    async with engine_in_thread() as served:
        served.client.start(sink)          # in the event loop that the server runs in
        await served.ready()

`FakeExecutor` answers without a model; `bundled()` is the story model, loaded once.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from helpers.configs import config as model_config
from helpers.waiting import eventually

from kvik.config.config import EngineConfig, ResolvedConfig, RunnerConfig
from kvik.config.memory import MemoryPlan
from kvik.core.config import CacheConfig, SchedulerConfig
from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.structured import Constraint
from kvik.core.types import EngineRequest
from kvik.engine.client import EngineClient
from kvik.engine.core import EngineCore
from kvik.engine.loop import EngineLoop, Executor
from kvik.engine.remote import EngineState
from kvik.engine.sources import ThreadSource
from kvik.models.model_spec import ModelSpec
from kvik.spec.kv import group_layers

EOS = 63


def tiny_config(num_blocks: int = 512, **scheduler: object) -> ResolvedConfig:
    """Return the configuration of a fictitious model with 64 tokens, for a fake executor."""
    sizes = {"vocab": 64, "hidden": 8, "inner": 16, "layers": 1, "heads": 2, "kv_heads": 1}
    fields = model_config("LlamaForCausalLM", **sizes, positions=256, eos_token_id=EOS)
    spec = ModelSpec.from_config(fields)
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, **scheduler}
    return ResolvedConfig(
        model=spec,
        cache=CacheConfig(4, num_blocks, group_layers(spec.kv_specs(4))),
        scheduler=SchedulerConfig(**options),
        runner=RunnerConfig("", "float32", "cpu", "sdpa", 1),
        memory=MemoryPlan(0, 0, 0, 0, 0),
        seed=0,
        decisions=(),
    )


@dataclass
class FakeExecutor:
    """Answers each sampling row with `token(step, row)`, and records the plans.

    Attributes:
        seconds: duration of a step.
        gate: a step waits until it is set.
        ungated: how many first steps do not wait.
        errors: of rows of the next step.
        raises: exception of the next `submit`.
        raises_late: exception of the next `result`.
        grammars: by source, those that the test builds later.
    """

    token: Callable[[int, int], int] = lambda step, row: 1 + step % 50
    seconds: float = 0.0
    gate: threading.Event = field(default_factory=threading.Event)
    ungated: int = 0
    errors: dict[int, str] = field(default_factory=dict)
    raises: BaseException | None = None
    raises_late: BaseException | None = None
    depth: int = 1
    in_turn: bool = False
    lost: str = ""
    plans: list[SchedulerOutput] = field(default_factory=list)
    grammars: dict[str, Future[object]] = field(default_factory=dict)
    stopped: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    def submit(self, plan: SchedulerOutput) -> object:
        self.plans.append(plan)
        if len(self.plans) > self.ungated:
            self.gate.wait(30)
        time.sleep(self.seconds)
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
        return handle

    def give_back(self, blocks: Sequence[int]) -> int:
        return 0

    def build_grammar(self, constraint: Constraint) -> Future[object]:
        """Return the future of `grammars` if there is one, else build the grammar."""
        built: Future[object] = Future()
        if constraint.source not in self.grammars:
            built.set_result(None)
        return self.grammars.get(constraint.source, built)

    def prepare_grammars(self) -> None:
        pass

    def idle_step(self) -> bool:
        return False

    def stop(self) -> None:
        self.stopped += 1


def gated_executor(after: int = 0) -> FakeExecutor:
    """Return an executor whose steps after the first ones wait until its gate is set."""
    executor = FakeExecutor(ungated=after)
    executor.gate.clear()
    return executor


def engine_request(
    name: str = "a", prompt: Iterable[int] = (1, 2, 3), **params: object
) -> EngineRequest:
    """Return a request for five tokens; `params` are further sampling parameters."""
    return EngineRequest(name, list(prompt), SamplingParams(**{"max_tokens": 5, **params}))


@functools.cache
def bundled() -> tuple[ResolvedConfig, Executor]:
    """Return the story model on one thread, loaded once for all tests of a run. Only one engine at
    a time may use it."""
    from kvik.launch import launch

    engine = launch(
        EngineConfig(
            device="cpu",
            dtype="float32",
            threads=1,
            max_num_seqs=8,
            max_model_len=512,
            num_blocks=512,
        )
    )
    return engine.resolved, engine.loop.executor


class KeptLoop(EngineLoop):
    """A loop that does not stop its executor, which later engines reuse."""

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class ServedEngine:
    """An engine and its client.

    Attributes:
        client: the test starts it with a sink, in the event loop.
        source: of its engine.
        core: the engine's; inspect it only when the engine is idle.
    """

    client: EngineClient
    source: ThreadSource
    core: EngineCore
    executor: Executor

    async def ready(self) -> None:
        await eventually(lambda: self.client.state is EngineState.READY)

    async def at_rest(self) -> None:
        """Wait until no request, slot or block is in use."""
        await eventually(lambda: not (self.client.num_unfinished or self.core.has_requests))
        assert not self.core.scheduler.has_requests
        pool = self.core.scheduler.kv.pool
        assert pool.num_free == pool.num_blocks


def make_engine(
    config: ResolvedConfig | None = None,
    executor: Executor | None = None,
    *,
    reports: bool = False,
    **scheduler: object,
) -> ServedEngine:
    """Return an engine that is not started; `await served.client.close()` ends it.

    Args:
        config, executor: `bundled()`, or a fictitious model and a `FakeExecutor`.
        reports: the engine is one of several.
        scheduler: fields of `SchedulerConfig` to change.
    """
    if config is None:
        config = tiny_config(**scheduler)
    else:
        config = replace(config, scheduler=replace(config.scheduler, **scheduler))
    executor = executor or FakeExecutor()
    loop = KeptLoop(EngineCore(config), executor, time.monotonic)
    source = ThreadSource(lambda: loop, reports=reports)
    return ServedEngine(EngineClient(config, [source]), source, loop.core, executor)


@asynccontextmanager
async def engine_in_thread(
    config: ResolvedConfig | None = None,
    executor: Executor | None = None,
    *,
    reports: bool = False,
    **scheduler: object,
) -> AsyncIterator[ServedEngine]:
    """Provide an engine of `make_engine`, and close it at the end."""
    served = make_engine(config, executor, reports=reports, **scheduler)
    try:
        yield served
    finally:
        await served.client.close()
