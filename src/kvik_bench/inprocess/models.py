"""Compares models: memory, perplexity, and decoding speed.

The first model is the reference. Each other model reads the same text windows together with it, so
the distance is exact. Then all decode alternately, each loaded again in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from kvik.cli.report import kv_format
from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.units import MIB
from kvik.errors import ConfigError
from kvik.evaluate.quality import (
    PerplexityChange,
    Progress,
    Quality,
    Reading,
    check_same,
    prepare,
    read,
)
from kvik.evaluate.windows import (
    check_context,
    choose_window,
    loaded_reader,
    longest_window,
    resolve_reader,
)
from kvik.launch import resolve_config
from kvik_bench.inprocess.inproc import LoadRun, loaded, run_jobs
from kvik_bench.inprocess.jobs import Requests, fixed
from kvik_bench.inprocess.measures import DECODE
from kvik_bench.inprocess.rounds import Rounds
from kvik_bench.report.result import Chart, Figure, Result, Row, figures, ratios
from kvik_bench.report.table import show_figure

CHARTS = (
    Chart("bars", "Distance from the reference", "KL"),
    Chart("bars", "Perplexity", "perplexity"),
    Chart("bars", "Weights in memory", "weights"),
    Chart("bars", "Speed", "over the reference"),
)
OVER = "decode / decode of the reference, round by round"


Bar = Callable[[str], AbstractContextManager[Progress]]  # shows the progress of reading


@dataclass(frozen=True, slots=True)
class Contender:
    """A model in some format, to compare."""

    label: str
    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Decoding:
    """The measurement of decoding, one request at a time."""

    prompt_tokens: int
    output_tokens: int
    repeats: int


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """A comparison of models, checked as far as possible without loading them."""

    contenders: tuple[Contender, ...]
    reading: Reading
    # Resolved config of each contender for reading; `served_by`: for decoding.
    read_by: tuple[ResolvedConfig, ...]
    served_by: tuple[ResolvedConfig, ...]
    decoding: Decoding | None  # None: speed is not measured

    @classmethod
    def of(
        cls,
        contenders: Sequence[Contender],
        texts: Sequence[str],
        window: int | None,
        stride: int | None,
        decoding: Decoding | None,
    ) -> ModelComparison:
        """Check and resolve a comparison; raises KvikError, which names the invalid option."""
        labels = [contender.label for contender in contenders]
        for label in labels:
            if labels.count(label) > 1:
                raise ConfigError("model", f"{label} is given twice")
        longest = min(longest_window(contender.config) for contender in contenders)
        size, step = choose_window(longest, window, stride)
        read_by = tuple(resolve_reader(contender.config, size) for contender in contenders)
        reading = prepare(read_by[0], texts, size, step)
        for other in read_by[1:]:
            check_same(reading, other, texts)
            check_context(other, read_by[0])
        served_by: tuple[ResolvedConfig, ...] = ()
        if decoding is not None:
            served_by = tuple(
                resolve_config(replace(contender.config, max_num_seqs=1))
                for contender in contenders
            )
            for resolved in served_by:
                _requests(decoding).check(resolved)
        return cls(tuple(contenders), reading, read_by, served_by, decoding)

    def measure(self, bar: Bar, facts: Mapping[str, str]) -> Result:
        qualities = self._read(bar)
        runs, warnings = self._decode()
        rows = [
            Row(
                contender.label,
                (
                    *_sizes(resolved),
                    *_qualities(quality, qualities[0] if i else None),
                    *speeds(runs[i], runs[0] if i else None),
                ),
                {"weights in": _method(resolved), "KV cache in": kv_format(resolved)},
            )
            for i, (contender, resolved, quality) in enumerate(
                zip(self.contenders, self.read_by, qualities, strict=True)
            )
        ]
        return Result(
            "compare",
            {**facts, **self._facts()},
            tuple(rows),
            (f"The reference is {self.contenders[0].label}.", *warnings),
            CHARTS,
            group="",
        )

    def _read(self, bar: Bar) -> list[Quality]:
        first = self.contenders[0]
        with loaded_reader(self.read_by[0]) as reference:
            with bar(first.label) as progress:
                qualities = [read(self.reading, reference, None, progress)]
            for contender, resolved in zip(self.contenders[1:], self.read_by[1:], strict=True):
                with loaded_reader(resolved) as model, bar(contender.label) as progress:
                    qualities.append(read(self.reading, model, reference, progress))
        return qualities

    def _decode(self) -> tuple[list[list[LoadRun]], tuple[str, ...]]:
        """See `decode_in_turn`; without decoding, no runs."""
        if self.decoding is None:
            return [[] for _ in self.contenders], ()
        labels = [contender.label for contender in self.contenders]
        return decode_in_turn(labels, self.served_by, self.decoding)

    def _facts(self) -> dict[str, str]:
        reading, runner = self.reading, self.read_by[0].runner
        facts = {
            "text": f"{reading.num_scored:,} tokens scored in windows of {reading.window}, "
            f"every {reading.stride}",
            "kernels": f"{runner.kernels}, attention {runner.attention_backend}, on {runner.device}"
            f", {runner.threads} threads",
        }
        if self.decoding is not None:
            facts["decoding"] = (
                f"one request at a time, {self.decoding.prompt_tokens} tokens of prompt and "
                f"{self.decoding.output_tokens} of output"
            )
        return facts


def decode_in_turn(
    labels: Sequence[str], models: Sequence[ResolvedConfig], decoding: Decoding
) -> tuple[list[list[LoadRun]], tuple[str, ...]]:
    """Return the runs of each model, loaded again in each round, and reasons to doubt them."""
    requests, rounds = _requests(decoding), Rounds(decoding.repeats, 0)

    def measure(number: int, i: int) -> LoadRun:
        with loaded(models[i]) as engine:
            vocab_size = engine.resolved.model.vocab_size
            run_jobs(engine, requests.jobs(-1, vocab_size))  # warms up
            return run_jobs(engine, requests.jobs(number, vocab_size))

    runs = rounds.runs(range(len(models)), measure, lambda i: f"decoding: {labels[i]}")
    return [*runs.values()], rounds.remarks


def _requests(decoding: Decoding) -> Requests:
    return Requests(1, fixed(decoding.prompt_tokens, decoding.output_tokens))


def _sizes(resolved: ResolvedConfig) -> tuple[Figure, ...]:
    weights = resolved.memory.weights
    kv = sum(group.bytes_per_token for group in resolved.cache.groups)
    return (
        Figure(
            "bits",
            "",
            (8 * weights / resolved.model.num_parameters,),
            "less",
            "bits of memory for each parameter, with scales, embeddings and what stays in floats",
        ),
        Figure("weights", "MiB", (weights / MIB,), "less", "in memory, as the memory plan has it"),
        Figure("KV", "bytes", (float(kv),), "less", "of the KV cache for each token, with scales"),
    )


def _qualities(quality: Quality, reference: Quality | None) -> tuple[Figure, ...]:
    perplexity = Figure(
        "perplexity",
        "",
        (quality.perplexity,),
        "less",
        "e to the mean loss of the scored tokens",
        digits=4,
    )
    if reference is None or quality.divergence is None or quality.agreement is None:
        return (perplexity,)
    change = PerplexityChange.between(reference, quality)
    return (
        perplexity,
        Figure(
            "change", "%", (100 * change.share,), "less", "of perplexity, relative to the reference"
        ),
        Figure(
            "\N{PLUS-MINUS SIGN}",
            "%",
            (100 * change.error,),
            "less",
            "standard error of that change, by the spread of the scored tokens' losses",
        ),
        Figure(
            "KL",
            "nats",
            (quality.divergence,),
            "less",
            "KL(reference || model), mean over the scored tokens",
        ),
        Figure(
            "top-1",
            "%",
            (100 * quality.agreement,),
            "more",
            "of the scored tokens have the same likeliest token with the reference",
        ),
    )


def speeds(runs: Sequence[LoadRun], reference: Sequence[LoadRun] | None) -> tuple[Figure, ...]:
    """Return the decoding speed, and its ratio to the reference."""
    rates = figures((DECODE,), runs) if runs else ()
    if reference and rates:
        return (*rates, ratios("over the reference", DECODE, runs, reference, OVER))
    return rates


def _method(resolved: ResolvedConfig) -> str:
    """Return how weights are stored, and how they are quantised while loading."""
    stored = str(resolved.model.quantization or resolved.runner.dtype)
    rounded = resolved.runner.quantization
    return stored if rounded == "none" else f"{stored}, rounded to {rounded}"


# Comparison before and after a change, for `kvik quantize`.
SPEED_PROMPT, SPEED_OUTPUT = 32, 64  # tokens of the requests that are timed
SPEED_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class DecodingSpeed:
    """Tokens/s of one request to a model before and after a change, a value for each round."""

    before: Figure
    after: Figure
    ratio: Figure  # after / before, round by round
    remarks: tuple[str, ...] = ()  # reasons to doubt the figures

    def as_json(self) -> dict[str, object]:
        figures = {"before": self.before, "after": self.after, "ratio": self.ratio}
        return {
            **{name: figure.median for name, figure in figures.items()},
            "rounds": {name: figure.values for name, figure in figures.items()},
            "remarks": self.remarks,
        }

    def rows(self) -> Iterator[tuple[str, str]]:
        """Return (name, text) of each line."""
        rounds = f"one request, {len(self.ratio.values)} rounds"
        yield "tokens/s", f"{show_figure(self.before)} -> {show_figure(self.after)}, {rounds}"
        ratio = f"{show_figure(self.ratio)} times"
        if self.ratio.low <= 1 <= self.ratio.high:
            ratio += ": no difference beyond that of the rounds"
        yield "speed-up", ratio
        for remark in self.remarks:
            yield "", remark


def measure_decoding(before: ResolvedConfig, after: ResolvedConfig) -> DecodingSpeed:
    """Measure decoding before and after a change, with the models alternately.

    So other load on the machine affects both equally.
    """
    output = min(SPEED_OUTPUT, before.scheduler.max_model_len // 2)
    decoding = Decoding(min(SPEED_PROMPT, output), output, SPEED_ROUNDS)
    (old, new), remarks = decode_in_turn(("before", "after"), (before, after), decoding)
    (rate,) = speeds(old, None)
    new_rate, ratio = speeds(new, old)
    return DecodingSpeed(rate, new_rate, ratio, remarks)
