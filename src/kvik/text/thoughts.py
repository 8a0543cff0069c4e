"""Thoughts of a model before its answer: where they stand, and reading them apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvik.text.dialects import FIRST_MARK, MAX_MARKS, other_markup
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
    """That a thought may come before an answer.

    Attributes:
        begun: the prompt leaves one open. Else there may be none.
        budget: the most tokens of it; None: any.
    """

    begun: bool = False
    budget: int | None = None

    @property
    def inside(self) -> str:
        """Rule `inside`, in Lark."""
        bound = "" if self.budget is None else f"[max_tokens={self.budget}]"
        return f"inside{bound}: /(.|\\n)*/"


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """What stands around a thought.

    Attributes:
        ids: the token of each marker that is one.
        others: special tokens that an answer may have.
    """

    open: str
    close: str
    ids: Mapping[str, int] = field(default_factory=dict)
    others: tuple[int, ...] = ()

    @classmethod
    def of(cls, template: str, tokenizer: Tokenizer) -> ThoughtFormat | None:
        """Return the format of a chat template; None: it knows no thoughts."""
        found = next((pair for pair in MARKERS if pair[1] in template), None)
        if found is None:
            return None
        markup = tokenizer.markup_ids
        ids = {marker: markup[marker] for marker in found if marker in markup}
        ids = ids if len(ids) == len(found) else {}
        return cls(*found, ids, other_markup(tokenizer, ids.values()))

    @property
    def marks(self) -> dict[int, str]:
        """What stands for the markers in decoded text, if they are tokens."""
        last = FIRST_MARK + MAX_MARKS - 1  # calls count from the first
        return {token: chr(last - n) for n, token in enumerate(self.ids.values())}

    def begun(self, prompt: str) -> bool | None:
        """Return whether a prompt leaves a thought open; None: the answer may begin with one."""
        end = prompt.rstrip()
        if end.endswith(self.open):
            return True
        return False if end.endswith(self.close) else None

    def rules(self, thought: Thought) -> str:
        """Return the rule `thought` in Lark, of what comes before an answer. Only where the markers
        are tokens it keeps a budget."""
        gap = f"/[ \\n]{{0,{MAX_GAP}}}/"
        if self.ids:
            rest, rule = f"inside <[{self.ids[self.close]}]> {gap}", thought.inside
        else:
            rest = f"closed {gap}"
            rule = f"closed[lazy]: /(.|\\n)*/ {json.dumps(self.close)}"
        whole = rest if thought.begun else f"({self._first} {rest})?"
        return f"thought: {whole}\n{rule}"

    def unclosed(self, thought: Thought) -> str:
        """Return the beginning of a thought, in Lark, up to what may end it in place of its
        marker."""
        first = "" if thought.begun else self._first
        return f"{first} inside" if self.ids else first

    @property
    def _first(self) -> str:
        return f"<[{self.ids[self.open]}]>" if self.ids else json.dumps(self.open)

    @property
    def anything(self) -> str:
        """Any text, in Lark: what an answer is where only its thought is bounded."""
        return "\n".join(["start: text", *text_rules(self.others)])


class AnswerParser:
    """Reads thoughts, text and calls apart, as they come. `push` and `close` return what became
    certain.

    Args:
        thoughts: None: there are none.
        begun: the prompt leaves a thought open; None: the answer may begin with one.
        calls: reads tool calls; None: there are none.
        opener: of calls, where it ends a thought; "": it does not.
    """

    def __init__(
        self,
        thoughts: ThoughtFormat | None,
        begun: bool | None,
        calls: ToolCallParser | None,
        opener: str = "",
    ) -> None:
        self._calls = calls
        self._opener = opener
        self._open, self._close = "", ""
        self._state = "answer"
        if thoughts is not None and begun is not False:
            marks = thoughts.marks
            spelled = {marker: marks[token] for marker, token in thoughts.ids.items()}
            self._open = spelled.get(thoughts.open, thoughts.open)
            self._close = spelled.get(thoughts.close, thoughts.close)
            self._state = "thought" if begun else "start"
        self._held = ""
        self._begun_thought = False  # some of it was handed out

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, text: str) -> list[AnswerDelta]:
        return self._read(text, closed=False)

    def close(self) -> list[AnswerDelta]:
        """The answer has ended."""
        found = self._read("", closed=True)
        return found if self._calls is None else found + self._calls.close()

    def _read(self, text: str, *, closed: bool) -> list[AnswerDelta]:
        if self._state == "answer":
            return self._answer(text)
        self._held += text
        if self._state == "start":
            begins = self._held.lstrip()
            if begins.startswith(self._open):
                self._held, self._state = begins[len(self._open) :], "thought"
            elif closed or not self._open.startswith(begins):
                self._state = "answer"
                held, self._held = self._held, ""
                return self._answer(held)
        found: list[AnswerDelta] = []
        if self._state == "thought":
            found += self._thought(closed=closed)
        if self._state == "gap":
            answer = self._held.lstrip()
            self._held = ""
            if answer or closed:
                self._state = "answer"
                found += self._answer(answer)
        return found

    def _thought(self, *, closed: bool) -> list[AnswerDelta]:
        """Hand out a thought, without the white space around it."""
        ends = [self._close, self._opener] if self._opener else [self._close]
        places = {place: end for end in ends if (place := self._held.find(end)) >= 0}
        if places:
            place = min(places)
            skipped = len(self._close) if places[place] == self._close else 0
            thought, self._held = self._held[:place], self._held[place + skipped :]
            self._state = "gap"
            thought = thought.rstrip()
        else:
            kept = 0 if closed else max(overlap(self._held, end) for end in ends)
            thought = self._held[: len(self._held) - kept].rstrip()
            self._held = self._held[len(thought) :]
        if thought and not self._begun_thought:
            thought = thought.lstrip()
        if not thought:
            return []
        self._begun_thought = True
        return [AnswerDelta(thought=thought)]

    def _answer(self, text: str) -> list[AnswerDelta]:
        if self._calls is not None:
            return self._calls.push(text)
        return [AnswerDelta(text=text)] if text else []
