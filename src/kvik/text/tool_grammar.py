"""Writes grammars of answers that call tools, in llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from kvik.core.structured import MAX_SOURCE_BYTES
from kvik.errors import ParamError
from kvik.text.dialects import PLACE, Dialect, ToolFormat
from kvik.text.grammar import LAYOUT, enforceable, pointed

MAX_GRAMMAR_BYTES = 2 * MAX_SOURCE_BYTES
TOO_LONG = f"may have at most {MAX_GRAMMAR_BYTES} bytes in all"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call."""

    name: str
    parameters: Mapping[str, Any]  # the enforced part of the JSON Schema of its arguments


ToolMode = Literal["auto", "required", "none"]


@dataclass(frozen=True, slots=True)
class AllowedCalls:
    """The calls that an answer may have."""

    tools: Sequence[Tool]
    choice: ToolMode  # calls are optional (also after text), required, or forbidden
    one: bool = False  # at most one call
    # The text follows another grammar, `@answer`; calls are an alternative to it.
    answer: bool = False


class ToolGrammar:
    """Writes the grammars of one format."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form

    def grammar(self, allowed: AllowedCalls, thought: str = "", unclosed: str | None = None) -> str:
        """Return a grammar, in llguidance's Lark, of answers that may call tools.

        Args:
            thought: rule `thought`, for the thought before an answer; "": none.
            unclosed: the beginning of a thought that the opener of a call ends; None: not allowed.
        """
        dialect, rules = self._form.dialect, []
        tools, choice = allowed.tools, allowed.choice
        names = []
        for i, tool in enumerate(tools):
            names.append(f"call_{i}")
            rules += self._call_rules(i, tool)
        call = f"({' | '.join(names)})"
        opener = self._form.opener
        several = dialect.several and not allowed.one
        more = f"({self._lark(dialect.between)} {call})*" if several else ""
        rest = f"{more} {self._lark(dialect.end)}"
        rules.append(f"calls: {self._lark(dialect.begin)} {call} {rest}")
        opened = "calls"
        if self._form.opener_is_token:
            rules += text_rules(self._form.special_ids)
            start = {"auto": "text calls?", "required": "calls", "none": "text"}[choice]
        elif dialect.bare:
            rules += [f"TEXT: /(|[^{re.escape(opener[0])}\\s](.|\\n)*)/"]
            start = {"auto": "TEXT | calls", "required": "calls", "none": "TEXT"}[choice]
        else:
            pattern = _regex(opener)
            first_calls = [call] if dialect.begin else []
            for i in range(0 if dialect.begin else len(tools)):
                rules += [f"first_{i}: {self._call(i, tools[i], skipped=len(opener))}"]
                first_calls.append(f"first_{i}")
            rules += [
                f"TEXT: /(.|\\n)*/ & ~/(.|\\n)*{pattern}(.|\\n)*/",
                f"opened[lazy]: /(.|\\n)*/ {json.dumps(opener)}",
                f"behind: ({' | '.join(first_calls)}) {rest}",
            ]
            opened = "opened behind"
            start = {"auto": "TEXT | opened behind", "required": "calls", "none": "TEXT"}[choice]
        if allowed.answer:
            start = {"auto": "@answer | calls", "required": "calls", "none": "@answer"}[choice]
        if thought:
            start = f"thought ({start})"
            if unclosed is not None and choice != "none":
                start += f" | {unclosed} {opened}"
            rules.append(thought)
        return "\n".join([f"start: {start}", *rules])

    def _lark(self, text: str) -> str:
        parts = (
            f"<[{p}]>" if isinstance(p, int) else json.dumps(p) for p in self._form.split(text)
        )
        return " ".join(parts)

    def _call(self, i: int, tool: Tool, skipped: int = 0) -> str:
        """Return a call, without its first `skipped` characters."""
        parts = []
        for n, part in enumerate(PLACE.split(self._form.dialect.call)):
            if n == 0:
                parts.append(self._lark(part[skipped:]))
            elif n % 2 == 0:
                parts.append(self._lark(part))
            elif part == "name":
                parts.append(json.dumps(tool.name))
            elif part == "id":
                parts.append(f"/{self._form.dialect.id}/")
            else:
                parts.append(f"args_{i}")
        return " ".join(filter(None, parts))

    def _call_rules(self, i: int, tool: Tool) -> list[str]:
        rules = [f"call_{i}: {self._call(i, tool)}"]
        if self._form.dialect.pythonic:
            return rules + PythonRules(f"args_{i}", tool.parameters).rules
        if self._form.dialect.parameter:
            return rules + self._parameter_rules(f"args_{i}", tool.parameters)
        return [*rules, f"args_{i}: {json_rule(tool.parameters)}"]

    def _parameter_rules(self, rule: str, schema: Mapping[str, Any]) -> list[str]:
        properties, required = properties_of(schema), frozenset(schema.get("required", []))
        before, middle, after = PLACE.split(self._form.dialect.parameter)[::2]
        named = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        rules, parts, size = [], [], 0
        for n, (key, inner) in enumerate(properties.items()):
            head = self._lark(before + key + middle)
            text = f"/(.|\\n){count_of(inner, 'Length')}"
            if not is_text(inner):
                value = json_rule(inner)
                if '"$ref"' in value:
                    value = json_rule({**named, **inner})
                if (size := size + len(value)) > MAX_GRAMMAR_BYTES:
                    raise ParamError("tools", TOO_LONG)
                value = f"{value} {self._lark(after)}"
            elif marker := next((m for m in self._form.ids if m in after), ""):
                before_it, _, rest = after.partition(marker)
                value = f"{text}{_regex(before_it)}/ {self._lark(marker + rest)}"
            else:
                rules.append(f"{rule}_{n}[lazy]: {text}/ {json.dumps(after)}")
                value = f"{rule}_{n}"
            parts.append(f"({head} {value}){'' if key in required else '?'}")
        return [f"{rule}: {' '.join(parts)}" if parts else f'{rule}: ""', *rules]


def is_text(schema: object) -> bool:
    """Return whether a value is written verbatim: a string, or a value of unspecified type."""
    if not isinstance(schema, Mapping):
        return True
    others = {"$ref", "allOf", "anyOf", "const", "enum", "format", "oneOf", "pattern"}
    return schema.get("type", "string") == "string" and not others & schema.keys()


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the properties of an object: those that its schema describes, then others that it
    requires."""
    properties = {k: v for k, v in schema.get("properties", {}).items() if v is not False}
    others = dict.fromkeys(schema.get("required", []), schema.get("additionalProperties", True))
    return {**properties, **{k: v for k, v in others.items() if k not in properties}}


