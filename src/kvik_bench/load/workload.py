"""What is sent: conversations, each a function of the seed and its number alone.

So the same seed sends the same requests byte for byte, whatever the timing and the number of
connections. Only the answers that a later turn of a conversation repeats are the server's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from kvik.errors import ParamError
from kvik_bench.load.lengths import Length, Lengths
from kvik_bench.load.words import WORDS

Content = str | list[int]  # text, or token ids

# The first ids of most vocabularies are special tokens and single bytes.
FIRST_IDS = 1000


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request. Token counts are what was planned: of text, only the server knows them."""

    messages: tuple[tuple[str, Content], ...]  # (role, content); the last one asks
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    content: Content
    tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that are asked one after another; each repeats all that was said before."""

    turns: tuple[Turn, ...]
    system: Turn | None = None  # a prefix that conversations share

    def request(self, answers: Sequence[str]) -> LoadRequest:
        """The next request, after as many answers."""
        messages = [] if self.system is None else [("system", self.system.content)]
        tokens = 0 if self.system is None else self.system.tokens
        for turn, answer in zip(self.turns, answers, strict=False):
            messages += [("user", turn.content), ("assistant", answer)]
            tokens += turn.tokens + turn.output_tokens
        turn = self.turns[len(answers)]
        messages.append(("user", turn.content))
        return LoadRequest(tuple(messages), tokens + turn.tokens, turn.output_tokens)

    def first(self, turns: int) -> Conversation:
        return replace(self, turns=self.turns[:turns])


class Workload(Protocol):
    """Conversations by number, from 0."""

    @property
    def turns(self) -> int: ...  # of each conversation

    def conversation(self, index: int) -> Conversation: ...


class Filler(Protocol):
    """Makes prompt contents of a wanted length."""

    def fill(self, tokens: int, seed: str) -> Content: ...


@dataclass(frozen=True, slots=True)
class TokenFiller:
    """Random token ids, each equally likely. Exact in length."""

    vocab_size: int
    excluded: frozenset[int] = frozenset()  # special tokens

    def fill(self, tokens: int, seed: str) -> list[int]:
        low = min(FIRST_IDS, self.vocab_size // 2)
        ids: list[int] = (_raw(tokens, seed) % np.uint64(self.vocab_size - low) + low).tolist()
        if not self.excluded.isdisjoint(ids):
            ids = [low if token in self.excluded else token for token in ids]
        return ids


@dataclass(frozen=True, slots=True)
class WordFiller:
    """Random words, about one token each in most vocabularies."""

    def fill(self, tokens: int, seed: str) -> str:
        picks: list[int] = (_raw(tokens, seed) % np.uint64(len(WORDS))).tolist()
        return " ".join([WORDS[i] for i in picks])


@dataclass(frozen=True, slots=True)
class RandomWorkload:
    """Random contents. With `prefixes`, each conversation starts with one of so many."""

    lengths: Lengths
    filler: Filler
    seed: str
    turns: int = 1
    prefix_tokens: int = 0
    prefixes: int = 1

    def conversation(self, index: int) -> Conversation:
        turns = []
        for turn in range(self.turns):
            tokens, output_tokens = self.lengths.of(index, turn)
            content = self.filler.fill(tokens, f"{self.seed}/{index}/{turn}")
            turns.append(Turn(content, tokens, output_tokens))
        return Conversation(tuple(turns), self._prefix(index))

    def _prefix(self, index: int) -> Turn | None:
        if not self.prefix_tokens:
            return None
        which = random.Random(f"{self.seed}/prefix of/{index}").randrange(self.prefixes)
        content = self.filler.fill(self.prefix_tokens, f"{self.seed}/prefix/{which}")
        return Turn(content, self.prefix_tokens, 0)


@dataclass(frozen=True, slots=True)
class TextWorkload:
    """Given texts in their order, again from the start when they are used up."""

    texts: Sequence[str]
    output: Length
    seed: str
    turns: int = 1

    def conversation(self, index: int) -> Conversation:
        turns = []
        for turn in range(self.turns):
            text = self.texts[(index * self.turns + turn) % len(self.texts)]
            rng = random.Random(f"{self.seed}/lengths/{index}/{turn}")
            turns.append(Turn(text, len(text.split()), self.output.draw(rng)))
        return Conversation(tuple(turns))


def read_texts(path: Path) -> list[str]:
    """Prompts from a file: one for each line, or with the ending .jsonl one object with `prompt`.

    Raises:
        ParamError: the file cannot be read, or has no prompts.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if path.suffix == ".jsonl":
            lines = [_prompt_of(line) for line in lines]
    except OSError as error:
        raise ParamError("prompts", f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ParamError("prompts", "must be UTF-8 text") from None
    if not lines:
        raise ParamError("prompts", "has no prompts")
    return lines


def _prompt_of(line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        prompt = None
    if not isinstance(prompt, str) or not prompt:
        raise ParamError("prompts", f"must be objects with a text `prompt`, not {line[:60]!r}")
    return prompt


def _raw(count: int, seed: str) -> np.typing.NDArray[np.uint64]:
    """Random 64-bit numbers. numpy promises the bits of PCG64, but not those of its `Generator`."""
    bits = np.random.PCG64(random.Random(seed).getrandbits(128))
    return np.asarray(bits.random_raw(count), dtype=np.uint64)
