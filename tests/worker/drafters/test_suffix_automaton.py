from __future__ import annotations

from collections import Counter

import pytest
from helpers.tiers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvik.worker.drafters.suffix import SEPARATOR, SuffixAutomaton

texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def automaton_of(*tokens: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for token in tokens:
        automaton.append(token)
    return automaton


def stands_in(text: list[int], run: list[int]) -> bool:
    return any(text[i : i + len(run)] == run for i in range(len(text) - len(run) + 1))


def followers(text: list[int], run: list[int]) -> Counter[int]:
    n = len(run)
    return Counter(text[i + n] for i in range(len(text) - n) if text[i : i + n] == run)


@settings(max_examples=examples(150))
@given(texts)
def test_the_repeated_suffix_is_the_longest_one(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for i, token in enumerate(text):
        automaton.append(token)
        known = text[: i + 1]
        lengths = (n for n in range(i + 1) if stands_in(known[:-1], known[len(known) - n :]))
        assert automaton.repeated[1] == max(lengths)


@settings(max_examples=examples(150))
@given(texts, texts)
def test_another_text_is_followed_by_its_longest_suffix(text: list[int], read: list[int]) -> None:
    automaton = automaton_of(*text)
    state, length = 0, 0
    for i, token in enumerate(read):
        state, length = automaton.advance(state, length, [token])
        known = read[: i + 1]
        lengths = (n for n in range(i + 2) if stands_in(text, known[len(known) - n :]))
        assert length == max(lengths)
    assert automaton.advance(0, 0, read) == (state, length)


@settings(max_examples=examples(150))
@given(texts, texts, st.floats(0.05, 1.0))
def test_continuations_are_the_most_frequent_ones(
    text: list[int], read: list[int], least: float
) -> None:
    automaton = automaton_of(*text)
    state, length = automaton.advance(0, 0, read)
    found = automaton.continuation(state, 6, least)
    run = read[len(read) - length :]
    likely, score = 1.0, 0.0
    expected: list[int] = []
    for token in found.tokens:
        counts = followers(text, run)
        while not counts:  # the end of the text: the longest suffix that something followed
            run = run[1:]
            counts = followers(text, run)
        assert counts[token] == max(counts.values())
        likely *= counts[token] / counts.total()
        assert likely >= least - 1e-9
        score += likely
        run = [*run, token]
        expected.append(token)
    assert found.score == pytest.approx(score)
    if len(expected) < 6 and length:
        counts = followers(text, run)
        while run and not counts:
            run = run[1:]
            counts = followers(text, run)
        assert not run or likely * max(counts.values()) / counts.total() < least + 1e-9


def test_texts_end_at_their_separators() -> None:
    automaton = automaton_of(1, 2, 3, SEPARATOR, 4, 1, 2, SEPARATOR, 7)
    state, length = automaton.advance(0, 0, [4, 1])
    assert length == 2 and automaton.continuation(state, 5, 0.1).tokens == [2]


def test_unseen_tokens_have_no_continuation() -> None:
    automaton = automaton_of(1, 2, 3)
    assert automaton.advance(0, 0, [1, 9]) == (0, 0)
    assert automaton.continuation(0, 5, 0.1).tokens == []
    assert SuffixAutomaton().repeated == (0, 0)


def test_a_text_of_one_token_stays_cheap_and_right() -> None:
    automaton = automaton_of(*[7] * 500)
    state, length = automaton.repeated
    assert length == 499 and automaton.continuation(state, 8, 0.9).tokens == [7] * 8
