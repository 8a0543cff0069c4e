"""Bounds and multiples of numbers in a JSON Schema, in a form that llguidance enforces as meant.

Left alone, the library rounds bounds to floats, includes a whole exclusive bound if the other one
is less than 1 away, and excludes numbers with fewer decimals than a bound or a multiple: 0.9 below
0.95, or 0.5 for 0.25. Since it also intersects schemas that hold together, their numbers are
intersected here first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from math import gcd, inf, lcm, nextafter
from typing import Any

Schema = Mapping[str, Any]
End = tuple[float, bool]  # a bound, and whether it is exclusive

# The sign of the direction to the inside -> the keywords of a bound, inclusive and exclusive.
BOUNDS = {1: ("minimum", "exclusiveMinimum"), -1: ("maximum", "exclusiveMaximum")}
KEYWORDS = (*BOUNDS[1], *BOUNDS[-1], "multipleOf")
# Keywords of a referenced schema that is only a set of numbers.
OF_NUMBERS = {*KEYWORDS, "$comment", "default", "description", "examples", "title", "type"}
MAX_ALTERNATIVES = 64  # hostile schemas would have thousands
LARGEST_BOUND = (1 << 63) - 1024  # the largest float in int64


def gathered(schema: Schema, target: Callable[[object], object]) -> Schema:
    """Return an equal schema in which the numbers of an `allOf` are intersected, and those beside
    `anyOf` or `oneOf` are in its branches.

    Args:
        target: returns what a `$ref` leads to, None if nothing.
    """
    if not isinstance(members := schema.get("allOf", ()), list | tuple):
        return schema
    if _has_only_numbers(there := target(schema.get("$ref"))):
        return gathered({**_without(schema, "$ref"), "allOf": [*members, there]}, target)
    members = [
        gathered(member, target) if isinstance(member, Mapping) else member for member in members
    ]
    numbers = Numbers.of([schema, *members])
    if numbers is None:
        return schema
    result = _without(schema, *KEYWORDS)
    if members:
        result["allOf"] = [
            _without(member, *KEYWORDS) if isinstance(member, Mapping) else member
            for member in members
        ]
    key = next((key for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), None)
    if key is None or not numbers.keywords:
        return {**result, **numbers.keywords}
    result[key] = [_narrowed(branch, numbers.keywords) for branch in schema[key]]
    return result


def _narrowed(branch: object, keywords: Schema) -> object:
    """Return a branch of a schema that has these keywords, too."""
    if branch is True:
        return keywords
    numbers = Numbers.of([branch, keywords])
    if not isinstance(branch, Mapping) or numbers is None:
        return branch
    return {**_without(branch, *KEYWORDS), **numbers.keywords}


def _has_only_numbers(schema: object) -> bool:
    if not isinstance(schema, Mapping):
        return False
    return schema.keys() <= OF_NUMBERS and not schema.keys().isdisjoint(KEYWORDS)


def _without(schema: Schema, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in schema.items() if key not in keys}


def exact(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose numbers llguidance enforces as they are meant."""
    numbers = Numbers.of([schema])
    if numbers is None or not numbers.keywords:
        return schema
    numbers, others, kinds = numbers.rounded(), _without(schema, *KEYWORDS), schema.get("type")
    if isinstance(kinds, str | list | tuple) and "number" not in kinds:
        return {**others, **numbers.whole().keywords}
    first, *more = numbers.alternatives()
    if not more or schema.keys() & {"const", "enum"}:
        return {**others, **numbers.keywords}
    either = [first, *({"type": "number", **keywords} for keywords in more)]
    return {**others, "allOf": [*others.get("allOf", ()), {"anyOf": either}]}


