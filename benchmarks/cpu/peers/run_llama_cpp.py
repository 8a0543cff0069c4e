"""llama.cpp through its own `llama-batched-bench`.

Options: `bench`, the path of that program; `args`, more arguments for it.
The program times prompts and outputs apart, and does not sample: random ids take the place of the
tokens it would choose. So its times lack the search of the best token, which favours it a little.
"""

from __future__ import annotations

import json
import subprocess
import time
from statistics import median

from adapter import WARM_UP, Job, Workload, answer, read_job


def bench(job: Job, work: Workload, outputs: list[int]) -> list[dict]:
    """Run `work` once for each number of output tokens; the figures of each run."""
    command = [job.options["bench"], "--model", job.model, "--output-format", "jsonl"]
    command += ["--threads", str(job.threads), "--ctx-size", str(work.batch * job.max_len)]
    command += ["-npp", str(work.prompt), "-ntg", ",".join(map(str, outputs))]
    command += ["-npl", str(work.batch), *job.options.get("args", [])]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    if len(lines) != len(outputs):
        raise SystemExit(f"{work.name}: {len(lines)} results for {len(outputs)} runs")
    return lines


def main() -> None:
    job = read_job()
    bench(job, Workload("ready", 1, 1, 1), [1])
    ready = time.time() - job.started
    rates = {}
    for work in job.workloads:
        # The prompt's last position yields the first token: one output fewer is left to make.
        outputs = [max(work.output - 1, 1)] * work.repeats
        _, *runs = bench(job, work, [WARM_UP, *outputs])
        figure = "speed_pp" if work.output == 1 else "speed_tg"
        rates[work.name] = median(run[figure] for run in runs)
    answer(ready, rates)


if __name__ == "__main__":
    main()
