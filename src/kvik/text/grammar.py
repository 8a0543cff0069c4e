"""Translates a `Constraint` to a grammar of llguidance, and builds the library's matcher of it.

The library matches the bytes of all tokens by derivatives of regular expressions and an Earley
parser; only a trie of the vocabulary is precomputed (github.com/guidance-ai/llguidance).

Its vocabulary has one additional token at the end, which represents every token that ends an
answer: its bit in a mask says that the text may end.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any

from kvik.core.structured import MAX_CHOICES, Constraint
from kvik.errors import ParamError, brief
from kvik.text.schema_numbers import exact, gathered

if TYPE_CHECKING:
    from kvik.text.tokenizer import Tokenizer

FORMATS = {
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
}  # fmt: skip
# Keywords that constrain a value and cannot be enforced by the grammar.
NOT_ENFORCED = {
    "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired",
    "dependentSchemas", "else", "if", "maxContains", "minContains", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
OPTIONS = "x-guidance"  # keyword of llguidance, which could lift limits
COUNTS = {"maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties"}
# Lookaround, word boundaries, back references and atomic groups in regular expressions.
BEYOND_REGULAR = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?(?:[=!>]|<[=!])|\\[1-9bB]|\\k<)")

# Keywords whose value is a schema, a list of schemas, or a mapping to schemas.
ONE = {"additionalItems", "additionalProperties", "items"}
LISTED = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
NAMED = {"$defs", "definitions", "patternProperties", "properties"}
ANNOTATIONS = {"$comment", "default", "description", "examples", "title"}
SCALARS = ("boolean", "integer", "null", "number", "string")
LISTS = {"allOf", "anyOf", "enum", "oneOf", "prefixItems", "required"}


def enforceable(schema: object, left_out: frozenset[str] = frozenset()) -> tuple[object, list[str]]:
    """Return the enforceable part of a schema, and the parts left out: each a keyword and the JSON
    pointer of the schema that has it.

    Args:
        left_out: more keywords that cannot be enforced.

    Raises:
        ValueError: a `$ref` points outside the schema, or a part has the wrong type.
        RecursionError: it is nested too deeply.
    """
    cleaning = _Cleaning(schema, NOT_ENFORCED | left_out)
    return cleaning.cleaned(schema, ""), cleaning.dropped


@dataclass(frozen=True, slots=True)
class _Cleaning:
    """Makes the enforceable part of a schema."""

    root: object  # the whole schema
    left_out: Set[str]  # keywords that cannot be enforced
    dropped: list[str] = field(default_factory=list)  # what was left out; see `enforceable`

    def cleaned(self, schema: object, path: str, *, gather: bool = True) -> object:
        """Return the enforceable part of a schema at a JSON pointer.

        Args:
            gather: whether its numbers are to be gathered; those of a member of `allOf` were.
        """
        if schema is True:
            return {}
        if not isinstance(schema, Mapping):
            return schema  # false; or invalid, which llguidance reports
        if gather:
            schema = gathered(schema, lambda pointer: pointed(self.root, pointer))
        schema = _with_named(schema)
        result: dict[str, Any] = {}
        for key, value in schema.items():
            if key == OPTIONS or (key == "required" and schema.get("type", "object") in SCALARS):
                continue  # "required" constrains only objects; in old drafts it is a boolean here
            if (unenforced := _unenforced(key, value, self.left_out)) is not None:
                if unenforced:
                    self.dropped.append(f"{unenforced} at {path or '/'}")
                continue
            if key == "$ref" and isinstance(value, str) and not value.startswith("#"):
                raise ValueError(f"$ref at {path or '/'} leads out of the schema: {value[:100]}")
            result[key] = self._value(key, value, path)
        for key in ("minProperties", "maxProperties"):
            if key in result and not _has_all_properties(result):
                del result[key]
                self.dropped.append(f"{key} at {path or '/'}")
        return exact(result)

    def _value(self, key: str, value: object, path: str) -> object:
        pointer = f"{path}/{_escaped(key)}"
        if key in COUNTS:
            if not isinstance(value, int | float) or not 0 <= value < inf or value != int(value):
                raise ValueError(
                    f"{key} at {path or '/'} must be a whole number, not {value!r:.40}"
                )
            return int(value)
        if key in LISTS:
            if not isinstance(value, list | tuple):
                raise ValueError(f"{key} at {path or '/'} must be a list, not {value!r:.40}")
            if key == "required" and not all(isinstance(name, str) for name in value):
                raise ValueError(f"{key} at {path or '/'} must be a list of strings")
        if key == "properties" and not isinstance(value, Mapping):
            raise ValueError(f"{key} at {path or '/'} must be an object, not {value!r:.40}")
        if key in ("const", "enum") and (large := _inexact(value)) is not None:
            raise ValueError(
                f"{key} at {path or '/'} has {large}, which cannot be enforced exactly"
            )
        if key in NAMED and isinstance(value, Mapping):
            result = {}
            for name, part in value.items():
                if key == "patternProperties" and BEYOND_REGULAR.search(name):
                    self.dropped.append(f"{key} {name[:40]} at {path or '/'}")
                else:
                    result[name] = self.cleaned(part, f"{pointer}/{_escaped(name)}")
            return result
        if key in LISTED and isinstance(value, list | tuple):
            return [
                self.cleaned(part, f"{pointer}/{i}", gather=key != "allOf")
                for i, part in enumerate(value)
            ]
        if key in ONE and not isinstance(value, bool):
            return self.cleaned(value, pointer)
        return value


def _with_named(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an equal schema without `propertyNames`, if that lists the names or is a pattern, or
    the schema itself."""
    names, named = schema.get("propertyNames"), schema.get("properties", {})
    if not isinstance(names, Mapping) or not isinstance(named, Mapping):
        return schema
    rule = {key: value for key, value in names.items() if key not in ANNOTATIONS}
    if rule.pop("type", "string") != "string" or len(rule) > 1 or "patternProperties" in schema:
        return schema
    others = {key: value for key, value in schema.items() if key != "propertyNames"}
    value = schema.get("additionalProperties", True)
    match rule:
        case {"enum": [*listed]} if all(isinstance(name, str) for name in listed):
            known = {name: named[name] for name in named if name in listed}
            every = {**dict.fromkeys(listed, value), **known}
            ordered = {name: every[name] for name in (*known, *every)}
            return {**others, "properties": ordered, "additionalProperties": False}
        case {"pattern": str() as pattern} if not named:
            return {**others, "patternProperties": {pattern: value}, "additionalProperties": False}
    return schema if rule else others


