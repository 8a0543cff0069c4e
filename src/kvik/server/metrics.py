"""`/metrics`: requests, tokens, times, the cache, speculation, and the machine's limits.

`docs/metrics.md` says what each metric means. Every metric has a name of ours; with
`metrics_compat` those that existing dashboards and routers read have that name too.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from kvik.config.config import ResolvedConfig
from kvik.engine.output import RequestOutput
from kvik.engine.remote import EngineState
from kvik.engine.stats import EngineStats
from kvik.errors import KvikError
from kvik.planner.efficiency import WHAT_HELPS, Efficiency, RunningModel
from kvik.server.generation import GenerationRecord
from kvik.server.route import Route
from kvik.server.server import Server

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WINDOW_SECONDS = 60.0  # over which rates are compared with the machine's limits
APART_SECONDS = 5.0  # between readings that are kept for that
REASONS = ("stop", "length", "abort", "deadline", "error")
REFUSALS = ("queue", "share", "deadline", "unavailable", "invalid")

# Upper bounds of buckets.
TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
GAPS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
# fmt: off
FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
)
# fmt: on
SECONDS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240)
FEW = (1, 2, 5, 10, 20, 50, 100)

Row = tuple[Mapping[str, str], float]  # labels, value


class RequestMetricsObserver:
    """An `Observer` that counts requests and measures their times.

    Durations are of the engine's clock, except the gaps between tokens, which are those that this
    process saw.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, histogram = self._counter, self._histogram
        self._ended = counter(
            "request_success", "Requests that ended, by how.", "finished_reason", REASONS
        )
        self._refused = counter(
            "admission_rejections", "Requests that were not admitted, by why.", "reason", REFUSALS
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._by_source = counter(
            "prompt_tokens_by_source",
            "Computed, or found in the cache.",
            "source",
            ("local_compute", "local_cache_hit"),
        )
        self._cached_tokens = counter(
            "prompt_tokens_cached", "Prompt tokens found in the prefix cache."
        )
        self._cached_by_source = counter(
            "prompt_tokens_cached_by_source", "Where they were found.", "source", ("device",)
        )
        self._output_tokens = counter("generation_tokens", "Tokens delivered.")
        self._ttft = histogram("time_to_first_token_seconds", "Arrival to the first token.", FIRST)
        self._gap = histogram("inter_token_latency_seconds", "Between pieces of one stream.", GAPS)
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "(E2E - TTFT) / (tokens - 1).", GAPS
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to the last token.", SECONDS)
        self._queued = histogram(
            "request_queue_time_seconds", "Arrival to the first step.", SECONDS
        )
        self._inference = histogram(
            "request_inference_time_seconds", "First step to the last token.", SECONDS
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "First step to the first token.", SECONDS
        )
        self._decode = histogram("request_decode_time_seconds", "First token to the last.", SECONDS)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKENS)
        self._output = histogram("request_generation_tokens", "Output tokens of a request.", TOKENS)
        self._longest = histogram(
            "request_max_num_generation_tokens", "Of its longest completion.", TOKENS
        )
        self._n = histogram("request_params_n", "Completions asked for.", FEW)
        self._max_tokens = histogram("request_params_max_tokens", "Output tokens allowed.", TOKENS)
        self._preemptions = histogram(
            "request_num_preemptions", "Times a request lost its blocks.", FEW
        )
        self._computed = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens not cached.", TOKENS
        )

    def arrived(self, record: GenerationRecord) -> None:
        self._n.observe(record.params.n)
        if record.params.max_tokens is not None:
            self._max_tokens.observe(record.params.max_tokens)

    def delivered(self, record: GenerationRecord, index: int, num_tokens: int, now: float) -> None:
        self._output_tokens.inc(num_tokens)
        before = record.last_tokens.get(index)
        if before is not None and num_tokens:
            self._gap.observe(now - before)

    def finished(self, record: GenerationRecord, output: RequestOutput | None, reason: str) -> None:
        self._ended.labels(reason).inc()
        if output is None:
            return
        times, tokens = output.metrics, [len(one.token_ids) for one in output.outputs]
        prompt, cached = record.num_prompt_tokens, output.num_cached_tokens
        self._prompt_tokens.inc(prompt)
        self._by_source.labels("local_compute").inc(prompt - cached)
        self._by_source.labels("local_cache_hit").inc(cached)
        self._cached_tokens.inc(cached)
        self._cached_by_source.labels("device").inc(cached)
        self._prompt.observe(prompt)
        self._computed.observe(prompt - cached)
        self._output.observe(sum(tokens))
        self._longest.observe(max(tokens))
        self._preemptions.observe(output.num_preemptions)
        self._e2e.observe(times.e2e)
        if times.first_scheduled is None:
            return
        self._queued.observe(times.first_scheduled - times.arrival)
        self._inference.observe(times.finished - times.first_scheduled)
        if times.first_token is None:
            return
        self._ttft.observe(times.first_token - times.arrival)
        self._prefill.observe(times.first_token - times.first_scheduled)
        self._decode.observe(times.finished - times.first_token)
        if record.params.n == 1 and (tpot := times.tpot(tokens[0])) is not None:
            self._tpot.observe(tpot)

    def refused(self, tenant: str, reason: str) -> None:
        self._refused.labels(reason).inc()

    def _counter(
        self, name: str, note: str, label: str | None = None, values: Sequence[str] = ()
    ) -> Counter:
        counter = Counter(name, note, [label] if label else [], registry=self.registry)
        for value in values:
            counter.labels(value)  # shown as 0 until it is counted
        return counter

    def _histogram(self, name: str, note: str, bounds: Sequence[float]) -> Histogram:
        return Histogram(name, note, buckets=bounds, registry=self.registry)


