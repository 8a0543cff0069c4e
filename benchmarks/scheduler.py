"""What a step costs in Python outside the model: `Scheduler.schedule` and `Scheduler.update`.

A fake worker answers token 1 for each sampling row. All requests decode, and the cost per step
should not depend on how long they are:

    python benchmarks/scheduler.py --num-seqs 256 --contexts 100 1000 10000
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter

from kvik.config.config import CacheConfig, SchedulerConfig
from kvik.config.kv_spec import KVCacheSpec, KVKind, group_layers
from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.scheduler import Scheduler
from kvik.core.types import Request


@dataclass(frozen=True)
class Times:
    """Microseconds of each step."""

    schedule: list[float]
    update: list[float]

    @property
    def total(self) -> list[float]:
        return [a + b for a, b in zip(self.schedule, self.update, strict=True)]


def decoding(num_seqs: int, context: int, steps: int, block_size: int) -> Scheduler:
    """A scheduler whose `num_seqs` requests have computed their prompts of `context` tokens."""
    length = context + steps + 2
    spec = KVCacheSpec(KVKind.FULL, num_kv_heads=1, head_dim=64, bytes_per_token=256)
    cache = CacheConfig(block_size, num_seqs * (length // block_size + 1) + 1, group_layers([spec]))
    scheduler = Scheduler(SchedulerConfig(num_seqs, num_seqs * context, length), cache)
    for i in range(num_seqs):
        # Spread over the block, as lengths are in life: each step some requests fill a block.
        prompt = [i] * (context - i % min(block_size, context))
        scheduler.add(
            Request(
                request_id=f"r{i}",
                index=0,
                params=SamplingParams(),
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                max_length=length,
                stop_ids=frozenset([2]),
                seed=0,
                arrival=0.0,
            ),
            now=0.0,
        )
    plan = scheduler.schedule(0.0)
    assert plan is not None and all(plan.samples)
    scheduler.update(answer(plan), 0.0)
    return scheduler


def answer(plan: SchedulerOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput(plan.step, [[1] if samples else [] for samples in plan.samples])


def measure(scheduler: Scheduler, steps: int) -> Times:
    times = Times([], [])
    gc.collect()
    for _ in range(steps):
        start = perf_counter()
        plan = scheduler.schedule(0.0)
        planned = perf_counter()
        assert plan is not None
        output = answer(plan)
        answered = perf_counter()
        scheduler.update(output, 0.0)
        end = perf_counter()
        times.schedule.append((planned - start) * 1e6)
        times.update.append((end - answered) * 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()
    print(f"{args.num_seqs} decoding requests, {args.steps} steps, microseconds per step (median)")
    print(f"{'context':>8} {'schedule':>9} {'update':>7} {'total':>6}   10% .. 90%   per request")
    for context in args.contexts:
        scheduler = decoding(args.num_seqs, context, args.steps, args.block_size)
        times = measure(scheduler, args.steps)
        tenths = quantiles(times.total, n=10)
        total = median(times.total)
        print(
            f"{context:8d} {median(times.schedule):9.0f} {median(times.update):7.0f} {total:6.0f}"
            f"   {tenths[0]:3.0f} .. {tenths[-1]:3.0f}   {total / args.num_seqs:11.2f}"
        )


if __name__ == "__main__":
    main()
