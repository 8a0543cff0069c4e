"""llama.cpp through its own `llama-batched-bench`. The model is a GGUF file.

Options: `bench`, the path of that program; `args`, more arguments for it.
The program times prompts and outputs separately, and does not sample: it uses random ids as
outputs. So its times lack the search for the best token, which favours it slightly, and it has no
tokens to compare.
"""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

from .protocol import WARM_UP, Answer, EngineFailure, Job


def bench(job: Job, batch: int, prompt: int, outputs: list[int]) -> list[dict[str, Any]]:
    """Run the program once for each number of output tokens; return the figures of each."""
    if "bench" not in job.options:
        raise EngineFailure('options.bench must be the path of "llama-batched-bench"')
    command = [job.options["bench"], "--model", job.model, "--output-format", "jsonl"]
    command += ["--threads", str(job.threads), "--ctx-size", str(batch * job.max_len)]
    command += ["-npp", str(prompt), "-ntg", ",".join(map(str, outputs))]
    command += ["-npl", str(batch), *job.options.get("args", [])]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        reason = "; ".join(done.stderr.splitlines()[-2:])
        raise EngineFailure(f"llama-batched-bench ended with {done.returncode}: {reason}")
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(lines) != len(outputs):
        raise EngineFailure(f"llama-batched-bench gave {len(lines)} results, not {len(outputs)}")
    return lines


def run(job: Job) -> Answer:
    bench(job, 1, 1, [1])
    answer = Answer("llama-batched-bench", time.time() - job.started)
    for work in job.workloads:
        # The prompt's last position yields the first token, so one output fewer remains.
        outputs = [max(work.output - 1, 1)] * len(work.batches)
        _, *runs = bench(job, work.batch, work.prompt, [WARM_UP, *outputs])
        figure = "speed_pp" if work.output == 1 else "speed_tg"
        answer.rates[work.name] = [run[figure] for run in runs]
    return answer
