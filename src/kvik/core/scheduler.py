"""The scheduler: decides which requests compute how many tokens in each step, under one budget.

Batching is continuous: requests join and leave the batch between any two steps (iteration-level
scheduling; Yu et al. 2022, Orca). There is no prefill phase and no decode phase. Each request's
`num_computed_tokens` catches up with its known tokens: prompt, delivered output, and drafts. So
prompts in chunks beside decodes (Agrawal et al. 2023, Sarathi, arXiv 2308.16369), prefix hits,
resumption after a preemption (Kwon et al. 2023, arXiv 2309.06180, section 4.5) and speculation are
the same case.

The budget of a step goes to the next token of each decoding request, then to their drafts, then to
chunks of prompts, of running and of waiting requests, in the policy's order. If blocks run out, the
request that is last in order loses its own, and later computes or loads its tokens again.

Planning is optimistic: tokens count as computed once planned, so that the next step can be planned
while this one runs; `update` takes back rejected drafts.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from kvik.core.block_pool import ContentLog
from kvik.core.checkpoints import StateCheckpoint
from kvik.core.config import CacheConfig, SchedulerConfig
from kvik.core.fair_share import FairShare, FreeResources
from kvik.core.kv_manager import KVCacheManager, PrefixMatch
from kvik.core.moves import Moves
from kvik.core.plan import ModelRunnerOutput, NewRequest, SchedulerOutput
from kvik.core.policy import make_policy, rejoins
from kvik.core.queue import Deadlines, WaitingQueue
from kvik.core.step_clock import StepClock
from kvik.core.types import (
    DraftCounts,
    FinishReason,
    Handover,
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


@dataclass(slots=True, eq=False)
class Step:
    """A step, from the beginning of its planning until its result."""

    plan: SchedulerOutput
    planned: float  # when it was planned
    requests: list[Request] = field(default_factory=list)  # of the plan's rows
    num_tokens: int = 0  # of all rows, once the plan is complete
    num_chunks: int = 0  # rows that are part of a prompt
    prefixes: set[bytes] = field(default_factory=set)  # hashes of the prompt blocks that it fills
    # Requests that could have a row but wait for a prefix that is being computed.
    num_waiters: int = 0
    preempted_before: bool = False  # a request was preempted for a tenant, before any row
    preempted: bool = False  # a request lost its blocks to a row of the step
    short: bool = False  # there were too few blocks for a request that could have had a row
    # Copies of states that the plan makes, which are not published yet.
    checkpoints: list[StateCheckpoint] = field(default_factory=list)

    def add_decodes(self, requests: list[Request]) -> None:
        """Add a row of one token for each of the requests."""
        plan, count = self.plan, len(requests)
        plan.slots.extend([request.slot for request in requests])
        plan.num_scheduled_tokens.extend([1] * count)
        plan.num_draft_tokens.extend([0] * count)
        plan.samples.extend([True] * count)
        self.requests += requests

    def add_chunk(self, request: Request, num_tokens: int, *, samples: bool) -> None:
        """Add a row of the next `num_tokens` tokens of a prompt."""
        plan = self.plan
        plan.slots.append(request.slot)
        plan.num_scheduled_tokens.append(num_tokens)
        plan.num_draft_tokens.append(0)
        plan.samples.append(samples)
        self.requests.append(request)
        self.num_chunks += not (request.is_beam and num_tokens == 1)

    def extend(self, request: Request, new: list[list[int]]) -> None:
        """Add the blocks `new` (a list for each KV group) of a running request."""
        self.plan.new_blocks.extend((request.slot, g, ids) for g, ids in enumerate(new))

    def start(self, request: Request) -> None:
        """Add a request that enters a slot, before any row of it."""
        self.plan.new_requests.append(
            NewRequest(
                slot=request.slot,
                token_ids=list(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=request.num_computed_tokens,
                block_ids=[ids[:] for ids in request.block_ids],
                params=request.params,
                stop_ids=request.stop_ids,
                seed=request.seed,
                cache_salt=request.cache_salt,
                pooling=request.pooling,
                second_text=request.second_text,
                adapter=request.adapter,
            )
        )


class Scheduler:
    """Plans steps, processes their results, and owns all requests from arrival to end."""

    def __init__(self, config: SchedulerConfig, cache: CacheConfig) -> None:
        self.config = config
        self.kv = KVCacheManager(cache)
        self.policy = make_policy(config, lambda request: self.kv.match(request).num_tokens)
        self.waiting = WaitingQueue(config.max_queued_requests, config.max_queued_tokens)
        self.running: list[Request] = []  # requests with a slot, sorted by `order`
        self.counters = SchedulerCounters()
        self.drafts = DraftCounts()  # acceptance of all drafts
        # The service of each tenant.
        self.shares = FairShare(self.kv, self.policy, config.max_num_seqs)
        self.clock = StepClock()  # how long steps take
        self.deadlines = Deadlines()
        self.meter = WorkMeter(cache.groups)
        # Between the cache and its tiers; None: it has none.
        self.moves = Moves(self.kv, config.max_num_seqs) if cache.tiers is not None else None
        self.in_flight: deque[Step] = deque()  # planned steps without a result, oldest first
        self.num_plans = 0  # made since the start, those without rows included
        self.more_expected = True  # more requests may arrive, so a batch may wait for them
        self._num_added = 0
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._freed_slots: list[int] = []  # since the last plan; not sent to workers yet
        self._state_copies: list[tuple[int, int]] = []  # since the last plan
        self._ended: list[RequestDelta] = []  # ended outside `update`

    # -- requests in and out ---------------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Queue a request whose limits were checked by the engine core."""
        request.serial = self._num_added
        self._num_added += 1
        request.order = self.policy.order(request)
        self.shares.arrive(request, self.waiting.by_tenant, self.running)
        if self.moves is not None:
            self.moves.arrived(request)
        self.waiting.add(request)
        self.deadlines.add(request, now, len(self.running) + len(self.waiting))

    def end(
        self, request: Request, reason: FinishReason, now: float, error: str | None = None
    ) -> None:
        """End a request at any moment; its blocks are free when this returns."""
        if not request.finished:
            self._ended.append(self._finish(request, reason, now, [], error=error))

    def may_hand_over(self, request: Request) -> bool:
        """Return whether no step in flight has a request that has not ended."""
        pending = request.num_pending_tokens or request.last_step >= self._oldest_step
        return not (request.finished or pending)

    def hand_over(self, request: Request, now: float) -> None:
        """End a request that another engine continues, and lend its pages. It must not have a row
        in a step in flight."""
        assert self.may_hand_over(request)
        source = None
        if request.status is RequestStatus.RUNNING and self.moves is not None:
            self.moves.preempt(request)
            source = self.moves.lend(
                request, min(request.num_written_tokens, len(request.token_ids))
            )
        delta = self._finish(request, FinishReason.MOVED, now, [])
        assert delta.report is not None
        output = list(request.token_ids[request.num_prompt_tokens :])
        delta.handed = Handover(output, request.seed, source, delta.report, request.index)
        self._ended.append(delta)

    def take_finished(self) -> list[RequestDelta]:
        """Return last deltas of requests that ended outside a step's result: aborted, late,
        failed."""
        ended, self._ended = self._ended, []
        return ended

    def reset_cache(self) -> int:
        """Forget all cached prefixes, pinned ones and those in tiers included; requests continue.
        Returns the number of block contents in the cache that were forgotten."""
        if self.moves is not None:
            self.moves.clear()
        return self.kv.reset()

    def log_contents(self, log: ContentLog) -> None:
        """Restart a log with all contents of the cache and the memory tier, and from now on note
        all changes."""
        log.restart()
        self.kv.pool.log_to(log)
        if self.moves is not None:
            self.moves.index.log_to(log)

    @property
    def has_requests(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    @property
    def has_stores(self) -> bool:
        """Whether the next plan stores or deletes something, with or without requests."""
        return self.moves is not None and self.moves.begins

    @property
    def has_moves(self) -> bool:
        """Whether there are moves to begin or to wait for, with or without requests."""
        return self.moves is not None and (self.moves.begins or self.moves.under_way)

    def wakeup(self, now: float) -> float | None:
        """Return when `schedule` may next have something to do if nothing else happens before."""
        times = [self.deadlines.next_check()]
        if self.policy.batches and not self.running and not self.more_expected:
            return now
        if not self.running:
            times.append(self.policy.wakeup(self.waiting.snapshot(), now))
        return min([at for at in times if at is not None], default=None)

    # -- planning --------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Plan the next step; None: there is nothing to compute or to move."""
        self._expire(now)
        plan = SchedulerOutput(
            self.num_plans,
            [],
            [],
            [],
            [],
            freed_slots=self._freed_slots,
            state_copies=self._state_copies,
        )
        step = Step(plan, now)
        if self.moves is not None:
            self.moves.begin(now, plan)
        reserved = self._preempt_for_tenants(step, now) if self.shares.contended else 0
        budget, prefilling = self._schedule_decodes(step, reserved)
        if budget:
            budget = self._schedule_prompts(step, prefilling, budget, now)
        if self.moves is not None:
            self.moves.add_to(plan)
        if not plan.slots:
            return self._moves_alone(step)
        if budget and len(self.waiting) and not self.policy.batches:
            self.shares.left_over(budget, self.waiting.by_tenant)
        if any(plan.num_draft_tokens):
            self._place_drafts(step)
        if self.config.num_lookahead_tokens:
            self._look_ahead(step)
        if len(self.waiting):
            self.meter.left_waiting(
                blocks_short=step.preempted or step.short, slots_short=not self._free_slots
            )
        step.num_tokens = plan.num_tokens
        plan.budget_cuts.extend(self.kv.take_cuts())
        self._freed_slots = []
        self._state_copies = []
        self.in_flight.append(step)
        self.num_plans += 1
        self.counters.steps += 1
        self.counters.rows += len(plan.slots)
        self.counters.scheduled_tokens += step.num_tokens
        self.counters.step_sizes[(step.num_tokens - 1).bit_length()] += 1
        self.meter.step(step.num_tokens, step.num_chunks, plan.samples)
        return plan

    def _moves_alone(self, step: Step) -> SchedulerOutput | None:
        """Return a plan without rows if there are moves to begin or to wait for."""
        plan, moves = step.plan, self.moves
        pages = plan.drops or plan.stores or plan.loads
        begins = pages or plan.leases or plan.ended_leases or plan.sources or plan.left_sources
        if moves is None or not (begins or (moves.under_way and not self.in_flight)):
            return None
        step.plan = replace(plan, freed_slots=[], state_copies=[])  # left for a later plan
        self.in_flight.append(step)
        self.num_plans += 1
        return step.plan

    def _schedule_decodes(self, step: Step, reserved: int) -> tuple[int, list[Request]]:
        """Give decoding requests their next token, then drafts from what is left of the budget.

        Decodes come first, since each costs little and a reader waits for its token.

        Args:
            reserved: tokens of the budget that decodes must not use.

        Returns:
            What is left of the budget for prompts, and the running requests that want it.
        """
        budget = self.config.max_num_batched_tokens - reserved
        running = self.running
        if self.shares.contended:
            running = self.shares.decode_order(running, newcomers_first=reserved > 0)
        number, block_size = step.plan.step, self.kv.block_size
        staged, max_decodes = self.config.stages > 1, self._decodes_at_once()
        prefilling, decoding = list[Request](), list[Request]()
        drafting: list[int] = []  # rows, of those decoding
        i = 0
        while i < len(running) and budget:  # `running` shrinks at its end when blocks run out
            request = running[i]
            i += 1
            computed = request.num_computed_tokens
            pending = request.num_pending_tokens
            length = len(request.token_ids) + pending
            missing = length - computed
            if missing > 1:
                prefilling.append(request)
                continue
            if length >= request.max_length:
                # Its last token is in flight, unless it is a prompt without output.
                if missing and length == request.num_prompt_tokens:
                    prefilling.append(request)
                continue
            unknown = pending and (request.num_draft_tokens or staged)
            at_cut = computed == request.next_cut
            waits = at_cut and self._waits_to_cut(request)
            if unknown or waits or (staged and len(decoding) == max_decodes):
                # The position of the next token depends on how many drafts are accepted, and the
                # first stage of a pipeline needs the token itself.
                continue
            full = at_cut or computed == len(request.block_ids[0]) * block_size
            if full and not self._extend_decode(request, running, step):
                continue
            if request.num_draft_tokens:
                drafting.append(len(decoding))
            budget -= 1
            request.num_computed_tokens = computed + 1
            request.num_pending_tokens = pending + 1
            request.last_step = number
            decoding.append(request)
        step.add_decodes(decoding)
        for row in drafting:
            request = decoding[row]
            longest = request.max_length - len(request.token_ids) - 1
            longest = min(longest, request.next_cut - request.num_computed_tokens)
            drafts = min(request.num_draft_tokens, longest, budget)
            step.plan.num_draft_tokens[row] = drafts  # `_place_drafts` allocates blocks
            budget -= drafts
        return budget + reserved, prefilling

    def _extend_decode(self, request: Request, running: list[Request], step: Step) -> bool:
        """Allocate blocks for a request's next token. If too few are free, the last requests lose
        theirs; the request itself may be the last.

        Args:
            running: in the order in which decodes get blocks; preempted requests are removed.

        Returns:
            Whether the request may have a row.
        """
        while (new := self.kv.extend(request, request.num_computed_tokens + 1)) is None:
            if len(running) == 1 and self.in_flight:
                return False  # results in flight free the blocks that slide out of its windows
            step.preempted = True
            victim = running[-1]  # of the tenant that uses most, if shares are contended
            self._preempt(victim)
            if running is not self.running:
                running.remove(victim)
            if victim is request:
                return False
        step.extend(request, new)
        if self.kv.checkpoints is not None:
            self._take_checkpoint(request, step)
        return True

    def _decodes_at_once(self) -> int:
        """Return the most decoding rows of a step. In a pipeline they are spread over as many steps
        as there are stages, so that all stages have something to compute."""
        stages = self.config.stages
        if stages == 1:
            return self.config.max_num_seqs
        decoding = sum(request.num_unscheduled_tokens <= 1 for request in self.running)
        return max(1, -(-decoding // stages))

    def _schedule_prompts(
        self, step: Step, prefilling: list[Request], budget: int, now: float
    ) -> int:
        """Schedule chunks of running requests, and waiting requests with their first chunk. Returns
        what is left of the budget."""
        behind: dict[str, int] = {}  # tenant -> tokens for requests after one that waits
        for request in self._prompt_order(step, prefilling, now):
            if request.status is RequestStatus.RUNNING:
                budget -= self._schedule_prefill(request, step, budget)
            elif self._admits(step) and not self._must_wait(request):
                if self.config.whole_prompts and len(request.token_ids) > budget:
                    break  # it goes into the next step, and no request overtakes it
                if step.preempted_before and request.status is RequestStatus.PREEMPTED:
                    continue  # it may have been preempted in this step, for another tenant
                match, tenant = self.kv.match(request), request.tenant
                if self.moves is not None and self._waits_for_pages(request, match, step, now):
                    continue
                saved = self._worth_waiting_for(request, match, step)
                if saved:
                    request.awaits_prefix = True
                    step.num_waiters += 1
                    behind[tenant] = min(behind.get(tenant, saved), saved)
                    continue
                if tenant in behind and not self.policy.batches:
                    missing = len(request.token_ids) - match.num_tokens
                    if missing > min(behind[tenant], budget):
                        continue
                    behind[tenant] -= missing
                budget -= self._admit(request, match, step, budget, now)
            if self.shares.contended:
                self.shares.charge(request)
            if not budget:
                break
        return budget

    def _prompt_order(self, step: Step, prefilling: list[Request], now: float) -> Iterator[Request]:
        """Yield prefilling requests, then waiting ones while the step admits any, in the policy's
        order; several tenants are ordered by their fair shares."""
        if not self.shares.contended:
            yield from prefilling
            if len(self.waiting) and self._admits(step):
                for waiting in self._waiting_lines(now).values():
                    yield from self._line([], waiting, step)
            return
        admits = len(self.waiting) > 0 and self._admits(step)
        if not (prefilling or admits):
            return
        self.shares.settle(self.running)
        lines = self._waiting_lines(now) if admits else {}
        running: dict[str, list[Request]] = {}
        for request in prefilling:
            running.setdefault(request.tenant, []).append(request)
        yield from self.shares.in_turn(
            {
                tenant: self._line(running.get(tenant, []), lines.get(tenant, []), step)
                for tenant in dict.fromkeys([*running, *lines])
            }
        )

    def _line(
        self, prefilling: list[Request], waiting: list[Request], step: Step
    ) -> Iterator[Request]:
        """Yield the requests of one tenant in order, waiting ones while the step admits any."""
        yield from prefilling
        for request in waiting:
            if not self._admits(step):
                return
            yield request

    def _waiting_lines(self, now: float) -> dict[str, list[Request]]:
        """Return the waiting requests that may start, by tenant, each in the policy's order."""
        policy, lines = self.policy, self.waiting.by_tenant
        if policy.batches:
            waiting = self.waiting.snapshot()
            if self.shares.contended and self.running:
                waiting.sort(key=lambda request: not rejoins(request))
            elif self.shares.contended:
                waiting = list(self.shares.in_turn(lines, lambda r: r.num_prompt_tokens))
            lines = {}
            more = self.more_expected
            for request in policy.admissible(waiting, len(self.running), now, more=more):
                lines.setdefault(request.tenant, []).append(request)
        return {tenant: policy.candidates(line[:], now) for tenant, line in lines.items()}

    def _admits(self, step: Step) -> bool:
        """Return whether a waiting request may still get a row in this step."""
        return len(self._free_slots) > step.num_waiters and not (step.preempted or step.short)

    def _preempt_for_tenants(self, step: Step, now: float) -> int:
        """Before a step for which tenants compete, preempt requests for tenants below their share,
        as far as the step has tokens for them.

        Returns:
            How many tokens decodes must leave to newcomers, if they would leave less than a fair
            part; else 0.
        """
        newcomers, kv = self.shares.newcomers, self.kv
        if self.policy.batches or not (newcomers or len(self.waiting)):
            return 0
        if not (newcomers or self._free_slots):  # the usual case: all slots are taken, evenly
            usage = self.shares.usage(self.running)
            if not usage.uneven(self.waiting.by_tenant, self.shares.num_active):
                return 0
        self.shares.settle(self.running)
        budget = self.config.max_num_batched_tokens
        decoding, growth = self._decode_demand()  # these come first
        tokens, blocks = budget - decoding, kv.pool.num_free - growth
        free = FreeResources(self.shares, self.running, len(self._free_slots), blocks)
        fair, demand = max(1, budget // self.shares.num_active), 0  # tokens; wanted by newcomers
        for request in newcomers:
            if request.status is RequestStatus.RUNNING:
                demand += request.num_unscheduled_tokens
                self._preempt_all(free.take(request, 0, kv.prompt_demand(request, budget)), step)
        tokens -= demand
        for request in self.shares.in_turn(self._waiting_lines(now), lambda r: r.num_prompt_tokens):
            if tokens <= 0 and (demand >= fair or request not in newcomers):
                break
            if self._must_wait(request):
                continue
            if not free.may_have(request):
                break
            match = kv.match(request)
            if self._worth_waiting_for(request, match, step):
                continue
            length = len(request.token_ids)
            victims = free.take(request, 1, kv.demand(match, length, budget), match)
            if victims is None:
                break
            self._preempt_all(victims, step)
            tokens -= length - match.num_tokens
            if request in newcomers:
                demand += length - match.num_tokens
        reserved = min(demand, fair, budget - 1)
        return reserved if decoding + reserved > budget else 0

    def _decode_demand(self) -> tuple[int, int]:
        """Return the tokens of the next step's decoding rows, drafts included, and the new blocks
        they need, without drafts."""
        tokens = blocks = 0
        for request in self.running:
            if request.num_unscheduled_tokens == 1:
                tokens += 1 + request.num_draft_tokens
                blocks += self.kv.num_missing(request, request.num_computed_tokens + 1)
        return tokens, blocks

    def _preempt_all(self, victims: list[Request] | None, step: Step) -> None:
        for victim in victims or ():
            self._preempt(victim)
            step.preempted_before = True

    def _schedule_prefill(self, request: Request, step: Step, budget: int) -> int:
        """Schedule the next chunk of a running request. When blocks run out, requests after it
        without a row are preempted; if there are none, it waits for others to finish. Returns the
        number of tokens scheduled."""
        chunk = min(request.num_unscheduled_tokens, budget)
        start = request.num_computed_tokens
        if self._waits_to_cut(request):
            return 0
        chunk = self._up_to_cut(request, start, chunk)
        if self.kv.checkpoints is not None:
            chunk = self.kv.checkpoints.cut(request, start, chunk)
        target = start + chunk
        if start == request.next_cut or target > len(request.block_ids[0]) * self.kv.block_size:
            while (new := self.kv.extend(request, target)) is None:
                number, place = step.plan.step, self.shares.place(request)
                behind = [
                    r
                    for r in self.running
                    if r.last_step != number and self.shares.place(r) > place
                ]
                if not behind:
                    return 0
                self._preempt(behind[-1])
                step.preempted = True
            step.extend(request, new)
        self._add_chunk(step, request, chunk)
        return chunk

    def _admit(
        self, request: Request, match: PrefixMatch, step: Step, budget: int, now: float
    ) -> int:
        """Start a waiting request with its first chunk. Returns the number of tokens scheduled; 0
        if too few blocks are free. Then the step admits no others, so that a large request is not
        overtaken for ever."""
        length = len(request.token_ids)
        chunk = min(length - match.num_tokens, budget)
        chunk = self._up_to_cut(request, match.num_tokens, chunk)
        checkpoints = self.kv.checkpoints
        if checkpoints is not None:
            if self.moves is not None:  # blocks in tiers without a state where they end
                shared = max(match.num_shared, self.moves.num_stored(request))
                match = replace(match, num_shared=shared)
            request.num_shared_tokens = match.num_shared
            chunk = checkpoints.cut(request, match.num_tokens, chunk)
        # A request that cannot continue would only be preempted again. So while others run, all its
        # known tokens must fit, in addition to what newcomers still need.
        max_chunk = self.config.max_num_batched_tokens
        needed = self.kv.demand(match, length, max_chunk)
        if request not in self.shares.newcomers:  # all were counted by `_preempt_for_tenants`
            for newcomer in self.shares.newcomers:
                needed += self.kv.prompt_demand(newcomer, max_chunk)
        fits = not self.running or needed <= self.kv.pool.num_free
        made = self.kv.admit(request, match, match.num_tokens + chunk) if fits else None
        if made is None:
            step.short = True
            return 0
        step.plan.block_copies.extend(made)
        self._start(request, match.num_tokens, now)
        if checkpoints is not None and match.num_tokens:
            key = self.kv.prefix_key(request, match.num_tokens)
            self._state_copies.append((self._row(checkpoints.use(key)), request.slot))
            if match.num_tokens % self.kv.block_size:
                checkpoints.forget([key])  # no other request continues from there
        step.start(request)
        self._add_chunk(step, request, chunk)
        return chunk

    def _up_to_cut(self, request: Request, start: int, chunk: int) -> int:
        """Return how many of `chunk` tokens from `start` on are computed before a budget next drops
        tokens: later ones see fewer keys."""
        return min(chunk, self.kv.cut_after(request, start + 1) - start)

    @staticmethod
    def _waits_to_cut(request: Request) -> bool:
        """Return whether a budget drops tokens before the request's next token, while results of
        some are outstanding: their blocks are published first."""
        computed = request.num_computed_tokens
        return request.next_cut == computed > request.num_written_tokens

    def _waits_for_pages(
        self, request: Request, match: PrefixMatch, step: Step, now: float
    ) -> bool:
        """Return whether a waiting request that could start waits for pages in tiers instead."""
        assert self.moves is not None
        needed = self.kv.demand(match, len(request.token_ids), self.config.max_num_batched_tokens)
        fits = not self.running or needed <= self.kv.pool.num_free
        rate = self.clock.prefill_tokens_per_second
        return self.moves.waits(request, match, rate, now, step.plan, fits=fits)

    def _must_wait(self, request: Request) -> bool:
        """Return whether a waiting request must wait for a result: it has a row in a step in
        flight, its leader computes the prompt that both will share, or its pages are being
        loaded."""
        if request.status is RequestStatus.LOADING:
            return True
        return request.last_step >= self._oldest_step or self._leader_is_busy(request)

    @property
    def _oldest_step(self) -> int:
        """The number of the oldest step without a result, or of the next one."""
        return self.in_flight[0].plan.step if self.in_flight else self.num_plans

    @staticmethod
    def _leader_is_busy(request: Request) -> bool:
        """Return whether the leader of a sibling still computes the prompt that both will share."""
        leader = request.leader
        if leader is None or leader.first_token is not None:
            return False
        return leader.status is RequestStatus.RUNNING

    # Requests that arrive together may share a prefix that none has computed yet: one computes it,
    # and the others wait for its blocks, deciding anew in each step. A wait must not cost more than
    # it saves. It costs the time of the steps until the request can start, and saves the tokens
    # that these compute for it. Requests after one that waits get at most as many tokens as it
    # saves, and only for whole prompts: the rest of a prompt would precede it in the next step.

    def _worth_waiting_for(self, request: Request, match: PrefixMatch, step: Step) -> int:
        """Return how many tokens of a prefix that is being computed for others a request should
        wait for; 0: it should start."""
        tokens = self._num_under_way(request, match, step)
        rate = self.clock.prefill_tokens_per_second
        if tokens and rate:
            steps = len(self.in_flight) + 1
            if tokens < rate * steps * self.clock.at_least(1 + len(self.running)):
                return 0
        return tokens

    def _num_under_way(
        self, request: Request, match: PrefixMatch, planned: Step | None = None
    ) -> int:
        """Return how many tokens after the match are computed for others by unfinished steps."""
        if self.kv.checkpoints is not None:
            return 0  # there may be no checkpoint where the prefixes part
        steps = [step.prefixes for step in (*self.in_flight, planned) if step and step.prefixes]
        first = match.num_tokens // self.kv.block_size
        usable = self.kv.num_cacheable(request) // self.kv.block_size
        missing = request.block_hashes[first:usable] if steps else []
        computed = takewhile(lambda key: any(key in prefixes for prefixes in steps), missing)
        return sum(1 for _ in computed) * self.kv.block_size

    def _start(self, request: Request, matched: int, now: float) -> None:
        self.waiting.remove(request)
        request.awaits_prefix = False
        if self.moves is not None:
            self.moves.started(request)
        self.meter.start(request)
        request.status = RequestStatus.RUNNING
        request.num_uncovered_tokens = 0
        request.slot = self._free_slots.pop()
        insort(self.running, request, key=lambda r: r.order)
        if request.first_scheduled is None:
            request.first_scheduled = now
            request.num_cached_tokens = matched
            self.counters.prefix_queries += request.num_prompt_tokens
            self.counters.prefix_hits += matched
        self.shares.start(request)
        self.kv.use_pins(request, now)

    def _add_chunk(self, step: Step, request: Request, chunk: int) -> None:
        if self.kv.checkpoints is not None:
            self._take_checkpoint(request, step)
        first = request.num_computed_tokens // self.kv.block_size
        request.num_computed_tokens += chunk
        if self.kv.caching:
            full = request.num_computed_tokens // self.kv.block_size
            full = self.kv.num_public(request, full)
            step.prefixes.update(request.block_hashes[first:full])
        self.meter.chunk(request, chunk)
        request.last_step = step.plan.step
        length = len(request.token_ids) + request.num_pending_tokens
        samples = request.num_computed_tokens == length < request.max_length
        request.num_pending_tokens += samples
        step.add_chunk(request, chunk, samples=samples)

    def _take_checkpoint(
        self, request: Request, step: Step | None = None, accepted: int = 0
    ) -> None:
        """Copy the state of a request if a checkpoint is due at its position.

        Args:
            step: the step that continues from there; None: all results of the request are known.
            accepted: see `CheckpointTable.take`.
        """
        checkpoints = self.kv.checkpoints
        assert checkpoints is not None
        made = checkpoints.take(request, accepted)
        if made is None:
            return
        self._state_copies.append((request.slot, self._row(made.index)))
        if step is None:
            checkpoints.publish(made)
        else:
            step.checkpoints.append(made)

    def _row(self, checkpoint: int) -> int:
        """Return a checkpoint's row in the pool of states; the first rows belong to slots."""
        return self.config.max_num_seqs + checkpoint

    # Drafts may be computed in vain, so they preempt no request: they take tokens after the next
    # tokens of all decoding requests, and blocks after all rows of the step.

    def _place_drafts(self, step: Step) -> None:
        """Add the requested drafts, once all rows have their blocks. If too few blocks are left,
        drafts that do not fit into the request's own blocks are dropped."""
        plan = step.plan
        for row, requested in enumerate(plan.num_draft_tokens):
            if not requested:
                continue
            request, drafts = step.requests[row], requested
            places = len(request.block_ids[0]) * self.kv.block_size - request.num_computed_tokens
            if drafts > places:
                new = self.kv.extend(request, request.num_computed_tokens + drafts)
                if new is None:
                    drafts = places
                else:
                    step.extend(request, new)
            plan.num_draft_tokens[row] = drafts
            plan.num_scheduled_tokens[row] += drafts
            request.num_computed_tokens += drafts
            request.num_pending_tokens += drafts
            self.meter.drafts(request, 1 + drafts)

    def _look_ahead(self, step: Step) -> None:
        """Allocate blocks for what a drafter computes beyond the step, if there are spare ones."""
        for request, samples in zip(step.requests, step.plan.samples, strict=True):
            if samples and request.params.speculation:
                end = request.num_computed_tokens + self.config.num_lookahead_tokens
                end = min(end, request.max_length)
                if end > len(request.block_ids[0]) * self.kv.block_size:
                    new = self.kv.extend(request, end)
                    if new is not None:
                        step.extend(request, new)

    def _preempt(self, request: Request) -> None:
        """Take a request's blocks; it is queued again and recomputes what it lost. Its full blocks
        stay in the prefix cache until they are needed, so often little is lost."""
        self.meter.lose(request)
        self.shares.lose(request)
        if self.moves is not None:
            self.moves.preempt(request)
        self._leave(request)
        request.status = RequestStatus.PREEMPTED
        request.num_draft_tokens = 0
        request.num_preemptions += 1
        self.counters.preemptions += 1
        self.waiting.add(request)

    def _expire(self, now: float) -> None:
        if len(self.deadlines):
            for request in self.deadlines.late(now, self._seconds_needed):
                self.end(request, FinishReason.DEADLINE, now)
        self.kv.pins.expire(now)

    def _seconds_needed(self, request: Request) -> float:
        """Return the least time until a request has the tokens that make its answer useful: one, or
        its `min_tokens`."""
        made = request.num_output_tokens + request.num_pending_tokens
        missing = max(1, request.params.min_tokens) - made
        if missing <= 0:
            return 0.0
        clock, budget = self.clock, self.config.max_num_batched_tokens
        full, rest = divmod(self._num_missing(request), budget)
        seconds = full * clock.at_least(budget) + (clock.at_least(rest) if rest else 0.0)
        max_per_step = 1 + len(self.drafts.at)  # tokens of a request, drafts included
        return seconds + (missing - 1) / max_per_step * clock.at_least(1)

    def _num_missing(self, request: Request) -> int:
        """Return how many tokens to compute until a request samples; 0 if they are under way."""
        if request.status is RequestStatus.RUNNING:
            return request.num_unscheduled_tokens
        if self._leader_is_busy(request):
            return 1  # it will share all the others
        match = self.kv.match(request)
        missing = len(request.token_ids) - match.num_tokens - self._num_under_way(request, match)
        if self.moves is not None:
            reach = self.moves.num_reachable(request, match)
            missing = min(missing, len(request.token_ids) - reach)
        return missing

    # -- results ---------------------------------------------------------------------------------

    def update(self, output: ModelRunnerOutput, now: float) -> list[RequestDelta]:
        """Process the result of the oldest step in flight.

        An error in one row ends only that request.
        """
        step = self.in_flight.popleft()
        if step.plan.step != output.step:
            raise RuntimeError(f"result of step {output.step} while {step.plan.step} is due")
        if self.moves is not None:
            self.moves.computed(step.plan, output)
        if step.requests:
            return self._take_rows(step, output, now)
        self.clock.skip(now)
        return []

    def _take_rows(self, step: Step, output: ModelRunnerOutput, now: float) -> list[RequestDelta]:
        plan, prefill = step.plan, step.num_chunks > 0
        self.clock.note(step.planned, now, step.num_tokens, prefill=prefill)
        deltas: list[RequestDelta] = []
        rows = zip(
            step.requests,
            plan.samples,
            plan.num_scheduled_tokens,
            plan.num_draft_tokens,
            strict=True,
        )
        errors, prompt_logprobs = output.errors, output.prompt_logprobs
        times = _decode_seconds(plan, output, prefill=prefill)
        block_size = self.kv.block_size
        finished, running = RequestStatus.FINISHED, RequestStatus.RUNNING  # looked up once
        for checkpoint in step.checkpoints:  # first, since requests that end may need them
            assert self.kv.checkpoints is not None
            self.kv.checkpoints.publish(checkpoint)
        for i, (request, samples, scheduled, drafts) in enumerate(rows):
            if samples:
                request.num_pending_tokens -= drafts + 1
            error = errors.get(i) if errors else None
            if error is not None:
                request.is_doubted = True
            status = request.status
            if status is finished:
                continue
            if status is running:
                request.num_written_tokens += scheduled
            if error is None:
                try:
                    first = samples and request.first_token is None
                    if i in prompt_logprobs:
                        deltas.append(self._prompt_logprobs(request, prompt_logprobs[i]))
                    if samples:
                        deltas.append(self._deliver(request, output, i, drafts, times, now))
                    elif self._is_read(request, i, output):
                        vector = output.embeddings.get(i)
                        reason = FinishReason.LENGTH if vector is None else FinishReason.STOP
                        deltas.append(self._finish(request, reason, now, []))
                        deltas[-1].embedding = vector
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
                deltas.append(self._finish(request, FinishReason.ERROR, now, [], error=error))
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
        """Append sampled tokens up to the one that ends the output.

        Args:
            times: see `_decode_seconds`.
        """
        tokens = output.token_ids[row]
        if drafts:
            self._count_drafts(request, drafts, len(tokens) - 1, output.draft_places)
        if request.speculation is not None and times[0]:
            request.speculation.seconds += times[0]
            request.speculation.plain_seconds += times[1] * len(tokens)
        reason = None
        token_ids = request.token_ids
        before = len(token_ids)
        for token in tokens:
            token_ids.append(token)
            reason = finish_reason(request, token)
            if reason is not None:
                tokens = list(token_ids[before:])
                break
        if drafts or request.num_uncovered_tokens:
            request.num_uncovered_tokens = len(output.token_ids[row]) - 1
        if drafts and self.kv.checkpoints is not None and request.status is RequestStatus.RUNNING:
            self._take_checkpoint(request, accepted=request.num_uncovered_tokens)
        complete = False
        if row in output.ended and reason is not FinishReason.STOP:
            complete = len(tokens) == len(output.token_ids[row])
            reason = FinishReason.STOP if complete else reason
        if request.first_token is None:
            request.first_token = now
            self.shares.first_token(request)
        logprobs = output.logprobs.get(row) if output.logprobs else None
        if logprobs is not None:
            logprobs = logprobs[: len(tokens)]
        if reason is not None:
            # The token of a beam is chosen among those of all beams, by their log probabilities.
            delivered = [] if request.is_beam else tokens
            delta = self._finish(request, reason, now, delivered, logprobs)
            delta.complete = complete
            return delta
        proposed = output.num_draft_tokens
        if proposed is not None and request.status is RequestStatus.RUNNING:
            request.num_draft_tokens = proposed[row]
        else:
            request.num_draft_tokens = 0
        return RequestDelta(request.request_id, request.index, tokens, logprobs=logprobs)

    def _count_drafts(
        self, request: Request, drafts: int, accepted: int, places: Sequence[int] | None
    ) -> None:
        """Count the drafts of a row, and take back the rejected ones.

        Args:
            places: see `ModelRunnerOutput.draft_places`.
        """
        if request.status is RequestStatus.RUNNING:
            rejected = drafts - accepted
            request.num_computed_tokens -= rejected
            request.num_written_tokens -= rejected
            self.meter.take_back(request, rejected)
        num_places = drafts if places is None else places[drafts]
        self.drafts.add(drafts, accepted, num_places)
        if request.speculation is not None:
            request.speculation.drafts.add(drafts, accepted, num_places)

    def fail(self, error: str, now: float) -> list[RequestDelta]:
        """Process the failure of the oldest step in flight as a whole: its requests end, all others
        continue."""
        step = self.in_flight.popleft()
        self.clock.skip(now)
        plan, deltas = step.plan, []
        if self.moves is not None:
            self.moves.failed(plan)
        for request, samples, drafts in zip(
            step.requests, plan.samples, plan.num_draft_tokens, strict=True
        ):
            if samples:
                request.num_pending_tokens -= drafts + 1
            request.is_doubted = True
            if not request.finished:
                deltas.append(self._finish(request, FinishReason.ERROR, now, [], error=error))
        if self.kv.checkpoints is not None:
            for checkpoint in step.checkpoints:
                self.kv.checkpoints.free(checkpoint.index)
            doubted = self.kv.checkpoints.forget_copies(
                {target - self.config.max_num_seqs for _, target in plan.state_copies}
            )
            if self.moves is not None:
                self.moves.forget_states(doubted)
            deltas += self._end_doubted(plan, error, now)
        return deltas

    def _end_doubted(self, plan: SchedulerOutput, error: str, now: float) -> list[RequestDelta]:
        """End the requests of steps in flight that continue from states which a failed plan
        copied."""
        rows, deltas = {target for _, target in plan.state_copies}, []
        for step in self.in_flight:
            rows |= {target for source, target in step.plan.state_copies if source in rows}
            for slot, request in zip(step.plan.slots, step.requests, strict=True):
                if slot not in rows:
                    continue
                request.is_doubted = True
                if not request.finished:
                    deltas.append(self._finish(request, FinishReason.ERROR, now, [], error=error))
        return deltas

    @staticmethod
    def _is_read(request: Request, row: int, output: ModelRunnerOutput) -> bool:
        """Return whether the last chunk of a prompt without output is computed. After a preemption
        the row's result shows this, since it comes with the last chunk."""
        if request.num_written_tokens == request.max_length:
            return True
        return row in output.prompt_logprobs or row in output.embeddings

    @staticmethod
    def _prompt_logprobs(request: Request, logprobs: list[TokenLogprobs]) -> RequestDelta:
        # Delivered once; a resumed request may then take its prompt from the prefix cache.
        if request.max_length > request.num_prompt_tokens:
            request.params = request.params.without_prompt_logprobs()
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
        running = request.status is RequestStatus.RUNNING
        if running and error is None:
            self.kv.commit(request)
            self.kv.pin(request, now)
            if request.is_beam:
                self.kv.commit_rest(request)
            written = request.num_written_tokens == request.num_computed_tokens
            if self.kv.checkpoints is not None and written:
                self._take_checkpoint(request)
            if self.moves is not None and reason is not FinishReason.MOVED:
                self.moves.keep_state(request)
        # If one of the calls above raises, nothing has changed, and the request can still be ended
        # with an error.
        self.shares.leave(request)
        source = None
        if self.moves is not None:
            if running and request.lends and error is None:
                prompt = min(request.num_written_tokens, request.num_prompt_tokens)
                if self.kv.checkpoints is not None:  # the last token is computed in any case
                    prompt = min(prompt, request.num_prompt_tokens - 1)
                source = self.moves.lend(request, prompt - prompt % self.kv.block_size)
            self.moves.left(request)
        if running:
            if error is not None and self.moves is not None:
                self.moves.forget(request.block_hashes)
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
            page_source=source,
        )

    def _leave(self, request: Request, *, forget: bool = False) -> None:
        """Remove a request from the running set and free its blocks and slot."""
        self.meter.settle(request)
        self.kv.free(request, forget=forget)
        self.running.remove(request)
        self._free_slots.append(request.slot)
        self._freed_slots.append(request.slot)
        request.slot = -1


def _decode_seconds(
    plan: SchedulerOutput, output: ModelRunnerOutput, *, prefill: bool
) -> tuple[float, float]:
    """Return the seconds of a step that only decoded, and the seconds per token and row of a step
    without drafts; both 0.0 if unknown. See `RequestSpeculation`."""
    times = output.draft_times
    if times is not None and times.checking:
        tokens = sum([len(row) for row in output.token_ids])
        return times.checking, times.plain * len(output.token_ids) / max(1, tokens)
    if prefill or not output.turn_seconds or any(plan.num_draft_tokens):
        return 0.0, 0.0
    making = 0.0 if times is None else times.proposing
    return output.turn_seconds + making, output.turn_seconds
