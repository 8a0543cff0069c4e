"""A scheduler and a fake worker, stepped by the test, with all invariants checked."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from helpers import invariants
from helpers.fake_worker import (
    EOS,
    PAGE,
    FakeWorker,
    expected_embedding,
    expected_output,
    expected_prompt_logprobs,
)
from helpers.windows import Seen, as_window

from kvik.core.config import CacheConfig, SchedulerConfig, TierSizes
from kvik.core.plan import ModelRunnerOutput, NewRequest, SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.scheduler import Scheduler
from kvik.core.types import FinishReason, PageSource, Pin, Request, RequestDelta
from kvik.spec.kv import KVCacheSpec, group_layers
from kvik.spec.visible_keys import Budget

STATE_PAGES = 3  # that hold the states of a request in a tier


def kv_spec(window: Seen = None, readers: int = 1) -> KVCacheSpec:
    budget = window if isinstance(window, Budget) else None
    seen = as_window(window)
    return KVCacheSpec(1, 4, bytes_per_token=16, window=seen, readers=readers, budget=budget)


@dataclass(frozen=True)
class Setup:
    """A scheduler's configuration, small by default so that resources run short."""

    policy: str = "fcfs"
    block_size: int = 4
    num_blocks: int = 64
    windows: tuple[Seen, ...] = (None,)  # one KV group each
    readers: int = 1  # of the cache of each layer
    budget: int = 16
    max_num_seqs: int = 4
    max_model_len: int = 64
    depth: int = 1  # steps in flight
    stages: int = 1  # of a pipeline
    caching: bool = True
    batch_size: int = 3
    max_wait: float | None = 0.5
    more_expected: bool = True  # the frontend expects requests, for which batches wait
    ageing: float = 10.0
    max_queued_requests: int = 1000
    max_queued_tokens: int = 100_000
    lookahead: int = 0
    pinned_share: float = 0.75
    tenant_pinned_share: float = 0.5
    checkpoints: int | None = None  # of states; None: no layer has a state
    whole_prompts: bool = False
    tiers: tuple[int, int] = (0, 0)  # pages in memory and on disk
    peers: bool = False  # it exchanges pages with other engines

    @property
    def cache(self) -> CacheConfig:
        groups = group_layers([kv_spec(window, self.readers) for window in self.windows])
        return CacheConfig(
            self.block_size,
            self.num_blocks,
            groups,
            self.caching,
            self.pinned_share,
            self.tenant_pinned_share,
            self.checkpoints,
            tiers=self._tier_sizes(len(groups)),
        )

    def _tier_sizes(self, groups: int) -> TierSizes | None:
        memory, disk = self.tiers
        lends = self.peers and memory > 0
        parts = 0 if self.checkpoints is None else STATE_PAGES
        pages = (PAGE,) * (groups + bool(parts))
        sizes = TierSizes(pages, memory, disk * PAGE, self.peers, lends, state_pages=parts)
        return sizes if memory or disk or self.peers else None

    @property
    def scheduler(self) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=self.max_model_len,
            policy=self.policy,
            batch_size=self.batch_size,
            max_wait=self.max_wait,
            ageing=self.ageing,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            num_lookahead_tokens=self.lookahead,
            stages=self.stages,
            whole_prompts=self.whole_prompts,
        )


