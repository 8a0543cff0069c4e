"""A model divided among processes, beside one process with as many threads.

    python benchmarks/cpu/group.py MODEL [--size 2] [--quantization none int8 int4] [--rounds 5]
        [--load-format random] [--json FILE]

Both engines are loaded and take turns: a prompt of 512 tokens, then decoding of one and of eight
requests. Ratios of rates, several processes over one, are taken within a round: median, least and
most. First the exchange alone: microseconds of each of 1,000 in a row between two running threads,
beside as many all-gathers of 64 numbers between two processes by gloo.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from kvik import LLM, SamplingParams
from kvik_bench.machine.processes import exchange_seconds

PROMPT, OUTPUT, CONTEXT = 512, 48, 128
WORK = {"prompt": (1, PROMPT, 1), "batch 1": (1, CONTEXT, OUTPUT), "batch 8": (8, CONTEXT, OUTPUT)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--quantization", nargs="*", default=["none", "int8", "int4"])
    parser.add_argument("--load-format", default="safetensors")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gloo", help=argparse.SUPPRESS)  # rank and file, in a process of its own
    args = parser.parse_args()
    if args.gloo:
        gloo(*args.gloo.split(":", 1))
        return
    exchange = exchange_seconds(2, REPEATS) * 1e6
    print(f"an exchange {exchange:.2f} us, by gloo {both_of_gloo():.1f} us")
    found = {}
    for quantization in args.quantization:
        ratios = compare(args, quantization)
        found[quantization] = ratios
        cells = (
            f"{name} {median(some):.2f} ({min(some):.2f} to {max(some):.2f})"
            for name, some in ratios.items()
        )
        print(f"{quantization:6}", ", ".join(cells), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


GATHERS, REPEATS = 100, 20


def both_of_gloo() -> float:
    with tempfile.TemporaryDirectory() as folder:
        commands = [
            [sys.executable, __file__, "none", "--gloo", f"{rank}:{folder}/store"] for rank in "01"
        ]
        children = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True) for one in commands]
        return float(children[0].communicate()[0] or children[1].communicate()[0])


def gloo(rank: str, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=int(rank), world_size=2)
    own, every, times = torch.zeros(64), torch.zeros(128), []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        for _ in range(GATHERS):
            dist.all_gather_into_tensor(every, own)
        times.append((time.perf_counter() - begun) / GATHERS * 1e6)
    if rank == "0":
        print(median(times))


def compare(args: argparse.Namespace, quantization: str) -> dict[str, list[float]]:
    """The ratios of each round, by workload."""
    options = {
        "threads": args.size,
        "quantization": quantization,
        "load_format": args.load_format,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "num_blocks": 1024,
    }
    ratios: dict[str, list[float]] = {name: [] for name in WORK}
    with (
        LLM(args.model, **options) as one,
        LLM(args.model, **options, tensor_parallel_size=args.size) as several,
    ):
        for llm in (one, several):
            rate(llm, *WORK["batch 8"])  # pages and buffers are there
        for number in range(args.rounds):
            for name, work in WORK.items():
                pair = (one, several) if number % 2 else (several, one)
                rates = {id(llm): rate(llm, *work) for llm in pair}
                ratios[name].append(rates[id(several)] / rates[id(one)])
    return ratios


def rate(llm: LLM, requests: int, prompt: int, output: int) -> float:
    """Tokens a second: of the prompt, or decoded behind it."""
    rng = random.Random(prompt)
    ids = [[rng.randrange(10, 1000) for _ in range(prompt)] for _ in range(requests)]

    def seconds(tokens: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        begun = time.perf_counter()
        llm.generate(ids, params)
        return time.perf_counter() - begun

    first = seconds(1)
    if output == 1:
        return requests * prompt / first
    return requests * (output - 1) / (seconds(output) - first)


if __name__ == "__main__":
    main()
