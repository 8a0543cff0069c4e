"""The jobs, their order and their time budgets: one call measures every bar.

`BARS` are the jobs for the bars, most important first; their budgets and grace times fit into
`TOTAL`. `BEYOND` runs after them, as far as time allows: more time is left than the budgets
suggest, as most jobs take less than their budget. A job whose remaining time is too short for any
result is skipped, so that a shorter one after it may run.

The budgets were estimated from the parts of a job (below, in seconds), for a GPU of 4.3 TB/s and 16
CPU cores. After a call on an H200 (2026-11-27), those of bars were lowered so that each job took at
most 0.8 of its budget.

    a process: Python, torch and a context on the device                 6 (a first one 10)
    a kernel compiled, on one core                                       0.3 to 3, on average 1
    a kernel found in Triton's compile cache                             0.02
    random 8B weights on the device: 16 GB, in fp32 first                3; rounded to int4 8
    one batch size captured                                              0.3; all 35, 10 at most
    a part that times decodes: its prompts are skipped in 1 to 64 steps,
      then warm up 0.5, time 0.7                                         2 to 3
      64 x 32k and 256 x 8k: in 256 steps; 256 x 32k: in 1024            6; 14
    a prompt of 8k, 8B: 133 TFLOP at 500 TFLOP/s                         0.3, five of them 1.5
    the profiler: begins 2, ends 1                                       5
    256 requests at once: 64k tokens of prompts 2.5, 64 steps of 15 ms   3.5, twice 7

Checks: kernel_cases.py compiles about 330 variants in each of three dtypes (counted), attention
288, each in 1 to 3 s: 1700 seconds of a core. One call has time for most of bf16;
`--only correctness --stretch 4` gives 300 s. Cases that are known to share a kernel run in one
process, so that it is compiled once, and there are no more processes than cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, product

TOTAL = 540.0  # seconds
GRACE = 5.0  # seconds that a job may take beyond its budget, before it is stopped
LEAST = 8.0  # seconds a job needs to be started: importing torch takes that long
CASE_PARTS, ATTENTION_PARTS = 8, 4  # processes that compile kernels at the same time


@dataclass(frozen=True, slots=True)
class Job:
    """A function of a module of this folder, called with `Notes` and the arguments.

    Attributes:
        seconds: its budget.
        together: neighbours with the same name here run at the same time; they time nothing.
        needs: seconds that must be left to start it.
        always: it runs whichever sections were asked for.
    """

    name: str
    section: str
    module: str
    function: str
    seconds: float
    arguments: tuple[str, ...] = ()
    needs: float = LEAST
    together: str = ""
    always: bool = False


def _warm_ups() -> tuple[Job, ...]:
    """Return what compiles the kernels of timed jobs, on all cores."""

    def of(name: str, section: str, function: str, *arguments: str) -> Job:
        return Job(name, section, "warm", function, 75, arguments, together="warm-ups")

    formats = ("bf16", "int4", "fp8", "fp8, tokens too", "fp8, blocks", "fp8, one scale")
    formats += ("int8", "int8, tokens too")
    models = (("8b", "bf16"), ("8b", "int4"), ("8b", "fp8"), ("1b", "bf16"))
    return (
        *(of(f"warm {' '.join(pair)}", "engine", "engine", *pair) for pair in models),
        *(of(f"warm {format}", "kernels", "products", format) for format in formats),
        of("warm attention", "kernels", "attention"),
        of("warm others", "kernels", "small"),
    )


def _checks() -> tuple[Job, ...]:
    """Return the checks of kernels."""

    def of(name: str, function: str, *arguments: str) -> Job:
        return Job(name, "correctness", "correctness", function, 75, arguments, together="checks")

    parts = (("cases", CASE_PARTS), ("attention", ATTENTION_PARTS))
    return (
        of("tokens", "tokens"),
        *(
            of(f"{name} {i}", name, str(i), str(count))
            for name, count in parts
            for i in range(count)
        ),
        of("tests", "tests"),
    )


def _invariance() -> tuple[Job, ...]:
    """Return the matrix of tests/invariance, in two processes for each of its models."""
    pairs = product(("bundled", "windowed", "capped", "chunked"), ("columns", "variants"))
    return tuple(
        Job(
            f"invariance {model} {kind}",
            "invariance",
            "invariance",
            "measure",
            100,
            (model, kind),
            needs=30,
            together="invariance",
        )
        for model, kind in pairs
    )


def _model(shape: str, format: str, seconds: float) -> Job:
    """Return a model's job. It needs: a process 6, the model 3 to 8, captures 10, one part 3."""
    return Job(f"{shape} {format}", "engine", "models", "measure", seconds, (shape, format), 27)


