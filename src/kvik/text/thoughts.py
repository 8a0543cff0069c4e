"""Thoughts (reasoning) of a model before its answer: their markers, grammar and parser."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvik.text.dialects import FIRST_MARK, MAX_MARKS, other_markup, spellings
from kvik.text.tokenizer import Tokenizer
from kvik.text.tool_calls import AnswerDelta, ToolCallParser, overlap
from kvik.text.tool_grammar import text_rules

MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
MAX_GAP = 3  # line breaks and spaces between a thought and its answer


@dataclass(frozen=True, slots=True)
class Thought:
    """A thought that may come before an answer."""

    begun: bool = False  # the prompt leaves one open. Else it is optional.
    budget: int | None = None  # its largest number of tokens; None: no limit

    @property
    def inside(self) -> str:
        """Rule `inside`, in Lark."""
        bound = "" if self.budget is None else f"[max_tokens={self.budget}]"
        return f"inside{bound}: /(.|\\n)*/"


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """The markers around a thought."""

    open: str
    close: str
    # Marker -> its token; empty unless both markers are tokens.
    ids: Mapping[str, int] = field(default_factory=dict)
    special_ids: tuple[int, ...] = ()  # special tokens that an answer may contain

    @classmethod
    def of(cls, template: str, tokenizer: Tokenizer) -> ThoughtFormat | None:
        """Return the format in a chat template; None: it has no markers of thoughts."""
        markers = next((pair for pair in MARKERS if pair[1] in template), None)
        if markers is None:
            return None
        markup = tokenizer.markup_ids
        ids = {marker: markup[marker] for marker in markers if marker in markup}
        ids = ids if len(ids) == len(markers) else {}
        return cls(*markers, ids, other_markup(tokenizer, ids.values()))

    @property
    def marks(self) -> dict[int, str]:
        """Marker token -> the character that represents it in decoded text."""
        last = FIRST_MARK + MAX_MARKS - 1  # markers of calls count from the first
        return {token: chr(last - n) for n, token in enumerate(self.ids.values())}

    def begun(self, prompt: str) -> bool | None:
        """Return whether a prompt leaves a thought open; None: the answer may begin with one."""
        end = prompt.rstrip()
        if end.endswith(self.open):
            return True
        return False if end.endswith(self.close) else None

    def rules(self, thought: Thought) -> str:
        """Return the rule `thought`, in Lark, for the thought before an answer. A budget is
        enforced only if the markers are tokens."""
        gap = f"/[ \\n]{{0,{MAX_GAP}}}/"
        if self.ids:
            rest, rule = f"inside <[{self.ids[self.close]}]> {gap}", thought.inside
        else:
            rest = f"closed {gap}"
            rule = f"closed[lazy]: /(.|\\n)*/ {json.dumps(self.close)}"
        body = rest if thought.begun else f"({self._first} {rest})?"
        return f"thought: {body}\n{rule}"

    def unclosed(self, thought: Thought) -> str:
        """Return the beginning of a thought, in Lark, before a call that ends it instead of its
        closing marker."""
        first = "" if thought.begun else self._first
        return f"{first} inside" if self.ids else first

    @property
    def _first(self) -> str:
        return f"<[{self.ids[self.open]}]>" if self.ids else json.dumps(self.open)

    @property
    def anything(self) -> str:
        """Any text, in Lark: the answer if only its thought has a limit."""
        return "\n".join(["start: text", *text_rules(self.special_ids)])


class AnswerParser:
    """Splits an answer into thoughts, text and calls, incrementally.

    Args:
        thoughts: their format; None: no thoughts.
        in_thought: the prompt leaves a thought open; None: the answer may begin with one.
        calls: parses tool calls; None: no calls.
        opener: marker that opens a call and thereby ends a thought; "": none does.
    """

    def __init__(
        self,
        thoughts: ThoughtFormat | None,
        in_thought: bool | None,
        calls: ToolCallParser | None,
        opener: str = "",
    ) -> None:
        self._calls = calls
        self._opener = opener
        self._open, self._close = "", ""
        self._state = "answer"
        # Markers where they mark nothing: they are spelt out.
        self._markers = {} if calls is None else spellings(calls.form.ids, calls.form.marks)
        if thoughts is not None:
            self._markers |= spellings(thoughts.ids, thoughts.marks)
        if thoughts is not None and in_thought is not False:
            marks = thoughts.marks
            spelled = {marker: marks[token] for marker, token in thoughts.ids.items()}
            self._open = spelled.get(thoughts.open, thoughts.open)
            self._close = spelled.get(thoughts.close, thoughts.close)
            self._state = "thought" if in_thought else "start"
        self._buffer = ""
        self._begun_thought = False  # a part of it was returned

    @property
    def num_calls(self) -> int:
        """Number of calls that have begun."""
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, text: str, ends: bool = False) -> list[AnswerDelta]:
        """Take more text; return the parts that are final: all of them if the answer ends."""
        deltas = self._split(text, ends)
        if self._markers:
            for delta in deltas:
                delta.text = delta.text.translate(self._markers)
                delta.thought = delta.thought.translate(self._markers)
                delta.arguments = delta.arguments.translate(self._markers)
        return deltas

    def _split(self, text: str, ends: bool) -> list[AnswerDelta]:
        if self._state == "answer":
            return self._answer(text, ends)
        self._buffer += text
        if self._state == "start":
            begins = self._buffer.lstrip()
            if begins.startswith(self._open):
                self._buffer, self._state = begins[len(self._open) :], "thought"
            elif ends or not self._open.startswith(begins):
                self._state = "answer"
                start, self._buffer = self._buffer, ""
                return self._answer(start, ends)
        deltas: list[AnswerDelta] = []
        if self._state == "thought":
            deltas += self._thought(ends)
        if self._state == "gap":
            answer = self._buffer.lstrip()
            self._buffer = ""
            if answer or ends:
                self._state = "answer"
                deltas += self._answer(answer, ends)
        return deltas

    def _thought(self, ends: bool) -> list[AnswerDelta]:
        """Return parts of a thought, without the white space around it."""
        markers = [self._close, self._opener] if self._opener else [self._close]
        places = {place: end for end in markers if (place := self._buffer.find(end)) >= 0}
        if places:
            place = min(places)
            skipped = len(self._close) if places[place] == self._close else 0
            thought, self._buffer = self._buffer[:place], self._buffer[place + skipped :]
            self._state = "gap"
            thought = thought.rstrip()
        else:
            margin = 0 if ends else max(overlap(self._buffer, marker) for marker in markers)
            thought = self._buffer[: len(self._buffer) - margin].rstrip()
            self._buffer = self._buffer[len(thought) :]
        if thought and not self._begun_thought:
            thought = thought.lstrip()
        if not thought:
            return []
        self._begun_thought = True
        return [AnswerDelta(thought=thought)]

    def _answer(self, text: str, ends: bool) -> list[AnswerDelta]:
        if self._calls is not None:
            return self._calls.push(text, ends)
        return [AnswerDelta(text=text)] if text else []
