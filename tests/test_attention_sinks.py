"""Texts without an end: fluent far beyond the window, in memory that stays."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.optional_native import needs_native

from kvik import LLM, SamplingParams
from kvik.config.model_source import BUNDLED

pytestmark = [needs_native, pytest.mark.full]

TEXT = (BUNDLED.parent / "calibration" / "text.txt").read_text(encoding="utf-8")
SINKS, WINDOW, SEGMENTS = 4, 252, 21
SIZE = SINKS + WINDOW


def perplexities(texts: int, segments: int, **options: Any) -> list[float]:
    """Of the segments of texts, each of as many tokens as are seen."""
    length = segments * SIZE
    with LLM(device="cpu", threads=1, max_num_seqs=1, max_model_len=length, **options) as llm:
        ids = llm.tokenizer.encode(TEXT)
        sums = [0.0] * segments
        for i in range(texts):
            text = ids[i * SEGMENTS * SIZE :][:length]
            output = llm.generate(text, SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
            assert output.prompt_logprobs is not None
            for place, one in enumerate(output.prompt_logprobs):
                sums[place // SIZE] += one.logprob if one is not None else 0.0
    return [math.exp(-total / texts / SIZE) for total in sums]


def test_perplexity_stays_over_twenty_times_what_is_seen(tmp_path: Path) -> None:
    found = perplexities(9, SEGMENTS, attention_sinks=SINKS, window=WINDOW)
    assert found[-1] <= 1.05 * found[1]
    for file in BUNDLED.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((BUNDLED / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    longer = {**config, "max_position_embeddings": 10 * SIZE}
    (tmp_path / "config.json").write_text(json.dumps(longer))
    dense = perplexities(3, 10, model=str(tmp_path))
    assert dense[-1] > 1.5 * dense[1]  # trained for four segments


STREAM = """
import sys
from kvik import LLM, SamplingParams
def resident():
    return int(open("/proc/self/statm").read().split()[1])
first, last = int(sys.argv[1]), int(sys.argv[2])
with LLM(device="cpu", threads=1, max_num_seqs=1, attention_sinks=4, window=60) as llm:
    assert llm.resolved.scheduler.max_model_len == 1 << 20
    params = SamplingParams(temperature=0.8, seed=1, ignore_eos=True, max_tokens=last + 1)
    stream, count, begin, end = llm.stream("Once upon a time", params), 0, 0, 0
    for delta in stream:
        count += len(delta.token_ids)
        begin = resident() if count == first else begin
        end = resident() if count == last else end
    stats = llm.stats()
    (output,) = stream.output.outputs
    assert len(output.token_ids) == last + 1 and stats.num_blocks <= 5 + 2048 // 16 + 2, stats
    text = llm.tokenizer.decode(output.token_ids)
    assert output.text.strip() == text.strip(), (output.text[-80:], text[-80:])
    print(end / begin - 1)
"""


def grown(first: int, last: int) -> float:
    """By how much of itself resident memory grew from one number of tokens to another."""
    run = [sys.executable, "-c", STREAM, str(first), str(last)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stream_far_beyond_the_trained_length_takes_no_more_memory() -> None:
    assert grown(4_000, 16_000) < 0.01


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_hundred_thousand_tokens_take_no_more_memory() -> None:
    assert grown(10_000, 200_000) < 0.01
