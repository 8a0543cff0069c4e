"""What a conversation needs of whoever answers: the engine here, or a server elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

Messages = Sequence[Mapping[str, str]]  # each with role and content, the oldest first


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of an answer after its end.

    Attributes:
        figures: tokens and times, in one line.
        note: why it is shorter than it might be; empty if it is not.
    """

    figures: str
    note: str = ""


class Answer(AbstractContextManager["Answer"], Protocol):
    """Pieces of text, to be read inside its `with`; leaving that stops what still runs."""

    def __iter__(self) -> Iterator[str]:
        """Raises `KvikError`: the answer failed and is not to be kept."""
        ...

    @property
    def facts(self) -> Facts | None:
        """None: it did not come to its end."""
        ...


class Backend(Protocol):
    """Answers with the sampling parameters that it was made with."""

    def answer(self, messages: Messages) -> Answer:
        """Raises `KvikError`: these messages cannot be answered."""
        ...

    def stats(self) -> str:
        """One line on whoever answers."""
        ...
