"""What drafting without a model costs: each lookup's proposals, and the decisions around them.

    python benchmarks/drafters.py [--contexts 256 1024 4096 32768] [--rows 8] [--drafts 5]

Texts repeat themselves in part, as edits and summaries do. Prints median microseconds for one row,
after each row's text has grown by three tokens. "control" and "judging" are for all rows together,
and so is "draft model": a proposal of kvik's bundled draft model, without its forward passes, in
processor time of the thread (median, 10th and 90th percentile).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median, quantiles

import numpy as np
import torch

from kvik.config.config import EngineConfig
from kvik.config.model_source import find_model
from kvik.launch import resolve_config
from kvik.worker.adaptive import DraftControl, StepFigures
from kvik.worker.drafters import registry
from kvik.worker.drafters.base import Drafter, DraftRows, Drafts
from kvik.worker.drafters.draft_model import DraftModel
from kvik.worker.drafters.lookup import NgramDrafter, SuffixDrafter
from kvik.worker.graphs import Graph, StepOutput
from kvik.worker.input_batch import InputBatch
from kvik.worker.rejection import Chains
from kvik.worker.request_table import RequestTable
from kvik_bench.inprocess.inproc import BenchRequest, loaded, run_jobs

ROUNDS, GROWTH = 60, 3


def text_of(length: int, seed: int) -> np.ndarray:
    """Return runs of words, each of them repeated several times: [length]."""
    rng = np.random.default_rng(seed)
    words = np.minimum(rng.zipf(1.3, length), 30000)
    for start in range(200, length - 40, 97):
        source = rng.integers(0, start - 40)
        words[start : start + 40] = words[source : source + 40]
    return words


def micros(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return (time.perf_counter() - started) * 1e6


def proposals(make: Callable[[RequestTable], Drafter], context: int, rows: int, k: int) -> float:
    longest = context + ROUNDS * GROWTH
    table = RequestTable(rows, longest, 1, 16)
    for slot in range(rows):
        table.token_ids[slot] = text_of(longest, slot)
    table.num_tokens[:] = context
    drafter = make(table)
    slots = np.arange(rows)
    for slot in slots.tolist():
        drafter.enter(slot)
    wanted = DraftRows(slots, np.full(rows, k), lambda: torch.zeros(rows, 1))
    for _ in range(context // 1000 + 2):  # until drafters that read in chunks have read it all
        drafter.propose(wanted)
    times = []
    for _ in range(ROUNDS):
        times.append(micros(lambda: drafter.propose(wanted)))
        table.num_tokens += GROWTH
    return median(times) / rows


def control(rows: int, k: int) -> float:
    adaptive = DraftControl(rows, k, rows * k)
    slots, room = np.arange(rows), np.full(rows, k)
    limits = np.zeros(rows, np.int64)
    times = []
    for _ in range(20 * ROUNDS):
        drafts = int(limits.sum())
        seconds = 0.01 * (1 + 0.01 * drafts)
        figures = StepFigures(slots, limits, limits, seconds, 0.0, int(limits.max()), True)
        started = time.perf_counter()
        adaptive.observe(figures)
        limits = adaptive.limits(slots, room)
        times.append((time.perf_counter() - started) * 1e6)
    return median(times)


def judging(rows: int, k: int) -> float:
    counts, given = np.full(rows, k), np.arange(rows * (k + 1))
    tokens = np.zeros(rows * (k + 1), np.int64)

    def judge() -> None:
        chains = Chains.of(counts, given)
        chains.supposed()
        chains.output(tokens)

    return median(micros(judge) for _ in range(20 * ROUNDS))


class Timed:
    """A draft model whose forward passes are timed, in processor time."""

    def __init__(self, drafter: Drafter) -> None:
        assert isinstance(drafter, DraftModel)
        self.drafter = drafter
        self.graph: Graph = drafter.network.graph
        drafter.network.graph = self
        self.forwards = 0.0
        self.outside: list[float] = []  # microseconds, of each proposal

    def prepare(self) -> None:
        self.graph.prepare()

    def run(self, batch: InputBatch) -> StepOutput:
        started = time.thread_time()
        output = self.graph.run(batch)
        self.forwards += time.thread_time() - started
        return output

    def enter(self, slot: int) -> None:
        self.drafter.enter(slot)

    def leave(self, slot: int) -> None:
        self.drafter.leave(slot)

    def propose(self, rows: DraftRows) -> Drafts:
        started, self.forwards = time.thread_time(), 0.0
        found = self.drafter.propose(rows)
        self.outside.append((time.thread_time() - started - self.forwards) * 1e6)
        return found


def draft_model(rows: int, k: int) -> list[float]:
    """Return the microseconds of proposals for all rows, without the forward passes."""
    build, made = registry.DRAFTERS["draft_model"], []

    def timed(parts: registry.DrafterParts) -> Timed:
        made.append(Timed(build(parts)))
        return made[0]

    registry.DRAFTERS["draft_model"] = timed
    wish = {
        "method": "draft_model",
        "model": str(find_model("").parent / "stories-draft"),
        "num_speculative_tokens": k,
        "adaptive": False,
    }
    config = EngineConfig(max_model_len=512, max_num_seqs=rows, threads=1, speculative_config=wish)
    rng = np.random.default_rng(0)
    with loaded(resolve_config(config)) as engine:
        for _ in range(4):
            run_jobs(
                engine, [BenchRequest(rng.integers(10, 500, 32).tolist(), 200) for _ in range(rows)]
            )
    return made[0].outside


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096, 32768])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--drafts", type=int, default=5)
    args = parser.parse_args()
    makers: dict[str, Callable[[RequestTable], Drafter]] = {
        "ngram": lambda table: NgramDrafter(table, 1, 4),
        "suffix": lambda table: SuffixDrafter(table, shared=False),
    }
    print(f"{'us per row':12}" + "".join(f"{context:>9}" for context in args.contexts))
    for name, make in makers.items():
        found = [proposals(make, context, args.rows, args.drafts) for context in args.contexts]
        print(f"{name:12}" + "".join(f"{value:9.1f}" for value in found))
    print(f"control, {args.rows} rows: {control(args.rows, args.drafts):.0f} us")
    print(f"judging, {args.rows} rows: {judging(args.rows, args.drafts):.0f} us")
    outside = draft_model(args.rows, args.drafts)
    tenths = quantiles(outside, n=10)
    print(
        f"draft model, {args.rows} rows: {median(outside):.0f} us "
        f"({tenths[0]:.0f} to {tenths[-1]:.0f})"
    )


if __name__ == "__main__":
    main()
