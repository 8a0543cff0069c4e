"""`kvik spec-report [MODEL]`: serves the same requests with and without speculation, alternately;
reports the speed-up, and the speed-up predicted from acceptance and costs.

Both engines stay loaded, so that they alternate within seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvik.cli.eval import text_name, texts_of
from kvik.cli.flags import engine_options
from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.speculative import SPECULATION_OPTIONS
from kvik.config.units import show_bytes
from kvik.core.types import DraftCounts
from kvik.engine.stats import SpeculationStats
from kvik.errors import ConfigError, ParamError
from kvik.launch import load_tokenizer, resolve_config
from kvik.planner.speculation import expected_tokens
from kvik_bench.cli.output import add_number, add_numbers, engine_parser, reported
from kvik_bench.inprocess.inproc import BenchRequest, LoadRun, loaded, run_jobs
from kvik_bench.inprocess.jobs import (
    Requests,
    TextPieces,
    check_batches,
    check_context,
    fixed,
    refuse_varied,
)
from kvik_bench.inprocess.measures import DECODE, decode_seconds
from kvik_bench.inprocess.rounds import Rounds
from kvik_bench.load.metrics import OUTPUT
from kvik_bench.report.result import (
    Chart,
    Figure,
    Measure,
    Result,
    Row,
    engine_facts,
    figures,
    peak_memory,
    ratios,
)
from kvik_bench.report.table import show_figure

# Speculation in a run, compared with the same requests without it.
#
# The formula is in `planner/speculation.py`. Its costs are measured: of a step and of making its
# drafts, both relative to a step of the engine without speculation.


@dataclass(frozen=True, slots=True)
class Pair:
    """The same requests in one round, without and with speculation."""

    plain: LoadRun
    guessing: LoadRun
    trees: bool  # drafts of a request form a tree

    @property
    def drafts(self) -> DraftCounts:
        return _since(self._stats[0].drafts, self._stats[1].drafts)

    @property
    def decoded(self) -> int:
        """Steps of all requests: one for each token that is not an accepted draft."""
        requests = len(self.guessing.answers)
        tokens = sum(map(len, self.guessing.answers)) - requests
        return tokens - self.drafts.accepted

    @property
    def share(self) -> float:
        """Share of these steps that have drafts."""
        return min(1.0, self.drafts.rows / self.decoded)

    @property
    def depth(self) -> float:
        """K, the largest number of drafts of a check that can be accepted."""
        if self.trees:
            return float(self.num_places)
        return self.drafts.drafts / max(1, self.drafts.rows)

    @property
    def acceptance(self) -> float:
        """Probability that a draft is accepted if all before it were. Checks with more drafts are
        assumed to get as far as all checks on average."""
        drafts = self.drafts
        tried, before = 0.0, 0
        for i in range(self.num_places):
            count, right = drafts.at[i], drafts.accepted_at[i]
            tried += count if i == 0 else before * count / drafts.at[i - 1]
            before = right
        return drafts.accepted / tried if tried else 0.0

    @property
    def num_places(self) -> int:
        """Number of positions at which drafts were checked, or, in trees, accepted."""
        places = self.drafts.accepted_at if self.trees else self.drafts.at
        return sum(1 for count in places if count)

    @property
    def draft_cost(self) -> float:
        """Time of drafting one position, for all requests / time of a plain step."""
        drafted = self._steps * self.share * self.depth
        return self._making / self._plain_step / drafted if drafted else 0.0

    @property
    def step_cost(self) -> float:
        """Time of a step, without making drafts / time of a plain step."""
        return (decode_seconds(self.guessing) - self._making) / self._steps / self._plain_step

    @property
    def predicted(self) -> float:
        """Predicted speed-up with all measured costs."""
        return self._expected(self.step_cost)

    @property
    def if_free(self) -> float:
        """Speed-up by theorem 3.8, if a check costs as much as a step without drafts."""
        return self._expected(1.0)

    def _expected(self, step_cost: float) -> float:
        tokens = 1.0 + self.share * (self._tokens_of_check - 1.0)
        return tokens / (step_cost + self.share * self.depth * self.draft_cost)

    @property
    def _tokens_of_check(self) -> float:
        """Mean tokens of a check by the formula, with the actual numbers of drafts."""
        if self.trees:
            return expected_tokens(self.acceptance, self.num_places)
        at = [*self.drafts.at, 0]
        checks = [at[i] - at[i + 1] for i in range(len(at) - 1)]  # with i + 1 drafts
        tokens = [expected_tokens(self.acceptance, i + 1) for i in range(len(checks))]
        pairs = zip(checks, tokens, strict=True)
        return sum(count * of for count, of in pairs) / max(1, self.drafts.rows)

    @property
    def own_estimate(self) -> float | None:
        """The engine's own estimate, from its steps without drafts."""
        before, after = self._stats
        seconds = after.seconds - before.seconds
        return (after.plain_seconds - before.plain_seconds) / seconds if seconds else None

    @property
    def equal(self) -> float:
        pairs = zip(self.plain.answers, self.guessing.answers, strict=True)
        tokens = [a == b for answer, other in pairs for a, b in zip(answer, other, strict=True)]
        return sum(tokens) / len(tokens)

    @property
    def _stats(self) -> tuple[SpeculationStats, SpeculationStats]:
        before, after = self.guessing.before.speculation, self.guessing.after.speculation
        assert before is not None and after is not None
        return before, after

    @property
    def _plain_steps(self) -> int:
        """Number of steps without prompts."""
        return max(map(len, self.plain.answers)) - 1

    @property
    def _plain_step(self) -> float:
        return decode_seconds(self.plain) / self._plain_steps

    @property
    def _steps(self) -> int:
        plain = self.plain.after.steps - self.plain.before.steps
        steps = self.guessing.after.steps - self.guessing.before.steps
        return max(1, steps - (plain - self._plain_steps))

    @property
    def _making(self) -> float:
        """Seconds of making drafts."""
        before, after = self._stats
        return after.proposing - before.proposing


