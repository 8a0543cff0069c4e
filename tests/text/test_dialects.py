"""Formats of tool calls: written calls are parsed in any chunks, and allowed by the grammar."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from typing import Any

import pytest
from helpers.grammars import FIRST_MARKER, MarkedGrammar

from kvik.core.structured import Regex
from kvik.errors import ParamError
from kvik.server.tools import Function, ToolUse
from kvik.text.answer_format import MarkedFormat
from kvik.text.dialects import BY_NAME, DIALECTS, PLACE, Dialect, ToolFormat, dialect_of
from kvik.text.tool_calls import AnswerDelta, ToolCallParser
from kvik.text.tool_grammar import AllowedCalls, ToolGrammar, ToolMode, tool_of

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "opts": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["city"],
    "additionalProperties": False,
}
ADD = {
    "type": "object",
    "properties": {"x": {"type": "number"}, "unit": {"enum": ["m", "ft"]}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS = {
    tool.name: tool
    for tool in (
        tool_of("get_weather", WEATHER, strict=True)[0],
        tool_of("add", ADD, strict=True)[0],
        tool_of("get", None, strict=True)[0],
    )
}
VERBATIM = ("city", "from")  # strings of any form
Call = tuple[str, dict[str, Any]]
CALLS: list[Call] = [
    ("get_weather", {"city": 'Zürich "x" </a> {[', "days": 2, "opts": {"a": "}]"}}),
    ("add", {"x": 1.5, "unit": "ft"}),
]
# As written by the templates of the models.
GOLDEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"x": 1.5}}\n</tool_call>',
    "llama3": '{"name": "add", "parameters": {"x": 1.5}}',
    "mistral-named": '[TOOL_CALLS]add[ARGS]{"x": 1.5}',
    "mistral-named-id": '[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"x": 1.5}',
    "mistral-array": '[TOOL_CALLS][{"name": "add", "arguments": {"x": 1.5}, "id": "a1b2c3d4e"}]',
    "qwen-coder": "<tool_call>\n<function=add>\n<parameter=x>\n1.5\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm": "<tool_call>add\n<arg_key>x</arg_key>\n<arg_value>1.5</arg_value>\n</tool_call>",
    "glm-4.7": "<tool_call>add<arg_key>x</arg_key><arg_value>1.5</arg_value></tool_call>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"  # noqa: RUF001
    '{"x": 1.5}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',  # noqa: RUF001
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"x": 1.5}<|tool_call_end|><|tool_calls_section_end|>',
    "granite": '<|tool_call|>[{"name": "add", "arguments": {"x": 1.5}}]',
    "pythonic": "[add(x=1.5)]",
}


def written(dialect: Dialect, calls: list[Call]) -> str:
    """Write calls by the patterns of the dialect."""
    texts = []
    for n, (name, arguments) in enumerate(calls[: None if dialect.several else 1]):
        if dialect.pythonic:
            inside = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        elif dialect.parameter:
            inside = ""
            for key, value in arguments.items():
                raw = value if key in VERBATIM else json.dumps(value, ensure_ascii=False)
                inside += dialect.parameter.replace("{key}", key).replace("{value}", raw)
        else:
            inside = json.dumps(arguments, ensure_ascii=False)
        given = str(n) if dialect.id.startswith("[0-9]") else "a1b2c3d4e"
        text = dialect.call.replace("{name}", name).replace("{id}", given)
        texts.append(text.replace("{arguments}", inside))
    return dialect.begin + dialect.between.join(texts) + dialect.end


def markers(dialect: Dialect) -> list[str]:
    """Return the strings of the dialect that look like single tokens."""
    patterns = dialect.begin + dialect.call + dialect.between + dialect.end + dialect.parameter
    return list(dict.fromkeys(re.findall(r"<[^\s<>{}=\"]+>|\[[A-Z_]+\]", PLACE.sub(" ", patterns))))


def form(dialect: Dialect, *, tokens: bool) -> ToolFormat:
    ids = {text: FIRST_MARKER + i for i, text in enumerate(markers(dialect))} if tokens else {}
    return ToolFormat(dialect, ids, ())


def found(deltas: list[AnswerDelta]) -> tuple[str, list[Call]]:
    """Return the text and the calls."""
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        if delta.index >= 0:
            one = calls.setdefault(delta.index, ["", ""])
            assert not (delta.name and one[0]), "a name came twice"
            assert bool(delta.name) == bool(delta.id)
            one[0] += delta.name
            one[1] += delta.arguments
    text = "".join(delta.text for delta in deltas)
    return text, [(name, json.loads(arguments)) for name, arguments in calls.values()]


def parsed(made: ToolFormat, *parts: str) -> list[AnswerDelta]:
    parser = ToolCallParser(made, TOOLS)
    *others, last = parts
    return [d for part in others for d in parser.push(part)] + parser.push(last, ends=True)


@pytest.mark.parametrize("name", GOLDEN)
def test_patterns_match_calls_of_the_models(name: str) -> None:
    made = form(BY_NAME[name], tokens=False)
    assert found(parsed(made, GOLDEN[name])) == ("", [("add", {"x": 1.5})])


@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)
def test_written_calls_are_parsed_in_any_chunks(dialect: Dialect, tokens: bool) -> None:
    made = form(dialect, tokens=tokens)
    before = "" if dialect.bare else "Let me see.\n\n"
    text = made.marked(before + written(dialect, CALLS))
    expected = (before.strip(), CALLS if dialect.several else CALLS[:1])
    assert found(parsed(made, text)) == expected
    assert found(parsed(made, *text)) == expected
    for cut in range(len(text)):
        assert found(parsed(made, text[:cut], text[cut:])) == expected, cut


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)
def test_truncated_and_broken_calls_are_no_errors(dialect: Dialect) -> None:
    made = form(dialect, tokens=True)
    text = made.marked("Well " * (not dialect.bare) + written(dialect, CALLS))
    for cut in range(len(text)):
        whole = parsed(made, text[:cut])
        assert sum(bool(delta.name) for delta in whole) <= 2
        noisy = parsed(made, text[:cut] + "\n}]'\")x " + text[cut + 3 :], "<tool_call>{[(")
        assert all(delta.index < 6 for delta in noisy)
    nothing = "No call <tool_cal"
    assert found(parsed(made, *nothing)) == (nothing, [])


@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)
def test_a_call_that_is_cut_off_neither_looks_complete_nor_leaves_markers(
    dialect: Dialect, tokens: bool
) -> None:
    made = form(dialect, tokens=tokens)
    text = made.marked(written(dialect, CALLS[:1]))
    for cut in range(len(text)):
        whole = parsed(made, text[:cut])
        if any(delta.name for delta in whole):
            assert not any(delta.text for delta in whole), cut
        with suppress(ValueError):
            assert found(whole)[1] in ([], CALLS[:1]), cut


def test_spelled_markers_are_text_where_they_are_tokens() -> None:
    made = form(BY_NAME["hermes"], tokens=True)
    text = GOLDEN["hermes"]
    assert found(parsed(made, text)) == (text, [])
    assert found(parsed(made, made.marked(text)))[1] == [("add", {"x": 1.5})]


def test_unknown_tools_are_text() -> None:
    made = form(BY_NAME["hermes"], tokens=False)
    text = GOLDEN["hermes"].replace("add", "subtract")
    assert found(parsed(made, "a ", text, " b")) == (f"a {text} b", [])


class Allowed:
    """Checks whether the grammar of a dialect allows a text."""

    def __init__(self, made: ToolFormat, choice: ToolMode, *, one: bool = False) -> None:
        self._made = made
        source = ToolGrammar(made).grammar(AllowedCalls(list(TOOLS.values()), choice, one))
        self._grammar = MarkedGrammar(source, made.ids)

    def __call__(self, text: str) -> bool:
        return self._grammar.allows(self._made.split(text))


@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)
def test_the_grammar_allows_only_valid_calls(dialect: Dialect, tokens: bool) -> None:
    made = form(dialect, tokens=tokens)
    both, one = written(dialect, CALLS), written(dialect, CALLS[:1])
    bad = [
        written(dialect, [("add", {"x": "a lot"})]),
        written(dialect, [("add", {})]),
        written(dialect, [("add", {"x": 1, "unit": "mile"})]),
        written(dialect, [("nothing", {})]),
    ]
    before = "" if dialect.bare else "Well, "
    auto = Allowed(made, "auto")
    assert auto(before + both) and auto("Only text.") and auto("")
    assert not any(auto(before + text) for text in bad)
    required = Allowed(made, "required")
    assert required(both) and required(written(dialect, [("get", {})]))
    assert not required("Only text.") and not required("") and not any(map(required, bad))
    single = Allowed(made, "required", one=True)
    assert single(one) and single(both) == (not dialect.several)
    never = Allowed(made, "none")
    assert never("Only text.") and not never(one)


@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)
def test_a_text_in_place_of_calls_may_be_constrained(dialect: Dialect, tokens: bool) -> None:
    made = form(dialect, tokens=tokens)
    calls = written(dialect, CALLS)

    def allows(choice: ToolMode, text: str) -> bool:
        source = ToolGrammar(made).grammar(AllowedCalls(list(TOOLS.values()), choice, answer=True))
        whole = Regex("[0-9]+ days").within(source)
        return MarkedGrammar(whole, made.ids).allows(made.split(text))

    assert allows("auto", "12 days") and allows("auto", calls) and not allows("auto", "12 ways")
    assert allows("none", "12 days") and not allows("none", calls) and not allows("none", "")
    assert not allows("auto", "12 days" + calls)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }} <function=x> <parameter=y>", "qwen-coder"),
        ("<tool_call> {{ x }}", "hermes"),
        ("[TOOL_CALLS] {{ x }} [ARGS]", "mistral-named"),
        ("[TOOL_CALLS] {{ x }}", "mistral-array"),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_found_in_a_template(template: str, name: str | None) -> None:
    made = dialect_of(template)
    assert (made and made.name) == name


TREE = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}
FLAGS = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "object"}, "c": {"const": 1}},
    "required": ["a"],
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "é\n\\"], ["a", "abcd"]),
        ({"type": "string", "maxLength": 0}, [""], ["a"]),
        (
            {"type": "array", "items": {"type": "string"}, "minItems": 2},
            [["", "b"]],
            [[""], [1, 2]],
        ),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 1}, [[], [None]], [[None, None]]),
        ({"type": "array", "maxItems": 0}, [[]], [[1]]),
        (FLAGS, [{"a": True}, {"a": False, "b": {"x": 1.5}, "c": 1}], [{}, {"c": 1}, {"a": 1}]),
        ({"type": "object", "additionalProperties": False}, [{}], [{"a": 1}]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["x", None], [1, True]),
        ({"type": ["integer", "null"], "minimum": 2}, [2, None], [1, "x"]),
        ({"enum": ["a", 1, None]}, ["a", 1, None], ["b", 2]),
        ({"$ref": "#/$defs/tree"}, [[], [[[]]]], [[[], []], 1]),
    ],
)
def test_python_arguments_satisfy_their_schema(
    schema: Any, good: list[Any], bad: list[Any]
) -> None:
    made = form(BY_NAME["pythonic"], tokens=False)
    whole = {"properties": {"x": schema}, "required": ["x"], "$defs": {"tree": TREE}}
    tool, dropped = tool_of("f", whole, strict=True, dialect=made.dialect)
    grammar = MarkedGrammar(ToolGrammar(made).grammar(AllowedCalls([tool], "required")), {})
    texts = {repr(value): made.split(f"[f(x={value!r})]") for value in (*good, *bad)}
    assert {text for text, pieces in texts.items() if grammar.allows(pieces)} == set(
        map(repr, good)
    )
    assert not dropped


NAMES = {
    "type": "object",
    "properties": {
        "from": {"type": "string"},
        "max-days": {"type": "integer"},
        "my city": {"type": "string", "oneOf": [{"const": "Oslo"}, {"const": "Rome"}]},
        "unit": {"oneOf": [{"enum": ["m"]}, {"type": "null"}]},
    },
    "required": ["from", "other"],
    "additionalProperties": {"type": "integer"},
}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.name)
def test_arguments_have_any_name_and_the_values_of_their_schema(dialect: Dialect) -> None:
    made = form(dialect, tokens=False)
    tool, dropped = tool_of("f", NAMES, strict=True, dialect=dialect)
    source = ToolGrammar(made).grammar(AllowedCalls([tool], "required"))
    grammar = MarkedGrammar(source, {})
    good = {"from": "x", "max-days": 2, "my city": "Rome", "unit": None, "other": 3}

    def call(**changes: object) -> str:
        return written(dialect, [("f", {**good, **changes})])

    whole = call()
    assert grammar.allows([whole]) and not dropped
    parser = ToolCallParser(made, {"f": tool})
    assert found(parser.push(whole, ends=True)) == ("", [("f", good)])
    for bad in ({"my city": "Bonn"}, {"unit": "ft"}, {"other": "x"}):
        assert not grammar.allows([call(**bad)]), bad


@pytest.mark.parametrize("key", ["items", "additionalProperties"])
def test_nested_python_arguments_have_a_small_grammar(key: str) -> None:
    schema: Any = {"type": "integer"}
    value: Any = 1
    for _ in range(16):
        schema = {"type": ["array", "object"], key: schema}
        value = [value] if key == "items" else {"a": value}
    dialect = BY_NAME["pythonic"]
    tool, _ = tool_of("f", {"properties": {"x": schema}}, strict=True, dialect=dialect)
    source = ToolGrammar(form(dialect, tokens=False)).grammar(AllowedCalls([tool], "required"))
    assert len(source) < 1 << 16
    assert MarkedGrammar(source, {}).allows([f"[f(x={value})]"])


def test_definitions_are_not_repeated_without_bound() -> None:
    properties = {f"p{i}": {"$ref": "#/$defs/x"} for i in range(1000)}
    schema = {"properties": properties, "$defs": {"x": {"enum": ["x" * 1000]}}}
    tool, _ = tool_of("f", schema, strict=True, dialect=BY_NAME["glm"])
    with pytest.raises(ParamError, match="bytes in all"):
        ToolGrammar(form(BY_NAME["glm"], tokens=False)).grammar(AllowedCalls([tool], "required"))


@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize(
    "dialect", [one for one in DIALECTS if one.parameter], ids=lambda d: d.name
)
def test_verbatim_texts_keep_their_lengths(dialect: Dialect, tokens: bool) -> None:
    made = form(dialect, tokens=tokens)
    of_city = {"type": "string", "minLength": 2, "maxLength": 3}
    tool, _ = tool_of("f", {"properties": {"city": of_city}}, strict=True, dialect=dialect)
    grammar = MarkedGrammar(ToolGrammar(made).grammar(AllowedCalls([tool], "required")), made.ids)
    for city, allowed in {"a": False, "ab": True, "a\nb": True, "abcd": False}.items():
        pieces = made.split(written(dialect, [("f", {"city": city})]))
        assert grammar.allows(pieces) == allowed, city


@pytest.mark.parametrize(
    ("schema", "strict", "reason"),
    [
        ({"properties": None}, False, "properties at / must be an object, not None"),
        ({"required": 5}, False, "required at / must be a list, not 5"),
        ({"required": [5]}, False, "required at / must be a list of strings"),
        ({"properties": {"a": {"anyOf": {}}}}, False, "anyOf at /properties/a must be a list"),
        ({"properties": {"a": {"enum": 1.5}}}, False, "enum at /properties/a must be a list"),
        ({"properties": {"a": {"maxLength": math.inf}}}, False, "maxLength at .* a whole number"),
        ({"type": "string"}, False, "must be a JSON Schema of an object"),
        ({"$ref": "http://x"}, False, "leads out of the schema"),
        ({"properties": {"a": {"not": {}}}}, True, "is strict, and this cannot be enforced: not"),
        ({"properties": {"a": {"maxLength": -1}}}, False, "maxLength at /properties/a must be"),
    ],
)
def test_bad_parameters(schema: dict[str, Any], strict: bool, reason: str) -> None:
    with pytest.raises(ParamError, match=rf"^tools: f.* {reason}"):
        tool_of("f", schema, strict=strict)
    assert tool_of("f", {"properties": {"a": {"not": {}}}}, strict=False)[1] == [
        "f: not at /properties/a"
    ]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("pythonic", "a=b"),
        ("pythonic", "it's"),
        ("pythonic", ""),
        ("seed", "a>b"),
        ("qwen-coder", "a>\nb"),
        ("glm", "</arg_key>\n<arg_value>"),
    ],
)
def test_a_name_that_looks_like_what_follows_it_is_refused(name: str, key: str) -> None:
    schema = {"properties": {key: {"type": "string"}}}
    with pytest.raises(ParamError, match="^tools: f: calls of this model cannot name the property"):
        tool_of("f", schema, strict=False, dialect=BY_NAME[name])
    assert tool_of("f", schema, strict=True, dialect=BY_NAME["hermes"])[1] == []


@pytest.mark.parametrize("reference", ["#anchor", "#x/properties/a", "#/$defs/none"])
def test_references_in_python_arguments_are_pointers(reference: str) -> None:
    made = form(BY_NAME["pythonic"], tokens=False)
    schema = {"properties": {"a": {"$ref": reference}}}
    tool, _ = tool_of("f", schema, strict=True, dialect=made.dialect)
    with pytest.raises(ParamError, match="leads nowhere"):
        ToolGrammar(made).grammar(AllowedCalls([tool], "required"))


def test_arguments_are_nested_at_most_as_deeply_as_they_can_be_read() -> None:
    deep: Any = {}
    for _ in range(400):
        deep = {"type": "object", "properties": {"a": deep}}
    made = MarkedFormat(form=form(BY_NAME["pythonic"], tokens=False))
    with pytest.raises(ParamError, match=r"^tools: .* nested too deeply"):
        ToolUse.of(made, [Function("f", parameters=deep)])


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("hermes", []),
        ("glm", ["anyOf at /"]),
        ("pythonic", ["anyOf at /", "pattern at /properties/a"]),
    ],
)
def test_what_a_dialect_cannot_enforce_is_reported(name: str, parts: list[str]) -> None:
    of_a = {"type": "string", "pattern": "a+"}
    schema = {"properties": {"a": of_a}, "anyOf": [{"required": ["a"]}]}
    _, dropped = tool_of("f", schema, strict=False, dialect=BY_NAME[name])
    assert sorted(dropped) == [f"f: {part}" for part in parts]
