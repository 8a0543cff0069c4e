from __future__ import annotations

from pathlib import Path
from statistics import fmean, median, pstdev

import pytest

from kvik.errors import ParamError
from kvik_bench.load.arrivals import TraceRow
from kvik_bench.load.lengths import DrawnLengths, Length, TraceLengths, parse_length
from kvik_bench.load.words import WORDS
from kvik_bench.load.workload import (
    Conversation,
    RandomWorkload,
    TextWorkload,
    TokenFiller,
    Turn,
    WordFiller,
    Workload,
    read_texts,
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


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "1.5", "a", "6..3", "0..4", "3..", "normal:5", "normal:0:1",
             "normal:5:-1", "lognormal:nan:1", "lognormal:5:nan", "normal:inf:1", "1:2",
             "uniform:1:2", "99999999999"]
)  # fmt: skip
def test_lengths_that_are_none(text: str) -> None:
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
    """A load is to be repeatable with a later version of kvik, numpy and Python."""
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


def test_a_conversation_repeats_what_was_said() -> None:
    turns = (Turn("one", 1, 5), Turn("two", 2, 6), Turn("three", 3, 7))
    conversation = Conversation(turns, Turn("be brief", 10, 0))
    first, second = conversation.request([]), conversation.request(["A"])
    assert first.messages == (("system", "be brief"), ("user", "one"))
    assert (first.prompt_tokens, first.output_tokens) == (11, 5)
    assert second.messages == (
        ("system", "be brief"), ("user", "one"), ("assistant", "A"), ("user", "two")
    )  # fmt: skip
    assert (second.prompt_tokens, second.output_tokens) == (10 + 1 + 5 + 2, 6)
    third = conversation.request(["A", "B"])
    assert third.messages[: len(second.messages)] == second.messages  # a prefix cache's delight
    assert conversation.first(2).turns == turns[:2]


def test_turns_differ() -> None:
    conversation = random_workload(turns=3).conversation(0)
    assert len({turn.content for turn in conversation.turns}) == 3


def test_texts_come_in_their_order() -> None:
    workload: Workload = TextWorkload(["a b", "c", "d"], FIVE, "0", turns=2)
    contents = [turn.content for i in range(2) for turn in workload.conversation(i).turns]
    assert contents == ["a b", "c", "d", "a b"]
    assert workload.conversation(0).request(()).prompt_tokens == 2


def test_texts_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hello there\n\n  Größe 漢字\n")
    assert read_texts(tmp_path / "a.txt") == ["Hello there", "  Größe 漢字"]
    (tmp_path / "a.jsonl").write_text('{"prompt": "two\\nlines", "x": 1}\n{"prompt": "b"}\n')
    assert read_texts(tmp_path / "a.jsonl") == ["two\nlines", "b"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"\n \n", "has no prompts"),
        ("a.txt", b"\xff", "must be UTF-8"),
        ("a.jsonl", b"[]", "must be objects"),
        ("a.jsonl", b"{}", "must be objects"),
        ("a.jsonl", b'{"prompt": 3}', "must be objects"),
        ("a.jsonl", b"Hello", "must be objects"),
        ("a.jsonl", b"[" * 100_000, "must be objects"),
    ],
)
def test_texts_that_are_none(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ParamError, match=message):
        read_texts(tmp_path / name)
    with pytest.raises(ParamError, match="cannot be read"):
        read_texts(tmp_path / "none")
