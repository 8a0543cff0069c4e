"""Shows a result as tables, for a terminal and as Markdown: medians, in brackets lowest and
highest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10

from rich import box
from rich.table import Table
from rich.text import Text

from kvik.cli.terminal import output_console
from kvik_bench.report.result import Figure, Result, Row

MAX_WIDTH = 400  # characters of a table that goes to no terminal


@dataclass(frozen=True, slots=True)
class CellGrid:
    """Cells as text. The first column names the rows."""

    header: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


def grid(result: Result) -> CellGrid:
    """Return the table of a result; the more numerous of figures and rows are its lines."""
    names, rows = list(result.names()), result.rows
    facts = list(dict.fromkeys(name for row in rows for name in row.facts))
    if len(names) + len(facts) > len(rows):
        header = ("", *(row.label for row in rows))
        lines = [(name, *(row.facts.get(name, "-") for row in rows)) for name in facts]
        lines += [(_title(result, name), *(_cell(row, name) for row in rows)) for name in names]
        return CellGrid(header, tuple(lines))
    header = ("", *facts, *(_title(result, name) for name in names))
    return CellGrid(
        header,
        tuple(
            (
                row.label,
                *(row.facts.get(name, "-") for name in facts),
                *(_cell(row, name) for name in names),
            )
            for row in rows
        ),
    )


def definitions(result: Result) -> list[tuple[str, str]]:
    """Return (names of figures, definition), one entry per definition."""
    names_by_text: dict[str, list[str]] = {}
    for row in result.rows:
        for figure in row.figures:
            names = names_by_text.setdefault(figure.definition, [])
            if figure.name not in names:
                names.append(figure.name)
    return [(", ".join(names), text) for text, names in names_by_text.items() if text]


def show_figure(figure: Figure) -> str:
    """Return "12.3 (11.9 to 12.8)", or one value alone; impossible values are marked."""
    places = _places(figure)
    text = f"{figure.median:,.{places}f}"
    if len(figure.values) > 1:
        text = f"{text} ({figure.low:,.{places}f} to {figure.high:,.{places}f})"
    return f"{text}, impossible" if figure.impossible else text


def unit_title(name: str, unit: str) -> str:
    return f"{name}, {unit}" if unit else name


def as_markdown(result: Result) -> str:
    table = grid(result)
    lines = [f"# {result.title}", ""]
    lines += [_markdown_line(table.header), _markdown_line(["---"] * len(table.header))]
    lines += map(_markdown_line, table.lines)
    note = spread_note(result)
    lines += ["", note] if note else []
    for heading, entries in (
        (
            "Definitions",
            [f"- **{_escape(n)}**: {_escape(text)}" for n, text in definitions(result)],
        ),
        ("Remarks", [f"- {_escape(remark)}" for remark in result.remarks]),
        ("Facts", [f"- **{_escape(n)}**: {_escape(text)}" for n, text in result.facts.items()]),
    ):
        if entries:
            lines += ["", f"## {heading}", "", *entries]
    return "\n".join(lines)


def print_tables(result: Result) -> None:
    """Print to standard output, in the width of the terminal, or without one as wide as needed."""
    console = output_console()
    table = grid(result)
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(table.header):
        shown.add_column(Text(name), justify="right" if i else "left", overflow="fold")
    for line in table.lines:
        shown.add_row(*map(Text, line))
    if not console.is_terminal:
        options = console.options.update(width=MAX_WIDTH)
        console.width = max(80, console.measure(shown, options=options).maximum)
    console.print(shown)
    note = spread_note(result)
    if note:
        console.print(Text(note, style="dim"))
    for names, text in definitions(result):
        console.print(Text.assemble((names, "bold"), f": {text}"), soft_wrap=True)
    if result.remarks:
        console.print()
    for remark in result.remarks:
        console.print(Text(remark), soft_wrap=True)
    console.print()
    for name, text in result.facts.items():
        console.print(Text(f"{name}: {text}", style="dim"), soft_wrap=True)


def spread_note(result: Result) -> str:
    """Return how to read the cells; "" if everything was measured once."""
    repeats = max((len(f.values) for row in result.rows for f in row.figures), default=0)
    if repeats < 2:
        return ""
    return f"Medians of {repeats} rounds, in brackets the lowest and the highest."


def _cell(row: Row, name: str) -> str:
    figure = row.figure(name)
    return "-" if figure is None else show_figure(figure)


def _title(result: Result, name: str) -> str:
    figures = (row.figure(name) for row in result.rows)
    return unit_title(name, next(figure.unit for figure in figures if figure is not None))


def _places(figure: Figure) -> int:
    """Return the decimals that show the significant digits; none for counts."""
    if figure.unit != "x" and all(value == int(value) for value in figure.values):
        return 0
    size = abs(figure.median)
    return min(6, max(0, figure.digits - 1 - floor(log10(size)))) if size else figure.digits - 1


def _markdown_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escape, cells))} |"


def _escape(text: str) -> str:
    """Escape characters that Markdown would read as markup or as the end of a cell."""
    text = " ".join(text.split())
    for mark in "\\|`*_<>":
        text = text.replace(mark, f"\\{mark}")
    return text
