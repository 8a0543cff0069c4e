"""Schemas for the limits of each keyword, with values just inside and just outside."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, combinations_with_replacement, product
from typing import Any

Edge = tuple[dict[str, Any], list[Any], list[Any]]  # a schema, valid values, invalid values

BOUNDS = (-1000, -101, -10, -1, 0, 1, 9, 10, 99, 101, 1000)
FRACTIONS = (-10.25, -2.5, -1, -0.99, -0.25, 0, 0.5, 0.99, 1, 1.5, 10.75)
BETWEEN = (-10.2, -1.2, -0.9, -0.01, 0.1, 0.25, 0.9, 1.25, 10.7)
LARGE = (2**53 + 1, 2**60 + 1, 2**63 - 1, 2**64 - 1, 10**20 + 1)
VALUES = {"null": None, "boolean": True, "integer": 3, "string": "a", "array": [], "object": {}}


def edges() -> Iterator[Edge]:
    """Yield several hundred edges, each alone and as a property of an object."""
    for schema, valid, invalid in _edges():
        yield schema, valid, invalid
        named = {"type": "object", "properties": {"v": schema}, "required": ["v"]}
        bad = [{}, {"w": 1}, *({"v": value} for value in invalid)]
        closed = {**named, "additionalProperties": False}
        yield closed, [{"v": value} for value in valid], bad


def _edges() -> Iterator[Edge]:
    yield from _integers()
    yield from _fractions()
    for least, most in combinations_with_replacement(range(5), 2):
        for char in ("a", "é", "日"):
            schema = {"type": "string", "minLength": least, "maxLength": most}
            yield schema, *_between(least, most, lambda n, char=char: n * char)
        schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": least, "maxItems": most}
        yield schema, *_between(least, most, lambda n: [1, 2, 1, 2, 1, 2][:n])
        schema = {"type": "string", "pattern": f"^(ab){{{least},{most}}}$"}
        yield schema, *_between(least, most, lambda n: n * "ab")
    for size in range(4):
        tuple_ = {"type": "array", "prefixItems": [{"const": n} for n in range(size)]}
        closed = {**tuple_, "items": False, "minItems": size}
        yield closed, [list(range(size))], [list(range(size + 1)), [9] * max(1, size)]
    yield from _objects()
    for first, second in combinations(VALUES, 2):
        others = [value for name, value in VALUES.items() if name not in (first, second)]
        either = [VALUES[first], VALUES[second]]
        yield {"type": [first, second]}, either, others
        for keyword in ("anyOf", "oneOf"):
            yield {keyword: [{"type": first}, {"type": second}]}, either, others


def _integers() -> Iterator[Edge]:
    for low, high in combinations_with_replacement(BOUNDS, 2):
        schema = {"type": "integer", "minimum": low, "maximum": high}
        yield schema, [low, high, (low + high) // 2], [low - 1, high + 1, low - 1000, high + 1000]
        if high - low > 1:
            schema = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high}
            yield schema, [low + 1, high - 1], [low, high]
    for bound in BOUNDS:
        yield {"type": "integer", "minimum": bound}, [bound, bound + 10**6], [bound - 1, bound - 9]
        yield {"type": "integer", "maximum": bound}, [bound, bound - 10**6], [bound + 1, bound + 9]
    for factor in (2, 3, 7, 10, 25):
        schema = {"type": "integer", "multipleOf": factor, "minimum": 0}
        yield schema, [0, factor, 12 * factor], [factor + 1, 12 * factor - 1]
    for bound in LARGE:  # not representable as floats
        for sign, key in ((1, "maximum"), (-1, "minimum")):
            schema = {"type": "integer", key: sign * bound}
            yield schema, [0, sign * 2**53], [sign * (bound + n) for n in (1, 2, 1000)]
    for bound in LARGE[:2]:
        schema = {"type": "integer", "minimum": bound, "maximum": bound + 10**18}
        yield schema, [bound + 10**15 + 1], [bound - 1, bound - 2, bound + 10**18 + 1]


def _fractions() -> Iterator[Edge]:
    for low, high in combinations(FRACTIONS, 2):
        inside = [value for value in (*FRACTIONS, *BETWEEN) if low < value < high]
        outside = [value for value in (*FRACTIONS, *BETWEEN) if not low <= value <= high]
        for first, second in product(
            ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
        ):
            schema = {"type": "number", first: low, second: high}
            ends = ((low, first == "minimum"), (high, second == "maximum"))
            valid = [end for end, included in ends if included]
            yield schema, inside + valid, outside + [end for end, _ in ends if end not in valid]


def _objects() -> Iterator[Edge]:
    names = ["a", "b", "cc"]
    for size in range(len(names) + 1):
        for needed in combinations(names, size):
            schema = {
                "type": "object",
                "properties": {name: {"type": "integer"} for name in names},
                "required": list(needed),
                "additionalProperties": False,
            }
            valid = [dict.fromkeys(needed, 1), dict.fromkeys(names, 2)]
            bad: list[Any] = [{**dict.fromkeys(names, 2), "d": 1}, dict.fromkeys(names, "x")]
            for name in needed:
                bad.append({other: 1 for other in names if other != name})
            yield schema, valid, bad


def _between(least: int, most: int, make: Any) -> tuple[list[Any], list[Any]]:
    inside = [make(n) for n in range(least, most + 1)]
    outside = [make(n) for n in (least - 1, most + 1) if n >= 0]
    return inside, outside
