"""Compare a model divided among processes with one process of as many threads.

    python benchmarks/cpu/group.py MODEL [--size 2] [--quantization none int8 int4] [--rounds 5]
        [--load-format random] [--only exchange start rates] [--json FILE]

The exchange alone: microseconds per exchange, of 1,000 in a row between two running threads,
compared with as many gloo all-gathers of 64 numbers between two processes.

Starts: engines start alternately in fresh processes, from the model files and from an engine folder
built from them: seconds from the start of the process until the engine is ready; GiB of all its
processes after some tokens (the sum of their PSS); GB that each process has read from files (an
engine folder is mapped, not read); and the share of a core that the processes other than the first
use while idle.

Rates: both engines stay loaded and alternate: a prompt of 512 tokens, then decoding of one and of
eight requests. Ratios, several processes over one, are taken within a round: median, lowest and
highest; also the CPU time of the least busy process, of one thread each, over the time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from kvik import LLM, EngineConfig
from kvik.build import build_engine
from kvik_bench.machine.calibrate import exchange_seconds
from kvik_bench.scripts import (
    children,
    cpu_seconds,
    decoding_seconds,
    fresh_processes,
    greedy,
    kibibytes,
    random_prompts,
    spread,
)

PARTS = ("exchange", "start", "rates")
PROMPT, OUTPUT, CONTEXT = 512, 48, 128
WORK = {"prompt": (1, PROMPT, 1), "batch 1": (1, CONTEXT, OUTPUT), "batch 8": (8, CONTEXT, OUTPUT)}


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--quantization", nargs="*", default=["none", "int8", "int4"])
    parser.add_argument("--load-format", default="safetensors")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", help=SUPPRESS)  # options, in a separate process
    args = parser.parse_args()
    if args.engine:
        serve(args.model, json.loads(args.engine))
        return
    found: dict[str, dict[str, list[float]]] = {}
    if "exchange" in args.only:
        exchange = exchange_seconds(2, REPEATS) * 1e6
        print(f"an exchange {exchange:.2f} us, by gloo {both_of_gloo():.1f} us", flush=True)
    for quantization in args.quantization:
        if "start" in args.only:
            for name, some in starts(args, quantization).items():
                found[f"{quantization}, {name}"] = some
                print(f"{quantization:6} {name}:", line(some), flush=True)
        if "rates" in args.only:
            several = {"tensor_parallel_size": args.size}
            ratios = compare(args, quantization, args.size, several, WORK, max_num_seqs=8)
            found[quantization] = ratios
            print(f"{quantization:6}", line(ratios), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def line(values: dict[str, list[float]]) -> str:
    """Return the medians, with the smallest and largest values."""
    return ", ".join(f"{name} {spread(some)}" for name, some in values.items())


# Starts.

SETTLING, IDLE = 1.0, 5.0  # seconds


@dataclass
class Start:
    """What starting one engine took."""

    ready: float
    memory: float
    read: list[float]
    idle: float


def starts(args: Namespace, quantization: str) -> dict[str, dict[str, list[float]]]:
    """Return each figure of each round, by the source of the weights and the number of
    processes."""
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        common = {"threads": args.size, "max_model_len": 1024, "num_blocks": 256}
        options = {"quantization": quantization, "load_format": args.load_format}
        sources = {args.load_format: (args.model, common | options)}
        if args.load_format == "safetensors":
            config = EngineConfig(args.model, **common, **options)
            build_engine(config, Path(folder) / "engine", lambda done, total: None)
            sources["engine folder"] = (f"{folder}/engine", common)
        for number in range(args.rounds):
            for source, (model, own) in sources.items():
                for ranks in (1, args.size) if number % 2 else (args.size, 1):
                    start = one_start(model, {**own, "tensor_parallel_size": ranks})
                    rows = found.setdefault(f"{source}, {ranks} processes", {})
                    rows.setdefault("ready s", []).append(start.ready)
                    rows.setdefault("GiB", []).append(start.memory)
                    for rank, read in enumerate(start.read):
                        rows.setdefault(f"rank {rank} reads GB", []).append(read)
                    if ranks > 1:
                        rows.setdefault("idle % of a core", []).append(start.idle)
    return found


def one_start(model: str, options: dict[str, object]) -> Start:
    command = [sys.executable, __file__, model, "--engine", json.dumps(options)]
    begun = time.perf_counter()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        child.stdout.readline()
        ready = time.perf_counter() - begun
        child.stdout.readline()  # it has written some tokens
        time.sleep(SETTLING)
        ranks = [child.pid, *children(child.pid)]
        memory = sum(kibibytes(pid, "Pss", "smaps_rollup") for pid in ranks)
        read = [read_bytes(pid) / 1e9 for pid in ranks]
        before = sum(map(cpu_seconds, ranks[1:]))
        time.sleep(IDLE)
        idle = (sum(map(cpu_seconds, ranks[1:])) - before) / IDLE * 100
        child.stdin.close()
    return Start(ready, memory / (1 << 20), read, idle)


def serve(model: str, options: dict[str, object]) -> None:
    """In a child process: run an engine until standard input ends."""
    with LLM(model, **options) as llm:
        print("ready", flush=True)
        llm.generate([[*range(10, 74)]], greedy(16))
        print("written", flush=True)
        sys.stdin.read()


def read_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/io").read_text().split("rchar:")[1].split()[0])


# The exchange.


GATHERS, REPEATS = 100, 20


def both_of_gloo() -> float:
    with tempfile.TemporaryDirectory() as folder:
        return fresh_processes(gloo, (0, f"{folder}/store"), (1, f"{folder}/store"))[0]


def gloo(rank: int, store: str) -> float:
    """In each process: return the median microseconds of an all-gather."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    own, every, times = torch.zeros(64), torch.zeros(128), []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        for _ in range(GATHERS):
            dist.all_gather_into_tensor(every, own)
        times.append((time.perf_counter() - begun) / GATHERS * 1e6)
    return median(times)


