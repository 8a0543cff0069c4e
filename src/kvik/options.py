"""Declares options and parameters: each is a field of a dataclass, with its allowed values and its
meaning. The validation, error message, command-line flag, KVIK_ variable, TOML key and help text
are derived from that field."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any

from kvik.errors import KvikError, shown

# Keys of `Option.facts`.
# One use of the flag takes several values, as in vLLM. Other flags would swallow a prompt.
TAKES_SEVERAL = "takes_several"
FORMERLY = "formerly"  # the former name, whose flag still works and is hidden
NO_FACTS: Mapping[str, Any] = MappingProxyType({})


class Kind:
    """The values that an option takes."""

    expects = "text"  # completes the sentence "must be ..." about its text
    metavar = "TEXT"  # short placeholder of a value
    repeats = False  # the option may be given several times; each text is one entry
    hashed = True  # its values can be hashed; if not, equal values still compare equal

    @property
    def limits(self) -> str:
        """The allowed values, for help texts; "": any."""
        return ""

    def parse(self, text: str) -> object:
        """Read a value from text; raises ValueError for text of another type."""
        return text

    def checked(self, value: object) -> object:
        """Return the value, normalised.

        Raises:
            ValueError: the value is not allowed; the message says which are.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Integer(Kind):
    """An integer from `low` to `high`."""

    low: int
    high: int
    noun: str = "an integer"

    expects = "an integer"
    metavar = "N"

    def parse(self, text: str) -> int:
        """Read an integer; k, m and g stand for 2^10, 2^20 and 2^30."""
        match = re.fullmatch(r"\s*([+-]?\d{1,30})\s*([kKmMgG]?)\s*", text)
        if match is None:
            raise ValueError(text)
        return int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2].lower()]

    def checked(self, value: object) -> int:
        good = isinstance(value, Integral) and not isinstance(value, bool)
        if not good or not self.low <= value <= self.high:  # type: ignore[operator]
            raise bad_value(f"{self.noun} in [{self.low}, {self.high}]", value)
        return int(value)  # type: ignore[call-overload, no-any-return]  # numpy's would overflow


@dataclass(frozen=True)
class Number(Kind):
    """A number from `low` to `high`; `above` excludes `low`."""

    low: float
    high: float
    above: bool = False

    expects = "a number"
    metavar = "X"

    @property
    def limits(self) -> str:
        return f"in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"

    def parse(self, text: str) -> float:
        return float(text)

    def checked(self, value: object) -> float:
        good = isinstance(value, Real) and not isinstance(value, bool)
        inside = good and self.low <= value <= self.high  # type: ignore[operator]
        if not inside or (self.above and value == self.low):
            raise bad_value(f"a number {self.limits}", value)
        # numpy's numbers and fractions cannot be sent to another process
        return value if type(value) is int else float(value)  # type: ignore[arg-type]


class Flag(Kind):
    """True or false."""

    expects = "true or false"
    metavar = "true|false"

    def parse(self, text: str) -> bool:
        word = text.strip().lower()
        if word in ("1", "true", "yes", "on"):
            return True
        if word in ("0", "false", "no", "off"):
            return False
        raise ValueError(text)

    def checked(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise bad_value(self.expects, value)
        return value


@dataclass(frozen=True)
class Text(Kind):
    """A string, or a path, that matches `pattern`, which `noun` describes."""

    noun: str = "text"
    pattern: str = r"[^\0]*"
    metavar: str = "TEXT"
    secret: bool = False  # no error shows it

    def checked(self, value: object) -> str:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value, re.DOTALL):
            raise ValueError(f"must be {self.noun}") if self.secret else bad_value(self.noun, value)
        return value


@dataclass(frozen=True)
class OneOf(Kind):
    """One of a fixed set of words."""

    allowed: tuple[str, ...]
    # Other words -> the allowed word that each means.
    synonyms: Mapping[str, str] = field(default_factory=dict)
    # Words -> why they are not allowed; for others the error gives no reason.
    refused: Mapping[str, str] = field(default_factory=dict)

    metavar = "NAME"

    @property
    def limits(self) -> str:
        return f"one of {', '.join((*self.allowed, *self.synonyms))}"

    def checked(self, value: object) -> str:
        word = value if isinstance(value, str) else ""
        if word in self.refused:
            raise ValueError(self.refused[word])
        if word not in self.allowed and word not in self.synonyms:
            raise bad_value(self.limits, value)
        return self.synonyms.get(word, word)


@dataclass(frozen=True)
class TextList(Kind):
    """A tuple of strings, each given separately."""

    entry: Kind = Text()

    repeats = True

    def checked(self, value: object) -> tuple[object, ...]:
        if not isinstance(value, tuple):
            raise bad_value("a tuple of strings", value)
        return tuple(self.entry.checked(entry) for entry in value)


@dataclass(frozen=True)
class Integers(Kind):
    """A tuple of integers; `noun` is their plural noun."""

    entry: Integer
    noun: str

    expects = "integers separated by commas"
    metavar = "N,N"

    def parse(self, text: str) -> tuple[int, ...]:
        return tuple(self.entry.parse(part) for part in text.split(","))

    def checked(self, value: object) -> tuple[int, ...]:
        if not isinstance(value, tuple):
            raise bad_value(f"a tuple of {self.noun}", value)
        return tuple(self.entry.checked(entry) for entry in value)


