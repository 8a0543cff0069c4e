"""Shared by the programs in benchmarks/: prompts, processes, and how figures are shown."""

from __future__ import annotations

import os
import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeVar

from kvik.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvik.engine.output import RequestOutput
    from kvik.llm import LLM
    from kvik.models.model_spec import ModelSpec

Answer = TypeVar("Answer")


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Return the median, and in brackets the lowest and the highest value."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def greedy(tokens: int) -> SamplingParams:
    """Return the parameters of answers of exactly `tokens` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def random_prompts(count: int, tokens: int, seed: int = 0) -> list[list[int]]:
    """Return token ids that are ordinary ones in any vocabulary: [count][tokens]."""
    rng = random.Random(seed)
    return [[rng.randrange(10, 1000) for _ in range(tokens)] for _ in range(count)]


def seconds_of(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> float:
    """Return the seconds in which greedy answers of `tokens` tokens are generated."""
    started = time.perf_counter()
    llm.generate(prompts, greedy(tokens), progress=False)
    return time.perf_counter() - started


def decoding_seconds(outputs: Sequence[RequestOutput]) -> float:
    """Return the seconds from when all requests had their first token until all had ended."""
    times = [output.metrics for output in outputs]
    return max(t.finished for t in times) - max(t.first_token or 0.0 for t in times)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a checkpoint in floats, by name."""
    declared = spec.declaration
    shapes: dict[str, tuple[int, ...]] = {}
    for table in declared.tables:
        shapes[f"{table.name}.weight"] = table.rows, table.width
    for linear in declared.linears:
        for layer, outputs in zip(linear.names, linear.outputs, strict=True):
            if not linear.tied:
                shapes[f"{layer}.weight"] = outputs, linear.inputs
            if linear.bias:
                shapes[f"{layer}.bias"] = (outputs,)
    for norm in declared.norms:
        shapes[f"{norm.name}.weight"] = (norm.size,)
    for other in declared.others:
        shapes[other.name] = other.shape or (other.num_parameters,)
    return shapes


def fresh_processes(call: Callable[..., Answer], *arguments: Sequence[object]) -> list[Answer]:
    """Return the answers of a function of the program, called with each of some arguments in a new
    Python process, all at the same time."""
    with ProcessPoolExecutor(len(arguments), get_context("spawn")) as pool:
        return list(pool.map(call, *zip(*arguments, strict=True)))


@contextmanager
def serving(*command: str, last: str = "ready\n") -> Iterator[tuple[int, int]]:
    """Run a command that prints its URL; yield its process id and its port.

    Args:
        last: end of the line after which it is ready.
    """
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = None
        try:
            for line in process.stdout:
                url = re.search(r"http://127\.0\.0\.1:(\d+)", line)
                port = int(url[1]) if url else port
                if line.endswith(last):
                    break
            else:
                raise SystemExit("the server did not start")
            assert port is not None
            yield process.pid, port
        finally:
            process.terminate()


def children(pid: int) -> list[int]:
    """Return the child processes of all threads of a process."""
    texts = (file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children"))
    return sorted(int(child) for text in texts for child in text.split())


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, over all cores."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def kibibytes(pid: int | str, name: str, file: str = "status") -> int:
    """Return a size of a process, such as VmRSS."""
    text = Path(f"/proc/{pid}/{file}").read_text()
    return int(text.split(f"\n{name}:")[1].split()[0])
