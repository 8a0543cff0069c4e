"""`kvik bench startup [MODEL]`: times the way from the start of a process to its first token, by
part; each time in a fresh process."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from kvik.child_process import python_command
from kvik.cli.flags import engine_options
from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.errors import KvikError
from kvik.launch import resolve_config
from kvik.planner.efficiency import POSSIBLE, running_device
from kvik_bench.cli.output import add_number, engine_parser, reported
from kvik_bench.inprocess.ceilings import ceiling_notes
from kvik_bench.inprocess.jobs import Requests, fixed
from kvik_bench.inprocess.rounds import Rounds
from kvik_bench.load.workload import TokenFiller
from kvik_bench.report.result import Chart, Figure, Result, Row, engine_facts
from kvik_bench.report.table import show_figure

PARTS: Mapping[str, str] = {
    "Python": "from the start of the process to the first line of kvik",
    "import": "kvik, without torch",
    "resolve": "the machine and the model's config.json are read, and everything is decided",
    "torch": "torch is imported; files and the tokenizer are read and memory is taken meanwhile",
    "load": "the rest until a request can be added: modules that need torch, weights, KV cache",
    "first token": "of one request",
}
TOTAL = "from the start of the process to the first token"
PEAK = "peak resident memory of the process"
HELP = "a separate process from its start to its end"
LOAD_RATE = "bytes of the weights as they are in memory / time of `load`"
CHARTS = (Chart("bars", "From start to first token", "seconds"),)

FIRST_TOKEN, SHORT = "first token", "kvik --help"


@dataclass(frozen=True, slots=True)
class TimedStart:
    """One start."""

    parts: tuple[float, ...]  # seconds of each of `PARTS`, in their order; or one number
    peak_bytes: int  # 0: not read

    @property
    def seconds(self) -> float:
        return sum(self.parts)


def measure_startup(
    options: Mapping[str, object],
    resolved: ResolvedConfig,
    prompt_tokens: int,
    rounds: Rounds,
    seed: int,
) -> Result:
    """Measure starts in fresh processes.

    Args:
        options: of EngineConfig, for each process.
        resolved: the config that they resolve to.

    Raises:
        KvikError: a process failed.
    """
    prompt = TokenFiller(resolved.model.vocab_size).fill(prompt_tokens, str(seed))

    def measure(_: int, subject: str) -> TimedStart:
        return _timed_help() if subject == SHORT else start_once(options, prompt)

    starts, helps = rounds.runs((FIRST_TOKEN, SHORT), measure).values()
    remarks, rate = _loading(resolved, starts)
    parts = tuple(
        Figure(name, "s", tuple(start.parts[i] for start in starts), "less", definition)
        for i, (name, definition) in enumerate(PARTS.items())
    )
    longest = max(parts, key=lambda figure: figure.median)
    total = Figure("seconds", "s", tuple(start.seconds for start in starts), "less", TOTAL)
    shorts = tuple(start.seconds for start in helps)
    peak = tuple(start.peak_bytes / (1 << 20) for start in starts)
    rows = (
        Row(FIRST_TOKEN, (total, *parts, rate, Figure("peak memory", "MiB", peak, "less", PEAK))),
        Row(SHORT, (Figure("seconds", "s", shorts, "less", HELP),)),
    )
    share = longest.median / total.median
    return Result(
        "startup",
        {**engine_facts(resolved), "prompt tokens": str(prompt_tokens)},
        rows,
        (f"Most of the time, {share:.0%}, goes to: {longest.name}.", *rounds.remarks, *remarks),
        CHARTS,
    )


def start_once(options: Mapping[str, object], prompt: list[int]) -> TimedStart:
    """Start a process and time it; if it fails, raises KvikError with the last line it wrote."""
    order = {"options": options, "prompt": prompt, "started": time.monotonic()}
    done = subprocess.run(
        python_command("kvik_bench.inprocess.startup_process"),
        input=json.dumps(order),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise KvikError("startup", f"the process failed: {words[-1]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    times: list[float] = answer["marks"]
    return TimedStart(
        tuple(later - earlier for earlier, later in pairwise(times)), answer["peak_bytes"]
    )


def _timed_help() -> TimedStart:
    started = time.monotonic()
    subprocess.run(python_command("kvik", "--help"), check=True, stdout=subprocess.DEVNULL)
    return TimedStart((time.monotonic() - started,), 0)


def _loading(resolved: ResolvedConfig, starts: list[TimedStart]) -> tuple[list[str], Figure]:
    """Return remarks on the rate of loading weights relative to memory's, and its figure."""
    index = list(PARTS).index("load")
    rates = tuple(resolved.memory.weights / start.parts[index] / 1e9 for start in starts)
    figure = Figure("weights loaded", "GB/s", rates, "more", LOAD_RATE)
    device = running_device(resolved)
    notes = [*ceiling_notes(device)]
    if device.bandwidth is None:
        return notes, figure
    ceiling = device.bandwidth / 1e9
    figure = replace(figure, most=POSSIBLE * ceiling)
    share = figure.median / ceiling
    return [
        *notes,
        f"Weights were loaded at {show_figure(figure)} GB/s, {share:.2%} of what memory can be "
        f"read with ({ceiling:.1f} GB/s).",
    ], figure


def build_parser() -> argparse.ArgumentParser:
    parser = engine_parser(
        "bench startup",
        "Start fresh processes, and time each part of the way to the first token. Files are in the "
        "page cache after the warm-up.",
        repeats=5,
    )
    add_number(parser, "--prompt-tokens", 16, "tokens of the prompt")
    return parser


@reported
def run(arguments: argparse.Namespace) -> Result:
    rounds = Rounds(arguments.repeats, arguments.warmup)
    options = engine_options(arguments, arguments.model)
    resolved = resolve_config(EngineConfig(**options))
    Requests(1, fixed(arguments.prompt_tokens, 1)).check(resolved)
    return measure_startup(options, resolved, arguments.prompt_tokens, rounds, arguments.seed)
