"""Steps in flight, and what their results mean for the requests that had rows in them."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Protocol

from kvik.core.counters import DraftCounts, SchedulerCounters
from kvik.core.fair_share import FairShare
from kvik.core.kv_manager import KVCacheManager
from kvik.core.pace import Pace
from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.core.stop import finish_reason
from kvik.core.types import (
    FinishReason,
    PromptUse,
    Request,
    RequestDelta,
    RequestStatus,
    TokenLogprobs,
)
from kvik.core.work import WorkMeter


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
