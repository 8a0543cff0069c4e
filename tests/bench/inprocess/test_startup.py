"""Starts in fresh processes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvik.errors import KvikError
from kvik_bench.inprocess.startup import PARTS, start_once

OPTIONS = {"device": "cpu", "threads": 1, "max_num_seqs": 2, "max_model_len": 32}


@pytest.mark.full
def test_parts_add_up_to_the_time_of_the_first_token(uncalibrated: Path) -> None:
    started = time.monotonic()
    start = start_once(OPTIONS, [20, 21])
    seconds = time.monotonic() - started
    assert len(start.parts) == len(PARTS)
    assert all(part > 0 for part in start.parts)
    assert start.seconds <= seconds  # the rest is the end of the process
    assert start.peak_bytes > 50 << 20


def test_a_failing_process_is_reported_with_the_reason() -> None:
    with pytest.raises(KvikError, match="startup: the process failed: .*no folder"):
        start_once({**OPTIONS, "model": "/no/such/model"}, [20])
