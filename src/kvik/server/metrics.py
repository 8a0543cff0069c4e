"""`/metrics`: requests, tokens, times, the cache, speculation, and how near the machine's limits
the engine comes. `docs/metrics.md` says what each means."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from starlette.requests import Request
from starlette.responses import Response

from kvik.config.config import ResolvedConfig
from kvik.config.errors import KvikError
from kvik.engine.async_client import EngineState
from kvik.engine.output import RequestOutput
from kvik.engine.stats import EngineStats
from kvik.planner.efficiency import WHAT_HELPS, Efficiency
from kvik.planner.running import RunningModel
from kvik.server.observer import GenerationRecord
from kvik.server.route import Route
from kvik.server.server import Server

# Of tokens in a request or a step; of seconds between tokens, to the first one, and of requests.
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)


FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
)


SECONDS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)


FEW = (1, 2, 5, 10, 20, 50, 100)


class Histogram:
    """Args:
    bounds: upper bounds of the buckets, growing; one more takes what is larger than all.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound as text, how many values are not larger)."""
        found, below = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self._counts, strict=True):
            below += count
            found.append((bound, float(below)))
        return found


class RequestMetrics:
    """An `Observer`. Durations are of the engine's clock, but for the gaps between tokens, which
    are what this process saw.

    Attributes:
        ended: requests by how they ended. refused: by why.
        ttft: arrival to the first token. gaps: between pieces of one completion's stream.
        tpot: (e2e - ttft) / (tokens - 1). e2e: arrival to the last token.
        queued: arrival to the first step. prefill: from there to the first token.
        decode: from there to the last. inference: the first step to the last token.
        prompt_tokens, output_tokens: of a request. longest: of its completions.
        computed: prompt tokens that were not in the prefix cache.
        n, max_tokens: as asked for.
    """

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self.refused_for: Counter[str] = Counter()
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_pinned_tokens = 0
        self.num_output_tokens = 0
        self.ttft = Histogram(FIRST)
        self.gaps = Histogram(GAPS)
        self.tpot = Histogram(GAPS)
        self.e2e, self.queued = Histogram(SECONDS), Histogram(SECONDS)
        self.prefill, self.decode = Histogram(SECONDS), Histogram(SECONDS)
        self.inference = Histogram(SECONDS)
        self.prompt_tokens, self.output_tokens = Histogram(TOKENS), Histogram(TOKENS)
        self.longest, self.computed = Histogram(TOKENS), Histogram(TOKENS)
        self.max_tokens = Histogram(TOKENS)
        self.n, self.preemptions = Histogram(FEW), Histogram(FEW)

    def arrived(self, life: GenerationRecord) -> None:
        self.n.add(life.params.n)
        if life.params.max_tokens is not None:
            self.max_tokens.add(life.params.max_tokens)

    def delivered(self, life: GenerationRecord, index: int, num_tokens: int, now: float) -> None:
        self.num_output_tokens += num_tokens
        before = life.last_tokens.get(index)
        if before is not None and num_tokens:
            self.gaps.add(now - before)

    def finished(self, life: GenerationRecord, output: RequestOutput | None, reason: str) -> None:
        self.ended[reason] += 1
        if output is None:
            return
        times, tokens = output.metrics, [len(one.token_ids) for one in output.completions]
        self.num_prompt_tokens += life.num_prompt_tokens
        self.num_cached_tokens += output.num_cached_tokens
        self.prompt_tokens.add(life.num_prompt_tokens)
        self.computed.add(life.num_prompt_tokens - output.num_cached_tokens)
        self.output_tokens.add(sum(tokens))
        self.longest.add(max(tokens))
        self.preemptions.add(output.num_preemptions)
        self.e2e.add(times.e2e)
        if times.first_scheduled is None:
            return
        self.queued.add(times.first_scheduled - times.arrival)
        self.inference.add(times.finished - times.first_scheduled)
        if times.first_token is None:
            return
        self.ttft.add(times.first_token - times.arrival)
        self.prefill.add(times.first_token - times.first_scheduled)
        self.decode.add(times.finished - times.first_token)
        if life.params.n == 1 and (tpot := times.tpot(tokens[0])) is not None:
            self.tpot.add(tpot)

    def refused(self, tenant: str, reason: str) -> None:
        self.refused_for[reason] += 1


Row = tuple[Mapping[str, str], float]  # labels, value


@dataclass(frozen=True, slots=True)
class Naming:
    """Attributes:
    prefix: of every name.
    labels: of every value.
    """

    prefix: str
    labels: Mapping[str, str]


class Families:
    """What one scrape answers.

    Args:
        own: names of every metric.
        others: names of those that others have, too.
    """

    def __init__(self, own: Naming, others: Sequence[Naming] = ()) -> None:
        self._own, self._others = own, others
        self._metrics: list[Metric] = []

    def gauge(
        self, name: str, note: str, rows: float | Iterable[Row], *, ours: bool = False
    ) -> None:
        """Args:
        ours: nobody else has it.
        """
        found = _rows(rows)
        for naming in self._namings(ours):
            family = GaugeMetricFamily(naming.prefix + name, note, labels=_keys(naming, found))
            _fill(family, naming, found)
            self._metrics.append(family)

    def counter(
        self, name: str, note: str, rows: float | Iterable[Row], *, ours: bool = False
    ) -> None:
        """`_total` is added to its name."""
        found = _rows(rows)
        for naming in self._namings(ours):
            family = CounterMetricFamily(naming.prefix + name, note, labels=_keys(naming, found))
            _fill(family, naming, found)
            self._metrics.append(family)

    def histogram(self, name: str, note: str, values: Histogram, *, ours: bool = False) -> None:
        self.buckets(name, note, values.buckets(), values.sum, ours=ours)

    def buckets(
        self,
        name: str,
        note: str,
        buckets: Sequence[tuple[str, float]],
        total: float,
        *,
        ours: bool = False,
    ) -> None:
        """A histogram by its (upper bound, values not larger)."""
        for naming in self._namings(ours):
            labels = list(naming.labels)
            family = HistogramMetricFamily(naming.prefix + name, note, labels=labels)
            family.add_metric(list(naming.labels.values()), list(buckets), total)
            self._metrics.append(family)

    def text(self, registry: CollectorRegistry) -> bytes:
        """In Prometheus' text format, after what `registry` knows."""
        return generate_latest(registry) + generate_latest(_Collected(self._metrics))

    def _namings(self, ours: bool) -> Sequence[Naming]:
        return (self._own,) if ours else (self._own, *self._others)


