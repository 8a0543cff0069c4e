"""Draws charts of a result with matplotlib: PNG files, and SVG for an HTML page."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from markupsafe import Markup

from kvik.errors import ConfigError
from kvik.files import write_whole
from kvik_bench.report.result import Chart, Figure, Result, Row
from kvik_bench.report.table import (
    CellGrid,
    definitions,
    grid,
    show_figure,
    spread_note,
    unit_title,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Canvas


# Contrast of at least 3:1 on white and near black; distinguishable for most colour-blind readers.
COLOURS = ("#2f7ed8", "#d9662b", "#259a78", "#b0559b", "#9a7d0a", "#7a6fd0", "#5f8a2e", "#c2506a")
DASHES = ("-", "--", "-.", ":")
INK = "#30343b"  # colour of text and axes
GRID = "#9aa0a8"
WIDTH, DPI = 7.2, 150  # inches, dots per inch
BAR_HEIGHT, CURVE_HEIGHT = 0.42, 3.6  # inches
LABEL = 36  # characters of a row's name
WIDE_RANGE = 50.0  # ratio from which a distribution gets a logarithmic axis
MAX_POINTS = 4000  # more cannot be distinguished, and make large files

STYLE: Mapping[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "kvik",  # equal charts are equal files
    "text.parse_math": False,  # a $ in a model's name is literal
}


def require_matplotlib(option: str) -> None:
    """Raise ConfigError about the option, with how to install it, if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ConfigError(option, "charts need matplotlib: pip install 'kvik[bench]'")


