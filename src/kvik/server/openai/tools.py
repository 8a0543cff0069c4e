"""The tools of a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from kvik.errors import ParamError
from kvik.server.texts import Texts
from kvik.server.tools import Function, ToolUse
from kvik.text.tool_grammar import ToolMode


class FunctionParam(Struct, kw_only=True):
    """A function that the model may call. `parameters`: JSON Schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParam(Struct, kw_only=True):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: FunctionParam


class NamedFunction(Struct, kw_only=True):
    name: str


class NamedTool(Struct, kw_only=True):
    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolChoice(Struct, kw_only=True):
    """One function that must be called, or some that may be."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


Choices = Literal["none", "auto", "required"] | ToolChoice


def tool_use(
    tools: Sequence[ToolParam] | None, asked: Choices | None, *, one: bool, texts: Texts
) -> ToolUse | None:
    """Return the tools of a request; None: it has none.

    Args:
        asked: `tool_choice`. one: calls do not come several at a time.

    Raises:
        ParamError: they cannot be used, or there is a choice without tools.
    """
    if not tools:
        if asked not in (None, "none", "auto"):
            raise ParamError("tool_choice", "needs tools")
        return None
    functions = [
        Function(
            tool.function.name,
            tool.function.description or "",
            tool.function.parameters,
            bool(tool.function.strict),
        )
        for tool in tools
    ]
    choice: ToolMode = asked if isinstance(asked, str) else "auto"
    allowed: list[str] | None = None
    named = False
    if isinstance(asked, ToolChoice) and asked.type == "function":
        if asked.function is None:
            raise ParamError("tool_choice", "needs the name of a function")
        choice, allowed, named = "required", [asked.function.name], True
    elif isinstance(asked, ToolChoice):
        if asked.allowed_tools is None or not asked.allowed_tools.tools:
            raise ParamError("tool_choice", "needs allowed_tools with at least one tool")
        choice = asked.allowed_tools.mode
        allowed = list(dict.fromkeys(t.function.name for t in asked.allowed_tools.tools))
    return ToolUse.of(
        texts.form,
        functions,
        choice=choice,
        allowed=allowed,
        one=named or one,
        named=named,
    )
