"""Check whether speculation ever makes a workload slower.

    python benchmarks/speculation_workloads.py [MODEL] [--quantization none] [--methods ngram suffix
        draft_model medusa] [--draft MODEL] [--workloads ...] [--rounds 5] [--processor-time]

Runs a small version of each workload of `kvik bench`: the same requests go alternately to an engine
without speculation and to one engine per method, all of them loaded. Prints output tokens a second,
prompts included, over those of the engine without: the median of the rounds, and its 95 %
confidence interval. The bar is a median of 0.97. On a shared machine single rounds of the bundled
model vary by a tenth, so 40 rounds are needed; "off" as a method compares two identical engines.
Decoding is greedy and ignores the end token. Prompts are random tokens except in "story", whose
texts are as predictable as a user's. --processor-time uses one thread and counts the processor time
of the process instead of wall time, for shared machines; it leaves out "arriving", as waiting takes
no processor time.
"""

from __future__ import annotations

import contextlib
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import comb
from statistics import median

from kvik.config.config import EngineConfig
from kvik.config.model_source import find_model
from kvik.engine.loop import Engine
from kvik.evaluate.windows import held_out_texts
from kvik.launch import resolve_config
from kvik.text.tokenizer import Tokenizer
from kvik_bench.inprocess.inproc import BenchRequest, LoadRun, loaded, run_jobs
from kvik_bench.inprocess.jobs import Requests, TextPieces, fixed
from kvik_bench.load.metrics import OUTPUT
from kvik_bench.load.workload import DrawnLengths

LONGEST, TOGETHER = 768, 32
DRAFT = "stories-draft"  # next to the bundled model
Jobs = Callable[[int, int], list[BenchRequest]]  # round, size of the vocabulary -> requests


def random_tokens(count: int, prompt: int, output: int, shared: int = 0) -> Jobs:
    return Requests(count, fixed(prompt, output), shared).jobs


def varied(count: int, prompt: str, output: str) -> Jobs:
    return Requests(count, DrawnLengths.of_texts(prompt, output, "0")).jobs


def story(count: int, prompt: int, output: int) -> Jobs:
    # The bundled model's token ids are valid in any model.
    tokenizer = Tokenizer.load(find_model(""))
    pieces = TextPieces.of(tokenizer, held_out_texts(), prompt, output, "0")
    return lambda number, vocab_size: pieces.jobs(number, count)


def staggered(jobs: Jobs, gap: float) -> Jobs:
    """Let the requests arrive `gap` seconds apart."""

    def late(number: int, vocab_size: int) -> list[BenchRequest]:
        return [replace(job, due=i * gap) for i, job in enumerate(jobs(number, vocab_size))]

    return late


WORKLOADS: dict[str, Jobs] = {
    "latency, batch 1": random_tokens(1, 128, 128),
    "latency, batch 8": random_tokens(8, 128, 64),
    "latency, batch 32": random_tokens(32, 64, 64),
    "story, batch 1": story(1, 64, 128),
    "story, batch 8": story(8, 64, 128),
    "story, batch 32": story(32, 64, 64),
    "throughput": random_tokens(64, 128, 64),
    "uneven": varied(48, "16..256", "8..128"),
    "shared prefix": random_tokens(32, 32, 32, shared=256),
    "arriving": staggered(varied(24, "16..128", "8..128"), 0.004),
    "short answers": random_tokens(64, 64, 4),
    "long prompts": random_tokens(8, 512, 16),
}


@dataclass(frozen=True)
class Found:
    ratio: float
    equal: bool
    accepted: float


def by_processor(engine: Engine, jobs: list[BenchRequest]) -> LoadRun:
    """Run the requests, timed in processor time: other processes do not count."""
    before = time.process_time()
    run = run_jobs(engine, jobs)
    return replace(run, started=0.0, ended=time.process_time() - before)


def compare(plain: LoadRun, other: LoadRun) -> Found:
    before, after = other.before.speculation, other.after.speculation
    share = 0.0
    if before is not None and after is not None:
        drafts = after.drafts.drafts - before.drafts.drafts
        share = (after.drafts.accepted - before.drafts.accepted) / max(1, drafts)
    return Found(OUTPUT.of(other) / OUTPUT.of(plain), plain.answers == other.answers, share)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median.

    The number of values below the median is distributed as the heads of `len(values)` throws.
    """
    ordered, beyond, cut = sorted(values), 0.0, 0
    while (beyond := beyond + comb(len(values), cut) / 2 ** len(values)) <= 0.025:
        cut += 1
    return ordered[max(0, cut - 1)], ordered[-max(1, cut)]


def wishes(method: str, args: Namespace) -> dict[str, str]:
    if method != "draft_model":
        return {"spec_method": method}
    draft = args.draft or str(find_model("").parent / DRAFT)
    return {"spec_method": method, "spec_model": draft}


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--quantization", default="none")
    parser.add_argument(
        "--methods", nargs="+", default=["ngram", "suffix", "draft_model", "medusa"]
    )
    parser.add_argument("--draft", default="", help="for draft_model")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    serve = by_processor if args.processor_time else run_jobs
    workloads = [name for name in args.workloads if serve is run_jobs or name != "arriving"]
    config = EngineConfig(
        model=args.model,
        quantization=args.quantization,
        max_model_len=LONGEST,
        max_num_seqs=TOGETHER,
        enable_prefix_caching=True,
        threads=1 if args.processor_time else None,
    )
    found: dict[tuple[str, str], list[Found]] = {}
    with contextlib.ExitStack() as stack:

        def engine(**options: str) -> Engine:
            return stack.enter_context(loaded(resolve_config(replace(config, **options))))

        plain = engine()
        engines = {method: engine(**wishes(method, args)) for method in args.methods}
        vocab_size = plain.resolved.model.vocab_size
        for number in range(-1, args.rounds):
            for name in workloads:
                # Separate prompts for each workload, or the prefix cache would have them.
                jobs = WORKLOADS[name](number, vocab_size)
                order = [("", plain), *engines.items()]
                order = order[number % len(order) :] + order[: number % len(order)]
                runs = {method: serve(one, jobs) for method, one in order}
                for method in engines:
                    if number >= 0:
                        pair = compare(runs[""], runs[method])
                        found.setdefault((name, method), []).append(pair)
    print(f"{'':20}" + "".join(f"{method:>34}" for method in engines))
    for name in workloads:
        cells = []
        for method in engines:
            ratios = [one.ratio for one in found[name, method]]
            low, high = interval(ratios)
            accepted = median(one.accepted for one in found[name, method])
            wrong = "" if all(one.equal for one in found[name, method]) else " OTHER TOKENS"
            cells.append(
                f"{median(ratios):.2f} ({low:.2f} to {high:.2f}), {accepted:.0%} right{wrong}"
            )
        print(f"{name:20}" + "".join(f"{cell:>34}" for cell in cells))


if __name__ == "__main__":
    main()
