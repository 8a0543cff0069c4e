"""`kvik bench techniques [MODEL]`: turns on the techniques of LLM inference one by one, under one
load, like the rungs of a ladder.

Each rung has the techniques of the rung before it. Rungs with unquantised weights must generate the
same tokens; this is checked.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby

from kvik.cli.flags import engine_options
from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.speculative import OFF, SPECULATION_OPTIONS
from kvik.config.units import MIB
from kvik.engine.loop import Engine
from kvik.errors import KvikError, ParamError
from kvik.launch import reschedule, resolve_config
from kvik.planner.serving import Traffic
from kvik.spec.kv import block_bytes
from kvik_bench.cli.output import add_number, engine_parser, reported
from kvik_bench.inprocess.ceilings import Ceilings
from kvik_bench.inprocess.inproc import BenchRequest, LoadRun, loaded, run_jobs
from kvik_bench.inprocess.jobs import Requests, fixed, refuse_varied
from kvik_bench.inprocess.measures import E2E, PREFIX_HITS, TPOT, TTFT, EngineMeasure
from kvik_bench.inprocess.rounds import Rounds, check_repeats
from kvik_bench.load.metrics import OUTPUT, RequestRecord
from kvik_bench.report.result import (
    Chart,
    Figure,
    Measure,
    Result,
    Row,
    engine_facts,
    figures,
    peak_bytes,
    ratios,
    restart_peak,
)

PLAIN = "none"  # weights as they are stored
EQUAL = "share of the tokens before the first that differs from the answer with plain weights"
OVER = "output / output of that rung, round by round"

PROCESS_PEAK: EngineMeasure = Measure(
    "process peak",
    "MiB",
    "less",
    "peak resident memory of this process while the requests were served: runtime, weights, "
    "activations and the written part of the KV cache",
    lambda run: None if run.peak_bytes is None else run.peak_bytes / MIB,
)

Serve = Callable[[Engine, Sequence[BenchRequest]], LoadRun]


def without_cache(engine: Engine, jobs: Sequence[BenchRequest]) -> LoadRun:
    """Serve each token as a request with the whole text before it as prompt, so that no computation
    is reused between tokens. Needs an engine without prefix caching."""
    return _joined([_one_without_cache(engine, job) for job in jobs])


def one_by_one(engine: Engine, jobs: Sequence[BenchRequest]) -> LoadRun:
    return _joined([run_jobs(engine, [job]) for job in jobs])


@dataclass(frozen=True, slots=True)
class Loading:
    """The options that an engine is loaded with."""

    quantization: str = PLAIN
    speculation: str = OFF  # the method of drafting, or "off"


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder."""

    name: str
    what: str
    serve: Serve = run_jobs
    # Requests are served one after another, so that a few of them show the rate.
    alone: bool = False
    recomputes: bool = False  # no computation is reused between tokens
    prefix_caching: bool = False
    loading: Loading = Loading()


RUNGS = (
    Rung(
        "no KV cache",
        "the whole context is computed again for each token; one request after the other",
        without_cache,
        alone=True,
        recomputes=True,
    ),
    Rung(
        "KV cache",
        "keys and values are kept, so a token costs one row; one request after the other",
        one_by_one,
        alone=True,
    ),
    Rung("continuous batching", "all requests at the same time share each reading of the weights"),
    Rung("prefix cache", "and the shared part of prompts is already cached", prefix_caching=True),
    Rung(
        "speculation",
        "and likely next tokens are guessed; a step can confirm several",
        prefix_caching=True,
        loading=Loading(speculation="ngram"),
    ),
    Rung("int8", "and weights take 8 bits", prefix_caching=True, loading=Loading("int8", "ngram")),
    Rung("int4", "and weights take 4 bits", prefix_caching=True, loading=Loading("int4", "ngram")),
)
CHARTS = (Chart("bars", "Output", "output"), Chart("bars", "Over the first rung", "over the first"))


@dataclass(frozen=True, slots=True)
class LadderLoad:
    """The load of all rungs."""

    requests: Requests  # with a shared prefix
    alone: int  # number of requests for rungs that serve one at a time

    def check(self, resolved: ResolvedConfig) -> None:
        """Check the numbers; raises ParamError, which names the field."""
        self.requests.check(resolved)
        if not 1 <= self.alone <= self.requests.count:
            raise ParamError("alone", f"must be in [1, {self.requests.count}], not {self.alone}")
        limit = resolved.scheduler.max_num_seqs
        if self.requests.count > limit:
            raise ParamError(
                "num_requests", f"must be at most {limit} (max_num_seqs), to run together"
            )

    def of(self, rung: Rung, jobs: Sequence[BenchRequest]) -> Sequence[BenchRequest]:
        return jobs[: self.alone] if rung.alone else jobs


