"""Grammars allow exactly the valid texts, byte by byte; `jsonschema` judges schemas."""

from __future__ import annotations

import json
import math
import random
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from helpers.grammars import STOP, accepts, allowed, byte_vocabulary, matcher, structure
from helpers.schema_edges import edges
from helpers.schema_values import SchemaValues
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator

from kvik.core.structured import MAX_CHOICES, Constraint
from kvik.errors import ParamError
from kvik.text.dialects import BY_NAME, ToolFormat
from kvik.text.grammar import translate
from kvik.text.tool_grammar import AllowedCalls, ToolGrammar, tool_of

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
# A schema, valid values with properties in the order of the schema, and invalid values.
CORPUS = [
    json.loads(line) for line in Path(__file__).with_name("schemas.jsonl").read_text().splitlines()
]


def written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("row", CORPUS, ids=[written(row["schema"])[:60] for row in CORPUS])
def test_a_schema_allows_only_valid_values(row: dict[str, Any]) -> None:
    schema = row["schema"]
    judge = Draft202012Validator(schema)
    assert translate(structure({"json": schema, "strict": True}), byte_vocabulary())[1] == []
    for value in row["valid"]:
        assert judge.is_valid(value), value
        assert accepts(matcher({"json": schema}), written(value)), value
    for value in row["invalid"]:
        assert "format" in schema or not judge.is_valid(value), value  # it ignores formats
        assert not accepts(matcher({"json": schema}), written(value)), value


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(i, marks=pytest.mark.full) for i in range(1, 6))]
)
def test_the_limits_of_keywords(part: int) -> None:
    found = list(edges())
    assert len(found) > 500
    for schema, valid, invalid in found[part::6]:
        judge = Draft202012Validator(schema)
        assert translate(structure({"json": schema, "strict": True}), byte_vocabulary())[1] == []
        for value in valid:
            assert judge.is_valid(value) and accepts(matcher({"json": schema}), written(value)), (
                schema,
                value,
            )
        for value in invalid:
            refused = not judge.is_valid(value) and not accepts(
                matcher({"json": schema}), written(value)
            )
            assert refused, (schema, value)


SCALARS = st.sampled_from(
    [
        {"type": "null"},
        {"type": "boolean"},
        {"type": "integer", "minimum": -50, "maximum": 5000},
        {"type": "integer"},
        {"type": "string", "minLength": 1, "maxLength": 6},
        {"type": ["string"], "maxLength": 20},
        {"enum": ["a", 7, None, 'a"b']},
    ]
)
NAMES = st.sampled_from(["a", "b", "cc", 'd"'])


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.builds(
        lambda named, needed, more: {
            "type": "object",
            "properties": named,
            "required": [name for name in named if name in needed],
            "additionalProperties": more,
        },
        st.dictionaries(NAMES, inner, max_size=3),
        st.sets(NAMES),
        st.sampled_from([False, {"type": "boolean"}]),
    )
    arrays = st.builds(
        lambda items, least: {"type": "array", "items": items, "minItems": least, "maxItems": 6},
        inner,
        st.integers(0, 2),
    )
    return objects | arrays | st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1))


SCHEMAS = st.recursive(SCALARS, _nested, max_leaves=6)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS, other=SCHEMAS, seed=st.integers(0, 2**32))
def test_random_schemas_allow_only_valid_values(schema: Any, other: Any, seed: int) -> None:
    judge, values = Draft202012Validator(schema), SchemaValues({}, random.Random(seed))
    value = values.allowed(schema)  # with properties in the order of the schema
    assert accepts(matcher({"json": schema}), written(value)) == judge.is_valid(value)
    value = values.allowed(other)
    if not judge.is_valid(value):
        assert not accepts(matcher({"json": schema}), written(value))


