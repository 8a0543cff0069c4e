"""kvik beside other engines on this CPU, interleaved: tokens per second, start, memory.

    python benchmarks/cpu/peers.py engines.toml --models qwen2.5-0.5b [--rounds 5]
        [--engines kvik-int8 llamacpp-Q8_0] [--workloads prefill b1] [--json out.json]

In each round every engine runs every workload in a fresh process, one process at a time, and the
order of the engines moves on by one: a machine that drifts treats all alike, and ratios are taken
within rounds. Cells show the median of the rounds and half their spread. What the times mean is
said in peers/adapter.py; how to install the peers and make their models, in peers/README.md.

engines.toml says what to run, with paths of the user's machine:

    threads = 2

    [engines.kvik-int8]
    adapter = "kvik"                    # peers/run_kvik.py
    python = "/envs/kvik/bin/python"
    model = "/models/{model}"           # {model} is what --models names
    format = "int8"                     # what weights are read as; ratios are within a format
    options = { quantization = "int8" } # for the adapter, which says what it takes
    env = { NAME = "value" }            # for the process; optional, as options are
    together = false                    # true: one process a round for all workloads, not one
                                        # each; for an engine that takes a minute to start
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import tempfile
import threading
import time
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ADAPTERS = Path(__file__).parent / "peers"
WORKLOADS = {  # name -> what peers/adapter.py calls a workload
    "prefill": {"prompt": 512, "batch": 1, "output": 1, "repeats": 5},
    "b1": {"prompt": 128, "batch": 1, "output": 64, "repeats": 3},
    "b8": {"prompt": 128, "batch": 8, "output": 64, "repeats": 1},
    "b32": {"prompt": 128, "batch": 32, "output": 64, "repeats": 1},
}
READY, RSS = "ready s", "peak MiB"  # columns where less is better
OWN = "kvik"  # the adapter that the others are compared with
Cells = dict[str, dict[str, list[float | None]]]  # engine -> column -> one value a round


@dataclass(frozen=True)
class EngineEntry:
    """One entry of the user's file; see the module's docstring."""

    adapter: str
    python: str
    model: str
    format: str
    options: dict = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    together: bool = False


def run(
    engine: EngineEntry, model: str, workloads: list[str], threads: int, timeout: float
) -> dict[str, float]:
    """One process: {column: value}. Raises RuntimeError with the end of its errors."""
    job = {
        "model": engine.model.format(model=model),
        "threads": threads,
        "options": engine.options,
        "workloads": [{"name": name, **WORKLOADS[name]} for name in workloads],
        "started": time.time(),
    }
    script = str(ADAPTERS / f"run_{engine.adapter}.py")
    # Some engines listen to this alone, so all are given it.
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), **engine.env}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [engine.python, script, json.dumps(job)],
            stdout=out,
            stderr=err,
            env=env,
            start_new_session=True,
        )
        limit = threading.Timer(timeout, os.killpg, (process.pid, signal.SIGKILL))
        limit.start()
        try:
            # Unlike Popen.wait, this tells the peak memory of the largest process below.
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            limit.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        printed = out.read()
        if process.returncode != 0:
            end = (err.read().strip() or printed.strip()).splitlines()[-3:]
            raise RuntimeError(" | ".join(end) or f"ended with {process.returncode}")
    answers = [line for line in printed.splitlines() if line.startswith('{"ready"')]
    if not answers:
        raise RuntimeError("ended without an answer")
    answer = json.loads(answers[-1])
    unit = 1 if platform.system() == "Darwin" else 1024  # of ru_maxrss, in bytes
    return {**answer["rates"], READY: answer["ready"], RSS: usage.ru_maxrss * unit / 2**20}


def run_round(
    engines: dict[str, EngineEntry],
    order: list[str],
    model: str,
    workloads: list[str],
    threads: int,
    timeout: float,
) -> dict[str, dict[str, float]]:
    """Every workload on every engine: engine -> column -> value. Failures are printed."""
    rates: dict[str, dict[str, float]] = defaultdict(dict)
    sides: dict[tuple[str, str], list[float]] = defaultdict(list)
    for workload in workloads:
        for name in order:
            turn = [workload]
            if engines[name].together:
                turn = workloads if workload == workloads[0] else []
            if not turn:
                continue
            try:
                found = run(engines[name], model, turn, threads, timeout)
            except RuntimeError as error:
                print(f"  {', '.join(turn):8} {name:20} failed: {error}", flush=True)
                continue
            texts = ", ".join(f"{done} {found[done]:.1f} tokens/s" for done in turn)
            print(
                f"  {name:20} {texts}, ready {found[READY]:.1f} s, {found[RSS]:.0f} MiB",
                flush=True,
            )
            for done in turn:
                rates[name][done] = found[done]
            for side in (READY, RSS):
                sides[name, side].append(found[side])
    for name, values in rates.items():
        values[READY] = median(sides[name, READY])
        values[RSS] = max(sides[name, RSS])
    return rates


def present(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def cell(values: Sequence[float | None], digits: int) -> str:
    """Median, and half the spread in percent of it."""
    found = present(values)
    if not found:
        return "-"
    middle = median(found)
    spread = 50 * (max(found) - min(found)) / middle
    return f"{middle:.{digits}f} ±{spread:.0f}%"


def best(cells: Cells, peers: list[str], column: str) -> str | None:
    """The peer with the best median."""
    found = {name: median(v) for name in peers if (v := present(cells[name][column]))}
    if not found:
        return None
    choose = min if column in (READY, RSS) else max
    return choose(found, key=lambda name: found[name])


def ratio(cells: Cells, own: str, peers: list[str], column: str) -> str:
    """kvik / best peer, the median over rounds, and that peer."""
    peer = best(cells, peers, column)
    if peer is None:
        return "-"
    pairs = zip(cells[own][column], cells[peer][column], strict=True)
    ratios = [a / b for a, b in pairs if a is not None and b is not None]
    return f"{median(ratios):.2f}x {peer}" if ratios else "-"


def line(head: str, cells: list[str], width: int) -> str:
    return f"{head:28}" + "".join(f"{text:>{width}}" for text in cells)


def report(engines: dict[str, EngineEntry], model: str, columns: list[str], cells: Cells) -> None:
    print(f"\n{model}: tokens/s (median ±half spread); less is better for the last two columns")
    print(line("engine", columns, 16))
    for name in sorted(engines, key=lambda name: engines[name].format):
        texts = [cell(cells[name][column], 2 if column == READY else 1) for column in columns]
        print(line(name, texts, 16))
    print("\nkvik / best peer, round by round")
    print(line("", columns, 24))
    peers = [name for name, engine in engines.items() if engine.adapter != OWN]
    for name, engine in engines.items():
        if engine.adapter != OWN:
            continue
        alike = [peer for peer in peers if engines[peer].format == engine.format]
        for kind, rivals in ((f"/ {engine.format}", alike), ("/ any", peers)):
            texts = [ratio(cells, name, rivals, column) for column in columns]
            print(line(f"{name} {kind}", texts, 24))
    print(flush=True)


def processor() -> str:
    """The CPU's name, as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [text.split(":", 1)[1].strip() for text in lines if text.startswith("model name")]
    return names[0] if names else platform.processor()


