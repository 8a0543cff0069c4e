"""Random values that a JSON schema allows or forbids."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

LETTERS = 'aeiou thefox,.!\n\t"\\<|>{}[]%é漢😀\u0000\u200b'
HUGE = (2**31, 2**53, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**30)
MOST = 6  # entries of a list and letters of a string, unless the schema requires more


class SchemaValues:
    """Draws values; `components` are the targets of `$ref`."""

    def __init__(self, components: Mapping[str, Schema], dice: random.Random) -> None:
        self._components = components
        self._dice = dice

    def resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._components[schema["$ref"].rpartition("/")[2]]
        return schema

    def allowed(self, schema: Schema) -> Any:
        """Return a value that the schema allows."""
        schema, dice = self.resolved(schema), self._dice
        if "anyOf" in schema:
            return self.allowed(dice.choice(schema["anyOf"]))
        if "enum" in schema:
            return dice.choice(schema["enum"])
        match schema.get("type"):
            case "null":
                return None
            case "boolean":
                return dice.random() < 0.5
            case "integer":
                return round(self._number(schema, 1))
            case "number":
                return self._number(schema, 0.5)
            case "string":
                return self._text(schema)
            case "array":
                count = dice.randint(schema.get("minItems", 0), MOST)
                return [self.allowed(schema.get("items", {})) for _ in range(count)]
            case "object":
                return self._object(schema)
        return dice.choice([None, True, 0, 1.5, "x", [], {}])

    def forbidden(self, schema: Schema) -> list[Any]:
        """Return values that the schema forbids; none if it allows everything."""
        kinds = self._kinds(schema)
        others = {
            "null": [None],
            "boolean": [True, False],
            "integer": [0, 1, -1, *HUGE],
            "number": [0.5, -1e308, 1e-45],
            "string": ["", "1", "x" * 2000, "\u0000"],
            "array": [[], [1], [[[]]], [None], list(range(5000))],
            "object": [{}, {"a": 1}, {"type": "x"}],
        }
        if "number" in kinds:
            kinds = {*kinds, "integer"}
        return [v for kind, values in others.items() if kind not in kinds for v in values]

    def _kinds(self, schema: Schema) -> set[str]:
        schema = self.resolved(schema)
        if "anyOf" in schema:
            return set().union(*(self._kinds(one) for one in schema["anyOf"]))
        if "enum" in schema:
            return {"string"}
        kind = schema.get("type")
        kinds = {"null", "boolean", "integer", "number", "string", "array", "object"}
        return {kind} if isinstance(kind, str) else kinds

    def _object(self, schema: Schema) -> dict[str, Any]:
        dice, found = self._dice, {}
        for name, inner in schema.get("properties", {}).items():
            if name in schema.get("required", ()) or dice.random() < 0.15:
                found[name] = self.allowed(inner)
        more = schema.get("additionalProperties")
        if isinstance(more, Mapping):
            for _ in range(dice.randint(0, 3)):
                found[str(dice.randint(0, 5000))] = self.allowed(more)
        return found

    def _number(self, schema: Schema, least: float) -> float:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -1000))
        high = schema.get("maximum", schema.get("exclusiveMaximum", 1000))
        if "exclusiveMinimum" in schema:
            low += min(least, (high - low) / 1e6)
        kind = self._dice.random()
        if kind < 0.2:
            return low
        if kind < 0.3:
            return high
        return self._dice.uniform(low, min(high, low + 50))

    def _text(self, schema: Schema) -> str:
        count = self._dice.randint(schema.get("minLength", 0), MOST * 4)
        count = min(count, schema.get("maxLength", count))
        return "".join(self._dice.choice(LETTERS) for _ in range(count))
