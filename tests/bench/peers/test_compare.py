"""Order of runs, prompts, and the table of known answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvik.errors import ConfigError
from kvik_bench.peers.adapter_process import Outcome
from kvik_bench.peers.compare import (
    EngineComparison,
    Found,
    equal_places,
    first_differences,
    make_workloads,
    measure,
    to_result,
)
from kvik_bench.peers.engine_entries import EngineEntry, Engines
from kvik_bench.peers.engines.protocol import Answer, Job, Workload
from kvik_bench.report.result import Result, Row

WORKS = (Workload("prefill", 1, [[1] * 9], [[[2] * 9]]), Workload("b1", 4, [[1]], [[[2]], [[3]]]))


class Engine:
    """Answers with given rates, start and tokens; an Exception's text is a failure."""

    def __init__(
        self,
        rates: Mapping[str, list[float | Exception]],  # by round
        tokens: Mapping[str, list[list[int]]] | None = None,
        peak: int = 1 << 20,
    ) -> None:
        self.rates = {name: [*values] for name, values in rates.items()}
        self.tokens = tokens or {}
        self.peak = peak


class Runs:
    """Runs fakes in place of processes, and records their jobs."""

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self.engines = engines
        self.asked: list[tuple[str, list[str]]] = []
        self.jobs: list[Job] = []

    def __call__(self, entry: EngineEntry, job: Job, timeout: float) -> Outcome:
        name = entry.options["name"]
        engine = self.engines[name]
        self.asked.append((name, [work.name for work in job.workloads]))
        self.jobs.append(job)
        rates: dict[str, list[float]] = {}
        for work in job.workloads:
            rate = engine.rates[work.name].pop(0)
            if isinstance(rate, Exception):
                return Outcome(Answer(failed=str(rate)), engine.peak)
            rates[work.name] = [rate / 2, rate, rate * 3]
        tokens = {w.name: engine.tokens[w.name] for w in job.workloads if w.name in engine.tokens}
        peak = engine.peak if job.workloads[0].name == "prefill" else engine.peak // 2
        return Outcome(Answer(f"{name} 1.0", 0.5, rates, tokens), peak)


def entry(name: str, adapter: str, form: str = "bf16", *, together: bool = False) -> EngineEntry:
    return EngineEntry(adapter=adapter, format=form, options={"name": name}, together=together)


def comparison(
    entries: Mapping[str, EngineEntry], rounds: int, absent: Mapping[str, str] | None = None
) -> EngineComparison:
    return EngineComparison(
        "story", Path("/hub/story"), Engines(entries, absent or {}), WORKS, 3, rounds
    )


def compare(
    entries: Mapping[str, EngineEntry],
    rounds: int,
    engines: Mapping[str, Engine],
    absent: Mapping[str, str] | None = None,
) -> tuple[Result, Runs]:
    what, found, runs = comparison(entries, rounds, absent), Found(), Runs(engines)
    measure(what, found, runs, lambda line: None, lambda: 123.0)
    return to_result(what, found, {"date": "today"}), runs


def row(result: Result, label: str) -> Row:
    return next(row for row in result.rows if row.label == label)


def values(result: Result, label: str, figure: str) -> tuple[float, ...] | None:
    found = row(result, label).figure(figure)
    return None if found is None else found.values


def always(rate: float, rounds: int) -> Engine:
    return Engine({"prefill": [rate] * rounds, "b1": [rate] * rounds})


def test_engines_take_turns_and_each_round_starts_one_later() -> None:
    entries = {
        "k": entry("k", "kvik"),
        "a": entry("a", "vllm"),
        "t": entry("t", "openvino", together=True),
    }
    _, runs = compare(entries, 2, {name: always(1.0, 2) for name in entries})
    assert runs.asked == [
        ("k", ["prefill"]),
        ("a", ["prefill"]),
        ("t", ["prefill", "b1"]),  # one process for both
        ("k", ["b1"]),
        ("a", ["b1"]),
        ("a", ["prefill"]),
        ("t", ["prefill", "b1"]),
        ("k", ["prefill"]),
        ("a", ["b1"]),
        ("k", ["b1"]),
    ]


def test_all_get_the_same_job() -> None:
    entries = {"k": entry("k", "kvik"), "a": entry("a", "vllm")}
    _, runs = compare(entries, 1, {name: always(1.0, 1) for name in entries})
    assert {(job.model, job.threads, job.started) for job in runs.jobs} == {
        ("/hub/story", 3, 123.0)
    }
    assert runs.jobs[0].workloads == runs.jobs[1].workloads == [WORKS[0]]


