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
from collections.abc import Callable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Protocol

from kvik.core.config import CacheConfig, SchedulerConfig
from kvik.core.fair_share import (
    FairShare,
    Holdings,
    Room,
    decode_demand,
    decode_order,
    prompt_demand,
)
from kvik.core.kv_manager import KVCacheManager
from kvik.core.plan import ModelRunnerOutput, NewRequest, SchedulerOutput
from kvik.core.policy import make_policy, rejoins
from kvik.core.queue import WaitingQueue
from kvik.core.types import (
    DraftCounts,
    FinishReason,
    PromptUse,
    Request,
    RequestDelta,
    RequestReport,
    RequestStatus,
    SchedulerCounters,
    TokenLogprobs,
    finish_reason,
)
from kvik.core.work import WorkMeter

# A step while it is planned.


class Rows:
    """The rows of a step, and what the worker must be told before them."""

    __slots__ = (
        "chunks",
        "copies",
        "drafts",
        "made_room",
        "new_blocks",
        "new_requests",
        "preempted",
        "requests",
        "samples",
        "scheduled",
        "short",
        "slots",
    )

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.slots: list[int] = []
        self.scheduled: list[int] = []
        self.drafts: list[int] = []
        self.samples: list[bool] = []
        self.new_requests: list[NewRequest] = []
        self.new_blocks: list[tuple[int, int, list[int]]] = []  # slot, KV group, ids
        self.copies: list[tuple[int, int]] = []  # source block, target block
        self.chunks = 0  # rows that are part of a prompt
        self.made_room = False  # someone had to give way to another tenant before it began
        self.preempted = False  # someone lost his blocks to a row of this step
        self.short = False  # there were not blocks enough for all who would have had a row

    def extend(self, request: Request, new: list[list[int]]) -> None:
        """A running request was given blocks, per KV group."""
        self.new_blocks += [(request.slot, g, ids) for g, ids in enumerate(new)]

    def start(self, request: Request) -> None:
        """A request enters a slot, before anything of it is computed there."""
        self.new_requests.append(
            NewRequest(
                slot=request.slot,
                token_ids=request.token_ids[:],
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=[ids[:] for ids in request.block_ids],
                params=request.params,
                stop_ids=request.stop_ids,
                seed=request.seed,
                cache_salt=request.cache_salt,
                pooling=request.pooling,
            )
        )


# Tokens and blocks for guesses: what a step has left when everything known has its place.
#
# Drafts are work that may be in vain, so they preempt nobody. They take part of a step's token
# budget behind the next tokens of all decoding requests, and blocks behind all rows of the step.


def wish_drafts(rows: Rows, row: int, budget: int) -> int:
    """Note how many drafts a decoding row is to have, within its request's length and `budget`
    tokens. Returns how many; `place_drafts` decides whether there are blocks for them."""
    request = rows.requests[row]
    room = request.max_length - len(request.token_ids) - 1
    rows.drafts[row] = min(request.num_draft_tokens, room, budget)
    return rows.drafts[row]


def place_drafts(rows: Rows, kv: KVCacheManager, meter: WorkMeter) -> None:
    """Add the drafts that were wished for to the rows, once all rows have their blocks. Where too
    few blocks are left, drafts beyond those that their request holds are dropped."""
    for row, wished in enumerate(rows.drafts):
        if not wished:
            continue
        request, drafts = rows.requests[row], wished
        places = len(request.block_ids[0]) * kv.block_size - request.num_computed_tokens
        if drafts > places:
            new = kv.extend(request, request.num_computed_tokens + drafts)
            if new is None:
                drafts = places
            else:
                rows.extend(request, new)
        rows.drafts[row] = drafts
        rows.scheduled[row] += drafts
        request.num_computed_tokens += drafts
        request.num_pending_tokens += drafts
        meter.drafts(request, 1 + drafts)


