"""Time a fresh process to its first answer, with an 8B checkpoint in bf16 of random numbers, read
from files in memory; and the share of reading in it. The rest should be small, whatever the disk.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from math import prod
from pathlib import Path

import torch
from notes import Notes, read_notes
from place import DEVICE, sized
from shapes import SHAPES, write_config

from kvik.models.model_spec import ModelSpec
from kvik_bench.scripts import tensor_shapes

SHAPE = "8b"
IN_MEMORY = Path("/dev/shm")
NUMBERS = 1 << 28  # random numbers generated: tensors are slices of them
ENDS = 5.0  # seconds reserved to tidy up
LONGEST = sized(4096, 32)


def measure(notes: Notes) -> None:
    tensors = tensor_shapes(ModelSpec.from_config(dict(SHAPES[SHAPE]), SHAPE))
    size = 2 * sum(map(prod, tensors.values()))
    with tempfile.TemporaryDirectory(prefix="kvik-", dir=_room_for(size)) as name:
        folder = write_config(SHAPE, Path(name))
        _write(folder / "model.safetensors", tensors)
        found = folder / "found.jsonl"
        begun = time.monotonic()
        seconds = notes.left() - ENDS
        command = [sys.executable, str(Path(__file__).with_name("job.py")), "answer", "start"]
        command += ["answer", str(found), str(seconds), str(folder), str(begun)]
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment = {**os.environ, **path}
        done = subprocess.run(
            command, env=environment, timeout=seconds, capture_output=True, text=True, check=False
        )
        records = read_notes(found)
    print(done.stdout, done.stderr)
    if done.returncode:
        failed = [str(record["error"]) for record in records if record["kind"] == "failure"]
        raise RuntimeError(failed[0] if failed else f"it ended with {done.returncode}")
    for record in records:
        if record["kind"] == "fact":
            value = float(str(record["value"]))
            notes.fact(str(record["name"]), value, bytes=size, within=str(folder.parent))


def answer(notes: Notes, folder: str, begun: str) -> None:
    """Answer, in the timed process. begun: its start, on a clock that processes share."""
    imported = [time.monotonic()]
    from engine import Engine, answers

    from kvik.worker import worker

    imported.append(time.monotonic())

    load, reading = worker.load_share, []

    def timed(*arguments, **named):
        started = time.monotonic()
        network = load(*arguments, **named)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        reading.append(time.monotonic() - started)
        return network

    worker.load_share = timed
    engine = Engine.load(
        folder,
        dtype="bfloat16",
        device=DEVICE.type,
        load_format="safetensors",
        max_model_len=LONGEST,
        **sized({}, {"kv_cache_memory": 4 << 20, "max_num_seqs": 2}),
    )
    loaded = time.monotonic()
    if not answers(engine, [[1, 2, 3]], 1)[0]:
        raise RuntimeError("there is no answer")
    ended = time.monotonic()
    seconds = ended - float(begun)
    engine.close()
    notes.fact("first answer", seconds)
    ends = (float(begun), *imported, imported[-1] + reading[0], loaded, ended)
    parts = ("torch", "kvik", "weights", "others", "first step")
    for part, (start, end) in zip(parts, pairwise(ends), strict=True):
        notes.fact(f"first answer: {part} [s]", end - start)
    notes.fact("first answer: reading", reading[0] / seconds)


def _room_for(size: int) -> Path | None:
    """Return a folder in memory, or None for the usual temporary folder, on a disk.

    Raises:
        RuntimeError: neither has room.
    """
    for folder in (IN_MEMORY, None):
        place = Path(tempfile.gettempdir()) if folder is None else folder
        if place.is_dir() and shutil.disk_usage(place).free > 1.1 * size:
            return folder
    raise RuntimeError(f"no room for a checkpoint of {size / 1e9:.0f} GB")


def _write(file: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """Write the tensors, with random numbers as large as weights, the same ones in every tensor."""
    from kvik.nn.safetensors import write_safetensors

    count = max(map(prod, tensors.values()))
    drawn = torch.randn(min(count, NUMBERS), device=DEVICE).mul_(0.02).bfloat16().cpu()
    numbers = drawn.repeat(-(-count // len(drawn)))
    views = {name: numbers[: prod(size)].view(size) for name, size in tensors.items()}
    write_safetensors(file, views)
