"""The process that checks constraints: refusals, robustness, and its cache."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from helpers.grammars import structure

from kvik import SamplingParams
from kvik.config.model_source import BUNDLED
from kvik.core.structured import CHECKED
from kvik.errors import ParamError
from kvik.text import grammar_check
from kvik.text.grammar_check import TOO_COMPLEX, GrammarCheck
from kvik.text.tokenizer import Tokenizer

REFERENCES = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(2000)}
NESTED: object = {"type": "integer"}
for _ in range(11):
    NESTED = {"oneOf": [{"type": "object", "properties": {"k": NESTED}}, NESTED]}
# Constraints that take much time, memory or stack to build.
HOSTILE = {
    "a chain of references": {"json": {"$defs": {**REFERENCES, "d2000": {}}, "$ref": "#/$defs/d0"}},
    "optional properties": {
        "json": {"properties": {f"p{i}": {"type": "string"} for i in range(5000)}}
    },
    "nested oneOf": {"json": NESTED},
    "repetitions of repetitions": {"regex": "(a{1,1000}){1,1000}"},
    "deep groups": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "a deep grammar": {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
}

# The process; the first one dies when it is asked.
DIES_ONCE = """
import os, runpy, sys
from kvik.text.limited_process import serve
if os.path.exists(sys.argv[1]):
    runpy.run_module("kvik.text.grammar_check", run_name="__main__")
open(sys.argv[1], "w").close()
serve(lambda body: lambda body: os._exit(1), max_memory=1 << 30)
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED)


@pytest.fixture
def check(tokenizer: Tokenizer) -> Iterator[GrammarCheck]:
    one = GrammarCheck(tokenizer, seconds=1.0)
    yield one
    one.close()


def params(value: object, **others: object) -> SamplingParams:
    return SamplingParams(structured=structure(value), **others)


def test_a_checked_text_ends_where_its_grammar_does(check: GrammarCheck) -> None:
    given = params({"regex": "a+"}, min_tokens=5, ignore_eos=True, temperature=0.5)
    found, unenforced = check.checked(given)
    assert found.structured.kind == CHECKED
    assert (found.min_tokens, found.ignore_eos, found.temperature) == (0, False, 0.5)
    assert unenforced == () and check.checked(found) == (found, ())
    free = SamplingParams(min_tokens=5)
    assert check.checked(free) == (free, ())


def test_known_constraints_are_not_checked_again(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [{"json": {"format": f"f{i}"}} for i in range(4)]
    first = [check.checked(params(value)) for value in values]
    assert first[0][1] == ("format f0 at /",)
    os.kill(check.process.pid, signal.SIGSTOP)
    assert all(check.knows(params(value)) for value in values)
    assert [check.checked(params(value)) for value in values] == first
    os.kill(check.process.pid, signal.SIGCONT)
    monkeypatch.setattr(grammar_check, "MAX_CACHED_BYTES", 2600)
    check.checked(params({"regex": "new"}))
    assert [check.knows(params(value)) for value in values] == [False, False, False, True]


def test_errors_name_the_field_of_the_caller(check: GrammarCheck) -> None:
    for _ in range(2):  # also from the cache
        with pytest.raises(ParamError, match="^response_format: .*invalid regex"):
            check.checked(
                SamplingParams(structured=structure({"regex": "("}).called("response_format"))
            )


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_are_refused_in_time(check: GrammarCheck, name: str) -> None:
    check.checked(params({"regex": "a"}))  # the process has started
    start = time.monotonic()
    try:
        check.checked(params(HOSTILE[name]))
    except ParamError as error:
        assert error.code in ("", TOO_COMPLEX)
    assert time.monotonic() - start < 20
    assert check.checked(params({"regex": "b"}))


def test_a_timeout_has_a_code(tokenizer: Tokenizer) -> None:
    check = GrammarCheck(tokenizer, seconds=0.001)
    try:
        with pytest.raises(ParamError, match=r"is too complex: .* more than 0\.001 s") as caught:
            check.checked(params({"json": {"properties": {f"p{i}": {} for i in range(2000)}}}))
        assert caught.value.code == TOO_COMPLEX
    finally:
        check.close()


def test_a_process_that_dies_is_replaced(check: GrammarCheck, tokenizer: Tokenizer) -> None:
    check.checked(params({"regex": "a"}))
    os.kill(check.process.pid, signal.SIGKILL)
    assert check.checked(params({"regex": "b"}))
    mortal = GrammarCheck(
        tokenizer, command=(sys.executable, "-c", "import sys; sys.stdin.read(9)")
    )
    try:
        with pytest.raises(ParamError, match="is too complex: .* too much memory or stack"):
            mortal.checked(params({"regex": "a"}))
    finally:
        mortal.close()


@pytest.mark.full
@pytest.mark.parametrize("held", [True, False])
def test_a_lost_process_is_held_against_a_constraint_for_a_while(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    if not held:
        monkeypatch.setattr(grammar_check, "BLAMED_SECONDS", -1.0)
    check = GrammarCheck(tokenizer, command=[sys.executable, "-c", DIES_ONCE, str(tmp_path / "a")])
    regex = params({"regex": "a"})
    with closing(check):
        with pytest.raises(ParamError) as caught:
            check.checked(regex)
        assert caught.value.code == TOO_COMPLEX
        assert check.knows(regex) == held
        if held:
            with pytest.raises(ParamError):
                check.checked(regex)
        else:
            assert check.checked(regex)[0].structured.kind == CHECKED
            assert check.knows(regex)


def test_a_process_that_was_stopped_is_replaced(check: GrammarCheck) -> None:
    check.checked(params({"regex": "a"}))
    first = check.process.pid
    os.kill(first, signal.SIGSTOP)
    assert check.checked(params({"regex": "b"}))
    assert check.process.pid not in (None, first)


def test_without_the_library_only_the_field_is_refused(
    check: GrammarCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ParamError, match=r"structured: needs llguidance .*pip install"):
        check.checked(params({"regex": "a"}))
    assert check.checked(SamplingParams())


def test_a_closed_check_refuses(check: GrammarCheck) -> None:
    check.close()
    with pytest.raises(RuntimeError, match="closed"):
        check.checked(params({"regex": "a"}))
