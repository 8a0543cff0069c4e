"""Samples of a kernel's time beside the machine's limits at that moment, without those that other
processes disturbed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch  # before the extension, which then shares torch's threads
from roofline_work import Value, Work, on_huge_pages, words

from kvik.kernels.cpu import _native

OTHERS = 0.05  # of the cores' time that other processes may take during a sample
TICK = 1 / os.sysconf("SC_CLK_TCK")


class Limits:
    """The machine's limits at this moment."""

    def __init__(self, runtime: _native.Runtime, budget: int) -> None:
        self._runtime = runtime
        self._data = on_huge_pages(budget, torch.int8)
        self._result = torch.zeros(1, dtype=torch.float64)

    def bandwidth(self) -> float:
        """Bytes a second."""
        return self._rate("read_memory", data=self._data, bytes=len(self._data))

    def peak(self, kernel: str) -> float:
        """Operations a second. The best of three: the first one may find a sleeping core."""
        return max(self._rate(kernel, steps=20_000) for _ in range(3))

    def _rate(self, kernel: str, **arguments: Value) -> float:
        kernel_id, values = words(kernel, {**arguments, "result": self._result})
        started = time.perf_counter()
        self._runtime.run(kernel_id, values)
        return self._result.item() / (time.perf_counter() - started)


def busy_seconds() -> float:
    """CPU seconds of all processes of the machine, this one included; own ones where unknown."""
    try:
        fields = [int(f) for f in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:
        return own_seconds()
    return (sum(fields[:3]) + sum(fields[5:8])) * TICK  # without idle, waiting and guests


def own_seconds() -> float:
    times = os.times()
    return times.user + times.system


@dataclass
class Sample:
    """Seconds of each part, limits at that time, and the share of the cores that others took."""

    times: dict[str, float]
    bandwidth: float
    peak: float
    others: float


def sample(work: Work, runtime: _native.Runtime, limits: Limits, seconds: float) -> list[Sample]:
    """Run for so long, and at least once; the disturbance is that of the whole time."""
    found: list[Sample] = []
    cores = os.cpu_count() or 1
    started, busy, own = time.perf_counter(), busy_seconds(), own_seconds()
    while not found or time.perf_counter() - started < seconds:
        times = dict.fromkeys(work.parts, 0.0)
        for part, nanoseconds in zip(work.parts, runtime.replay_timed(work.tape, []), strict=True):
            times[part] += nanoseconds * 1e-9
        found.append(Sample(times, limits.bandwidth(), limits.peak(work.peak), 0.0))
    elapsed = time.perf_counter() - started
    foreign = (busy_seconds() - busy) - (own_seconds() - own)
    for one in found:
        # one tick of the clock may be counted on the wrong side
        one.others = max(0.0, foreign - TICK) / (elapsed * cores)
    return found


def measure(
    work: Work, runtime: _native.Runtime, limits: Limits, rounds: int, seconds: float
) -> tuple[list[Sample], bool]:
    """Samples of `rounds` quiet stretches of time out of at most three times as many; else those of
    the least disturbed stretch, and True."""
    runtime.replay(work.tape, [])
    stretches: list[list[Sample]] = []
    quiet: list[list[Sample]] = []
    while len(quiet) < rounds and len(stretches) < 3 * rounds:
        stretches.append(sample(work, runtime, limits, seconds))
        quiet = [stretch for stretch in stretches if stretch[0].others <= OTHERS]
    if quiet:
        return [one for stretch in quiet for one in stretch], False
    return min(stretches, key=lambda stretch: stretch[0].others), True
