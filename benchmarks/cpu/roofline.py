"""How close the native kernels come to the machine's limits.

    python benchmarks/cpu/roofline.py [--threads 2] [--isa avx2] [--kernel linear] [--json FILE]
                                      [--quick]

A kernel takes at least the time to read its bytes and to do its operations. Both limits are
measured right after each run of the kernel, because machines (virtual ones above all) change their
speed; the share is limit / time, median and 10th to 90th percentile. Weights and KV caches are
larger than the processor's caches, so that every byte comes from memory. Samples during which other
processes used the cores are dropped; "!" marks rows that have no undisturbed sample.

Columns: microseconds of a layer (or call), bytes a second of the limit, operations a second of the
limit, the share, and for layers the share of each matrix product.
"""

from __future__ import annotations

import json
import os
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from roofline_work import LAYERS, Work, attentions, linears, small_ones

from kvik.kernels.cpu import _native
from kvik_bench.inprocess.rounds import OTHERS, Watch
from kvik_bench.machine.native_stage import NativeLimits, NativeStage

EVERYTHING, QUICK = 384 << 20, 64 << 20  # bytes that a case reads


@dataclass
class Sample:
    """Seconds of each part, limits at that time, and the share of the cores that others took."""

    times: dict[str, float]
    bandwidth: float
    peak: float
    others: float


def sample(
    work: Work, run: Callable[[], list[float]], limits: NativeLimits, seconds: float
) -> list[Sample]:
    """Run for `seconds`, and at least once; the disturbance is that of the whole time."""
    found: list[Sample] = []
    started, watch = time.perf_counter(), Watch()
    while not found or time.perf_counter() - started < seconds:
        times = dict.fromkeys(work.parts, 0.0)
        for part, duration in zip(work.parts, run(), strict=True):
            times[part] += duration
        found.append(Sample(times, limits.memory_rate(), limits.peak(work.peak), 0.0))
    others = watch.others()
    for one in found:
        one.others = others
    return found


def measure(
    work: Work, stage: NativeStage, rounds: int, seconds: float
) -> tuple[list[Sample], bool]:
    """Return the samples of `rounds` undisturbed periods, out of at most three times as many; else
    those of the least disturbed period, and True."""
    run = work.track(stage)
    run()
    stretches: list[list[Sample]] = []
    quiet: list[list[Sample]] = []
    while len(quiet) < rounds and len(stretches) < 3 * rounds:
        stretches.append(sample(work, run, stage.limits, seconds))
        quiet = [stretch for stretch in stretches if stretch[0].others <= OTHERS]
    if quiet:
        return [one for stretch in quiet for one in stretch], False
    return min(stretches, key=lambda stretch: stretch[0].others), True


def report(work: Work, samples: list[Sample], disturbed: bool) -> dict[str, Any]:
    """Return one row: the whole, and each part's share."""

    def limit(one: Sample, part: str) -> float:
        return max(work.bytes[part] / one.bandwidth, work.operations[part] / one.peak)

    parts = list(work.bytes)
    shares = [sum(limit(s, p) for p in parts) / sum(s.times.values()) for s in samples]
    tenths = quantiles(shares, n=10, method="inclusive") if len(shares) > 1 else shares
    calls = len(work.parts) // len(parts)
    return {
        "kernel": work.kernel,
        "case": work.case,
        "microseconds": median(sum(s.times.values()) for s in samples) / calls * 1e6,
        "gigabytes_per_second": median(
            sum(work.bytes.values()) / sum(s.times.values()) / 1e9 for s in samples
        ),
        "gigaoperations_per_second": median(
            sum(work.operations.values()) / sum(s.times.values()) / 1e9 for s in samples
        ),
        "share": median(shares),
        "share_low": tenths[0],
        "share_high": tenths[-1],
        "parts": {p: median(limit(s, p) / s.times[p] for s in samples) for p in parts},
        "bandwidth": median(s.bandwidth for s in samples) / 1e9,
        "peak": median(s.peak for s in samples) / 1e9,
        "samples": len(samples),
        "disturbed": disturbed,
    }


def print_row(row: dict[str, Any]) -> None:
    parts = row["parts"] if len(row["parts"]) > 1 else {}
    print(
        f"{row['kernel'] + ' ' + row['case']:48}{row['microseconds']:11.1f}"
        f"{row['gigabytes_per_second']:8.1f}{row['bandwidth']:7.1f}"
        f"{row['gigaoperations_per_second']:9.0f}{row['peak']:8.0f}"
        f"{row['share']:7.2f} ({row['share_low']:.2f} .. {row['share_high']:.2f})"
        f"{'!' if row['disturbed'] else ' '} "
        + " ".join(f"{part} {share:.2f}" for part, share in parts.items()),
        flush=True,
    )


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--isa", choices=_native.instruction_sets())
    parser.add_argument("--kernel", default="", help="only kernels and cases with this in the name")
    parser.add_argument("--json", type=Path, help="write the rows there too")
    parser.add_argument("--quick", action="store_true", help="few cases, one short sample of each")
    args = parser.parse_args()
    torch.manual_seed(0)
    budget = QUICK if args.quick else EVERYTHING
    isa = args.isa or _native.instruction_sets()[0]
    stage = NativeStage(args.threads, budget, isa)
    print(f"{isa}, {args.threads} threads")
    print(f"{'':48}{'us':>11}{'GB/s':>8}{'of':>7}{'GOP/s':>9}{'of':>8}{'share':>7} (10% .. 90%)")
    rows_of = (1, 32) if args.quick else (1, 4, 8, 32, 128, 512)
    models = ("qwen2.5-0.5b",) if args.quick else tuple(LAYERS)

    def wanted(name: str) -> bool:
        return args.kernel in name

    works = chain(
        linears(stage, rows_of, models, budget, wanted),
        attentions(stage, (1,) if args.quick else (1, 16), budget, wanted),
        small_ones(stage, budget, wanted),
    )
    rounds, seconds = (1, 0.1) if args.quick else (5, 0.25)
    rows = []
    for work in works:
        rows.append(report(work, *measure(work, stage, rounds, seconds)))
        print_row(rows[-1])
    if args.json:
        head = {"isa": isa, "threads": args.threads}
        args.json.write_text(json.dumps({**head, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
