"""Results as tables: definitions said once, names escaped, values that cannot be marked."""

from __future__ import annotations

from helpers.bench_results import HOSTILE, sample_result

from kvik_bench.report.result import Figure, Result, Row
from kvik_bench.report.table import as_markdown, definitions, show_figure


def test_equal_definitions_are_listed_once() -> None:
    row = Row("r", (Figure("a", "", (1,), definition="d"), Figure("b", "", (1,), definition="d")))
    assert definitions(Result("x", {}, (row,))) == [("a, b", "d")]


def test_markdown_escapes_cells() -> None:
    text = as_markdown(sample_result())
    assert HOSTILE not in text
    assert r"\<script\>" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace(r"\|", "").count("|") for line in lines}) == 1


def test_impossible_values_are_marked() -> None:
    for values, marked in (((90.0, 955.0, 970.0), True), ((90.0, 95.0, 970.0), False)):
        assert ("impossible" in show_figure(Figure("share", "%", values, most=120.0))) == marked