@dataclass(frozen=True)
class JsonObject(Kind):
    """A mapping, such as `example`."""

    example: str

    expects = "a JSON object"
    metavar = "JSON"

    def parse(self, text: str) -> dict[str, object]:
        try:
            value = json.loads(text)
        except RecursionError:
            raise ValueError(text) from None
        if not isinstance(value, dict):
            raise ValueError(text)
        return value

    def checked(self, value: object) -> object:
        if not isinstance(value, Mapping):
            raise bad_value(f"an object such as {self.example}", value)
        return value


@dataclass(frozen=True, slots=True)
class Option:
    """One field that is an option."""

    name: str
    kind: Kind
    default: Any
    help: str  # what it means
    optional: bool  # the value may be None, written "none" as text
    facts: Mapping[str, Any]  # further declared facts, by the keys above

    @property
    def description(self) -> str:
        """Its meaning and the allowed values."""
        return f"{self.help} ({self.kind.limits})" if self.kind.limits else self.help

    @property
    def expects(self) -> str:
        return f"{self.kind.expects} or none" if self.optional else self.kind.expects

    def parse(self, text: str) -> object:
        """Read the value, or one entry of an option that repeats, from text; raises ValueError."""
        if self.optional and text.strip().lower() == "none":
            return None
        return self.kind.parse(text)

    def checked(self, value: object) -> object:
        """Return the value, normalised; raises ValueError with the allowed values."""
        return None if value is None and self.optional else self.kind.checked(value)


def option(default: object, kind: Kind, help: str, facts: Mapping[str, Any] = NO_FACTS) -> Any:
    """Declare a field of a dataclass as an option.

    Args:
        help: what it means, for `--help` and the schema.
        facts: further facts, kept in `Option.facts`.
    """
    metadata = {"kind": kind, "help": help, "facts": facts}
    return field(default=default, hash=kind.hashed, metadata=metadata)


@cache
def options_of(cls: type) -> tuple[Option, ...]:
    """Return the options that a dataclass declares. The type `X | None` makes one optional."""
    return tuple(
        Option(
            name=declared.name,
            kind=declared.metadata["kind"],
            default=None if declared.default is MISSING else declared.default,
            help=declared.metadata["help"],
            optional=str(declared.type).endswith("| None"),
            facts=declared.metadata["facts"],
        )
        for declared in fields(cls)
    )


def normalised(config: object, error: type[KvikError]) -> dict[str, Any]:
    """Check each option of a config independently.

    Returns:
        Field -> normalised value, for values that normalisation changes.

    Raises:
        error: a value is not allowed; it names the field and the allowed values.
    """
    changes = {}
    declared: type = type(config)
    for option in options_of(declared):
        value = getattr(config, option.name)
        if value is option.default:  # most are, and this check adds to the latency of requests
            continue
        try:
            good = option.checked(value)
        except ValueError as bad:
            raise error(option.name, str(bad)) from None
        if good is not value:
            changes[option.name] = good
    return changes


def bad_value(allowed: str, value: object) -> ValueError:
    return ValueError(f"must be {allowed}, not {shown(value)}")


def unknown(name: str, kind: str, names: Collection[str]) -> str:
    """Return the end of an error message about an unknown name: "is not a <what>" and the most
    similar known name, or all known names."""
    hint = did_you_mean(name, names) or f"known: {', '.join(names)}"
    article = "an" if kind[0] in "aeiou" else "a"
    return f"is not {article} {kind} ({hint})"


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Return "did you mean ...?" with the most similar known name, or one with this prefix; "":
    there is none."""
    import difflib  # only errors need it, and it would slow down the start

    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    longer = sorted(
        (candidate for candidate in names if candidate.startswith(name) and len(name) > 3), key=len
    )
    hints = [*nearest, *longer]
    return f"did you mean {hints[0]}?" if hints else ""


# Names that other engines have for options.

ANY = object()  # every value


@dataclass(frozen=True, slots=True)
class Synonym:
    """A name of another engine's option."""

    option: str = ""  # the equivalent option of kvik; "": none
    # Its values -> values of that option; others are taken unchanged.
    values: Mapping[object, object] = field(default_factory=dict)
    meaningless: object = ()  # values that have no effect in kvik, or `ANY`
    why: str = ""  # why they have none, or what to use in place of other values
    # How to parse its values, if there is no equivalent option or the values differ.
    kind: Kind | None = None

    def ignores(self, value: object) -> bool:
        if self.meaningless is ANY:
            return True
        ignored_values = self.meaningless if isinstance(self.meaningless, tuple) else ()
        return any(_equal(value, ignored) for ignored in ignored_values)

    def translated(self, value: object) -> object:
        """Return the value of the option."""
        return next((ours for theirs, ours in self.values.items() if _equal(value, theirs)), value)


def _equal(value: object, other: object) -> bool:
    """Return whether values are equal and of one type: True is not 1."""
    return type(value) is type(other) and value == other


def with_synonyms(
    named: Mapping[str, Any], synonyms: Mapping[str, Synonym], error: type[KvikError]
) -> tuple[dict[str, Any], list[str]]:
    """Translate other engines' names of options to kvik's.

    Returns:
        The options, with unknown names unchanged; and the names that were ignored because they
        have no effect in kvik, each with the reason.

    Raises:
        error: kvik has no equivalent, or an option is given under two names.
    """
    options = {name: value for name, value in named.items() if name not in synonyms}
    ignored = []
    for name, value in named.items():
        synonym = synonyms.get(name)
        if synonym is None:
            continue
        if synonym.ignores(value):
            ignored.append(f"{name} ({synonym.why})")
            continue
        if not synonym.option:
            raise error(name, f"cannot be {shown(value)}: {synonym.why}")
        if synonym.option in options:
            raise error(name, f"means {synonym.option}, which is also given")
        options[synonym.option] = synonym.translated(value)
    return options, ignored