def look_ahead(rows: Rows, kv: KVCacheManager, num_tokens: int) -> None:
    """Places for what a drafter computes beyond the step, if there are blocks to spare."""
    for request, samples in zip(rows.requests, rows.samples, strict=True):
        if samples and request.params.speculation:
            end = min(request.num_computed_tokens + num_tokens, request.max_length)
            if end > len(request.block_ids[0]) * kv.block_size:
                new = kv.extend(request, end)
                if new is not None:
                    rows.extend(request, new)


# Requests that must be done by a time, and those that cannot be any more.
#
# A request whose deadline has passed is ended. One that cannot reach its first token in time, or
# its `min_tokens`, is ended as soon as that is sure, so that its work goes to others. It is sure
# if even `HURRY` of the time would be too long that it takes when nothing holds it up and every
# step is as fast as the fastest of the last ones (`Pace.at_least`).

HURRY = 0.75


class Deadlines:
    """A heap of the times at which to look at each request again.

    `missing` tells how many tokens a request has yet to compute before it samples, 0 if what it
    needs is under way.
    """

    def __init__(self, pace: Pace, budget: int, missing: Callable[[Request], int]) -> None:
        self.pace = pace
        self.budget = budget  # tokens of a step at most
        self.missing = missing
        self.most_per_step = 1  # tokens of a request, drafts included
        self._looks: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._looks)

    def add(self, request: Request, now: float, num_served: int) -> None:
        """Watch a request that has a deadline, beside `num_served` requests in all."""
        if request.deadline is None:
            return
        heappush(self._looks, (now, request.serial, request))
        if len(self._looks) > 64 + 2 * num_served:
            # Most have ended long before their time: keep only what is still served.
            self._looks = [look for look in self._looks if not look[2].finished]
            heapify(self._looks)

    def next_look(self) -> float | None:
        """When `late` may have something to say although nothing happens until then."""
        return self._looks[0][0] if self._looks else None

    def late(self, now: float) -> list[Request]:
        """Those that are past their deadline or cannot make it any more; they are forgotten."""
        found = []
        looks = self._looks
        while looks and (looks[0][0] <= now or looks[0][2].finished):
            request = heappop(looks)[2]
            if request.finished or request.deadline is None:
                continue
            last = request.deadline - HURRY * self._seconds(request)
            if last <= now:
                found.append(request)
            else:
                heappush(looks, (last, request.serial, request))
        return found

    def _seconds(self, request: Request) -> float:
        """What it takes at least until the tokens are there that make the answer worth having."""
        made = request.num_output_tokens + request.num_pending_tokens
        wanted = max(1, request.params.min_tokens) - made
        if wanted <= 0:
            return 0.0
        pace = self.pace
        full, rest = divmod(self.missing(request), self.budget)
        seconds = full * pace.at_least(self.budget) + (pace.at_least(rest) if rest else 0.0)
        return seconds + (wanted - 1) / self.most_per_step * pace.at_least(1)


# How fast steps pass, from the times at which they were planned and their results came.

SAMPLES = 16  # of each size; as many are wanted before anything is believed
FADING = 0.95  # what a step back counts less in means