@dataclass(frozen=True, slots=True)
class Numbers:
    """A set of numbers."""

    ends: Mapping[int, End]  # by the sign of the direction to the inside
    multiple: Fraction | None = None  # of which they are multiples

    @classmethod
    def of(cls, schemas: Iterable[object]) -> Numbers | None:
        """Return the numbers that all schemas allow; None: a keyword has no valid value."""
        parts = [schema for schema in schemas if isinstance(schema, Mapping)]
        values = [part[key] for part in parts for key in KEYWORDS if key in part]
        if not all(type(value) in (int, float) and abs(value) < inf for value in values):
            return None
        ends = dict[int, End]()
        for sign, keys in BOUNDS.items():
            each = [(part[key], key == keys[1]) for part in parts for key in keys if key in part]
            if each:
                ends[sign] = max(each, key=lambda end: (sign * end[0], end[1]))
        multiples = [_fraction(part["multipleOf"]) for part in parts if "multipleOf" in part]
        if not all(multiple > 0 for multiple in multiples):
            return None
        return cls(ends, _common(*multiples) if multiples else None)

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords of a schema of these numbers."""
        result = {BOUNDS[sign][exclusive]: value for sign, (value, exclusive) in self.ends.items()}
        if self.multiple is not None:
            is_whole = self.multiple.denominator == 1
            result["multipleOf"] = int(self.multiple) if is_whole else float(self.multiple)
        return result

    def rounded(self) -> Numbers:
        """Return these numbers with bounds that llguidance neither rounds nor includes wrongly."""
        ends = {sign: (_inwards(value, sign), ex) for sign, (value, ex) in self.ends.items()}
        for sign in ends if len(ends) == 2 else ():
            low, high = sign * ends[sign][0], sign * ends[-sign][0]
            if ends[sign][1] and 0 <= low < high < low + 1 and low == int(low):
                ends[sign] = (sign * (nextafter(low, high) if low else high * 1e-15), False)
        return replace(self, ends=ends)

    def whole(self) -> Numbers:
        """Return the integers among these numbers."""
        if self.multiple is None:
            return self
        return replace(self, multiple=_common(self.multiple, Fraction(1)))

    def alternatives(self) -> list[dict[str, Any]]:
        """Return the keywords of schemas that together allow these numbers with any number of
        decimals; of very many, the first."""
        sets = [self]
        for sign, (bound, _) in self.ends.items():
            shorter = _beginnings(bound, sign)
            sets += [replace(self, ends={**self.ends, sign: (end, False)}) for end in shorter]
        multiples = [None] if self.multiple is None else _with_fewer_decimals(self.multiple)
        each = (replace(numbers, multiple=multiple) for numbers in sets for multiple in multiples)
        return [numbers.keywords for numbers in islice(each, MAX_ALTERNATIVES)]


def _fraction(value: float) -> Fraction:
    """Return the number that a schema writes."""
    return Fraction(repr(value))


def _common(*multiples: Fraction) -> Fraction:
    """Return the least common multiple."""
    return Fraction(
        lcm(*(multiple.numerator for multiple in multiples)),
        gcd(*(multiple.denominator for multiple in multiples)),
    )


def _with_fewer_decimals(multiple: Fraction) -> list[Fraction]:
    """Return a multiple, and those of its multiples that numbers with fewer decimals must be
    multiples of.

    llguidance ignores the point: among numbers with fewer decimals than m * 10^-n it allows those
    whose digits are a multiple of m. So one with the same m as the one before it adds nothing.
    """
    power = 1
    while power % multiple.denominator:
        power *= 10
    result, digits = [multiple], multiple * power
    while power > 1 and gcd(int(digits), 10) > 1:
        power //= 10
        fewer = _common(multiple, Fraction(1, power))
        if fewer * power != digits:
            result.append(fewer)
            digits = fewer * power
    return result


def _inwards(value: float, sign: int) -> float:
    """Return the float at a bound or next to it, inside.

    Args:
        sign: 1 for a lower bound, -1 for an upper one.
    """
    if not abs(value) > 1 << 53:
        return value
    if sign * value < -LARGEST_BOUND:
        return -sign * LARGEST_BOUND
    if abs(value) > LARGEST_BOUND:
        return value  # llguidance refuses it
    near = float(value)
    return int(near if sign * int(near) >= sign * value else nextafter(near, sign * inf))


def _beginnings(value: float, sign: int) -> list[float]:
    """Return the numbers with fewer decimals that a bound's digits begin with, if they are inside
    it."""
    integer, _, fraction = f"{Decimal(repr(abs(value))):f}".partition(".")
    sizes = range(1, len(fraction)) if sign * value < 0 else ()
    return list(dict.fromkeys(-sign * float(f"{integer}.{fraction[:size]}") for size in sizes))
