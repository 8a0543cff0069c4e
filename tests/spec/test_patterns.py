"""Regular expressions in bounded time: they match what those of Python match."""

from __future__ import annotations

import re

from helpers.tiers import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvik.spec.patterns import Matcher

ATOMS = [*"ab1.$^", r"\.", r"\d", r"\w", r"\b", "[ab]", "[^a]", "[]a-]", "{}", "{1x", r"\{"]
QUANTIFIERS = ["*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{,2}", "{1,}", "{,}"]


def larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Return patterns made of smaller ones."""
    groups = st.sampled_from(["(", "(?:", "(?=", "(?!", "(?P<name>"])
    return st.one_of(
        st.builds("{}{}".format, inner, inner),
        st.builds("{}|{}".format, inner, inner),
        st.builds("{}{})".format, groups, inner),
        st.builds("(?:{}){}".format, inner, st.sampled_from(QUANTIFIERS)),
        st.builds("(?<{}{})".format, st.sampled_from("=!"), st.sampled_from(ATOMS)),
    )


@given(
    st.recursive(st.sampled_from(ATOMS), larger, max_leaves=12),
    st.lists(st.text("ab.1{}", max_size=8), min_size=3, max_size=5),
)
@settings(max_examples=examples(500))
def test_patterns_match_as_in_python(pattern: str, texts: list[str]) -> None:
    try:
        expected = [text for text in texts if re.match(pattern, text)]
    except re.error:
        assume(False)
    assert Matcher().matching(pattern, texts) == expected
