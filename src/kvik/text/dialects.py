# ruff: noqa: RUF001 (markers of models have such characters)
"""The formats in which models write tool calls: one value for each format, from which a grammar
(`tool_grammar.py`) and a parser (`tool_calls.py`) are derived.

A call is a pattern: literal text around `{name}`, `{arguments}` and optionally `{id}`. Arguments
are a JSON object; or one `parameter` pattern for each, with `{key}` and `{value}` (strings
verbatim, other values as JSON); or Python's keyword arguments. If a marker is a token of the model,
only this token counts as the marker: the same characters from other tokens are text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kvik.text.tokenizer import Tokenizer

PLACES = ("name", "arguments", "id", "key", "value")
PLACE = re.compile(r"\{(" + "|".join(PLACES) + r")\}")
# The name of a keyword argument. Tools have such names as "from" and "max-days", too.
PYTHON_KEY = re.compile(r"[^\s=,'\"()\[\]{}]+( [^\s=,'\"()\[\]{}]+)*")
# Unicode noncharacters, which represent markers in decoded text.
FIRST_MARK, MAX_MARKS = 0xFDD0, 32


@dataclass(frozen=True, slots=True)
class Dialect:
    """A format of tool calls."""

    name: str
    markers: tuple[str, ...]  # strings that a template with this format contains, all of them
    call: str  # the pattern of a call
    begin: str = ""  # text before the calls of an answer
    between: str = ""  # text between them
    end: str = ""  # text behind them
    parameter: str = ""  # the pattern of one argument; "": arguments are a JSON object
    pythonic: bool = False  # arguments are Python's keyword arguments
    # An answer with calls has no text; only its beginning distinguishes it from text.
    bare: bool = False
    id: str = "[a-zA-Z0-9]{9}"  # regular expression of an id, if a call has one
    call_id: str = ""  # pattern of the id for clients, with `{name}` and `{id}`; "": a random one
    short_ids: bool = False  # random ids have nine letters and digits
    several: bool = True  # an answer may have several calls

    def can_name(self, key: str) -> bool:
        """Return whether an argument's name can be told from what follows it in a call."""
        if self.pythonic:
            return PYTHON_KEY.fullmatch(key) is not None
        if not self.parameter:
            return True
        middle = PLACE.split(self.parameter)[2]
        return (key + middle).index(middle) == len(key)


_OBJECT = '{"name": "{name}", "arguments": {arguments}}'

