"""Resident memory of the KV cache: unused blocks occupy none, and under memory pressure free blocks
are returned to the system."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.optional_native import needs_native

from kvik import LLM, SamplingParams

pytestmark = [
    needs_native,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

POOL = 512 << 20  # bytes
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def resident() -> int:
    (line,) = [
        line
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
        if line.startswith("Rss:")
    ]
    return int(line.split()[1]) * 1024


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Set the memory that the system reports as available to the last value of the list."""
    left = [1 << 40]
    monkeypatch.setattr("kvik.engine.memory_watch.memory_left", lambda: left[-1])
    monkeypatch.setattr("kvik.engine.memory_watch.LOOK_SECONDS", 0.0)
    return left


@pytest.mark.full
def test_memory_of_blocks_comes_with_their_use_and_goes_under_pressure(system: list[int]) -> None:
    prompts = [[5 + (31 * i + j) % 900 for j in range(900)] for i in range(12)]
    with LLM(device="cpu", kv_cache_memory=POOL, max_model_len=1024, max_num_seqs=8) as llm:
        empty = resident()
        first = llm.generate(prompts, GREEDY, progress=False)
        full = resident()
        cached = llm.stats().cached_blocks
        assert full - empty < POOL  # most blocks were never used
        system.append(0)
        (again,) = llm.generate(prompts[:1], GREEDY, progress=False)
        stats = llm.stats()
        assert stats.given_back_blocks >= 0.9 * cached
        assert full - resident() > 0.5 * (full - empty)
        system.append(1 << 40)
        assert again.outputs[0].token_ids == first[0].outputs[0].token_ids
        repeated = llm.generate(prompts, GREEDY, progress=False)
        assert [r.outputs[0].token_ids for r in repeated] == [r.outputs[0].token_ids for r in first]
