"""Measure the HTTP server on this GPU: the time to the first token and between tokens of requests
that arrive at random moments (Poisson), at several rates, and the highest throughput.

`kvik serve` runs in processes of its own, with random weights. The client is the load generator of
`kvik bench serve`. Prompts are random token ids, so the prefix cache has none of them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import urlopen

from notes import Notes
from place import DEVICE, VARIABLE, sized
from shapes import SHAPES, write_config

if TYPE_CHECKING:
    from kvik_bench.load.drive import Level

NEEDED = ("aiohttp", "httptools", "jinja2", "msgspec", "prometheus_client", "starlette", "uvicorn")
SHAPE = "8b"
RATES, USERS = sized(((5, 20, 50), 256), ((20,), 2))  # requests/s; at once, for the throughput
PROMPT, ANSWER = sized((512, 128), (8, 4))  # tokens
SECONDS = sized(10.0, 0.3)  # of each load; answers are awaited after it
LOADS = 60.0  # seconds of all loads; before them the engine is idle, and prepares for requests
SEQS = sized(256, 4)
PAUSE = 0.1  # seconds between two attempts to reach the server
ENDS = 10.0  # seconds in which the server should stop


def measure(notes: Notes) -> None:
    missing = [name for name in (*NEEDED, "uvloop") if find_spec(name) is None]
    if missing:
        notes.missed("served", f"needs {', '.join(missing)}")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(SHAPE, Path(name))
        write_tokenizer(folder, int(str(SHAPES[SHAPE]["vocab_size"])))
        with serving(folder, notes) as url:
            time.sleep(sized(max(0.0, notes.left() - LOADS), 0.0))
            for rate in RATES:
                notes.attempt(f"{rate}/s", partial(_open_load, notes, url, rate), SECONDS + 5)
            notes.attempt("peak", partial(_closed_load, notes, url), SECONDS + 5)


@contextmanager
def serving(folder: Path, notes: Notes) -> Iterator[str]:
    """Start a server, and yield its URL once it is ready; stop it afterwards.

    Raises:
        RuntimeError: it ended, or is not ready in time.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    options = {
        "port": port,
        "dtype": "bfloat16",
        "device": DEVICE.type,
        "max-model-len": 2 * (PROMPT + ANSWER),
        "max-num-seqs": SEQS,
        "log-level": "warning",
        **sized({}, {"kv-cache-memory": 4 << 20}),
    }
    command = [sys.executable, "-m", "kvik", "serve", str(folder)]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment = {**os.environ, **path, "KVIK_LOAD_FORMAT": "random"}
    environment.pop(VARIABLE, None)  # kvik refuses variables that it does not know
    started = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    try:
        while not _is_ready(url):
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with {process.returncode}")
            if notes.left() < SECONDS:
                raise RuntimeError("the server was not ready in time")
            time.sleep(PAUSE)
        notes.fact("server ready", time.monotonic() - started)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(ENDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_ready(url: str) -> bool:
    with suppress(URLError, OSError), urlopen(f"{url}/health", timeout=5) as answer:
        return answer.status == 200
    return False


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer of `vocab` tokens, each with a text, so that each makes an event."""
    from tokenizers import Tokenizer, decoders, models

    tokens = {f"\u0120{i}": i for i in range(vocab)}  # a space, in the alphabet of ByteLevel
    library = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    library.decoder = decoders.ByteLevel()
    library.save(str(folder / "tokenizer.json"))


def _open_load(notes: Notes, url: str, rate: int) -> None:
    from kvik_bench.load.drive import Level, OpenLoop
    from kvik_bench.load.workload import poisson

    level = Level(f"{rate}/s", SEQS * 4, lambda seed: OpenLoop(poisson(rate, seed), SEQS * 4))
    _note(notes, url, level)


def _closed_load(notes: Notes, url: str) -> None:
    from kvik_bench.load.drive import ClosedLoop, Level

    _note(notes, url, Level("peak", USERS, lambda seed: ClosedLoop(USERS)))


def _note(notes: Notes, url: str, level: Level) -> None:
    """Run a load, and note its figures."""
    import numpy as np

    from kvik_bench.load.drive import Budget, LoadTest
    from kvik_bench.load.metrics import OUTPUT, gaps, token_times, ttfts
    from kvik_bench.load.openai_target import TargetServer
    from kvik_bench.load.serve import ServeBench, remarks
    from kvik_bench.load.workload import DrawnLengths, Length, RandomWorkload, TokenFiller

    prompt, answer = Length("fixed", PROMPT), Length("fixed", ANSWER)
    filler = TokenFiller(int(str(SHAPES[SHAPE]["vocab_size"])))

    def workload(seed: str) -> RandomWorkload:
        return RandomWorkload(DrawnLengths(prompt, answer, seed), filler, seed)

    test = LoadTest((level,), workload, Budget(duration=SECONDS))
    bench = ServeBench(test, TargetServer(url, "completions", ""))
    asyncio.run(asyncio.wait_for(bench.run(), notes.left()))
    (log,) = bench.logs[level.label]
    for remark in remarks(level.label, [log], fresh=True):
        print(remark, flush=True)
    done = [record for record in log.records if record.completed]
    each, between = token_times(done), gaps(done)
    for name, seconds in (("ttft", ttfts(done)), ("token", each if len(each) else between)):
        for share in (50, 99) if len(seconds) else ():
            value = float(np.percentile(seconds, share))
            notes.fact(f"{name} p{share} at {level.label}", value)
    total, errors = len(log.records), Counter(record.error for record in log.records)
    failed = total - errors.pop(None, 0)
    notes.fact(f"tokens at {level.label}", OUTPUT.of(log), failed=failed, of=total)
    if failed:
        raise RuntimeError(f"{failed} of {total} requests failed: {dict(errors)}")
