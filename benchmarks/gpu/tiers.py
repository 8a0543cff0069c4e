"""Compare prompts whose KV blocks are loaded from the host's memory, or from its disk, with ones
that are computed; and the same requests with tiers and without, which shows what storing costs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch
from engine import Engine, answers
from notes import Notes
from place import DEVICE, REHEARSED, sized
from shapes import write_config

PROMPT, TIMES = sized((8192, 5), (64, 2))
BLOCK = 16
REQUESTS, ANSWER = sized((256, 128), (2, 3))
MEMORY = sized("8GiB", "1MiB")
COPIED = sized(1 << 30, 1 << 16)  # bytes of a plain copy


def measure(notes: Notes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_config("8b", Path(folder) / "model"))
        for tier in (f"memory:{MEMORY}", f"disk:{Path(folder) / 'kv'}:{MEMORY}"):
            name = tier.partition(":")[0]
            notes.attempt(f"prompts from {name}", partial(first, notes, model, name, tier))
        notes.attempt("stores", partial(stores, notes, model))
    if not REHEARSED:
        notes.attempt("bus", partial(bus, notes))


def loaded(model: str, blocks: int, **options: object) -> Engine:
    return Engine.load(
        model,
        dtype="bfloat16",
        device=DEVICE.type,
        load_format="random",
        max_model_len=PROMPT + 2 * BLOCK,
        max_num_seqs=REQUESTS,
        num_blocks=blocks,
        block_size=BLOCK,
        **options,
    )


def first(notes: Notes, model: str, name: str, tiers: str) -> None:
    """Time prompts until their first token, alternately new ones and ones that left the cache."""
    engine = loaded(model, PROMPT // BLOCK + 2, kv_tiers=tiers)
    prompts = [[3 + i] * PROMPT for i in range(TIMES)]
    times: list[list[float]] = [[], []]
    answers(engine, [[1] * PROMPT], 1)  # compiles and captures
    for i, prompt in enumerate(prompts):
        times[0].append(_seconds(engine, prompt))
        if i:  # the one before left the cache for this one
            times[1].append(_seconds(engine, prompts[i - 1]))
    moves = engine.loop.stats().moves
    engine.close()
    assert moves is not None and moves.totals.loaded_tokens, "nothing was loaded"
    computed, from_tier = (median(each[1:] or each) for each in times)
    rate = next(tier.bytes_per_second for tier in moves.tiers if tier.name == name) or 0.0
    detail = {"computed": computed, "loaded": from_tier, "bytes_per_second": rate}
    notes.fact(f"computed over loaded from {name}", computed / from_tier, times=times, **detail)


def _seconds(engine: Engine, prompt: Sequence[int]) -> float:
    started = time.perf_counter()
    answers(engine, [prompt], 1)
    return time.perf_counter() - started


def stores(notes: Notes, model: str) -> None:
    """Time requests that share nothing, while full blocks are stored and without tiers."""
    seconds: dict[bool, float] = {}
    for tiered in (False, True):
        options = {"kv_tiers": f"memory:{MEMORY}"} if tiered else {}
        engine = loaded(model, REQUESTS * (256 + ANSWER) // BLOCK + 64, **options)
        prompts = [[i % 97 + 3, i // 97 + 3] * sized(64, 8) for i in range(REQUESTS)]
        answers(engine, [prompt[1:] for prompt in prompts], sized(4, 1))
        started = time.perf_counter()
        answers(engine, prompts, ANSWER)
        seconds[tiered] = time.perf_counter() - started
        engine.close()
    notes.fact("throughput with the memory tier over without", seconds[False] / seconds[True])


def bus(notes: Notes) -> None:
    """Time plain copies to and from pinned memory: the ceiling of all tiers."""
    host = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(COPIED, dtype=torch.uint8, device=DEVICE)
    for name, target, source in (("to", device, host), ("from", host, device)):
        seconds = []
        for _ in range(5):
            torch.cuda.synchronize()
            started = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        notes.fact(f"bytes per second {name} the GPU", COPIED / median(seconds))
