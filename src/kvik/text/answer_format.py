"""The format of a model's answers: thoughts, text and tool calls; detected from its template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from kvik.errors import ConfigError, ModelError, ParamError
from kvik.text import harmony
from kvik.text.chat_template import ChatTemplate
from kvik.text.dialects import BY_NAME, DIALECTS, Dialect, ToolFormat, dialect_of
from kvik.text.thoughts import AnswerParser, Thought, ThoughtFormat
from kvik.text.tokenizer import Tokenizer
from kvik.text.tool_calls import ToolCallParser
from kvik.text.tool_grammar import AllowedCalls, Tool, ToolGrammar

AUTO, NO_TOOLS = "auto", "none"


@dataclass(frozen=True, slots=True)
class MarkedFormat:
    """Markers around thoughts and calls; everything else is text."""

    thoughts: ThoughtFormat | None = None  # their format; None: no thoughts
    form: ToolFormat | None = None  # format of calls; None: no calls
    text_arguments: bool = False  # the template expects the arguments of a call as a string

    @property
    def thinks(self) -> bool:
        """Whether an answer may begin with a thought."""
        return self.thoughts is not None

    @property
    def bounded(self) -> bool:
        """Whether the tokens of a thought can be counted."""
        return self.thoughts is not None and bool(self.thoughts.ids)

    @property
    def tool_format(self) -> str:
        """Name of the format of calls; `NO_TOOLS`: none."""
        return NO_TOOLS if self.form is None else self.form.dialect.name

    @property
    def anything(self) -> str:
        """The grammar of any text after a thought."""
        assert self.thoughts is not None
        return self.thoughts.anything

    @property
    def _calls_end_thoughts(self) -> bool:
        """Whether the opener of a call ends a thought: if both are tokens, or both are text."""
        if self.form is None or self.thoughts is None or self.form.dialect.bare:
            return False
        return self.form.opener_is_token == bool(self.thoughts.ids)

    def marks(self, *, calls: bool) -> Mapping[int, str]:
        """Return token id -> the character that replaces a marker token in a parser's input.

        Args:
            calls: include markers of calls.
        """
        of_calls = self.form.marks if self.form is not None and calls else {}
        return of_calls | (self.thoughts.marks if self.thoughts is not None else {})

    def begun(self, prompt: str) -> bool | None:
        """Return whether a prompt leaves a thought open; None: the answer may begin with one."""
        return None if self.thoughts is None else self.thoughts.begun(prompt)

    def num_thought_tokens(self, token_ids: Sequence[int], in_thought: bool | None) -> int:
        """Return the number of tokens of an answer that are a thought; 0 if markers are not
        tokens."""
        thoughts = self.thoughts
        if thoughts is None or not thoughts.ids or in_thought is False:
            return 0
        if not in_thought and thoughts.ids[thoughts.open] not in token_ids:
            return 0
        ends = [len(token_ids)]
        if (close := thoughts.ids[thoughts.close]) in token_ids:
            ends.append(token_ids.index(close) + 1)
        if self.form is not None and self._calls_end_thoughts:
            opener = self.form.ids[self.form.opener]
            if opener in token_ids:
                ends.append(token_ids.index(opener))
        return min(ends)

    def for_template(self, message: Mapping[str, object]) -> Mapping[str, object]:
        """Convert an earlier answer with calls to the form that the chat template expects."""
        calls: Any = message.get("tool_calls")
        if not calls or not self.text_arguments:
            return message
        return {**message, "tool_calls": [_with_text_arguments(call) for call in calls]}

    def call_grammar(self, allowed: AllowedCalls, thought: Thought | None = None) -> str:
        """Return the grammar, in Lark, of an answer that may call tools.

        Args:
            thought: a thought that may come first; None: none.
        """
        assert self.form is not None
        grammar = ToolGrammar(self.form)
        if thought is None or self.thoughts is None:
            return grammar.grammar(allowed)
        unclosed = self.thoughts.unclosed(thought) if self._calls_end_thoughts else None
        return grammar.grammar(allowed, self.thoughts.rules(thought), unclosed)

    def thought_rules(self, thought: Thought) -> str:
        """Return the rule `thought`, in Lark, for the thought before an answer without calls."""
        assert self.thoughts is not None
        return self.thoughts.rules(thought)

    def parser(self, in_thought: bool | None, tools: Mapping[str, Tool] | None) -> AnswerParser:
        """Return a reader of one answer.

        Args:
            in_thought: see `MarkedFormat.begun`; False: no thought comes before the answer.
            tools: tools that may be called; None: none.
        """
        if self.form is None or tools is None:
            return AnswerParser(self.thoughts, in_thought, None)
        opener = self.form.marked(self.form.opener) if self._calls_end_thoughts else ""
        return AnswerParser(self.thoughts, in_thought, ToolCallParser(self.form, tools), opener)


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


PLAIN_FORMAT = MarkedFormat()
AnswerFormat = MarkedFormat | harmony.HarmonyFormat
AnswerReader = AnswerParser | harmony.HarmonyParser

# -- detection of a model's format ---------------------------------------------------------------

TOOL_FORMATS = (AUTO, NO_TOOLS, harmony.NAME, *BY_NAME)


def check_tool_format(name: str) -> None:
    """Raise `ConfigError` if there is no format of this name."""
    if name not in TOOL_FORMATS:
        raise ConfigError("tool_format", f"must be one of {', '.join(TOOL_FORMATS)}, not {name!r}")


def answer_format(tokenizer: Tokenizer, name: str = AUTO) -> AnswerFormat:
    """Return the format of a model's answers.

    The markers in the chat template suggest the format of calls. To confirm it, example calls are
    rendered and parsed; if the template writes another known format, that one is found this way.

    Args:
        name: the format of calls, one of `TOOL_FORMATS`. `AUTO`: detected; `NO_TOOLS`: none.
    """
    template = tokenizer.chat_template or ""
    if name == harmony.NAME or (name == AUTO and all(m in template for m in harmony.MARKERS[:3])):
        harmony_format = harmony.HarmonyFormat.of(tokenizer)
        if harmony_format is not None:
            return harmony_format
        if name != AUTO:
            raise ConfigError("tool_format", "the tokenizer of this model lacks markers of harmony")
    thoughts = ThoughtFormat.of(template, tokenizer)
    if name == NO_TOOLS or (name == AUTO and "tool" not in template):
        return MarkedFormat(thoughts)
    probe = Probe(template, tokenizer)
    if name == AUTO:
        dialect, text_arguments = probe.result()
    else:
        dialect, text_arguments = BY_NAME[name], probe.takes_text(BY_NAME[name])
    form = None if dialect is None else ToolFormat.of(dialect, tokenizer)
    return MarkedFormat(thoughts, form, text_arguments)


_SCHEMAS = {
    "find_city": {"city": {"type": "string"}, "limit": {"type": "integer"}},
    "count_days": {"year": {"type": "integer"}, "leap": {"type": "boolean"}},
}
_CALLS = [("find_city", {"city": "Oslo", "limit": 2}), ("count_days", {"year": 7, "leap": True})]
# Longer than any marker, so that `_behind` never includes a marker of the prompt.
_QUESTION = "Which cities are there, and how many days has a year? " * 3


class Probe:
    """Renders example calls with a chat template, and finds the dialect that parses them."""

    def __init__(self, template: str, tokenizer: Tokenizer) -> None:
        self._marked = dialect_of(template)
        self._tools = {
            name: Tool(name, {"type": "object", "properties": schema})
            for name, schema in _SCHEMAS.items()
        }
        self._texts = self._rendered(tokenizer)

    def result(self) -> tuple[Dialect | None, bool]:
        """Return the dialect, and whether the template expects arguments as text. None: the
        template writes no calls, or in an unknown format. If it renders no earlier calls, the
        markers decide."""
        candidates = [*([] if self._marked is None else [self._marked]), *DIALECTS]
        for text_arguments in (False, True):
            for dialect in candidates:
                if self._reads(dialect, text_arguments):
                    return dialect, text_arguments
        shown = any(_CALLS[0][0] in text for text in self._texts.values())
        return (None if shown else self._marked), False

    def takes_text(self, dialect: Dialect) -> bool:
        """Return whether a template accepts arguments only as text."""
        return not self._reads(dialect, False) and self._reads(dialect, True)

    def _reads(self, dialect: Dialect, text_arguments: bool) -> bool:
        """Return whether one call is parsed, and also two, if the template writes them."""
        single, double = (self._texts.get((text_arguments, count)) for count in (1, 2))
        if single is None or self._calls(dialect, single) != _CALLS[:1]:
            return False
        several = double is not None and _CALLS[1][0] in double and dialect.several
        return not several or self._calls(dialect, double or "") == _CALLS

    def _calls(self, dialect: Dialect, text: str) -> list[tuple[str, object]]:
        form = ToolFormat(dialect, {}, ())
        if dialect.bare:
            text = text[text.find(form.opener) :]
        parser = ToolCallParser(form, self._tools)
        calls: dict[int, list[str]] = {}
        for delta in parser.push(text, ends=True):
            if delta.index >= 0:
                call = calls.setdefault(delta.index, ["", ""])
                call[0] += delta.name
                call[1] += delta.arguments
        return [(name, _value(arguments)) for name, arguments in calls.values()]

    def _rendered(self, tokenizer: Tokenizer) -> dict[tuple[bool, int], str]:
        """Return the rendered answers with calls, by (arguments as text, number of calls)."""
        source = (tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
        messages = [{"role": "user", "content": _QUESTION}]
        tools = [_described(tool) for tool in self._tools.values()]
        refused = suppress(ModelError, ParamError)
        texts: dict[tuple[bool, int], str] = {}
        with closing(ChatTemplate(*source)) as template, refused:
            prompt = template.render(messages, tools=tools)
            for text_arguments, count in product((False, True), (1, 2)):
                answer = _answer(_CALLS[:count], text_arguments)
                with refused:
                    conversation = template.render([*messages, answer], False, tools)
                    texts[text_arguments, count] = conversation[_behind(prompt, conversation) :]
        return texts


def _described(tool: Tool) -> dict[str, object]:
    about = {"name": tool.name, "description": "Look it up.", "parameters": dict(tool.parameters)}
    return {"type": "function", "function": about}


def _answer(calls: Sequence[tuple[str, object]], text_arguments: bool) -> dict[str, object]:
    made = [
        {
            "id": f"call0000{n}",  # some templates require this length
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(arguments) if text_arguments else arguments,
            },
        }
        for n, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _behind(prompt: str, conversation: str) -> int:
    """Return an index at or before the begin of an answer: the end of the prompt, or the first
    difference from the conversation with the answer, less a margin: markers may begin alike."""
    pairs: Iterator[tuple[str, str]] = zip(prompt, conversation, strict=False)
    alike = next(
        (n for n, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(conversation))
    )
    return max(0, alike - len(_QUESTION) // 2)


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
