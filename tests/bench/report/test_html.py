"""The page is well-formed, needs nothing from elsewhere, and shows hostile names as text."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from helpers.bench_results import HOSTILE, sample_result

from kvik_bench.report.html import as_html

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks nesting; gathers attributes, ids and text."""

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
def page() -> Page:
    page = Page()
    page.feed(as_html(sample_result()))
    page.close()
    return page


@pytest.mark.full
def test_tags_are_closed_in_order(page: Page) -> None:
    assert page.open == []


def test_nothing_is_loaded_from_elsewhere(page: Page) -> None:
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    names = {"src", "href", "xlink:href", "action", "data"}
    links = [value for _, name, value in page.attributes if name in names]
    assert links  # markers of the curves
    assert all(value.startswith("#") for value in links)
    assert "url(http" not in as_html(sample_result())


def test_a_hostile_name_is_text(page: Page) -> None:
    assert HOSTILE in page.text
    assert f"remark: {HOSTILE}" in page.text


def test_ids_are_unique_and_what_is_referred_to_exists(page: Page) -> None:
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    wanted = {v[1:] for _, name, v in page.attributes if name in ("href", "xlink:href")}
    wanted |= {v[5:-1] for _, _, v in page.attributes if v.startswith("url(#")}
    assert wanted <= set(ids)


def test_each_chart_has_words_and_numbers_beside_it(page: Page) -> None:
    labels = [v for tag, name, v in page.attributes if tag == "svg" and name == "aria-label"]
    assert len(labels) == 4  # the fifth has no data
    assert labels[0].startswith("Output by batch size. output over batch")
    assert page.tags.count("details") == 4
    assert page.tags.count("table") == 5


def test_figures_stand_with_their_spread(page: Page) -> None:
    assert "81.0 (72.9 to 89.1)" in page.text
    assert "Medians of 3 rounds, in brackets the lowest and the highest." in page.text


def test_the_drawings_are_valid_xml() -> None:
    text = as_html(sample_result())
    for piece in text.split("<svg")[1:]:
        drawing = "<svg" + piece.partition("</svg>")[0] + "</svg>"
        ElementTree.fromstring(drawing)


def test_a_result_without_charts_or_remarks_has_no_such_headings() -> None:
    text = as_html(replace(sample_result(repeats=1), charts=(), remarks=()))
    assert "<h2>Charts</h2>" not in text
    assert "<h2>Remarks</h2>" not in text
    assert "Medians of" not in text  # each figure was measured once
