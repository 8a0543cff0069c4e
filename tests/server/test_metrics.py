"""`/metrics` in the format of scrapers."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.calibrations import measured_device
from helpers.http_server import ask
from helpers.story_site import every_route, story_site
from msgspec.structs import replace as replace_fields
from prometheus_client.parser import text_string_to_metric_families

from kvik.config.config import EngineConfig
from kvik.config.server_config import ServerConfig
from kvik.core.plan import GraphCounts
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import DraftCounts
from kvik.core.work import Work
from kvik.engine.output import CompletionOutput, RequestOutput
from kvik.engine.output import RequestMetrics as Times
from kvik.engine.remote import EngineState
from kvik.engine.stats import EngineStats, LoopTime, SpeculationStats
from kvik.launch import resolve_config
from kvik.planner.efficiency import WHAT_HELPS, RunningModel
from kvik.planner.machine_metrics import MachineMetrics
from kvik.server.app import openai_routes
from kvik.server.generation import GenerationRecord, Observer
from kvik.server.metrics import Metrics, RequestMetricsObserver, no_more
from kvik.server.server import Drain, Server
from kvik.server.stored_responses import ResponseStore

DOCS = Path(__file__).parents[2] / "docs"

# vLLM's metrics that dashboards, load generators and routers read, and that kvik has.
NAMES = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason
kv_cache_usage_perc engine_sleep_state cache_config_info prompt_tokens_total
prompt_tokens_by_source_total prompt_tokens_cached_total
prompt_tokens_cached_by_source_total generation_tokens_total num_preemptions_total
request_success_total admission_rejections_total prefix_cache_queries_total
prefix_cache_hits_total spec_decode_num_drafts_total spec_decode_num_draft_tokens_total
spec_decode_num_accepted_tokens_total spec_decode_num_accepted_tokens_per_pos_total
estimated_flops_per_gpu_total estimated_read_bytes_per_gpu_total
estimated_write_bytes_per_gpu_total time_to_first_token_seconds
inter_token_latency_seconds request_time_per_output_token_seconds
e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds
request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens
request_generation_tokens request_max_num_generation_tokens request_params_n
request_params_max_tokens request_num_preemptions request_prefill_kv_computed_tokens
iteration_tokens_total
"""
OTHERS = frozenset(NAMES.split())

STATS = EngineStats(
    num_running=3,
    num_waiting=2,
    queued_tokens=70,
    kv_usage=0.25,
    num_blocks=64,
    cached_blocks=5,
    steps=4,
    scheduled_tokens=103,
    delivered_tokens=9,
    preemptions=1,
    prefix_queries=200,
    prefix_hits=50,
    kv_allocated_tokens=96,
    kv_used_tokens=83,
    step_sizes=(2, 0, 0, 0, 0, 1, 1),
    work=Work(
        mixed_steps=2, decode_steps=2, decode_step_tokens=2, prefill_tokens=101, decode_tokens=2
    ),
    time=LoopTime(0.5, 0.25, 1.0),
    speculation=SpeculationStats(DraftCounts(4, 10, 6, [4, 3, 3], [3, 2, 1]), 0.1, 0.2, 0.4),
    graphs=GraphCounts(12, 300, 400),
    threads=2,
)


CONFIG = resolve_config(EngineConfig(device="cpu"))


def made(
    compat: str = "vllm", machine: MachineMetrics | None = None
) -> tuple[Metrics, RequestMetricsObserver]:
    engine = SimpleNamespace(config=CONFIG, state=EngineState.READY, num_starts=2)
    parts = SimpleNamespace(
        engine=engine,
        config=ServerConfig(metrics_compat=compat),
        model_name="story",
        drain=Drain(),
        stored=ResponseStore(),
    )
    requests = RequestMetricsObserver()
    return Metrics(cast(Server, parts), requests, machine or no_more), requests


def life(**changes: Any) -> GenerationRecord:
    found = GenerationRecord("r", "", SamplingParams(max_tokens=20), 30, True, 10.0)
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def output(tokens: int, cached: int = 16) -> RequestOutput:
    return RequestOutput(
        "r",
        None,
        range(30),
        [CompletionOutput(0, "", list(range(tokens)), "stop")],
        cached,
        1,
        None,
        Times(arrival=1.0, first_scheduled=1.5, first_token=1.75, finished=2.75),
    )


