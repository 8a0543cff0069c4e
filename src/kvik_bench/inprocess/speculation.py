"""The same requests with and without guessing ahead, in turn: what it gains, and what its
acceptance and its costs let expect.

Both engines stay loaded, so that they take turns within seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from kvik.config.config import ResolvedConfig
from kvik.config.units import show_bytes
from kvik.errors import ConfigError, ParamError
from kvik_bench.inprocess.guessing import Pair
from kvik_bench.inprocess.inproc import Job, loaded, run_jobs
from kvik_bench.inprocess.jobs import check_context
from kvik_bench.inprocess.measures import DECODE, OUTPUT, figures, ratios
from kvik_bench.inprocess.rounds import Rounds
from kvik_bench.report.facts import engine_facts, peak_memory
from kvik_bench.report.result import Chart, Figure, Result, Row
from kvik_bench.report.table import show_figure

ROUND_BY_ROUND = "with speculation / without, round by round"
UP_TO = "of the checks with so many drafts, those in which this one and all before it were right"
CHARTS = (
    Chart("bars", "Speed-up, measured", "speed-up"),
    Chart("bars", "Speed-up, predicted", "predicted"),
)


@dataclass(frozen=True, slots=True)
class Gauge:
    """A figure of a pair of runs; `of` gives None where there is nothing to measure."""

    name: str
    unit: str
    better: Literal["more", "less"]
    definition: str
    of: Callable[[Pair], float | None]

    def figure(self, pairs: Sequence[Pair]) -> tuple[Figure, ...]:
        """A value for each pair that has one."""
        values = tuple(value for pair in pairs if (value := self.of(pair)) is not None)
        if not values:
            return ()
        return (Figure(self.name, self.unit, values, self.better, self.definition),)


GAUGES = (
    Gauge(
        "predicted",
        "x",
        "more",
        "tokens of a step / (its time + K times the cost of a draft); with K drafts it has (1 - "
        "a^(K+1)) / (1 - a) tokens for an acceptance of a, without drafts one",
        lambda pair: pair.predicted,
    ),
    Gauge(
        "if checks were free",
        "x",
        "more",
        "the same with steps that take no longer for their drafts: what acceptance alone promises, "
        "on a machine that is not yet bound by arithmetic",
        lambda pair: pair.if_free,
    ),
    Gauge(
        "engine's estimate",
        "x",
        "more",
        "by the engine itself: what its steps without drafts take, for as many tokens / the time "
        "of its steps, those without drafts included",
        lambda pair: pair.own_estimate,
    ),
    Gauge("drafts", "", "more", "that were checked", lambda pair: pair.drafts.drafts),
    Gauge("accepted", "", "more", "drafts that were right", lambda pair: pair.drafts.accepted),
    Gauge(
        "acceptance",
        "%",
        "more",
        "a: how many drafts are right of those before which all were",
        lambda pair: 100 * pair.acceptance if pair.drafts.rows else None,
    ),
    Gauge(
        "mean accepted length",
        "tokens",
        "more",
        "drafts of a check that were right, and the model's own token",
        lambda pair: pair.drafts.mean_length if pair.drafts.rows else None,
    ),
    Gauge(
        "K",
        "",
        "more",
        "drafts of a check; where they form a tree, how many of them were right at most",
        lambda pair: pair.depth if pair.drafts.rows else None,
    ),
    Gauge(
        "with drafts",
        "%",
        "more",
        "share of the steps of a request that checked drafts",
        lambda pair: 100 * pair.share,
    ),
    Gauge(
        "cost of a draft",
        "x",
        "less",
        "time of making it for all requests / time of a step without speculation",
        lambda pair: pair.draft_cost if pair.drafts.rows else None,
    ),
    Gauge(
        "cost of a step",
        "x",
        "less",
        "mean time of a step, without making drafts / time of a step without speculation",
        lambda pair: pair.step_cost,
    ),
    Gauge(
        "equal tokens",
        "%",
        "more",
        "share of the tokens that are those of the engine without speculation",
        lambda pair: 100 * pair.equal,
    ),
)


class Prompts(Protocol):
    def jobs(self, number: int, count: int) -> list[Job]:
        """So many requests for one round."""
        ...


@dataclass(frozen=True, slots=True)
class SpeculationLoad:
    """Attributes:
    batches: how many requests run together, a row of the result for each.
    prompt_tokens: of a prompt at most.
    """

    prompts: Prompts
    batches: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int

    def check(self, resolved: ResolvedConfig) -> None:
        """Raises ParamError, which names the field."""
        most = resolved.scheduler.max_num_seqs
        for batch in self.batches:
            if not 1 <= batch <= most:
                raise ParamError("batch", f"must be in [1, {most}] (max_num_seqs), not {batch}")
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
    """
    Args:
        plain, guessing: the same engine without speculation and with it.

    Raises:
        ConfigError: they do not fit in memory together.
    """
    speculation = guessing.speculation
    assert speculation is not None and plain.speculation is None
    load.check(plain)
    _check_memory(plain, guessing)
    pairs: dict[int, list[Pair]] = {batch: [] for batch in load.batches}
    with ExitStack() as stack:
        without = stack.enter_context(loaded(plain))
        ahead = stack.enter_context(loaded(guessing))
        stack.enter_context(rounds)
        for number, batch in rounds.over(load.batches, lambda batch: f"batch {batch}"):
            jobs = load.prompts.jobs(number, batch)
            # Who is first changes, so that neither always finds the caches that the other left.
            if number % 2:
                second, first = run_jobs(ahead, jobs), run_jobs(without, jobs)
            else:
                first, second = run_jobs(without, jobs), run_jobs(ahead, jobs)
            if number >= 0:
                pairs[batch].append(Pair(first, second, speculation.trees))
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
        tuple(_row(batch, found) for batch, found in pairs.items()),
        (
            *rounds.remarks,
            *(remark for batch, found in pairs.items() for remark in _remarks(batch, found)),
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
    whole = f"output tokens / wall time, prompts included, {ROUND_BY_ROUND}"
    return Row(
        f"batch {batch}",
        (
            *figures((replace(DECODE, name="decode without"),), plain),
            *figures((replace(DECODE, name="decode with"),), guessing),
            ratios("speed-up", DECODE, guessing, plain, f"decode {ROUND_BY_ROUND}"),
            *(figure for gauge in GAUGES for figure in gauge.figure(pairs)),
            *_places(pairs),
            ratios("whole", OUTPUT, guessing, plain, whole),
        ),
    )


def _places(pairs: Sequence[Pair]) -> Iterator[Figure]:
    """Acceptance of the first, second, ... draft, in the rounds that came so far."""
    for i in range(max(pair.num_places for pair in pairs)):
        counts = [pair.drafts for pair in pairs if pair.num_places > i]
        values = tuple(100 * one.accepted_at[i] / one.at[i] for one in counts)
        yield Figure(f"right up to draft {i + 1}", "%", values, "more", UP_TO)


def _remarks(batch: int, pairs: Sequence[Pair]) -> Iterator[str]:
    if not any(pair.drafts.rows for pair in pairs):
        yield f"batch {batch}: no drafts were made, as none paid or none were found."
    if any(pair.equal < 1 for pair in pairs):
        yield f"batch {batch}: not all tokens are those of the engine without speculation."
