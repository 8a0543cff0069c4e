"""Writes docs/grafana-dashboard.json: python tools/grafana_dashboard.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "docs" / "grafana-dashboard.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}
MODEL = 'model_name=~"$model"'
COLUMNS, WIDTH, HEIGHT = 3, 8, 8


def rate(name: str, by: str = "") -> str:
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate(kvik:{name}{{{MODEL}}}[$__rate_interval]))"


def gauge(name: str) -> str:
    return f"sum (kvik:{name}{{{MODEL}}})"


def quantile(share: float, name: str) -> str:
    buckets = f"sum by (le) (rate(kvik:{name}_bucket{{{MODEL}}}[$__rate_interval]))"
    return f"histogram_quantile({share}, {buckets})"


def quantiles(name: str) -> list[tuple[str, str]]:
    return [(f"p{round(100 * share)}", quantile(share, name)) for share in (0.5, 0.9, 0.99)]


# title, unit, what is drawn: (legend, expression)
PANELS: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("Time to first token", "s", quantiles("time_to_first_token_seconds")),
    ("Time per output token", "s", quantiles("request_time_per_output_token_seconds")),
    ("End to end", "s", quantiles("e2e_request_latency_seconds")),
    (
        "Tokens a second",
        "short",
        [("output", rate("generation_tokens_total")), ("prompt", rate("prompt_tokens_total"))],
    ),
    (
        "Requests",
        "short",
        [("running", gauge("num_requests_running")), ("waiting", gauge("num_requests_waiting"))],
    ),
    (
        "Requests a second",
        "reqps",
        [("{{finished_reason}}", rate("request_success_total", "finished_reason"))],
    ),
    ("Refused a second", "reqps", [("{{reason}}", rate("admission_rejections_total", "reason"))]),
    ("Time in the queue", "s", quantiles("request_queue_time_seconds")),
    ("Preemptions a second", "short", [("preemptions", rate("num_preemptions_total"))]),
    ("KV cache held", "percentunit", [("held", f"max (kvik:kv_cache_usage_perc{{{MODEL}}})")]),
    (
        "Prompt tokens found in the prefix cache",
        "percentunit",
        [("hits", f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}")],
    ),
    ("Tokens of a step", "short", quantiles("iteration_tokens_total")),
    (
        "Drafts found right",
        "percentunit",
        [
            (
                "accepted",
                f"{rate('spec_decode_num_accepted_tokens_total')} / "
                f"{rate('spec_decode_num_draft_tokens_total')}",
            )
        ],
    ),
    (
        "Of the machine's limits",
        "percentunit",
        [
            ("memory", f"max (kvik:memory_bandwidth_share{{{MODEL}}})"),
            ("arithmetic", f"max (kvik:compute_share{{{MODEL}}})"),
        ],
    ),
    (
        "What holds it back",
        "short",
        [("{{limit}}", f"max by (limit) (kvik:bottleneck{{{MODEL}}})")],
    ),
]


def panel(number: int, title: str, unit: str, drawn: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "id": number + 1,
        "title": title,
        "type": "timeseries",
        "datasource": SOURCE,
        "gridPos": {
            "x": number % COLUMNS * WIDTH,
            "y": number // COLUMNS * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(65 + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for i, (legend, expression) in enumerate(drawn)
        ],
    }


def dashboard() -> dict[str, Any]:
    models = "label_values(kvik:num_requests_running, model_name)"
    return {
        "title": "kvik",
        "uid": "kvik",
        "tags": ["llm"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "model",
                    "type": "query",
                    "datasource": SOURCE,
                    "query": {"query": models, "refId": "models"},
                    "includeAll": True,
                    "multi": True,
                },
            ]
        },
        "panels": [panel(i, *row) for i, row in enumerate(PANELS)],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