# Rates.


def compare(
    args: Namespace,
    quantization: str,
    threads: int,
    several: dict[str, object],
    works: dict[str, tuple[int, int, int]],
    **more: object,
) -> dict[str, list[float]]:
    """Return the ratios of each round by workload, and how busy the processes were.

    Args:
        several: options of the engine that is compared with one process.
        works: numbers of requests, of tokens per prompt and of tokens to write.
        more: options of both engines.
    """
    options = {
        "threads": threads,
        "quantization": quantization,
        "load_format": args.load_format,
        "max_model_len": 1024,
        "enable_prefix_caching": False,
        "num_blocks": 1024,
        **more,
    }
    found: dict[str, list[float]] = {}
    others = {*children(os.getpid())}
    with LLM(args.model, **options) as one, LLM(args.model, **options, **several) as divided:
        for llm in (one, divided):
            rate(llm, *works["batch 8"])  # warms up pages and buffers
        pids = [os.getpid(), *({*children(os.getpid())} - others)]
        for number in range(args.rounds):
            for name, work in works.items():
                rates = {}
                for llm in (one, divided) if number % 2 else (divided, one):
                    before, begun = [*map(cpu_seconds, pids)], time.perf_counter()
                    rates[id(llm)] = rate(llm, *work)
                    seconds, after = time.perf_counter() - begun, map(cpu_seconds, pids)
                    if llm is divided:
                        busy = min(b - a for a, b in zip(before, after, strict=True)) / seconds
                found.setdefault(name, []).append(rates[id(divided)] / rates[id(one)])
                found.setdefault(f"{name}, busy", []).append(busy)
    return found


def rate(llm: LLM, requests: int, prompt: int, output: int) -> float:
    """Return tokens a second: of the prompts, or decoded after them."""
    begun = time.perf_counter()
    outputs = llm.generate(random_prompts(requests, prompt, prompt), greedy(output))
    if output == 1:
        return requests * prompt / (time.perf_counter() - begun)
    return requests * (output - 1) / decoding_seconds(outputs)


if __name__ == "__main__":
    main()
