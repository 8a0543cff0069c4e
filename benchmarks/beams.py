"""What a token of a beam search costs.

    python benchmarks/beams.py MODEL [--load-format random] [--quantization none int4] [--beams 4]
        [--prompt 512] [--output 33] [--rounds 5] [--transformers]

MODEL is a folder. Each round generates one text with a beam search, and with as many greedy
requests as there are beams, whose prompts differ; with --transformers also with its beam search in
bf16 (of random weights too). Prints milliseconds for each token after the first of the text, and
how many times as long the others take: median, least and most of the rounds.
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count

import torch

from kvik import LLM, SamplingParams
from kvik_bench.scripts import decoding_seconds, greedy, random_prompts, spread

Measure = Callable[[], float]  # seconds for each token after the first


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--quantization", nargs="+", default=["none"])
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=33)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--transformers", action="store_true")
    args = parser.parse_args()
    with ExitStack() as stack:
        ways: dict[str, Measure] = {}
        for quantization in args.quantization:
            ways |= kvik_ways(args, quantization, stack)
        if args.transformers:
            ways["transformers, beams"] = theirs(args)
        report(measure(ways, args.rounds))


def kvik_ways(args: Namespace, quantization: str, stack: ExitStack) -> dict[str, Measure]:
    llm = stack.enter_context(
        LLM(
            args.model,
            quantization=quantization,
            load_format=args.load_format,
            threads=args.threads,
            max_model_len=args.prompt + args.output,
            max_num_seqs=args.beams,
            memory_utilization=0.2,
        )
    )
    serial = count()

    def seconds(prompts: int, params: SamplingParams) -> float:
        outputs = llm.generate(random_prompts(prompts, args.prompt, next(serial)), params)
        return decoding_seconds(outputs) / (args.output - 1)

    beams = greedy(args.output).with_changes(num_beams=args.beams)
    return {
        f"{quantization}, beams": lambda: seconds(1, beams),
        f"{quantization}, greedy batch": lambda: seconds(args.beams, greedy(args.output)),
    }


def theirs(args: Namespace) -> Measure:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    if args.load_format == "random":
        config = AutoConfig.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    serial = count()

    def seconds(tokens: int) -> float:
        (prompt,) = random_prompts(1, args.prompt, next(serial))
        started = time.perf_counter()
        model.generate(
            torch.tensor([prompt]),
            num_beams=args.beams,
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        return time.perf_counter() - started

    return lambda: (seconds(args.output) - seconds(1)) / (args.output - 1)


def measure(ways: dict[str, Measure], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each way, one for each round, after one that warms up."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, rounds):
        for name, seconds in ways.items():
            measured = seconds()
            if number >= 0:
                found[name].append(measured)
    return found


def report(found: dict[str, list[float]]) -> None:
    first = next(iter(found.values()))
    for name, seconds in found.items():
        ratios = [other / own for other, own in zip(seconds, first, strict=True)]
        milliseconds = [1000 * value for value in seconds]
        print(f"{name:24}{spread(milliseconds, '.1f')} ms; {spread(ratios, '.2f')} times as long")


if __name__ == "__main__":
    main()