class Exposition(Collector):
    """The metrics of one scrape, each under one or two names.

    Args:
        model_name: a label of every value.
        compat: whose names to use besides ours: "vllm" or "none".
    """

    def __init__(self, model_name: str, compat: str) -> None:
        labels = {"model_name": model_name}
        self._own = [("kvik:", labels)]
        others = [("vllm:", {**labels, "engine": "0"})] if compat == "vllm" else []
        self._all = [*self._own, *others]
        self._metrics: list[Metric] = []

    def add(self, metric: Metric, *, ours: bool = False) -> None:
        """Args:
        metric: named without a prefix.
        ours: it has no other name.
        """
        for prefix, labels in self._own if ours else self._all:
            named = Metric(prefix + metric.name, metric.documentation, metric.type)
            for sample in metric.samples:
                if not sample.name.endswith("_created"):  # of no use here
                    named.add_sample(prefix + sample.name, labels | sample.labels, sample.value)
            self._metrics.append(named)

    def gauge(
        self, name: str, note: str, rows: float | Iterable[Row], *, ours: bool = False
    ) -> None:
        self._add_rows(Metric(name, note, "gauge"), name, rows, ours)

    def counter(
        self, name: str, note: str, rows: float | Iterable[Row], *, ours: bool = False
    ) -> None:
        """`_total` is added to the name."""
        self._add_rows(Metric(name, note, "counter"), f"{name}_total", rows, ours)

    def _add_rows(
        self, metric: Metric, sample: str, rows: float | Iterable[Row], ours: bool
    ) -> None:
        for labels, value in [({}, rows)] if isinstance(rows, (int, float)) else rows:
            metric.add_sample(sample, dict(labels), value)
        self.add(metric, ours=ours)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


