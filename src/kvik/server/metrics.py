"""`/metrics`: requests, tokens, times, the cache, speculation, and how near the machine's limits
the engine comes. `docs/metrics.md` says what each means."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from starlette.requests import Request
from starlette.responses import Response

from kvik.config.config import ResolvedConfig
from kvik.config.errors import KvikError
from kvik.engine.async_client import EngineState
from kvik.engine.stats import EngineStats
from kvik.planner.efficiency import WHAT_HELPS, Efficiency
from kvik.planner.running import RunningModel
from kvik.server.metric_families import Families, Naming, Row
from kvik.server.parts import Parts
from kvik.server.request_metrics import RequestMetrics
from kvik.server.route import Route

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WINDOW_SECONDS = 60.0  # over which rates beside the machine's limits are taken
APART_SECONDS = 5.0  # between readings that are kept for that
REASONS = ("stop", "length", "abort", "deadline", "error")
REFUSALS = ("queue", "share", "deadline", "unavailable", "invalid")


class Metrics:
    """Args:
    requests: observes the server's requests.
    """

    def __init__(self, parts: Parts, requests: RequestMetrics) -> None:
        self._parts = parts
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
            self._model = await asyncio.to_thread(_running, self._parts.engine.config)
        stats = await self._parts.engine.stats()
        data = self.text(stats, time.monotonic())
        return Response(data, media_type=CONTENT_TYPE)

    def text(self, stats: EngineStats, now: float) -> bytes:
        parts = self._parts
        model = {"model_name": parts.model_name}
        others = []
        if parts.config.metrics_compat == "vllm":
            others = [Naming("vllm:", {**model, "engine": "0"})]
        families = Families(Naming("kvik:", model), others)
        _state(families, parts)
        _engine(families, stats)
        _cache(families, parts.engine.config, stats)
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


def _state(families: Families, parts: Parts) -> None:
    now = parts.engine.state
    rows: list[Row] = [({"state": state.value}, float(state is now)) for state in EngineState]
    families.gauge("engine_state", "1 for the state the engine is in.", rows, ours=True)
    note = "Times an engine became ready; all but the first are restarts."
    families.counter("engine_starts", note, parts.engine.num_starts, ours=True)
    rows = [
        ({"sleep_state": state}, float(state == "awake"))
        for state in ("awake", "weights_offloaded")
    ]
    families.gauge("engine_sleep_state", "The engine does not sleep.", rows)
    note = "Answers that the HTTP process is giving."
    families.gauge("open_responses", note, parts.drain.num_open, ours=True)


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