def _since(before: DraftCounts, after: DraftCounts) -> DraftCounts:
    def places(now: list[int], then: list[int]) -> list[int]:
        return [count - (then[i] if i < len(then) else 0) for i, count in enumerate(now)]

    return DraftCounts(
        after.rows - before.rows,
        after.drafts - before.drafts,
        after.accepted - before.accepted,
        places(after.at, before.at),
        places(after.accepted_at, before.accepted_at),
    )


ROUND_BY_ROUND = "with speculation / without, round by round"
UP_TO = "share of the checks with this draft in which it and all drafts before it were right"
CHARTS = (
    Chart("bars", "Speed-up, measured", "speed-up"),
    Chart("bars", "Speed-up, predicted", "predicted"),
)


MEASURES: tuple[Measure[Pair], ...] = (
    Measure(
        "predicted",
        "x",
        "more",
        "tokens of a step / (its time + K times the cost of a draft); with K drafts it has (1 - "
        "a^(K+1)) / (1 - a) tokens for an acceptance of a, without drafts one",
        lambda pair: pair.predicted,
    ),
    Measure(
        "if checks were free",
        "x",
        "more",
        "the same if steps took no longer with drafts: the gain from acceptance alone, on a "
        "machine that is not yet bound by arithmetic",
        lambda pair: pair.if_free,
    ),
    Measure(
        "engine's estimate",
        "x",
        "more",
        "by the engine itself: time that steps without drafts would take for these tokens / time "
        "of all steps",
        lambda pair: pair.own_estimate,
    ),
    Measure("drafts", "", "more", "that were checked", lambda pair: pair.drafts.drafts),
    Measure("accepted", "", "more", "drafts that were right", lambda pair: pair.drafts.accepted),
    Measure(
        "acceptance",
        "%",
        "more",
        "a: share of right drafts, among the drafts before which all were right",
        lambda pair: 100 * pair.acceptance if pair.drafts.rows else None,
    ),
    Measure(
        "mean accepted length",
        "tokens",
        "more",
        "drafts of a check that were right, and the model's own token",
        lambda pair: pair.drafts.mean_length if pair.drafts.rows else None,
    ),
    Measure(
        "K",
        "",
        "more",
        "drafts of a check; in a tree, the largest number that was right",
        lambda pair: pair.depth if pair.drafts.rows else None,
    ),
    Measure(
        "with drafts",
        "%",
        "more",
        "share of the steps of a request that checked drafts",
        lambda pair: 100 * pair.share,
    ),
    Measure(
        "cost of a draft",
        "x",
        "less",
        "time of making it for all requests / time of a step without speculation",
        lambda pair: pair.draft_cost if pair.drafts.rows else None,
    ),
    Measure(
        "cost of a step",
        "x",
        "less",
        "mean time of a step, without making drafts / time of a step without speculation",
        lambda pair: pair.step_cost,
    ),
    Measure(
        "equal tokens",
        "%",
        "more",
        "share of the tokens equal to those of the engine without speculation",
        lambda pair: 100 * pair.equal,
    ),
)