class Pace:
    """Seconds per step, by its tokens. Time is an argument; nothing here reads a clock.

    Means say what to expect. `at_least` says what no step was faster than lately, and is what work
    may be given up by: a step of more tokens is believed to take no less time.
    """

    def __init__(self) -> None:
        self._last = float("-inf")  # when the last result came
        # [k]: seconds and tokens of the last steps of up to 2^k tokens, and more than 2^(k - 1)
        self._by_size: list[deque[tuple[float, int]]] = []
        self._steps = self._step_seconds = 0.0
        self._prefill_tokens = self._prefill_seconds = 0.0

    def note(self, planned: float, done: float, tokens: int, *, prefill: bool) -> None:
        """A step of so many tokens, chunks of prompts among them or not, is done.

        With several steps in flight one began when the one before it was done.
        """
        seconds = max(0.0, done - max(planned, self._last))
        self._last = done
        size = (tokens - 1).bit_length()
        while len(self._by_size) <= size:
            self._by_size.append(deque(maxlen=SAMPLES))
        self._by_size[size].append((seconds, tokens))
        self._steps = self._steps * FADING + 1.0
        self._step_seconds = self._step_seconds * FADING + seconds
        if prefill:
            self._prefill_tokens = self._prefill_tokens * FADING + tokens
            self._prefill_seconds = self._prefill_seconds * FADING + seconds

    @property
    def seconds_per_step(self) -> float | None:
        """A mean of the last steps; None before the first."""
        return self._step_seconds / self._steps if self._steps else None

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """A mean of the last steps with chunks of prompts, decoding rows counted; None before the
        first."""
        seconds = self._prefill_seconds
        return self._prefill_tokens / seconds if seconds else None

    def at_least(self, tokens: int) -> float:
        """Seconds that a step of `tokens` tokens takes even if it is as fast as the fastest of the
        last ones that were no larger; 0.0 if too few were."""
        seconds = 0.0
        for steps in self._by_size[: (tokens - 1).bit_length() + 1]:
            if len(steps) == SAMPLES and max(size for _, size in steps) <= tokens:
                seconds = max(seconds, min(steps)[0])
        return seconds


# Steps in flight, and what their results mean for the requests that had rows in them.


class Finish(Protocol):
    """How a request ends, with its last tokens: it gives back what it holds."""

    def __call__(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None = None,
        error: str | None = None,
    ) -> RequestDelta: ...


