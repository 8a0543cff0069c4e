"""The format of gpt-oss: an answer is a sequence of messages, each on a channel.

A message is `<|channel|>` and its header, `<|message|>` and its content, and `<|end|>`; each but
the first begins with `<|start|>assistant`. Thoughts are on the channel `analysis`, the answer is on
`final`; a call is on `commentary` with ` to=functions.NAME`, and ends the answer
(github.com/openai/harmony, docs/format.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvik.text.dialects import FIRST_MARK, other_markup, spellings
from kvik.text.thoughts import Thought
from kvik.text.tokenizer import Tokenizer
from kvik.text.tool_calls import AnswerDelta, random_call_id
from kvik.text.tool_grammar import AllowedCalls, Tool, json_rule, text_rules

NAME = "harmony"
MARKERS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>", "<|call|>")
MAX_HEADER = 256  # characters; a longer one is text
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([A-Za-z0-9_.-]+)")


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """See `MarkedFormat`."""

    ids: Mapping[str, int]  # marker -> its token
    special_ids: tuple[int, ...]  # special tokens that a text may contain
    thinks = bounded = True
    tool_format = NAME

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> HarmonyFormat | None:
        """Return the format with the tokens of a model; None: some markers are not tokens."""
        ids = {
            marker: i for marker in MARKERS if (i := tokenizer.markup_ids.get(marker)) is not None
        }
        if len(ids) < len(MARKERS):
            return None
        return cls(ids, other_markup(tokenizer, ids.values()))

    def marks(self, *, calls: bool) -> dict[int, str]:
        """See `MarkedFormat.marks`."""
        return {token: chr(FIRST_MARK + n) for n, token in enumerate(self.ids.values())}

    def num_thought_tokens(self, token_ids: Sequence[int], in_thought: bool | None) -> int:
        """See `MarkedFormat.num_thought_tokens`: a message before another one is a thought."""
        end = self.ids["<|end|>"]
        if end in token_ids:
            return token_ids.index(end) + 1
        return len(token_ids) if in_thought else 0

    def begun(self, prompt: str) -> bool | None:
        """See `MarkedFormat.begun`."""
        return True if prompt.endswith("<|channel|>analysis<|message|>") else None

    def for_template(self, message: Mapping[str, object]) -> Mapping[str, object]:
        """See `MarkedFormat.for_template`: with calls, the template reads thoughts from
        `thinking`."""
        thought = message.get("reasoning_content")
        if not thought or not message.get("tool_calls") or message.get("content"):
            return message
        return {**message, "thinking": thought}

    # -- grammar ---------------------------------------------------------------------------------

    def call_grammar(self, allowed: AllowedCalls, thought: Thought | None = None) -> str:
        """See `MarkedFormat.call_grammar`. There is at most one call, which may follow a message to
        the user."""
        texts, text = text_rules(self.special_ids), "@answer" if allowed.answer else "text"
        if thought is None:
            return "\n".join([f"start: {text}", *texts])
        channel, message = self._token("<|channel|>"), self._token("<|message|>")
        kind = f'(" " {self._token("<|constrain|>")}? "json")?'
        rules = [
            *self._thought(thought),
            f'said: {channel} "commentary" {message} TEXT {self._next}',
            *texts,
        ]
        for n, tool in enumerate(allowed.tools):
            to = f'" to=functions.{tool.name}"'
            heads = f'{channel} "commentary" {to} {kind} | {to} {channel} "commentary" {kind}'
            rules += [
                f"call_{n}: ({heads}) {message} args_{n}",
                f"args_{n}: {json_rule(tool.parameters)}",
            ]
        calls = f"said? ({' | '.join(f'call_{n}' for n in range(len(allowed.tools)))})"
        final = f"{self._final} {text}"
        body = {"auto": f"({calls} | {final})", "required": calls, "none": final}[allowed.choice]
        return "\n".join([f"start: thought {body}", *rules])

    def thought_rules(self, thought: Thought) -> str:
        """See `MarkedFormat.thought_rules`."""
        rule, *rules = self._thought(thought)
        return "\n".join([f"{rule} {self._final}", *rules])

    @property
    def anything(self) -> str:
        """See `MarkedFormat.anything`."""
        return "\n".join(["start: text", *text_rules(self.special_ids)])

    def _thought(self, thought: Thought) -> list[str]:
        rest = f"inside {self._next}"
        head = f'{self._token("<|channel|>")} "analysis" {self._token("<|message|>")}'
        rule = f"thought: {rest}" if thought.begun else f"thought: ({head} {rest})?"
        return [rule, thought.inside]

    @property
    def _next(self) -> str:
        return f'{self._token("<|end|>")} {self._token("<|start|>")} "assistant"'

    @property
    def _final(self) -> str:
        return f'{self._token("<|channel|>")} "final" {self._token("<|message|>")}'

    def _token(self, marker: str) -> str:
        return f"<[{self.ids[marker]}]>"

    # -- reading ---------------------------------------------------------------------------------

    def parser(self, in_thought: bool | None, tools: Mapping[str, Tool] | None) -> HarmonyParser:
        """See `MarkedFormat.parser`."""
        return HarmonyParser(self, in_thought, tools or {})


class HarmonyParser:
    """See `AnswerParser`. A message without a header or for an unknown recipient is text."""

    def __init__(
        self, form: HarmonyFormat, in_thought: bool | None, tools: Mapping[str, Tool]
    ) -> None:
        self._tools = tools
        marks = form.marks(calls=True)
        spelled = {marker: marks[token] for marker, token in form.ids.items()}
        self._markers = spellings(form.ids, marks)
        self._channel, self._message = spelled["<|channel|>"], spelled["<|message|>"]
        self._start = spelled["<|start|>"]
        self._ends = re.compile(f"[{spelled['<|end|>']}{spelled['<|call|>']}{self._start}]")
        self._buffer = ""
        self._kind = {None: "header", True: "thought", False: "text"}[in_thought]
        self._num_said = {"thought": 0, "text": 0}  # messages of each kind
        self.num_calls = 0

    def push(self, text: str, ends: bool = False) -> list[AnswerDelta]:
        """See `AnswerParser.push`."""
        self._buffer += text
        deltas: list[AnswerDelta] = []
        while self._buffer:
            if self._kind == "header":
                if not self._header(deltas, ends):
                    break
            else:
                self._content(deltas)
        return deltas

    def _header(self, deltas: list[AnswerDelta], ends: bool) -> bool:
        """Read the header of a message; return whether the kind of the message is known."""
        begins = self._buffer.lstrip()
        head, message, content = begins.partition(self._message)
        first = begins[:1]
        is_marked = first != "" and first in (self._channel, self._start)
        is_head = is_marked or begins.startswith("to="[: len(begins)])
        is_head = is_head and len(head) <= MAX_HEADER
        if is_head and not message and not ends:
            return False
        if is_head and not message and is_marked:
            self._buffer = ""  # the answer ended within a header
            return True
        if not is_head or not message:
            self._kind = "text"
            if first == self._start:  # which would end the text
                self._say(deltas, first)
                self._buffer = begins[1:]
            return True
        words = head.rpartition(self._channel)[2].split() if self._channel in head else []
        to = _RECIPIENT.search(head)
        self._buffer, self._kind = content, "text"
        if to is not None and to[1] in self._tools:
            self._kind = "call"
            deltas.append(AnswerDelta(index=self.num_calls, id=random_call_id(), name=to[1]))
            self.num_calls += 1
        elif to is not None:
            self._say(deltas, head + message)
        elif words[:1] == ["analysis"]:
            self._kind = "thought"
        if self._kind in self._num_said:
            self._num_said[self._kind] += 1
            if self._num_said[self._kind] > 1 and to is None:
                self._say(deltas, "\n\n")
        return True

    def _content(self, deltas: list[AnswerDelta]) -> None:
        end = self._ends.search(self._buffer)
        self._say(deltas, self._buffer[: end.start()] if end else self._buffer)
        if end is None:
            self._buffer = ""
            return
        rest = self._buffer[end.start() :]
        self._buffer = rest if rest[0] == self._start else rest[1:]
        self._kind = "header"

    def _say(self, deltas: list[AnswerDelta], text: str) -> None:
        text = text.translate(self._markers)
        if not text:
            return
        if self._kind == "thought":
            deltas.append(AnswerDelta(thought=text))
        elif self._kind == "call":
            deltas.append(AnswerDelta(index=self.num_calls - 1, arguments=text))
        else:
            deltas.append(AnswerDelta(text=text))
