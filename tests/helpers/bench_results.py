"""A result with everything that a report can show, including names that need escaping."""

from __future__ import annotations

import msgspec

from kvik_bench.report.result import Chart, Figure, Result, Row

HOSTILE = '<script>alert("x")</script> $x_1$ & | `co`'


def read_result(text: str | bytes) -> Result:
    return msgspec.json.decode(text, type=Result)


def sample_result() -> Result:
    """Return rows "batch 1", "batch 4" and "batch 16"; figures with known medians."""
    rows = []
    for batch in (1, 4, 16):
        spread = [1.0, 1.1, 0.9]
        rows.append(
            Row(
                f"batch {batch}",
                (
                    Figure("batch", "", (batch,), definition="requests at the same time"),
                    Figure(
                        "TTFT p50",
                        "ms",
                        tuple(20.25 * batch * s for s in spread),
                        "less",
                        "send to first token",
                    ),
                    Figure("output", "tokens/s", tuple(100.0 * batch * s for s in spread)),
                ),
                {"finished": "all"},
                {
                    "ITL, ms": tuple(float(i % 17 + batch) for i in range(100)),
                    "sent, s": tuple(float(i) for i in range(100)),
                },
            )
        )
    charts = (
        Chart("curve", "Output by batch size", "output", "batch"),
        Chart("bars", "Time to first token", "TTFT p50"),
        Chart("ecdf", "Time between tokens", "ITL, ms"),
        Chart("points", "Gaps over the run", "ITL, ms", "sent, s"),
        Chart("bars", "Nobody measured this", "absent"),
    )
    facts = {"model": HOSTILE, "command": "kvik bench latency"}
    return Result("latency", facts, tuple(rows), (f"remark: {HOSTILE}",), charts)
