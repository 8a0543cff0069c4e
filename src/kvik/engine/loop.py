"""The step loop: plan, submit, process results. The only place where core and executor meet.

An executor on a GPU, or a pipeline, has several steps in flight: the next one is planned and
submitted before the result of the oldest is read, so that the host works while the device computes.
If a plan depends on the result before it, as with drafts, steps are executed in turn.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Protocol

from kvik.config.config import ResolvedConfig
from kvik.config.units import show_bytes
from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.structured import Constraint
from kvik.core.types import EngineRequest, FinishReason, RequestDelta, last_deltas
from kvik.engine.core import EngineCore
from kvik.engine.memory_watch import LOOK_SECONDS, MemoryWatch
from kvik.engine.stats import EngineStats, LoopTime
from kvik.errors import CapacityError, ConfigError, GroupLost, ModelError, ParamError, describe
from kvik.spec.adapters import NO_ADAPTER, Adapter
from kvik.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FIND_SECONDS = 0.25  # for finding pages on the disk before the first request
BUILT_SECONDS = 0.002  # between checks whether a grammar is built, while the loop is idle

# The interface between the core and the workers that compute its plans.


class Executor(Protocol):
    """Runs plans in the order of submission."""

    depth: int  # useful number of steps in flight; 1 if compute happens in `submit`
    # A step can be planned only with the result of the one before it, for example because drafts
    # depend on its tokens. A step in flight still overlaps with the delivery of deltas.
    in_turn: bool

    @property
    def lost(self) -> str:
        """Why it can compute no further step; "" while it can."""
        ...

    def submit(self, plan: SchedulerOutput) -> object:
        """Begin a step. Returns a handle for `result`."""
        ...

    def result(self, handle: object) -> ModelRunnerOutput:
        """Wait for a step; results are asked for in the order of submission.

        Raises:
            GroupLost: no further step can be computed: see `lost`.
            Exception: the step as a whole failed; the executor can take the next one.
        """
        ...

    def give_back(self, blocks: Sequence[int]) -> int:
        """Give the memory of KV blocks back to the system, where possible. No step in flight uses
        them.

        Returns:
            Bytes.
        """
        ...

    def load_adapter(self, slot: int, adapter: Adapter) -> None:
        """Read an adapter into a slot that no request and no step in flight uses, in all processes.

        Raises:
            KvikError: a process cannot; the slot may be used again.
        """
        ...

    def build_grammar(self, constraint: Constraint) -> Future[object]:
        """Begin to build what a structured text needs, while steps run. The future raises
        `KvikError` if it cannot be built."""
        ...

    def prepare_grammars(self) -> None:
        """Begin to make what the first `build_grammar` needs, in a thread. Steps may pause."""
        ...

    def idle_step(self) -> bool:
        """Use idle time to make later steps faster.

        Returns:
            Whether there is more to prepare.
        """
        ...

    def stop(self) -> None:
        """Free everything. Safe to call twice."""
        ...


class LoopObserver:
    """Observes every input of the core, in order, with the time given to the core.

    These inputs and the results of the executor determine what the engine does. Calls come from the
    loop's thread; they must be quick and must not raise. Subclasses override what they need; the
    defaults do nothing.
    """

    def added(self, request: EngineRequest, seed: int, now: float) -> None:
        """The core accepted a request.

        Args:
            seed: of its first completion, from the request or chosen by the core.
        """

    def ended(
        self,
        request_id: str,
        index: int | None,
        reason: FinishReason,
        error: str | None,
        now: float,
    ) -> None:
        """A request, or one of its siblings, was ended from outside."""

    def handed_over(self, request_id: str, now: float) -> None:
        """A request was handed over to another engine, if possible."""

    def cache_reset(self, now: float) -> None:
        """The prefix cache was emptied."""

    def gave_back(self, count: int, now: float) -> None:
        """The memory of up to `count` KV blocks was given back."""

    def adapter_changed(self, name: str, adapter: Adapter | None, slot: int) -> None:
        """An adapter was loaded into a slot; None: it was unloaded."""

    def planned(self, plan: SchedulerOutput | None, now: float) -> None:
        """The core made a plan; None: there is nothing to compute."""

    def finished(self, output: ModelRunnerOutput, now: float) -> None:
        """The oldest plan in flight was computed; the core does not have the result yet."""

    def failed(self, error: str, now: float) -> None:
        """The oldest plan in flight could not be computed."""

    def idle(self) -> None:
        """There is nothing to do until something happens outside."""

    def close(self, reason: str) -> None:
        """The loop takes no further step."""


class EngineLoop:
    """Runs steps, and keeps fewer than `executor.depth` in flight between two calls of `step`.

    An error in a step ends the requests of that step, and the loop continues.
    """

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        clock: Callable[[], float],
        observers: Sequence[LoopObserver] = (),
        memory: MemoryWatch | None = None,
    ) -> None:
        """
        Args:
            memory: None: KV blocks keep their memory even if the system is short of it.
        """
        self.core = core
        self.executor = executor
        self.clock = clock
        self.observers = observers
        self.failed_in_a_row = 0  # steps, since the last one that could be computed
        self._memory = memory
        self._building: dict[str, tuple[EngineRequest, Future[object]]] = {}
        self._in_flight: deque[object] = deque()
        self._unreturned: list[RequestDelta] = []  # returned by `step`
        self._step_ended = False  # since the last plan, so that another one may have more work
        self._watch = _Watch(clock())

    def watch(self, observer: LoopObserver) -> None:
        """Add an observer, before the first request."""
        self.observers = (*self.observers, observer)

    def add(self, request: EngineRequest) -> None:
        """See `EngineCore.add`. A request for structured text enters the core when its grammar is
        built."""
        constraint = request.params.structured
        if constraint is None:
            self._enter(request)
            return
        if request.request_id in self._building:
            raise ParamError("request_id", f"{request.request_id!r} is already being served")
        self.core.check(request)
        count, tokens = self.num_building()
        tokens += request.params.n * len(request.prompt_token_ids)
        self.core.scheduler.waiting.check_capacity(request.params.n + count, tokens)
        self._building[request.request_id] = (request, self.executor.build_grammar(constraint))
        self._take_built()

    def num_building(self) -> tuple[int, int]:
        """Return how many outputs wait for their grammars, and the tokens of their prompts."""
        requests = [request for request, _ in self._building.values()]
        tokens = sum(request.params.n * len(request.prompt_token_ids) for request in requests)
        return sum(request.params.n for request in requests), tokens

    def _take_built(self) -> None:
        """Add requests whose grammars are built to the core, and end those past their deadline."""
        now = self.clock()
        for request, built in list(self._building.values()):
            if request.deadline is not None and now > request.deadline:
                self._end_building(request.request_id, FinishReason.DEADLINE, None)
            elif built.done():
                try:
                    built.result()
                    self._enter(request)
                except Exception as error:
                    refused = error.field if isinstance(error, CapacityError) else None
                    reason = str(error) if refused else describe(error)
                    self._end_building(request.request_id, FinishReason.ERROR, reason, refused)
                self._building.pop(request.request_id, None)

    def _end_building(
        self, request_id: str, reason: FinishReason, error: str | None, refused: str | None = None
    ) -> None:
        request, built = self._building.pop(request_id)
        built.cancel()
        now = self.clock()
        siblings = range(request.params.n)
        self._unreturned += last_deltas(
            request_id, siblings, now, error, reason=reason, refused=refused
        )

    def _enter(self, request: EngineRequest) -> None:
        now = self.clock()
        seed = self.core.add(request, now)
        for observer in self.observers:
            observer.added(request, seed, now)

    def end(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
        error: str | None = None,
    ) -> None:
        """See `EngineCore.end`."""
        if request_id in self._building:
            self._end_building(request_id, reason, error)
            return
        now = self.clock()
        self.core.end(request_id, now, index=index, reason=reason, error=error)
        for observer in self.observers:
            observer.ended(request_id, index, reason, error, now)

    def hand_over(self, request_id: str) -> None:
        """See `EngineCore.hand_over`."""
        now = self.clock()
        self.core.hand_over(request_id, now)
        for observer in self.observers:
            observer.handed_over(request_id, now)

    def reset_prefix_cache(self) -> int:
        """See `Scheduler.reset_cache`."""
        now = self.clock()
        count = self.core.scheduler.reset_cache()
        for observer in self.observers:
            observer.cache_reset(now)
        return count

    def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter, between two steps. If that fails, nothing has changed.

        Raises:
            ParamError: its name is taken, there is no room, or it does not fit.
            UnavailableError: unfinished requests of unloaded ones have the room.
            GroupLost: a process is gone.
        """
        while self._in_flight:  # a request that has ended may have a row in one
            self._unreturned += self._finish_oldest()
        slot = self.core.free_slot(adapter.name)
        try:
            self.executor.load_adapter(slot, adapter)
        except (ConfigError, ModelError) as error:
            raise ParamError(error.field, error.message) from None
        self.core.load_adapter(adapter, slot)
        for observer in self.observers:
            observer.adapter_changed(adapter.name, adapter, slot)

    def unload_adapter(self, name: str) -> None:
        """See `EngineCore.unload_adapter`."""
        self.core.unload_adapter(name)
        for observer in self.observers:
            observer.adapter_changed(name, None, NO_ADAPTER)

    def set_adapters(self, adapters: Sequence[Adapter]) -> None:
        """Unload all other adapters, and load those that are not. Raises as `load_adapter`."""
        before = self.core.config.runner.adapters
        for adapter in before:
            if adapter not in adapters:
                self.unload_adapter(adapter.name)
        for adapter in adapters:
            if adapter not in before:
                self.load_adapter(adapter)

    def step(self) -> list[RequestDelta]:
        """Start a step if there is one, and finish the oldest if enough are in flight. If the
        executor needs results in turn, finish it before planning."""
        self.look_at_memory()
        if self._building:
            self._take_built()
        now = self.clock()
        self._watch.turn("host", now)
        while self.executor.in_turn and self._in_flight:
            self._unreturned += self._finish_oldest()
            now = self.clock()
        plan = self.core.plan(now)
        self._step_ended = False
        for observer in self.observers:
            observer.planned(plan, now)
        if plan is not None:
            self._watch.turn("executor", self.clock())
            try:
                self._in_flight.append(self.executor.submit(plan))
            except Exception as error:
                self._in_flight.append(error)
            except BaseException:  # Ctrl-C: the step must still be recorded as in flight
                self._in_flight.append(RuntimeError("the step was interrupted"))
                raise
            finally:
                self._watch.turn("host", self.clock())
        if self._in_flight and plan is None:
            self._unreturned += self._finish_oldest()
        while len(self._in_flight) >= self.executor.depth:  # may be two after an interrupted step
            self._unreturned += self._finish_oldest()
        self._unreturned += self.core.take_finished()
        deltas, self._unreturned = self._unreturned, []
        if self.idle_seconds() != 0.0:
            self._watch.turn("idle", self.clock())
            for observer in self.observers:
                observer.idle()
        return deltas

    def poll(
        self, timeout: float | None = None, sleep: Callable[[float], object] = time.sleep
    ) -> list[RequestDelta]:
        """Run a step and return the deltas since the last call; sleeps up to `timeout` seconds
        while a policy waits for more requests."""
        idle = self.idle_seconds()
        if idle is None and self.has_work:  # a batch waits for requests without a limit
            idle = timeout
        if idle:
            sleep(idle if timeout is None else min(idle, timeout))
        return self.step()

    def look_at_memory(self) -> float | None:
        """Give back KV blocks that no request refers to if the system is short of memory.

        Returns:
            Seconds until this should be called again; None: after the next step.
        """
        pool, moves = self.core.scheduler.kv.pool, self.core.scheduler.moves
        if self._memory is None or self._in_flight or pool.num_unused == 0:
            return None
        if moves is not None and moves.reads_blocks:
            return None
        now = self.clock()
        share, reason = self._memory.share_to_give_back(now)
        if share:
            count = ceil(share * pool.num_unused)
            num_bytes = self.executor.give_back(pool.give_back(count))
            log.warning(
                "gave back %d unused KV blocks, %s: %s", count, show_bytes(num_bytes), reason
            )
            for observer in self.observers:
                observer.gave_back(count, now)
        return LOOK_SECONDS

    def find_pages(self) -> None:
        """Give the tiers of the KV cache a moment to list their pages before the first request.
        Listing that takes longer continues while requests are served."""
        until = self.clock() + FIND_SECONDS
        while self.core.scheduler.has_moves and self.clock() < until:
            self.step()

    def idle_step(self) -> bool:
        """If there is no work, let the executor prepare for later steps for a moment. Returns
        whether it has more to prepare."""
        return self.idle_seconds() is None and self.executor.idle_step()

    @property
    def lost(self) -> str:
        """Why no further step can be computed; "" while one can."""
        return self.executor.lost

    def close(self) -> None:
        """Free the model; safe to call twice."""
        reason = self.lost or "the engine was closed"
        for observer in self.observers:
            observer.close(reason)
        self.executor.stop()

    def stats(self) -> EngineStats:
        return replace(self.core.stats(), time=self._watch.read(self.clock()))

    @property
    def waiting_ids(self) -> list[str]:
        """Requests of which no step has computed anything."""
        return [*self._building, *self.core.waiting_ids]

    @property
    def has_work(self) -> bool:
        # Moves under way do not count: a disk may never answer.
        stores = self.core.scheduler.has_stores
        return self.core.has_requests or bool(
            stores or self._in_flight or self._unreturned or self._building
        )

    def idle_seconds(self) -> float | None:
        """Return how long `step` will have nothing to do; None: until a request arrives."""
        scheduler = self.core.scheduler
        if self._in_flight or self._unreturned or scheduler.running or scheduler.has_moves:
            return 0.0
        idle = self._core_idle_seconds()
        if self._building:
            return BUILT_SECONDS if idle is None else min(idle, BUILT_SECONDS)
        return idle

    def _core_idle_seconds(self) -> float | None:
        scheduler = self.core.scheduler
        if not scheduler.has_requests:
            return 0.0 if self.core.has_requests else None
        if self._step_ended:
            return 0.0
        now = self.clock()
        at = scheduler.wakeup(now)
        if at == inf:
            return None
        return 0.0 if at is None else max(0.0, at - now)

    def _finish_oldest(self) -> list[RequestDelta]:
        self._step_ended = True
        handle = self._in_flight[0]  # stays in flight if the wait for it is interrupted
        self._watch.turn("executor", self.clock())
        try:
            if isinstance(handle, Exception):
                raise handle
            output = self.executor.result(handle)
        except Exception as error:
            self._in_flight.popleft()
            self.failed_in_a_row += 1
            message, now = f"{type(error).__name__}: {error}", self.clock()
            for observer in self.observers:
                observer.failed(message, now)
            deltas = self.core.fail_step(message, now)
            if isinstance(error, GroupLost):  # not caused by these requests
                for delta in deltas:
                    delta.resendable = True
            return deltas
        finally:
            now = self.clock()
            self._watch.turn("host", now)
        self._in_flight.popleft()
        self.failed_in_a_row = 0
        for observer in self.observers:
            observer.finished(output, now)
        return self.core.finish_step(output, now)


class _Watch:
    """Assigns every second since the start to an activity of the loop: "executor", "host" or
    "idle"."""

    def __init__(self, now: float) -> None:
        self._seconds = {"executor": 0.0, "host": 0.0, "idle": 0.0}
        self._doing = "idle"
        self._since = now

    def turn(self, doing: str, now: float) -> None:
        self._seconds[self._doing] += now - self._since
        self._doing, self._since = doing, now

    def read(self, now: float) -> LoopTime:
        self.turn(self._doing, now)
        return LoopTime(**self._seconds)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine in this process, and what a frontend needs to know about its model."""

    loop: EngineLoop
    tokenizer: Tokenizer | None  # None: the model has none; prompts are token ids
    default_params: SamplingParams

    @property
    def resolved(self) -> ResolvedConfig:
        return self.loop.core.config
