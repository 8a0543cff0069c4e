from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from kvik.errors import ParamError
from kvik_bench.load.arrivals import bursts, constant, poisson, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def between(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *times])]


def test_constant() -> None:
    assert list(islice(constant(4.0), 4)) == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_poisson_gaps_are_exponential(seed: str) -> None:
    gaps = between(list(islice(poisson(5.0, seed), 20_000)))
    # mean and deviation of an exponential are both 1/rate; four standard errors of room
    assert fmean(gaps) == pytest.approx(0.2, rel=4 / 20_000**0.5)
    assert pstdev(gaps) == pytest.approx(0.2, rel=0.05)
    # and its tail: P(gap > t) = exp(-rate t)
    for t, share in ((0.2, 0.3679), (0.4, 0.1353), (0.6, 0.0498)):
        assert sum(gap > t for gap in gaps) / 20_000 == pytest.approx(share, abs=0.014)
    # gaps know nothing of each other
    mean = fmean(gaps)
    covariance = fmean((a - mean) * (b - mean) for a, b in pairwise(gaps))
    assert abs(covariance) / 0.04 < 4 / 20_000**0.5


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 2.0])
def test_bursts_keep_the_rate_and_have_their_variation(burstiness: float) -> None:
    gaps = between(list(islice(bursts(5.0, burstiness, "a"), 40_000)))
    assert fmean(gaps) == pytest.approx(0.2, rel=4 * burstiness / 200)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(burstiness, rel=0.1)


def test_seeds() -> None:
    def first(seed: str) -> list[float]:
        return list(islice(poisson(1.0, seed), 5))

    assert first("a") == first("a") != first("b")
    assert list(islice(bursts(1.0, 2.0, "a"), 5)) == list(islice(bursts(1.0, 2.0, "a"), 5))
    # These numbers must not change: a load is to be repeatable with a later version.
    assert first("0") == pytest.approx(
        [0.448931968, 2.820944066, 3.271749358, 6.205327234, 6.309510582]
    )


def trace(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


ROWS = (
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.0319600,3180,8\n"
    "2023-11-16 18:17:04.0781490,110,27\n"
)


def test_a_trace_is_read(tmp_path: Path) -> None:
    rows = read_trace(trace(tmp_path, HEADER + ROWS))
    assert [row.offset for row in rows] == pytest.approx([0.0, 0.052, 0.098189])
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [
        (4808, 10), (3180, 8), (110, 27)
    ]  # fmt: skip


def test_a_trace_is_sped_up_and_cut(tmp_path: Path) -> None:
    rows = read_trace(trace(tmp_path, HEADER + ROWS), speed=2.0, limit=2)
    assert [row.offset for row in rows] == pytest.approx([0.0, 0.026])


def test_seconds_without_a_fraction_and_line_ends_of_windows(tmp_path: Path) -> None:
    text = (HEADER + "2023-11-16 18:17:03,1,1\n2023-11-17 18:17:03,2,2").replace("\n", "\r\n")
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert [row.offset for row in read_trace(path)] == [0.0, 86400.0]


def test_times_with_a_zone_and_without_a_fraction(tmp_path: Path) -> None:
    """As in Azure's traces of 2024, where a time on the full second has no fraction."""
    text = "2024-05-10 00:00:00.009930+00:00,1,1\n2024-05-10 00:00:01+00:00,2,2\n"
    rows = read_trace(trace(tmp_path, HEADER + text + "2024-05-10 02:00:02.5+02:00,3,3\n"))
    assert [row.offset for row in rows] == pytest.approx([0.0, 0.99007, 2.49007])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must begin with the line"),
        ("a,b,c\n" + ROWS, "must begin with the line"),
        (HEADER, "has no rows"),
        (HEADER + "yesterday,1,1\n", "line 2 is not understood"),
        (HEADER + ROWS + "2023-11-16 18:17:05,1\n", "line 5 is not understood"),
        (HEADER + "2023-11-16 18:17:05,-1,5\n", "line 2 is not understood"),
        (HEADER + "2023-11-16 18:17:05,1,0\n", "line 2 is not understood"),
        (HEADER + "2023-11-16 18:17:05,1,1.5\n", "line 2 is not understood"),
        (HEADER + ROWS + ROWS, "must be sorted"),
    ],
)
def test_a_trace_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        read_trace(trace(tmp_path, text))


def test_a_trace_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ParamError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ParamError, match="must be a csv file"):
        read_trace(tmp_path / "binary")
