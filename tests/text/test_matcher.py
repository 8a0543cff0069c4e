"""The tokens that may come next: for every kind of tokenizer, after drafts, and at the end."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from threading import Semaphore
from unittest.mock import Mock

import pytest
from helpers.grammars import STOP, UNKNOWN, allowed, matcher, structure, tokens_of
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from kvik.core.structured import CHECKED, Constraint
from kvik.errors import ParamError
from kvik.text import grammar
from kvik.text import matcher as text_matcher
from kvik.text.grammar import GrammarVocabulary, TokenBytes, translate
from kvik.text.matcher import BuiltGrammars, GrammarMatcher
from kvik.text.tokenizer import Tokenizer

TEXTS = [" naïve café", "日本語のテキスト", "two  spaces", "Привет, мир!", "\n\tand a tab", "🦊"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": TEXTS}, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["byte-level", "llama2", "gemma", "metaspace"])
def tokenizer(request: pytest.FixtureRequest, build: Callable[[str], Library]) -> Tokenizer:
    return Tokenizer(build(request.param))


def grammars(tokenizer: Tokenizer | None) -> BuiltGrammars:
    size = 0 if tokenizer is None else tokenizer.vocab_size
    return BuiltGrammars(lambda: tokenizer, size + 40)


def checked(value: object, tokenizer: Tokenizer) -> Constraint:
    vocabulary = GrammarVocabulary(TokenBytes.of(tokenizer, tokenizer.vocab_size))
    return Constraint(CHECKED, translate(structure(value), vocabulary)[0])


@pytest.mark.parametrize("value", [{"choice": TEXTS}, {"json": PERSON}], ids=["choice", "json"])
def test_every_tokenizer_spells_allowed_texts(tokenizer: Tokenizer, value: dict) -> None:
    constraint, built = checked(value, tokenizer), grammars(tokenizer)
    size = tokenizer.vocab_size + 40
    stop = tokenizer.library.token_to_id("</s>") or 0
    for seed in range(12):
        dice = random.Random(seed)
        one, output = built.matcher(constraint, [stop]), []
        while not one.ended:
            choice = tokens_of(one, size)
            assert choice and max(choice) < tokenizer.vocab_size
            output.append(dice.choice(choice))
            one.append(output[-1])
        text = b"".join(map(tokenizer.token_bytes, output)).decode()
        if "choice" in value:
            assert text in TEXTS
        else:
            assert set(json.loads(text)) == {"name", "tags"}
            assert text == json.dumps(json.loads(text), ensure_ascii=False) or "\\u" in text
        stream = tokenizer.new_stream(tokenizer.encode("a"))
        assert stream.push(output) + stream.flush() == text


def test_forced_text_is_spelt_as_by_the_tokenizer(tokenizer: Tokenizer) -> None:
    text = "it didn't know the sea"
    one = grammars(tokenizer).matcher(checked({"choice": [text + "!"]}, tokenizer), [])
    forced = one.forced()
    assert tokenizer.decode(forced).strip() == text + "!"
    inside = tokenizer.encode("\n" + text + "!", add_special_tokens=False)
    assert inside[-len(forced) + 1 :] == forced[1:]
    size = tokenizer.vocab_size + 40
    for token in forced:
        assert tokens_of(one, size) == [token]
        one.append(token)
    assert one.ended and one.forced() == []


def test_a_text_is_spelt_by_tokens_of_its_own() -> None:
    """Not by the rest of a token that joins its start with any character before it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(char, "{") for char in alphabet]
    names = [*alphabet, *(char + "{" for char in alphabet)]
    library = Library(models.BPE({name: i for i, name in enumerate(names)}, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    joining = Tokenizer(library)
    one = grammars(joining).matcher(checked({"choice": ["{a", "{b"]}, joining), [])
    (token,) = tokens_of(one, joining.vocab_size)
    assert joining.token_bytes(token) == b"{"
    one.append(token)


def test_supposed_tokens_count_as_appended() -> None:
    value = {"json": PERSON}
    text = json.dumps({"name": "Ann", "tags": TEXTS[:2]}, ensure_ascii=False).encode()
    one = matcher(value)
    for start in range(len(text) - 4):
        for count in range(4):
            expected = allowed(matcher(value, text[: start + count]))
            assert allowed(one, text[start : start + count]) == expected, (start, count)
        assert one.valid(list(text[start : start + 4])) == 4
        assert one.valid([text[start], STOP, 7]) == 1
        one.append(text[start])


def test_rows_after_a_wrong_draft_do_not_matter() -> None:
    one = matcher({"choice": ["yes"]})
    everything = set(range(UNKNOWN + 1))
    assert allowed(one, b"n") >= everything and allowed(one, b"yes") >= everything
    assert allowed(one) == {ord("y")}


@pytest.mark.parametrize(
    ("value", "text", "may_end", "ended"),
    [
        ({"regex": "a{2,3}"}, b"a", False, False),
        ({"regex": "a{2,3}"}, b"aa", True, False),
        ({"regex": "a{2,3}"}, b"aaa", True, True),
        ({"json": {"type": "integer"}}, b"12", True, False),
        ({"json": {"type": "object"}}, b"{", False, False),
        ({"json": {"type": "object"}}, b"{}", True, True),
        ({"choice": ["a", "ab"]}, b"a", True, False),
    ],
)
def test_an_answer_may_end_where_the_grammar_does(
    value: dict, text: bytes, may_end: bool, ended: bool
) -> None:
    one = matcher(value, text)
    assert one.ended == ended
    if not ended:
        assert (STOP in allowed(one)) == may_end
        assert UNKNOWN not in allowed(one)
    if may_end:
        one.append(STOP)
        one.append(ord("x"))
        assert one.ended and one.num_surplus == (2 if ended else 1)


def test_a_stop_id_of_the_caller_ends_an_answer_where_it_may_end() -> None:
    """Although it has a text that the grammar would allow."""
    start = matcher({"regex": "ab(ab)*"})
    one = GrammarMatcher(start._matcher, 258, [ord("a"), STOP])
    assert allowed(one) == set()  # no answer begins with its end
    one = GrammarMatcher(matcher({"regex": "b(ab)*"})._matcher, 258, [ord("a"), STOP])
    one.append(ord("b"))
    assert allowed(one) == {ord("a"), STOP}
    one.append(ord("a"))
    assert one.ended


def test_a_token_that_breaks_the_grammar_is_an_error() -> None:
    with pytest.raises(ValueError, match="the grammar cannot continue"):
        matcher({"choice": ["yes"]}).append(ord("n"))
    with pytest.raises(ValueError, match="the grammar cannot continue"):
        matcher({"choice": ["yes"]}, b"no")


def test_a_grammar_that_grows_too_complex_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "LIMITS", {**grammar.LIMITS, "max_lexer_states": 30})
    small = GrammarVocabulary(TokenBytes([bytes([i]) for i in range(256)], []))
    start = small.build(translate(structure({"regex": "(a|b)*a(a|b){60}"}), small)[0])
    one, dice = GrammarMatcher(start, small.stop, []), random.Random(0)
    with pytest.raises(ValueError, match="the grammar cannot continue: .*too complex|.*states"):
        for _ in range(2000):
            one.append(dice.choice(tokens_of(one, 256)))


def test_grammars_are_built_once_and_kept(tokenizer: Tokenizer) -> None:
    loads: list[int] = []

    def load() -> Tokenizer:
        loads.append(1)
        return tokenizer

    built, size = BuiltGrammars(load, tokenizer.vocab_size), tokenizer.vocab_size
    constraint = checked({"choice": TEXTS}, tokenizer)
    assert built.begin(constraint).result(30) is built.begin(constraint).result(30)
    first, second = built.matcher(constraint, []), built.matcher(constraint, [])
    expected = tokens_of(second, size)
    first.append(expected[0])
    assert tokens_of(second, size) == expected != tokens_of(first, size)
    assert loads == [1]


def test_what_the_first_grammar_needs_is_prepared(tokenizer: Tokenizer) -> None:
    loads = Semaphore(0)

    def load() -> Tokenizer:
        loads.release()
        return tokenizer

    built = BuiltGrammars(load, tokenizer.vocab_size)
    built.prepare()
    assert loads.acquire(timeout=30)
    constraint = checked({"regex": "a"}, tokenizer)
    assert built.matcher(constraint, []) and not loads.acquire(blocking=False)
    hopeless = grammars(None)
    hopeless.prepare()
    with pytest.raises(ParamError, match="needs a tokenizer"):
        hopeless.matcher(constraint, [])


def test_an_engine_starts_without_a_thread_for_grammars(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, constraint = grammars(tokenizer), checked({"regex": "a"}, tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("no new thread")))
        built.prepare()
        with pytest.raises(RuntimeError, match="no new thread"):
            built.begin(constraint)
    assert built.begin(constraint).result(30)


def test_a_grammar_asked_for_again_outlives_others(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests wait between the question and their start, where building would delay a step."""
    monkeypatch.setattr(text_matcher, "MAX_BUILT_BYTES", int(2.5 * text_matcher.BYTES_OF_EACH))
    built, builds = grammars(tokenizer), list[str]()
    build = GrammarVocabulary.build
    monkeypatch.setattr(
        GrammarVocabulary, "build", lambda of, text: builds.append(text) or build(of, text)
    )
    first, second, third = (
        Constraint(CHECKED, f'start: "{name}"') for name in ("first", "second", "third")
    )
    for constraint in (first, second, first, third):
        built.begin(constraint).result(30)
    built.matcher(first, [])
    assert builds == [first.source, second.source, third.source]


def test_errors_of_a_build_reach_the_caller(tokenizer: Tokenizer) -> None:
    with pytest.raises(ParamError, match="needs a tokenizer"):
        grammars(None).begin(checked({"regex": "a"}, tokenizer)).result(30)
    with pytest.raises(ParamError):
        grammars(tokenizer).begin(Constraint(CHECKED, "{}")).result(30)
