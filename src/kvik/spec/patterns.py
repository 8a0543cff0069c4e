"""Matches the regular expressions of a model's files in bounded time.

Python's `re` backtracks, and a pattern such as `(a+)+$` takes exponential time. Here each part of a
pattern maps the set of its possible starts to the set of its possible ends (Thompson 1968, Regular
expression search algorithm), so no path is followed twice. Parts without alternatives or
repetitions are left to `re`, because they cannot backtrack.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

MAX_STEPS = 4_000_000  # for all patterns of a model together: one to two seconds
PARSING_STEPS = 10  # for each character of a pattern

_TOKEN = re.compile(
    r"(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])"
    r"|(?P<open>\((?:\?(?::|=|!|<=|<!|P<\w+>))?)"
    r"|(?P<close>\))|(?P<or>\|)"
    r"|(?P<repeat>(?:[*+?]|\{(?!\})[0-9]*,?[0-9]*\})\??)"
    r"|(?P<escape>\\(?:[dDwWsSbBAZnrtfv]|[^A-Za-z0-9]))"
    r"|(?P<anchor>[.^$])|(?P<character>[^\\])",
    re.DOTALL,
)


class PatternError(Exception):
    """A pattern cannot be used; the message completes the sentence "PATTERN, which ..."."""


@dataclass(frozen=True, slots=True)
class _Choice:
    options: tuple[tuple[_Part, ...], ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    """Repetitions of a part."""

    part: _Part
    low: int
    high: int | None  # None: any number
    # Any number of repetitions, if the part is one character; else None.
    run: re.Pattern[str] | None


@dataclass(frozen=True, slots=True)
class _LookAround:
    """A lookahead or lookbehind; `positive`: positive, else negative."""

    part: _Part
    ahead: bool
    positive: bool


_Part = re.Pattern[str] | _Choice | _Repeat | _LookAround


class Matcher:
    """Matches patterns within a budget of steps."""

    def __init__(self) -> None:
        self._steps_left = MAX_STEPS

    def matching(self, pattern: str, texts: Iterable[str]) -> list[str]:
        """Return the texts that `re.match` would match.

        Raises:
            PatternError: the pattern is invalid, uses an unsupported construct, or takes too long.
        """
        self._spend(PARSING_STEPS * len(pattern))
        try:
            part = _parsed(pattern)
            for plain in _required(part):
                texts = [text for text in texts if plain.search(text)]
                self._spend(len(texts) // 8)
            return [text for text in texts if self._after(part, {0}, text)]
        except (re.error, OverflowError):
            raise PatternError("is not a regular expression") from None
        except RecursionError:
            raise PatternError("is nested too deeply") from None

    def _spend(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise PatternError("takes too long to match")

    def _after(self, part: _Part, starts: set[int], text: str) -> set[int]:
        """Return the possible ends of a part that begins at one of `starts`."""
        if isinstance(part, re.Pattern):
            return self._plain(part, starts, text)
        self._spend(1 + len(starts))
        if isinstance(part, _Choice):
            ends: set[int] = set()
            for option in part.options:
                reached = starts
                for inner in option:
                    reached = self._after(inner, reached, text) if reached else reached
                ends |= reached
            return ends
        if isinstance(part, _Repeat):
            return self._repeated(part, starts, text)
        if part.ahead:
            return {
                at for at in starts if bool(self._after(part.part, {at}, text)) == part.positive
            }
        behind = self._after(part.part, set(range(len(text) + 1)), text)
        return starts & behind if part.positive else starts - behind

    def _plain(self, part: re.Pattern[str], starts: set[int], text: str) -> set[int]:
        """Return the ends of plain text, which is searched for: there may be many starts."""
        ends, at, last = set(), min(starts, default=1), max(starts, default=0)
        while at <= last:
            self._spend(1)
            match = part.search(text, at)
            if match is None:
                break
            if match.start() in starts:
                ends.add(match.end())
            at = match.start() + 1
        return ends

    def _repeated(self, repeat: _Repeat, starts: set[int], text: str) -> set[int]:
        if repeat.run is not None:
            return self._runs(repeat, repeat.run, starts, text)
        reached = starts
        for _ in range(repeat.low):
            before, reached = reached, self._after(repeat.part, reached, text)
            if reached == before:  # further repetitions change nothing
                break
        fresh, count, ends = reached, repeat.low, set(reached)
        while fresh and (repeat.high is None or count < repeat.high):
            fresh = self._after(repeat.part, fresh, text) - ends
            ends |= fresh
            count += 1
        return ends

    def _runs(self, repeat: _Repeat, run: re.Pattern[str], starts: set[int], text: str) -> set[int]:
        ends: set[int] = set()
        covered = -1  # the end of the last run, in which a later start ends where the first one did
        for at in sorted(starts):
            if at <= covered and repeat.high is None:
                continue
            match = run.match(text, at)
            covered = longest = match.end() if match else at
            if repeat.high is not None:
                longest = min(longest, at + repeat.high)
            self._spend(1 + (longest - at) // 16)
            ends.update(range(at + repeat.low, longest + 1))
        return ends


def _required(part: _Part) -> list[re.Pattern[str]]:
    """Return what is in every text that matches: one search each saves most of the work."""
    parts: tuple[_Part, ...] = (part,)
    if isinstance(part, _Choice):
        parts = part.options[0] if len(part.options) == 1 else ()
    return [plain for plain in parts if isinstance(plain, re.Pattern)]


def _parsed(pattern: str) -> _Part:
    re.compile(pattern)  # `re` reports syntax errors
    return _choice(_tokens(pattern))


def _tokens(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield the kind and the text of each token."""
    at = 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None or (token.group() == "(" and pattern.startswith("(?", at)):
            raise _unsupported(pattern[at : at + 3])
        yield token.lastgroup or "", token.group()
        at = token.end()


