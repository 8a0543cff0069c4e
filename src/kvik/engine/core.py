"""The engine without I/O: requests in, plans out; results in, deltas out. Time is an argument.

The same object runs under the offline API, the server and a virtual clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import asdict, replace

from kvik.config.config import ResolvedConfig
from kvik.core.beams import BeamSearch, num_ranked
from kvik.core.plan import GraphCounts, ModelRunnerOutput, SchedulerOutput
from kvik.core.sampling_params import MAX_LOGPROBS, SamplingParams
from kvik.core.scheduler import Scheduler
from kvik.core.types import (
    POOLINGS,
    SCORE,
    EngineRequest,
    FinishReason,
    Handover,
    Request,
    RequestDelta,
    RequestSpeculation,
    derive_seed,
)
from kvik.engine.stats import EngineStats, MoveStats, SpeculationStats, SpeedStats, TierStats
from kvik.errors import (
    MODEL_NOT_FOUND,
    CapacityError,
    Overflow,
    ParamError,
    UnavailableError,
    shown,
)
from kvik.spec.adapters import NO_ADAPTER, Adapter

MAX_LISTED = 8  # names repeated in an error


def check_request(config: ResolvedConfig, request: EngineRequest) -> None:
    """Refuse a request that can never be served under this configuration.

    Raises:
        ParamError: the prompt or a parameter is impossible for this model.
        CapacityError: it can never fit.
    """
    prompt, params = request.prompt_token_ids, request.params
    scheduler, vocab_size = config.scheduler, config.model.vocab_size
    limit = scheduler.max_model_len
    if not prompt:
        raise ParamError("prompt", "must have at least one token")
    _check_pooling(config, request)
    salt_of(config, request)  # the engine has its adapter
    samples = request.pooling is None and params.max_tokens != 0
    if len(prompt) + samples > limit:
        problem = ", which leaves no room for output in" if samples else ", which do not fit into"
        raise ParamError(
            "prompt",
            f"has {len(prompt)} tokens{problem} the context of {limit} (max_model_len)",
            overflow=Overflow(limit, len(prompt), (params.max_tokens or 1) if samples else 0),
        )
    _check_tokens(prompt, vocab_size)
    if params.prompt_logprobs_start >= len(prompt):
        raise ParamError(
            "prompt_logprobs_start",
            f"must be in the prompt of {len(prompt)} tokens, not {params.prompt_logprobs_start}",
        )
    params.check_against(vocab_size, limit)
    if params.num_beams > 1:
        _check_beams(config, params)
    if params.min_tokens > limit - len(prompt):
        raise ParamError(
            "min_tokens",
            f"{params.min_tokens} do not fit after a prompt of {len(prompt)} tokens in the "
            f"context of {limit}",
        )
    limit_n = scheduler.max_queued_requests
    if params.n > limit_n:
        raise CapacityError("n", f"must be at most max_queued_requests ({limit_n}), not {params.n}")
    _check_blocks(config, max_length(config, request), "max_tokens" if samples else "prompt")


def salt_of(config: ResolvedConfig, request: EngineRequest) -> str:
    """Return what keys and values of a request depend on in addition to tokens, and its own salt.

    Raises:
        ParamError: the engine does not have its adapter.
    """
    name = request.params.adapter
    digest = _adapter_of(config, name, "adapter").digest if name else ""
    return f"{config.cache.salt}{digest}\0{request.cache_salt}"


def _adapter_of(config: ResolvedConfig, name: str, field: str) -> Adapter:
    adapters = {adapter.name: adapter for adapter in config.runner.adapters}
    if name not in adapters:
        known = ", ".join(map(shown, list(adapters)[:MAX_LISTED])) or "none"
        reason = f"must be one of the engine's ({known}), not {shown(name)}"
        raise ParamError(field, reason, code=MODEL_NOT_FOUND)
    return adapters[name]


def check_new_adapter(config: ResolvedConfig, name: str) -> None:
    """Raise ParamError if the engine has an adapter of this name."""
    if any(adapter.name == name for adapter in config.runner.adapters):
        raise ParamError("name", f"must be another one: {shown(name)} is loaded")


def without_adapter(config: ResolvedConfig, name: str) -> tuple[Adapter, ...]:
    """Return the engine's adapters except one; raise ParamError if the engine does not have it."""
    adapter = _adapter_of(config, name, "name")
    return tuple(other for other in config.runner.adapters if other is not adapter)


