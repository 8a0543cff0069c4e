"""The enforced parts of a schema, and the names of those that are not enforced."""

from __future__ import annotations

from typing import Any

import pytest

from kvik.text.grammar import enforceable

TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "kept", "dropped"),
    [
        (True, {}, []),
        (False, False, []),
        ({"not": TEXT, **TEXT}, TEXT, ["not at /"]),
        ({"x-guidance": {"max_items": 9**9}, **TEXT}, TEXT, []),
        ({"uniqueItems": True, "type": "array"}, {"type": "array"}, ["uniqueItems at /"]),
        ({"uniqueItems": False, "type": "array"}, {"type": "array"}, []),
        ({"format": "date"}, {"format": "date"}, []),
        ({"format": "iri"}, {}, ["format iri at /"]),
        ({"pattern": "^a$"}, {"pattern": "^a$"}, []),
        ({"pattern": r"a(?=b)"}, {}, ["pattern at /"]),
        ({"pattern": r"(a)\1"}, {}, ["pattern at /"]),
        ({"pattern": r"\\b(?:c)"}, {"pattern": r"\\b(?:c)"}, []),
        ({"maxItems": 2.0, "minLength": 1}, {"maxItems": 2, "minLength": 1}, []),
        ({"items": [True, {"if": TEXT}]}, {"items": [{}, {}]}, ["if at /items/1"]),
        ({"properties": {"not": TEXT}}, {"properties": {"not": TEXT}}, []),
        (
            {"properties": {"a/b~": {"items": {"contains": TEXT}}}},
            {"properties": {"a/b~": {"items": {}}}},
            ["contains at /properties/a~1b~0/items"],
        ),
        (
            {"patternProperties": {"^a": TEXT, r"\bb": TEXT}},
            {"patternProperties": {"^a": TEXT}},
            [r"patternProperties \bb at /"],
        ),
        ({"anyOf": [{"else": TEXT}, True]}, {"anyOf": [{}, {}]}, ["else at /anyOf/0"]),
        (
            {"properties": {"a": TEXT}, "maxProperties": 3},
            {"properties": {"a": TEXT}},
            ["maxProperties at /"],
        ),
        (
            {"properties": {"a": TEXT}, "required": ["a"], "maxProperties": 3},
            {"properties": {"a": TEXT}, "required": ["a"], "maxProperties": 3},
            [],
        ),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": True}},
            {"$ref": "#/$defs/a", "$defs": {"a": {}}},
            [],
        ),
    ],
)
def test_keywords_that_are_not_enforced_are_named(
    schema: Any, kept: Any, dropped: list[str]
) -> None:
    assert enforceable(schema) == (kept, dropped)


@pytest.mark.parametrize("ref", ["http://example.com/a", "other.json#/a", "file:///etc/passwd"])
def test_references_stay_in_the_schema(ref: str) -> None:
    with pytest.raises(ValueError, match=r"\$ref at /items leads out of the schema"):
        enforceable({"items": {"$ref": ref}})


def test_hostile_numbers_have_few_alternatives() -> None:
    ends = {"minimum": -0.12345678901234567, "maximum": 0.12345678901234567}
    schema: Any = enforceable({"type": "number", **ends, "multipleOf": 3.2e-15})[0]
    assert 1 < len(schema["allOf"][0]["anyOf"]) <= 64
