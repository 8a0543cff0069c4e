"""The order of measurements: every round measures all subjects, so that drift of the machine
affects all equally and ratios within a round stay correct. Also detects other processes that use
the cores."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvik.errors import ConfigError

OTHERS = 0.05  # share of the cores' time that other processes may take
TICK = 1 / os.sysconf("SC_CLK_TCK")


class Watch:
    """Measures the processor time of other processes since it was created."""

    def __init__(self) -> None:
        self._started, self._busy, self._own = time.perf_counter(), busy_seconds(), own_seconds()

    def others(self) -> float:
        """Return the share of all cores' time that other processes used; 0 if it is unknown."""
        elapsed = time.perf_counter() - self._started
        foreign = (busy_seconds() - self._busy) - (own_seconds() - self._own)
        # one clock tick may be attributed to the wrong process
        return max(0.0, foreign - TICK) / (elapsed * (os.cpu_count() or 1))

    def remarks(self) -> tuple[str, ...]:
        """Return a warning to show with the results, if other processes took much time."""
        words = disturbance(self.others())
        return (f"Warning: {words}.",) if words else ()


def disturbance(share: float) -> str:
    """Return a warning about the share that other processes took; "" if it is small."""
    if share <= OTHERS:
        return ""
    return f"other processes took {share:.0%} of the cores: measure again when it is quiet"


def undisturbed(seconds: Iterable[float]) -> float:
    """Return the median of the faster half of the samples: disturbance only lengthens them."""
    ordered = sorted(seconds)
    return median(ordered[: -(-len(ordered) // 2)])


def busy_seconds() -> float:
    """Return the CPU seconds of all processes of the machine; if unknown, of this one."""
    try:
        fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:
        return own_seconds()
    return (sum(fields[:3]) + sum(fields[5:8])) * TICK  # without idle, waiting and guests


def own_seconds() -> float:
    """Return the CPU seconds of this process and of the children it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


Subject = TypeVar("Subject")
Run = TypeVar("Run")

MAX_REPEATS = 1000


def check_repeats(repeats: int, warmup: int) -> None:
    if not 1 <= repeats <= MAX_REPEATS:
        raise ConfigError("repeats", f"must be in [1, {MAX_REPEATS}], not {repeats}")
    if not 0 <= warmup <= MAX_REPEATS:
        raise ConfigError("warmup", f"must be in [0, {MAX_REPEATS}], not {warmup}")


class Rounds:
    """Measures subjects in rounds, with a progress bar on a terminal."""

    def __init__(self, repeats: int, warmup: int) -> None:
        check_repeats(repeats, warmup)
        self.repeats = repeats
        self.warmup = warmup
        self.remarks: tuple[str, ...] = ()  # reasons to doubt the figures, after the last round
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(file=sys.stderr),
            disable=not sys.stderr.isatty(),
            transient=True,
        )

    def runs(
        self,
        subjects: Sequence[Subject],
        measure: Callable[[int, Subject], Run],
        label: Callable[[Subject], str] = str,
    ) -> dict[Subject, list[Run]]:
        """Return the results of each subject, one for each round.

        Args:
            measure: measures a subject in a round; the numbers of warm-ups are negative.
        """
        results: dict[Subject, list[Run]] = {subject: [] for subject in subjects}
        task = self._bar.add_task("", total=len(subjects) * (self.repeats + self.warmup))
        watch = Watch()
        with self._bar:
            for number in range(-self.warmup, self.repeats):
                turn = "warm-up" if number < 0 else f"round {number + 1} of {self.repeats}"
                for subject in subjects:
                    self._bar.update(task, description=f"{turn}: {label(subject)}")
                    result = measure(number, subject)
                    if number >= 0:
                        results[subject].append(result)
                    self._bar.advance(task)
        self.remarks = watch.remarks()
        return results