def json_rule(schema: Any) -> str:
    """Return a JSON schema as part of a rule."""
    options = {"x-guidance": LAYOUT}
    return f"%json {json.dumps({**schema, **options} if isinstance(schema, Mapping) else options)}"


def count_of(schema: object, of: str, less: int = 0) -> str:
    """Return how often something may come, as in a regular expression: "{1,8}".

    Args:
        of: "Length" or "Items", of `minLength` and so on.
        less: how many come before and are not counted.
    """
    limits = schema if isinstance(schema, Mapping) else {}
    minimum, maximum = limits.get(f"min{of}", 0), limits.get(f"max{of}")
    return f"{{{max(0, minimum - less)},{'' if maximum is None else max(0, maximum - less)}}}"


def _either(options: Iterable[str]) -> str:
    return f"({' | '.join(options)})"


class PythonRules:
    """Rules of Python literals that satisfy a schema.

    Raises:
        ParamError: a `$ref` leads nowhere.
    """

    def __init__(self, rule: str, schema: Mapping[str, Any]) -> None:
        # `rule`, the keyword arguments of an object, in the order of its schema and separated by
        # commas; and those that it needs.
        self.rules: list[str] = []
        self._rule, self._schema = rule, schema
        self._named: dict[str, str] = {}  # reference -> rule
        self._numbers = count()
        self._pairs(rule, schema, "{}=".format)

    def _pairs(self, rule: str, schema: Mapping[str, Any], head: Callable[[str], str]) -> None:
        """Add a rule for the properties of an object, each a head and a value."""
        properties, required = properties_of(schema), frozenset(schema.get("required", []))
        names = list(properties)
        for n, key in enumerate(names):
            pair = f"{json.dumps(head(key))} {self._value(properties[key])}"
            rest = f" {rule}_t{n + 1}" if n + 1 < len(names) else ""
            skip = f" | {rule}_h{n + 1}" if n + 1 < len(names) else ' | ""'
            optional = key not in required
            comma = f'", " {rule}_v{n}'
            self.rules += [
                f"{rule}_v{n}: {pair}",
                f"{rule}_h{n}: {rule}_v{n}{rest}{skip if optional else ''}",
                f"{rule}_t{n}: {f'({comma})?' if optional else comma}{rest}",
            ]
        self.rules.append(f"{rule}: {rule}_h0" if names else f'{rule}: ""')

    def _value(self, schema: object) -> str:
        """Return the expression of a value."""
        if not isinstance(schema, Mapping):
            return _ANY
        if "$ref" in schema:
            return self._reference(str(schema["$ref"]))
        if "enum" in schema or "const" in schema:
            return _either(json.dumps(repr(v)) for v in schema.get("enum", [schema.get("const")]))
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return _either(map(self._value, schema[key]))
        kind = schema.get("type")
        if isinstance(kind, list):
            names = [name for name in (*_LITERALS, "array", "object") if name in kind]
            return _either([self._value({**schema, "type": name}) for name in names] or [_ANY])
        if kind in ("integer", "number"):  # equal in JSON and Python
            return json_rule(schema)
        if kind == "string":
            return f"/'{_CHARACTER}{count_of(schema, 'Length')}'/"
        if kind == "array":
            return self._array(schema)
        if kind == "object":
            return self._object(schema)
        return _LITERALS.get(kind, _ANY) if isinstance(kind, str) else _ANY

    def _array(self, schema: Mapping[str, Any]) -> str:
        max_items = schema.get("maxItems")
        if max_items == 0:
            return '"[]"'
        items = item = self._shared(self._value(schema.get("items")))
        if max_items != 1:
            items += f' (", " {item}){count_of(schema, "Items", less=1)}'
        return f'("[" {items if schema.get("minItems") else f"({items})?"} "]")'

    def _object(self, schema: Mapping[str, Any]) -> str:
        if properties_of(schema):
            rule = f"{self._rule}_o{next(self._numbers)}"
            self._pairs(rule, schema, lambda key: f"{key!r}: ")
            return f'("{{" {rule} "}}")'
        if schema.get("additionalProperties") is False:
            return '"{}"'
        value = self._value(schema.get("additionalProperties"))
        pair = self._shared(f'{_LITERALS["string"]} ": " {value}')
        return f'("{{" ({pair} (", " {pair})*)? "}}")'

    def _shared(self, expression: str) -> str:
        """Return a rule for an expression that comes twice: in nested ones it would double."""
        rule = f"{self._rule}_o{next(self._numbers)}"
        self.rules.append(f"{rule}: {expression}")
        return rule

    def _reference(self, pointer: str) -> str:
        if pointer not in self._named:
            self._named[pointer] = rule = f"{self._rule}_r{len(self._named)}"
            if (target := pointed(self._schema, pointer)) is None:
                raise ParamError("tools", f"$ref {pointer[:80]!r} leads nowhere")
            self.rules.append(f"{rule}: {self._value(target)}")
        return self._named[pointer]