def write_plots(result: Result, folder: Path) -> list[Path]:
    """Write a PNG for each chart; return their paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for chart in drawable(result):
            path = folder / f"{result.kind}-{_slug(chart.title)}.png"
            write_whole(path, _render(result, chart, "png"))
            paths.append(path)
    except OSError as error:
        raise ConfigError("plot", f"cannot be written ({error.strerror})") from None
    return paths


def svg(result: Result, chart: Chart, prefix: str) -> str:
    """Return an <svg> element in the colours of the text around it.

    Args:
        prefix: of every id in it, so that a page can have several.
    """
    text = _render(result, chart, "svg").decode()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", text).strip()


def drawable(result: Result) -> list[Chart]:
    """Return the charts that have data; a curve needs two points."""
    return [chart for chart in result.charts if len(_rows(result, chart)) > (chart.kind == "curve")]


def chart_table(result: Result, chart: Chart) -> CellGrid:
    """Return the numbers of a chart."""
    rows = _rows(result, chart)
    if chart.kind in ("ecdf", "points"):
        header = ("", *(f"p{share}" for share in SHARES), "highest", "count")
        return CellGrid(header, tuple(_percentiles(row, chart.y) for row in rows))
    header = ("", *(_axis(rows, name) for name in (chart.x, chart.y) if name))
    return CellGrid(
        header,
        tuple(
            (row.label, *(show_figure(_figure(row, n)) for n in (chart.x, chart.y) if n))
            for row in rows
        ),
    )


def describe(result: Result, chart: Chart) -> str:
    """Describe a chart in a sentence."""
    rows = _rows(result, chart)
    return f"{SENTENCES[chart.kind].format(x=chart.x, y=chart.y)} {len(rows)} rows: " + "; ".join(
        row.label for row in rows
    )


SHARES = (10, 50, 90, 99)

SENTENCES: Mapping[str, str] = {
    "bars": "Bars of {y}, median with lowest and highest.",
    "curve": "{y} over {x}, median with lowest and highest.",
    "ecdf": "Share of values up to each {y}.",
    "points": "{y} over {x}, a point for each request.",
}


def _bars(ax: Axes, chart: Chart, rows: Sequence[Row]) -> None:
    figures = [_figure(row, chart.y) for row in rows]
    places = np.arange(len(rows))
    ax.barh(places, [f.median for f in figures], height=0.62, color=COLOURS[0])
    highest = max(f.high for f in figures)
    for place, figure in zip(places, figures, strict=True):
        if len(figure.values) > 1:
            ax.plot([figure.low, figure.high], [place] * 2, color=INK, linewidth=1.3)
        ax.annotate(
            show_figure(figure),
            (figure.high, place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=INK,
            fontsize=8.5,
        )
    ax.set_xlim(0, (highest or 1) * 1.34)  # space for the labels after the bars
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_yticks(places, [_label(row) for row in rows])
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.set_xlabel(_axis(rows, chart.y))


def _curve(ax: Axes, chart: Chart, rows: Sequence[Row]) -> None:
    # A size that was set labels itself. Measured values may not be monotonic between loads.
    measured = bool(_figure(rows[0], chart.x).unit)
    if not measured:
        rows = sorted(rows, key=lambda row: _figure(row, chart.x).median)
    xs = [_figure(row, chart.x).median for row in rows]
    figures = [_figure(row, chart.y) for row in rows]
    middles = np.array([f.median for f in figures])
    spread = [
        middles - np.array([f.low for f in figures]),
        np.array([f.high for f in figures]) - middles,
    ]
    ax.errorbar(
        xs,
        middles,
        yerr=spread,
        marker="o",
        color=COLOURS[0],
        ecolor=INK,
        elinewidth=1.2,
        capsize=3,
    )
    if measured:
        for row, x, y in zip(rows, xs, middles, strict=True):
            ax.annotate(
                _label(row),
                (x, y),
                xytext=(-4, 5),  # above left, clear of a rising curve
                textcoords="offset points",
                ha="right",
                color=INK,
                fontsize=8.5,
            )
        ax.margins(x=0.2)  # space for the labels
    if min(xs) > 0 and max(xs) / min(xs) >= 8:
        ax.set_xscale("log", base=2)
        ax.set_xticks(xs, [f"{x:g}" for x in xs])
        ax.minorticks_off()
    ax.set_ylim(0, max(f.high for f in figures) * 1.15 or 1)
    ax.set_xlabel(_axis(rows, chart.x))
    ax.set_ylabel(_axis(rows, chart.y))


def _ecdf(ax: Axes, chart: Chart, rows: Sequence[Row]) -> None:
    for row, colour, dash in zip(rows, cycle(COLOURS), cycle(DASHES), strict=False):
        values = np.sort(row.series[chart.y])
        shares = np.arange(1, len(values) + 1) / len(values) * 100
        indices = np.unique(np.linspace(0, len(values) - 1, MAX_POINTS).astype(int))
        ax.step(
            values[indices],
            shares[indices],
            where="post",
            color=colour,
            linestyle=dash,
            linewidth=1.8,
            label=_label(row),
        )
    # Tokens of one packet have no time between them: they are off a logarithmic axis, to the left.
    upper_values = [_without_least(row.series[chart.y]) for row in rows]
    if _log_if_wide(ax.xaxis, ax.set_xscale, [values for values in upper_values if values]):
        ax.set_xlim(left=min(min(values) for values in upper_values if values))
    ax.set_ylim(0, 101)
    ax.set_xlabel(chart.y)
    ax.set_ylabel("share of values, %")
    _legend(ax, rows)


def _points(ax: Axes, chart: Chart, rows: Sequence[Row]) -> None:
    for row, colour, marker in zip(rows, cycle(COLOURS), cycle("osD^vP"), strict=False):
        xs, ys = np.array(row.series[chart.x]), np.array(row.series[chart.y])
        indices = np.unique(np.linspace(0, len(xs) - 1, MAX_POINTS).astype(int))
        ax.plot(
            xs[indices],
            ys[indices],
            marker,
            color=colour,
            markersize=3.5,
            alpha=0.65,
            markeredgewidth=0,
            label=_label(row),
        )
    if not _log_if_wide(ax.yaxis, ax.set_yscale, [row.series[chart.y] for row in rows]):
        ax.set_ylim(bottom=0)
    ax.set_xlabel(chart.x)
    ax.set_ylabel(chart.y)
    _legend(ax, rows)


DRAW: Mapping[str, Callable[[Axes, Chart, Sequence[Row]], None]] = {
    "bars": _bars,
    "curve": _curve,
    "ecdf": _ecdf,
    "points": _points,
}


def _render(result: Result, chart: Chart, kind: str) -> bytes:
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    rows = _rows(result, chart)
    height = 1.1 + BAR_HEIGHT * len(rows) if chart.kind == "bars" else CURVE_HEIGHT
    with mpl.rc_context(dict(STYLE)):
        canvas = Canvas(figsize=(WIDTH, height), layout="constrained")
        ax = canvas.subplots()
        DRAW[chart.kind](ax, chart, rows)
        if kind == "png":  # a page has a heading instead
            ax.set_title(chart.title)
        return _save(canvas, kind)


def _save(canvas: Canvas, kind: str) -> bytes:
    target = io.BytesIO()
    # Without metadata of date and program, equal charts are equal files.
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type")) if kind == "svg" else {}
    canvas.savefig(target, format=kind, dpi=DPI, metadata=nothing, transparent=kind == "svg")
    return target.getvalue()


def _rows(result: Result, chart: Chart) -> list[Row]:
    """Return the rows that have the data."""
    if chart.kind in ("ecdf", "points"):
        names = [name for name in (chart.x, chart.y) if name]
        return [row for row in result.rows if all(row.series.get(name) for name in names)]
    names = [name for name in (chart.x, chart.y) if name]
    return [row for row in result.rows if all(row.figure(name) for name in names)]


def _figure(row: Row, name: str) -> Figure:
    figure = row.figure(name)
    assert figure is not None
    return figure


def _axis(rows: Sequence[Row], name: str) -> str:
    return unit_title(name, _figure(rows[0], name).unit)


def _percentiles(row: Row, name: str) -> tuple[str, ...]:
    values = np.array(row.series[name])
    numbers = [*np.percentile(values, SHARES).tolist(), float(values.max())]
    shown = (show_figure(Figure(name, "", (number,))) for number in numbers)
    return (row.label, *shown, f"{len(values):,}")


def _without_least(values: Sequence[float]) -> Sequence[float]:
    """Return the positive values without the smallest percent, which would stretch an axis."""
    positive = sorted(value for value in values if value > 0)
    return positive[len(positive) // 100 :]


def _log_if_wide(
    axis: Axis, scale: Callable[[str], None], series: Sequence[Sequence[float]]
) -> bool:
    lowest = min((min(values) for values in series), default=0.0)
    wide = lowest > 0 and max(max(values) for values in series) / lowest > WIDE_RANGE
    if wide:
        scale("log")
        axis.set_major_formatter("{x:g}")  # powers need math text, which is off
        axis.set_minor_formatter("")
    return wide


def _legend(ax: Axes, rows: Sequence[Row]) -> None:
    if len(rows) > 1:
        ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _label(row: Row) -> str:
    """Return the label of a row, truncated: tables have the full label. "?" replaces what cannot be
    drawn, such as bytes of a file's name that are not UTF-8."""
    text = row.label.encode(errors="replace").decode()
    return text if len(text) <= LABEL else text[: LABEL - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


# A result as one self-contained HTML file: figures, charts, facts and definitions.

TEMPLATE = Path(__file__).with_name("report.html.jinja")


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart with its description and its numbers."""

    title: str
    svg: Markup
    words: str
    numbers: CellGrid


def as_html(result: Result) -> str:
    """Return the page. Names and remarks are escaped."""
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
    # Several pictures share a page, so their ids must differ.
    drawing = svg(result, chart, f"chart{number}-")
    label = Markup('<svg role="img" aria-label="{}"').format(f"{chart.title}. {words}")
    return Picture(
        chart.title, label + Markup(drawing.removeprefix("<svg")), words, chart_table(result, chart)
    )