def pointed(schema: object, pointer: object) -> object:
    """Return the part of a schema that a `$ref` leads to; None: it leads nowhere, or elsewhere."""
    first, *parts = pointer.split("/") if isinstance(pointer, str) else [""]
    if first != "#":  # an anchor, or another document
        return None
    for part in parts:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(schema, Mapping) or key not in schema:
            return None
        schema = schema[key]
    return schema


def _unenforced(key: str, value: object, left_out: Set[str]) -> str | None:
    """Return the keyword to report as left out, "" to drop it silently, or None to keep it."""
    if key == "uniqueItems":
        return "" if value is False else key
    if key == "format" and isinstance(value, str) and value not in FORMATS:
        return f"format {value[:40]}"
    if key == "pattern" and isinstance(value, str) and BEYOND_REGULAR.search(value):
        return key
    return key if key in left_out else None


def _inexact(value: object) -> int | None:
    """Return an integer in a value that llguidance would write with other digits, or None."""
    if isinstance(value, Mapping | list | tuple):
        inner = value.values() if isinstance(value, Mapping) else value
        return next((large for large in map(_inexact, inner) if large is not None), None)
    if type(value) is int and (abs(value) >= 1 << 63 or int(float(value)) != value):
        return value
    return None


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _has_all_properties(schema: Mapping[str, Any]) -> bool:
    """Return whether an object must have all declared properties, so that they can be counted."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, Sequence):
        return False
    return set(properties) <= set(required) and "patternProperties" not in schema


FIELD = "structured"
INSTALL = "needs llguidance 1.9 or newer: pip install 'kvik[structured]'"
# Limits of one request in the library. A lexer state takes 1 to 2 KB; 14,000 fuel take 1 ms.
LIMITS = {
    "max_items_in_row": MAX_CHOICES + 100,  # each text of a choice is one
    "max_lexer_states": 20_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "verbose_errors": False,  # verbose ones repeat the schema
}
LAYOUT = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
SPACED = {"whitespace_flexible": False, "whitespace_pattern": r"[ \n]{0,20}"}
_INSIDE = "\x02"  # a character that no token contains together with others
MAX_SPELT = 4096  # cached texts
_LONGEST = 32  # largest token, in bytes, that `_longest` looks for
_ATTRIBUTES = re.compile(r"\[[^\]\n]*\b(max_tokens|temperature|stop|suffix)\s*=")


def library() -> Any:
    """Import llguidance; raise ParamError if it is not installed."""
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise ParamError(FIELD, INSTALL) from None


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The tokens of a model."""

    # [vocab_size], the bytes of each; b"": the id has no text and is never allowed.
    texts: list[bytes]
    special_ids: list[int]  # of tokens that no text matches. A grammar may name them.

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int) -> TokenBytes:
        """Return the tokens of a tokenizer.

        Args:
            vocab_size: rows of the model's head, some of which may have no token.
        """
        markup = {*tokenizer.special_ids, *tokenizer.markup_ids.values()}
        special = sorted(i for i in markup if i < vocab_size)
        texts = tokenizer.bytes_of_all(vocab_size)
        for i in special:
            texts[i] = b"\xff" + tokenizer.token(i).encode()  # no text has the byte 255
        return cls(texts, special)