EACH = {"type": st.sampled_from(["integer", "number", "string", ["number", "null"]])}
END = st.sampled_from([-10, -1, -0.95, 0, 0.5, 0.95, 1, 1.25, 2.75, 10])
ENDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MULTIPLES = st.sampled_from([1, 2, 3, 0.5, 0.25, 0.1, 0.05, 0.75, 2.5])
NUMBERS = st.fixed_dictionaries(
    {}, optional=EACH | dict.fromkeys(ENDS, END) | {"multipleOf": MULTIPLES}
)
COMBINED = st.recursive(
    NUMBERS,
    lambda inner: st.builds(
        lambda one, key, some: {**one, key: some},
        NUMBERS,
        st.sampled_from(["allOf", "anyOf"]),
        st.lists(inner, min_size=1, max_size=3),
    ),
    max_leaves=4,
)
TEXTS = [
    *("-10.5", "-10", "-1", "-0.95", "-0.9", "-0.5", "0", "0.05", "0.25", "0.3", "0.5", "0.75"),
    *("0.9", "0.95", "1", "1.2", "1.25", "2", "2.5", "2.7", "2.75", "2.8", "3", "6", "10", "12.25"),
    *('"a"', "null"),
]


def exact(text: str) -> Any:
    """Return the value of a JSON text, with numbers as they are written."""
    return json.loads(text, parse_float=Decimal)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=COMBINED)
def test_combined_schemas_allow_only_numbers_of_all(schema: Any) -> None:
    judge = Draft202012Validator(exact(written(schema)))
    valid = [text for text in TEXTS if judge.is_valid(exact(text))]
    try:
        matcher({"json": schema})
    except ParamError:
        assert not valid
    else:
        assert [text for text in TEXTS if accepts(matcher({"json": schema}), text)] == valid


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=st.recursive(SCALARS | COMBINED, _nested, max_leaves=6), seed=st.integers(0, 2**32))
def test_random_texts_are_valid(schema: Any, seed: int) -> None:
    dice, text = random.Random(seed), bytearray()
    with suppress(ParamError):  # no value satisfies the schema
        one = matcher({"json": schema})
        while not one.ended and STOP not in (bytes_ := allowed(one)):
            closing = bytes_ & {*b'"}]'} if len(text) > 60 else bytes_ - {*b"eE"}
            text.append(dice.choice(sorted(closing or bytes_)))
            one.append(text[-1])
        assert Draft202012Validator(exact(written(schema))).is_valid(exact(text.decode())), text


LAYOUTS = [
    ('{"x": 1, "y": 2}', True, True),
    ('{"x":1,"y":2}', False, True),
    ('{\n  "x": 1,\n  "y": 2\n}', False, True),
    ('{"x": 1, "y": 2} ', False, False),
    (' {"x": 1, "y": 2}', False, False),
    ('{"x": 1,' + 21 * " " + '"y": 2}', False, False),
    ('{"y": 2, "x": 1}', False, False),
    ('{"x": 1.0, "y": 2}', False, False),
    ('{"x": 01, "y": 2}', False, False),
]


@pytest.mark.parametrize(("text", "usual", "spaced"), LAYOUTS)
def test_json_has_the_layout_of_json_dumps(text: str, usual: bool, spaced: bool) -> None:
    assert accepts(matcher({"json": POINT}), text) == usual
    assert accepts(matcher({"json": POINT, "whitespace": True}), text) == spaced


MANY = [f"text {i}, of many" for i in range(MAX_CHOICES)]