class StepsInFlight:
    """Planned steps in order, whose results come one by one."""

    def __init__(
        self,
        kv: KVCacheManager,
        meter: WorkMeter,
        shares: FairShare,
        counters: SchedulerCounters,
        drafts: DraftCounts,
        pace: Pace,
        finish: Finish,
    ) -> None:
        self.kv = kv
        self.meter = meter
        self.shares = shares
        self.counters = counters
        self.drafts = drafts
        self.pace = pace
        self.finish = finish
        self.in_flight: deque[tuple[SchedulerOutput, list[Request]]] = deque()
        # Of the same steps: when they were planned, tokens, whether there were chunks of prompts
        self._planned: deque[tuple[float, int, bool]] = deque()

    def add(
        self,
        plan: SchedulerOutput,
        requests: list[Request],
        now: float,
        num_tokens: int,
        *,
        prefill: bool,
    ) -> None:
        """A step is planned; `requests` are those of its rows."""
        self.in_flight.append((plan, requests))
        self._planned.append((now, num_tokens, prefill))

    @property
    def oldest(self) -> int:
        """The number of the oldest step without a result, or of the next one."""
        return self.in_flight[0][0].step if self.in_flight else self.counters.steps

    def update(self, output: ModelRunnerOutput, now: float) -> list[RequestDelta]:
        """Take in the result of the oldest step in flight.

        What goes wrong with one row ends its request and no other.
        """
        plan, requests = self.in_flight.popleft()
        if plan.step != output.step:
            raise RuntimeError(f"result of step {output.step} while {plan.step} is due")
        planned, num_tokens, prefill = self._planned.popleft()
        self.pace.note(planned, now, num_tokens, prefill=prefill)
        deltas: list[RequestDelta] = []
        rows = zip(
            requests, plan.samples, plan.num_scheduled_tokens, plan.num_draft_tokens, strict=True
        )
        errors, prompt_logprobs = output.errors, output.prompt_logprobs
        times = _seconds(plan, output, prefill=prefill)
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
                    first = samples and request.first_token is None
                    if i in prompt_logprobs:
                        deltas.append(self._prompt_logprobs(request, prompt_logprobs[i]))
                    if samples:
                        deltas.append(self._deliver(request, output, i, drafts, times, now))
                    elif self._is_read(request, i, output):
                        deltas.append(self.finish(request, FinishReason.LENGTH, now, []))
                        deltas[-1].embedding = output.embeddings.get(i)
                    if request.num_written_tokens // block_size > request.num_committed_blocks:
                        self.kv.commit(request)
                        if request.pins:
                            self.kv.pin(request, now)
                    if first:
                        used = PromptUse(request.num_cached_tokens, request.num_pinned_tokens)
                        deltas[-1].prompt = used
                except Exception as raised:
                    error = f"{type(raised).__name__}: {raised}"
            if error is not None:
                deltas.append(self.finish(request, FinishReason.ERROR, now, [], error=error))
        self.counters.delivered_tokens += sum([len(delta.token_ids) for delta in deltas])
        return deltas

    def _deliver(
        self,
        request: Request,
        output: ModelRunnerOutput,
        row: int,
        drafts: int,
        times: tuple[float, float],
        now: float,
    ) -> RequestDelta:
        """Append sampled tokens up to the one that ends the output; take back rejected drafts.

        Args:
            times: see `_seconds`.
        """
        tokens = output.token_ids[row]
        if drafts and request.status is RequestStatus.RUNNING:
            rejected = drafts + 1 - len(tokens)
            request.num_computed_tokens -= rejected
            request.num_written_tokens -= rejected
            self.meter.take_back(request, rejected)
        speculation = request.speculation
        if drafts:
            places = drafts if output.draft_places is None else output.draft_places[drafts]
            self.drafts.add(drafts, len(tokens) - 1, places)
            if speculation is not None:
                speculation.drafts.add(drafts, len(tokens) - 1, places)
        if speculation is not None and times[0]:
            speculation.seconds += times[0]
            speculation.plain_seconds += times[1] * len(tokens)
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
            self.shares.first_token(request)
        logprobs = output.logprobs.get(row) if output.logprobs else None
        if logprobs is not None:
            logprobs = logprobs[: len(tokens)]
        if reason is not None:
            return self.finish(request, reason, now, tokens, logprobs)
        proposed = output.num_draft_tokens
        if proposed is not None and request.status is RequestStatus.RUNNING:
            request.num_draft_tokens = proposed[row]
        else:
            request.num_draft_tokens = 0
        return RequestDelta(request.request_id, request.index, tokens, logprobs=logprobs)

    def fail(self, error: str, now: float) -> list[RequestDelta]:
        """The oldest step in flight as a whole failed: its requests end, all others go on."""
        plan, requests = self.in_flight.popleft()
        self._planned.popleft()
        deltas = []
        for request, samples, drafts in zip(
            requests, plan.samples, plan.num_draft_tokens, strict=True
        ):
            if samples:
                request.num_pending_tokens -= drafts + 1
            if not request.finished:
                deltas.append(self.finish(request, FinishReason.ERROR, now, [], error=error))
        return deltas

    @staticmethod
    def _is_read(request: Request, row: int, output: ModelRunnerOutput) -> bool:
        """The last chunk of a prompt of which nothing is sampled is computed. If the request was
        preempted meanwhile, what was wanted of the prompt tells: it comes with the last chunk."""
        if request.num_written_tokens == request.max_length:
            return True
        return row in output.prompt_logprobs or row in output.embeddings

    @staticmethod
    def _prompt_logprobs(request: Request, logprobs: list[TokenLogprobs]) -> RequestDelta:
        # Delivered once: a resumed request may take its prompt from the prefix cache again.
        if request.max_length > request.num_prompt_tokens:
            request.params = replace(request.params, prompt_logprobs=None)
        return RequestDelta(request.request_id, request.index, [], prompt_logprobs=logprobs)


def _seconds(
    plan: SchedulerOutput, output: ModelRunnerOutput, *, prefill: bool
) -> tuple[float, float]:
    """What a step took that only decoded, and what one without drafts takes for a token of each of
    its rows; 0.0 of both if that is not known. See `RequestSpeculation`."""
    times = output.draft_times
    if times is not None and times.checking:
        tokens = sum([len(row) for row in output.token_ids])
        return times.checking, times.plain * len(output.token_ids) / max(1, tokens)
    if prefill or not output.turn_seconds or any(plan.num_draft_tokens):
        return 0.0, 0.0
    making = 0.0 if times is None else times.proposing
    return output.turn_seconds + making, output.turn_seconds


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
