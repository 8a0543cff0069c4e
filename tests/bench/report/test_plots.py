"""PNG files with the right number and names, also for unusual results."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from helpers.bench_results import HOSTILE, sample_result

from kvik.errors import ConfigError
from kvik_bench.report import plots
from kvik_bench.report.plots import as_html, chart_table, drawable, write_plots
from kvik_bench.report.result import Chart, Figure, Result, Row


def size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_one_picture_for_each_chart_with_data(tmp_path: Path) -> None:
    paths = write_plots(sample_result(), tmp_path / "new" / "folder")
    assert [p.name for p in paths] == [
        "latency-output-by-batch-size.png",
        "latency-time-to-first-token.png",
        "latency-time-between-tokens.png",
        "latency-gaps-over-the-run.png",
    ]
    for path in paths:
        width, height = size(path.read_bytes())
        assert width == round(plots.WIDTH * plots.DPI)
        assert height > 200


@pytest.mark.full
def test_equal_results_draw_equal_files(tmp_path: Path) -> None:
    first = [p.read_bytes() for p in write_plots(sample_result(), tmp_path / "a")]
    again = [p.read_bytes() for p in write_plots(sample_result(), tmp_path / "b")]
    assert first == again


@pytest.mark.parametrize(
    "row",
    [
        Row(HOSTILE * 3, (Figure("x", "ms", (0.0,)), Figure("n", "", (1,))), {}, {"s": (1.0,)}),
        Row("zero", (Figure("x", "ms", (0.0, 0.0)), Figure("n", "", (0,))), {}, {"s": (0.0, 0.0)}),
        Row("far", (Figure("x", "", (1e-9, 1e9)), Figure("n", "", (5,))), {}, {"s": (1e-6, 1e6)}),
        Row("m\udcff", (Figure("x", "", (1.0,)), Figure("n", "", (5,))), {}, {"s": (1.0,)}),
    ],
    ids=["long hostile label", "zeros", "18 orders of magnitude", "bytes of a name"],
)
def test_odd_rows_draw(row: Row, tmp_path: Path) -> None:
    charts = (
        Chart("bars", "Bars", "x"),
        Chart("curve", "Curve", "x", "n"),
        Chart("ecdf", "Distribution", "s"),
        Chart("points", "Points", "s", "s"),
    )
    other = Row("other", (Figure("x", "ms", (3.0,)), Figure("n", "", (2,))), {}, {"s": (2.0, 3.0)})
    result = Result("odd", {}, (row, other), (), charts)
    assert len(write_plots(result, tmp_path)) == 4


def test_a_curve_of_one_point_is_not_drawn() -> None:
    result = sample_result()
    alone = replace(result, rows=result.rows[:1])
    assert "curve" not in [chart.kind for chart in drawable(alone)]
    assert "curve" in [chart.kind for chart in drawable(result)]


def test_numbers_of_a_distribution() -> None:
    table = chart_table(sample_result(), Chart("ecdf", "", "ITL, ms"))
    assert table.header == ("", "p10", "p50", "p90", "p99", "highest", "count")
    # 1 to 15 six times, 16 and 17 five times: the 90th percentile is a tenth of the way to 16.
    assert table.lines[0] == ("batch 1", "2", "9", "15.1", "17", "17", "100")


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="plot"):
        write_plots(sample_result(), tmp_path / "file" / "folder")


def test_points_of_a_measured_curve_have_names_and_the_order_of_the_loads() -> None:
    """Beyond the knee, a higher load has less throughput: a line in the order of x would be
    wrong."""
    loads = {"concurrency 1": 30.0, "concurrency 2": 70.0, "concurrency 4": 50.0}
    rows = tuple(
        Row(name, (Figure("rate", "tokens/s", (rate,)), Figure("TTFT", "ms", (10.0,))))
        for name, rate in loads.items()
    )
    chart = Chart("curve", "Knee", "TTFT", "rate")
    drawing = plots.svg(Result("x", {}, rows, (), (chart,)), chart, "")
    places = [re.search(rf'x="([\d.]+)"[^>]*>{name}</text>', drawing) for name in loads]
    first, second, third = (float(place[1]) for place in places if place)
    assert first < third < second
    (line,) = re.findall(r'<path d="M ([^"]*)" clip-path[^>]*stroke: #2f7ed8', drawing)
    xs = [float(point.split()[0]) for point in line.split("L")]
    assert xs[0] < xs[2] < xs[1]


def test_gaps_of_zero_do_not_stretch_a_logarithmic_axis() -> None:
    """For tokens that arrived in one packet; the others are still distinguished."""
    gaps = (0.0,) * 50 + (1e-6,) + tuple(float(i) for i in range(1, 101)) + (900.0,)
    rows = (Row("a", (), {}, {"ITL, ms": gaps}),)
    chart = Chart("ecdf", "Gaps", "ITL, ms")
    drawing = plots.svg(Result("x", {}, rows, (), (chart,)), chart, "")
    assert ">100</text>" in drawing and ">1e-06</text>" not in drawing


# The page is well-formed, loads nothing else, and shows hostile names as text.


VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks nesting; collects attributes, ids and text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        self.text.append(text)


@pytest.fixture(scope="module")
def html() -> str:
    return as_html(sample_result())


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    page = Page()
    page.feed(html)
    page.close()
    return page


@pytest.mark.full
def test_tags_are_closed_in_order(page: Page) -> None:
    assert page.open == []


def test_nothing_is_loaded_from_elsewhere(page: Page, html: str) -> None:
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    names = {"src", "href", "xlink:href", "action", "data"}
    links = [value for _, name, value in page.attributes if name in names]
    assert links  # markers of the curves
    assert all(value.startswith("#") for value in links)
    assert "url(http" not in html


def test_a_hostile_name_is_text(page: Page) -> None:
    assert HOSTILE in page.text
    assert f"remark: {HOSTILE}" in page.text


def test_ids_are_unique_and_references_resolve(page: Page) -> None:
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    wanted = {v[1:] for _, name, v in page.attributes if name in ("href", "xlink:href")}
    wanted |= {v[5:-1] for _, _, v in page.attributes if v.startswith("url(#")}
    assert wanted <= set(ids)


def test_the_drawings_are_valid_xml(html: str) -> None:
    for piece in html.split("<svg")[1:]:
        drawing = "<svg" + piece.partition("</svg>")[0] + "</svg>"
        ElementTree.fromstring(drawing)