def test_ratios_are_taken_within_rounds() -> None:
    engines = {
        "k": Engine({"prefill": [30.0, 90.0, 60.0], "b1": [8.0, 8.0, 8.0]}, peak=7 << 20),
        "a": Engine({"prefill": [10.0, 60.0, 30.0], "b1": [2.0, 4.0, 8.0]}, peak=9 << 20),
        "b": Engine({"prefill": [40.0, 40.0, 40.0], "b1": [1.0, 1.0, 1.0]}),
    }
    entries = {"k": entry("k", "kvik"), "a": entry("a", "vllm"), "b": entry("b", "openvino")}
    result, _ = compare(entries, 3, engines)
    assert values(result, "k", "prefill") == (30.0, 90.0, 60.0)
    assert values(result, "a", "kvik / this, prefill") == (3.0, 1.5, 2.0)
    assert values(result, "a", "kvik / this, b1") == (4.0, 2.0, 1.0)
    assert values(result, "k", "kvik / this, b1") is None
    assert values(result, "k", "peak memory") == (7.0, 7.0, 7.0)
    assert values(result, "a", "start") == (0.5, 0.5, 0.5)
    assert result.remarks == (
        "prefill: k is 1.50 (0.75 to 2.25) times as fast as b, the best other bf16.",
        "b1: k is 2.00 (1.00 to 4.00) times as fast as a, the best other bf16.",
    )
    assert row(result, "a").facts == {"format": "bf16", "engine": "a 1.0"}
    assert [chart.y for chart in result.charts] == ["prefill", "b1"]


def test_only_engines_of_the_same_format_are_compared() -> None:
    entries = {
        "k4": entry("k4", "kvik", "int4"),
        "k": entry("k", "kvik"),
        "a": entry("a", "vllm", "int4"),
    }
    engines = {"k4": always(6.0, 1), "k": always(2.0, 1), "a": always(3.0, 1)}
    result, _ = compare(entries, 1, engines)
    assert [found.label for found in result.rows] == ["k4", "a", "k"]
    assert values(result, "a", "kvik / this, b1") == (2.0,)
    assert "bf16: no other engine to compare with." in result.remarks


def test_a_failure_is_a_line_and_is_not_retried() -> None:
    engines = {
        "k": always(6.0, 3),
        "a": Engine({"prefill": [3.0, ValueError("ran dry")], "b1": [1.0, 2.0, 3.0]}),
        "t": Engine({"prefill": [ValueError("no GPU"), 1.0, 1.0], "b1": []}),
    }
    entries = {
        "k": entry("k", "kvik"),
        "a": entry("a", "vllm"),
        "t": entry("t", "openvino", together=True),
    }
    result, runs = compare(entries, 3, engines, absent={"x-bf16": "is not installed"})
    assert runs.asked.count(("t", ["prefill", "b1"])) == 1
    assert row(result, "t").facts == {"format": "bf16", "failed": "prefill, b1: no GPU"}
    assert row(result, "t").figures == ()
    assert row(result, "a").facts["failed"] == "prefill: ran dry"
    assert values(result, "a", "prefill") == (3.0,)  # of the previous round
    assert values(result, "a", "kvik / this, prefill") == (2.0,)
    assert values(result, "a", "b1") == (1.0, 2.0, 3.0)
    assert values(result, "k", "b1") == (6.0, 6.0, 6.0)
    assert row(result, "x-bf16").facts == {"failed": "is not installed"}


def test_a_long_reason_is_in_full_below_the_table() -> None:
    entries = {"k": entry("k", "kvik"), "a": entry("a", "vllm")}
    broken = Engine({"prefill": [ValueError("x" * 300)], "b1": [ValueError("x" * 300)]})
    result, _ = compare(entries, 1, {"k": always(1.0, 1), "a": broken})
    assert len(row(result, "a").facts["failed"]) < 100
    assert [r for r in result.remarks if "failed" in r] == [f"a failed: {'x' * 300}"]


def test_when_kvik_fails_the_others_keep_their_figures() -> None:
    entries = {"k": entry("k", "kvik"), "a": entry("a", "vllm")}
    broken = Engine({"prefill": [ValueError("no")], "b1": [ValueError("no")]})
    result, _ = compare(entries, 1, {"k": broken, "a": always(5.0, 1)})
    assert values(result, "a", "b1") == (5.0,)
    assert values(result, "a", "kvik / this, b1") is None
    assert not [remark for remark in result.remarks if "times" in remark]


