"""`/metrics`: requests, tokens, times, the cache, speculation, and the machine's limits.

`docs/metrics.md` describes each metric. Every metric has kvik's own name; with `metrics_compat`,
those that existing dashboards and routers read also have the name used there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from kvik.config.config import ResolvedConfig
from kvik.engine.output import RequestOutput
from kvik.engine.remote import EngineState
from kvik.engine.stats import EngineStats
from kvik.server.generation import GenerationRecord, Observer
from kvik.server.responses import json_response
from kvik.server.route import Route
from kvik.server.server import Server

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

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

# Counters of requests: name -> (meaning, label and its values, if any). Values without counts are
# shown as 0.
COUNTERS: Mapping[str, tuple[str, str, Sequence[str]]] = {
    "request_success": (
        "Requests that ended, by how.",
        "finished_reason",
        ("stop", "length", "abort", "deadline", "error", "moved", "refused"),
    ),
    "admission_rejections": (
        "Requests that were not admitted, by why.",
        "reason",
        ("queue", "share", "deadline", "unavailable", "invalid"),
    ),
    "prompt_tokens": ("Prompt tokens of finished requests.", "", ()),
    "prompt_tokens_by_source": (
        "Computed, or found in the cache.",
        "source",
        ("local_compute", "local_cache_hit"),
    ),
    "prompt_tokens_cached": ("Prompt tokens found in the prefix cache.", "", ()),
    "prompt_tokens_cached_by_source": ("The same, by where found.", "source", ("device",)),
    "generation_tokens": ("Tokens delivered.", "", ()),
}
# Histograms of requests: name -> (meaning, bounds).
HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("Arrival to the first token.", FIRST),
    "inter_token_latency_seconds": ("Between pieces of one stream.", GAPS),
    "request_time_per_output_token_seconds": ("(E2E - TTFT) / (tokens - 1).", GAPS),
    "e2e_request_latency_seconds": ("Arrival to the last token.", SECONDS),
    "request_queue_time_seconds": ("Arrival to the first step.", SECONDS),
    "request_inference_time_seconds": ("First step to the last token.", SECONDS),
    "request_prefill_time_seconds": ("First step to the first token.", SECONDS),
    "request_decode_time_seconds": ("First token to the last.", SECONDS),
    "request_prompt_tokens": ("Prompt tokens of a request.", TOKENS),
    "request_generation_tokens": ("Output tokens of a request.", TOKENS),
    "request_max_num_generation_tokens": ("Of its longest completion.", TOKENS),
    "request_params_n": ("Completions asked for.", FEW),
    "request_params_max_tokens": ("Output tokens allowed.", TOKENS),
    "request_num_preemptions": ("Times a request lost its blocks.", FEW),
    "request_prefill_kv_computed_tokens": ("Prompt tokens not cached.", TOKENS),
}
# Metrics that dashboards and routers of other engines read, too.
COMPATIBLE = frozenset((
    *COUNTERS, *HISTOGRAMS, "num_requests_running", "num_requests_waiting",
    "num_requests_waiting_by_reason", "num_preemptions", "iteration_tokens_total",
    "kv_cache_usage_perc", "prefix_cache_queries", "prefix_cache_hits", "cache_config_info",
    "engine_sleep_state", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
    "estimated_flops_per_gpu", "estimated_read_bytes_per_gpu", "estimated_write_bytes_per_gpu",
))  # fmt: skip


class MetricsSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The main figures of a server, for people and scripts without Prometheus. Times and tokens are
    since the start; None: there are no values yet.

    Attributes:
        mean_batch_size: mean number of requests in a step.
        output_tokens_per_second: over the time in which the engine had work.
        kv_cache_usage: share of the KV blocks that requests hold, 0 to 1.
        prefix_hit_rate: share of the prompt tokens that were found in the prefix cache, 0 to 1.
        memory_bytes: planned memory of the engine, by part.
    """

    model: str
    requests_running: int
    requests_waiting: int
    requests_finished: int
    mean_latency_seconds: float | None
    mean_time_to_first_token_seconds: float | None
    mean_batch_size: float | None
    output_tokens: int
    output_tokens_per_second: float | None
    kv_cache_usage: float
    prefix_hit_rate: float
    memory_bytes: dict[str, int]


