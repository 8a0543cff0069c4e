"""A result as one HTML file that needs nothing else: figures, charts, what was measured and how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jinja2
from markupsafe import Markup

from kvik_bench.report.plots import chart_table, describe, drawable, svg
from kvik_bench.report.result import Chart, Result
from kvik_bench.report.table import Grid, definitions, grid, spread_note

TEMPLATE = Path(__file__).with_name("report.html.jinja")


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart beside the same in words and in numbers."""

    title: str
    svg: Markup
    words: str
    numbers: Grid


def as_html(result: Result) -> str:
    """The page. Whatever a name or remark holds is shown as text."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        result=result,
        table=grid(result),
        pictures=[_picture(result, chart, i) for i, chart in enumerate(drawable(result))],
        definitions=definitions(result),
        spread=spread_note(result),
    )


def _picture(result: Result, chart: Chart, number: int) -> Picture:
    words = describe(result, chart)
    # Several pictures share a page, and so one space of names.
    drawing = svg(result, chart, f"chart{number}-")
    label = Markup('<svg role="img" aria-label="{}"').format(f"{chart.title}. {words}")
    return Picture(
        chart.title, label + Markup(drawing.removeprefix("<svg")), words, chart_table(result, chart)
    )