def test_answers_are_compared_token_by_token() -> None:
    ours = {"prefill": [[7]], "b1": [[1, 2, 3, 4]]}
    rates = {"prefill": [1.0], "b1": [1.0]}
    engines = {
        "k": Engine(rates, ours),
        "same": Engine(rates, ours),
        "other": Engine(rates, {"prefill": [[7]], "b1": [[1, 9, 3, 9]]}),
        "half": Engine(rates, {"b1": [[1, 2, 3, 9]]}),
        "silent": Engine(rates),
    }
    entries = {name: entry(name, "kvik" if name == "k" else "vllm") for name in engines}
    result, _ = compare(entries, 1, engines)
    assert values(result, "same", "equal tokens") == (100.0,)
    assert row(result, "same").facts["first difference"] == "none"
    assert values(result, "other", "equal tokens") == (60.0,)
    assert row(result, "other").facts["first difference"] == "b1 after 1 of 4"
    assert row(result, "other").series == {
        "tokens before the first difference, prefill": (1.0,),
        "tokens before the first difference, b1": (1.0,),
    }
    assert values(result, "half", "equal tokens") == (75.0,)
    assert values(result, "silent", "equal tokens") is None
    assert "first difference" not in row(result, "silent").facts
    assert [r for r in result.remarks if "in its own way" in r]


def test_an_interrupted_comparison_keeps_what_it_has() -> None:
    entries = {"k": entry("k", "kvik"), "a": entry("a", "vllm")}
    what, found = comparison(entries, 2), Found()
    runs = Runs({name: always(4.0, 2) for name in entries})

    def interrupted(entry: EngineEntry, job: Job, timeout: float) -> Outcome:
        if len(runs.asked) == 3:
            raise KeyboardInterrupt
        return runs(entry, job, timeout)

    with pytest.raises(KeyboardInterrupt):
        measure(what, found, interrupted, lambda line: None)
    result = to_result(what, found, {})
    assert values(result, "a", "kvik / this, prefill") == (1.0,)
    assert values(result, "a", "b1") is None


def test_places_and_first_differences() -> None:
    ours, theirs = [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 9, 6]]
    assert equal_places(ours, theirs) == (5, 6)
    assert first_differences(ours, theirs) == [3, 1]


def test_workloads_are_the_same_prompts_for_a_seed() -> None:
    def made(seed: int, names: tuple[str, ...] = ("prefill", "b8")) -> list[Workload]:
        return make_workloads(names, None, 64, 32000, seed)

    prefill, b8 = made(0)
    assert (prefill.prompt, prefill.batch, prefill.output, len(prefill.batches)) == (512, 1, 1, 5)
    assert (b8.prompt, b8.batch, b8.output, len(b8.batches)) == (128, 8, 64, 1)
    assert made(0) == [prefill, b8] != made(1)
    assert made(0, ("b8",)) == [b8]  # whatever else is measured
    assert b8.warm_up not in b8.batches
    assert all(0 <= token < 1000 for prompt in b8.warm_up for token in prompt)


def test_workloads_have_different_prompts() -> None:
    """Otherwise an engine that runs them in one process would have cache hits."""
    works = make_workloads(("prefill", "b1", "b4"), 16, 8, 32000, 0)
    prompts = [tuple(p) for work in works for rows in (work.warm_up, *work.batches) for p in rows]
    assert len(set(prompts)) == len(prompts)


def test_prompts_stay_within_a_small_vocabulary() -> None:
    (work,) = make_workloads(["b2"], 50, 2, 10, 0)
    assert {token for prompt in work.warm_up for token in prompt} == {*range(10)}
    assert (work.prompt, work.output) == (50, 2)


@pytest.mark.parametrize(
    ("names", "prompt", "output", "field"),
    [
        (["b0"], None, 4, "workloads"),
        (["c8"], None, 4, "workloads"),
        (["b99999"], None, 4, "workloads"),
        (["b1"], 0, 4, "prompt_tokens"),
        (["b1"], 4, 1, "output_tokens"),
    ],
)
def test_impossible_workloads_are_named(
    names: list[str], prompt: int | None, output: int, field: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        make_workloads(names, prompt, output, 1000, 0)
