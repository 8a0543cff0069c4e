"""`kvik bench compare [MODEL]`: compares kvik with other engines on this machine, with the same
prompts, threads and precision, interleaved.

In each round every engine runs every workload in a fresh process, one process at a time, and the
order of the engines rotates by one. So a drifting machine affects all engines alike, and ratios are
taken within rounds. engines/protocol.py defines the times.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from statistics import median

from kvik.cli.flags import Parser, add_model
from kvik.cli.terminal import say
from kvik.config.hardware import detect
from kvik.config.model_source import find_model
from kvik.errors import ConfigError
from kvik.interrupts import ended_like_ctrl_c
from kvik.models.model_spec import read_model_spec
from kvik.spec.model import SHORT_DTYPES
from kvik_bench.cli.output import add_number, add_output_flags, check_output, write_out
from kvik_bench.inprocess.rounds import Watch
from kvik_bench.peers.adapter_process import Outcome, run_adapter
from kvik_bench.peers.engine_entries import (
    OWN,
    EngineEntry,
    Engines,
    engines_of_file,
    installed_engines,
)
from kvik_bench.peers.engines.protocol import Answer, Job, Workload
from kvik_bench.report.result import Chart, Figure, Result, Row, run_facts
from kvik_bench.report.table import show_figure

TOP_ID = 1000  # prompts are random ids below this, which are the more frequent tokens
MAX_BATCH = 4096

Run = Callable[[EngineEntry, Job, float], Outcome]


@dataclass(frozen=True, slots=True)
class EngineComparison:
    """The model, engines and workloads of a comparison."""

    name: str
    folder: Path
    engines: Engines
    workloads: Sequence[Workload]
    threads: int
    rounds: int = 3
    timeout: float = 600.0  # seconds for one process


@dataclass(frozen=True, slots=True)
class Found:
    """The outcomes of a comparison's runs."""

    # (engine, round) -> the answer of each process.
    answers: dict[tuple[str, int], list[Answer]] = field(default_factory=lambda: defaultdict(list))
    # Likewise, in bytes.
    peaks: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    # (engine, workload) -> why it failed and was not run again.
    failures: dict[tuple[str, str], str] = field(default_factory=dict)


def make_workloads(
    names: Sequence[str], prompt: int | None, output: int, vocab_size: int, seed: int
) -> list[Workload]:
    """Return workloads by name: "prefill", or "b8" for the decoding of eight requests.

    Args:
        prompt: tokens of a prompt; None: 512 to prefill, 128 to decode.
        output: tokens that each decoding request generates.

    Raises:
        ConfigError: another name, or a number out of range.
    """
    for field_name, value, minimum in (("prompt_tokens", prompt, 1), ("output_tokens", output, 2)):
        if value is not None and value < minimum:
            raise ConfigError(field_name, f"must be at least {minimum}, not {value}")
    made = []
    for name in dict.fromkeys(names):
        match = re.fullmatch(r"b([1-9]\d*)", name)
        if name != "prefill" and (match is None or int(match[1]) > MAX_BATCH):
            choices = f"prefill, or b1 to b{MAX_BATCH}, as b8 for a batch of 8"
            raise ConfigError("workloads", f"must be {choices}; not {name[:60]!r}")
        if match is None:
            size, length, tokens, runs = 1, prompt or 512, 1, 5
        else:
            size, length, tokens = int(match[1]), prompt or 128, output
            runs = 3 if size < 8 else 1  # a larger batch already averages
        # Drawn once for all engines. Workloads do not share prompts, which a cache might have.
        draw = random.Random(f"{seed}/{name}")
        top = min(TOP_ID, vocab_size)
        batches = [
            [[draw.randrange(top) for _ in range(length)] for _ in range(size)]
            for _ in range(runs + 1)
        ]
        made.append(Workload(name, tokens, batches[0], batches[1:]))
    return made


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round: each round starts with the next engine."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def turns(
    entries: Mapping[str, EngineEntry], workloads: Sequence[Workload], number: int
) -> Iterator[tuple[str, list[Workload]]]:
    """Yield (engine, workloads of one process), in the order of round `number`."""
    for work in workloads:
        for name in rotated([*entries], number):
            if not entries[name].together:
                yield name, [work]
            elif work is workloads[0]:
                yield name, [*workloads]