def max_length(config: ResolvedConfig, request: EngineRequest) -> int:
    """Return the most tokens of prompt and output together: as requested, within the context."""
    limit = config.scheduler.max_model_len
    if request.pooling is not None:
        return len(request.prompt_token_ids)
    if request.params.max_tokens is None:
        return limit
    return min(limit, len(request.prompt_token_ids) + request.params.max_tokens)


def _check_tokens(prompt: Sequence[int], vocab_size: int) -> None:
    # Check all at once: prompts are long, and this runs between steps and in event loops.
    if set(map(type, prompt)) == {int} and min(prompt) >= 0 and max(prompt) < vocab_size:
        return
    for token in prompt:
        if type(token) is not int:
            raise ParamError("prompt", f"token ids must be of type int, not {token!r}")
        if not 0 <= token < vocab_size:
            raise ParamError("prompt", f"token id {token!r} is outside 0..{vocab_size - 1}")


def _check_pooling(config: ResolvedConfig, request: EngineRequest) -> None:
    model, pooling = config.model, request.pooling
    scores = model.pooling is not None and model.pooling.scores
    if pooling is None:
        model.check_writes()
    elif model.fallback is not None:
        raise ParamError("model", "gives no vectors: it runs through transformers, as text alone")
    if pooling == SCORE:
        if not scores:
            raise ParamError("model", "gives no scores: it is no classifier")
    elif pooling not in (None, *POOLINGS):
        raise ParamError("pooling", f"must be one of {', '.join(POOLINGS)}, not {pooling!r}")
    elif pooling is not None and model.pooling is not None and model.classifier:
        raise ParamError("model", f"gives {model.pooling.gives}, and no vectors")
    if not 0 <= request.second_text < len(request.prompt_token_ids):
        raise ParamError("second_text", f"must be in the prompt, not {request.second_text}")
    if request.pooling is not None and request.params.n > 1:
        raise ParamError("n", f"must be 1 where hidden states are pooled, not {request.params.n}")


def _check_beams(config: ResolvedConfig, params: SamplingParams) -> None:
    stop_ids = _stop_ids(config, params)
    limit = MAX_LOGPROBS - num_ranked(0, stop_ids)
    if params.num_beams > limit:
        ends = f"with {len(stop_ids)} tokens that end an output"
        raise ParamError("num_beams", f"must be at most {limit} {ends}, not {params.num_beams}")


def _stop_ids(config: ResolvedConfig, params: SamplingParams) -> frozenset[int]:
    """Return the tokens that end an output."""
    eos = () if params.ignore_eos else config.model.eos_token_ids
    return frozenset(params.stop_token_ids).union(eos)


def _check_blocks(config: ResolvedConfig, longest: int, field: str) -> None:
    cache, chunk = config.cache, config.scheduler.max_num_batched_tokens
    needed = cache.max_blocks(longest, chunk)
    if needed > cache.num_blocks:
        raise CapacityError(
            field,
            f"{longest} tokens need {needed} KV blocks of {cache.block_size}, but the cache has "
            f"{cache.num_blocks}",
        )


def _resume(request: Request, resumed: Handover) -> None:
    """Copy the state of a request that another engine started."""
    before = resumed.report
    request.arrival = before.arrival
    request.first_scheduled, request.first_token = before.first_scheduled, before.first_token
    request.num_cached_tokens = before.num_cached_tokens
    request.num_pinned_tokens = before.num_pinned_tokens
    request.num_preemptions = before.num_preemptions


