"""Constraints on the output text, under the names that APIs use for them.

A request gives `response_format` as in OpenAI's API, `structured` (vLLM's name:
`structured_outputs`), or one of the fields below, which other engines use. All become a
`Constraint`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kvik.core.structured import (
    ANY_OBJECT,
    MAX_CHOICES,
    MAX_SOURCE_BYTES,
    Choice,
    Constraint,
    Grammar,
    JsonSchema,
    Regex,
    Structure,
)
from kvik.errors import ParamError

Source = Annotated[str, Meta(max_length=MAX_SOURCE_BYTES)]
Schema = dict[str, Any] | bool | Source
Options = Annotated[list[Source], Meta(max_length=MAX_CHOICES)]


class JsonSchemaFormat(Struct, kw_only=True):
    """A JSON Schema. With `strict`, a schema that cannot be fully enforced is refused."""

    schema: Schema | None = None
    strict: bool | None = None
    name: str | None = None
    description: str | None = None


class TypedFormat(Struct, kw_only=True):
    """The format of an answer. llama.cpp puts the schema into `schema`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: Schema | None = None


class TypedGrammar(Struct, kw_only=True):
    """A constraint in TGI's format."""

    type: Literal["json", "regex"]
    value: Schema


def _typed_format(value: TypedFormat) -> Constraint | None:
    if value.type == "text":
        return None
    form = value.json_schema
    schema = value.schema if form is None else form.schema
    if value.type == "json_schema" and schema is None:
        raise ValueError("needs json_schema with a schema")
    strict = bool(form is not None and form.strict)
    return JsonSchema(ANY_OBJECT if schema is None else schema, strict=strict)


def _typed_grammar(value: Source | TypedGrammar) -> Constraint | None:
    if isinstance(value, str):
        return Grammar(value) if value else None
    return (Regex if value.type == "regex" else JsonSchema)(value.value)  # type: ignore[arg-type]


# Field -> its JSON type, and a function that makes its constraint. An empty text sets none.
FIELDS: Mapping[str, tuple[Any, Callable[[Any], Constraint | None]]] = {
    "response_format": (TypedFormat, _typed_format),
    "guided_json": (Schema, JsonSchema),
    "guided_json_object": (bool, lambda given: JsonSchema(ANY_OBJECT) if given else None),
    "guided_regex": (Source, Regex),
    "guided_choice": (Options, Choice),
    "guided_grammar": (Source, Grammar),
    "json_schema": (Schema, JsonSchema),
    "regex": (Source, Regex),
    "ebnf": (Source, Grammar),
    "grammar": (Source | TypedGrammar, _typed_grammar),
}


# `structured` and its other name come first.
READERS: Mapping[str, Callable[[Any], Constraint | None]] = {
    "structured": Structure().checked,
    "structured_outputs": Structure().checked,
    **{name: read for name, (_, read) in FIELDS.items()},
}


def constraint_of(body: object) -> Constraint | None:
    """Return the constraint that a request puts on its output; None without one.

    Raises:
        ParamError: it cannot be read, or two fields set different constraints.
    """
    chosen: Constraint | None = None
    for field, read in READERS.items():
        value = getattr(body, field, None)
        if value is None or value in ("", [], {}):
            continue
        try:
            constraint = read(value)
        except ValueError as error:
            raise ParamError(field, str(error)) from None
        if constraint is None:
            continue
        constraint = constraint.called(field)
        if chosen is None:
            chosen = constraint
        elif constraint != chosen:  # guidance sends one constraint under two names
            why = f"contradicts {chosen.name}, which also constrains the text"
            raise ParamError(field, why)
    return chosen
