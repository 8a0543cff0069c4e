"""What of a JSON Schema can be enforced token by token.

llguidance refuses a schema with a keyword that it does not know. `enforceable` takes such keywords
out and names them, so that the rest is enforced, never nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

FORMATS = {
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
}  # fmt: skip
# Keywords that say something of a value, and that no grammar here can hold to.
NOT_ENFORCED = {
    "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired",
    "dependentSchemas", "else", "if", "maxContains", "minContains", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
OPTIONS = "x-guidance"  # of llguidance, which could lift limits
COUNTS = {"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"}
# Lookaround, word boundaries, back references and atomic groups of a regular expression.
BEYOND_REGULAR = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?(?:[=!>]|<[=!])|\\[1-9bB]|\\k<)")

# Keywords whose value is a schema, a list of schemas, or a mapping to schemas.
ONE = {"additionalItems", "additionalProperties", "items"}
LISTED = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
NAMED = {"$defs", "definitions", "patternProperties", "properties"}


def enforceable(schema: object) -> tuple[object, list[str]]:
    """Return the part of a schema that can be enforced, and what is left out: each a keyword and
    the JSON pointer of the schema that has it.

    Raises:
        ValueError: a `$ref` leads out of the schema.
        RecursionError: it is nested too deeply.
    """
    dropped: list[str] = []
    return _cleaned(schema, "", dropped), dropped


def _cleaned(schema: object, path: str, dropped: list[str]) -> object:
    if schema is True:
        return {}
    if not isinstance(schema, Mapping):
        return schema  # false, or wrong: llguidance says so
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key == OPTIONS:
            continue
        if (unenforced := _unenforced(key, value)) is not None:
            if unenforced:
                dropped.append(f"{unenforced} at {path or '/'}")
            continue
        if key == "$ref" and isinstance(value, str) and not value.startswith("#"):
            raise ValueError(f"$ref at {path or '/'} leads out of the schema: {value[:100]}")
        kept[key] = _value(key, value, path, dropped)
    for key in ("minProperties", "maxProperties"):
        if key in kept and not _has_all_properties(kept):
            del kept[key]
            dropped.append(f"{key} at {path or '/'}")
    return kept


def _unenforced(key: str, value: object) -> str | None:
    """Return the name of a keyword to leave out, "" if nothing is lost by that; None to keep it."""
    if key == "uniqueItems":
        return "" if value is False else key
    if key == "format" and isinstance(value, str) and value not in FORMATS:
        return f"format {value[:40]}"
    if key == "pattern" and isinstance(value, str) and BEYOND_REGULAR.search(value):
        return key
    return key if key in NOT_ENFORCED else None


def _value(key: str, value: object, path: str, dropped: list[str]) -> object:
    here = f"{path}/{_escaped(key)}"
    if key in COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)
    if key in NAMED and isinstance(value, Mapping):
        kept = {}
        for name, one in value.items():
            if key == "patternProperties" and BEYOND_REGULAR.search(name):
                dropped.append(f"{key} {name[:40]} at {path or '/'}")
            else:
                kept[name] = _cleaned(one, f"{here}/{_escaped(name)}", dropped)
        return kept
    if key in LISTED and isinstance(value, Sequence) and not isinstance(value, str):
        return [_cleaned(one, f"{here}/{i}", dropped) for i, one in enumerate(value)]
    if key in ONE and not isinstance(value, bool):
        return _cleaned(value, here, dropped)
    return value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _has_all_properties(schema: Mapping[str, Any]) -> bool:
    """Return whether an object has all of its declared properties, so that they can be counted."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, Sequence):
        return False
    return set(properties) <= set(required) and "patternProperties" not in schema
