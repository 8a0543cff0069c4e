"""What a decoding step costs outside the model: scheduling, inputs, bookkeeping, text.

    python benchmarks/step_overhead.py [--num-seqs 256] [--contexts 100 1000 10000]

The engine is the real one but for the forward, whose logits are constant. All requests
decode greedily, so that sampling is one pass over the logits: shown, but as arithmetic not summed.
The cost per step should not depend on how long the requests are. Every part is timed in every step:
median microseconds, and the 10th and 90th percentile of the sum.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import median, quantiles
from types import SimpleNamespace

import torch

from kvik.config.config import (
    CacheConfig,
    MemoryPlan,
    ResolvedConfig,
    RunnerConfig,
    SchedulerConfig,
)
from kvik.config.kv_spec import KVCacheSpec, KVKind, group_layers
from kvik.config.model_source import find_model
from kvik.config.model_spec import read_model_spec
from kvik.core.plan import ModelRunnerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest
from kvik.engine.core import EngineCore
from kvik.engine.output import OutputProcessor
from kvik.kernels.select import select as select_ops
from kvik.text.tokenizer import Tokenizer
from kvik.worker import model_runner
from kvik.worker.graphs import StepOutput
from kvik.worker.input_batch import InputBatch
from kvik.worker.model_runner import ModelRunner
from kvik.worker.request_table import RequestTable
from kvik.worker.sampling_table import SamplingTable
from kvik.worker.step_inputs import FreshInputs

BLOCK_SIZE = 16
CPU = torch.device("cpu")


class Constant:
    """A forward that takes no time: what is left is the cost of everything around it."""

    def __init__(self, vocab_size: int, num_seqs: int) -> None:
        self._logits = torch.zeros(num_seqs, vocab_size)
        self._logits[:, 300] = 1.0  # an ordinary token
        self._top, self._top_ids = self._logits.max(-1)

    def run(self, batch: InputBatch) -> StepOutput:
        rows = len(batch.logits_indices)
        return StepOutput(
            torch.empty(0), self._logits[:rows], self._top[:rows], self._top_ids[:rows]
        )


class Stopwatch:
    """Microseconds of each part of each step."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    def wrap(self, name: str, call: Callable) -> Callable:
        def timed(*args):
            started = time.perf_counter()
            result = call(*args)
            self.times[name].append((time.perf_counter() - started) * 1e6)
            return result

        return timed


def make_engine(num_seqs: int, context: int, steps: int) -> tuple[EngineCore, ModelRunner]:
    """An engine whose only KV group has one tiny layer."""
    length = context + steps + 2
    spec = replace(read_model_spec(find_model("")), eos_token_ids=())
    groups = group_layers([KVCacheSpec(KVKind.FULL, 1, 16, 128)])
    num_blocks = num_seqs * (length // BLOCK_SIZE + 1) + 1
    config = ResolvedConfig(
        model=spec,
        cache=CacheConfig(BLOCK_SIZE, num_blocks, groups),
        scheduler=SchedulerConfig(num_seqs, num_seqs * context, length, max_queued_tokens=1 << 40),
        runner=RunnerConfig("", "float32", "cpu", "sdpa", 1),
        memory=MemoryPlan(0, 0, 0, 0, 0),
        seed=0,
        decisions=(),
    )
    network = SimpleNamespace(ops=select_ops(CPU))  # no blocks are copied, no prompt is scored
    runner = ModelRunner(
        network=network,
        graph=Constant(spec.vocab_size, num_seqs),
        inputs=FreshInputs(CPU),
        table=RequestTable(num_seqs, length, 1, BLOCK_SIZE),
        sampling=SamplingTable(num_seqs, spec.vocab_size, CPU),
        device=CPU,
        clock=time.perf_counter,
    )
    return EngineCore(config), runner


def measure(num_seqs: int, context: int, steps: int) -> dict[str, list[float]]:
    core, runner = make_engine(num_seqs, context, steps)
    processor = OutputProcessor(Tokenizer.load(find_model("")))
    params = SamplingParams(temperature=0.0, max_tokens=None)
    for i in range(num_seqs):
        # Spread over the block, as lengths are in life: each step some requests fill a block.
        prompt = [5 + i] * (context - i % min(BLOCK_SIZE, context))
        request = EngineRequest(f"r{i}", prompt, params)
        processor.add(request, None, streaming=False)
        core.add(request, 0.0)
    watch = Stopwatch()
    runner.graph.run = watch.wrap("model", runner.graph.run)
    runner.sampler.sample = watch.wrap("sample", runner.sampler.sample)
    build = model_runner.build_input_batch
    model_runner.build_input_batch = watch.wrap("inputs", build)
    run, plan = watch.wrap("run", runner.run), watch.wrap("schedule", core.plan)
    update, text = watch.wrap("update", core.finish_step), watch.wrap("text", processor.process)
    gc.collect()
    with torch.inference_mode():
        for _ in range(steps):
            output = run(plan(0.0))
            assert isinstance(output, ModelRunnerOutput)
            text(update(output, 0.0))
    model_runner.build_input_batch = build
    return {name: times[2:] for name, times in watch.times.items()}  # without the prefill


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("schedule", "inputs", "rest", "update", "text")
    print(f"{args.num_seqs} decoding requests, {args.steps} steps, median microseconds per step")
    print(
        " context"
        + "".join(f"{name:>10}" for name in columns)
        + "       sum   10% .. 90%    sampling"
    )
    for context in args.contexts:
        times = measure(args.num_seqs, context, args.steps)
        rows = zip(times["run"], times["inputs"], times["sample"], times["model"], strict=True)
        times["rest"] = [run - inputs - sample - model for run, inputs, sample, model in rows]
        sums = [sum(step) for step in zip(*(times[name] for name in columns), strict=True)]
        tenths = quantiles(sums, n=10)
        cells = "".join(f"{median(times[name]):10.0f}" for name in columns)
        spread = f"{tenths[0]:.0f} .. {tenths[-1]:.0f}"
        print(f"{context:8}{cells}{median(sums):10.0f}{spread:>13}{median(times['sample']):12.0f}")


if __name__ == "__main__":
    main()