@pytest.mark.parametrize(
    ("given_", "texts", "others"),
    [
        ({"regex": "[0-9]{2,3}(-[a-z]+)?"}, ["12", "123-abc"], ["1", "1234", "12-", "a12"]),
        ({"regex": "(?i)yes|no"}, ["YES", "no"], ["yesno", ""]),
        ({"choice": ["yes", 'a"b', "né", "ye"]}, ["yes", 'a"b', "né", "ye"], ["y", "yesye"]),
        ({"choice": MANY}, [MANY[0], MANY[-1]], ["1", "text "]),
        ({"grammar": 'start: "a" b\nb: /[0-9]/ | "(" b ")"'}, ["a1", "a((2))"], ["a", "a(2"]),
        ({"grammar": 'root ::= "x" | "(" root ")"'}, ["x", "((x))"], ["", "(x", "()"]),
        ({"grammar": r'root ::= "\u00e9" "\U0001F600\u0022"'}, ['é😀"'], ["é", "ue9"]),
        ({"grammar": r'root ::= "\[" [\u00df\]] "\\u0061"'}, [r"[]\u0061", r"[ß\u0061"], ["[ßa"]),
        ({"grammar": 'root ::= "." . [.] # a . b'}, [".\n.", ".é."], ["...b", "x.."]),
        ({"grammar": "root ::= [a&&b~~c]"}, ["a", "&", "~"], ["d"]),
        ({"grammar": '{"grammars": [{"lark_grammar": "start: /k/"}]}'}, ["k"], ["", "kk"]),
        ({"json_object": True}, ["{}", '{"a": [1]}'], ["[]", "1", "{"]),
    ],
)  # fmt: skip
def test_other_constraints(given_: object, texts: list[str], others: list[str]) -> None:
    assert all(accepts(matcher(given_), text) for text in texts)
    assert not any(accepts(matcher(given_), text) for text in others)


@pytest.mark.parametrize(
    ("given_", "reason"),
    [
        ({"regex": "(a"}, "invalid regex"),
        ({"regex": "(?=a)b"}, "invalid regex"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": "{"}, "is not valid JSON"),
        ({"grammar": "{}"}, "must have a list"),
        ({"grammar": "start: t\nt[max_tokens=5]: /a*/"}, "may not use max_tokens"),
        ({"grammar": 'start: t\nt[stop="x"]: /a*/'}, "may not use stop"),
        ({"json": {"type": "nothing"}}, "nothing"),
        ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "nsatisfiable"),
        ({"json": {"$ref": "#/$defs/a"}}, "a"),
        ({"json": {"$ref": "http://example.com"}}, "leads out of the schema"),
        ({"json": {"$ref": "#"}}, "allows no text at all$"),
        ({"json": {"const": 2**53 + 1}}, "9007199254740993"),
        ({"json": {"items": {"enum": [{"a": [-(2**63)]}]}}}, "9223372036854775808"),
        ({"json": {"minimum": math.inf}}, "minimum"),
        ({"json": {"not": {}}, "strict": True}, "is strict, and this cannot be enforced: not at /"),
        (
            {"json": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}, "strict": True},
            "is strict, and this cannot be enforced: oneOf",
        ),
    ],
)
def test_invalid_grammars(given_: object, reason: str) -> None:
    with pytest.raises(ParamError, match=reason) as caught:
        translate(structure(given_), byte_vocabulary())
    assert caught.value.field == "structured"
    assert "\n" not in caught.value.message and len(caught.value.message) < 500


def test_overlapping_branches_are_reported() -> None:
    schema = {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}
    _, unenforced = translate(structure({"json": schema}), byte_vocabulary())
    assert unenforced == ["oneOf, of which several branches may hold"]
    assert accepts(matcher({"json": schema}), '"abcd"')


@pytest.mark.parametrize("answer", [None, "[0-9]+ days"], ids=["calls", "calls or text"])
def test_overlapping_branches_of_arguments_are_reported(answer: str | None) -> None:
    schema = {"properties": {"a": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}}
    form = ToolFormat(BY_NAME["hermes"], {}, ())
    tools = [tool_of("f", schema, strict=False)[0]]
    source = ToolGrammar(form).grammar(AllowedCalls(tools, "auto", answer=answer is not None))

    def given(*, strict: bool) -> Constraint:
        if answer is None:
            return Constraint("lark", source, strict)
        return Constraint("regex", answer, strict).within(source)

    vocabulary = byte_vocabulary()
    assert translate(given(strict=False), vocabulary)[1] == [
        "oneOf, of which several branches may hold"
    ]
    with pytest.raises(ParamError, match="is strict, and this cannot be enforced: oneOf"):
        translate(given(strict=True), vocabulary)
