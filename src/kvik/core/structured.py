"""Structured output: constraints on the text of an answer.

A caller gives a `JsonSchema`, `Regex`, `Choice` or `Grammar`, or a mapping as in requests. All
become a `Constraint`, which is plain data: the frontend checks and translates it
(`kvik.text.grammar`), and it is recorded and sent to the engine unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Protocol, runtime_checkable

from kvik.errors import shown
from kvik.options import Kind

MAX_SOURCE_BYTES = 256 << 10
MAX_CHOICES = 4096
ANY_OBJECT = '{"type": "object"}'

CHECKED: Final = "checked"
ConstraintKind = Literal["json", "regex", "choice", "grammar", "lark", "checked"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on a text."""

    kind: ConstraintKind  # of the source
    # A JSON Schema as JSON; a regular expression in Rust's syntax that matches the whole text; a
    # JSON list of texts; or a grammar: Lark, GBNF, or llguidance's own JSON. For kind "checked" it
    # is llguidance's; for "lark" one written by the frontend. Callers use neither of these two
    # kinds.
    source: str
    # A schema is refused if a part of it cannot be enforced; else that part is dropped.
    strict: bool = False
    # JSON may have spaces and line breaks between its tokens; else it is laid out as `json.dumps`
    # does.
    whitespace: bool = False
    # Of the request field that holds it, for errors.
    name: str = field(default="structured", compare=False)
    # A Lark grammar of the whole answer, in which `@answer` is this text; "": the answer is only
    # this text.
    around: str = ""

    def called(self, name: str) -> Constraint:
        """Return the same constraint, held by the field `name`."""
        fields = (self.kind, self.source, self.strict, self.whitespace)
        return Constraint(*fields, name, self.around)

    def to_mapping(self) -> dict[str, object]:
        """Return a caller's constraint as a request holds it; see `Structure`."""
        if self.kind == "json":
            flags = {"strict": self.strict, "whitespace": self.whitespace}
            return {"json": self.source, **flags}
        return {self.kind: json.loads(self.source) if self.kind == "choice" else self.source}

    def within(self, around: str) -> Constraint:
        """Return the same constraint as a part of another grammar; see `around`."""
        return replace(self.called(self.name), around=around)


# Protocols that an engine needs for structured texts; `kvik.text.matcher` implements them.