class RequestMetricsObserver(Observer):
    """Counts requests and measures their times.

    Durations are measured by the engine's clock, except the gaps between tokens, which are measured
    in this process.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters = {
            name: Counter(name, note, [label] if label else [], registry=self.registry)
            for name, (note, label, _) in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(name, note, buckets=bounds, registry=self.registry)
            for name, (note, bounds) in HISTOGRAMS.items()
        }
        for name, (_, _, values) in COUNTERS.items():
            for value in values:
                self._counters[name].labels(value)

    def arrived(self, record: GenerationRecord) -> None:
        self._observe("request_params_n", record.params.n)
        if record.params.max_tokens is not None:
            self._observe("request_params_max_tokens", record.params.max_tokens)

    def delivered(self, record: GenerationRecord, index: int, num_tokens: int, now: float) -> None:
        self._count("generation_tokens", num_tokens)
        before = record.last_tokens.get(index)
        if before is not None and num_tokens:
            self._observe("inter_token_latency_seconds", now - before)

    def finished(self, record: GenerationRecord, output: RequestOutput | None, reason: str) -> None:
        self._count("request_success", 1, reason)
        if output is None:
            return
        times, tokens = output.metrics, [len(completion.token_ids) for completion in output.outputs]
        prompt, cached = record.num_prompt_tokens, output.num_cached_tokens
        self._count("prompt_tokens", prompt)
        self._count("prompt_tokens_by_source", prompt - cached, "local_compute")
        self._count("prompt_tokens_by_source", cached, "local_cache_hit")
        self._count("prompt_tokens_cached", cached)
        self._count("prompt_tokens_cached_by_source", cached, "device")
        self._observe("request_prompt_tokens", prompt)
        self._observe("request_prefill_kv_computed_tokens", prompt - cached)
        self._observe("request_generation_tokens", sum(tokens))
        self._observe("request_max_num_generation_tokens", max(tokens))
        self._observe("request_num_preemptions", output.num_preemptions)
        self._observe("e2e_request_latency_seconds", times.e2e)
        if times.first_scheduled is None:
            return
        self._observe("request_queue_time_seconds", times.first_scheduled - times.arrival)
        self._observe("request_inference_time_seconds", times.finished - times.first_scheduled)
        if times.first_token is None:
            return
        self._observe("time_to_first_token_seconds", times.first_token - times.arrival)
        self._observe("request_prefill_time_seconds", times.first_token - times.first_scheduled)
        self._observe("request_decode_time_seconds", times.finished - times.first_token)
        if record.params.n == 1 and (tpot := times.tpot(tokens[0])) is not None:
            self._observe("request_time_per_output_token_seconds", tpot)

    def refused(self, tenant: str, reason: str) -> None:
        self._count("admission_rejections", 1, reason)

    def count(self, name: str) -> int:
        """Return the number of values in a histogram."""
        return int(self._sample(name, "_count"))

    def mean(self, name: str) -> float | None:
        """Return the mean of a histogram; None without values."""
        count = self.count(name)
        return self._sample(name, "_sum") / count if count else None

    def _sample(self, name: str, suffix: str) -> float:
        return self.registry.get_sample_value(name + suffix) or 0.0

    def _count(self, name: str, amount: float, label: str = "") -> None:
        counter = self._counters[name]
        (counter.labels(label) if label else counter).inc(amount)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)


class Exposition(Collector):
    """The metrics of one scrape, each under one or two names.

    Args:
        model_name: a label of every value.
        compat: further names of metrics: "vllm" or "none".
    """

    def __init__(self, model_name: str, compat: str) -> None:
        labels = {"model_name": model_name}
        self._native = [("kvik:", labels)]
        compatible = [("vllm:", {**labels, "engine": "0"})] if compat == "vllm" else []
        self._all = [*self._native, *compatible]
        self._metrics: list[Metric] = []

    def add(self, metrics: Iterable[Metric]) -> None:
        """Add metrics whose names have no prefix yet."""
        for metric in metrics:
            for prefix, labels in self._all if metric.name in COMPATIBLE else self._native:
                named = Metric(prefix + metric.name, metric.documentation, metric.type)
                for sample in metric.samples:
                    if not sample.name.endswith("_created"):  # not needed
                        named.add_sample(prefix + sample.name, labels | sample.labels, sample.value)
                self._metrics.append(named)

    def collect(self) -> Iterable[Metric]:
        return self._metrics


# Returns additional metrics from the engine's statistics and a time of `time.monotonic`. Called in
# a thread, and may be slow.
MoreMetrics = Callable[[EngineStats, float], Iterable[Metric]]


def no_more(stats: EngineStats, now: float) -> Iterable[Metric]:
    return ()


class Metrics:
    """The route of the metrics.

    Args:
        requests: observes the server's requests.
        more: returns metrics in addition to those of the server and of the engine.
    """

    def __init__(self, server: Server, requests: RequestMetricsObserver, more: MoreMetrics) -> None:
        self._server = server
        self._requests = requests
        self._more = more
        self._lock = asyncio.Lock()  # concurrent scrapes are answered one after another
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)

    def routes(self) -> list[Route]:
        note, brief = "Metrics for Prometheus.", "The main figures since the start."
        return [
            Route("/metrics", self.answer, "GET", operator=True, note=note),
            Route(
                "/v1/metrics", self.summary, "GET", operator=True, answer=MetricsSummary, note=brief
            ),
        ]

    async def summary(self, request: Request) -> Response:
        stats = await self._server.engine.stats()
        busy = stats.time.busy
        return json_response(
            MetricsSummary(
                model=self._server.model_name,
                requests_running=stats.num_running,
                requests_waiting=stats.num_waiting,
                requests_finished=self._requests.count("e2e_request_latency_seconds"),
                mean_latency_seconds=self._requests.mean("e2e_request_latency_seconds"),
                mean_time_to_first_token_seconds=self._requests.mean("time_to_first_token_seconds"),
                mean_batch_size=stats.rows / stats.steps if stats.steps else None,
                output_tokens=stats.delivered_tokens,
                output_tokens_per_second=stats.delivered_tokens / busy if busy else None,
                kv_cache_usage=stats.kv_usage,
                prefix_hit_rate=stats.prefix_hit_rate,
                memory_bytes=_memory(self._server.engine.config),
            )
        )

    async def answer(self, request: Request) -> Response:
        async with self._lock:
            stats = await self._server.engine.stats()
            data = await asyncio.to_thread(self.text, stats, time.monotonic())
        return Response(data, media_type=CONTENT_TYPE)

    def text(self, stats: EngineStats, now: float) -> bytes:
        server = self._server
        shown = Exposition(server.model_name, server.config.metrics_compat)
        shown.add(_state(server))
        shown.add(_engine(stats))
        note = "Memory of the engine as planned, by part."
        parts = {part: float(size) for part, size in _memory(server.engine.config).items()}
        shown.add([gauge("engine_memory_bytes", note, parts, "part")])
        shown.add(_cache(server.engine.config, stats))
        shown.add(self._requests.registry.collect())
        shown.add(_speculation(stats))
        shown.add(_moves(stats))
        shown.add(self._more(stats, now))
        return generate_latest(self._process) + generate_latest(shown)


def _family(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    note: str,
    value: float | Mapping[str, float],
    label: str = "",
) -> Metric:
    """Return a metric with one value, or with a value for each value of its label."""
    if not isinstance(value, Mapping):
        return kind(name, note, value)
    family = kind(name, note, labels=[label])
    for key, number in value.items():
        family.add_metric([key], number)
    return family


gauge = partial(_family, GaugeMetricFamily)
counter = partial(_family, CounterMetricFamily)  # adds `_total` to the name of its samples


def _memory(config: ResolvedConfig) -> dict[str, int]:
    """Return the planned bytes of an engine by part."""
    plan = config.memory
    return {
        "weights": plan.weights,
        "activations": plan.activations,
        "kv_cache": plan.kv_cache,
        "overhead": plan.overhead,
        **({"kv_tiers": plan.kv_tiers} if plan.kv_tiers else {}),
    }


def _state(server: Server) -> Iterator[Metric]:
    now = server.engine.state
    states = {state.value: float(state is now) for state in EngineState}
    yield gauge("engine_state", "1 for the state the engine is in.", states, "state")
    note = "Times an engine became ready: at the start, after failures and after sleep."
    yield counter("engine_starts", note, server.engine.num_starts)
    asleep = float(now is EngineState.ASLEEP)
    states = {"awake": 1.0 - asleep, "weights_offloaded": 0.0, "discard_all": asleep}
    yield gauge("engine_sleep_state", "1 for what the engine does.", states, "sleep_state")
    note = "Answers that the HTTP process is giving, without that of the scrape."
    yield gauge("open_responses", note, max(0, server.drain.num_open - 1))
    note = "Responses that requests can continue, and their memory."
    yield gauge("stored_responses", note, server.stored.num_responses)
    yield gauge("stored_response_bytes", note, server.stored.num_bytes)


def _engine(stats: EngineStats) -> Iterator[Metric]:
    yield gauge("num_requests_running", "Requests that hold a slot.", stats.num_running)
    yield gauge("num_requests_waiting", "Requests in the engine's queue.", stats.num_waiting)
    deferred = 0 if stats.num_running else stats.num_waiting
    waiting = {"capacity": stats.num_waiting - deferred, "deferred": deferred}
    note = "For blocks or slots, or because the policy waits for more requests."
    yield gauge("num_requests_waiting_by_reason", note, waiting, "reason")
    yield gauge("queued_tokens", "Prompt tokens in the queue.", stats.queued_tokens)
    yield counter("num_preemptions", "Times a request lost its blocks.", stats.preemptions)
    yield counter("engine_steps", "Steps computed.", stats.steps)
    note = "Requests of all steps; over the steps, the mean batch size."
    yield counter("engine_step_requests", note, stats.rows)
    seconds = stats.time
    doing = {"executor": seconds.executor, "host": seconds.host, "idle": seconds.idle}
    yield counter("engine_seconds", "Where the step loop's time went, in seconds.", doing, "doing")
    below = list(accumulate(stats.step_sizes))
    buckets = [(f"{float(1 << i)}", float(count)) for i, count in enumerate(below[:18])]
    buckets.append(("+Inf", float(below[-1] if below else 0)))
    yield HistogramMetricFamily(
        "iteration_tokens_total", "Tokens of a step.", buckets, float(stats.scheduled_tokens)
    )
    if stats.graphs is not None:
        note = "Steps that are captured as CUDA graphs."
        yield gauge("cuda_graphs", note, stats.graphs.captured)
        kinds = {"taken": stats.graphs.taken, "planned": stats.graphs.planned}
        note = "GPU memory of all CUDA graphs, and what was put aside for them."
        yield gauge("cuda_graph_bytes", note, kinds, "kind")
    if stats.threads is not None:
        note = "Threads that compute; fewer while other processes keep the cores busy."
        yield gauge("working_threads", note, stats.threads)


def _cache(config: ResolvedConfig, stats: EngineStats) -> Iterator[Metric]:
    note = "Share of the KV blocks that requests hold, 0 to 1."
    yield gauge("kv_cache_usage_perc", note, stats.kv_usage)
    note = "Tokens that the KV blocks of running requests have room for, and those in them."
    tokens = {"allocated": stats.kv_allocated_tokens, "used": stats.kv_used_tokens}
    yield gauge("kv_cache_tokens", note, tokens, "kind")
    yield gauge("cached_blocks", "KV blocks whose content can be matched.", stats.cached_blocks)
    note = "Unused KV blocks whose memory went back to a system that was short of it."
    yield counter("given_back_blocks", note, stats.given_back_blocks)
    note = "KV blocks that requests have pinned."
    yield gauge("pinned_blocks", note, stats.pinned_blocks)
    note = "Prompt tokens looked up in the prefix cache."
    yield counter("prefix_cache_queries", note, stats.prefix_queries)
    note = "Prompt tokens found in the prefix cache."
    yield counter("prefix_cache_hits", note, stats.prefix_hits)
    labels = {
        "block_size": str(config.cache.block_size),
        "num_gpu_blocks": str(config.cache.num_blocks),
        "cache_dtype": config.cache.groups[0].specs[0].format,
        "enable_prefix_caching": str(config.cache.enable_prefix_caching),
        "max_model_len": str(config.scheduler.max_model_len),
        "max_num_seqs": str(config.scheduler.max_num_seqs),
    }
    family = GaugeMetricFamily("cache_config_info", "How the KV cache is made.", labels=[*labels])
    family.add_metric([*labels.values()], 1.0)
    yield family


def _moves(stats: EngineStats) -> Iterator[Metric]:
    if stats.moves is None:
        return
    tiers, totals = stats.moves.tiers, stats.moves.totals
    for kind, name, note, field in (
        (gauge, "kv_tier_pages", "Pages that can be loaded.", "pages"),
        (gauge, "kv_tier_bytes", "Bytes of a tier that are taken.", "bytes"),
        (gauge, "kv_tier_capacity_bytes", "Bytes that a tier may take.", "capacity"),
        (counter, "kv_tier_stored_pages", "Pages stored.", "stored"),
        (counter, "kv_tier_loaded_pages", "Pages loaded.", "loaded"),
        (counter, "kv_tier_failed_pages", "Pages that could not be loaded.", "failed"),
        (counter, "kv_tier_evicted_pages", "Pages that made room for others.", "evicted"),
    ):
        yield kind(name, note, {tier.name: getattr(tier, field) for tier in tiers}, "tier")
    rates = {tier.name: tier.bytes_per_second for tier in tiers if tier.bytes_per_second}
    if rates:
        yield gauge("kv_tier_bytes_per_second", "Of loads, as measured lately.", rates, "tier")
    yield counter("kv_tier_loaded_tokens", "Tokens loaded, not computed.", totals.loaded_tokens)
    yield counter("kv_tier_lent_tokens", "Tokens kept for other engines.", totals.lent_tokens)
    yield gauge("kv_leases", "Prompts that are kept for other engines.", stats.moves.leases)
    choices = {"load": totals.load_choices, "compute": totals.compute_choices}
    yield counter("kv_tier_choices", "Whether to load a prefix, or compute it.", choices, "choice")
    swaps = {"out": totals.swapped_out, "in": totals.swapped_in}
    yield counter("kv_swaps", "Preempted requests kept whole, and loaded again.", swaps, "way")


def _speculation(stats: EngineStats) -> Iterator[Metric]:
    if stats.speculation is None:
        return
    drafts = stats.speculation.drafts
    yield counter("spec_decode_num_drafts", "Rows with drafts.", drafts.rows)
    yield counter("spec_decode_num_draft_tokens", "Drafts computed.", drafts.drafts)
    yield counter("spec_decode_num_accepted_tokens", "Drafts found right.", drafts.accepted)
    for name, note, counts in (
        (
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts found right, by their place.",
            drafts.accepted_at,
        ),
        ("speculation_drafts_per_pos", "Rows with a draft, by its place.", drafts.at),
    ):
        yield counter(name, note, {str(i): n for i, n in enumerate(counts or [0])}, "position")
    if drafts.rows:
        note = "Tokens that a row with drafts yields, the model's own included."
        yield gauge("speculation_accepted_length", note, drafts.mean_length)
    if stats.speculation.speedup is not None:
        note = "How much faster tokens came than without drafts, as estimated over all steps."
        yield gauge("speculation_speedup", note, stats.speculation.speedup)
