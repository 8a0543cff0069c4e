"""Seconds from the start of a process to the first byte of its answer, in interleaved rounds.

    python benchmarks/startup.py MODEL [--gguf FILE --llama-python PYTHON] [--rounds 5]
    python benchmarks/startup.py MODEL --sleep

MODEL is a folder in Hugging Face format (`benchmarks/cpu/peers/shapes.py` writes one); FILE the
same model for llama.cpp, which runs if a Python with llama-cpp-python is given. Each round starts
every command once; files are in the page cache after the first round, which is not counted. `kvik
bench startup MODEL` breaks the time down. `--sleep` measures an engine that sleeps instead: the
seconds of a request that wakes it and of one when it is awake, and the memory of its process.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from kvik import AsyncLLM, SamplingParams

PROMPT = "Once upon a time there was a little dog who lived in a house by the sea"
LLAMA = f"""
import sys
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=4096, n_threads=int(sys.argv[2]), verbose=False)
for _ in llm({PROMPT!r}, max_tokens=1, temperature=0.0, stream=True):
    break
print("done", flush=True)
"""


def seconds(command: Sequence[str]) -> float:
    """Return the seconds from the start of a process to the first byte of its standard output."""
    started = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    ) as process:
        first = process.stdout.read(1)
        found = time.monotonic() - started
        process.stdout.read()
        said = process.stderr.read().decode(errors="replace")
    if process.returncode or not first:
        sys.exit(f"{' '.join(command)} failed: {said[-300:]}")
    return found


def kvik(model: str, *options: str) -> list[str]:
    command = [sys.executable, "-P", "-m", "kvik", "generate", *options]
    return [*command, "--max-tokens", "1", "--temperature", "0", model, PROMPT]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--gguf")
    parser.add_argument("--llama-python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp")
    parser.add_argument("--sleep", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.sleep:
            for name, place in (("as stored", None), ("engine cache", folder)):
                asyncio.run(measure_sleep(name, options.model, place, options.rounds))
            return
        cached, int8 = ("--engine-cache", folder), ("--quantization", "int8")
        commands: dict[str, list[str]] = {
            "import torch": [sys.executable, "-c", "import torch; print(1, flush=True)"],
            "bundled model": kvik(""),
            "as stored": kvik(options.model),
            "as stored, engine cache": kvik(options.model, *cached),
            "int8": kvik(options.model, *int8),
            "int8, engine cache": kvik(options.model, *int8, *cached),
        }
        if options.gguf and options.llama_python:
            arguments = ["-c", LLAMA, options.gguf, str(options.threads)]
            commands["llama.cpp"] = [options.llama_python, *arguments]
        measure(commands, options.rounds)


def measure(commands: Mapping[str, Sequence[str]], rounds: int) -> None:
    times: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(rounds + 1):
        for name, command in commands.items():
            found = seconds(command)
            if number:
                times[name].append(found)
    base = times["import torch"]
    print(f"{'':26}{'median':>8}{'least':>8}{'most':>8}   less importing torch, median")
    for name, found in times.items():
        rest = median(a - b for a, b in zip(found, base, strict=True))
        print(f"{name:26}{median(found):8.2f}{min(found):8.2f}{max(found):8.2f}{rest:11.2f}")


async def measure_sleep(name: str, model: str, cache: str | None, rounds: int) -> None:
    async with AsyncLLM(model, engine_cache=cache) as engine:
        (link,) = engine.client.links

        async def answer() -> float:
            started = time.monotonic()
            await engine.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=1)).result()
            return time.monotonic() - started

        awake, asleep, sizes = [], [], []
        for number in range(rounds + 1):
            found = await answer()
            memory = Path(f"/proc/{link.source.pid}/smaps_rollup").read_text()
            await engine.sleep()
            woken = await answer()
            if number:
                awake.append(found)
                asleep.append(woken)
                sizes.append(sum(map(int, re.findall(r"Pss_(?:Anon|File): +(\d+)", memory))))
        for state, times in (("awake", awake), ("asleep", asleep)):
            figures = f"{median(times):.3f} ({min(times):.3f} to {max(times):.3f}) s"
            print(f"{name}, {state}: {figures}", end="; ")
        print(f"memory while awake {median(sizes) / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