class Metrics:
    """Args:
    requests: observes the server's requests.
    """

    def __init__(self, server: Server, requests: RequestMetricsObserver) -> None:
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
        shown = Exposition(server.model_name, server.config.metrics_compat)
        _state(shown, server)
        _engine(shown, stats)
        _cache(shown, server.engine.config, stats)
        for metric in self._requests.registry.collect():
            shown.add(metric)
        _speculation(shown, stats)
        self._machine(shown, stats, now)
        return generate_latest(self._process) + generate_latest(shown)

    def _machine(self, shown: Exposition, stats: EngineStats, now: float) -> None:
        if self._model is None:
            return
        total = self._model.efficiency(_nothing(stats), stats, max(stats.time.busy, 1e-9))
        note = "Operations that the steps had to do, as estimated."
        shown.counter("estimated_flops_per_gpu", note, total.flops)
        written = total.tokens * self._model.kv_bytes_per_token
        note = "Bytes that the steps had to read from memory, as estimated."
        read = total.weight_bytes + total.kv_bytes - written
        shown.counter("estimated_read_bytes_per_gpu", note, max(0.0, read))
        note = "Bytes that the steps had to write to the KV cache, as estimated."
        shown.counter("estimated_write_bytes_per_gpu", note, written)
        recent = self._recent(stats, now)
        if recent is not None:
            _limits(shown, recent, self._model.device.doubt)

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


def _state(shown: Exposition, server: Server) -> None:
    now = server.engine.state
    rows: list[Row] = [({"state": state.value}, float(state is now)) for state in EngineState]
    shown.gauge("engine_state", "1 for the state the engine is in.", rows, ours=True)
    note = "Times an engine became ready; all but the first are restarts."
    shown.counter("engine_starts", note, server.engine.num_starts, ours=True)
    rows = [
        ({"sleep_state": state}, float(state == "awake"))
        for state in ("awake", "weights_offloaded")
    ]
    shown.gauge("engine_sleep_state", "The engine does not sleep.", rows)
    note = "Answers that the HTTP process is giving."
    shown.gauge("open_responses", note, server.drain.num_open, ours=True)


def _engine(shown: Exposition, stats: EngineStats) -> None:
    shown.gauge("num_requests_running", "Requests that hold a slot.", stats.num_running)
    shown.gauge("num_requests_waiting", "Requests in the engine's queue.", stats.num_waiting)
    deferred = 0 if stats.num_running else stats.num_waiting
    rows: list[Row] = [
        ({"reason": "capacity"}, stats.num_waiting - deferred),
        ({"reason": "deferred"}, deferred),
    ]
    note = "For room, or because the policy waits for company."
    shown.gauge("num_requests_waiting_by_reason", note, rows)
    shown.gauge("queued_tokens", "Prompt tokens in the queue.", stats.queued_tokens, ours=True)
    shown.counter("num_preemptions", "Times a request lost its blocks.", stats.preemptions)
    shown.counter("engine_steps", "Steps computed.", stats.steps, ours=True)
    seconds = stats.time
    rows = [
        ({"doing": "executor"}, seconds.executor),
        ({"doing": "host"}, seconds.host),
        ({"doing": "idle"}, seconds.idle),
    ]
    note = "Where the step loop's time went, in seconds."
    shown.counter("engine_seconds", note, rows, ours=True)
    below = list(accumulate(stats.step_sizes))
    buckets = [(f"{float(1 << i)}", float(count)) for i, count in enumerate(below[:18])]
    buckets.append(("+Inf", float(below[-1] if below else 0)))
    shown.add(
        HistogramMetricFamily(
            "iteration_tokens_total", "Tokens of a step.", buckets, float(stats.scheduled_tokens)
        )
    )
    if stats.graphs is not None:
        note = "Steps that are captured as CUDA graphs."
        shown.gauge("cuda_graphs", note, stats.graphs.captured, ours=True)
        rows = [
            ({"kind": "taken"}, stats.graphs.taken),
            ({"kind": "planned"}, stats.graphs.planned),
        ]
        note = "GPU memory of all CUDA graphs, and what was put aside for them."
        shown.gauge("cuda_graph_bytes", note, rows, ours=True)


