"""Seconds from starting the process to the first token of the bundled model, file cache warm.

    python benchmarks/startup.py [--runs 7]

Each run is a fresh `kvik generate`; also times `kvik --help`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

KVIK = [sys.executable, "-m", "kvik"]
FIRST_TOKEN = [*KVIK, "generate", "--max-tokens", "1", "--temperature", "0", "Once upon a time"]


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    for name, command in (("first token", FIRST_TOKEN), ("kvik --help", [*KVIK, "--help"])):
        seconds(command)  # warm up
        times = sorted(seconds(command) for _ in range(args.runs))
        print(f"{name}: {statistics.median(times):.3f} s ({times[0]:.3f} to {times[-1]:.3f})")


if __name__ == "__main__":
    main()
