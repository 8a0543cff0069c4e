"""What sampling a token costs: torch compared with the native kernels.

    python benchmarks/cpu/sampling.py [--vocab 151936] [--threads 2]

Microseconds per row, the minimum of many runs. Logits are normal with a standard deviation of 3,
which spreads a row over thousands of tokens: more than most models do, so a hard case for top_p
alone. Then the penalties of rows that have seen 700 tokens. The last lines are a whole
`Sampler.sample` of greedy rows, and the part of it that is not the search for the largest logit.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable

import numpy as np
import torch

from kvik.core.sampling_params import SamplingParams
from kvik.kernels.cpu.native import Native
from kvik.kernels.cpu.ops import native_ops
from kvik.kernels.torch_ops import TORCH
from kvik.worker.sampler import Sampler
from kvik.worker.sampling_table import SamplingTable

RULES = {
    "temperature": SamplingParams(temperature=0.7),
    "top_k 20, top_p 0.8": SamplingParams(temperature=0.7, top_k=20, top_p=0.8),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "top_k 5000": SamplingParams(top_k=5000),
}
BATCHES = (1, 8, 32)


def least_seconds(function: Callable[..., object], *args: object) -> float:
    """Return the minimum of at least five calls, and of as many as a second allows."""
    times: list[float] = []
    while len(times) < 5 or (sum(times) < 1.0 and len(times) < 2000):
        started = time.perf_counter()
        function(*args)
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    native = native_ops(Native(args.threads))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(max(BATCHES), args.vocab, generator=generator) * 3

    def plan(params: SamplingParams, rows: int, seen: int = 0):
        table = SamplingTable(rows, args.vocab, torch.device("cpu"))
        for slot in range(rows):
            prompt = torch.randint(args.vocab, (seen,), generator=generator).tolist()
            table.set(slot, params, slot, prompt, [], frozenset())
        return table.batch(np.arange(rows), np.zeros(rows, np.int64))

    print(f"{'':24}{'rows':>6}{'torch':>10}{'native':>10}  us a row, {args.threads} threads")
    with torch.inference_mode():
        for name, params in RULES.items():
            for rows in BATCHES:
                random = plan(params, rows).random
                times = [
                    least_seconds(ops.draw, logits[:rows], random.draws) for ops in (TORCH, native)
                ]
                columns = "".join(f"{t / rows * 1e6:10.1f}" for t in times)
                print(f"{name:24}{rows:6}{columns}")
        for rows in BATCHES:
            copy = logits[:rows].clone()  # hardly changes, however often it is penalised
            penalties = plan(SamplingParams(repetition_penalty=1.0001), rows, seen=700).penalties
            times = [least_seconds(ops.penalize, copy, penalties) for ops in (TORCH, native)]
            columns = "".join(f"{t / rows * 1e6:10.1f}" for t in times)
            print(f"{'penalties':24}{rows:6}{columns}")
        for rows in BATCHES:
            greedy, some = plan(SamplingParams(temperature=0), rows), logits[:rows]
            whole = [least_seconds(Sampler(ops).sample, some, greedy) for ops in (TORCH, native)]
            largest = [least_seconds(ops.largest, some) for ops in (TORCH, native)]
            for name, values in (
                ("greedy, a whole step", whole),
                ("  without `largest`", [a - b for a, b in zip(whole, largest, strict=True)]),
            ):
                print(f"{name:24}{rows:6}" + "".join(f"{t * 1e6:10.1f}" for t in values))


if __name__ == "__main__":
    main()
