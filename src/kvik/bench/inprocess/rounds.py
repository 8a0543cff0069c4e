"""The order of measurements: subjects take turns in every round, so that a machine's drift hits all
alike and ratios within a round stay true."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvik.bench.machine.disturbance import Watch
from kvik.errors import ConfigError

Subject = TypeVar("Subject")

MAX_REPEATS = 1000


def check_repeats(repeats: int, warmup: int) -> None:
    if not 1 <= repeats <= MAX_REPEATS:
        raise ConfigError("repeats", f"must be in [1, {MAX_REPEATS}], not {repeats}")
    if not 0 <= warmup <= MAX_REPEATS:
        raise ConfigError("warmup", f"must be in [0, {MAX_REPEATS}], not {warmup}")


class Rounds:
    """Gives (round, subject) in turn, rounds below 0 to warm up, and shows on standard error, when
    that is a terminal, what is being measured.

    Attributes:
        remarks: what may make the figures wrong, once all is measured.
    """

    def __init__(self, repeats: int, warmup: int) -> None:
        check_repeats(repeats, warmup)
        self.repeats = repeats
        self.warmup = warmup
        self.remarks: tuple[str, ...] = ()
        self._watch = Watch()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr),
            disable=not sys.stderr.isatty(),
            transient=True,
        )

    def over(
        self, subjects: Sequence[Subject], label: Callable[[Subject], str] = str
    ) -> Iterator[tuple[int, Subject]]:
        task = self._bar.add_task("", total=len(subjects) * (self.repeats + self.warmup))
        for number in range(-self.warmup, self.repeats):
            turn = "warm-up" if number < 0 else f"round {number + 1} of {self.repeats}"
            for subject in subjects:
                self._bar.update(task, description=f"{turn}: {label(subject)}")
                yield number, subject
                self._bar.advance(task)

    def __enter__(self) -> Rounds:
        self._watch = Watch()
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        self.remarks = self._watch.remarks()
