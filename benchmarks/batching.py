"""Generated tokens per second of the bundled model at several batch sizes, interleaved.

    python benchmarks/batching.py [--rounds 7] [--batches 1 8 32] [--tokens 64]
    python benchmarks/batching.py --profile 1    # where the time of batch 1 goes, one thread

Prints the median rate of each batch size and its ratio to the first one, taken round by round
(a shared machine drifts; ratios within a round do not), with the smallest and largest round.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from kvik import LLM, SamplingParams

PROMPT = "Once upon a time there was a little fox who lived by the river with her mother."


def rate(llm: LLM, batch: int, tokens: int) -> float:
    """Output tokens per second of one batch, prompts included in the time."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [f"{i} {PROMPT}" for i in range(batch)]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, progress=False)
    seconds = time.perf_counter() - started
    return sum(output.num_output_tokens for output in outputs) / seconds


def profile(model: str, dtype: str, batch: int, tokens: int) -> None:
    """Print torch's operations by the time they take themselves."""
    with LLM(model, dtype=dtype, threads=1, enable_prefix_caching=False) as llm:
        rate(llm, batch, 8)  # warm up
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
            rate(llm, batch, tokens)
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=15))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="", help="folder; the bundled model if left out")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each request")
    parser.add_argument("--profile", type=int, metavar="BATCH", help="profile one batch instead")
    args = parser.parse_args()
    if args.profile:
        profile(args.model, args.dtype, args.profile, args.tokens)
        return
    rates: dict[int, list[float]] = {batch: [] for batch in args.batches}
    with LLM(args.model, dtype=args.dtype, enable_prefix_caching=False) as llm:
        for batch in args.batches:
            rate(llm, batch, 8)  # warm up
        for _ in range(args.rounds):
            for batch in args.batches:
                rates[batch].append(rate(llm, batch, args.tokens))
        runner = llm.resolved.runner
    print(f"{runner.dtype}, {runner.threads} threads, {args.rounds} rounds of {args.tokens} tokens")
    first = rates[args.batches[0]]
    for batch in args.batches:
        ratios = [a / b for a, b in zip(rates[batch], first, strict=True)]
        print(
            f"batch {batch:3}: {statistics.median(rates[batch]):8.0f} tokens/s, "
            f"{statistics.median(ratios):5.2f}x batch {args.batches[0]} "
            f"({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
