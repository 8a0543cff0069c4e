"""Tools that a request brings: for the template, the grammar of the answer and its parser.

All APIs make a `ToolUse` of what they are sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvik.core.sampling_params import SamplingParams
from kvik.core.structured import MAX_SOURCE_BYTES, Constraint
from kvik.errors import ParamError
from kvik.text.detokenizer import NO_MARKS
from kvik.text.dialects import ToolFormat
from kvik.text.thoughts import AnswerParser, ThoughtFormat
from kvik.text.tool_calls import ToolCallParser
from kvik.text.tool_grammar import Tool, ToolGrammar, ToolMode, tool_of

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Function:
    """A function as a request describes it.

    Attributes:
        parameters: JSON Schema of its arguments; None: it has none.
        strict: a schema that cannot be enforced in all parts is refused.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def described(self) -> dict[str, Any]:
        """Return it as chat templates take it."""
        about: dict[str, Any] = {"name": self.name, "description": self.description}
        about["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": about}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request.

    Attributes:
        functions: for the template.
        tools: that may be called, by name.
        choice: whether calls may, must or must not come.
        one: at most one.
        named: the caller named the function, so the answer is nothing else.
        unenforced: parts of schemas that arguments need not satisfy.
    """

    form: ToolFormat
    functions: tuple[Function, ...]
    tools: Mapping[str, Tool]
    choice: ToolMode
    one: bool
    named: bool
    unenforced: tuple[str, ...]

    @classmethod
    def of(
        cls,
        form: ToolFormat | None,
        functions: Sequence[Function],
        *,
        choice: ToolMode = "auto",
        allowed: Sequence[str] | None = None,
        one: bool = False,
        named: bool = False,
    ) -> ToolUse:
        """
        Args:
            form: how the model writes calls; None: it is not known.
            allowed: names of those that may be called; None: all.

        Raises:
            ParamError: there are too many, a name is odd, doubled or not known, a schema cannot be
                used, or the model writes no calls.
        """
        if form is None:
            raise ParamError("tools", "the chat template of this model knows no tools")
        if len(functions) > MAX_TOOLS:
            raise ParamError("tools", f"at most {MAX_TOOLS} tools, not {len(functions)}")
        tools: dict[str, Tool] = {}
        unenforced: list[str] = []
        for function in functions:
            if not _NAME.fullmatch(function.name):
                raise ParamError("tools", f"a name has {_NAME.pattern}, not {function.name[:80]!r}")
            if function.name in tools:
                raise ParamError("tools", f"{function.name} comes twice")
            tool, dropped = tool_of(function.name, function.parameters, strict=function.strict)
            tools[tool.name] = tool
            unenforced += dropped
        for name in allowed or ():
            if name not in tools:
                raise ParamError("tool_choice", f"names {name[:80]!r}, which is none of the tools")
        if allowed is not None:
            tools = {name: tools[name] for name in allowed}
        found = cls(form, tuple(functions), tools, choice, one, named, tuple(unenforced))
        if len(found.constraint().source) > 2 * MAX_SOURCE_BYTES:
            raise ParamError("tools", f"may have at most {2 * MAX_SOURCE_BYTES} bytes in all")
        return found

    def constraint(self) -> Constraint:
        """Return what the answer must be."""
        tools = list(self.tools.values())
        source = ToolGrammar(self.form).grammar(tools, self.choice, one=self.one)
        return Constraint("lark", source, name="tools")

    def described(self) -> list[dict[str, Any]]:
        """Return the tools as chat templates take them."""
        return [function.described() for function in self.functions]


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer may have beside text.

    Attributes:
        use: the tools that may be called; None: there are none.
        thoughts: None: the model has none.
        begun: whether the prompt leaves a thought open; None: the answer may begin with one.
        budget: the most tokens of a thought; None: any.
    """

    use: ToolUse | None = None
    thoughts: ThoughtFormat | None = None
    begun: bool | None = None
    budget: int | None = None

    @classmethod
    def behind(
        cls,
        prompt: str,
        thoughts: ThoughtFormat | None,
        use: ToolUse | None,
        *,
        anew: bool,
        budget: int | None = None,
    ) -> AnswerForm:
        """
        Args:
            prompt: the text of it.
            anew: the answer begins behind it. If not, it goes on with one, in a thought or not.
        """
        begun = None if thoughts is None else thoughts.begun(prompt)
        return cls(use, thoughts, begun if anew or begun else False, budget)

    def parser(self) -> AnswerParser:
        """Return the parser of one answer."""
        use = self.use
        calls = None if use is None else ToolCallParser(use.form, use.tools)
        return AnswerParser(self.thoughts, self.begun, calls)

    @property
    def plain(self) -> bool:
        """Whether an answer is text alone."""
        return self.use is None and (self.thoughts is None or self.begun is False)

    @property
    def thought_end(self) -> int | None:
        """The token that ends a thought; None: there is none, or it is no token."""
        thinks = self.thoughts is not None and self.begun is not False
        return self.thoughts.ids.get(self.thoughts.close) if thinks and self.thoughts else None

    @property
    def marks(self) -> Mapping[int, str]:
        """What is written for the tokens of markers."""
        if self.plain:
            return NO_MARKS
        calls = {} if self.use is None else self.use.form.marks
        return calls | ({} if self.thoughts is None else self.thoughts.marks)

    def constrained(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters of an answer that calls tools as they may be called, and that says
        what it must behind a thought.

        Raises:
            ParamError: it must be something, and may call tools.
        """
        asked = params.structured
        if self.use is not None:
            if asked is not None:
                raise ParamError(asked.name, "cannot be combined with tools")
            asked = self.use.constraint()
        if self.thoughts is not None and self.begun is not False:
            if asked is None and self.budget is not None:
                asked = Constraint("lark", self.thoughts.anything, name="thinking")
            if asked is not None:
                rules = self.thoughts.rules(begun=self.begun is True, budget=self.budget)
                asked = asked.behind(rules)
        if asked is None:
            return params
        return params.with_changes(structured=asked)


def check_budget(name: str, budget: int | None, thoughts: ThoughtFormat | None) -> None:
    """Raise `ParamError` if the thoughts of a model cannot be bounded by tokens.

    Args:
        name: of the field.
    """
    if budget is not None and (thoughts is None or not thoughts.ids):
        raise ParamError(name, "this model has no thoughts between tokens of their own")


PLAIN_ANSWER = AnswerForm()


# Calls in the history of a conversation.


def call_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of an earlier call as templates take them: an object.

    Raises:
        ParamError: they are none.
    """
    try:
        found = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ParamError("messages", "have a tool call whose arguments are no JSON object")
    return found


def check_results(called: Iterable[str], answered: Iterable[str]) -> None:
    """Raise `ParamError` for a result whose call is not in the conversation."""
    known = set(called)
    for name in answered:
        if name not in known:
            raise ParamError("messages", f"have a result of {name[:80]!r}, which no call has as id")
