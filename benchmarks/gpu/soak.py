"""Check that memory does not grow: requests of all lengths come and go, sometimes few, sometimes
many, for ten minutes if the budget allows. A call that runs everything has half a minute for it.

After the first half, the device's allocator must not reserve any more memory.
"""

from __future__ import annotations

import random
import time

import torch
from engine import Engine, captured_sizes
from notes import Notes
from place import REHEARSED, sized

SECONDS, LEAST = sized((600.0, 15), (2.0, 0))
CAPTURING = sized(10.0, 0.0)  # most seconds for captures before requests arrive
PERIOD = sized(1.5, 1.0)  # seconds with the same number of requests
NUMBERS = sized((1, 256, 8, 64, 200, 3, 128), (1, 2))
PROMPTS, ANSWERS = sized(((5, 60, 700, 3000), (3, 40, 300)), ((5, 20), (2, 3)))
LONGEST, SEQS = sized((4096, 256), (32, 2))
CACHE = sized(24 << 30, 1 << 20)  # bytes of the KV cache


def soak(notes: Notes) -> None:
    sizes = {"max_model_len": LONGEST, "max_num_seqs": SEQS, "kv_cache_memory": CACHE}
    engine = Engine.random("1b", **sizes)
    ends = time.monotonic() + CAPTURING
    while engine.loop.idle_step() and time.monotonic() < ends:
        pass  # captures after half time would look like growth
    draw = random.Random(0)
    seconds = min(SECONDS, notes.left() - 4)
    if seconds < LEAST:
        notes.missed("soak", "no time left")
        return
    started = time.monotonic()
    middle: tuple[int, int] | None = None
    running, served = 0, 0
    while (now := time.monotonic() - started) < seconds or middle is None:
        wanted = NUMBERS[int(now / PERIOD) % len(NUMBERS)]
        while running < wanted:
            prompt = [draw.randrange(100) for _ in range(draw.choice(PROMPTS))]
            engine.add(prompt, draw.choice(ANSWERS))
            running += 1
        ended = sum(delta.finish_reason is not None for delta in engine.step())
        running -= ended
        served += ended
        if middle is None and now > seconds / 2:
            middle = _memory(engine)
    end = _memory(engine)
    engine.close()
    detail = (
        f"{seconds:.0f} s, {served} requests; reserved {middle[0] / 2**20:.0f} MiB at half time, "
        f"{end[0] / 2**20:.0f} at the end; {middle[1]} and {end[1]} sizes captured"
    )
    notes.check(
        "memory does not grow", end[0] <= middle[0] and (served > 0 or REHEARSED), detail, op="soak"
    )


def _memory(engine: Engine) -> tuple[int, int]:
    """Return the bytes reserved, and the number of captured sizes, which take memory too."""
    reserved = 0 if REHEARSED else torch.cuda.memory_reserved()
    return reserved, len(captured_sizes(engine.runner.graph))
