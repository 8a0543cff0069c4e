"""OpenTelemetry traces: a span for each request, with child spans for queue, prefill and decode.

Spans are made from the engine's timestamps after a request has ended, so tracing adds no cost while
a request is served. They carry counts and parameters, never text.
"""

from __future__ import annotations

import atexit
import time
from importlib import import_module
from threading import Event, Thread
from typing import TYPE_CHECKING

from kvik.engine.output import RequestOutput
from kvik.errors import ConfigError
from kvik.server.generation import GenerationRecord, Observer

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter

NEEDS = "needs OpenTelemetry: pip install 'kvik[otel]'"
SERVICE = "kvik"
CLOSING_SECONDS = 2.0  # the exporter alone would retry for ten seconds, or wait for thirty
FAILURES = ("error", "deadline", "refused")  # reasons that clients get as a status of 5xx


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Return an exporter that sends spans to a collector over HTTP.

    Args:
        endpoint: for example http://127.0.0.1:4318/v1/traces.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    try:
        module = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError:
        raise ConfigError("otlp_endpoint", NEEDS) from None
    exporter: SpanExporter = module.OTLPSpanExporter(endpoint=endpoint)
    return exporter


class Tracing(Observer):
    """Records a trace of each request.

    Args:
        exporter: sends the spans, from a separate thread.
        model_name: name of the model in every span.
    """

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._model_name = model_name
        resource = Resource.create({"service.name": SERVICE})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(SERVICE)
        # Started now, because an interpreter that exits starts no threads.
        self._closing = Event()
        self._closer = Thread(target=self._shut_down, name="tracing", daemon=True)
        self._closer.start()
        atexit.register(self.close)

    def finished(self, record: GenerationRecord, output: RequestOutput | None, reason: str) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        now, then = time.time_ns(), time.monotonic()

        def wall(seconds: float) -> int:
            """Convert a time of `time.monotonic` to nanoseconds since 1970."""
            return now - round((then - seconds) * 1e9)

        params = record.params
        attributes: dict[str, str | int | float | tuple[str, ...]] = {
            "gen_ai.operation.name": record.operation,
            "gen_ai.provider.name": SERVICE,
            "gen_ai.request.model": params.adapter or self._model_name,
            "gen_ai.response.id": record.request_id,
            "gen_ai.response.finish_reasons": (reason,),
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_output_tokens,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        if output is not None:
            reasons = tuple(completion.finish_reason for completion in output.outputs)
            attributes["gen_ai.response.finish_reasons"] = reasons
            attributes["kvik.cached_tokens"] = output.num_cached_tokens
            attributes["kvik.preemptions"] = output.num_preemptions
            attributes |= _speculation(output)
        if reason in FAILURES:
            attributes["error.type"] = reason
        span = self._tracer.start_span(
            "kvik.request",
            context=_parent(record.trace_parent),
            kind=SpanKind.SERVER,
            start_time=wall(record.arrived),
            attributes=attributes,
        )
        if reason in FAILURES:
            span.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(span)
        for name, start, end in _parts(output):
            if end < record.arrived:
                continue  # on the server that handed the request over
            part = self._tracer.start_span(
                name, inside, start_time=wall(max(start, record.arrived))
            )
            part.end(wall(end))
        span.end(now)

    def close(self) -> None:
        """Send the remaining spans; if the collector cannot be reached, only try for a moment. The
        end of the process does this."""
        atexit.unregister(self.close)
        self._closing.set()
        self._closer.join(CLOSING_SECONDS)

    def _shut_down(self) -> None:
        self._closing.wait()
        self._provider.shutdown()


def _speculation(output: RequestOutput) -> dict[str, int | float]:
    """Return the span attributes of speculation; empty without speculation."""
    figures = {} if output.speculation is None else output.speculation.figures()
    return {
        f"kvik.speculation.{name}": round(value, 4)
        for name, value in figures.items()
        if isinstance(value, int | float)
    }


def _parts(output: RequestOutput | None) -> list[tuple[str, float, float]]:
    """Return (name, start, end) of each phase of a request."""
    if output is None:
        return []
    times = output.metrics
    started, first = times.first_scheduled, times.first_token
    if started is None:
        return [("queue", times.arrival, times.finished)]
    parts = [("queue", times.arrival, started)]
    if first is None:
        return [*parts, ("prefill", started, times.finished)]
    return [*parts, ("prefill", started, first), ("decode", first, times.finished)]


def _parent(header: str | None) -> Context | None:
    """Return the context of the caller's trace, if it sent one (W3C Trace Context)."""
    if header is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": header})
