"""A result keeps every value, and survives its file."""

from __future__ import annotations

import json

import pytest
from helpers.bench_results import sample_result

from kvik.errors import KvikError
from kvik_bench.report.result import Figure, Result


def test_json_and_back() -> None:
    result = sample_result()
    assert Result.from_json(result.to_json()) == result


def test_medians_stand_in_the_file() -> None:
    figure = json.loads(sample_result().to_json())["rows"][1]["figures"][1]
    assert figure["name"] == "TTFT p50"
    assert figure["values"] == pytest.approx([81, 89.1, 72.9])
    assert (figure["median"], figure["low"], figure["high"]) == pytest.approx((81, 72.9, 89.1))


def test_the_median_of_an_even_number_lies_between() -> None:
    assert Figure("x", "", (1.0, 2.0, 10.0, 4.0)).median == 3.0


@pytest.mark.parametrize("text", ["", "[]", '{"kind": 1}', "{", '{"kind": "x"}'])
def test_what_is_no_result_is_refused(text: str) -> None:
    with pytest.raises(KvikError, match="result"):
        Result.from_json(text)


def test_names_come_once_in_order() -> None:
    assert list(sample_result().names()) == ["batch", "TTFT p50", "output"]
