"""What other busy processes cost, compared with a fixed number of threads.

    python benchmarks/cpu/contention.py [MODEL] [--quantization int8] [--busy 0 1 2] [--rounds 7]

Other processes compute all the time. In each round the engines run one after another: one that
sizes its thread team itself, and one for each fixed number of threads up to the number of cores.
Prints tokens a second: median, smallest and largest. With `--gguf FILE --llama-python PYTHON`,
llama.cpp (that Python's llama_cpp) decodes the file in the same rounds, with one thread per core.

    python benchmarks/cpu/contention.py [MODEL] --quotas 0.5 1 1.5 [--rounds 7]

Instead runs processes in cgroups with quotas of this many cores' worth of time, which needs
permission to create cgroups. Prints their speed over the quota's share of the speed without one,
and the longest time between two tokens of a stream over the median.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median

from kvik import LLM
from kvik_bench.scripts import fresh_processes, greedy, seconds_of, spread

PROMPT = 512
WORKLOADS = {"batch 1": 1, "batch 8": 8, "prompt 512": 0}  # requests that decode; 0: a prompt

_LLAMA = """
import os, sys, time
from llama_cpp import Llama
cores = len(os.sched_getaffinity(0))  # as llama.cpp's own programs choose
llm = Llama(sys.argv[1], n_ctx=1024, n_threads=cores, verbose=False)
for line in sys.stdin:
    llm.reset()
    llm.eval(list(range(5, 13)))
    start = time.perf_counter()
    for _ in range(int(line)):
        llm.eval([9])
    print(int(line) / (time.perf_counter() - start), flush=True)
"""


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        time.sleep(0.5 if others else 0)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


class Kvik:
    def __init__(self, llm: LLM, tokens: int) -> None:
        self._llm = llm
        self._tokens = tokens

    def rate(self, workload: str) -> float:
        """Return tokens a second, of the prompt or of the answers."""
        batch, ids = WORKLOADS[workload], [5 + i % 300 for i in range(PROMPT)]
        prompts = [ids[i : i + 8] for i in range(batch)] if batch else [ids]
        tokens = self._tokens if batch else 1
        return (batch * tokens or PROMPT) / seconds_of(self._llm, prompts, tokens)


class Llama:
    def __init__(self, python: str, gguf: Path, tokens: int) -> None:
        command = [python, "-c", _LLAMA, str(gguf)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._tokens = tokens

    def rate(self, workload: str) -> float:
        assert workload == "batch 1" and self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{self._tokens}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--quantization")
    parser.add_argument("--load-format", default="safetensors", help="random: only config.json")
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2], help="other processes")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--tokens", type=int, help="of each answer; 200, or 32 for a given model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quotas", type=float, nargs="+", help="cores' worth of time")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    tokens = arguments.tokens or (32 if arguments.model else 200)
    if arguments.quotas:
        within_quotas(arguments, tokens)
        return
    cores = len(os.sched_getaffinity(0))
    rows = []
    with ExitStack() as stack:
        engines: dict[str, Kvik | Llama] = {}
        for threads in (None, *range(1, cores + 1)):
            llm = LLM(
                arguments.model,
                device="cpu",
                threads=threads,
                quantization=arguments.quantization,
                load_format=arguments.load_format,
                max_model_len=1024,
                max_num_seqs=8,
                enable_prefix_caching=False,
            )
            name = f"{threads} thread{'s' * (threads > 1)}" if threads else "default"
            engines[name] = Kvik(stack.enter_context(llm), tokens)
        if arguments.gguf:
            llama = Llama(arguments.llama_python, arguments.gguf, tokens)
            stack.callback(llama.close)
            engines["llama.cpp"] = llama
        for count in arguments.busy:
            for workload in arguments.workloads:
                chosen = {
                    name: engine
                    for name, engine in engines.items()
                    if isinstance(engine, Kvik) or workload == "batch 1"
                }
                rates: dict[str, list[float]] = {name: [] for name in chosen}
                with busy_processes(count):
                    for turn in range(arguments.rounds + 1):
                        for name, engine in chosen.items():
                            rate = engine.rate(workload)
                            if turn:  # the first turn warms up
                                rates[name].append(rate)
                rows.append({"busy": count, "workload": workload, "rates": rates})
                report(count, workload, rates)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


def measure(
    group: Path | None, model: str, quantization: str | None, tokens: int
) -> dict[str, float]:
    """Return tokens a second of each workload, and the longest gap of a stream over the median.

    Args:
        group: the CPU cgroup for this process; None: its own.
    """
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    with LLM(
        model,
        device="cpu",
        quantization=quantization,
        max_model_len=1024,
        max_num_seqs=8,
        enable_prefix_caching=False,
    ) as llm:
        engine = Kvik(llm, tokens)
        found = {}
        for workload in WORKLOADS:
            engine.rate(workload)
            found[workload] = median(engine.rate(workload) for _ in range(3))
        times = []
        for _ in llm.stream([5, 6, 7], greedy(2 * tokens)):
            times.append(time.perf_counter())
        gaps = sorted(after - before for before, after in pairwise(times[8:]))
        return found | {"longest gap": gaps[-1] / median(gaps)}


@contextmanager
def quota_group(cores: float) -> Iterator[Path]:
    """Make a CPU cgroup; yields its folder."""
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    folder = (first if first.is_dir() else second) / f"kvik-contention-{os.getpid()}"
    folder.mkdir()
    try:
        if first.is_dir():
            (folder / "cpu.cfs_quota_us").write_text(str(int(cores * 100_000)))
        else:
            (folder / "cpu.max").write_text(f"{int(cores * 100_000)} 100000")
        yield folder
    finally:
        folder.rmdir()


def within_quotas(arguments: Namespace, tokens: int) -> None:
    options = arguments.model, arguments.quantization, tokens
    cores = len(os.sched_getaffinity(0))
    rounds: list[dict[float, dict[str, float]]] = []
    for _ in range(arguments.rounds):
        found = {}
        for quota in (float(cores), *arguments.quotas):
            with quota_group(quota) if quota < cores else nullcontext() as group:
                (found[quota],) = fresh_processes(measure, (group, *options))
        rounds.append(found)
    for quota in (float(cores), *arguments.quotas):
        cells = []
        for name in (*WORKLOADS, "longest gap"):
            values = [found[quota][name] for found in rounds]
            if name in WORKLOADS:
                full = [found[float(cores)][name] * quota / cores for found in rounds]
                values = [value / whole for value, whole in zip(values, full, strict=True)]
            cells.append(f"{name} {spread(values)}")
        print(f"{quota:g} cores: {'; '.join(cells)}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rounds, indent=1))


def report(count: int, workload: str, rates: dict[str, list[float]]) -> None:
    cells = [f"{name} {spread(found, ',.1f')}" for name, found in rates.items()]
    best = max(median(found) for name, found in rates.items() if "thread" in name)
    share = median(rates["default"]) / best
    print(f"{count} busy, {workload}: {'; '.join(cells)}; default / best {share:.2f}", flush=True)


if __name__ == "__main__":
    main()
