"""The engine without I/O: requests in, plans out; results in, deltas out. Time is an argument.

The same object runs under the offline API, the server and the simulator's virtual clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvik.config.config import ResolvedConfig
from kvik.config.errors import CapacityError, ParamError
from kvik.core.plan import DraftTimes, ModelRunnerOutput, SchedulerOutput
from kvik.core.scheduler import Scheduler
from kvik.core.seeds import derive_seed
from kvik.core.types import EngineRequest, FinishReason, Request, RequestDelta
from kvik.engine.stats import EngineStats, SpeculationStats


class EngineCore:
    """Checks requests against the model's facts, then lets the scheduler serve them."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config.scheduler, config.cache)
        self._requests: dict[str, list[Request]] = {}  # unfinished siblings by request id
        self._num_unseeded = 0
        self._draft_times = DraftTimes(0.0)

    def add(self, request: EngineRequest, now: float) -> None:
        """Queue a request.

        Raises:
            ParamError: the prompt or a parameter is impossible for this model.
            CapacityError: it can never fit, or the queue is full.
        """
        self.check(request)
        params, prompt = request.params, list(request.prompt_token_ids)
        self.scheduler.waiting.check_room(params.n, params.n * len(prompt))
        seed = params.seed
        if seed is None:
            self._num_unseeded += 1
            seed = derive_seed(self.config.seed, self._num_unseeded)
        max_length = self._max_length(request)
        eos = () if params.ignore_eos else self.config.model.eos_token_ids
        siblings: list[Request] = []
        for index in range(params.n):
            siblings.append(
                Request(
                    request_id=request.request_id,
                    index=index,
                    params=replace(params, prompt_logprobs=None) if index else params,
                    token_ids=prompt[:],
                    num_prompt_tokens=len(prompt),
                    max_length=max_length,
                    stop_ids=frozenset(params.stop_token_ids).union(eos),
                    seed=derive_seed(seed, index),
                    arrival=now,
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    deadline=request.deadline,
                    leader=siblings[0] if siblings else None,
                )
            )
        self._requests[request.request_id] = siblings[:]
        for sibling in siblings:
            self.scheduler.add(sibling, now)

    def check(self, request: EngineRequest) -> None:
        """Refuse what can never succeed. `add` does this too; the server asks at its edge."""
        prompt, limit = request.prompt_token_ids, self.config.scheduler.max_model_len
        vocab_size = self.config.model.vocab_size
        if request.request_id in self._requests:
            raise ParamError("request_id", f"{request.request_id!r} is already being served")
        if not prompt:
            raise ParamError("prompt", "must have at least one token")
        if len(prompt) + (request.params.max_tokens != 0) > limit:
            raise ParamError(
                "prompt",
                f"has {len(prompt)} tokens, which leaves no room for output in the context of "
                f"{limit} (max_model_len)",
            )
        for token in prompt:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise ParamError("prompt", f"token id {token!r} is outside 0..{vocab_size - 1}")
        request.params.check_against(vocab_size, limit)
        if request.params.min_tokens > limit - len(prompt):
            raise ParamError(
                "min_tokens",
                f"{request.params.min_tokens} do not fit behind a prompt of {len(prompt)} tokens "
                f"in the context of {limit}",
            )
        most = self.config.scheduler.max_queued_requests
        if request.params.n > most:
            raise CapacityError(
                "n", f"must be at most max_queued_requests ({most}), not {request.params.n}"
            )
        kv = self.scheduler.kv
        longest = self._max_length(request)
        needed = kv.max_blocks(longest, self.config.scheduler.max_num_batched_tokens)
        if needed > kv.pool.num_blocks - 1:
            raise CapacityError(
                "max_tokens",
                f"{longest} tokens need {needed} KV blocks of {kv.block_size}, the whole cache has "
                f"{kv.pool.num_blocks - 1}",
            )

    def end(
        self,
        request_id: str,
        now: float,
        *,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
        error: str | None = None,
    ) -> None:
        """End a request, or one of its siblings, at any moment; unknown ids are already gone."""
        for request in self._requests.get(request_id, [])[:]:
            if index is None or request.index == index:
                self.scheduler.end(request, reason, now, error)

    def plan(self, now: float) -> SchedulerOutput | None:
        """The next step to compute, or None if there is nothing to do now."""
        return self.scheduler.schedule(now)

    def finish_step(self, output: ModelRunnerOutput, now: float) -> list[RequestDelta]:
        """Take in the result of the oldest plan in flight."""
        if output.draft_times is not None:
            self._draft_times += output.draft_times
        return self._note_finished(self.scheduler.update(output, now))

    def fail_step(self, error: str, now: float) -> list[RequestDelta]:
        """The oldest plan in flight could not be computed: its requests end, others go on."""
        return self._note_finished(self.scheduler.fail(error, now))

    def take_ended(self) -> list[RequestDelta]:
        """Last deltas of requests that ended outside a step: aborted, past their deadline."""
        return self._note_finished(self.scheduler.take_ended())

    def wakeup(self, now: float) -> float | None:
        """When to call `plan` again if it returned None and nothing else happens."""
        return self.scheduler.wakeup(now)

    @property
    def has_requests(self) -> bool:
        """Whether anything is unfinished, or finished but not yet reported."""
        return bool(self._requests)

    def stats(self) -> EngineStats:
        """Without times, which the loop knows."""
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        counters = scheduler.counters
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            queued_tokens=scheduler.waiting.num_tokens,
            kv_usage=scheduler.kv.usage,
            num_blocks=pool.num_blocks - 1,
            cached_blocks=pool.num_cached,
            steps=counters.steps,
            scheduled_tokens=counters.scheduled_tokens,
            delivered_tokens=counters.delivered_tokens,
            preemptions=counters.preemptions,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            work=scheduler.meter.read(scheduler.running),
            speculation=self._speculation(),
        )

    def _speculation(self) -> SpeculationStats | None:
        if self.config.speculation is None:
            return None
        times = self._draft_times
        drafts = self.scheduler.drafts.copy()
        return SpeculationStats(drafts, times.proposing, times.checking, times.plain)

    def _max_length(self, request: EngineRequest) -> int:
        """Prompt + output at most: what was asked for, never past the context."""
        limit = self.config.scheduler.max_model_len
        if request.params.max_tokens is None:
            return limit
        return min(limit, len(request.prompt_token_ids) + request.params.max_tokens)

    def _note_finished(self, deltas: Sequence[RequestDelta]) -> list[RequestDelta]:
        for delta in deltas:
            if delta.finish_reason is not None:
                siblings = self._requests[delta.request_id]
                siblings[:] = [r for r in siblings if r.index != delta.index]
                if not siblings:
                    del self._requests[delta.request_id]
        return list(deltas)