class _Collected(CollectorRegistry):
    """A registry of one scrape."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        super().__init__()
        self._found = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._found


def _rows(rows: float | Iterable[Row]) -> list[Row]:
    return [({}, float(rows))] if isinstance(rows, (int, float)) else list(rows)


def _keys(naming: Naming, rows: Sequence[Row]) -> list[str]:
    return [*naming.labels, *(rows[0][0] if rows else ())]


def _fill(
    family: GaugeMetricFamily | CounterMetricFamily, naming: Naming, rows: Sequence[Row]
) -> None:
    for labels, value in rows:
        family.add_metric([*naming.labels.values(), *labels.values()], value)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


WINDOW_SECONDS = 60.0  # over which rates beside the machine's limits are taken


APART_SECONDS = 5.0  # between readings that are kept for that


REASONS = ("stop", "length", "abort", "deadline", "error")


REFUSALS = ("queue", "share", "deadline", "unavailable", "invalid")


class Metrics:
    """Args:
    requests: observes the server's requests.
    """

    def __init__(self, server: Server, requests: RequestMetrics) -> None:
        self._server = server
        self._requests = requests
        self._model: RunningModel | None = None
        self._model_read = False
        self._readings: deque[tuple[float, EngineStats]] = deque()
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    def routes(self) -> list[Route]:
        note = "Metrics for Prometheus."
        return [Route("/metrics", self.answer, "GET", operator=True, note=note)]

    async def answer(self, request: Request) -> Response:
        if not self._model_read:
            self._model_read = True
            self._model = await asyncio.to_thread(_running, self._server.engine.config)
        stats = await self._server.engine.stats()
        data = self.text(stats, time.monotonic())
        return Response(data, media_type=CONTENT_TYPE)

    def text(self, stats: EngineStats, now: float) -> bytes:
        server = self._server
        model = {"model_name": server.model_name}
        others = []
        if server.config.metrics_compat == "vllm":
            others = [Naming("vllm:", {**model, "engine": "0"})]
        families = Families(Naming("kvik:", model), others)
        _state(families, server)
        _engine(families, stats)
        _cache(families, server.engine.config, stats)
        _requests(families, self._requests)
        _speculation(families, stats)
        self._machine(families, stats, now)
        return families.text(self._process)

    def _machine(self, families: Families, stats: EngineStats, now: float) -> None:
        if self._model is None:
            return
        total = self._model.efficiency(_nothing(stats), stats, max(stats.time.busy, 1e-9))
        note = "Operations that the steps had to do, as estimated."
        families.counter("estimated_flops_per_gpu", note, total.flops)
        written = total.tokens * self._model.kv_bytes_per_token
        note = "Bytes that the steps had to read from memory, as estimated."
        read = total.weight_bytes + total.kv_bytes - written
        families.counter("estimated_read_bytes_per_gpu", note, max(0.0, read))
        note = "Bytes that the steps had to write to the KV cache, as estimated."
        families.counter("estimated_write_bytes_per_gpu", note, written)
        recent = self._recent(stats, now)
        if recent is not None:
            _limits(families, recent, self._model.device.doubt)

    def _recent(self, stats: EngineStats, now: float) -> Efficiency | None:
        """Of the last minute, by the readings of earlier scrapes; None before there are two."""
        assert self._model is not None
        kept = self._readings
        if kept and stats.steps < kept[-1][1].steps:
            kept.clear()  # the engine was started again
        while len(kept) > 1 and kept[1][0] <= now - WINDOW_SECONDS:
            kept.popleft()
        found = None
        if kept and now > kept[0][0]:
            then, before = kept[0]
            found = self._model.efficiency(before, stats, now - then)
        if not kept or now - kept[-1][0] >= APART_SECONDS:
            kept.append((now, stats))
        return found


def _running(config: ResolvedConfig) -> RunningModel | None:
    """None: a model whose shape the planner does not know."""
    try:
        return RunningModel.of(config)
    except KvikError:
        return None


def _nothing(stats: EngineStats) -> EngineStats:
    """As the engine began."""
    return EngineStats(0, 0, 0, 0.0, stats.num_blocks, 0, 0, 0, 0, 0, 0, 0)


def _state(families: Families, server: Server) -> None:
    now = server.engine.state
    rows: list[Row] = [({"state": state.value}, float(state is now)) for state in EngineState]
    families.gauge("engine_state", "1 for the state the engine is in.", rows, ours=True)
    note = "Times an engine became ready; all but the first are restarts."
    families.counter("engine_starts", note, server.engine.num_starts, ours=True)
    rows = [
        ({"sleep_state": state}, float(state == "awake"))
        for state in ("awake", "weights_offloaded")
    ]
    families.gauge("engine_sleep_state", "The engine does not sleep.", rows)
    note = "Answers that the HTTP process is giving."
    families.gauge("open_responses", note, server.drain.num_open, ours=True)


def _engine(families: Families, stats: EngineStats) -> None:
    families.gauge("num_requests_running", "Requests that hold a slot.", stats.num_running)
    families.gauge("num_requests_waiting", "Requests in the engine's queue.", stats.num_waiting)
    deferred = 0 if stats.num_running else stats.num_waiting
    rows: list[Row] = [
        ({"reason": "capacity"}, stats.num_waiting - deferred),
        ({"reason": "deferred"}, deferred),
    ]
    note = "For room, or because the policy waits for company."
    families.gauge("num_requests_waiting_by_reason", note, rows)
    families.gauge("queued_tokens", "Prompt tokens in the queue.", stats.queued_tokens, ours=True)
    families.counter("num_preemptions", "Times a request lost its blocks.", stats.preemptions)
    families.counter("engine_steps", "Steps computed.", stats.steps, ours=True)
    seconds = stats.time
    rows = [
        ({"doing": "executor"}, seconds.executor),
        ({"doing": "host"}, seconds.host),
        ({"doing": "idle"}, seconds.idle),
    ]
    note = "Where the step loop's time went, in seconds."
    families.counter("engine_seconds", note, rows, ours=True)
    buckets, below = [], 0
    for i, count in enumerate(stats.step_sizes):
        below += count
        if i <= 17:
            buckets.append((f"{float(1 << i)}", float(below)))
    buckets.append(("+Inf", float(below)))
    note = "Tokens of a step."
    families.buckets("iteration_tokens_total", note, buckets, float(stats.scheduled_tokens))
    if stats.graphs is not None:
        note = "Steps that are captured as CUDA graphs."
        families.gauge("cuda_graphs", note, stats.graphs.captured, ours=True)
        rows = [
            ({"kind": "taken"}, stats.graphs.taken),
            ({"kind": "planned"}, stats.graphs.planned),
        ]
        note = "GPU memory of all CUDA graphs, and what was put aside for them."
        families.gauge("cuda_graph_bytes", note, rows, ours=True)


def _cache(families: Families, config: ResolvedConfig, stats: EngineStats) -> None:
    note = "Share of the KV blocks that requests hold, 0 to 1."
    families.gauge("kv_cache_usage_perc", note, stats.kv_usage)
    note = "KV blocks whose content can be matched."
    families.gauge("cached_blocks", note, stats.cached_blocks, ours=True)
    note = "KV blocks that stay because somebody asked for it."
    families.gauge("pinned_blocks", note, stats.pinned_blocks, ours=True)
    note = "Prompt tokens looked up in the prefix cache."
    families.counter("prefix_cache_queries", note, stats.prefix_queries)
    note = "Prompt tokens found in the prefix cache."
    families.counter("prefix_cache_hits", note, stats.prefix_hits)
    spec = config.cache.groups[0].specs[0]
    labels: Mapping[str, str] = {
        "block_size": str(config.cache.block_size),
        "num_gpu_blocks": str(config.cache.num_blocks),
        "cache_dtype": spec.format,
        "enable_prefix_caching": str(config.cache.enable_prefix_caching),
        "max_model_len": str(config.scheduler.max_model_len),
        "max_num_seqs": str(config.scheduler.max_num_seqs),
    }
    families.gauge("cache_config_info", "How the KV cache is made.", [(labels, 1.0)])


def _requests(families: Families, seen: RequestMetrics) -> None:
    rows: list[Row] = [({"finished_reason": why}, seen.ended[why]) for why in REASONS]
    families.counter("request_success", "Requests that ended, by how.", rows)
    rows = [({"reason": why}, seen.refused_for[why]) for why in REFUSALS]
    families.counter("admission_rejections", "Requests that were not admitted, by why.", rows)
    prompt, cached = seen.num_prompt_tokens, seen.num_cached_tokens
    families.counter("prompt_tokens", "Prompt tokens of finished requests.", prompt)
    rows = [({"source": "local_compute"}, prompt - cached), ({"source": "local_cache_hit"}, cached)]
    families.counter("prompt_tokens_by_source", "Computed, or found in the cache.", rows)
    families.counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", cached)
    rows = [({"source": "device"}, cached)]
    families.counter("prompt_tokens_cached_by_source", "Where they were found.", rows)
    families.counter("generation_tokens", "Tokens delivered.", seen.num_output_tokens)
    for name, note, values in (
        ("time_to_first_token_seconds", "Arrival to the first token.", seen.ttft),
        ("inter_token_latency_seconds", "Between pieces of one stream.", seen.gaps),
        ("request_time_per_output_token_seconds", "(E2E - TTFT) / (tokens - 1).", seen.tpot),
        ("e2e_request_latency_seconds", "Arrival to the last token.", seen.e2e),
        ("request_queue_time_seconds", "Arrival to the first step.", seen.queued),
        ("request_inference_time_seconds", "First step to the last token.", seen.inference),
        ("request_prefill_time_seconds", "First step to the first token.", seen.prefill),
        ("request_decode_time_seconds", "First token to the last.", seen.decode),
        ("request_prompt_tokens", "Prompt tokens of a request.", seen.prompt_tokens),
        ("request_generation_tokens", "Output tokens of a request.", seen.output_tokens),
        ("request_max_num_generation_tokens", "Of its longest completion.", seen.longest),
        ("request_params_n", "Completions asked for.", seen.n),
        ("request_params_max_tokens", "Output tokens allowed.", seen.max_tokens),
        ("request_num_preemptions", "Times a request lost its blocks.", seen.preemptions),
        ("request_prefill_kv_computed_tokens", "Prompt tokens not cached.", seen.computed),
    ):
        families.histogram(name, note, values)


def _speculation(families: Families, stats: EngineStats) -> None:
    if stats.speculation is None:
        return
    drafts = stats.speculation.drafts
    families.counter("spec_decode_num_drafts", "Rows with drafts.", drafts.rows)
    families.counter("spec_decode_num_draft_tokens", "Drafts computed.", drafts.drafts)
    families.counter("spec_decode_num_accepted_tokens", "Drafts found right.", drafts.accepted)
    note = "Drafts found right, by their place."
    families.counter("spec_decode_num_accepted_tokens_per_pos", note, _places(drafts.accepted_at))
    note = "Rows with a draft, by its place."
    families.counter("speculation_drafts_per_pos", note, _places(drafts.at), ours=True)
    if drafts.rows:
        note = "Tokens that a row with drafts yields, the model's own included."
        families.gauge("speculation_accepted_length", note, drafts.mean_length, ours=True)
    if stats.speculation.speedup is not None:
        note = "How much faster tokens came than without drafts, as estimated over all steps."
        families.gauge("speculation_speedup", note, stats.speculation.speedup, ours=True)


def _places(counts: Sequence[int]) -> list[Row]:
    return [({"position": str(i)}, n) for i, n in enumerate(counts or [0])]


def _limits(families: Families, recent: Efficiency, doubt: str) -> None:
    """What the last minute reached beside what the machine can do.

    Args:
        doubt: why its ceilings may be wrong, or "".
    """
    note = "Bytes read from memory a second of work, in the last minute."
    families.gauge("memory_bytes_per_second", note, recent.read_rate, ours=True)
    note = "Operations a second of work, in the last minute."
    families.gauge("flops_per_second", note, recent.flop_rate, ours=True)
    calibrated = f"as calibrated ({doubt})" if doubt else "as calibrated"
    if recent.ceiling is not None:
        note = f"Bytes that the machine can read a second, {calibrated}."
        families.gauge("memory_bytes_ceiling", note, recent.ceiling.bandwidth, ours=True)
        note = f"Operations that the machine can do a second, {calibrated}."
        families.gauge("flops_ceiling", note, recent.ceiling.compute, ours=True)
        note = "Achieved / ceiling of memory, in the last minute."
        families.gauge("memory_bandwidth_share", note, recent.bandwidth_share or 0.0, ours=True)
        note = "Achieved / ceiling of arithmetic, in the last minute."
        families.gauge("compute_share", note, recent.compute_share or 0.0, ours=True)
    rows: list[Row] = [
        ({"limit": limit}, float(limit == recent.bottleneck)) for limit in WHAT_HELPS
    ]
    families.gauge("bottleneck", "1 for what held the last minute back.", rows, ours=True)
