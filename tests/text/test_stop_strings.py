"""Streamed matching agrees with a plain scan of the whole text."""

from __future__ import annotations

from helpers.tiers import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvik.text.detokenizer import StopStrings, StopTable

seeded = settings(max_examples=examples(500), suppress_health_check=[HealthCheck.too_slow])
letters = st.text(alphabet="abé🦊", max_size=40)
stops = st.lists(st.text(alphabet="abé🦊", min_size=1, max_size=6), max_size=5)


def naive(stop: list[str], text: str) -> tuple[int, str] | None:
    """Return the end and the string of the first match: smallest end, then longest."""
    ends = [(end, s) for end in range(len(text) + 1) for s in stop if text[:end].endswith(s)]
    return min(ends, key=lambda match: (match[0], -len(match[1])), default=None)


def possible_start(stop: list[str], text: str) -> str:
    """Return the longest suffix of the text with which a stop string begins."""
    ends = (text[i:] for i in range(len(text) + 1))
    return next(end for end in ends if any(s.startswith(end) for s in [*stop, ""]))


@seeded
@given(
    stop=stops,
    text=letters,
    include=st.booleans(),
    steps=st.lists(st.integers(0, 9), min_size=1, max_size=8),
)
@example(stop=["aab"], text="aaab", include=True, steps=[1] * 4)
@example(stop=["abab", "ba"], text="aabab", include=True, steps=[1] * 5)
@example(stop=["b", "ab"], text="ab", include=True, steps=[1] * 2)
@example(stop=["abc", "b"], text="ab", include=True, steps=[1] * 2)
def test_agrees_with_a_scan_of_the_whole_text(
    stop: list[str], text: str, include: bool, steps: list[int]
) -> None:
    watcher = StopStrings(StopTable(stop), include)
    expected = naive(stop, text)
    shown, done, found = "", 0, None
    for step in [*steps, len(text)]:
        released, found = watcher.push(text[done : done + step])
        done = min(done + step, len(text))
        shown += released
        if found is None:  # all is shown except a possible match
            assert shown + possible_start(stop, text[:done]) == text[:done]
        else:
            break
    if expected is None:
        assert found is None
        assert shown + watcher.flush() == text
    else:
        end, match = expected
        assert found == match
        assert shown == text[: end if include else end - len(match)]
        assert watcher.push(text) == ("", match)
        assert watcher.flush() == ""


def test_outputs_that_share_a_table_are_independent() -> None:
    table = StopTable(("END",))
    one, other = StopStrings(table, include=False), StopStrings(table, include=False)
    assert one.push("so EN") == ("so ", None)
    assert other.push("D") == ("D", None)
    assert one.push("D") == ("", "END")
    assert other.push("E") == ("", None)