Found = dict[str, list[LoadRun]]  # by the name of the rung


@dataclass(slots=True)
class Ladder:
    """Measures the rungs alternately.

    Engines are loaded again in each round, so that they alternate too, with one in memory at a
    time.
    """

    load: LadderLoad
    resolve: Callable[[Loading], ResolvedConfig]
    warmup: int = 1  # of each engine, for each rung
    rungs: Sequence[Rung] = RUNGS
    _loadings: dict[Loading, ResolvedConfig] = field(default_factory=dict)
    _left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Resolve the engines; raises KvikError if even the unquantised one cannot be used, or
        cannot serve the load."""
        self._loadings[Loading()] = self.resolve(Loading())
        self.load.check(self._loadings[Loading()])
        for rung in self.rungs:
            if rung.loading not in self._loadings:
                try:
                    self._loadings[rung.loading] = self.resolve(rung.loading)
                except KvikError as error:
                    self._left_out.append(f"Left out: {rung.name} ({error}).")
        self.rungs = [rung for rung in self.rungs if rung.loading in self._loadings]

    def measure(self, rounds: Rounds) -> Result:
        runs: Found = {rung.name: [] for rung in self.rungs}
        groups = [tuple(group) for _, group in groupby(self.rungs, lambda rung: rung.loading)]
        for of_group in rounds.runs(groups, self._round, _names).values():
            for rung, run in chain.from_iterable(of_group):
                runs[rung.name].append(run)
        ceilings = {loading: Ceilings.of(resolved) for loading, resolved in self._loadings.items()}
        equal = {rung.name: self._equal(rung, runs) for rung in self.rungs}
        rows = [self._row(rung, runs, equal[rung.name], ceilings) for rung in self.rungs]
        remarks = [ceilings[rung.loading].remark(rung.name, runs[rung.name]) for rung in self.rungs]
        plain = self._loadings[Loading()]
        varied = ("quantization", "prefix caching")
        return Result(
            "techniques",
            {
                **{k: v for k, v in engine_facts(plain).items() if k not in varied},
                "requests": f"{self.load.requests.count}, each {self._traffic.prompt} tokens "
                f"of prompt ({self._traffic.shared} of them shared, and served once before) and "
                f"{self._traffic.output} of output; {self.load.alone} of them where one is served "
                "after the other",
                **{f"technique {rung.name!r}": rung.what for rung in self.rungs},
            },
            tuple(rows),
            (
                *rounds.remarks,
                *ceilings[Loading()].notes,
                *self._left_out,
                _verdict(
                    [rung for rung in self.rungs if rung.loading.quantization == PLAIN], equal
                ),
                *remarks,
            ),
            CHARTS,
        )

    @property
    def _traffic(self) -> Traffic:
        return self.load.requests.traffic()

    def _round(self, number: int, group: Sequence[Rung]) -> list[tuple[Rung, LoadRun]]:
        """Run the rungs that share an engine. Each new engine is warmed up with other prompts."""
        resolved = self._loadings[group[0].loading]
        vocab_size = resolved.model.vocab_size
        requests = self.load.requests
        jobs = requests.jobs(number, vocab_size)
        warmup_jobs = replace(requests, seed=f"{requests.seed}/warm-up").jobs(number, vocab_size)
        runs = []
        with loaded(resolved) as fresh:
            engine = fresh
            for rung in group:
                cache = replace(resolved.cache, enable_prefix_caching=rung.prefix_caching)
                engine = reschedule(engine, resolved.scheduler, cache)
                for _ in range(self.warmup):
                    rung.serve(engine, warmup_jobs[:1] if rung.alone else warmup_jobs)
                for prefix in requests.prefix_prompts(number, vocab_size):
                    if prefix:  # a running service has the shared prefix in its cache
                        run_jobs(engine, [BenchRequest(prefix, 1)])
                has_peak = restart_peak()
                run = rung.serve(engine, self.load.of(rung, jobs))
                runs.append((rung, replace(run, peak_bytes=peak_bytes() if has_peak else None)))
        return runs

    def _equal(self, rung: Rung, runs: Found) -> tuple[float, ...]:
        """Return the percent of the tokens equal to those of the first rungs, for each round."""
        plain = [r.name for r in self.rungs if r.loading.quantization == PLAIN]
        shares = []
        for i, run in enumerate(runs[rung.name]):
            expected: dict[int, list[int]] = {}
            for name in plain:
                for index, answer in enumerate(runs[name][i].answers):
                    expected.setdefault(index, answer)
            num_equal = sum(_agreeing(answer, expected[j]) for j, answer in enumerate(run.answers))
            shares.append(100 * num_equal / sum(map(len, run.answers)))
        return tuple(shares)

    def _row(
        self,
        rung: Rung,
        runs: Found,
        equal: tuple[float, ...],
        ceilings: Mapping[Loading, Ceilings],
    ) -> Row:
        rung_runs, first = runs[rung.name], self.rungs[0]
        before = self.rungs[max(0, self.rungs.index(rung) - 1)]
        machine = ceilings[rung.loading]
        return Row(
            rung.name,
            (
                *figures((OUTPUT, TTFT, TPOT, E2E, PREFIX_HITS), rung_runs),
                *figures((_kv_peak(self._loadings[rung.loading]), PROCESS_PEAK), rung_runs),
                ratios("over the one before", OUTPUT, rung_runs, runs[before.name], OVER),
                ratios("over the first", OUTPUT, rung_runs, runs[first.name], OVER),
                Figure("equal tokens", "%", equal, "more", EQUAL),
                *self._predicted(rung, machine),
                *machine.achieved(rung_runs),
            ),
        )

    def _predicted(self, rung: Rung, machine: Ceilings) -> tuple[Figure, ...]:
        traffic = self._traffic
        if rung.recomputes:
            return machine.batch(1, Traffic(traffic.halfway, 1))
        if not rung.prefix_caching:
            traffic = replace(traffic, shared=0)
        return machine.batch(1 if rung.alone else self.load.requests.count, traffic)


def _one_without_cache(engine: Engine, job: BenchRequest) -> LoadRun:
    answer: list[int] = []
    runs = []
    for _ in range(job.output_tokens):
        runs.append(run_jobs(engine, [BenchRequest([*job.prompt, *answer], 1)]))
        answer += runs[-1].answers[0]
    record = RequestRecord(len(job.prompt), runs[0].started, runs[0].started)
    for run in runs:
        record.chunk(run.records[0].times[0], 1)
    record.finished = runs[-1].records[0].finished
    return replace(_joined(runs), records=[record], answers=[answer])


def _joined(runs: Sequence[LoadRun]) -> LoadRun:
    """Return consecutive runs as one."""
    return LoadRun(
        runs[0].started,
        runs[-1].ended,
        [record for run in runs for record in run.records],
        [answer for run in runs for answer in run.answers],
        runs[0].before,
        runs[-1].after,
        max(run.kv_usage for run in runs),
    )


def _kv_peak(resolved: ResolvedConfig) -> EngineMeasure:
    cache = resolved.cache
    block = block_bytes(cache.groups, cache.block_size)
    return Measure(
        "KV peak",
        "MiB",
        "less",
        "the most blocks of the KV cache that requests held at a time, warm-up included, in bytes",
        lambda run: run.after.peak_blocks * block / MIB,
    )


def _agreeing(answer: Sequence[int], expected: Sequence[int]) -> int:
    pairs = zip(answer, expected, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(answer))


def _names(rungs: Sequence[Rung]) -> str:
    return ", ".join(rung.name for rung in rungs)


def _verdict(plain: Sequence[Rung], equal: Mapping[str, Sequence[float]]) -> str:
    other = [rung for rung in plain if min(equal[rung.name]) < 100]
    if not other:
        return f"All rungs with plain weights gave the same tokens: {_names(plain)}."
    return f"Not the same tokens as the rungs before: {_names(other)}."


def build_parser() -> argparse.ArgumentParser:
    parser = engine_parser(
        "bench techniques",
        "Turn the techniques on one by one, and measure the same requests with each: no KV cache, "
        "KV cache, continuous batching, prefix cache, speculation, quantised weights.",
        repeats=3,
    )
    add_number(parser, "--num-requests", 16, "requests, which share a prefix")
    add_number(parser, "--prefix-tokens", 96, "tokens of the prefix")
    add_number(parser, "--prompt-tokens", 32, "further tokens of each prompt")
    add_number(parser, "--output-tokens", 32, "tokens of each answer")
    add_number(parser, "--alone", 2, "requests for techniques that serve one at a time")
    return parser


@reported
def run(arguments: argparse.Namespace) -> Result:
    check_repeats(arguments.repeats, arguments.warmup)
    options = engine_options(arguments, arguments.model)
    refuse_varied(options, "quantization", "enable_prefix_caching", "policy", *SPECULATION_OPTIONS)
    config = EngineConfig(**options)
    requests = Requests(
        arguments.num_requests,
        fixed(arguments.prompt_tokens, arguments.output_tokens),
        arguments.prefix_tokens,
        seed=str(arguments.seed),
    )
    ladder = Ladder(
        LadderLoad(requests, arguments.alone),
        lambda loading: resolve_config(
            replace(config, quantization=loading.quantization, spec_method=loading.speculation)
        ),
        arguments.warmup,
    )
    return ladder.measure(Rounds(arguments.repeats, 0))