Jobs = Callable[[int, int], list[BenchRequest]]  # (round, number of requests) -> requests


@dataclass(frozen=True, slots=True)
class SpeculationLoad:
    """The load of a report."""

    jobs: Jobs
    # Numbers of requests that run together, with a row of the result for each.
    batches: tuple[int, ...]
    prompt_tokens: int  # limit of a prompt
    output_tokens: int

    def check(self, resolved: ResolvedConfig) -> None:
        """Check the numbers; raises ParamError, which names the field."""
        check_batches(self.batches, resolved)
        if self.output_tokens < 2:
            raise ParamError("output_tokens", f"must be at least 2, not {self.output_tokens}")
        check_context("prompt_tokens", self.prompt_tokens, self.output_tokens, resolved)


def measure_speculation(
    plain: ResolvedConfig,
    guessing: ResolvedConfig,
    load: SpeculationLoad,
    rounds: Rounds,
    facts: Mapping[str, str],
) -> Result:
    """Measure a load without and with speculation.

    Args:
        plain, guessing: the same engine without speculation and with it.

    Raises:
        ConfigError: they do not fit in memory together.
    """
    speculation = guessing.speculation
    assert speculation is not None and plain.speculation is None
    load.check(plain)
    _check_memory(plain, guessing)
    with loaded(plain) as without, loaded(guessing) as ahead:

        def measure(number: int, batch: int) -> Pair:
            jobs = load.jobs(number, batch)
            # The order alternates, so that neither always finds the CPU caches that the other left.
            if number % 2:
                second, first = run_jobs(ahead, jobs), run_jobs(without, jobs)
            else:
                first, second = run_jobs(without, jobs), run_jobs(ahead, jobs)
            return Pair(first, second, speculation.trees)

        pairs = rounds.runs(load.batches, measure, "batch {}".format)
    return Result(
        "spec-report",
        {
            **facts,
            **engine_facts(guessing),
            **_speculation_facts(guessing),
            "prompt tokens": f"at most {load.prompt_tokens}",
            "output tokens": str(load.output_tokens),
            "peak memory": f"{show_figure(peak_memory())} MiB, of both engines",
        },
        tuple(_row(batch, batch_pairs) for batch, batch_pairs in pairs.items()),
        (
            *rounds.remarks,
            *(
                remark
                for batch, batch_pairs in pairs.items()
                for remark in _remarks(batch, batch_pairs)
            ),
        ),
        CHARTS,
        group="",
    )


def _check_memory(plain: ResolvedConfig, guessing: ResolvedConfig) -> None:
    needed, limit = plain.memory.total + guessing.memory.total, plain.memory.limit
    if needed > limit:
        raise ConfigError(
            "memory_utilization",
            f"must leave room for two engines, which take {show_bytes(needed)} of "
            f"{show_bytes(limit)}: a lower max_model_len or memory_utilization makes their KV "
            "caches smaller",
        )


def _speculation_facts(guessing: ResolvedConfig) -> dict[str, str]:
    speculation = guessing.speculation
    assert speculation is not None
    facts = {
        "method": speculation.method,
        "drafts of a request": f"at most {speculation.num_draft_tokens} in a step",
        "number of drafts": "adaptive" if speculation.adaptive else "always as many as fit",
    }
    if speculation.source.path:
        facts["drafts from"] = speculation.source.path
    return facts