def measure(
    comparison: EngineComparison,
    measurements: Found,
    run: Run,
    say: Callable[[str], None],
    now: Callable[[], float] = time.time,
) -> None:
    """Run everything and record it in `measurements`; `say` gets a line for each run.

    An engine that failed at a workload does not run it again.
    """
    for name, reason in comparison.engines.absent.items():
        for work in comparison.workloads:
            measurements.failures[name, work.name] = reason
    entries = comparison.engines.entries
    for number in range(comparison.rounds):
        say(f"round {number + 1} of {comparison.rounds}")
        for name, planned in turns(entries, comparison.workloads, number):
            works = [work for work in planned if (name, work.name) not in measurements.failures]
            if not works:
                continue
            entry = entries[name]
            job = Job(
                model=entry.model_path(comparison.folder, comparison.name),
                threads=comparison.threads,
                started=now(),
                workloads=works,
                options=entry.options,
            )
            outcome = run(entry, job, comparison.timeout)
            say(_line(name, works, outcome))
            if outcome.answer.failed:
                for work in works:
                    measurements.failures[name, work.name] = outcome.answer.failed
            else:
                measurements.answers[name, number].append(outcome.answer)
                measurements.peaks[name, number].append(outcome.peak_bytes)


def _line(name: str, works: Sequence[Workload], outcome: Outcome) -> str:
    answer, names = outcome.answer, ", ".join(work.name for work in works)
    if answer.failed:
        return f"  {name:24} {names}: failed: {answer.failed}"
    rates = ", ".join(f"{w.name} {median(answer.rates[w.name]):,.1f} tokens/s" for w in works)
    return f"  {name:24} {rates}; start {answer.start:.1f} s, {outcome.peak_bytes >> 20:,} MiB"


Tokens = Sequence[Sequence[int]]  # [rows, output]

START = "from the start of the process to the first token of a prompt of one token"
PEAK = "of the largest process of a run, mapped pages of weight files included"
RATIO = "rate of kvik in the same format over the rate of this engine, within a round"
EQUAL = "output tokens equal to those of kvik in the same format, position by position"
REASON = 80  # characters of a failure that are shown in the table
EXACT = "fp32"  # the format in which engines should agree


def to_result(
    comparison: EngineComparison, measurements: Found, facts: Mapping[str, str]
) -> Result:
    """Return a row per engine, by format, kvik first, and a row per engine that could not run."""
    entries, absent = comparison.engines.entries, comparison.engines.absent
    readings = _Readings(comparison, measurements)
    rows: list[Row] = []
    remarks: list[str] = []
    for form in dict.fromkeys(entry.format for entry in entries.values()):
        alike = [name for name, entry in entries.items() if entry.format == form]
        kvik_names = [name for name in alike if entries[name].adapter == OWN]
        peers = [name for name in alike if entries[name].adapter != OWN]
        rows += [readings.own_row(name) for name in kvik_names]
        rows += [readings.peer_row(name, kvik_names[0]) for name in peers]
        remarks += readings.best_remarks(form, peers, kvik_names[0])
        remarks += readings.equality_remark(form, peers, kvik_names[0])
    rows += [Row(name, (), {"failed": reason}) for name, reason in absent.items()]
    remarks += [f"{name} failed: {why}" for name, why in readings.long_reasons()]
    if comparison.engines.left_out:
        names = ", ".join(comparison.engines.left_out)
        remarks.append(f"Not installed, or in need of a converted model (--config): {names}.")
    charts = [
        Chart("bars", f"kvik compared with others, {work.name}", work.name)
        for work in comparison.workloads
        if any(row.figure(work.name) for row in rows)
    ]
    return Result("compare", facts, tuple(rows), tuple(remarks), tuple(charts))


def equal_places(ours: Tokens, theirs: Tokens) -> tuple[int, int]:
    """Return (tokens equal at the same position, all tokens)."""
    pairs = [p for a, b in zip(ours, theirs, strict=True) for p in zip(a, b, strict=True)]
    return sum(a == b for a, b in pairs), len(pairs)


def first_differences(ours: Tokens, theirs: Tokens) -> list[int]:
    """Return for each row the number of equal tokens before the first difference."""
    rows = zip(ours, theirs, strict=True)
    return [
        sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(a, b, strict=True))) for a, b in rows
    ]


