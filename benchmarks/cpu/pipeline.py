"""Compare a model whose layers are divided among stages with one process of as many threads.

    python benchmarks/cpu/pipeline.py MODEL [--stages 2] [--quantization none int8 int4]
        [--rounds 3] [--load-format random] [--json FILE]

Both engines stay loaded and alternate: sixteen prompts of 512 tokens, then decoding of eight
requests. Ratios of rates, pipeline over one process, are taken within a round: median, lowest and
highest. Also printed: the share of the time in which the stages computed (their CPU time over
threads and seconds), for the least busy stage; and first the time to send the hidden states of
eight tokens and of a chunk of 512 from one process to another.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from kvik import LLM, SamplingParams
from kvik.stage_process import StageReceiver

PROMPTS, PROMPT, REQUESTS, CONTEXT, OUTPUT = 16, 512, 8, 128, 48
HIDDEN_BYTES = 2 * 2048  # bytes per token, in bfloat16
ROWS, REPEATS = (8, 512), 200


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--quantization", nargs="*", default=["none", "int8", "int4"])
    parser.add_argument("--load-format", default="safetensors")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--echo", type=int, help=SUPPRESS)  # socket of a further process
    args = parser.parse_args()
    if args.echo is not None:
        echo(args.echo)
        return
    for rows, microseconds in hops().items():
        print(f"a hop of {rows} tokens {microseconds:.0f} us")
    found = {}
    for quantization in args.quantization:
        found[quantization] = compare(args, quantization)
        cells = (
            f"{name} {median(some):.2f} ({min(some):.2f} to {max(some):.2f})"
            for name, some in found[quantization].items()
        )
        print(f"{quantization:6}", ", ".join(cells), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def hops() -> dict[int, float]:
    """Return the median microseconds of half a round trip, by number of tokens."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, "none", "--echo", str(theirs.fileno())]
    child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    line = Connection(ours.detach())
    back, found = StageReceiver(line), {}
    for rows in ROWS:
        data, times = bytes(rows * HIDDEN_BYTES), []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            line.send_bytes(data)
            back.take()
            times.append((time.perf_counter() - begun) / 2 * 1e6)
        found[rows] = median(times)
    child.kill()
    child.wait()
    return found


def echo(number: int) -> None:
    line = Connection(number)
    hop = StageReceiver(line)
    while True:
        line.send_bytes(hop.take())


def compare(args: Namespace, quantization: str) -> dict[str, list[float]]:
    """Return the ratios of each round, by workload."""
    options = {
        "threads": args.stages,
        "quantization": quantization,
        "load_format": args.load_format,
        "max_model_len": 1024,
        "max_num_seqs": PROMPTS,
        "max_num_batched_tokens": PROMPT,
        "enable_prefix_caching": False,
        "num_blocks": 1024,
    }
    work = {"prompts": (PROMPTS, PROMPT, 1), "batch 8": (REQUESTS, CONTEXT, OUTPUT)}
    found: dict[str, list[float]] = {}
    with (
        LLM(args.model, **options) as one,
        LLM(args.model, **options, pipeline_parallel_size=args.stages) as pipeline,
    ):
        for llm in (one, pipeline):
            rate(llm, *work["batch 8"])  # warms up pages and buffers
        for number in range(args.rounds):
            for name, sizes in work.items():
                rates = {}
                for llm in (one, pipeline) if number % 2 else (pipeline, one):
                    before, begun = cpu_seconds(), time.perf_counter()
                    rates[id(llm)] = rate(llm, *sizes)
                    seconds, after = time.perf_counter() - begun, cpu_seconds()
                    if llm is pipeline:
                        busy = min(after[pid] - before[pid] for pid in before) / seconds
                found.setdefault(name, []).append(rates[id(pipeline)] / rates[id(one)])
                found.setdefault(f"{name}, busy", []).append(busy)
    return found


def cpu_seconds() -> dict[int, float]:
    """Return the CPU seconds of this process and its children, each with one computing thread."""
    tick, found = os.sysconf("SC_CLK_TCK"), {}
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    for pid in (os.getpid(), *map(int, children)):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[pid] = (int(fields[11]) + int(fields[12])) / tick
    return found


def rate(llm: LLM, requests: int, prompt: int, output: int) -> float:
    """Return tokens a second: of the prompts, or decoded after them."""
    rng = random.Random(prompt)
    ids = [[rng.randrange(10, 1000) for _ in range(prompt)] for _ in range(requests)]
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    begun = time.perf_counter()
    outputs = llm.generate(ids, params)
    if output == 1:
        return requests * prompt / (time.perf_counter() - begun)
    first = max(one.metrics.first_token for one in outputs)
    last = max(one.metrics.finished for one in outputs)
    return requests * (output - 1) / (last - first)


if __name__ == "__main__":
    main()
