"""One step after another: who computes how many tokens, under one budget.

There is no prefill phase and no decode phase. Each request's `num_computed_tokens` catches up with
what is known of it: prompt, delivered output, and drafts. Chunked prefill, prefix hits, resumption
after a preemption and speculation are the same case. Planning is optimistic: tokens count as
computed once planned, so that the next step can be planned while this one runs; `update` takes back
what did not come true.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from kvik.config.config import CacheConfig, SchedulerConfig
from kvik.core.counters import DraftCounts, SchedulerCounters
from kvik.core.deadlines import Deadlines
from kvik.core.drafts import look_ahead, place_drafts, wish_drafts
from kvik.core.fair_share import FairShare
from kvik.core.kv_manager import KVCacheManager
from kvik.core.pace import Pace
from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.core.policy import make_policy, rejoins
from kvik.core.queue import WaitingQueue
from kvik.core.room import Holdings, Room, decode_demand, decode_order, prompt_demand
from kvik.core.rows import Rows
from kvik.core.steps import StepsInFlight
from kvik.core.types import (
    FinishReason,
    Request,
    RequestDelta,
    RequestReport,
    RequestStatus,
    TokenLogprobs,
)
from kvik.core.work import WorkMeter


class Scheduler:
    def __init__(self, config: SchedulerConfig, cache: CacheConfig) -> None:
        self.config = config
        self.kv = KVCacheManager(cache)
        self.policy = make_policy(config, lambda request: self.kv.match(request).num_tokens)
        self.waiting = WaitingQueue(config.max_queued_requests, config.max_queued_tokens)
        self.running: list[Request] = []  # sorted by `order`
        self.counters = SchedulerCounters()
        self.drafts = DraftCounts()
        self.shares = FairShare()
        self.pace = Pace()
        self.deadlines = Deadlines(self.pace, config.max_num_batched_tokens, self._missing)
        self.meter = WorkMeter(cache.groups)
        self.steps = StepsInFlight(
            self.kv, self.meter, self.shares, self.counters, self.drafts, self.pace, self._finish
        )
        self._num_added = 0
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._freed_slots: list[int] = []  # since the last plan; workers have not heard yet
        self._ended: list[RequestDelta] = []  # ended outside `update`

    # -- requests in and out ---------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a request whose limits were checked by the engine core."""
        request.serial = self._num_added
        self._num_added += 1
        request.order = self.policy.order(request, now)
        self.shares.arrive(request, self.waiting.by_tenant, self.running)
        self.waiting.add(request)
        self.deadlines.add(request, now, len(self.running) + len(self.waiting))

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
        times = [self.deadlines.next_look()]
        if not self.running:
            times.append(self.policy.wakeup(self.waiting.snapshot(), now))
        return min([at for at in times if at is not None], default=None)

    # -- planning --------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Plan the next step, or None when there is nothing to compute."""
        self._expire(now)
        rows = Rows()
        contended = self.shares.contended
        running, kept = self.running, 0
        if contended:
            kept = self._make_room(rows, now)
            first = self.shares.newcomers if kept else {}
            running = decode_order(running, self.kv, self.config.max_num_seqs, first)
        budget, prefilling = self._schedule_decodes(rows, running, kept)
        if contended:
            budget = self._schedule_in_turn(rows, prefilling, budget, now)
        else:
            budget = self._schedule_in_order(rows, prefilling, budget, now)
        if not rows.slots:
            return None
        if budget and len(self.waiting) and not self.policy.batches:
            self.shares.left_over(budget, self.waiting.by_tenant)
        if any(rows.drafts):
            place_drafts(rows, self.kv, self.meter)
        if self.config.num_lookahead_tokens:
            look_ahead(rows, self.kv, self.config.num_lookahead_tokens)
        if len(self.waiting):
            self.meter.left_waiting(
                blocks_short=rows.preempted or rows.short, slots_short=not self._free_slots
            )
        plan = SchedulerOutput(
            step=self.counters.steps,
            slots=rows.slots,
            num_scheduled_tokens=rows.scheduled,
            num_draft_tokens=rows.drafts,
            samples=rows.samples,
            new_requests=rows.new_requests,
            new_blocks=rows.new_blocks,
            freed_slots=self._freed_slots,
            block_copies=rows.copies,
        )
        self._freed_slots = []
        self.counters.steps += 1
        num_tokens = plan.num_tokens
        self.steps.add(plan, rows.requests, now, num_tokens, prefill=rows.chunks > 0)
        self.counters.scheduled_tokens += num_tokens
        self.counters.step_sizes[(num_tokens - 1).bit_length()] += 1
        self.meter.step(num_tokens, rows.chunks, rows.samples)
        return plan

    def _schedule_decodes(
        self, rows: Rows, running: list[Request], kept: int
    ) -> tuple[int, list[Request]]:
        """Decoding requests first, since each costs little and someone is reading, and behind the
        next tokens of all their drafts; what is left of the budget, of which `kept` tokens are not
        for them, goes to prefills. Returns that rest, and who wants it of those that run."""
        budget = self.config.max_num_batched_tokens - kept
        step = self.counters.steps
        block_size = self.kv.block_size
        prefilling: list[Request] = []
        drafting: list[int] = []  # rows
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
            if request.num_draft_tokens and pending:
                continue  # where the next token stands depends on how many drafts are accepted
            if computed == len(request.block_ids[0]) * block_size:
                while (new := self.kv.extend(request, computed + 1)) is None:
                    if len(running) == 1 and self.steps.in_flight:
                        break  # what slides out of its windows comes free with their results
                    rows.preempted = True
                    last = running[-1].tenant  # who holds most, if shares matter
                    victim = self.policy.victim([r for r in running[i - 1 :] if r.tenant == last])
                    self._preempt(victim)
                    if running is not self.running:
                        running.remove(victim)
                    if victim is request:
                        i -= 1
                        break
                if new is None:
                    continue
                rows.extend(request, new)
            if request.num_draft_tokens:
                drafting.append(len(rows.slots))
            budget -= 1
            request.num_computed_tokens = computed + 1
            request.num_pending_tokens = pending + 1
            request.last_step = step
            rows.requests.append(request)
            rows.slots.append(request.slot)
            rows.scheduled.append(1)
            rows.drafts.append(0)
            rows.samples.append(True)
        for row in drafting:
            budget -= wish_drafts(rows, row, budget)
        return budget + kept, prefilling

    def _schedule_in_order(
        self, rows: Rows, prefilling: list[Request], budget: int, now: float
    ) -> int:
        """Prefills, then waiting requests, in the policy's order. Returns what is left of the
        budget."""
        for request in prefilling:
            if budget == 0:
                return 0
            if request.status is RequestStatus.RUNNING:  # not preempted above or below
                budget -= self._schedule_prefill(request, rows, budget)
        if not (len(self.waiting) and budget and self._free_slots) or rows.preempted:
            return budget
        waiting = self.policy.admissible(self.waiting.snapshot(), len(self.running), now)
        for request in self.policy.candidates(waiting, now):
            if budget == 0 or not self._free_slots:
                break
            if self._is_held_up(request):
                continue
            chunk = self._admit(request, rows, budget, now)
            if chunk is None:
                break
            budget -= chunk
        return budget

    def _schedule_in_turn(
        self, rows: Rows, prefilling: list[Request], budget: int, now: float
    ) -> int:
        """Prefills and waiting requests of several tenants, by their fair shares. Returns what is
        left of the budget."""
        admits = self._admits(rows) and len(self.waiting) > 0
        if not (budget and (prefilling or admits)):
            return budget
        self.shares.settle(self.running)
        waiting = self._waiting_lines(now) if admits else {}
        running: dict[str, list[Request]] = {}
        for request in prefilling:
            running.setdefault(request.tenant, []).append(request)
        lines = {
            tenant: self._line(running.get(tenant, []), waiting.get(tenant, []), rows)
            for tenant in [*running, *(t for t in waiting if t not in running)]
        }
        for request in self.shares.in_turn(lines):
            if budget == 0:
                break
            if request.status is RequestStatus.RUNNING:
                budget -= self._schedule_prefill(request, rows, budget)
            elif self._admits(rows) and not self._is_held_up(request):
                if rows.made_room and request.status is RequestStatus.PREEMPTED:
                    continue  # perhaps just now, for another
                budget -= self._admit(request, rows, budget, now) or 0
            self.shares.charge(request)
        return budget

    def _line(
        self, prefilling: list[Request], waiting: list[Request], rows: Rows
    ) -> Iterator[Request]:
        yield from prefilling
        for request in waiting:
            if not self._admits(rows):
                return
            yield request

    def _waiting_lines(self, now: float) -> dict[str, list[Request]]:
        """Those that may start, of each tenant in its order."""
        policy, lines = self.policy, self.waiting.by_tenant
        if policy.batches:
            if self.running:
                waiting = sorted(self.waiting, key=lambda request: not rejoins(request))
            else:
                waiting = list(self.shares.in_turn(lines, lambda r: r.num_prompt_tokens))
            lines = {}
            for request in policy.admissible(waiting, len(self.running), now):
                lines.setdefault(request.tenant, []).append(request)
        return {tenant: policy.candidates(line[:], now) for tenant, line in lines.items()}

    def _admits(self, rows: Rows) -> bool:
        """Whether a waiting request may still get a row in this step."""
        return bool(self._free_slots) and not (rows.preempted or rows.short)

    def _make_room(self, rows: Rows, now: float) -> int:
        """Before a step for which tenants compete: requests of those that are below their share
        get slots and blocks of others, as far as the step has tokens for them. Returns how many
        tokens decodes must leave to newcomers, if they would leave less than a fair part."""
        newcomers, kv = self.shares.newcomers, self.kv
        if self.policy.batches or not (newcomers or len(self.waiting)):
            return 0
        if not (newcomers or self._free_slots):  # as a rule: all slots are taken, evenly
            holdings = Holdings(self.running, kv, self.config.max_num_seqs)
            if not holdings.uneven(self.waiting.by_tenant, self.shares.num_active):
                return 0
        self.shares.settle(self.running)
        budget = self.config.max_num_batched_tokens
        decoding, growth = decode_demand(self.running, kv)  # these come first
        tokens, blocks = budget - decoding, kv.pool.num_free - growth
        free_slots = len(self._free_slots)
        room = Room(self.running, free_slots, blocks, kv, self.config, self.shares, self.policy)
        fair, wanted = max(1, budget // self.shares.num_active), 0  # tokens; by newcomers
        for request in newcomers:
            if request.status is RequestStatus.RUNNING:
                wanted += request.num_unscheduled_tokens
                self._give_way(room.take(request, 0, prompt_demand(request, kv, budget)), rows)
        tokens -= wanted
        for request in self.shares.in_turn(self._waiting_lines(now), lambda r: r.num_prompt_tokens):
            if tokens <= 0 and (wanted >= fair or request not in newcomers):
                break
            if self._is_held_up(request):
                continue
            if not room.may_have(request):
                break
            match = kv.match(request)
            known = len(request.token_ids)
            victims = room.take(request, 1, kv.demand(match, known, budget), match)
            if victims is None:
                break
            self._give_way(victims, rows)
            tokens -= known - match.num_tokens
            if request in newcomers:
                wanted += known - match.num_tokens
        kept = min(wanted, fair, budget - 1)
        return kept if decoding + kept > budget else 0

    def _give_way(self, victims: list[Request] | None, rows: Rows) -> None:
        for victim in victims or ():
            self._preempt(victim)
            rows.made_room = True

    def _schedule_prefill(self, request: Request, rows: Rows, budget: int) -> int:
        """The next chunk of a running request. Those behind it that have no row yet give way when
        blocks run out; if there are none, it waits for others to finish. Returns its tokens."""
        chunk = self.policy.chunk(request, request.num_unscheduled_tokens, budget)
        target = request.num_computed_tokens + chunk
        if target > len(request.block_ids[0]) * self.kv.block_size:
            while (new := self.kv.extend(request, target)) is None:
                step = self.counters.steps
                place = self.shares.place(request)
                behind = [
                    r for r in self.running if r.last_step != step and self.shares.place(r) > place
                ]
                if not behind:
                    return 0
                self._preempt(self.policy.victim(behind))
                rows.preempted = True
            rows.extend(request, new)
        self._add_row(rows, request, chunk)
        return chunk

    def _admit(self, request: Request, rows: Rows, budget: int, now: float) -> int | None:
        """Start a waiting request with its first chunk; returns its tokens, or None if blocks are
        short. Then nobody is admitted any more, so that large ones have their turn."""
        match = self.kv.match(request)
        known = len(request.token_ids)
        chunk = self.policy.chunk(request, known - match.num_tokens, budget)
        # Starting what cannot go on would only preempt it again: while others run, the whole of
        # what is known must fit, beside what was promised to newcomers.
        needed = self.kv.demand(match, known, self.config.max_num_batched_tokens)
        if request not in self.shares.newcomers:  # `_make_room` has seen to all of them
            for newcomer in self.shares.newcomers:
                needed += prompt_demand(newcomer, self.kv, self.config.max_num_batched_tokens)
        fits = not self.running or needed <= self.kv.pool.num_free
        made = self.kv.admit(request, match, match.num_tokens + chunk) if fits else None
        if made is None:
            rows.short = True
            return None
        rows.copies += made
        self._start(request, match.num_tokens, now)
        rows.start(request)
        self._add_row(rows, request, chunk)
        return chunk

    def _is_held_up(self, request: Request) -> bool:
        """What a waiting request needs is on its way: a step in flight has a row of it, or its
        leader computes the prompt that both will share."""
        return request.last_step >= self.steps.oldest or self._leader_is_busy(request)

    @staticmethod
    def _leader_is_busy(request: Request) -> bool:
        """A sibling waits while its leader computes the prompt that both will share."""
        leader = request.leader
        if leader is None or leader.first_token is not None:
            return False
        return leader.status is RequestStatus.RUNNING

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
        self.shares.start(request)
        self.kv.use_pins(request, now)

    def _add_row(self, rows: Rows, request: Request, chunk: int) -> None:
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
        self.shares.lose(request)
        self._leave(request)
        request.status = RequestStatus.PREEMPTED
        request.num_draft_tokens = 0
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self.waiting.add(request)

    def _expire(self, now: float) -> None:
        if len(self.deadlines):
            self.deadlines.most_per_step = 1 + len(self.drafts.at)
            for request in self.deadlines.late(now):
                self.end(request, FinishReason.DEADLINE, now)
        self.kv.pins.expire(now)

    def _missing(self, request: Request) -> int:
        """Tokens to compute until a request samples, as things are."""
        if request.status is RequestStatus.RUNNING:
            return request.num_unscheduled_tokens
        if self._leader_is_busy(request):
            return 1  # it will share all the others
        return len(request.token_ids) - self.kv.match(request).num_tokens

    # -- results ---------------------------------------------------------------------------------

    def update(self, output: ModelRunnerOutput, now: float) -> list[RequestDelta]:
        """Take in the result of the oldest step in flight."""
        return self.steps.update(output, now)

    def fail(self, error: str, now: float) -> list[RequestDelta]:
        """The oldest step in flight as a whole failed: its requests end, all others go on."""
        return self.steps.fail(error, now)

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
    ) -> RequestDelta:
        running = request.status is RequestStatus.RUNNING
        if running and error is None:
            self.kv.commit(request)
            self.kv.pin(request, now)
        # Had one of these raised, nothing would have changed: it could still end with an error.
        self.shares.leave(request)
        if running:
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
            report=RequestReport.of(request, now),
        )

    def _leave(self, request: Request, *, forget: bool = False) -> None:
        """Out of the running set: blocks and slot are free at once."""
        self.meter.settle(request)
        self.kv.free(request, forget=forget)
        self.running.remove(request)
        self._free_slots.append(request.slot)
        self._freed_slots.append(request.slot)
        request.slot = -1