class Simulation:
    """`step` plans and executes; results are delivered when `depth` steps are in flight."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.scheduler = Scheduler(setup.scheduler, setup.cache)
        self.scheduler.more_expected = setup.more_expected
        self.worker = FakeWorker(setup.cache, self._salt_of)
        self.now = 0.0
        self.requests: dict[tuple[str, int], Request] = {}
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[tuple[str, int], RequestDelta] = {}
        self.unscored: set[tuple[str, int]] = set()  # whose prompt logprobs are missing
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput | None]] = deque()
        self.failing_row: int | None = None  # in the next step
        self.step_fails = False  # the next step
        self._virtual_time = 0

    def fits(self, num_tokens: int) -> bool:
        """Return whether the engine core would accept a request of this length."""
        kv = self.scheduler.kv
        return kv.config.max_blocks(num_tokens, self.setup.budget) <= kv.pool.num_blocks

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        n: int = 1,
        priority: int = 0,
        salt: str = "",
        deadline: float | None = None,
        params: SamplingParams | None = None,
        stop_ids: frozenset[int] = frozenset([EOS]),
        tenant: str = "",
        pins: tuple[Pin, ...] = (),
        pooling: str | None = None,
        lends: bool = False,
        source: PageSource | None = None,
    ) -> list[Request]:
        """Add a request. With `pooling` it only yields a vector, and with `max_tokens` 0 only
        prompt logprobs."""
        name = f"r{len(self.requests)}"
        if max_tokens == 0 and pooling is None:
            params = SamplingParams(
                max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=len(prompt) // 2
            )
        siblings: list[Request] = []
        for index in range(n):
            request = Request(
                request_id=name,
                index=index,
                params=params or SamplingParams(),
                token_ids=prompt[:],
                num_prompt_tokens=len(prompt),
                max_length=min(
                    len(prompt) + (0 if pooling else max_tokens), self.setup.max_model_len
                ),
                stop_ids=stop_ids,
                seed=0,
                arrival=self.now,
                priority=priority,
                cache_salt=salt,
                deadline=deadline,
                tenant=tenant,
                pins=pins,
                pooling=pooling,
                leader=siblings[0] if siblings else None,
                lends=lends and index == 0,
                source=None if index else source,
            )
            siblings.append(request)
            self.requests[request.key] = request
            self.outputs[request.key] = []
            if request.params.prompt_logprobs is not None:
                self.unscored.add(request.key)
            self.scheduler.add(request, self.now)
        self.check()
        return siblings

    def plan(self) -> SchedulerOutput | None:
        """Plan and execute a step, and queue its result."""
        plan = self.scheduler.schedule(self.now)
        self.check()
        if plan is None:
            if self.scheduler.has_requests and not self.in_flight:
                at = self.scheduler.wakeup(self.now)
                assert at is not None and at > self.now, "nothing to do, but requests wait"
            return None
        assert plan.num_tokens <= self.setup.budget
        assert len(set(plan.slots)) == len(plan.slots)
        assert min(plan.num_scheduled_tokens, default=1) > 0
        if not plan.slots:  # only moves
            fails, self.step_fails = self.step_fails, False
            self.in_flight.append((plan, self.worker.move(plan, fails=fails)))
            return plan
        output = self.worker.execute(plan, failing_row=self.failing_row, fails=self.step_fails)
        self.failing_row, self.step_fails = None, False
        self.in_flight.append((plan, output))
        return plan

    def deliver(self) -> list[RequestDelta]:
        """Hand the oldest result to the scheduler."""
        _, output = self.in_flight.popleft()
        if output is None:
            deltas = self.scheduler.fail("the step failed", self.now)
        else:
            requests = self.scheduler.in_flight[0].requests
            broken = self.worker.broken.get(output.step, [False] * len(requests))
            for request, is_broken in zip(requests, broken, strict=True):
                assert request.finished or not is_broken, "garbage is delivered"
            deltas = self.scheduler.update(output, self.now)
        self.check()
        self._note(deltas)
        return deltas

    def planned(self) -> SchedulerOutput:
        """Plan a step that must not be empty."""
        plan = self.plan()
        assert plan is not None
        return plan

    def answer(self, plan: SchedulerOutput, *rows: list[int]) -> list[RequestDelta]:
        """Deliver given tokens instead of the fake worker's."""
        self.in_flight.popleft()
        deltas = self.scheduler.update(ModelRunnerOutput(plan.step, list(rows)), self.now)
        self.check()
        return deltas

    def step(self) -> SchedulerOutput | None:
        plan = self.plan()
        if self.in_flight and (plan is None or len(self.in_flight) >= self.setup.depth):
            self.deliver()
        self._note(self.scheduler.take_finished())
        return plan

    def end(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        self.scheduler.end(request, reason, self.now)
        assert not request.block_ids
        self.check()
        self._note(self.scheduler.take_finished())

    def hand_over(self, request: Request, to: Simulation | None = None) -> Request | None:
        """Continue a request in another engine, or resubmit it here. None: it stays here."""
        if self.scheduler.may_hand_over(request):
            self.scheduler.hand_over(request, self.now)
        self.check()
        ended = self.scheduler.take_finished()
        self._note([delta for delta in ended if delta.handed is None])
        handed = next((delta.handed for delta in ended if delta.handed is not None), None)
        if handed is None:
            return None
        assert request.finished and not request.block_ids
        prompt, output = request.num_prompt_tokens, handed.output_token_ids
        assert output == self.outputs[request.key]
        other = Request(
            request_id=request.request_id,
            index=request.index,
            params=request.params,
            token_ids=[*request.token_ids[:prompt], *output],
            num_prompt_tokens=prompt,
            max_length=request.max_length,
            stop_ids=request.stop_ids,
            seed=handed.seed,
            arrival=self.now,
            priority=request.priority,
            cache_salt=request.cache_salt,
            deadline=request.deadline,
            tenant=request.tenant,
            pins=request.pins,
            pooling=request.pooling,
            source=handed.source,
            first_token=request.first_token,
        )
        to = self if to is None else to
        to.requests[other.key], to.outputs[other.key] = other, self.outputs[other.key]
        if to is not self:
            del self.requests[other.key], self.outputs[other.key]
        to.scheduler.add(other, to.now)
        to.check()
        return other

    def drain(self, max_steps: int = 3000) -> int:
        """Step until no request is left, check that all resources are free, and return the number
        of steps."""
        steps = 0
        self._note(self.scheduler.take_finished())
        while self.scheduler.has_requests or self.in_flight or self.moving:
            steps += 1
            assert steps <= max_steps, "no progress"
            self.step()
            self.now += 0.1
        pool = self.scheduler.kv.pool
        assert pool.num_free == pool.num_blocks
        assert self.ended.keys() == self.requests.keys()
        return steps

    def outlive_pins(self) -> None:
        """Wait until every pin has expired, and check that all blocks can be reused."""
        ends = [held.until for held in self.scheduler.kv.pins.by_use]
        self.now = max([self.now, *ends])
        assert self.scheduler.schedule(self.now) is None
        self.check()
        pool = self.scheduler.kv.pool
        assert pool.num_pinned == pool.num_kept == 0
        assert len(pool.free_blocks()) == pool.num_blocks

    @property
    def moving(self) -> bool:
        return self.scheduler.has_moves

    def check(self) -> None:
        invariants.check(self.scheduler)
        before, self._virtual_time = self._virtual_time, self.scheduler.shares.virtual_time
        assert before <= self._virtual_time, "virtual time went back"

    def _salt_of(self, new: NewRequest) -> str:
        return next(r.cache_salt for r in self.scheduler.running if r.slot == new.slot)

    def _note(self, deltas: list[RequestDelta]) -> None:
        """Collect outputs and compare them with the "model"."""
        for delta in deltas:
            key = (delta.request_id, delta.index)
            request = self.requests[key]
            assert key not in self.ended, "tokens after the end"
            self.outputs[key] += delta.token_ids
            prompt = request.token_ids[: request.num_prompt_tokens]
            if delta.prompt_logprobs is not None:
                self.unscored.remove(key)  # they arrive once
                right_scores = expected_prompt_logprobs(
                    prompt, request.cache_salt, request.params.prompt_logprobs_start
                )
                assert delta.prompt_logprobs == right_scores
            if delta.finish_reason is None:
                continue
            self.ended[key] = delta
            right = expected_output(
                prompt,
                request.cache_salt,
                request.max_length - request.num_prompt_tokens,
                stop_id=EOS if EOS in request.stop_ids else None,
            )
            if request.pooling is not None:
                done = delta.finish_reason is FinishReason.STOP
                vector = expected_embedding(prompt, request.cache_salt, request.pooling)
                assert delta.embedding == (vector if done else None)
                assert not self.outputs[key]
            elif delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert self.outputs[key] == right and key not in self.unscored
                stopped = bool(right) and right[-1] in request.stop_ids
                assert (delta.finish_reason is FinishReason.STOP) == stopped
            else:
                assert self.outputs[key] == right[: len(self.outputs[key])]
