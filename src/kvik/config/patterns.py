"""Regular expressions that came with a model, matched in bounded time.

Python's `re` tries one way through a pattern after the other, and `(a+)+$` has more ways than
anyone can wait for. Here each part of a pattern maps all positions where it may begin to all where
it may end (Thompson 1968, Regular expression search algorithm), so no way is followed twice. Parts
without a choice or a repetition are left to `re`: there is one way through them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

MAX_STEPS = 4_000_000  # of all patterns of a model together: a second or two
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
    """A pattern cannot be used; the text is the end of "PATTERN, which ..."."""


@dataclass(frozen=True, slots=True)
class _Choice:
    options: tuple[tuple[_Part, ...], ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: _Part
    least: int
    most: int | None  # None: any number


@dataclass(frozen=True, slots=True)
class _Look:
    """Whether `part` is `wanted` to match ahead of a position, or behind it."""

    part: _Part
    ahead: bool
    wanted: bool


_Part = re.Pattern[str] | _Choice | _Repeat | _Look


class Matcher:
    """Matches patterns until its steps are used up."""

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self._left = max_steps

    def matching(self, pattern: str, texts: Iterable[str]) -> list[str]:
        """The texts that begin with what a pattern describes, as `re.match` sees it.

        Raises:
            PatternError: the pattern is not valid, uses what is not supported, or takes too long.
        """
        self._spend(PARSING_STEPS * len(pattern))
        try:
            part = _parsed(pattern)
            return [text for text in texts if self._after(part, {0}, text)]
        except (re.error, OverflowError):
            raise PatternError("is no regular expression") from None
        except RecursionError:
            raise PatternError("is nested too deeply") from None

    def _spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise PatternError("takes too long to match")

    def _after(self, part: _Part, starts: set[int], text: str) -> set[int]:
        """Where a part that begins at one of `starts` may end."""
        self._spend(1 + len(starts))
        if isinstance(part, re.Pattern):
            return {match.end() for at in starts if (match := part.match(text, at))}
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
            return {at for at in starts if bool(self._after(part.part, {at}, text)) == part.wanted}
        behind = self._after(part.part, set(range(len(text) + 1)), text)
        return starts & behind if part.wanted else starts - behind

    def _repeated(self, repeat: _Repeat, starts: set[int], text: str) -> set[int]:
        reached = starts
        for _ in range(repeat.least):
            before, reached = reached, self._after(repeat.part, reached, text)
            if reached == before:  # and so it stays
                break
        fresh, count, ends = reached, repeat.least, set(reached)
        while fresh and (repeat.most is None or count < repeat.most):
            fresh = self._after(repeat.part, fresh, text) - ends
            ends |= fresh
            count += 1
        return ends


def _parsed(pattern: str) -> _Part:
    re.compile(pattern)  # whatever is wrong with it, `re` says
    return _choice(_tokens(pattern))


def _tokens(pattern: str) -> Iterator[tuple[str, str]]:
    """Kinds and texts."""
    at = 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None or (token.group() == "(" and pattern.startswith("(?", at)):
            raise _unsupported(pattern[at : at + 3])
        yield token.lastgroup or "", token.group()
        at = token.end()


def _unsupported(what: str) -> PatternError:
    return PatternError(f"uses {what!r}, which is not supported")


def _choice(tokens: Iterator[tuple[str, str]]) -> _Part:
    """Up to the end of a group, or of all."""
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
            parts.append(_Look(inner, ahead, look == "=") if look in ("=", "!") else inner)
        elif kind == "repeat":
            if not parts or before == kind:  # "a++" would not give back what it has taken
                raise _unsupported(text)
            parts[-1] = _Repeat(_compiled(parts[-1]), *_bounds(text))
        else:
            parts.append(re.escape(text) if kind == "character" else text)
        before = kind
    made = tuple(tuple(_joined(parts)) for parts in options)
    return made[0][0] if len(made) == len(made[0]) == 1 else _Choice(made)


def _joined(parts: Sequence[str | _Part]) -> Iterator[_Part]:
    """Neighbours that `re` matches become one part."""
    for plain, run in groupby(parts, key=lambda part: isinstance(part, str)):
        if plain:
            yield re.compile("".join(str(part) for part in run))
        else:
            yield from (_compiled(part) for part in run)


def _compiled(part: str | _Part) -> _Part:
    return re.compile(part) if isinstance(part, str) else part


def _bounds(repeat: str) -> tuple[int, int | None]:
    """How often, from the text of a repetition."""
    if repeat[0] != "{":
        return int(repeat[0] == "+"), 1 if repeat[0] == "?" else None
    least, comma, most = repeat[1 : repeat.index("}")].partition(",")
    if not comma:
        return int(least), int(least)
    return int(least or 0), int(most) if most else None