# A character of a string literal: one, or an escape of one.
_CHARACTER = r"([^'\\\n\r\x00]|\\['\\nrt])"
_LITERALS = {
    "string": f"/'{_CHARACTER}*'/",
    "integer": "/-?(0|[1-9][0-9]*)/",
    "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?/",
    "boolean": '("True" | "False")',
    "null": '"None"',
}
_ANY = _either(_LITERALS.values())
# Keywords of the schema of all arguments that only a grammar of JSON enforces, and keywords of any
# schema that `PythonRules` leaves out.
_NOT_OF_ARGUMENTS = frozenset(
    {"allOf", "anyOf", "maxProperties", "minProperties", "oneOf", "patternProperties"}
)
_NOT_IN_PYTHON = _NOT_OF_ARGUMENTS - {"anyOf", "oneOf"} | {
    *("additionalItems", "format", "pattern", "prefixItems")
}


def _regex(text: str) -> str:
    """Return a regular expression that matches only this text, for use between slashes."""
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def text_rules(special_ids: Sequence[int]) -> list[str]:
    """Return rule `text`: any text, which may contain some special tokens."""
    tokens = f" | <[{id_ranges(special_ids)}]>" if special_ids else ""
    return [f"text: (TEXT{tokens})*", "TEXT: /(.|\\n)+/"]


def id_ranges(ids: Sequence[int]) -> str:
    """Return token ids in llguidance's syntax: "1-3,7"."""
    ranges: list[list[int]] = []
    for i in ids:
        if ranges and ranges[-1][1] == i - 1:
            ranges[-1][1] = i
        else:
            ranges.append([i, i])
    return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in ranges)


def tool_of(
    name: str, parameters: Mapping[str, Any] | None, *, strict: bool, dialect: Dialect | None = None
) -> tuple[Tool, list[str]]:
    """Return a tool, and the parts of its schema that are not enforced.

    Args:
        parameters: JSON Schema of its arguments; None: it takes none, as in OpenAI's API.
        dialect: of its calls; None: one with arguments in JSON.

    Raises:
        ParamError: the schema cannot be read; or `strict`, and a part cannot be enforced.
    """
    nothing = {"type": "object", "additionalProperties": False}
    schema = nothing if parameters is None else parameters
    pythonic = dialect is not None and dialect.pythonic
    try:
        subset, dropped = enforceable(schema, _NOT_IN_PYTHON if pythonic else frozenset())
    except ValueError as error:
        raise ParamError("tools", f"{name}: {error}") from None
    except RecursionError:
        raise ParamError("tools", f"{name}: is nested too deeply") from None
    if not isinstance(subset, Mapping) or subset.get("type", "object") != "object":
        raise ParamError("tools", f"{name}: parameters must be a JSON Schema of an object")
    if dialect is not None and (pythonic or dialect.parameter):
        dropped += [f"{key} at /" for key in sorted(_NOT_OF_ARGUMENTS & subset.keys())]
        for key in properties_of(subset):
            if not dialect.can_name(key):
                raise ParamError(
                    "tools", f"{name}: calls of this model cannot name the property {key[:80]!r}"
                )
    if strict and dropped:
        raise ParamError("tools", f"{name} is strict, and this cannot be enforced: {dropped[0]}")
    return Tool(name, {"type": "object", **subset}), [f"{name}: {part}" for part in dropped]