BARS = (
    # A first process 10; copy and read 2, three products of 8192 3 x 1.5, nvidia-smi 2.
    Job("ceilings", "facts", "ceilings", "measure", 30, always=True),
    *_warm_ups(),
    # For its bars: 6 + 3, captures 10, 1 x 1k 3, prefill 3, busy 6, load 8, torch's prefill 3, two
    # decodes 6.5, busy at 32 6: 54.5. Then others.
    _model("8b", "bf16", 55),
    # 6; both bars first: 64 random caches of 8k 0.5, timed 0.3; then 12 more of 1 to 2.
    Job("attention kernels", "kernels", "kernels_attention", "measure", 25, needs=12),
    # 6 + 8, captures 10, 1 x 1k 3: 27.
    _model("8b", "int4", 50),
    # A process 6 and transformers 4, its weights 3, both caches 2. A step of 256 requests attends
    # to the keys of all of them under a mask, 4 * 256 * 74k * 4096 operations of 32 layers at 100
    # TFLOP/s: 0.1, times 64; 9 steps with 8k tokens of prompts 1 each: 16. Doubled, as this is the
    # least certain estimate.
    Job("transformers in batches", "peers", "peers", "batches", 60, needs=30),
    # 16 GB written to memory at 2 GB/s: 8. A process that reads them, 6 + 8, and answers, 2.
    Job("first answer", "start", "start", "measure", 40, needs=25),
    # 6 + 2, captures for 8 at most, then the remaining time except for tidying up.
    Job("soak", "memory", "soak", "soak", 45, needs=38),
    *_checks(),
)
BEYOND = (
    # 6; 40 layers of 0.2 to 1 (mostly generating and rounding the weights).
    Job("products", "kernels", "kernels_linear", "measure", 45, needs=15),
    # 6; 20 pairs of at most 0.2, cuDNN's plans 0.1 each, 5 kernels compiled.
    Job("prompts", "kernels", "prompts", "measure", 30, needs=12),
    _model("8b", "fp8", 40),
    # Dynamo and Inductor take 60 to 100 for 32 layers; a token 8 ms, five answers of 64.
    Job("transformers compiled", "peers", "peers", "compiled", 130, needs=80),
    Job("other kernels", "kernels", "kernels_small", "measure", 30, needs=12),
    _model("1b", "bf16", 30),
    _model("0.5b", "bf16", 30),
    Job("1b drafts", "engine", "drafts", "measure", 40, ("1b",), needs=25),
    *(_model(shape, format, 30) for shape in ("1b", "0.5b") for format in ("int4", "fp8")),
    # 6; three engines of 8B 5 each, with 8 GiB pinned 2 each; 12 prompts of 0.3, twice, loads 0.05;
    # 256 requests 4, twice, and once more without tiers.
    Job("tiers", "engine", "tiers", "measure", 60, needs=40),
    # A process 6, the reference on the CPU 5, 30 to 60 kernels, and 40 to 60 engines of 1 each.
    *_invariance(),
    # The server 10, idle 30; three rates and the most users 10 each, with their last answers 15.
    Job("served", "server", "served", "measure", 100, needs=60),
)
JOBS = (*BARS, *BEYOND)
SECTIONS = tuple(dict.fromkeys(job.section for job in JOBS))


def groups(jobs: Sequence[Job]) -> list[list[Job]]:
    """Return the jobs in groups that run at the same time; the groups run one after another."""
    return [list(some) for _, some in groupby(jobs, lambda job: job.together or job.name)]
