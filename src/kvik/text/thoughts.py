"""Thoughts of a model before its answer: where they stand, and reading them apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvik.text.dialects import FIRST_MARK, MAX_MARKS, other_markup
from kvik.text.tokenizer import Tokenizer
from kvik.text.tool_calls import AnswerDelta, ToolCallParser, overlap
from kvik.text.tool_grammar import id_ranges

MARKERS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
MAX_GAP = 3  # line breaks and spaces between a thought and its answer


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

    def rules(self, *, begun: bool, budget: int | None = None) -> str:
        """Return the rule `thought` in Lark, of what comes before an answer.

        Args:
            begun: the prompt leaves one open. Else there may be none.
            budget: the most tokens of it; only where the markers are tokens. None: any.
        """
        gap = f"/[ \\n]{{0,{MAX_GAP}}}/"
        if self.ids:
            first, last = (f"<[{self.ids[marker]}]>" for marker in (self.open, self.close))
            inside = "" if budget is None else f"[max_tokens={budget}]"
            rest = f"inside {last} {gap}"
            rule = f"thought: {rest}" if begun else f"thought: ({first} {rest})?"
            return f"{rule}\ninside{inside}: /(.|\\n)*/"
        close = f"closed[lazy]: /(.|\\n)*/ {json.dumps(self.close)}"
        rest = f"closed {gap}"
        if begun:
            return f"thought: {rest}\n{close}"
        return f"thought: ({json.dumps(self.open)} {rest})?\n{close}"

    @property
    def anything(self) -> str:
        """Any text, in Lark: what an answer is where only its thought is bounded."""
        others = f" | <[{id_ranges(self.others)}]>" if self.others else ""
        return f"start: (TEXT{others})*\nTEXT: /(.|\\n)+/"


class AnswerParser:
    """Reads thoughts, text and calls apart, as they come. `push` and `close` return what became
    certain.

    Args:
        thoughts: None: there are none.
        begun: the prompt leaves a thought open; None: the answer may begin with one.
        calls: reads tool calls; None: there are none.
    """

    def __init__(
        self,
        thoughts: ThoughtFormat | None,
        begun: bool | None,
        calls: ToolCallParser | None,
    ) -> None:
        self._calls = calls
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
        place = self._held.find(self._close)
        if place >= 0:
            thought, self._held = self._held[:place], self._held[place + len(self._close) :]
            self._state = "gap"
            thought = thought.rstrip()
        else:
            kept = 0 if closed else overlap(self._held, self._close)
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