def _unsupported(feature: str) -> PatternError:
    return PatternError(f"uses {feature!r}, which is not supported")


def _choice(tokens: Iterator[tuple[str, str]]) -> _Part:
    """Parse alternatives up to the end of the group, or of the pattern."""
    options: list[list[str | _Part]] = [[]]
    before = ""
    for kind, text in tokens:
        parts = options[-1]
        if kind == "close":
            break
        if kind == "or":
            options.append([])
        elif kind == "open":
            inner = _choice(tokens)
            look = text.removeprefix("(?").removeprefix("<")
            ahead = "<" not in text
            parts.append(_LookAround(inner, ahead, look == "=") if look in ("=", "!") else inner)
        elif kind == "repeat":
            if not parts or before == kind:  # "a++" is possessive: it never backtracks
                raise _unsupported(text)
            repeated = parts[-1]
            single = isinstance(repeated, str) and before != "close" and repeated not in _EDGES
            run = re.compile(f"(?:{repeated})*") if single else None
            parts[-1] = _Repeat(_compiled(repeated), *_bounds(text), run)
        else:
            parts.append(re.escape(text) if kind == "character" else text)
        before = kind
    made = tuple(tuple(_joined(parts)) for parts in options)
    return made[0][0] if len(made) == len(made[0]) == 1 else _Choice(made)


_EDGES = ("^", "$", r"\b", r"\B", r"\A", r"\Z")  # tokens that match no character


def _joined(parts: Sequence[str | _Part]) -> Iterator[_Part]:
    """Join consecutive parts that are plain text into one pattern of `re`."""
    for plain, run in groupby(parts, key=lambda part: isinstance(part, str)):
        if plain:
            yield re.compile("".join(str(part) for part in run))
        else:
            yield from (_compiled(part) for part in run)


def _compiled(part: str | _Part) -> _Part:
    return re.compile(part) if isinstance(part, str) else part


def _bounds(repeat: str) -> tuple[int, int | None]:
    """Return the least and the most repetitions that the text of a repetition allows."""
    if repeat[0] != "{":
        return int(repeat[0] == "+"), 1 if repeat[0] == "?" else None
    low, comma, high = repeat[1 : repeat.index("}")].partition(",")
    if not comma:
        return int(low), int(low)
    return int(low or 0), int(high) if high else None
