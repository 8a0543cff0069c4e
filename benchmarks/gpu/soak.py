"""Whether memory grows: requests of all lengths come and go, now few, now many, for two minutes
where the budget allows it.

What the device's allocator has reserved after the first half must be all that it ever reserves.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

import torch
from engine import Engine, captured_sizes
from notes import Notes
from shapes import write_config

SECONDS = 120.0
PERIOD = 3.0  # seconds for which as many requests run
NUMBERS = (1, 256, 8, 64, 200, 3, 128)
LONGEST = 4096


def soak(notes: Notes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.load(
            str(write_config("1b", Path(folder))),
            dtype="bfloat16",
            device="cuda",
            load_format="random",
            max_model_len=LONGEST,
            max_num_seqs=256,
            kv_cache_memory=24 << 30,
        )
    draw = random.Random(0)
    seconds = min(SECONDS, notes.left() - 10)
    if seconds < 20:
        notes.missed("soak", "no time left")
        return
    started = time.monotonic()
    middle: tuple[int, int] | None = None
    running, served = 0, 0
    while (now := time.monotonic() - started) < seconds:
        wanted = NUMBERS[int(now / PERIOD) % len(NUMBERS)]
        while running < wanted:
            prompt = [draw.randrange(1000) for _ in range(draw.choice((5, 60, 700, 3000)))]
            engine.add(prompt, draw.choice((3, 40, 300)))
            running += 1
        ended = sum(delta.finish_reason is not None for delta in engine.step())
        running -= ended
        served += ended
        if middle is None and now > seconds / 2:
            middle = _memory(engine)
    end = _memory(engine)
    engine.close()
    assert middle is not None
    detail = (
        f"{seconds:.0f} s, {served} requests; reserved {middle[0] / 2**20:.0f} MiB at half time, "
        f"{end[0] / 2**20:.0f} at the end; {middle[1]} and {end[1]} sizes captured"
    )
    notes.check("memory does not grow", end[0] <= middle[0] and served > 0, detail, op="soak")


def _memory(engine: Engine) -> tuple[int, int]:
    """Bytes reserved, and the number of captured sizes, which take memory of their own."""
    return torch.cuda.memory_reserved(), len(captured_sizes(engine.runner.graph))
