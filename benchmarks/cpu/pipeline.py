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
import socket
import subprocess
import sys
import time
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from group import CONTEXT, OUTPUT, PROMPT, compare, line

from kvik.stage_process import StageReceiver

PROMPTS = 16
WORK = {"prompts": (PROMPTS, PROMPT, 1), "batch 8": (8, CONTEXT, OUTPUT)}
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
        several = {"pipeline_parallel_size": args.stages}
        more = {"max_num_seqs": PROMPTS, "max_num_batched_tokens": PROMPT}
        found[quantization] = compare(args, quantization, args.stages, several, WORK, **more)
        print(f"{quantization:6}", line(found[quantization]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def hops() -> dict[int, float]:
    """Return the median microseconds of half a round trip, by number of tokens."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, "none", "--echo", str(theirs.fileno())]
    child = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    there = Connection(ours.detach())
    back, found = StageReceiver(there), {}
    for rows in ROWS:
        data, times = bytes(rows * HIDDEN_BYTES), []
        for _ in range(REPEATS):
            begun = time.perf_counter()
            there.send_bytes(data)
            back.take()
            times.append((time.perf_counter() - begun) / 2 * 1e6)
        found[rows] = median(times)
    child.kill()
    child.wait()
    return found


def echo(number: int) -> None:
    back = Connection(number)
    hop = StageReceiver(back)
    while True:
        back.send_bytes(hop.take())


if __name__ == "__main__":
    main()
