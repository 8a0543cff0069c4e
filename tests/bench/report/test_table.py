"""Results as tables: medians with their spread, whatever is fewer across, names escaped."""

from __future__ import annotations

import io

import pytest
from helpers.bench_results import HOSTILE, sample_result
from rich.console import Console

from kvik_bench.report.result import Figure, Result, Row
from kvik_bench.report.table import as_markdown, definitions, grid, print_tables, show_figure


@pytest.mark.parametrize(
    ("values", "unit", "text"),
    [
        ((12.345,), "ms", "12.3"),
        ((1234.5,), "ms", "1,234"),
        ((0.01234,), "s", "0.0123"),
        ((3.0, 4.0, 5.0), "", "4 (3 to 5)"),
        ((2.0,), "x", "2.00"),
        ((0.0,), "ms", "0"),
        ((11.0, 12.0, 13.5), "ms", "12.0 (11.0 to 13.5)"),
    ],
)
def test_three_digits_and_the_spread(values: tuple[float, ...], unit: str, text: str) -> None:
    assert show_figure(Figure("x", unit, values)) == text


def test_impossible_values_are_marked() -> None:
    assert show_figure(Figure("share", "%", (90.0, 955.0, 970.0), most=120.0)) == (
        "955 (90 to 970), impossible"
    )
    assert show_figure(Figure("share", "%", (90.0, 95.0, 970.0), most=120.0)) == "95 (90 to 970)"


def test_figures_that_outnumber_rows_become_lines() -> None:
    result = sample_result()
    table = grid(result)  # 3 figures and a fact, 3 rows
    assert table.header == ("", "batch 1", "batch 4", "batch 16")
    assert table.lines[0] == ("finished", "all", "all", "all")
    assert table.lines[2] == (
        "TTFT p50, ms",
        "20.2 (18.2 to 22.3)",
        "81.0 (72.9 to 89.1)",
        "324 (292 to 356)",
    )
    many = Result("x", {}, result.rows + tuple(Row(f"more {i}", ()) for i in range(4)))
    assert grid(many).header == ("", "finished", "batch", "TTFT p50, ms", "output, tokens/s")
    assert grid(many).lines[3] == ("more 0", "-", "-", "-", "-")


def test_equal_definitions_stand_once() -> None:
    row = Row("r", (Figure("a", "", (1,), definition="d"), Figure("b", "", (1,), definition="d")))
    assert definitions(Result("x", {}, (row,))) == [("a, b", "d")]


def test_markdown_escapes_cells() -> None:
    text = as_markdown(sample_result())
    assert HOSTILE not in text
    assert r"\<script\>" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.replace(r"\|", "").count("|") for line in lines}) == 1


def test_a_terminal_shows_figures_definitions_remarks_and_facts() -> None:
    console = Console(file=io.StringIO(), width=200)
    print_tables(sample_result(), console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for text in ("81.0 (72.9 to 89.1)", "send to first token", HOSTILE, "kvik bench latency"):
        assert text in shown