class GrammarVocabulary:
    """The tokens of a model in llguidance.

    Args:
        encode: text to token ids, without special tokens; None: forced texts are split greedily.
    """

    def __init__(
        self, tokens: TokenBytes, encode: Callable[[str], list[int]] | None = None
    ) -> None:
        llguidance = library()
        self.stop = len(tokens.texts)  # the token that represents all tokens that end an answer
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._matcher = llguidance.LLMatcher
        self._tokenizer = llguidance.LLTokenizer(_Encoder(tokens, encode))

    def build(self, grammar: str) -> Any:
        """Return llguidance's matcher of a grammar, at its start.

        Raises:
            ParamError: the grammar is invalid, allows no text, or is too complex.
        """
        matcher = self._matcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error():
            forced, mask = matcher.compute_ff_bytes(), matcher.compute_bitmask()
            if not matcher.is_error() and not forced and not any(mask):
                raise ParamError(FIELD, "allows no text at all")
        if matcher.is_error():
            raise ParamError(FIELD, problem(matcher))
        return matcher


def problem(matcher: Any) -> str:
    """Return in a few words why a matcher has failed."""
    text = brief(matcher.get_error()).removesuffix(" <non-verbose/>")
    return "allows no text at all" if text == "NoExtensionBias" else text


class _Encoder:
    """A tokenizer with the interface that `llguidance.LLTokenizer` expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: TokenBytes, encode: Callable[[str], list[int]] | None) -> None:
        self.tokens = [*tokens.texts, b"\xff<stop>"]
        self.eos_token_id = len(tokens.texts)
        self.special_token_ids = [*tokens.special_ids, self.eos_token_id]
        self._ids = {text: i for i, text in enumerate(tokens.texts)}
        self._encode = encode
        self._spelt: dict[str, list[int]] = {}  # forced texts are few and recur
        # SentencePiece puts a space before a text, but not after this character.
        self._before = encode(_INSIDE) if encode is not None else []

    def __call__(self, text: str) -> list[int]:
        ids = self._spelt.get(text)
        if ids is None:
            ids = self._spelling(text)
            if len(self._spelt) < MAX_SPELT:
                self._spelt[text] = ids
        return ids

    def _spelling(self, text: str) -> list[int]:
        data = text.encode()
        if self._encode is not None:
            ids, count = self._encode(_INSIDE + text), len(self._before)
            # In some tokenizers, the bytes of a token differ from the text that it encodes, or a
            # token joins this character with others.
            same = b"".join(self.tokens[i] for i in ids) == _INSIDE.encode() + data
            if same and ids[:count] == self._before:
                return ids[count:]
        return self._longest(data)

    def _longest(self, text: bytes) -> list[int]:
        """Tokenise greedily, with the longest token at each place; []: impossible."""
        ids: list[int] = []
        start = 0
        while start < len(text):
            ends = range(min(len(text), start + _LONGEST), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:
                return []
            ids.append(self._ids[text[start:end]])
            start = end
        return ids


def translate(constraint: Constraint, vocabulary: GrammarVocabulary) -> tuple[str, list[str]]:
    """Return llguidance's grammar of a constraint, after building it once, and the parts of a
    schema that it does not enforce.

    Raises:
        ParamError: the constraint cannot be used; the message says why.
    """
    if constraint.around:
        return _within(constraint, vocabulary)
    source = constraint.source
    try:
        if constraint.kind == "json":
            return _of_schema(constraint, vocabulary)
        if constraint.kind == "regex":
            grammar = library().LLMatcher.grammar_from_regex(source)
        elif constraint.kind == "choice":
            options = " | ".join(map(json.dumps, json.loads(source)))
            grammar = library().LLMatcher.grammar_from_lark(f"start: {options}")
        elif constraint.kind == "lark":
            make = library().LLMatcher.grammar_from_lark
            grammar, dropped = _built(lambda more: make(_laid_out(source, more)), vocabulary)
            return grammar, _unless_strict(constraint, dropped)
        else:
            grammar = _of_text(source)
    except RecursionError:
        raise ParamError(FIELD, "is nested too deeply") from None
    except ParamError:
        raise
    except ValueError as error:
        raise ParamError(FIELD, brief(error)) from None
    vocabulary.build(grammar)
    return grammar, []


def _built(
    make: Callable[[Mapping[str, object]], str], vocabulary: GrammarVocabulary
) -> tuple[str, list[str]]:
    """Return a grammar with JSON schemas, after building it once, and what it does not enforce.

    Args:
        make: makes it with more of llguidance's options for the schemas.
    """
    try:
        vocabulary.build(grammar := make({}))
        return grammar, []
    except ParamError as error:
        if "coerce_one_of" not in error.message:
            raise
    vocabulary.build(grammar := make({"coerce_one_of": True}))
    return grammar, ["oneOf, of which several branches may hold"]


def _laid_out(source: str, more: Mapping[str, object]) -> str:
    """Return a grammar in Lark with more options for the schemas in it that `LAYOUT` formats."""
    return source.replace(json.dumps(LAYOUT), json.dumps({**LAYOUT, **more})) if more else source


def _unless_strict(constraint: Constraint, dropped: list[str]) -> list[str]:
    if constraint.strict and dropped:
        raise ParamError(FIELD, f"is strict, and this cannot be enforced: {'; '.join(dropped)}")
    return dropped


def _within(constraint: Constraint, vocabulary: GrammarVocabulary) -> tuple[str, list[str]]:
    """Return the grammar of a constrained text inside `constraint.around`."""
    grammar, unenforced = translate(replace(constraint, around=""), vocabulary)
    inner = [{"lark_grammar": grammar}]
    if grammar.startswith("{"):
        inner = json.loads(grammar)["grammars"]
    inner[0]["name"] = "answer"

    def make(more: Mapping[str, object]) -> str:
        outer = {"name": "whole", "lark_grammar": _laid_out(constraint.around, more)}
        return json.dumps({"grammars": [outer, *inner]})

    grammar, dropped = _built(make, vocabulary)
    return grammar, unenforced + _unless_strict(constraint, dropped)


def _of_schema(constraint: Constraint, vocabulary: GrammarVocabulary) -> tuple[str, list[str]]:
    schema, dropped = enforceable(json.loads(constraint.source))
    options: dict[str, object] = dict(SPACED if constraint.whitespace else LAYOUT)
    to_grammar = library().LLMatcher.grammar_from_json_schema
    grammar, more = _built(
        lambda more: to_grammar(schema, overrides={**options, **more}), vocabulary
    )
    return grammar, _unless_strict(constraint, dropped + more)


def _of_text(source: str) -> str:
    """Return llguidance's grammar for a user's grammar: Lark, GBNF, or llguidance's JSON."""
    if source.lstrip().startswith("{"):
        try:
            document = json.loads(source)
        except ValueError as error:
            raise ParamError(FIELD, f"grammar is not valid JSON: {error}") from None
        if not isinstance(document, dict) or not isinstance(document.get("grammars"), list):
            raise ParamError(FIELD, 'grammar must have a list "grammars" if it is JSON')
        parts = [grammar for grammar in document["grammars"] if isinstance(grammar, dict)]
        texts = [str(grammar.get("lark_grammar", "")) for grammar in parts]
    else:
        gbnf = importlib.import_module("llguidance.gbnf_to_lark")
        if not gbnf.is_lark_syntax(source):
            source = _GBNF_PART.sub(_for_converter, source)
        try:
            lark = gbnf.any_to_lark(source)
        except Exception as error:  # the converter's parser raises errors of any kind
            raise ParamError(FIELD, f"grammar cannot be read: {brief(error)}") from None
        texts, source = [lark], library().LLMatcher.grammar_from_lark(lark)
    for text in texts:
        if (match := _ATTRIBUTES.search(text)) is not None:
            raise ParamError(FIELD, f"grammar may not use {match[1]}: give it as a parameter")
    return source


# A text, a set of characters, a comment or any character in GBNF.
_GBNF_PART = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|\.', re.DOTALL)
# The converter gets some escapes wrong: "\u00e9" becomes "\ue9".
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([\[\]])|.)", re.DOTALL)


def _for_converter(part: re.Match[str]) -> str:
    """Return a part of GBNF whose meaning the converter keeps."""
    if part[0] == ".":
        return "[\\x00-\U0010ffff]"  # also a newline, which the library's dot leaves out
    if part[0].startswith("#"):
        return part[0]
    text = _ESCAPE.sub(_short_escape, part[0])
    # "&&" and "~~" are operators in Rust's sets of characters.
    return text.replace("&", r"\x26").replace("~", r"\x7e") if text.startswith("[") else text


def _short_escape(escape: re.Match[str]) -> str:
    """Return the character itself, or "\\xHH" in ASCII, in place of some escapes."""
    digits = escape[1] or escape[2]
    if digits is None and escape[3] is None:
        return escape[0]
    code = ord(escape[3]) if digits is None else int(digits, 16)
    if 0xD800 <= code < 0xE000 or code > sys.maxunicode:
        return escape[0]
    return chr(code) if code >= 0x80 else f"\\x{code:02x}"