def read(text: bytes) -> dict[str, float]:
    """Return 'name{label="x"}' without the constant labels -> value."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            key = sample.name + "".join(f"{{{k}={v}}}" for k, v in sorted(labels.items()))
            assert key not in found or sample.name.startswith("process")
            found[key] = sample.value
    return found


def test_a_request_is_counted_once_in_each_histogram() -> None:
    metrics, requests = made()
    one = life()
    requests.arrived(one)
    requests.delivered(one, 0, 1, 11.0)
    one.last_tokens[0] = 11.0
    requests.delivered(one, 0, 4, 11.03)
    requests.finished(one, output(5), "stop")
    requests.finished(life(), None, "abort")
    requests.refused("", "queue")
    found = read(metrics.text(STATS, 1.0))
    for prefix in ("kvik:", "vllm:"):
        assert found[f"{prefix}generation_tokens_total"] == 5
        assert found[f"{prefix}prompt_tokens_total"] == 30
        assert found[f"{prefix}prompt_tokens_cached_total"] == 16
        assert found[f"{prefix}prompt_tokens_by_source_total{{source=local_compute}}"] == 14
        assert found[f"{prefix}request_success_total{{finished_reason=stop}}"] == 1
        assert found[f"{prefix}request_success_total{{finished_reason=abort}}"] == 1
        assert found[f"{prefix}admission_rejections_total{{reason=queue}}"] == 1
        assert found[f"{prefix}time_to_first_token_seconds_sum"] == pytest.approx(0.75)
        assert found[f"{prefix}time_to_first_token_seconds_count"] == 1
        assert found[f"{prefix}time_to_first_token_seconds_bucket{{le=0.5}}"] == 0
        assert found[f"{prefix}time_to_first_token_seconds_bucket{{le=0.75}}"] == 1
        assert found[f"{prefix}inter_token_latency_seconds_sum"] == pytest.approx(0.03)
        assert found[f"{prefix}inter_token_latency_seconds_count"] == 1
        assert found[f"{prefix}request_time_per_output_token_seconds_sum"] == pytest.approx(0.25)
        assert found[f"{prefix}e2e_request_latency_seconds_sum"] == pytest.approx(1.75)
        assert found[f"{prefix}request_queue_time_seconds_sum"] == pytest.approx(0.5)
        assert found[f"{prefix}request_prefill_time_seconds_sum"] == pytest.approx(0.25)
        assert found[f"{prefix}request_decode_time_seconds_sum"] == pytest.approx(1.0)
        assert found[f"{prefix}request_inference_time_seconds_sum"] == pytest.approx(1.25)
        assert found[f"{prefix}request_prefill_kv_computed_tokens_sum"] == 14
        assert found[f"{prefix}request_params_max_tokens_sum"] == 20


def test_gaps_are_between_tokens_of_one_sibling() -> None:
    """Siblings get tokens in the same steps; the time between those of two siblings is no gap."""
    metrics, requests = made()
    times: dict[int, list[float]] = {}

    class Seen(Observer):
        def delivered(
            self, life: GenerationRecord, index: int, num_tokens: int, now: float
        ) -> None:
            times.setdefault(index, []).append(now)

    with story_site(openai_routes, observers=[requests, Seen()]) as site:
        body = {"prompt": "Once", "n": 4, "max_tokens": 9, "ignore_eos": True}
        assert ask(site.server, "POST", "/v1/completions", body).status == 200
        site.at_rest()
    found = read(metrics.text(STATS, 1.0))
    assert found["kvik:generation_tokens_total"] == 36
    each = [times[index] for index in range(4)]  # fewer than tokens, which may arrive together
    count = found["kvik:inter_token_latency_seconds_count"]
    assert count == sum(len(own) - 1 for own in each)
    total = found["kvik:inter_token_latency_seconds_sum"]
    assert total == pytest.approx(sum(own[-1] - own[0] for own in each))


def test_an_embedding_asks_for_no_output_tokens() -> None:
    metrics, requests = made()
    with story_site(openai_routes, observers=[requests]) as site:
        assert ask(site.server, "POST", "/v1/embeddings", {"input": ["Once", "upon"]}).status == 200
        site.at_rest()
    found = read(metrics.text(STATS, 1.0))
    assert found["kvik:request_params_n_sum"] == 2
    assert found["kvik:request_params_max_tokens_sum"] == 0
    assert found["kvik:request_success_total{finished_reason=stop}"] == 2  # none was cut off


def test_the_engine_is_read() -> None:
    metrics, _ = made()
    found = read(metrics.text(STATS, 1.0))
    assert found["kvik:kv_cache_tokens{kind=allocated}"] == 96
    assert found["kvik:kv_cache_tokens{kind=used}"] == 83
    for prefix in ("kvik:", "vllm:"):
        assert found[f"{prefix}num_requests_running"] == 3
        assert found[f"{prefix}num_requests_waiting"] == 2
        assert found[f"{prefix}num_requests_waiting_by_reason{{reason=capacity}}"] == 2
        assert found[f"{prefix}kv_cache_usage_perc"] == 0.25
        assert found[f"{prefix}prefix_cache_queries_total"] == 200
        assert found[f"{prefix}prefix_cache_hits_total"] == 50
        assert found[f"{prefix}num_preemptions_total"] == 1
        assert found[f"{prefix}iteration_tokens_total_bucket{{le=1.0}}"] == 2
        assert found[f"{prefix}iteration_tokens_total_bucket{{le=32.0}}"] == 3
        assert found[f"{prefix}iteration_tokens_total_count"] == 4
        assert found[f"{prefix}iteration_tokens_total_sum"] == 103
        assert found[f"{prefix}spec_decode_num_drafts_total"] == 4
        assert found[f"{prefix}spec_decode_num_draft_tokens_total"] == 10
        assert found[f"{prefix}spec_decode_num_accepted_tokens_total"] == 6
        assert found[f"{prefix}spec_decode_num_accepted_tokens_per_pos_total{{position=2}}"] == 1
    assert found["kvik:engine_state{state=ready}"] == 1
    assert found["kvik:engine_state{state=restarting}"] == 0
    assert found["kvik:engine_starts_total"] == 2
    assert found["kvik:engine_seconds_total{doing=host}"] == 0.25
    assert found["kvik:speculation_speedup"] == 2.0
    assert found["kvik:speculation_accepted_length"] == 2.5
    assert found["kvik:speculation_drafts_per_pos_total{position=2}"] == 3
    assert "process_resident_memory_bytes" in found


def test_a_scrape_counts_all_open_responses_but_its_own() -> None:
    with story_site(every_route) as site:
        for others in (0, 1):
            text = ask(site.server, "GET", "/metrics").body
            assert read(text)["kvik:open_responses"] == others
            site.parts.drain.enter()


def test_requests_that_wait_while_none_runs_wait_for_a_batch() -> None:
    metrics, _ = made()
    found = read(metrics.text(replace(STATS, num_running=0), 1.0))
    assert found["kvik:num_requests_waiting_by_reason{reason=deferred}"] == 2
    assert found["kvik:num_requests_waiting_by_reason{reason=capacity}"] == 0


def names(text: bytes, prefix: str) -> set[str]:
    return {
        line.split()[2].removeprefix(prefix)
        for line in text.decode().splitlines()
        if line.startswith("# TYPE ") and line.split()[2].startswith(prefix)
    }


def with_machine(compat: str = "vllm") -> Metrics:
    return made(compat, MachineMetrics(CONFIG))[0]


def second_scrape() -> bytes:
    """Return all metrics, with the rates since an earlier scrape."""
    metrics = with_machine()
    metrics.text(STATS, 1.0)
    later = replace(STATS, steps=8, work=replace(STATS.work, mixed_steps=6), time=LoopTime(2, 1, 1))
    return metrics.text(later, 9.0)


def test_names_of_other_engines_are_there_on_request() -> None:
    assert names(with_machine().text(STATS, 1.0), "vllm:") == OTHERS
    assert not names(with_machine("none").text(STATS, 1.0), "vllm:")


def test_every_metric_has_our_name_and_is_in_the_docs() -> None:
    text = second_scrape()
    ours = names(text, "kvik:")
    assert ours > OTHERS
    assert "bottleneck" in ours
    found = read(text)
    assert found["kvik:working_threads"] == 2
    assert found["kvik:cuda_graphs"] == 12 and found["kvik:cuda_graph_bytes{kind=taken}"] == 300
    documented = set(re.findall(r"`kvik:(\w+)`", (DOCS / "metrics.md").read_text()))
    assert {name.removesuffix("_total") for name in documented} >= {
        name.removesuffix("_total") for name in ours
    }


def test_achieved_rates_are_of_the_last_minute() -> None:
    machine = MachineMetrics(CONFIG)
    metrics = made(machine=machine)[0]
    assert "kvik:flops_per_second" not in read(metrics.text(STATS, 100.0))
    work = replace(STATS.work, decode_steps=1002, decode_step_tokens=1002, decode_tokens=1002)
    later = replace(STATS, steps=1004, work=work, time=LoopTime(10.5, 0.25, 1.0))
    found = read(metrics.text(later, 110.0))
    model = machine.model()
    weights = model.shape.read_bytes(model.setting.weight_format, 1)
    assert found["kvik:memory_bytes_per_second"] >= 1000 * weights / 10.0
    total = found["kvik:estimated_read_bytes_per_gpu_total"]
    assert total == pytest.approx(1004 * weights, rel=0.2)
    # A minute later nothing has been computed since.
    for at in (130.0, 160.0, 190.0):
        idle = replace(later, time=LoopTime(10.5, 0.25, at - 109.0))
        found = read(metrics.text(idle, at))
    assert found["kvik:memory_bytes_per_second"] == 0.0
    assert found["kvik:bottleneck{limit=load}"] == 1.0


@pytest.mark.check
def test_the_dashboard_is_made_by_its_tool_of_metrics_that_exist() -> None:
    tool = runpy.run_path(str(DOCS.parent / "tools" / "grafana_dashboard.py"))
    text = (DOCS / "grafana-dashboard.json").read_text()
    assert text == tool["text"]()
    ours = names(second_scrape(), "kvik:") | {"memory_bandwidth_share", "compute_share"}
    read_there = {name.removesuffix("_bucket") for name in re.findall(r"kvik:(\w+)", text)}
    assert read_there <= ours


def test_a_calibrated_machine_has_ceilings_and_a_limit() -> None:
    """Steps that take twice the time of their bytes are bound by reading the weights."""
    machine = MachineMetrics(CONFIG)
    metrics = made(machine=machine)[0]
    shape = RunningModel.of(CONFIG).shape
    machine._model_read = True
    machine._model = model = RunningModel(CONFIG, shape, measured_device())
    metrics.text(STATS, 100.0)
    steps = 1000
    n = 2 + steps
    work = replace(STATS.work, decode_steps=n, decode_step_tokens=n, decode_tokens=n)
    weights = shape.read_bytes(model.setting.weight_format, 1)
    seconds = 1.5 * steps * weights / 40e9
    time = LoopTime(STATS.time.executor + seconds, STATS.time.host, STATS.time.idle)
    later = replace(STATS, steps=4 + steps, work=work, time=time)
    found = read(metrics.text(later, 100.0 + seconds))
    assert found["kvik:memory_bytes_ceiling"] == pytest.approx(40e9, rel=0.01)
    assert found["kvik:flops_ceiling"] > 0
    assert 0.5 < found["kvik:memory_bandwidth_share"] <= 1.0
    assert 0 < found["kvik:compute_share"] <= 1.0
    limits = {limit: found[f"kvik:bottleneck{{limit={limit}}}"] for limit in WHAT_HELPS}
    assert limits == {limit: float(limit == "weights bandwidth") for limit in WHAT_HELPS}


def test_the_ceilings_of_a_disturbed_calibration_are_described_as_such() -> None:
    machine = MachineMetrics(CONFIG)
    metrics = made(machine=machine)[0]
    model = machine.model()
    for disturbed in (False, True):
        device = measured_device()
        found = replace_fields(device.calibration, disturbed=disturbed)
        machine._model = replace(model, device=replace(device, calibration=found))
        machine._readings.clear()
        metrics.text(STATS, 100.0)
        text = metrics.text(replace(STATS, steps=9), 110.0)
        (line,) = (x for x in text.decode().splitlines() if "HELP kvik:memory_bytes_ceiling" in x)
        assert ("disturbed" in line) is disturbed


@pytest.mark.check
def test_the_documentation_explains_each_limit() -> None:
    rows = re.findall(r"^\| `([\w ]+)` \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    assert set(WHAT_HELPS) <= set(rows)


def test_the_summary_has_means_since_the_start() -> None:
    metrics, requests = made()
    stats = replace(
        STATS, steps=10, rows=25, delivered_tokens=60, time=LoopTime(executor=2.0, host=1.0)
    )

    def summary(stats: EngineStats) -> dict[str, Any]:
        async def answer() -> EngineStats:
            return stats

        cast(Any, metrics)._server.engine.stats = answer
        response = asyncio.run(metrics.summary(cast(Any, None)))
        return cast(dict[str, Any], json.loads(response.body))

    before = summary(replace(STATS, steps=0, rows=0, time=LoopTime()))
    assert before["mean_latency_seconds"] is before["mean_batch_size"] is None
    assert before["output_tokens_per_second"] is None
    requests.finished(life(), output(4), "stop")
    found = summary(stats)
    assert (found["requests_finished"], found["mean_latency_seconds"]) == (1, 1.75)
    assert found["mean_time_to_first_token_seconds"] == 0.75
    assert (found["mean_batch_size"], found["output_tokens_per_second"]) == (2.5, 20.0)
    memory = CONFIG.memory
    assert sum(found["memory_bytes"].values()) == memory.total
    assert found["memory_bytes"]["kv_cache"] == memory.kv_cache
