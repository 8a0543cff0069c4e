"""kvik beside other engines on this machine: the same prompts, threads and precision, interleaved.

In each round every engine runs every workload in a fresh process, one process at a time, and the
order of the engines moves on by one: a machine that drifts treats all alike, and ratios are taken
within rounds. What the times mean is said in engines/protocol.py.
"""

from __future__ import annotations

import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from kvik.errors import ConfigError
from kvik_bench.peers.adapter_process import Outcome
from kvik_bench.peers.engine_entries import EngineEntry, Engines
from kvik_bench.peers.engines.protocol import Answer, Job, Workload

TOP_ID = 1000  # prompts are random ids below this: the more frequent tokens
MAX_BATCH = 4096

Run = Callable[[EngineEntry, Job, float], Outcome]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared: `name` and `folder` of the model, the engines, the work."""

    name: str
    folder: Path
    engines: Engines
    workloads: Sequence[Workload]
    threads: int
    rounds: int = 3
    timeout: float = 600.0  # seconds for one process


@dataclass(frozen=True, slots=True)
class Found:
    """What the runs of a comparison found.

    Attributes:
        answers: (engine, round) -> the answer of each process.
        peaks: likewise, in bytes.
        failures: (engine, workload) -> why it has no figures, or no more from then on.
    """

    answers: dict[tuple[str, int], list[Answer]] = field(default_factory=lambda: defaultdict(list))
    peaks: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    failures: dict[tuple[str, str], str] = field(default_factory=dict)


def make_workloads(
    names: Sequence[str], prompt: int | None, output: int, vocab_size: int, seed: int
) -> list[Workload]:
    """Workloads by name: "prefill", or "b8" for the decoding of eight requests.

    Args:
        prompt: tokens of a prompt; None: 512 to prefill, 128 to decode.
        output: tokens that each decoding request makes.

    Raises:
        ConfigError: another name, or a number out of range.
    """
    for field_name, value, least in (("prompt_tokens", prompt, 1), ("output_tokens", output, 2)):
        if value is not None and value < least:
            raise ConfigError(field_name, f"must be at least {least}, not {value}")
    made = []
    for name in dict.fromkeys(names):
        match = re.fullmatch(r"b([1-9]\d*)", name)
        if name != "prefill" and (match is None or int(match[1]) > MAX_BATCH):
            wanted = f"prefill, or b1 to b{MAX_BATCH}, as b8 for a batch of 8"
            raise ConfigError("workloads", f"must be {wanted}; not {name[:60]!r}")
        if match is None:
            size, length, tokens, runs = 1, prompt or 512, 1, 5
        else:
            size, length, tokens = int(match[1]), prompt or 128, output
            runs = 3 if size < 8 else 1  # a larger batch already averages
        # Drawn here, once for all engines; and no workload knows prompts of another one, which a
        # cache would remember.
        draw = random.Random(f"{seed}/{name}")
        top = min(TOP_ID, vocab_size)
        batches = [
            [[draw.randrange(top) for _ in range(length)] for _ in range(size)]
            for _ in range(runs + 1)
        ]
        made.append(Workload(name, tokens, batches[0], batches[1:]))
    return made


def rotated(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: each round starts one later."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def turns(
    entries: Mapping[str, EngineEntry], workloads: Sequence[Workload], number: int
) -> Iterator[tuple[str, list[Workload]]]:
    """(engine, what one process of it runs), in the order of round `number`."""
    for work in workloads:
        for name in rotated([*entries], number):
            if not entries[name].together:
                yield name, [work]
            elif work is workloads[0]:
                yield name, [*workloads]


def measure(
    comparison: Comparison,
    found: Found,
    run: Run,
    say: Callable[[str], None],
    now: Callable[[], float] = time.time,
) -> None:
    """Run everything into `found`, each run told to `say` in a line.

    An engine that failed at a workload is not asked for it again.
    """
    for name, reason in comparison.engines.absent.items():
        for work in comparison.workloads:
            found.failures[name, work.name] = reason
    entries = comparison.engines.entries
    for number in range(comparison.rounds):
        say(f"round {number + 1} of {comparison.rounds}")
        for name, planned in turns(entries, comparison.workloads, number):
            works = [work for work in planned if (name, work.name) not in found.failures]
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
                    found.failures[name, work.name] = outcome.answer.failed
            else:
                found.answers[name, number].append(outcome.answer)
                found.peaks[name, number].append(outcome.peak_bytes)


def _line(name: str, works: Sequence[Workload], outcome: Outcome) -> str:
    answer, names = outcome.answer, ", ".join(work.name for work in works)
    if answer.failed:
        return f"  {name:24} {names}: failed: {answer.failed}"
    rates = ", ".join(f"{w.name} {median(answer.rates[w.name]):,.1f} tokens/s" for w in works)
    return f"  {name:24} {rates}; start {answer.start:.1f} s, {outcome.peak_bytes >> 20:,} MiB"