class TextMatcher(Protocol):
    """The state of one answer in its grammar."""

    ended: bool  # the answer is complete: nothing can follow it, or a token came that ends it
    num_surplus: int  # tokens that came after its end

    def append(self, token: int) -> None:
        """Advance by a token of the answer, or by one after its end.

        Raises:
            ParamError: it breaks the grammar, or the grammar became too complex.
        """
        ...

    def valid(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens, from the first on, may follow."""
        ...

    def forced(self) -> list[int]:
        """Return the tokens that must follow, up to where there is a choice."""
        ...

    def mask(self, supposed: Sequence[int] = ()) -> Any:
        """Return which tokens may come next. Where the grammar forces a text, only the first token
        of its usual tokenisation may, so that an answer does not depend on which tokens were
        drafts.

        Args:
            supposed: drafts before the token, which were not appended. After one that is not
                allowed, or that ends the answer, the result does not matter.

        Returns:
            [vocab_size // 32 + 1] int32, valid until the next call: bit i % 32 of word i // 32 is
            token i's.

        Raises:
            ParamError: the grammar became too complex.
        """
        ...


class Grammars(Protocol):
    """The grammars of an engine."""

    def prepare(self) -> None:
        """Begin to make what the first grammar needs, in a thread. This may keep other threads from
        running, the longer the larger the vocabulary. Errors are left to the first grammar."""
        ...

    def begin(self, constraint: Constraint) -> Future[object]:
        """Begin to build a grammar. The future raises the errors of `matcher`."""
        ...

    def matcher(
        self, constraint: Constraint, stop_ids: Sequence[int], output: Sequence[int] = ()
    ) -> TextMatcher:
        """Return a matcher for an answer; builds its grammar if that is not cached.

        Args:
            stop_ids: tokens that end the answer.
            output: tokens of the answer so far.

        Raises:
            ParamError: the grammar cannot be built, or see `TextMatcher.append`.
        """
        ...


# The constraints that callers can give.


@runtime_checkable
class Described(Protocol):
    """A pydantic model."""

    def model_json_schema(self) -> dict[str, Any]: ...


class JsonSchema(Constraint):
    """JSON that conforms to a schema.

    Args:
        schema: a JSON Schema (draft 2020-12) as a mapping or as JSON, or a pydantic model; objects
            of a model have only its fields as properties, unless it allows others.

    Raises:
        ValueError: it is not a JSON Schema, or too large.
    """

    def __init__(self, schema: object, *, strict: bool = False, whitespace: bool = False) -> None:
        Constraint.__init__(self, "json", _schema_text(schema), strict, whitespace)


class Regex(Constraint):
    """Text that a regular expression matches as a whole; raises ValueError if it is too large."""

    def __init__(self, pattern: str) -> None:
        Constraint.__init__(self, "regex", _text("regex", pattern))


class Choice(Constraint):
    """One of some texts; raises ValueError if there are none, or too many."""

    def __init__(self, options: Sequence[str]) -> None:
        Constraint.__init__(self, "choice", _choices(options))


class Grammar(Constraint):
    """Text of a grammar: Lark, GBNF, or llguidance's own JSON; raises ValueError if it is too
    large."""

    def __init__(self, text: str) -> None:
        Constraint.__init__(self, "grammar", _text("grammar", text))


class Structure(Kind):
    """A `Constraint`, or a mapping with one of json, json_object, regex, choice and grammar; for
    JSON also with strict and whitespace."""

    expects = 'a JSON object such as {"regex": "[0-9]+"}'
    metavar = "JSON"

    def parse(self, text: str) -> object:
        try:
            return json.loads(text)
        except RecursionError:
            raise ValueError(text) from None

    def checked(self, value: object) -> Constraint:
        if isinstance(value, Constraint):
            return value.called(value.name)
        if isinstance(value, Described):
            return self.checked(JsonSchema(value))
        if not isinstance(value, Mapping):
            raise ValueError(f"must be {self.expects}, not {shown(value)}")
        return self.checked(_of_mapping(value))


_IGNORED = ("backend", "disable_any_whitespace", "disable_fallback")  # of vLLM
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


def _of_mapping(value: Mapping[Any, object]) -> Constraint:
    entries = {
        n: entry for n, entry in value.items() if entry not in (None, False) and n not in _IGNORED
    }
    flags = {
        name: _flag(name, entries.pop(name)) for name in ("strict", "whitespace") if name in entries
    }
    if len(entries) != 1 or not entries.keys() <= set(_KINDS):
        names = ", ".join(map(shown, entries)) or "nothing"
        raise ValueError(f"must have one of {', '.join(_KINDS)}, not {names}")
    ((kind, source),) = entries.items()
    if kind == "json_object":
        _flag(kind, source)
        return JsonSchema(ANY_OBJECT, **flags)
    if kind == "json":
        return JsonSchema(source, **flags)
    if flags:
        raise ValueError(f"{next(iter(flags))} is only for json")
    if kind == "choice":
        return Choice(source)  # type: ignore[arg-type]
    return (Regex if kind == "regex" else Grammar)(source)  # type: ignore[arg-type]


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {shown(value)}")
    return value


def _schema_text(schema: object) -> str:
    if isinstance(schema, Described):
        fields = schema.model_json_schema()
        schema = fields
        for model in (fields, *fields.get("$defs", {}).values()):
            if "properties" in model:  # allow only the fields of the model
                model.setdefault("additionalProperties", False)
    try:
        if isinstance(schema, str):
            text, schema = schema, json.loads(schema)
        else:
            text = json.dumps(schema)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    except (TypeError, ValueError):
        raise ValueError(f"must be a JSON Schema, not {shown(schema)}") from None
    if not isinstance(schema, Mapping | bool):
        raise ValueError(f"a JSON Schema is an object, not {shown(schema)}")
    return _text("json", text)


def _choices(options: object) -> str:
    if not isinstance(options, tuple | list) or not options:
        raise ValueError("choice must be a list of at least one text")
    if len(options) > MAX_CHOICES:
        raise ValueError(f"choice may have at most {MAX_CHOICES} texts, not {len(options)}")
    if not all(isinstance(option, str) and option for option in options):
        raise ValueError("choice must be made of texts that are not empty")
    return _text("choice", json.dumps(list(dict.fromkeys(options))))


def _text(label: str, source: object) -> str:
    if not isinstance(source, str) or not source:
        raise ValueError(f"{label} must be a text that is not empty, not {shown(source)}")
    try:
        size = len(source.encode())
    except UnicodeEncodeError:
        raise ValueError(f"{label} must be valid Unicode") from None
    if size > MAX_SOURCE_BYTES:
        raise ValueError(f"{label} may have at most {MAX_SOURCE_BYTES} bytes, not {size}")
    return source
