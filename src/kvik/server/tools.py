"""Tools of a request, as the template, the answer's grammar and the answer's parser need them.

All APIs convert the tools that they receive into a `ToolUse`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvik.core.sampling_params import SamplingParams
from kvik.core.structured import Constraint
from kvik.errors import ParamError
from kvik.server.errors import HttpError
from kvik.server.route import DEFAULT_LIMITS, parse_json
from kvik.text.answer_format import NO_TOOLS, PLAIN_FORMAT, AnswerFormat, AnswerReader
from kvik.text.detokenizer import NO_MARKS
from kvik.text.dialects import BY_NAME
from kvik.text.thoughts import Thought
from kvik.text.tool_grammar import (
    MAX_GRAMMAR_BYTES,
    TOO_LONG,
    AllowedCalls,
    Tool,
    ToolMode,
    tool_of,
)

MAX_TOOLS = 128
MAX_NAME = 64
_NAME = re.compile(rf"[A-Za-z0-9_-]{{1,{MAX_NAME}}}")


@dataclass(frozen=True, slots=True)
class Function:
    """A function described by a request."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None  # JSON Schema of its arguments; None: it takes none
    strict: bool = False  # refuse a schema that cannot be fully enforced

    def described(self) -> dict[str, Any]:
        """Return the function in the form that chat templates expect."""
        about: dict[str, Any] = {"name": self.name, "description": self.description}
        about["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": about}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request."""

    form: AnswerFormat
    functions: tuple[Function, ...]  # all functions, for the template
    tools: Mapping[str, Tool]  # tools that may be called, by name
    choice: ToolMode  # whether calls are allowed, required or forbidden
    single: bool  # allow at most one call
    named: bool  # the caller named the function, so the answer is only a call of it
    unenforced: tuple[str, ...]  # parts of schemas that arguments need not satisfy

    @classmethod
    def of(
        cls,
        form: AnswerFormat,
        functions: Sequence[Function],
        *,
        choice: ToolMode = "auto",
        allowed: Sequence[str] | None = None,
        single: bool = False,
        named: bool = False,
    ) -> ToolUse | None:
        """Return the tools of a request; None without functions.

        Args:
            form: format of the model's answers.
            allowed: names of functions that may be called; None: all.

        Raises:
            ParamError: there are too many functions, or none for a call that the request demands; a
                name is invalid, duplicate or unknown, a schema cannot be used, or the model writes
                no calls.
        """
        if not functions:
            if choice == "required" or allowed is not None:
                raise ParamError("tool_choice", "needs tools that the client runs")
            return None
        if form.tool_format == NO_TOOLS:
            reason = "this model's chat template shows no known format of tool calls"
            raise ParamError("tools", f"{reason}; the server's --tool-format sets one")
        if len(functions) > MAX_TOOLS:
            raise ParamError("tools", f"at most {MAX_TOOLS} tools, not {len(functions)}")
        tools: dict[str, Tool] = {}
        unenforced: list[str] = []
        for function in functions:
            if not _NAME.fullmatch(function.name):
                raise ParamError("tools", f"a name has {_NAME.pattern}, not {function.name[:80]!r}")
            if function.name in tools:
                raise ParamError("tools", f"{function.name} comes twice")
            tool, dropped = tool_of(
                function.name,
                function.parameters,
                strict=function.strict,
                dialect=BY_NAME.get(form.tool_format),
            )
            tools[tool.name] = tool
            unenforced += dropped
        for name in allowed or ():
            if name not in tools:
                raise ParamError(
                    "tool_choice", f"names {name[:80]!r}, which is not one of the tools"
                )
        if allowed is not None:
            tools = {name: tools[name] for name in allowed}
        use = cls(form, tuple(functions), tools, choice, single, named, tuple(unenforced))
        try:
            if len(use.constraint().source) > MAX_GRAMMAR_BYTES:
                raise ParamError("tools", TOO_LONG)
        except RecursionError:
            raise ParamError("tools", "are nested too deeply") from None
        return use

    def constraint(
        self, thought: Thought | None = None, text: Constraint | None = None
    ) -> Constraint:
        """Return the constraint on the answer.

        Args:
            thought: the thought that may precede the answer; None: no thought.
            text: constraint on its text; None: any text.
        """
        tools = list(self.tools.values())
        allowed = AllowedCalls(tools, self.choice, self.single, answer=text is not None)
        source = self.form.call_grammar(allowed, thought)
        if text is None or self.choice == "required":
            strict = any(function.strict for function in self.functions)
            return Constraint("lark", source, strict, name="tools")
        return text.within(source)

    def described(self) -> list[dict[str, Any]]:
        """Return the tools in the form that chat templates expect."""
        return [function.described() for function in self.functions]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer may contain besides text."""

    use: ToolUse | None = None  # the tools that may be called; None: no tools
    form: AnswerFormat = PLAIN_FORMAT
    # Whether the prompt leaves a thought open; None: the answer may begin with one.
    begun: bool | None = None
    budget: int | None = None  # maximum number of tokens of a thought; None: no limit

    @classmethod
    def behind(
        cls,
        prompt: str,
        form: AnswerFormat,
        use: ToolUse | None,
        *,
        anew: bool,
        budget: int | None = None,
    ) -> AnswerForm:
        """Return the form of the answer after a prompt.

        Args:
            prompt: the text of the prompt.
            anew: the answer begins after the prompt. Otherwise it continues one that the prompt
                contains, inside a thought or not.
        """
        thought = form.begun(prompt)
        return cls(use, form, thought if anew or thought else False, budget)

    def parser(self) -> AnswerReader:
        """Return a parser for one answer."""
        return self.form.parser(self.begun, self._tools)

    @property
    def _tools(self) -> Mapping[str, Tool] | None:
        return None if self.use is None or self.use.choice == "none" else self.use.tools

    @property
    def plain(self) -> bool:
        """Whether an answer is only text."""
        return self.use is None and not self._thinks

    @property
    def _thinks(self) -> bool:
        return self.form.thinks and self.begun is not False

    @property
    def count_thoughts(self) -> Callable[[Sequence[int]], int] | None:
        """A function that counts the thought tokens of an answer; None: they cannot be counted."""
        if not self._thinks or not self.form.bounded:
            return None
        return lambda token_ids: self.form.num_thought_tokens(token_ids, self.begun)

    @property
    def marks(self) -> Mapping[int, str]:
        """The text written for marker tokens."""
        return NO_MARKS if self.plain else self.form.marks(calls=self._tools is not None)

    def constrained(self, params: SamplingParams) -> SamplingParams:
        """Return parameters that also constrain tool calls and thoughts. After a thought, the
        answer must satisfy the constraint of `params`."""
        constraint = params.structured
        thought = Thought(self.begun is True, self.budget) if self._thinks else None
        if self.use is not None:
            constraint = self.use.constraint(thought, constraint)
        elif thought is not None:
            if constraint is None and self.budget is not None:
                constraint = Constraint("lark", self.form.anything, name="thinking")
            if constraint is not None:
                rules = self.form.thought_rules(thought)
                constraint = constraint.within(f"start: thought @answer\n{rules}")
        if constraint is None:
            return params
        return params.with_changes(structured=constraint)


def check_budget(name: str, budget: int | None, form: AnswerFormat) -> None:
    """Raise `ParamError` if the length of a model's thoughts cannot be limited.

    Args:
        name: the field of the request.
    """
    if budget is not None and not form.bounded:
        raise ParamError(name, "this model does not mark thoughts with special tokens")


PLAIN_ANSWER = AnswerForm()


# Calls in the history of a conversation.


def call_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of an earlier call in the form that templates expect: an object.

    A model may be cut off inside them, or write what a body may not have, such as an integer of 30
    digits. Clients send them back as they are in each later request, so they are shown to the model
    as text, in an object."""
    try:
        value = parse_json(text.encode(), DEFAULT_LIMITS) if text.strip() else {}
    except HttpError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def check_results(called: Iterable[str], answered: Iterable[str]) -> None:
    """Raise `ParamError` for a result whose call is not in the conversation."""
    call_ids = set(called)
    for name in answered:
        if name not in call_ids:
            raise ParamError(
                "messages", f"have a result for {name[:80]!r}, which is not the id of a call"
            )
