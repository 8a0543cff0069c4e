"""One step after another: who computes how many tokens, under one budget.

There is no prefill phase and no decode phase. Each request's `num_computed_tokens` catches up with
what is known of it: prompt, delivered output, and drafts. Chunked prefill, prefix hits, resumption
after a preemption and speculation are the same case. Planning is optimistic: tokens count as
computed once planned, so that the next step can be planned while this one runs; `update` takes back
what did not come true.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import replace
from heapq import heapify, heappop, heappush

from kvik.config.config import CacheConfig, SchedulerConfig
from kvik.core.counters import DraftCounts, SchedulerCounters
from kvik.core.kv_manager import KVCacheManager
from kvik.core.plan import ModelRunnerOutput, NewRequest, SchedulerOutput
from kvik.core.policy import make_policy
from kvik.core.queue import WaitingQueue
from kvik.core.stop import finish_reason
from kvik.core.types import (
    FinishReason,
    Request,
    RequestDelta,
    RequestReport,
    RequestStatus,
    TokenLogprobs,
)
from kvik.core.work import WorkMeter


class _Rows:
    """The rows of a step while it is planned."""

    __slots__ = ("chunks", "drafts", "requests", "samples", "scheduled", "short", "slots")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.slots: list[int] = []
        self.scheduled: list[int] = []
        self.drafts: list[int] = []
        self.samples: list[bool] = []
        self.chunks = 0  # rows that are part of a prompt
        self.short = False  # there were not blocks enough for all who would have had a row


class Scheduler:
    def __init__(self, config: SchedulerConfig, cache: CacheConfig) -> None:
        self.config = config
        self.kv = KVCacheManager(cache)
        self.policy = make_policy(config, lambda request: self.kv.match(request).num_tokens)
        self.waiting = WaitingQueue(config.max_queued_requests, config.max_queued_tokens)
        self.running: list[Request] = []  # sorted by `order`
        self.counters = SchedulerCounters()
        self.drafts = DraftCounts()
        self.meter = WorkMeter(cache.groups)
        self._num_added = 0
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._freed_slots: list[int] = []  # since the last plan; workers have not heard yet
        self._in_flight: deque[tuple[SchedulerOutput, list[Request]]] = deque()
        self._deadlines: list[tuple[float, int, Request]] = []
        self._ended: list[RequestDelta] = []  # ended outside `update`

    # -- requests in and out ---------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a request whose limits were checked by the engine core."""
        request.serial = self._num_added
        self._num_added += 1
        request.order = self.policy.order(request, now)
        self.waiting.add(request)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, request.serial, request))
            if len(self._deadlines) > 64 + 2 * (len(self.running) + len(self.waiting)):
                # Most have ended long before their time: keep only what is still served.
                self._deadlines = [d for d in self._deadlines if not d[2].finished]
                heapify(self._deadlines)

    def end(
        self, request: Request, reason: FinishReason, now: float, error: str | None = None
    ) -> None:
        """End a request at any moment; its blocks are free when this returns."""
        if not request.finished:
            self._ended.append(self._finish(request, reason, now, [], error=error))

    def take_ended(self) -> list[RequestDelta]:
        """Requests that ended outside a step's result: aborted, late, failed."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def has_requests(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def wakeup(self, now: float) -> float | None:
        """When `schedule` may have something to do although nothing happens until then."""
        times = [self._deadlines[0][0]] if self._deadlines else []
        if not self.running:
            at = self.policy.wakeup(self.waiting.snapshot(), now)
            times += [] if at is None else [at]
        return min(times, default=None)

    # -- planning --------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Plan the next step, or None when there is nothing to compute."""
        self._expire(now)
        rows = _Rows()
        new_blocks: list[tuple[int, int, list[int]]] = []
        budget, preempted = self._schedule_running(rows, new_blocks)
        copies: list[tuple[int, int]] = []
        new_requests: list[NewRequest] = []
        if len(self.waiting) and budget and self._free_slots and not preempted:
            copies, new_requests = self._schedule_waiting(rows, budget, now)
        if not rows.slots:
            return None
        if self.config.num_lookahead_tokens:
            self._look_ahead(rows, new_blocks)
        if len(self.waiting):
            self.meter.left_waiting(
                blocks_short=preempted or rows.short, slots_short=not self._free_slots
            )
        plan = SchedulerOutput(
            step=self.counters.steps,
            slots=rows.slots,
            num_scheduled_tokens=rows.scheduled,
            num_draft_tokens=rows.drafts,
            samples=rows.samples,
            new_requests=new_requests,
            new_blocks=new_blocks,
            freed_slots=self._freed_slots,
            block_copies=copies,
        )
        self._freed_slots = []
        self._in_flight.append((plan, rows.requests))
        self.counters.steps += 1
        num_tokens = plan.num_tokens
        self.counters.scheduled_tokens += num_tokens
        self.meter.step(num_tokens, rows.chunks, rows.samples)
        return plan

    def _schedule_running(
        self, rows: _Rows, new_blocks: list[tuple[int, int, list[int]]]
    ) -> tuple[int, bool]:
        """Decoding requests first, since each costs little and someone is reading; what is left of
        the budget goes to prefills in order. Returns the rest of the budget and whether anyone
        was preempted."""
        budget = self.config.max_num_batched_tokens
        step = self.counters.steps
        block_size = self.kv.block_size
        running = self.running
        preempted = False
        prefilling: list[Request] = []
        drafting: list[tuple[Request, int]] = []
        i = 0
        while i < len(running) and budget:  # `running` shrinks at its end when blocks run out
            request = running[i]
            i += 1
            computed = request.num_computed_tokens
            pending = request.num_pending_tokens
            known = len(request.token_ids) + pending
            wanted = known - computed
            if wanted > 1:
                prefilling.append(request)
                continue
            if known >= request.max_length:
                # All it may still sample is in flight, unless its prompt alone was wanted.
                if wanted and known == request.num_prompt_tokens:
                    prefilling.append(request)
                continue
            if request.num_draft_tokens:
                if pending:
                    continue  # where the next token stands depends on how many drafts are accepted
                room = min(budget, request.max_length - known)
                wanted += min(request.num_draft_tokens, room - 1)
                drafting.append((request, wanted))
            if computed + wanted > len(request.block_ids[0]) * block_size:
                while (new := self.kv.extend(request, computed + wanted)) is None:
                    preempted = True
                    victim = self.policy.victim(running[i - 1 :])
                    self._preempt(victim)
                    if victim is request:
                        i -= 1
                        break
                if new is None:
                    continue
                new_blocks += [(request.slot, g, ids) for g, ids in enumerate(new)]
            budget -= wanted
            request.num_computed_tokens = computed + wanted
            request.num_pending_tokens = pending + wanted
            request.last_step = step
            rows.requests.append(request)
            rows.slots.append(request.slot)
            rows.scheduled.append(wanted)
            rows.drafts.append(wanted - 1)
            rows.samples.append(True)
        for request, wanted in drafting:
            if request.last_step == step:  # and not preempted, or postponed for want of blocks
                self.meter.drafts(request, wanted)
        for request in prefilling:
            if budget == 0:
                break
            if request.status is RequestStatus.RUNNING:  # not preempted above or below
                used, evicted = self._schedule_prefill(request, rows, budget, new_blocks)
                budget -= used
                preempted |= evicted
        return budget, preempted

    def _look_ahead(self, rows: _Rows, new_blocks: list[tuple[int, int, list[int]]]) -> None:
        """Places for what a drafter computes beyond the step, if there are blocks to spare."""
        for request, samples in zip(rows.requests, rows.samples, strict=True):
            if samples and request.params.speculation:
                end = request.num_computed_tokens + self.config.num_lookahead_tokens
                end = min(end, request.max_length)
                if end > len(request.block_ids[0]) * self.kv.block_size:
                    new = self.kv.extend(request, end)
                    if new is not None:
                        new_blocks += [(request.slot, g, ids) for g, ids in enumerate(new)]

    def _schedule_prefill(
        self,
        request: Request,
        rows: _Rows,
        budget: int,
        new_blocks: list[tuple[int, int, list[int]]],
    ) -> tuple[int, bool]:
        """The next chunk of a running request. Those behind it that have no row yet give way when
        blocks run out; if there are none, it waits for others to finish."""
        known = len(request.token_ids) + request.num_pending_tokens
        chunk = self.policy.chunk(request, known - request.num_computed_tokens, budget)
        evicted = False
        target = request.num_computed_tokens + chunk
        if target > len(request.block_ids[0]) * self.kv.block_size:
            while (new := self.kv.extend(request, target)) is None:
                step = self.counters.steps
                behind = [
                    r for r in self.running if r.order > request.order and r.last_step != step
                ]
                if not behind:
                    return 0, evicted
                self._preempt(self.policy.victim(behind))
                evicted = True
            new_blocks += [(request.slot, g, ids) for g, ids in enumerate(new)]
        self._add_row(rows, request, chunk)
        return chunk, evicted

    def _schedule_waiting(
        self, rows: _Rows, budget: int, now: float
    ) -> tuple[list[tuple[int, int]], list[NewRequest]]:
        """Admit waiting requests in the policy's order until something is used up."""
        copies: list[tuple[int, int]] = []
        new_requests: list[NewRequest] = []
        waiting = self.waiting.snapshot()
        allowed = self.policy.admissible(waiting, len(self.running), now)
        if allowed == 0:
            return copies, new_requests
        oldest = self._in_flight[0][0].step if self._in_flight else self.counters.steps
        for request in self.policy.candidates(waiting[:allowed], now):
            if budget == 0 or not self._free_slots:
                break
            if request.last_step >= oldest or self._leader_is_busy(request):
                continue  # what it needs is on its way
            match = self.kv.match(request)
            known = len(request.token_ids)
            chunk = self.policy.chunk(request, known - match.num_tokens, budget)
            # Starting what cannot go on would only preempt it again: while others run, the whole of
            # what is known must fit.
            if self.running and not self.kv.fits(match, known, self.config.max_num_batched_tokens):
                rows.short = True
                break
            made = self.kv.admit(request, match, match.num_tokens + chunk)
            if made is None:
                rows.short = True
                break
            copies += made
            self._start(request, match.num_tokens, now)
            new_requests.append(self._describe(request))
            self._add_row(rows, request, chunk)
            budget -= chunk
        return copies, new_requests

    @staticmethod
    def _leader_is_busy(request: Request) -> bool:
        """A sibling waits while its leader computes the prompt that both will share."""
        leader = request.leader
        return (
            leader is not None
            and leader.status is RequestStatus.RUNNING
            and leader.first_token is None
        )

    def _start(self, request: Request, matched: int, now: float) -> None:
        self.waiting.remove(request)
        self.meter.start(request)
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        insort(self.running, request, key=lambda r: r.order)
        if request.first_scheduled is None:
            request.first_scheduled = now
            request.num_cached_tokens = matched
            self.counters.prefix_queries += request.num_prompt_tokens
            self.counters.prefix_hits += matched

    @staticmethod
    def _describe(request: Request) -> NewRequest:
        return NewRequest(
            slot=request.slot,
            token_ids=request.token_ids[:],
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            block_ids=[ids[:] for ids in request.block_ids],
            params=request.params,
            stop_ids=request.stop_ids,
            seed=request.seed,
            cache_salt=request.cache_salt,
        )

    def _add_row(self, rows: _Rows, request: Request, chunk: int) -> None:
        request.num_computed_tokens += chunk
        self.meter.chunk(request, chunk)
        request.last_step = self.counters.steps
        known = len(request.token_ids) + request.num_pending_tokens
        samples = request.num_computed_tokens == known < request.max_length
        request.num_pending_tokens += samples
        rows.requests.append(request)
        rows.slots.append(request.slot)
        rows.scheduled.append(chunk)
        rows.drafts.append(0)
        rows.samples.append(samples)
        rows.chunks += 1

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks; it is queued again and recomputes what it lost. Its full blocks
        stay in the prefix cache until someone needs them, so that often little is lost."""
        self.meter.lose(request)
        self._leave(request)
        request.status = RequestStatus.PREEMPTED
        request.num_draft_tokens = 0
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self.waiting.add(request)

    def _expire(self, now: float) -> None:
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].finished):
            request = heappop(self._deadlines)[2]
            self.end(request, FinishReason.DEADLINE, now)

    # -- results ---------------------------------------------------------------------------------

    def update(self, output: ModelRunnerOutput, now: float) -> list[RequestDelta]:
        """Take in the result of the oldest step in flight.

        What goes wrong with one row ends its request and no other.
        """
        plan, requests = self._in_flight.popleft()
        if plan.step != output.step:
            raise RuntimeError(f"result of step {output.step} while {plan.step} is due")
        deltas: list[RequestDelta] = []
        rows = zip(
            requests, plan.samples, plan.num_scheduled_tokens, plan.num_draft_tokens, strict=True
        )
        errors, prompt_logprobs = output.errors, output.prompt_logprobs
        block_size = self.kv.block_size
        finished, running = RequestStatus.FINISHED, RequestStatus.RUNNING  # looked up once
        for i, (request, samples, scheduled, drafts) in enumerate(rows):
            if samples:
                request.num_pending_tokens -= drafts + 1
            status = request.status
            if status is finished:
                continue
            if status is running:
                request.num_written_tokens += scheduled
            error = errors.get(i) if errors else None
            if error is None:
                try:
                    if i in prompt_logprobs:
                        deltas.append(self._prompt_logprobs(request, prompt_logprobs[i]))
                    if samples:
                        deltas.append(self._deliver(request, output, i, drafts, now))
                    elif request.num_written_tokens == request.max_length:  # only a prompt
                        deltas.append(self._finish(request, FinishReason.LENGTH, now, []))
                    if request.num_written_tokens // block_size > request.num_committed_blocks:
                        self.kv.commit(request)
                except Exception as raised:
                    error = f"{type(raised).__name__}: {raised}"
            if error is not None:
                deltas.append(self._finish(request, FinishReason.ERROR, now, [], error=error))
        self.counters.delivered_tokens += sum([len(delta.token_ids) for delta in deltas])
        return deltas

    def _deliver(
        self, request: Request, output: ModelRunnerOutput, row: int, drafts: int, now: float
    ) -> RequestDelta:
        """Append sampled tokens up to the one that ends the output; take back rejected drafts."""
        tokens = output.token_ids[row]
        if drafts and request.status is RequestStatus.RUNNING:
            rejected = drafts + 1 - len(tokens)
            request.num_computed_tokens -= rejected
            request.num_written_tokens -= rejected
            self.meter.take_back(request, rejected)
        if drafts:
            request.num_drafted_tokens += drafts
            request.num_accepted_tokens += len(tokens) - 1
            self.drafts.add(drafts, len(tokens) - 1)
        reason = None
        known = request.token_ids
        before = len(known)
        for token in tokens:
            known.append(token)
            reason = finish_reason(request, token)
            if reason is not None:
                tokens = known[before:]
                break
        if request.first_token is None:
            request.first_token = now
        logprobs = output.logprobs.get(row) if output.logprobs else None
        if logprobs is not None:
            logprobs = logprobs[: len(tokens)]
        if reason is not None:
            return self._finish(request, reason, now, tokens, logprobs)
        proposed = output.num_draft_tokens
        if proposed is not None and request.status is RequestStatus.RUNNING:
            request.num_draft_tokens = proposed[row]
        else:
            request.num_draft_tokens = 0
        return RequestDelta(request.request_id, request.index, tokens, logprobs=logprobs)

    def fail(self, error: str, now: float) -> list[RequestDelta]:
        """The oldest step in flight as a whole failed: its requests end, all others go on."""
        plan, requests = self._in_flight.popleft()
        deltas = []
        for request, samples, drafts in zip(
            requests, plan.samples, plan.num_draft_tokens, strict=True
        ):
            if samples:
                request.num_pending_tokens -= drafts + 1
            if not request.finished:
                deltas.append(self._finish(request, FinishReason.ERROR, now, [], error=error))
        return deltas

    @staticmethod
    def _prompt_logprobs(request: Request, logprobs: list[TokenLogprobs]) -> RequestDelta:
        # Delivered once: a resumed request may take its prompt from the prefix cache again.
        if request.max_length > request.num_prompt_tokens:
            request.params = replace(request.params, prompt_logprobs=None)
        return RequestDelta(request.request_id, request.index, [], prompt_logprobs=logprobs)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
    ) -> RequestDelta:
        if request.status is RequestStatus.RUNNING:
            if error is None:
                self.kv.commit(request)
            self._leave(request, forget=error is not None)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        return RequestDelta(
            request.request_id,
            request.index,
            tokens,
            finish_reason=reason,
            stop_reason=request.stop_reason,
            logprobs=logprobs,
            error=error,
            report=RequestReport(
                arrival=request.arrival,
                first_scheduled=request.first_scheduled,
                first_token=request.first_token,
                finished=now,
                num_cached_tokens=request.num_cached_tokens,
                num_preemptions=request.num_preemptions,
                num_drafted_tokens=request.num_drafted_tokens,
                num_accepted_tokens=request.num_accepted_tokens,
            ),
        )

    def _leave(self, request: Request, *, forget: bool = False) -> None:
        """Out of the running set: blocks and slot are free at once."""
        self.meter.settle(request)
        self.kv.free(request, forget=forget)
        self.running.remove(request)
        self._free_slots.append(request.slot)
        self._freed_slots.append(request.slot)
        request.slot = -1