class EngineCore:
    """Checks requests against the model's facts, then lets the scheduler serve them."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config.scheduler, config.cache)
        self._slots = {adapter.name: slot for slot, adapter in enumerate(config.runner.adapters)}
        self._requests: dict[str, list[Request]] = {}  # unfinished siblings by request id
        self._searches: dict[str, BeamSearch] = {}  # by request id
        self._ended: list[RequestDelta] = []  # for `take_finished`
        self._num_unseeded = 0
        self._proposing = 0.0
        # Totals of requests that ended; see `RequestSpeculation`.
        self._seconds = self._plain_seconds = 0.0
        self._graphs: GraphCounts | None = None
        self._threads: int | None = None

    def _array(self, ids: Sequence[int]) -> array[int]:
        """Return tokens as a compact array, since texts may be endless."""
        return array("H" if self.config.model.vocab_size <= 1 << 16 else "I", ids)

    def add(self, request: EngineRequest, now: float) -> int:
        """Queue a request.

        Returns:
            The seed of its first completion.

        Raises:
            ParamError: the prompt or a parameter is impossible for this model.
            CapacityError: it can never fit, or the queue is full.
        """
        self.check(request)
        params, prompt = request.params, request.prompt_token_ids
        resumed_by_index = {handover.index: handover for handover in request.resumed}
        searches = params.num_beams > 1 and request.pooling is None
        indexes = sorted(resumed_by_index) or range(1 if searches else params.n)
        self.scheduler.waiting.check_capacity(len(indexes), len(indexes) * len(prompt))
        seed = resumed_by_index[indexes[0]].seed if resumed_by_index else params.seed
        if seed is None:
            self._num_unseeded += 1
            seed = derive_seed(self.config.seed, self._num_unseeded)
        siblings: list[Request] = []
        for index in indexes:
            leader = siblings[0] if siblings and not resumed_by_index else None
            resumed = resumed_by_index.get(index)
            siblings.append(self._sibling(request, index, seed, leader, resumed, now))
        if searches:
            search = self._searches[request.request_id] = BeamSearch(siblings[0])
            siblings = search.requests
        for sibling in siblings:
            self.scheduler.add(sibling, now)
            # One by one, so that if one fails, those before it can still be ended.
            self._requests.setdefault(request.request_id, []).append(sibling)
        return seed

    def _sibling(
        self,
        request: EngineRequest,
        index: int,
        seed: int,
        leader: Request | None,
        resumed: Handover | None,
        now: float,
    ) -> Request:
        """Return one of the n completions of a request.

        Args:
            seed: of the first completion.
            leader: the first completion, whose prompt it shares.
            resumed: its state, if another engine began it.
        """
        params, prompt = request.params, request.prompt_token_ids
        output = [] if resumed is None else resumed.output_token_ids
        scored = index == 0 and not output  # the log probabilities of the prompt come first
        source = None if index else request.source  # siblings share the blocks of the first
        guesses = self.config.speculation is not None and params.speculation
        sibling = Request(
            request_id=request.request_id,
            index=index,
            params=params if scored else params.without_prompt_logprobs(),
            token_ids=self._array([*prompt, *output]) if output else self._array(prompt),
            num_prompt_tokens=len(prompt),
            max_length=max_length(self.config, request),
            stop_ids=_stop_ids(self.config, params),
            seed=derive_seed(seed, index) if resumed is None else resumed.seed,
            arrival=now,
            priority=request.priority,
            cache_salt=salt_of(self.config, request),
            deadline=request.deadline,
            pooling=request.pooling,
            second_text=request.second_text,
            tenant=request.tenant,
            adapter=self._slots.get(params.adapter, NO_ADAPTER),
            pins=request.pins,
            leader=leader,
            lends=request.lends and index == 0,
            source=source if resumed is None else resumed.source,
            speculation=RequestSpeculation() if guesses and request.pooling is None else None,
        )
        if resumed is not None:
            _resume(sibling, resumed)
        return sibling

    def free_slot(self, name: str) -> int:
        """Return a slot for another adapter, which no request uses.

        Raises:
            ParamError: the name is taken, or there are as many adapters as slots.
            UnavailableError: requests of unloaded adapters use the other slots.
        """
        count = self.config.runner.max_adapters
        check_new_adapter(self.config, name)
        free = set(range(count)) - {*self._slots.values()}
        if not free:
            raise ParamError("adapters", f"must be at most {count} (max_adapters)")
        free -= {r.adapter for siblings in self._requests.values() for r in siblings}
        if not free:
            reason = "requests of unloaded adapters have not ended, and there is no other room"
            raise UnavailableError("engine", f"{reason} (max_adapters {count}): try again later")
        return min(free)

    def load_adapter(self, adapter: Adapter, slot: int) -> None:
        """Let requests choose an adapter, which is in a slot."""
        self._slots[adapter.name] = slot
        self.config = self.config.with_adapters((*self.config.runner.adapters, adapter))

    def unload_adapter(self, name: str) -> None:
        """Refuse requests for an adapter from now on. Once earlier ones end, its slot is free.

        Raises:
            ParamError: it is not loaded.
        """
        self.config = self.config.with_adapters(without_adapter(self.config, name))
        del self._slots[name]

    def check(self, request: EngineRequest) -> None:
        """Refuse a request that can never be served, as `add` does."""
        if request.request_id in self._requests:
            raise ParamError("request_id", f"{request.request_id!r} is already being served")
        check_request(self.config, request)

    def end(
        self,
        request_id: str,
        now: float,
        *,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
        error: str | None = None,
    ) -> None:
        """End a request, or one of its siblings, at any moment; unknown ids are already gone. The
        outputs of a beam search end together."""
        everything = index is None or request_id in self._searches
        for request in self._requests.get(request_id, [])[:]:
            if everything or request.index == index:
                self.scheduler.end(request, reason, now, error)
        self._note_ended()

    def hand_over(self, request_id: str, now: float) -> None:
        """Let another engine continue the unfinished siblings of a request; the last delta of each
        has its `Handover`. Does nothing if a step in flight has a row of one of them, or if they
        are beams."""
        if request_id in self._searches:
            return
        siblings = [
            request for request in self._requests.get(request_id, []) if not request.finished
        ]
        if all(map(self.scheduler.may_hand_over, siblings)):
            for sibling in siblings:
                self.scheduler.hand_over(sibling, now)
        self._note_ended()

    def plan(self, now: float) -> SchedulerOutput | None:
        """Return the next step to compute, or None if there is nothing to do now."""
        plan = self.scheduler.schedule(now)
        self._note_ended()
        return plan

    def finish_step(self, output: ModelRunnerOutput, now: float) -> list[RequestDelta]:
        """Process the result of the oldest plan in flight."""
        if output.draft_times is not None:
            self._proposing += output.draft_times.proposing
        self._graphs = output.graphs or self._graphs
        self._threads = output.threads or self._threads
        deltas = self._note_finished(self.scheduler.update(output, now))
        self._note_ended()
        return deltas

    def fail_step(self, error: str, now: float) -> list[RequestDelta]:
        """Process the failure of the oldest plan in flight: its requests end, others continue."""
        deltas = self._note_finished(self.scheduler.fail(error, now))
        self._note_ended()
        return deltas

    def take_finished(self) -> list[RequestDelta]:
        """Return last deltas of requests that ended outside a step: aborted, past their
        deadline."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def waiting_ids(self) -> list[str]:
        """Requests for which no step has computed anything."""
        return [
            request_id
            for request_id, siblings in self._requests.items()
            if all(request.first_scheduled is None for request in siblings)
        ]

    @property
    def has_requests(self) -> bool:
        """Whether anything is unfinished, or finished but not yet reported."""
        return bool(self._requests or self._ended)

    def stats(self) -> EngineStats:
        """Return all statistics except times, which the loop adds."""
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        allocated, used = scheduler.kv.tokens(scheduler.running)
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            queued_tokens=scheduler.waiting.num_tokens,
            kv_usage=scheduler.kv.usage,
            num_blocks=pool.num_blocks,
            cached_blocks=pool.num_cached,
            peak_blocks=pool.num_blocks - pool.min_free,
            kv_allocated_tokens=allocated,
            kv_used_tokens=used,
            pinned_blocks=pool.num_pinned,
            given_back_blocks=pool.num_given_back,
            **asdict(scheduler.counters),
            work=scheduler.meter.read(scheduler.running),
            speculation=self._speculation(),
            graphs=self._graphs,
            threads=self._threads,
            speed=SpeedStats(
                scheduler.clock.seconds_per_step, scheduler.clock.prefill_tokens_per_second
            ),
            moves=self._moves(),
        )

    def _moves(self) -> MoveStats | None:
        moves = self.scheduler.moves
        if moves is None:
            return None
        tiers = tuple(
            TierStats(
                name=name,
                pages=len(tier.pages),
                bytes=tier.size,
                capacity=tier.capacity,
                bytes_per_second=tier.rate.ratio,
                **asdict(tier.counters),
            )
            for name, tier in moves.index.tiers.items()
        )
        return MoveStats(tiers, replace(moves.counters), moves.index.off, len(moves.leases))

    def _speculation(self) -> SpeculationStats | None:
        if self.config.speculation is None:
            return None
        live = [
            request.speculation
            for siblings in self._requests.values()
            for request in siblings
            if request.speculation is not None
        ]
        return SpeculationStats(
            self.scheduler.drafts.copy(),
            self._proposing,
            self._seconds + sum(counts.seconds for counts in live),
            self._plain_seconds + sum(counts.plain_seconds for counts in live),
        )

    def _note_ended(self) -> None:
        """Note the requests that ended outside a step's result, at once: a search that is over
        changes the cache, at the same moment when it is replayed."""
        while ended := self.scheduler.take_finished():
            self._ended += self._note_finished(ended)

    def _note_finished(self, deltas: Sequence[RequestDelta]) -> list[RequestDelta]:
        noted: list[RequestDelta] = []
        for delta in deltas:
            if delta.finish_reason is not None:
                siblings = self._requests[delta.request_id]
                if delta.report is not None and delta.report.speculation is not None:
                    self._seconds += delta.report.speculation.seconds
                    self._plain_seconds += delta.report.speculation.plain_seconds
                siblings[:] = [r for r in siblings if r.index != delta.index]
                if not siblings:
                    del self._requests[delta.request_id]
            if delta.request_id in self._searches:
                noted += self._search_on(delta)
            else:
                noted.append(delta)
        return noted

    def _search_on(self, delta: RequestDelta) -> list[RequestDelta]:
        """Process the end of a request of a beam search. Returns the last deltas of the search if
        it is over."""
        search, kv = self._searches[delta.request_id], self.scheduler.kv
        assert delta.report is not None
        now = delta.report.finished
        search.take(delta)
        rest = self._requests.get(delta.request_id, [])
        if search.failed is not None:
            assert search.failed.finish_reason is not None
            for other in rest[:]:
                self.scheduler.end(other, search.failed.finish_reason, now, search.failed.error)
        if rest:
            return []
        for request in search.advance():
            kv.drop_rest(request)
        if search.requests:
            self._requests[delta.request_id] = search.requests[:]
            for request in search.requests:
                self.scheduler.add(request, now)
            return []
        del self._searches[delta.request_id]
        outputs = search.last_deltas(now)
        tokens = sum(len(output.token_ids) for output in outputs)
        self.scheduler.counters.delivered_tokens += tokens
        return outputs