class _Readings:
    """Derives figures from the outcomes."""

    def __init__(self, comparison: EngineComparison, measurements: Found) -> None:
        self._comparison = comparison
        self._found = measurements
        self._rounds = range(comparison.rounds)

    def own_row(self, name: str) -> Row:
        return Row(name, tuple(self._measured(name)), self._facts(name))

    def peer_row(self, name: str, kvik: str) -> Row:
        figures, facts = self._measured(name), self._facts(name)
        for work in self._comparison.workloads:
            figures += self._ratio(work, kvik, name)
        figures += self._equality(name, kvik)
        places = self._differences(name, kvik)
        if places:
            facts["first difference"] = self._where(places)
        series = {
            f"tokens before the first difference, {work}": tuple(map(float, counts))
            for work, counts in places.items()
        }
        return Row(name, tuple(figures), facts, series)

    def best_remarks(self, form: str, peers: Sequence[str], kvik: str) -> list[str]:
        if not peers:
            return [f"{form}: no other engine to compare with."]
        remarks = []
        for work in self._comparison.workloads:
            best = self._best(peers, work)
            for gain in self._ratio(work, kvik, best) if best is not None else ():
                remarks.append(
                    f"{work.name}: {kvik} is {show_figure(gain)} times as fast as {best}, the best "
                    f"other {form}."
                )
        return remarks

    def equality_remark(self, form: str, peers: Sequence[str], kvik: str) -> list[str]:
        shares = [f.median for name in peers for f in self._equality(name, kvik)]
        if not shares or min(shares) == 100:
            return []
        if form == EXACT:
            return [f"{form}: engines should agree, except where two tokens are equally likely."]
        return [
            f"{form}: each engine rounds and quantises in its own way, so greedy texts diverge "
            "where two tokens are nearly equally likely, which is soon with random weights; "
            f"{EXACT} should agree."
        ]

    def long_reasons(self) -> list[tuple[str, str]]:
        """Return (engine, reason) of failures that the table truncates."""
        failures = [(name, reason) for (name, _), reason in self._found.failures.items()]
        failures += self._comparison.engines.absent.items()
        return [pair for pair in dict.fromkeys(failures) if len(pair[1]) > REASON]

    def _rate(self, name: str, work: Workload, number: int) -> float | None:
        for answer in self._found.answers.get((name, number), ()):
            if work.name in answer.rates:
                return median(answer.rates[work.name])
        return None

    def _rates(self, name: str, work: Workload) -> tuple[float, ...]:
        """Return the rates of the rounds that have one."""
        rates = (self._rate(name, work, number) for number in self._rounds)
        return tuple(rate for rate in rates if rate is not None)

    def _tokens(self, name: str, work: Workload, number: int) -> Tokens | None:
        for answer in self._found.answers.get((name, number), ()):
            if work.name in answer.tokens:
                return answer.tokens[work.name]
        return None

    def _best(self, peers: Sequence[str], work: Workload) -> str | None:
        """Return the peer with the best median."""
        medians = {name: median(rates) for name in peers if (rates := self._rates(name, work))}
        return max(medians, key=medians.__getitem__) if medians else None

    def _measured(self, name: str) -> list[Figure]:
        figures = []
        for work in self._comparison.workloads:
            if rates := self._rates(name, work):
                figures.append(Figure(work.name, "tokens/s", rates, "more", _means(work)))
        answers, peaks = self._found.answers, self._found.peaks
        done = [n for n in self._rounds if answers.get((name, n))]
        if done:
            starts = tuple(median(a.start for a in answers[name, n]) for n in done)
            highs = tuple(max(peaks[name, n]) / 2**20 for n in done)
            figures.append(Figure("start", "s", starts, "less", START))
            figures.append(Figure("peak memory", "MiB", highs, "less", PEAK))
        return figures

    def _ratio(self, work: Workload, kvik: str, peer: str) -> list[Figure]:
        rates = [(self._rate(kvik, work, n), self._rate(peer, work, n)) for n in self._rounds]
        ratios = tuple(a / b for a, b in rates if a is not None and b is not None)
        return [Figure(f"kvik / this, {work.name}", "x", ratios, "more", RATIO)] if ratios else []

    def _both(self, name: str, kvik: str, number: int) -> list[tuple[Workload, Tokens, Tokens]]:
        """Return (workload, ours, theirs) for workloads whose tokens both report in a round."""
        triples = []
        for work in self._comparison.workloads:
            ours, theirs = self._tokens(kvik, work, number), self._tokens(name, work, number)
            if ours is not None and theirs is not None:
                triples.append((work, ours, theirs))
        return triples

    def _equality(self, name: str, kvik: str) -> list[Figure]:
        shares = []
        for number in self._rounds:
            counts = [equal_places(a, b) for _, a, b in self._both(name, kvik, number)]
            if counts:
                equal, total = map(sum, zip(*counts, strict=True))
                shares.append(100 * equal / total)
        return [Figure("equal tokens", "%", tuple(shares), "more", EQUAL)] if shares else []

    def _differences(self, name: str, kvik: str) -> dict[str, list[int]]:
        """Return by workload the first difference of each row, in the first round with tokens."""
        differences: dict[str, list[int]] = {}
        for number in self._rounds:
            for work, ours, theirs in self._both(name, kvik, number):
                differences.setdefault(work.name, first_differences(ours, theirs))
        return differences

    def _where(self, places: Mapping[str, Sequence[int]]) -> str:
        """Return "b8 after 3 of 64 tokens", by the earliest row of each workload; or "none"."""
        words = []
        for work in self._comparison.workloads:
            earliest = min(places.get(work.name, [work.output]))
            if earliest < work.output:
                words.append(f"{work.name} after {earliest} of {work.output}")
        return ", ".join(words) or "none"

    def _facts(self, name: str) -> dict[str, str]:
        entry = self._comparison.engines.entries[name]
        facts = {"format": entry.format}
        for number in self._rounds:
            for answer in self._found.answers.get((name, number), ()):
                facts["engine"] = answer.engine
        reasons: dict[str, list[str]] = {}
        for work in self._comparison.workloads:
            reason = self._found.failures.get((name, work.name))
            if reason is not None:
                reasons.setdefault(_short(reason), []).append(work.name)
        if reasons:
            facts["failed"] = "; ".join(f"{', '.join(w)}: {why}" for why, w in reasons.items())
        return facts


