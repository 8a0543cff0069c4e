"""Constraints on texts: equivalent forms, and refusals."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

from kvik import SamplingParams
from kvik.core.structured import (
    MAX_CHOICES,
    MAX_SOURCE_BYTES,
    Choice,
    Constraint,
    Grammar,
    JsonSchema,
    Regex,
)
from kvik.errors import ParamError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


class Person(BaseModel):
    name: str
    age: int


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (JsonSchema(SCHEMA), {"json": SCHEMA}),
        (JsonSchema(json.dumps(SCHEMA)), {"json": SCHEMA, "regex": None}),
        (JsonSchema(SCHEMA, strict=True), {"json": SCHEMA, "strict": True}),
        (JsonSchema(SCHEMA, whitespace=True), {"json": json.dumps(SCHEMA), "whitespace": True}),
        (JsonSchema(Person), Person),
        (JsonSchema({"type": "object"}), {"json_object": True}),
        (Regex("[0-9]+"), {"regex": "[0-9]+", "backend": "auto", "disable_fallback": True}),
        (Choice(["yes", "no", "yes"]), {"choice": ("yes", "no")}),
        (Grammar('start: "a"'), {"grammar": 'start: "a"'}),
    ],
)
def test_equivalent_constraints_are_equal(given: Constraint, same: object) -> None:
    params = SamplingParams(structured=given)
    assert params.structured == SamplingParams(structured=same).structured
    assert type(params.structured) is Constraint
    assert params.with_changes(temperature=0.5).structured == params.structured
    assert hash(params.structured) == hash(SamplingParams(guided_decoding=same).structured)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (5, r"must be a JSON object such as"),
        ("[0-9]+", r"must be a JSON object such as"),
        ({}, r"must have one of json, json_object, regex, choice, grammar, not nothing"),
        ({"regex": "a", "choice": ["a"]}, r"must have one of .*, not 'regex', 'choice'"),
        ({"rgex": "a"}, r"must have one of .*, not 'rgex'"),
        ({"regex": "a", "strict": True}, r"strict is only for json"),
        ({"json": SCHEMA, "strict": "yes"}, r"strict must be true or false"),
        ({"json": 5}, r"a JSON Schema is an object"),
        ({"json": "{"}, r"must be a JSON Schema"),
        ({"json": "[" * 100_000}, r"nested too deeply"),
        ({"json": {"a": object()}}, r"must be a JSON Schema"),
        ({"json": {"title": "x" * MAX_SOURCE_BYTES}}, r"at most 262144 bytes"),
        ({"regex": ""}, r"must be a text that is not empty"),
        ({"regex": "\ud800"}, r"must be valid Unicode"),
        ({"choice": []}, r"at least one text"),
        ({"choice": "yes"}, r"at least one text"),
        ({"choice": ["a", ""]}, r"made of texts that are not empty"),
        ({"choice": ["a", 5]}, r"made of texts that are not empty"),
        ({"choice": [str(i) for i in range(MAX_CHOICES + 1)]}, r"at most 4096 texts, not 4097"),
    ],
)
def test_invalid_constraints_are_refused(given: object, reason: str) -> None:
    with pytest.raises(ParamError, match=f"^structured: .*{reason}"):
        SamplingParams(structured=given)


def test_the_engine_only_accepts_checked_constraints() -> None:
    with pytest.raises(ParamError, match="structured: must be checked"):
        SamplingParams(structured=Regex("a")).check_against(100, 100)
