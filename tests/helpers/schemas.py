"""Random schemas with short values."""

from __future__ import annotations

import random
from typing import Any

NAMES = ["name", "age", "tags", "é", 'say "hi"', "x y"]
SCALARS: list[dict[str, Any]] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": -20, "maximum": 300},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "string", "maxLength": 15},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,6}$"},
    {"type": "string", "format": "date"},
    {"enum": ["red", "green", 7, None]},
    {"const": "fixed text"},
]


def drawn_schema(dice: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return a schema of at most this nesting depth."""
    kind = dice.random() if depth else 0.0
    if kind < 0.4:
        return dice.choice(SCALARS)
    if kind < 0.6:
        least = dice.randint(0, 2)
        items = drawn_schema(dice, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}
    if kind < 0.7:
        return {"anyOf": [drawn_schema(dice, depth - 1) for _ in range(dice.randint(1, 3))]}
    names = dice.sample(NAMES, dice.randint(0, 4))
    return {
        "type": "object",
        "properties": {name: drawn_schema(dice, depth - 1) for name in names},
        "required": [name for name in names if dice.random() < 0.6],
        "additionalProperties": False,
    }
