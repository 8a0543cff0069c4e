"""A jinja2 sandbox for untrusted templates, with bounded work.

The sandbox of jinja2 keeps a template away from the interpreter; this one also bounds its work.
Every loop iteration, call, filter and produced character is charged to a budget, and operations
that could make something huge at once (`'a' * 10**9`) are charged before they run. Within one
process that stops the usual attacks, not every conceivable one (comparisons are free); a hard limit
on time needs a process that can be killed.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import wraps
from types import BuiltinMethodType
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_WORK = 32 << 20  # characters, or iterations and calls at their price: two seconds at worst
ITERATION = 8  # price of an iteration of a loop
CALL = 32  # price of a call, a filter, a list that is printed, an element of JSON
READ = 16  # characters read for the price of one written
MAX_INT_BITS = 4096
MAX_PADDING = 4096  # widths and indents

# Filters that make text out of a number and that no chat template uses.
_REMOVED = ("batch", "center", "filesizeformat", "format", "pprint", "random", "slice", "wordwrap")
_PADDING = {"center", "expandtabs", "ljust", "rjust", "zfill"}
_PERCENT_WIDTH = re.compile(r"%(\([^)]{0,99}\))?[-+ #0-9.]*(\d{4}|\*)")
_FIELD_WIDTH = re.compile(r"\{[^{}:]*:[^{}]*?(\d{4}|\{)")


class GenerationTag(Extension):
    """`{% generation %}`: marks what the assistant wrote; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("content"), [], [], body).set_lineno(line)

    def content(self, caller: Callable[[], str]) -> str:
        return caller()


class _CountingGenerator(CodeGenerator):
    """Compiles loops and `~` so that they pass through the environment's budget."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        node.iter = nodes.Call(nodes.EnvironmentAttribute("iterate"), [node.iter], [], None, None)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The jinja2 environment of chat templates, with a budget for each thread and `start`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _CountingGenerator

    def __init__(self) -> None:
        self._budget = threading.local()
        self.start()
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            finalize=self.measured,
        )
        for name in _REMOVED:
            del self.filters[name]
        del self.globals["lipsum"]
        self.filters = {name: self._charged(name, run) for name, run in self.filters.items()}
        self.filters["tojson"] = self.tojson
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _strftime_now

    def start(self) -> None:
        """Start a new budget for what this thread compiles or renders next."""
        self._budget.left = MAX_WORK

    def spend(self, work: int) -> None:
        self._budget.left -= work
        if self._budget.left < 0:
            raise SecurityError("the template makes too much text or too many turns")

    def iterate(self, items: Iterable[object]) -> Iterator[object]:
        """Yield the items of a loop, and charge for each."""
        for item in items:
            self.spend(ITERATION)
            yield item

    def measured(self, value: object) -> object:
        """Charge for the text of a value before it is made: nested lists grow fast."""
        if isinstance(value, str):
            self.spend(len(value))
        elif isinstance(value, Mapping):
            self.spend(CALL)
            for key, item in value.items():
                self.measured(key)
                self.measured(item)
        elif isinstance(value, (list, tuple)):
            self.spend(CALL)
            for item in value:
                self.measured(item)
        return value

    def join(self, parts: Sequence[object]) -> str:
        return "".join([str(self.measured(part)) for part in parts])

    def concat(self, parts: Iterable[str]) -> str:
        """Joins the output of the template and of each block and macro."""
        kept = []
        for part in parts:
            self.spend(len(part))
            kept.append(part)
        return "".join(kept)

    def tojson(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as the model saw it in training: without HTML escapes."""
        if indent is not None:
            _checked_width(indent)
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        parts = []
        for part in encoder.iterencode(value):
            self.spend(CALL + len(part))
            parts.append(part)
        return "".join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_width(_PERCENT_WIDTH, left)
            self.spend(left.count("%") * self._size(right))
        elif operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif isinstance(left, (str, list, tuple)):
            self.spend(len(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Replace `str.format`, and charge for its result beforehand."""
        run = super().wrap_str_format(value)
        if run is None:
            return None

        def charged(*args: Any, **kwargs: Any) -> str:
            _check_width(_FIELD_WIDTH, value.__self__.replace("{{", "").replace("}}", ""))
            self.spend(value.__self__.count("{") * self._size([*args, kwargs]))
            return run(*args, **kwargs)

        return charged

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.spend(CALL)
        if isinstance(function, BuiltinMethodType) and isinstance(function.__self__, str):
            self._check_text_method(function.__name__, function.__self__, [*args, *kwargs.values()])
        return super().call(context, function, *args, **kwargs)

    def _check_text_method(self, name: str, text: str, args: list[Any]) -> None:
        self.spend(len(text) // READ)
        if name in _PADDING:
            width = max((_checked_width(arg) for arg in args), default=8)
            self.spend(text.count("\t") * width if name == "expandtabs" else width)
        elif name == "replace" and len(args) > 1 and isinstance(args[0], str):
            self.spend(text.count(args[0]) * _length(args[1]))
        elif name == "join" and args:
            self._check_join(text, args[0])

    def _size(self, value: object) -> int:
        """The cost of writing a value once, after charging it."""
        before = self._budget.left
        self.measured(value)
        return int(before - self._budget.left)

    def _check_join(self, separator: str, items: Any) -> None:
        if isinstance(items, Sequence):
            self.spend(len(items) * len(separator))
            for item in items:
                self.measured(item)

    def _check_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        elif isinstance(left, int):
            self.spend(left * _length(right) if left > 0 else 0)
        elif isinstance(right, int):
            self.spend(right * _length(left) if right > 0 else 0)

    def _charged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that is charged for what it reads, and beforehand for what it may write."""

        @wraps(function)  # keeps the marks by which jinja2 knows which context to pass
        def run(*args: Any, **kwargs: Any) -> Any:
            values = [
                arg
                for arg in args
                if not isinstance(arg, (Context, Environment, nodes.EvalContext))
            ]
            self.spend(CALL + sum(_length(value) for value in values) // READ)
            text, rest = (values[0], [*values[1:], *kwargs.values()]) if values else ("", [])
            if name == "indent" and isinstance(text, str):
                width = max((_checked_width(arg) for arg in rest), default=4)
                self.spend((text.count("\n") + 1) * width)
            elif name == "join":
                self._check_join(str(rest[0]) if rest else "", text)
                args = tuple(map(self.measured, a) if isinstance(a, Iterator) else a for a in args)
            elif name == "replace" and isinstance(text, str):
                self._check_text_method(name, text, rest)
            elif name == "string":
                self.measured(text)
            return function(*args, **kwargs)

        return run


def _raise(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple, dict)) else ITERATION


def _checked_width(width: Any) -> int:
    """Characters that a width or an indent adds to a line; an indent may be a text."""
    if not isinstance(width, int):
        return _length(width)
    if width > MAX_PADDING:
        raise SecurityError(f"a width of {width} is more than {MAX_PADDING}")
    return width


def _check_bits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise SecurityError("a number gets too large")


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int):
        _check_bits(base.bit_length() * max(exponent, 0))


def _check_width(pattern: re.Pattern[str], text: str) -> None:
    if pattern.search(text):
        raise SecurityError("the width of a format is too large or not fixed")
