"""Samples of a kernel's time beside the machine's limits at that moment, without those that other
processes disturbed."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch  # noqa: F401  before the extension, which then shares torch's threads
from roofline_work import Work

from kvik.kernels.cpu import _native
from kvik_bench.inprocess.rounds import OTHERS, Watch
from kvik_bench.machine.native_stage import NativeLimits


@dataclass
class Sample:
    """Seconds of each part, limits at that time, and the share of the cores that others took."""

    times: dict[str, float]
    bandwidth: float
    peak: float
    others: float


def sample(
    work: Work, runtime: _native.Runtime, limits: NativeLimits, seconds: float
) -> list[Sample]:
    """Run for so long, and at least once; the disturbance is that of the whole time."""
    found: list[Sample] = []
    started, watch = time.perf_counter(), Watch()
    while not found or time.perf_counter() - started < seconds:
        times = dict.fromkeys(work.parts, 0.0)
        for part, nanoseconds in zip(work.parts, runtime.replay_timed(work.tape, []), strict=True):
            times[part] += nanoseconds * 1e-9
        found.append(Sample(times, limits.memory_rate(), limits.peak(work.peak), 0.0))
    others = watch.others()
    for one in found:
        one.others = others
    return found


def measure(
    work: Work, runtime: _native.Runtime, limits: NativeLimits, rounds: int, seconds: float
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
