"""Spans of requests, as received by a collector."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from threading import Event

import pytest
from helpers.http_server import ask
from helpers.story_site import every_route, story_site
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import DraftCounts, RequestSpeculation
from kvik.engine.output import CompletionOutput, RequestOutput
from kvik.engine.output import RequestMetrics as Times
from kvik.errors import ConfigError
from kvik.server.generation import GenerationRecord, Observer
from kvik.server.tracing import Tracing, otlp_exporter

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def traced(
    reason: str = "stop",
    output: RequestOutput | None = None,
    trace_parent: str | None = None,
    exporter: InMemorySpanExporter | None = None,
    arrived: float = 3.1,  # seconds before the output was made, or before this call
) -> Sequence[ReadableSpan]:
    exporter = exporter or InMemorySpanExporter()
    tracing = Tracing(exporter, "story")
    observer: Observer = tracing
    params = SamplingParams(n=2, temperature=0.5, max_tokens=7)
    now = time.monotonic() if output is None else output.metrics.arrival + 3.0
    life = GenerationRecord("r-1", "", params, 11, True, now - arrived, trace_parent=trace_parent)
    observer.arrived(life)
    life.num_output_tokens = 9
    observer.delivered(life, 0, 9, time.monotonic())
    observer.finished(life, output, reason)
    observer.refused("", "queue")
    tracing.close()
    return exporter.get_finished_spans()


def finished(
    first_scheduled: float | None = 0.5,
    first_token: float | None = 1.0,
    speculation: RequestSpeculation | None = None,
) -> RequestOutput:
    start = time.monotonic() - 3.0
    times = Times(
        arrival=start,
        first_scheduled=None if first_scheduled is None else start + first_scheduled,
        first_token=None if first_token is None else start + first_token,
        finished=start + 2.5,
    )
    done = CompletionOutput(0, "secret", [1], "stop", speculation=speculation)
    cut = CompletionOutput(1, "secret", [1], "length")
    return RequestOutput("r-1", "secret", [1, 2], [done, cut], 4, 1, None, times)


def seconds(span: ReadableSpan) -> float:
    return (span.end_time - span.start_time) / 1e9


def test_a_request_has_a_span_for_each_phase() -> None:
    began = time.time()
    spans = {span.name: span for span in traced(output=finished())}
    took = time.time() - began
    assert set(spans) == {"kvik.request", "queue", "prefill", "decode"}
    whole = spans["kvik.request"]
    assert 3.0 <= seconds(whole) <= 3.0 + took + 0.5
    for name, length in (("queue", 0.5), ("prefill", 0.5), ("decode", 1.5)):
        assert seconds(spans[name]) == pytest.approx(length, abs=1e-6)
        parent = spans[name].parent
        assert parent.span_id == whole.context.span_id
    found = dict(whole.attributes or {})
    assert found["gen_ai.usage.input_tokens"] == 11
    assert found["gen_ai.usage.output_tokens"] == 9
    assert found["gen_ai.request.max_tokens"] == 7
    assert found["gen_ai.response.finish_reasons"] == ("stop", "length")
    assert found["kvik.cached_tokens"] == 4
    assert "secret" not in str(found)
    assert -0.5 < whole.start_time / 1e9 + 3.0 - began < took + 0.5


@pytest.mark.parametrize(
    ("times", "names"),
    [
        (None, ["kvik.request"]),
        ((None, None), ["queue", "kvik.request"]),
        ((0.5, None), ["queue", "prefill", "kvik.request"]),
    ],
)
def test_a_truncated_request_has_spans_of_its_phases(
    times: tuple[float | None, float | None] | None, names: list[str]
) -> None:
    spans = traced("error", None if times is None else finished(*times))
    assert [span.name for span in spans] == names
    assert spans[-1].status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("reason", ["error", "deadline", "refused"])
def test_a_request_that_was_not_served_is_an_error(reason: str) -> None:
    (span,) = traced(reason)
    assert span.status.status_code is StatusCode.ERROR
    assert (span.attributes or {})["error.type"] == reason


@pytest.mark.parametrize("reason", ["stop", "length", "abort", "moved"])
def test_a_caller_that_leaves_is_no_error(reason: str) -> None:
    (span,) = traced(reason)
    assert span.status.status_code is StatusCode.UNSET
    assert "error.type" not in (span.attributes or {})


def test_a_request_of_another_server_has_the_phases_since_it_was_taken_over() -> None:
    spans = {span.name: span for span in traced(output=finished(), arrived=1.0)}
    assert set(spans) == {"kvik.request", "decode"}
    assert spans["decode"].start_time == spans["kvik.request"].start_time
    assert seconds(spans["decode"]) == pytest.approx(0.5, abs=1e-6)


def test_drafts_are_reported() -> None:
    guessed = RequestSpeculation(DraftCounts(2, 5, 3, [2, 2, 1], [2, 1, 0]), 0.5, 0.75)
    for given, expected in (
        (None, {}),
        (
            RequestSpeculation(),
            {"checks": 0, "drafted_tokens": 0, "accepted_tokens": 0},
        ),
        (
            guessed,
            {
                "checks": 2,
                "drafted_tokens": 5,
                "accepted_tokens": 3,
                "mean_accepted_length": 2.5,
                "speedup": 1.5,
            },
        ),
    ):
        found = traced(output=finished(speculation=given))[-1].attributes
        prefix = "kvik.speculation."
        attributes = {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)}
        assert attributes == expected


def test_a_collector_that_does_not_answer_delays_the_end_only_briefly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvik.server.tracing.CLOSING_SECONDS", 0.05)
    answered, sent = Event(), Event()

    class Silent(InMemorySpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            answered.wait(20)
            sent.set()
            return super().export(spans)

    assert not traced(exporter=Silent()) and not sent.is_set()
    answered.set()


def test_spans_join_the_callers_trace_on_every_route() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter, "stories")
    said = {"messages": [{"role": "user", "content": "A fox"}], "max_tokens": 2}
    text = {"prompt": "A fox", "max_tokens": 2}
    asked: list[tuple[str, dict[str, object]]] = [
        ("/v1/completions", text),
        ("/v1/completions", {**text, "stream": True}),
        ("/v1/chat/completions", said),
        ("/v1/embeddings", {"input": "A fox"}),
        ("/v1/generate", text),
        ("/v1/messages", {**said, "model": "stories"}),
        ("/v1/responses", {"input": "A fox", "max_output_tokens": 2}),
        ("/invocations", said),
    ]
    with story_site(every_route, observers=[tracing]) as site:
        for number, (path, body) in enumerate(asked):
            header = f"00-{TRACE}-{number + 1:016x}-01"
            assert ask(site.server, "POST", path, body, traceparent=header).status == 200
        too_long = f"00-{TRACE}-{PARENT}-01-{'x' * 200}"
        assert ask(site.server, "POST", "/v1/generate", text, traceparent=too_long).status == 200
        site.at_rest()
    tracing.close()
    spans = [span for span in exporter.get_finished_spans() if span.name == "kvik.request"]
    parents = [span.parent and span.parent.span_id for span in spans]
    assert parents == [*range(1, len(asked) + 1), None]
    for span, (path, body) in zip(spans, asked, strict=False):
        assert f"{span.context.trace_id:032x}" == TRACE
        operation = "text_completion" if "prompt" in body else "chat"
        operation = "embeddings" if path == "/v1/embeddings" else operation
        assert (span.attributes or {})["gen_ai.operation.name"] == operation


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{TRACE}-{PARENT}", "\n" * 5000])
def test_an_invalid_header_starts_a_trace(header: str) -> None:
    (span,) = traced(trace_parent=header)
    assert span.parent is None


def test_without_the_library_the_message_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"otlp_endpoint: needs OpenTelemetry: pip install"):
        otlp_exporter("http://127.0.0.1:4318/v1/traces")
