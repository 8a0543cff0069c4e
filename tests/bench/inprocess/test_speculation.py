"""The report on speculation, on the bundled model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.drafters import METHOD, Scripted, always_right, install

from kvik.config.config import EngineConfig
from kvik.errors import ConfigError, ParamError
from kvik.launch import resolve_config
from kvik_bench.inprocess.inproc import Job, loaded, run_jobs
from kvik_bench.inprocess.rounds import Rounds
from kvik_bench.inprocess.speculation import SpeculationLoad, measure_speculation

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
JOBS = [Job([20, 21, 22], 13), Job([30, 31], 13)]


class Same:
    def jobs(self, number: int, count: int) -> list[Job]:
        return JOBS[:count]


LOAD = SpeculationLoad(Same(), (1, 2), 8, 13)


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
        # A token of the prompt's step, then three times three drafts and one more token.
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


def test_no_drafts_are_told(
    quiet: None, uncalibrated: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, lambda parts: Scripted(parts, [], always_right))
    load = replace(LOAD, batches=(1,))
    result = measure_speculation(PLAIN, GUESSING, load, Rounds(1, 0), {})
    (row,) = result.rows
    assert row.figure("acceptance") is None
    assert row.figure("drafts").values == (0,)  # type: ignore[union-attr]
    assert result.remarks == ("batch 1: no drafts were made, as none paid or none were found.",)


def test_two_engines_must_fit() -> None:
    memory = replace(PLAIN.memory, limit=PLAIN.memory.total + GUESSING.memory.total - 1)
    with pytest.raises(ConfigError, match="memory_utilization: must leave room for two engines"):
        measure_speculation(replace(PLAIN, memory=memory), GUESSING, LOAD, Rounds(1, 0), {})


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (replace(LOAD, batches=(3,)), "batch: must be in [1, 2] (max_num_seqs), not 3"),
        (replace(LOAD, output_tokens=1), "output_tokens: must be at least 2, not 1"),
        (replace(LOAD, prompt_tokens=60), "prompt_tokens: 60, and 13 of output, are more than"),
    ],
)
def test_what_cannot_be_served_is_refused(load: SpeculationLoad, message: str) -> None:
    with pytest.raises(ParamError) as error:
        load.check(PLAIN)
    assert str(error.value).startswith(message)