def _cache(shown: Exposition, config: ResolvedConfig, stats: EngineStats) -> None:
    note = "Share of the KV blocks that requests hold, 0 to 1."
    shown.gauge("kv_cache_usage_perc", note, stats.kv_usage)
    note = "KV blocks whose content can be matched."
    shown.gauge("cached_blocks", note, stats.cached_blocks, ours=True)
    note = "KV blocks that stay because somebody asked for it."
    shown.gauge("pinned_blocks", note, stats.pinned_blocks, ours=True)
    note = "Prompt tokens looked up in the prefix cache."
    shown.counter("prefix_cache_queries", note, stats.prefix_queries)
    note = "Prompt tokens found in the prefix cache."
    shown.counter("prefix_cache_hits", note, stats.prefix_hits)
    spec = config.cache.groups[0].specs[0]
    labels: Mapping[str, str] = {
        "block_size": str(config.cache.block_size),
        "num_gpu_blocks": str(config.cache.num_blocks),
        "cache_dtype": spec.format,
        "enable_prefix_caching": str(config.cache.enable_prefix_caching),
        "max_model_len": str(config.scheduler.max_model_len),
        "max_num_seqs": str(config.scheduler.max_num_seqs),
    }
    shown.gauge("cache_config_info", "How the KV cache is made.", [(labels, 1.0)])


def _speculation(shown: Exposition, stats: EngineStats) -> None:
    if stats.speculation is None:
        return
    drafts = stats.speculation.drafts
    shown.counter("spec_decode_num_drafts", "Rows with drafts.", drafts.rows)
    shown.counter("spec_decode_num_draft_tokens", "Drafts computed.", drafts.drafts)
    shown.counter("spec_decode_num_accepted_tokens", "Drafts found right.", drafts.accepted)
    note = "Drafts found right, by their place."
    shown.counter("spec_decode_num_accepted_tokens_per_pos", note, _places(drafts.accepted_at))
    note = "Rows with a draft, by its place."
    shown.counter("speculation_drafts_per_pos", note, _places(drafts.at), ours=True)
    if drafts.rows:
        note = "Tokens that a row with drafts yields, the model's own included."
        shown.gauge("speculation_accepted_length", note, drafts.mean_length, ours=True)
    if stats.speculation.speedup is not None:
        note = "How much faster tokens came than without drafts, as estimated over all steps."
        shown.gauge("speculation_speedup", note, stats.speculation.speedup, ours=True)


def _places(counts: Sequence[int]) -> list[Row]:
    return [({"position": str(i)}, n) for i, n in enumerate(counts or [0])]


def _limits(shown: Exposition, recent: Efficiency, doubt: str) -> None:
    """What the last minute reached, compared with what the machine can do.

    Args:
        doubt: why its ceilings may be wrong, or "".
    """
    note = "Bytes read from memory a second of work, in the last minute."
    shown.gauge("memory_bytes_per_second", note, recent.read_rate, ours=True)
    note = "Operations a second of work, in the last minute."
    shown.gauge("flops_per_second", note, recent.flop_rate, ours=True)
    calibrated = f"as calibrated ({doubt})" if doubt else "as calibrated"
    if recent.ceiling is not None:
        note = f"Bytes that the machine can read a second, {calibrated}."
        shown.gauge("memory_bytes_ceiling", note, recent.ceiling.bandwidth, ours=True)
        note = f"Operations that the machine can do a second, {calibrated}."
        shown.gauge("flops_ceiling", note, recent.ceiling.compute, ours=True)
        note = "Achieved / ceiling of memory, in the last minute."
        shown.gauge("memory_bandwidth_share", note, recent.bandwidth_share or 0.0, ours=True)
        note = "Achieved / ceiling of arithmetic, in the last minute."
        shown.gauge("compute_share", note, recent.compute_share or 0.0, ours=True)
    rows: list[Row] = [
        ({"limit": limit}, float(limit == recent.bottleneck)) for limit in WHAT_HELPS
    ]
    shown.gauge("bottleneck", "1 for what held the last minute back.", rows, ours=True)
