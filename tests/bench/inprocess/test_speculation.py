"""The report on speculation, on the bundled model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.drafters import METHOD, Scripted, always_right, install

from kvik.config.config import EngineConfig
from kvik.core.types import DraftCounts
from kvik.engine.stats import EngineStats, SpeculationStats
from kvik.errors import ConfigError
from kvik.launch import resolve_config
from kvik_bench.inprocess.inproc import BenchRequest, LoadRun, loaded, run_jobs
from kvik_bench.inprocess.rounds import Rounds
from kvik_bench.inprocess.speculation import Pair, SpeculationLoad, measure_speculation
from kvik_bench.load.metrics import RequestRecord

CONFIG = EngineConfig(
    device="cpu", threads=1, max_num_seqs=2, max_model_len=64, enable_prefix_caching=False
)
PLAIN = resolve_config(CONFIG)
GUESSING = resolve_config(
    replace(
        CONFIG,
        spec_method=METHOD,
        spec_tokens=3,
        speculative_config={"adaptive": False},
    )
)
JOBS = [BenchRequest([20, 21, 22], 13), BenchRequest([30, 31], 13)]


LOAD = SpeculationLoad(lambda number, count: JOBS[:count], (1, 2), 8, 13)


def test_drafts_that_are_always_right(
    quiet: None, uncalibrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with loaded(PLAIN) as engine:
        answers = run_jobs(engine, [replace(job, output_tokens=20) for job in JOBS]).answers
    texts = [[*job.prompt, *answer] for job, answer in zip(JOBS, answers, strict=True)]
    install(monkeypatch, lambda parts: Scripted(parts, texts, always_right))
    result = measure_speculation(PLAIN, GUESSING, LOAD, Rounds(2, 1), {"date": "today"})
    assert result.title == "kvik spec-report"
    assert [row.label for row in result.rows] == ["batch 1", "batch 2"]
    assert result.facts["method"] == METHOD
    assert result.remarks == ()
    for batch, row in enumerate(result.rows, 1):
        found = {figure.name: figure.values for figure in row.figures}
        # A token from the prompt's step, then three times three drafts and one more token.
        assert found["drafts"] == found["accepted"] == (9 * batch, 9 * batch)
        assert found["acceptance"] == (100.0, 100.0)
        assert found["mean accepted length"] == (4.0, 4.0)
        assert found["equal tokens"] == (100.0, 100.0)
        assert found["right up to draft 3"] == (100.0, 100.0)
        assert "right up to draft 4" not in found
        without, ahead = found["decode without"], found["decode with"]
        assert found["speed-up"] == pytest.approx(
            [b / a for a, b in zip(without, ahead, strict=True)]
        )
        # All requests end in the same step, so the formula is exact.
        assert found["predicted"] == pytest.approx(found["speed-up"], rel=1e-6)


def test_a_run_without_drafts_is_reported(
    quiet: None, uncalibrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, lambda parts: Scripted(parts, [], always_right))
    load = replace(LOAD, batches=(1,))
    result = measure_speculation(PLAIN, GUESSING, load, Rounds(1, 0), {})
    (row,) = result.rows
    assert row.figure("acceptance") is None
    assert row.figure("drafts").values == (0,)
    assert result.remarks == ("batch 1: no drafts were made, as none paid or none were found.",)


def test_two_engines_must_fit() -> None:
    memory = replace(PLAIN.memory, limit=PLAIN.memory.total + GUESSING.memory.total - 1)
    with pytest.raises(ConfigError, match="memory_utilization: must leave room for two engines"):
        measure_speculation(replace(PLAIN, memory=memory), GUESSING, LOAD, Rounds(1, 0), {})


# Figures from two runs with known steps and times.


ZERO = EngineStats(0, 0, 0, 0.0, 100, 0, 0, 0, 0, 0, 0, 0)
TOKENS = 31  # one from the prompt's step, thirty decoded


def run(
    seconds: float, steps: int, stats: tuple[SpeculationStats, SpeculationStats] | None
) -> LoadRun:
    """One request, whose first token arrives after a second."""
    record = RequestRecord(8, 0.0, 0.0)
    record.chunk(1.0, 1)
    record.chunk(1.0 + seconds, TOKENS - 1)
    before, after = stats or (None, None)
    return LoadRun(
        0.0,
        1.0 + seconds,
        [record],
        [list(range(TOKENS))],
        replace(ZERO, steps=100, speculation=before),
        replace(ZERO, steps=100 + steps, speculation=after),
        0.0,
    )


def counts(*rows: tuple[int, int]) -> DraftCounts:
    """Count checks of (drafts, accepted)."""
    found = DraftCounts()
    for drafts, accepted in rows:
        found.add(drafts, accepted)
    return found


def pair(earlier: DraftCounts, later: DraftCounts, *, trees: bool = False) -> Pair:
    """Return a run of 30 steps of 0.1 s; and one with drafts of 12 in 2 s, of which 0.3 s for
    drafting."""
    stats = (
        SpeculationStats(earlier, proposing=5.0, seconds=7.0, plain_seconds=8.0),
        SpeculationStats(later, proposing=5.3, seconds=8.5, plain_seconds=11.0),
    )
    return Pair(run(3.0, 31, None), run(2.0, 13, stats), trees)


BEFORE = [(1, 1), (5, 2)]  # checks before the run do not count
ROWS = [(3, 3), (3, 3), (3, 3), (3, 3), (3, 2), (3, 2), (3, 1), (3, 1), (3, 0), (3, 0)]
PAIR = pair(counts(*BEFORE), counts(*BEFORE, *ROWS))


def test_only_drafts_of_the_run_count() -> None:
    assert PAIR.drafts == replace(counts(*ROWS), at=[10, 10, 10, 0, 0], accepted_at=[8, 6, 4, 0, 0])
    assert (PAIR.depth, PAIR.num_places) == (3.0, 3)
    assert PAIR.acceptance == pytest.approx(18 / (10 + 8 + 6))
    assert PAIR.decoded == 12
    assert PAIR.share == pytest.approx(10 / 12)
    assert PAIR.equal == 1.0


def test_costs_are_in_steps_without_speculation() -> None:
    assert PAIR.step_cost == pytest.approx(1.7 / 12 / 0.1)
    # 12 steps, 10 of which had 3 drafts each.
    assert PAIR.draft_cost == pytest.approx(0.3 / 30 / 0.1)
    assert PAIR.own_estimate == pytest.approx(3.0 / 1.5)


def test_the_prediction_is_the_formula() -> None:
    a = 18 / 24
    tokens = 2 / 12 + 10 / 12 * (1 + a + a**2 + a**3)
    assert PAIR.predicted == pytest.approx(tokens / (1.7 / 12 / 0.1 + 0.3 / 12 / 0.1))
    assert PAIR.if_free == pytest.approx(tokens / (1.0 + 0.3 / 12 / 0.1))
    # It is near the measurement.
    assert PAIR.predicted == pytest.approx(3.0 / 2.0, rel=0.1)


def test_drafts_of_a_tree() -> None:
    """Six nodes on two levels: only depth counts."""
    found = pair(counts(), counts((6, 2), (6, 1), (6, 0), (6, 2)), trees=True)
    assert (found.depth, found.num_places) == (2.0, 2)
    assert found.acceptance == pytest.approx(5 / (4 + 3))


def test_without_any_drafts() -> None:
    found = pair(counts(), counts())
    assert (found.share, found.depth, found.acceptance, found.draft_cost) == (0, 0, 0, 0)
    assert found.step_cost == pytest.approx(1.7 / 12 / 0.1)
    assert found.predicted == pytest.approx(1.0 / found.step_cost)


def test_varying_numbers_of_drafts() -> None:
    """If half of the checks had a second draft, half of those that reached it count."""
    found = pair(counts(), counts((1, 1), (1, 0), (2, 1), (2, 1)))
    a = found.acceptance
    assert a == pytest.approx(3 / (4 + 3 * 2 / 4))
    checks, steps = 4, found.decoded
    tokens = (2 * (1 + a) + 2 * (1 + a + a**2) + steps - checks) / steps  # each by the formula
    assert found.predicted == pytest.approx(tokens / (found.step_cost + 0.3 / 12 / 0.1))


def test_other_tokens_are_reported() -> None:
    other = replace(PAIR.guessing, answers=[[*range(TOKENS - 1), 99]])
    assert replace(PAIR, guessing=other).equal == pytest.approx(30 / 31)