def compare(
    engines: dict[str, EngineEntry],
    models: list[str],
    workloads: list[str],
    threads: int,
    rounds: int,
    timeout: float,
    out: Path | None,
) -> None:
    columns = [*workloads, READY, RSS]
    everything: dict[str, Cells] = {
        model: {name: {column: [] for column in columns} for name in engines} for model in models
    }
    result = {
        "machine": {"cpu": processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "started": time.strftime("%Y-%m-%d %H:%M"),
        "threads": threads,
        "workloads": {name: WORKLOADS[name] for name in workloads},
        "formats": {name: engine.format for name, engine in engines.items()},
        "models": everything,
    }
    names = list(engines)
    for model in models:
        for number in range(rounds):
            first = number % len(names)
            order = names[first:] + names[:first]
            print(f"{model}, round {number + 1} of {rounds}", flush=True)
            found = run_round(engines, order, model, workloads, threads, timeout)
            for name in names:
                for column in columns:
                    value = found.get(name, {}).get(column)  # none where the engine failed
                    everything[model][name][column].append(value)
            if out is not None:  # an interrupted comparison keeps its full rounds
                out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        report(engines, model, columns, everything[model])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="engines.toml")
    parser.add_argument("--models", nargs="+", required=True)
    parser.add_argument("--engines", nargs="+", help="names in the file; all if left out")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one process")
    parser.add_argument("--json", type=Path, help="write all values here")
    args = parser.parse_args()
    given = tomllib.loads(args.file.read_text("utf-8"))
    entries = {name: EngineEntry(**entry) for name, entry in given["engines"].items()}
    unknown = set(args.engines or ()) - set(entries)
    if unknown:
        parser.error(f"no such engines in {args.file}: {', '.join(sorted(unknown))}")
    engines = {name: entries[name] for name in args.engines or entries}
    compare(
        engines,
        args.models,
        args.workloads,
        given["threads"],
        args.rounds,
        args.timeout,
        args.json,
    )


if __name__ == "__main__":
    main()
