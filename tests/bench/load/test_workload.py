"""Workloads: lengths, texts, arrivals and traces."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, median, pstdev

import pytest

from kvik.errors import ParamError
from kvik_bench.load.workload import (
    WORDS,
    DrawnLengths,
    Length,
    LoadConversation,
    LoadTurn,
    LoadWorkload,
    RandomWorkload,
    TextWorkload,
    TokenFiller,
    TraceLengths,
    TraceRow,
    WordFiller,
    bursts,
    constant,
    parse_length,
    poisson,
    read_texts,
    read_trace,
)

TEN, FIVE = Length("fixed", 10), Length("fixed", 5)
TOKENS, TEXT = TokenFiller(5000), WordFiller()


def random_workload(seed: str = "0", filler: object = TEXT, **others: int) -> RandomWorkload:
    return RandomWorkload(DrawnLengths(TEN, FIVE, seed), filler, seed, **others)


def draws(text: str) -> list[int]:
    lengths = DrawnLengths(parse_length("x", text), FIVE, "0")
    return [lengths.of(i, 0)[0] for i in range(4000)]


def test_fixed_and_uniform_lengths() -> None:
    assert set(draws("512")) == {512}
    assert set(draws("3..6")) == {3, 4, 5, 6}
    assert fmean(draws("3..6")) == pytest.approx(4.5, abs=0.1)


def test_normal_and_lognormal_lengths() -> None:
    normal = draws("normal:500:50")
    assert fmean(normal) == pytest.approx(500, abs=4)
    assert pstdev(normal) == pytest.approx(50, rel=0.06)
    lognormal = draws("lognormal:500:0.5")
    assert median(lognormal) == pytest.approx(500, rel=0.05)
    assert fmean(lognormal) == pytest.approx(500 * 2.718281828 ** (0.5**2 / 2), rel=0.05)
    assert min(draws("normal:1:50")) == 1


def test_lengths_depend_on_the_number_alone() -> None:
    lengths = DrawnLengths(parse_length("x", "1..1000"), parse_length("x", "1..1000"), "7")
    assert [lengths.of(i, 0) for i in (5, 3)] == [lengths.of(3, 0), lengths.of(5, 0)][::-1]
    assert len({lengths.of(i, t) for i in range(10) for t in range(2)}) == 20


def test_lengths_of_a_trace() -> None:
    lengths = TraceLengths([TraceRow(0.0, 4, 7), TraceRow(1.0, 5, 8)])
    assert [lengths.of(i, 0) for i in (0, 1, 2)] == [(4, 7), (5, 8), (4, 7)]


def test_invalid_lengths() -> None:
    for text in (
        *("", "0", "-3", "1.5", "a", "6..3", "0..4", "3..", "normal:5", "normal:0:1"),
        *("normal:5:-1", "lognormal:nan:1", "lognormal:5:nan", "normal:inf:1", "1:2"),
        *("uniform:1:2", "99999999999"),
    ):
        with pytest.raises(ParamError, match="prompt_tokens: must be like 512"):
            parse_length("prompt_tokens", text)


@pytest.mark.parametrize("filler", [TOKENS, TEXT])
def test_the_same_seed_makes_the_same_requests(filler: object) -> None:
    def requests(seed: str, order: range) -> dict[int, object]:
        workload = random_workload(seed, filler, prefix_tokens=4, prefixes=3)
        return {i: workload.conversation(i).request(()) for i in order}

    assert requests("0", range(8)) == requests("0", range(7, -1, -1))
    assert requests("0", range(8)) != requests("1", range(8))
    contents = [str(r.messages) for r in requests("0", range(16)).values()]
    assert len(set(contents)) == 16


def test_these_requests_must_not_change() -> None:
    """A load must be repeatable with later versions of kvik, numpy and Python."""
    assert TokenFiller(32000).fill(6, "a") == [12784, 3406, 3736, 27929, 4822, 11475]
    assert WordFiller().fill(6, "a") == "smile picture few question move white"
    lengths = DrawnLengths(parse_length("x", "lognormal:500:0.5"), TEN, "0")
    assert [lengths.of(i, 0)[0] for i in range(3)] == [427, 278, 749]


def test_random_ids() -> None:
    ids = TokenFiller(5000).fill(20_000, "a")
    assert len(ids) == 20_000 and min(ids) >= 1000 and max(ids) < 5000
    assert fmean(ids) == pytest.approx(3000, rel=0.02)
    few = TokenFiller(20, frozenset({12, 19})).fill(200, "a")
    assert set(few) == {10, 11, *range(13, 19)}
    assert set(TokenFiller(1).fill(3, "a")) == {0}


def test_random_words() -> None:
    words = TEXT.fill(20_000, "a").split(" ")
    assert len(words) == 20_000 and set(words) == set(WORDS)
    assert len(set(WORDS)) == len(WORDS)
    assert all(word.isascii() and word.isalpha() for word in WORDS)


def test_prompts_share_prefixes() -> None:
    workload = random_workload(filler=TOKENS, prefix_tokens=20, prefixes=3)
    requests = [workload.conversation(i).request(()) for i in range(60)]
    prefixes = [tuple(request.messages[0][1]) for request in requests]
    assert {len(prefix) for prefix in prefixes} == {20}
    assert len(set(prefixes)) == 3
    assert all(prefixes.count(prefix) > 8 for prefix in set(prefixes))
    assert {request.prompt_tokens for request in requests} == {30}
    assert {request.messages[0][0] for request in requests} == {"system"}


def test_a_conversation_repeats_its_earlier_turns() -> None:
    turns = (LoadTurn("one", 1, 5), LoadTurn("two", 2, 6), LoadTurn("three", 3, 7))
    conversation = LoadConversation(turns, LoadTurn("be brief", 10, 0))
    first, second = conversation.request([]), conversation.request(["A"])
    assert first.messages == (("system", "be brief"), ("user", "one"))
    assert (first.prompt_tokens, first.output_tokens) == (11, 5)
    assert second.messages == (
        ("system", "be brief"), ("user", "one"), ("assistant", "A"), ("user", "two")
    )  # fmt: skip
    assert (second.prompt_tokens, second.output_tokens) == (10 + 1 + 5 + 2, 6)
    third = conversation.request(["A", "B"])
    assert third.messages[: len(second.messages)] == second.messages  # hits of the prefix cache
    assert conversation.first(2).turns == turns[:2]


def test_turns_differ() -> None:
    conversation = random_workload(turns=3).conversation(0)
    assert len({turn.content for turn in conversation.turns}) == 3


def test_texts_are_used_in_order() -> None:
    workload: LoadWorkload = TextWorkload(["a b", "c", "d"], FIVE, "0", turns=2)
    contents = [turn.content for i in range(2) for turn in workload.conversation(i).turns]
    assert contents == ["a b", "c", "d", "a b"]
    assert workload.conversation(0).request(()).prompt_tokens == 2


def test_texts_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hello there\n\n  Größe 漢字\n")
    assert read_texts(tmp_path / "a.txt") == ["Hello there", "  Größe 漢字"]
    (tmp_path / "a.jsonl").write_text('{"prompt": "two\\nlines", "x": 1}\n{"prompt": "b"}\n')
    assert read_texts(tmp_path / "a.jsonl") == ["two\nlines", "b"]
    (tmp_path / "a.jsonl").write_text('\ufeff{"prompt": "A\u2028B"}\r\n', encoding="utf-8")
    assert read_texts(tmp_path / "a.jsonl") == ["A\u2028B"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"\n \n", "has no prompts"),
        ("a.txt", b"\xff", "must be UTF-8"),
        ("a.jsonl", b"[]", "must be objects"),
        ("a.jsonl", b'{"prompt": 3}', "must be objects"),
        ("a.jsonl", b"[" * 100_000, "must be objects"),
    ],
)
def test_invalid_texts(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ParamError, match=message):
        read_texts(tmp_path / name)
    with pytest.raises(ParamError, match="cannot be read"):
        read_texts(tmp_path / "none")


# Arrivals.


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def between(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *times])]


def test_constant() -> None:
    assert list(islice(constant(4.0), 4)) == [0.0, 0.25, 0.5, 0.75]


def test_poisson_gaps_are_exponential() -> None:
    gaps = between(list(islice(poisson(5.0, "0"), 20_000)))
    # Mean and deviation of an exponential are both 1/rate; allow four standard errors.
    assert fmean(gaps) == pytest.approx(0.2, rel=4 / 20_000**0.5)
    assert pstdev(gaps) == pytest.approx(0.2, rel=0.05)
    # And its tail: P(gap > t) = exp(-rate t).
    for t, share in ((0.2, 0.3679), (0.4, 0.1353), (0.6, 0.0498)):
        assert sum(gap > t for gap in gaps) / 20_000 == pytest.approx(share, abs=0.014)
    # Gaps are independent.
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
    # These numbers must not change, so that loads are repeatable with later versions.
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
    rows = read_trace(trace(tmp_path, HEADER + "\n" + ROWS), speed=2.0, limit=2)
    assert [row.offset for row in rows] == pytest.approx([0.0, 0.026])


def test_seconds_without_a_fraction_and_line_ends_of_windows(tmp_path: Path) -> None:
    text = (HEADER + "2023-11-16 18:17:03,1,1\n2023-11-17 18:17:03,2,2").replace("\n", "\r\n")
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert [row.offset for row in read_trace(path)] == [0.0, 86400.0]


def test_times_with_a_zone_and_without_a_fraction(tmp_path: Path) -> None:
    """As in Azure's traces of 2024, where times on a full second have no fraction."""
    text = "2024-05-10 00:00:00.009930+00:00,1,1\n2024-05-10 00:00:01+00:00,2,2\n"
    rows = read_trace(trace(tmp_path, HEADER + text + "2024-05-10 02:00:02.5+02:00,3,3\n"))
    assert [row.offset for row in rows] == pytest.approx([0.0, 0.99007, 2.49007])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must begin with the line"),
        ("a,b,c\n" + ROWS, "must begin with the line"),
        (HEADER, "has no rows"),
        (HEADER + "yesterday,1,1\n", "line 2 .*4194304"),
        (HEADER + ROWS + "2023-11-16 18:17:05,1\n", "line 5 .*4194304"),
        (HEADER + "2023-11-16 18:17:05,1,0\n", "line 2 .*4194304"),
        (HEADER + "2023-11-16 18:17:05,1,1.5\n", "line 2 .*4194304"),
        (HEADER + "2023-11-16 18:17:05,4194305,1\n", "line 2 .*4194304"),
        (HEADER + ROWS + ROWS, "must be sorted"),
    ],
)
def test_invalid_traces(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        read_trace(trace(tmp_path, text))


def test_a_trace_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ParamError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ParamError, match="must be a csv file"):
        read_trace(tmp_path / "binary")