# The first format whose markers a template has applies, so special ones come before general ones.
DIALECTS = (
    Dialect(
        "kimi",
        ("<|tool_calls_section_begin|>",),
        "<|tool_call_begin|>functions.{name}:{id}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        id="[0-9]{1,3}",
        call_id="functions.{name}:{id}",
    ),
    Dialect(
        "deepseek-v3",
        ("<｜tool▁calls▁begin｜>", "```json"),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
    ),
    Dialect(
        "deepseek-v3.1",
        ("<｜tool▁calls▁begin｜>",),
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    Dialect(
        "mistral-named-id",
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        "[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{arguments}",
        short_ids=True,
    ),
    Dialect(
        "mistral-named",
        ("[TOOL_CALLS]", "[ARGS]"),
        "[TOOL_CALLS]{name}[ARGS]{arguments}",
        short_ids=True,
    ),
    Dialect(
        "mistral-array",
        ("[TOOL_CALLS]",),
        '{"name": "{name}", "arguments": {arguments}, "id": "{id}"}',
        begin="[TOOL_CALLS][",
        between=", ",
        end="]",
        short_ids=True,
    ),
    Dialect(
        "minimax",
        ("<minimax:tool_call>", "<invoke name="),
        '<invoke name="{name}">\n{arguments}</invoke>\n',
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        parameter='<parameter name="{key}">{value}</parameter>\n',
    ),
    Dialect(
        "seed",
        ("<seed:tool_call>",),
        "<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>",
        between="\n",
        parameter="<parameter={key}>{value}</parameter>\n",
    ),
    Dialect(
        "qwen-coder",
        ("<tool_call>", "<function=", "<parameter="),
        "<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
        between="\n",
        parameter="<parameter={key}>\n{value}\n</parameter>\n",
    ),
    Dialect(
        "glm",
        ("<tool_call>", "<arg_key>", "<arg_value>", "</arg_key>\n"),
        "<tool_call>{name}\n{arguments}</tool_call>",
        between="\n",
        parameter="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
    Dialect(
        "glm-4.7",
        ("<tool_call>", "<arg_key>", "<arg_value>"),
        "<tool_call>{name}{arguments}</tool_call>",
        parameter="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
    ),
    Dialect(
        "cohere",
        ("<|START_ACTION|>", "tool_name"),
        '{"tool_call_id": "{id}", "tool_name": "{name}", "parameters": {arguments}}',
        begin="<|START_ACTION|>[\n    ",
        between=",\n    ",
        end="\n]<|END_ACTION|>",
        id="[0-9]{1,3}",
    ),
    Dialect(
        "phi-4",
        ("<|tool_call|>", "<|/tool_call|>"),
        _OBJECT,
        begin="<|tool_call|>[",
        between=", ",
        end="]<|/tool_call|>",
    ),
    Dialect("granite", ("<|tool_call|>",), _OBJECT, begin="<|tool_call|>[", between=", ", end="]"),
    Dialect(
        "apriel",
        ("<tool_calls>",),
        _OBJECT,
        begin="<tool_calls>[",
        between=", ",
        end="]</tool_calls>",
    ),
    Dialect(
        "nemotron", ("<TOOLCALL>",), _OBJECT, begin="<TOOLCALL>[", between=", ", end="]</TOOLCALL>"
    ),
    Dialect("hermes", ("<tool_call>",), f"<tool_call>\n{_OBJECT}\n</tool_call>", between="\n"),
    Dialect(
        "pythonic-tokens",
        ("List of tools: ",),
        "{name}({arguments})",
        begin="<|tool_call_start|>[",
        between=", ",
        end="]<|tool_call_end|>",
        pythonic=True,
    ),
    Dialect(
        "apertus",
        ("<|tools_prefix|>",),
        '{"{name}": {arguments}}',
        begin="<|tools_prefix|>[",
        between=", ",
        end="]<|tools_suffix|>",
    ),
    Dialect("gigachat", ("<|function_call|>",), f"<|function_call|>{_OBJECT}", several=False),
    Dialect(
        "functionary", ("<function=", "</function>"), "<function={name}>{arguments}</function>"
    ),
    Dialect(
        "llama3",
        ("dictionary of argument name and its value",),
        '{"name": "{name}", "parameters": {arguments}}',
        bare=True,
        several=False,
    ),
    Dialect(
        "pythonic",
        ("[func_name1(",),
        "{name}({arguments})",
        begin="[",
        between=", ",
        end="]",
        pythonic=True,
        bare=True,
    ),
)
BY_NAME: Mapping[str, Dialect] = {one.name: one for one in DIALECTS}


def dialect_of(template: str) -> Dialect | None:
    """Return the format in which a chat template writes tool calls; None: unknown."""
    return next((d for d in DIALECTS if all(marker in template for marker in d.markers)), None)


def spellings(ids: Mapping[str, int], marks: Mapping[int, str]) -> dict[int, str]:
    """Return markers by the characters that represent them in decoded text, for `str.translate`.

    Args:
        ids: marker -> its token.
        marks: token -> its character.
    """
    return {ord(marks[token]): marker for marker, token in ids.items()}


def other_markup(tokenizer: Tokenizer, used: Iterable[int]) -> tuple[int, ...]:
    """Return the special tokens that may be part of a text: neither used otherwise, nor EOS."""
    eos = tokenizer.library.token_to_id(tokenizer.eos_token) if tokenizer.eos_token else None
    every = {*tokenizer.markup_ids.values(), *tokenizer.special_ids}
    return tuple(sorted(every - {*used, eos}))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A dialect with the tokens of a model."""

    dialect: Dialect
    ids: Mapping[str, int]  # marker -> its token, for markers that are tokens
    special_ids: tuple[int, ...]  # special tokens that a text may contain between calls

    @classmethod
    def of(cls, dialect: Dialect, tokenizer: Tokenizer) -> ToolFormat:
        patterns = (dialect.begin, dialect.call, dialect.between, dialect.end, dialect.parameter)
        markup = tokenizer.markup_ids
        ids = {
            text: i for text, i in markup.items() if any(text in pattern for pattern in patterns)
        }
        ids = dict(list(ids.items())[: MAX_MARKS - 2])  # thoughts have two
        return cls(dialect, ids, other_markup(tokenizer, ids.values()))

    @property
    def marks(self) -> dict[int, str]:
        """Marker token -> the character that represents it in decoded text."""
        return {token: chr(FIRST_MARK + n) for n, token in enumerate(self.ids.values())}

    def marked(self, text: str) -> str:
        """Return a text with its markers replaced by their characters in decoded text."""
        marks = self.marks
        return "".join(marks[p] if isinstance(p, int) else p for p in self.split(text))

    def unmarked(self, text: str) -> str:
        """Return a decoded text with its markers spelt out; undoes `marked`."""
        if not any(FIRST_MARK <= ord(char) < FIRST_MARK + MAX_MARKS for char in text):
            return text
        return text.translate(spellings(self.ids, self.marks))

    def split(self, text: str) -> Iterator[str | int]:
        """Split a text into marker tokens and the text between them."""
        if not self.ids:
            yield text
            return
        longest = sorted(self.ids, key=len, reverse=True)
        for part in re.split(f"({'|'.join(map(re.escape, longest))})", text):
            if part:
                yield self.ids.get(part, part)

    @property
    def opener_is_token(self) -> bool:
        return self.opener in self.ids

    @property
    def opener(self) -> str:
        """The start of the calls of an answer: a marker that is a token, or a text."""
        begin = self.dialect.begin or PLACE.split(self.dialect.call)[0]
        first = next(self.split(begin))
        if isinstance(first, str):
            return begin
        return next(marker for marker, token in self.ids.items() if token == first)
