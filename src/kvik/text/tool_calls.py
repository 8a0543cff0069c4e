"""Parses tool calls in an answer, incrementally.

The parser follows the pattern of the dialect. Everything it returns is final: it holds back text
that may still become a marker. Text that does not match the pattern is text, never an error.
"""

from __future__ import annotations

import ast
import json
import secrets
import string
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

from kvik.text.dialects import PLACE, PYTHON_KEY, ToolFormat
from kvik.text.tool_grammar import Tool, is_text, properties_of

Steps = Generator[None, None, bool]  # resumed when there is more text; returns whether it matched


@dataclass(slots=True)
class AnswerDelta:
    """Text, a thought, or a part of a call: first its id and name, then its arguments in pieces."""

    text: str = ""
    thought: str = ""
    index: int = -1  # of the call in its answer
    id: str = ""
    name: str = ""
    arguments: str = ""  # a piece of a JSON object


class ToolCallParser:
    """Parses the calls of one answer."""

    def __init__(self, form: ToolFormat, tools: Mapping[str, Tool]) -> None:
        self.form = form  # the format of the calls
        self._tools = tools
        dialect = form.dialect
        self._opener, self._begin = form.marked(form.opener), form.marked(dialect.begin)
        self._call = PLACE.split(form.marked(dialect.call))
        self._between, self._end = form.marked(dialect.between), form.marked(dialect.end)
        self._parameter = PLACE.split(form.marked(dialect.parameter))[::2]
        self.num_calls = 0  # number of calls that have begun
        self._text = ""  # not consumed yet
        self._at = 0  # index in `_text` up to which it is read
        self._space = ""  # white space before calls, which is dropped if they are valid
        self._closed = False
        self._deltas: list[AnswerDelta] = []
        self._steps = self._answer()

    def push(self, text: str, ends: bool = False) -> list[AnswerDelta]:
        """See `AnswerParser.push`."""
        self._text += text
        self._closed = ends
        next(self._steps, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    # -- text ------------------------------------------------------------------------------------

    def _answer(self) -> Steps:
        if self.form.dialect.bare:
            yield from self._skip_space()
            if not (yield from self._literal(self._opener)):
                self._at = 0
                yield from self._all_text()
                return True
            self._at = 0
            yield from self._skip_space()
            yield from self._calls()
        while (yield from self._until_opener()):
            yield from self._calls()
        return True

    def _until_opener(self) -> Steps:
        """Return text up to the opener, without white space before it; whether there is one."""
        while True:
            place = self._text.find(self._opener)
            if place >= 0:
                before = self._text[:place].rstrip()
                self._say(before)
                self._space = self._text[len(before) : place]
                self._drop(place)
                return True
            margin = overlap(self._text, self._opener)
            free = len(self._text[: len(self._text) - margin].rstrip())
            self._say(self._text[:free])
            self._drop(free)
            if self._closed:
                if not self.num_calls or not self._text.isspace():
                    self._say(self._text)
                self._drop(len(self._text))
                return False
            yield

    def _all_text(self) -> Steps:
        while True:
            self._say(self._text)
            self._drop(len(self._text))
            if self._closed:
                return True
            yield

    def _say(self, text: str) -> None:
        if text:
            self._deltas.append(AnswerDelta(self.form.unmarked(text)))

    def _drop(self, count: int) -> None:
        """Drop the first characters, which were returned."""
        self._text, self._at = self._text[count:], 0

    # -- calls -----------------------------------------------------------------------------------

    def _calls(self) -> Steps:
        """Read the calls of an answer. Anything that does not match is returned as text."""
        if not ((yield from self._literal(self._begin)) and (yield from self._one_call())):
            self._give_up()
            return False
        while True:
            self._drop(self._at)
            if (yield from self._literal(self._between)) and (yield from self._one_call()):
                continue
            self._at = 0
            if not (yield from self._literal(self._end)):
                self._at = 0
                self._skip_cut_off(self._between)
                self._skip_cut_off(self._end)
            self._drop(self._at)
            return True

    def _give_up(self) -> None:
        """Return what was read as text, at least one character, so that the search continues."""
        count = max(self._at, 1)
        self._say(self._space + self._text[:count])
        self._drop(count)

    def _one_call(self) -> Steps:
        name = id_text = ""
        first = self.num_calls
        for n, part in enumerate(self._call):
            follows = self._call[n + 1] if n + 1 < len(self._call) else ""
            if n % 2 == 0:
                fits = yield from self._literal(part)
            elif part == "name":
                # If arguments follow directly, the name ends at the first one or at their end.
                ends = [follows] if follows else [self._parameter[0], self._call[n + 3]]
                name, fits = yield from self._up_to(*ends)
                fits = fits and name in self._tools
            elif part == "id":
                id_text, fits = yield from self._up_to(follows)
            else:
                self._begin_call(name, id_text)
                fits = yield from self._arguments(self._tools[name], follows)
            if not fits:
                has_call = self.num_calls > first  # then it is not undone
                if has_call and n % 2 == 0:
                    self._skip_cut_off(part)
                return has_call
        return True

    def _begin_call(self, name: str, id_text: str) -> None:
        dialect = self.form.dialect
        made = dialect.call_id.replace("{name}", name).replace("{id}", id_text)
        if not made and dialect.short_ids:
            letters = string.ascii_letters + string.digits
            made = "".join(secrets.choice(letters) for _ in range(9))
        made = made or random_call_id()
        self._deltas.append(AnswerDelta(index=self.num_calls, id=made, name=name))
        self.num_calls += 1
        self._drop(self._at)

    def _add(self, arguments: str) -> None:
        if arguments:
            text = self.form.unmarked(arguments)
            self._deltas.append(AnswerDelta(index=self.num_calls - 1, arguments=text))

    # -- arguments -------------------------------------------------------------------------------

    def _arguments(self, tool: Tool, follows: str) -> Steps:
        if self.form.dialect.pythonic:
            return (yield from self._python())
        if self.form.dialect.parameter:
            return (yield from self._parameters(tool, follows))
        return (yield from self._json())

    def _json(self) -> Steps:
        """Read a JSON object, and return it piece by piece."""
        depth, in_string, escaped = 0, False, False
        while True:
            for place, char in enumerate(self._text):
                if in_string:
                    in_string = escaped or char != '"'
                    escaped = not escaped and char == "\\"
                elif char == '"':
                    in_string = True
                elif char in "{[":
                    depth += 1
                elif char in "}]":
                    depth -= 1
                if depth == 0:
                    is_object = char == "}"
                    self._add(self._text[: place + is_object])
                    self._drop(place + is_object)
                    return is_object
            self._add(self._text)
            self._drop(len(self._text))
            if self._closed:
                return False
            yield

    def _parameters(self, tool: Tool, follows: str) -> Steps:
        """Read one tagged value per argument, and return them as members of an object."""
        before, middle, after = self._parameter
        schemas, separator = properties_of(tool.parameters), "{"
        while True:
            self._drop(self._at)
            if not (yield from self._literal(before)):
                self._at = 0
                if self._skip_cut_off(before):
                    return False
                self._add("{}" if separator == "{" else "}")
                return True
            key, fits = yield from self._up_to(middle)
            if not (fits and (yield from self._literal(middle))):
                return False
            self._add(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            self._drop(self._at)
            if is_text(schemas.get(key)):
                fits = yield from self._raw_text(after)
            else:
                fits = yield from self._value(after)
            if not fits:
                return False

    def _raw_text(self, after: str) -> Steps:
        """Read a verbatim string up to its end marker."""
        self._add('"')
        while True:
            place = self._text.find(after)
            ends = place >= 0
            free = place if ends else len(self._text) - overlap(self._text, after)
            self._add(json.dumps(self.form.unmarked(self._text[:free]), ensure_ascii=False)[1:-1])
            if ends or self._closed:
                self._add('"')
                self._drop(free + len(after) if ends else len(self._text))
                return ends
            self._drop(free)
            yield

    def _value(self, after: str) -> Steps:
        """Read a JSON value; anything else is a string."""
        text, fits = yield from self._up_to(after)
        if fits:
            self._at += len(after)
        self._add(_as_json(text))
        self._drop(self._at)
        return fits

    def _python(self) -> Steps:
        """Read keyword arguments, which are parsed when their bracket closes."""
        depth, quote, escaped, place, begin = 1, "", False, 0, 0
        pairs: list[str] = []
        while True:
            while place < len(self._text):
                char = self._text[place]
                if quote:
                    quote = quote if escaped or char != quote else ""
                    escaped = not escaped and char == "\\"
                elif char in "'\"":
                    quote = char
                elif char in "([{":
                    depth += 1
                elif char in ")]}":
                    depth -= 1
                elif char == "," and depth == 1:
                    pairs.append(self._text[begin:place])
                    begin = place + 1
                if depth == 0:
                    if last := self._text[begin:place].strip():
                        pairs.append(last)
                    arguments = _keywords(pairs)
                    if arguments is None:
                        return False
                    self._add(arguments)
                    self._drop(place)
                    return True
                place += 1
            if self._closed:  # then the arguments that are whole, without the end of their object
                self._add((_keywords(pairs) or "{}")[:-1])
                self._drop(len(self._text))
                return False
            yield

    # -- reading ---------------------------------------------------------------------------------

    def _literal(self, text: str) -> Steps:
        """Read a literal text; return whether it matched."""
        while True:
            prefix = self._text[self._at : self._at + len(text)]
            if prefix == text:
                self._at += len(text)
                return True
            if self._closed or not text.startswith(prefix):
                return False
            yield

    def _skip_cut_off(self, text: str) -> bool:
        """Read the rest of an answer that ends where a literal text, or its rest, should follow;
        return whether it does."""
        ends = self._closed and text.startswith(self._text[self._at :])
        self._at = len(self._text) if ends else self._at
        return ends

    def _up_to(self, *texts: str) -> Generator[None, None, tuple[str, bool]]:
        """Read up to the first of some texts, exclusive; return what was read, and whether one was
        found."""
        while True:
            places = [p for text in texts if (p := self._text.find(text, self._at)) >= 0]
            if places:
                content, self._at = self._text[self._at : min(places)], min(places)
                return content, True
            if self._closed:
                content, self._at = self._text[self._at :], len(self._text)
                return content, False
            yield

    def _skip_space(self) -> Steps:
        while True:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self._at += 1
            if self._at < len(self._text) or self._closed:
                return True
            yield


def random_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def overlap(text: str, marker: str) -> int:
    """Return the number of characters at the end of a text that may begin a marker."""
    for count in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:count]):
            return count
    return 0


def _as_json(text: str) -> str:
    """Return a JSON or Python literal as JSON; anything else as a JSON string."""
    try:
        json.loads(text)
    except ValueError:
        try:
            return json.dumps(ast.literal_eval(text), ensure_ascii=False)
        except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
            return json.dumps(text, ensure_ascii=False)
    return text


def _keywords(pairs: Sequence[str]) -> str | None:
    """Return keyword arguments with literal values in Python as JSON; None: invalid."""
    values: dict[str, object] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        key = key.strip()
        if PYTHON_KEY.fullmatch(key) is None or key in values:
            return None
        try:
            values[key] = ast.literal_eval(value.strip())
        except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
            return None
    try:
        return json.dumps(values, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # a set, or bytes
        return None