def _means(work: Workload) -> str:
    if work.output == 1:
        return f"prompt tokens ({work.prompt}) a second, until the first token"
    return (
        f"output tokens a second after every row has its first: {work.batch} together, prompts of "
        f"{work.prompt}, {work.output} tokens each"
    )


def _short(reason: str) -> str:
    return reason if len(reason) <= REASON else reason[: REASON - 3] + "..."


INTERRUPTED = 130  # 128 + SIGINT, as shells count


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "bench compare",
        "[MODEL]",
        "Run kvik and other engines on the same model, prompts, threads and precision, one process "
        "at a time, alternately; ratios are taken within rounds.",
    )
    add_model(parser, "a folder or hub id")
    parser.add_argument(
        "--engines",
        nargs="+",
        default=[],
        metavar="NAME",
        help="installed engines (transformers, transformers-batching, vllm) or entries of the "
        "--config file (default: all); kvik always runs",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML file with engines that have their own Python, converted model or options",
    )
    parser.add_argument(
        "--format",
        nargs="+",
        default=[],
        metavar="FORMAT",
        help="fp32, bf16, fp16, int8 or int4 (default: as the model is stored, or all of the file)",
    )
    parser.add_argument(
        "--workloads",
        nargs="+",
        default=["prefill", "b1", "b8", "b32"],
        metavar="NAME",
        help="prefill: one prompt; bN: N requests decoded together (default: prefill b1 b8 b32)",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="tokens of each prompt (default: prefill 512, bN 128)",
    )
    add_number(parser, "--output-tokens", 64, "tokens of each answer")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads of every engine (default: all cores)"
    )
    add_number(parser, "--rounds", 3, "rounds, in each of which every engine runs")
    add_number(parser, "--timeout", 600.0, "limit of one process", "SECONDS")
    add_number(parser, "--seed", 0, "seed of the prompts")
    add_output_flags(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    check_output(arguments)
    for name, minimum in (("threads", 1), ("rounds", 1), ("timeout", 1)):
        value = getattr(arguments, name)
        if value is not None and not value >= minimum:
            raise ConfigError(name, f"must be at least {minimum}, not {value}")

    folder = find_model(arguments.model)
    spec = read_model_spec(folder)
    if arguments.config is None:
        formats = arguments.format or [SHORT_DTYPES[spec.dtype]]
        engines = installed_engines(arguments.engines, formats)
    else:
        engines = engines_of_file(arguments.config, arguments.engines, arguments.format)
    workloads = make_workloads(
        arguments.workloads,
        arguments.prompt_tokens,
        arguments.output_tokens,
        spec.vocab_size,
        arguments.seed,
    )
    longest = max(work.length for work in workloads)
    if longest > spec.max_context:
        raise ConfigError(
            "prompt_tokens",
            f"and the output are {longest} tokens; the model's context is {spec.max_context}",
        )
    comparison = EngineComparison(
        name=Path(arguments.model).name or folder.name,
        folder=folder,
        engines=engines,
        workloads=workloads,
        threads=arguments.threads or engines.threads or detect().cores,
        rounds=arguments.rounds,
        timeout=arguments.timeout,
    )
    measurements, watch = Found(), Watch()
    code = 0
    try:
        with ended_like_ctrl_c():
            measure(comparison, measurements, run_adapter, _say)
    except KeyboardInterrupt:
        _say("interrupted: these are the figures so far")
        code = INTERRUPTED
    facts = {
        **run_facts(),
        "model": str(folder),
        "threads": str(comparison.threads),
        "rounds": str(comparison.rounds),
    }
    result = to_result(comparison, measurements, facts)
    write_out(replace(result, remarks=(*watch.remarks(), *result.remarks)), arguments)
    return code or (0 if measurements.answers else 1)


def _say(line: str) -> None:
    with suppress(OSError):  # the terminal may be gone; files are written anyway
        say(line, error=True, flush=True)