def _row(batch: int, pairs: Sequence[Pair]) -> Row:
    plain, guessing = [pair.plain for pair in pairs], [pair.guessing for pair in pairs]
    definition = f"output tokens / wall time, prompts included, {ROUND_BY_ROUND}"
    return Row(
        f"batch {batch}",
        (
            *figures((replace(DECODE, name="decode without"),), plain),
            *figures((replace(DECODE, name="decode with"),), guessing),
            ratios("speed-up", DECODE, guessing, plain, f"decode {ROUND_BY_ROUND}"),
            *figures(MEASURES, pairs, every=False),
            *_places(pairs),
            ratios("whole", OUTPUT, guessing, plain, definition),
        ),
    )


def _places(pairs: Sequence[Pair]) -> Iterator[Figure]:
    """Yield the acceptance of the first, second, ... draft, in the rounds that have one."""
    for i in range(max(pair.num_places for pair in pairs)):
        counts = [pair.drafts for pair in pairs if pair.num_places > i]
        values = tuple(100 * drafts.accepted_at[i] / drafts.at[i] for drafts in counts)
        yield Figure(f"right up to draft {i + 1}", "%", values, "more", UP_TO)


def _remarks(batch: int, pairs: Sequence[Pair]) -> Iterator[str]:
    if not any(pair.drafts.rows for pair in pairs):
        yield f"batch {batch}: no drafts were made, as none paid or none were found."
    if any(pair.equal < 1 for pair in pairs):
        yield f"batch {batch}: not all tokens equal those of the engine without speculation."


DEFAULT_METHOD = "ngram"  # works with any model


def build_parser() -> argparse.ArgumentParser:
    parser = engine_parser(
        "spec-report",
        "Serve the same requests without speculation and with it, alternately, and measure the "
        f"acceptance and the cost of drafts, and the speed-up. --spec-method: {DEFAULT_METHOD} by "
        "default. Requests are greedy.",
        repeats=5,
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help='text of the prompts: plain text, or .jsonl with a field "text" in each line '
        "(default: a story that ships with kvik)",
    )
    add_numbers(parser, "--batch", (1, 8), "requests at a time, one size after another", "A,B")
    add_number(parser, "--prompt-tokens", 64, "most tokens of a prompt")
    add_number(parser, "--output-tokens", 128, "tokens of each answer")
    return parser


@reported
def run(arguments: argparse.Namespace) -> Result:
    rounds = Rounds(arguments.repeats, arguments.warmup)
    options = engine_options(arguments, arguments.model)
    # Otherwise a run would use the cache of the run before.
    refuse_varied(options, "enable_prefix_caching")
    config = EngineConfig(**options, enable_prefix_caching=False)
    if all(getattr(config, name) is None for name in SPECULATION_OPTIONS):
        config = replace(config, spec_method=DEFAULT_METHOD)
    guessing = resolve_config(config)
    if guessing.speculation is None:
        raise ConfigError("spec_method", "must name a method: off has nothing to report")
    plain = resolve_config(
        replace(
            config, speculative_config=None, spec_method=None, spec_model=None, spec_tokens=None
        )
    )
    jobs, source = _jobs(arguments, plain)
    load = SpeculationLoad(jobs, arguments.batch, arguments.prompt_tokens, arguments.output_tokens)
    return measure_speculation(plain, guessing, load, rounds, {"prompts from": source})


def _jobs(arguments: argparse.Namespace, resolved: ResolvedConfig) -> tuple[Jobs, str]:
    """Return the requests, and the source of their prompts in words."""
    seed, sizes = str(arguments.seed), (arguments.prompt_tokens, arguments.output_tokens)
    texts, tokenizer = texts_of(arguments), load_tokenizer(resolved)
    if tokenizer is not None:
        return TextPieces.of(tokenizer, texts, *sizes, seed).jobs, text_name(arguments)
    if arguments.data is not None:
        raise ConfigError("data", "cannot be read: the model has no tokenizer")
    lengths, vocab_size = fixed(*sizes), resolved.model.vocab_size

    def jobs(number: int, count: int) -> list[BenchRequest]:
        return Requests(count, lengths, seed=seed).jobs(number, vocab_size)

    return jobs, "random tokens: the model has no tokenizer"
