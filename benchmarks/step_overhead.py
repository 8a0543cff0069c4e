"""What a decoding step costs outside the model: scheduling, inputs, bookkeeping, text.

    python benchmarks/step_overhead.py [--num-seqs 256] [--contexts 100 1000 10000] [--drafts 5]
        [--method ngram|draft_model] [--temperature 0]

The engine is the real one except for the forward pass, which repeats the same tokens. All requests
decode greedily, so sampling is one pass over the logits: it is shown but, being arithmetic, not
summed. The cost per step should not depend on the length of the requests. Every part is timed in
every step: mean microseconds without the slowest twentieth of the steps, which other processes
delayed, and the 10th and 90th percentile of the sum. With --drafts a lookup drafts tokens, all of
them right, so each step makes that many more tokens per request: "propose" finds and stores them,
"check" verifies them; the other parts take longer because there are more tokens. A draft model is
right four times in five, and its forward passes, which take no time either, are not counted; nor is
sampling from its logits at a temperature. The number of drafts is controlled as usual, by a clock
on which only the model takes time, and always the same.
"""

from __future__ import annotations

import gc
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import replace
from statistics import mean, quantiles
from types import SimpleNamespace

import torch

from kvik.config.config import ResolvedConfig, RunnerConfig
from kvik.config.memory import MemoryPlan
from kvik.config.model_source import find_model
from kvik.config.speculative import ResolvedSpeculation
from kvik.core.config import CacheConfig, SchedulerConfig
from kvik.core.plan import ModelRunnerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest
from kvik.engine.core import EngineCore
from kvik.engine.output import OutputProcessor
from kvik.kernels.torch_ops import TORCH
from kvik.models.model_spec import read_model_spec
from kvik.spec.kv import KVCacheSpec, group_layers
from kvik.text.tokenizer import Tokenizer
from kvik.worker import model_runner
from kvik.worker.drafters.base import Drafter
from kvik.worker.drafters.draft_model import (
    DraftModel,
    DraftNetwork,
    DraftSampling,
    Vocabulary,
)
from kvik.worker.drafters.lookup import NgramDrafter
from kvik.worker.graphs import StepOutput
from kvik.worker.input_batch import InputBatch
from kvik.worker.model_runner import ModelRunner
from kvik.worker.output_tokens import OutputTokens
from kvik.worker.request_table import RequestTable
from kvik.worker.sampler import Sampler
from kvik.worker.sampling_table import SamplingTable
from kvik.worker.speculator import Speculator
from kvik.worker.step_inputs import AtOnce, FixedInputs, FreshInputs, StepSizes
from kvik.worker.worker import step_participants

BLOCK_SIZE = 16
PERIOD = 61  # tokens after which texts repeat themselves
SETTLED = PERIOD + 9  # steps until all tokens can be predicted
ONE_IN = 5  # one draft in this many of a draft model is wrong
INSIDE = ("inputs", "check", "propose", "sample", "model")  # reported parts of the runner
CPU = torch.device("cpu")
Parts = dict[str, float]


class Instant:
    """A forward pass that takes no time: what is left is the cost of everything around it.

    Attributes:
        forwards: the number of forward passes.
    """

    def __init__(self, vocab_size: int, rows: int) -> None:
        self.forwards = 0
        self._logits = torch.zeros(rows, vocab_size)
        self._top = torch.zeros(rows)

    def prepare(self) -> None:
        pass

    def run(self, batch: InputBatch) -> StepOutput:
        self.forwards += 1
        step = batch.tensors
        rows = len(step.logits_indices)
        hidden = torch.zeros(1, 1).expand(len(step.input_ids), 1)
        tokens = 300 + step.positions[step.logits_indices] % PERIOD  # ordinary ones
        return StepOutput(hidden, self._logits[:rows], self._top[:rows], tokens)


class NearlyRight(Instant):
    """A draft model's forward pass: it is wrong at one position in `ONE_IN`, and some tokens have
    probability 0."""

    def __init__(self, vocab_size: int, rows: int) -> None:
        super().__init__(vocab_size, rows)
        self._logits[:, -(vocab_size // ONE_IN) :] = -torch.inf

    def run(self, batch: InputBatch) -> StepOutput:
        output = super().run(batch)
        output.top_ids.add_(batch.tensors.positions[batch.tensors.logits_indices] % ONE_IN == 0)
        return output


class Stopwatch:
    """Measures the microseconds of each part in each step in which it ran.

    Attributes:
        steps: the times of each step; the last one is still running.
    """

    def __init__(self) -> None:
        self.steps: list[Parts] = [{}]
        self._left_out = 0.0  # seconds, within the part that is being timed

    def leave_out(self, call: Callable) -> Callable:
        """Wrap `call` so that its time does not count in the part that calls it."""

        def untimed(*args):
            started = time.perf_counter()
            result = call(*args)
            self._left_out += time.perf_counter() - started
            return result

        return untimed

    def wrap(self, name: str, call: Callable) -> Callable:
        def timed(*args, **options):
            started, before = time.perf_counter(), self._left_out
            result = call(*args, **options)
            seconds = time.perf_counter() - started - (self._left_out - before)
            step = self.steps[-1]
            step[name] = step.get(name, 0.0) + seconds * 1e6
            return result

        return timed


def make_drafter(
    speculation: ResolvedSpeculation,
    table: RequestTable,
    sampling: SamplingTable,
    vocab_size: int,
    pool_size: int,
) -> Drafter:
    if speculation.method == "ngram":
        return NgramDrafter(table, speculation.ngram_min, speculation.ngram_max)
    num_seqs, length = table.token_ids.shape
    tokens = num_seqs * 64
    inputs = FixedInputs(StepSizes.of(tokens, num_seqs), 1, length // BLOCK_SIZE + 1)
    network = DraftNetwork(
        NearlyRight(vocab_size, num_seqs),
        inputs,
        Vocabulary(vocab_size, vocab_size, None, CPU),
        table.view(0, 1),
        tokens,
        length,
    )
    drawing = DraftSampling(Sampler(TORCH), sampling, 1 << 30)
    return DraftModel(network, drawing, pool_size, speculation.num_draft_tokens)


def make_engine(
    num_seqs: int, context: int, steps: int, drafts: int, method: str
) -> tuple[EngineCore, ModelRunner]:
    """Return an engine whose only KV group has one tiny layer."""
    length = context + (1 + drafts) * steps + 2
    spec = replace(read_model_spec(find_model("")), eos_token_ids=())
    groups = group_layers([KVCacheSpec(1, 16, 128)])
    num_blocks = num_seqs * (length // BLOCK_SIZE + 1)
    speculation = None
    ahead = drafts if method == "draft_model" else 0
    if drafts:
        speculation = ResolvedSpeculation(
            method, drafts, num_seqs * drafts, num_lookahead_tokens=ahead
        )
    config = ResolvedConfig(
        model=spec,
        cache=CacheConfig(BLOCK_SIZE, num_blocks, groups),
        scheduler=SchedulerConfig(
            num_seqs,
            num_seqs * context,
            length,
            max_queued_tokens=1 << 40,
            num_lookahead_tokens=ahead,
        ),
        runner=RunnerConfig("", "float32", "cpu", "sdpa", 1),
        memory=MemoryPlan(0, 0, 0, 0, 0),
        seed=0,
        decisions=(),
        speculation=speculation,
    )
    graph = Instant(spec.vocab_size, num_seqs * (1 + drafts))

    def clock() -> float:
        return 0.01 * graph.forwards

    table = RequestTable(num_seqs, length, 1, BLOCK_SIZE)
    sampling = SamplingTable(num_seqs, spec.vocab_size, CPU)
    speculator = None
    if speculation is not None:
        drafter = make_drafter(
            speculation, table, sampling, spec.vocab_size, config.cache.pool_size
        )
        speculator = Speculator(speculation, drafter, table, sampling, spec.vocab_size, clock)
    # No blocks are copied, no prompt is scored.
    network = SimpleNamespace(ops=TORCH, copy=lambda blocks, states: None)
    copies = AtOnce()
    participants = step_participants(network, table, sampling, CPU, copies, speculator)
    runner = ModelRunner(
        network, graph, FreshInputs(CPU), table, participants, clock, depth=copies.depth
    )
    return EngineCore(config), runner


def measure(
    num_seqs: int, context: int, steps: int, drafts: int, method: str, temperature: float
) -> list[Parts]:
    """Return the times of each step after the warm-up."""
    core, runner = make_engine(num_seqs, context, steps, drafts, method)
    processor = OutputProcessor(Tokenizer.load(find_model("")))
    params = SamplingParams(temperature=temperature, max_tokens=None)
    for i in range(num_seqs):
        # Lengths are spread over a block, as in practice: in each step some requests fill one.
        prompt = [5 + i] * (context - i % min(BLOCK_SIZE, context))
        request = EngineRequest(f"r{i}", prompt, params)
        processor.add(request, None, streaming=False)
        core.add(request, 0.0)
    watch = Stopwatch()
    runner.graph.run = watch.wrap("model", runner.graph.run)
    (tokens,) = [each for each in runner.participants if isinstance(each, OutputTokens)]
    tokens.sampler.launch = watch.wrap("sample", tokens.sampler.launch)
    speculator = tokens.speculator
    if speculator is not None:
        speculator.propose = watch.wrap("propose", speculator.propose)
        speculator.observe = watch.wrap("observe", speculator.observe)
        tokens._judge = watch.wrap("check", tokens._judge)
        drafter = speculator.drafter
        if isinstance(drafter, DraftModel):
            graph, sampler = drafter.network.graph, drafter._sampling.sampler
            graph.run = watch.leave_out(graph.run)
            if temperature:
                sampler.guess = watch.leave_out(sampler.guess)
    build = model_runner.build_input_batch
    model_runner.build_input_batch = watch.wrap("inputs", build)
    run = watch.wrap("run", lambda plan: runner.finish(runner.begin(plan)))
    plan = watch.wrap("schedule", core.plan)
    update, text = watch.wrap("update", core.finish_step), watch.wrap("text", processor.process)
    gc.collect()
    with torch.inference_mode():
        for _ in range(steps):
            output = run(plan(0.0))
            assert isinstance(output, ModelRunnerOutput)
            text(update(output, 0.0))
            watch.steps.append({})
    model_runner.build_input_batch = build
    return watch.steps[SETTLED:-1]


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--contexts", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--drafts", type=int, default=0, help="of each request in a step")
    parser.add_argument("--method", choices=["ngram", "draft_model"], default="ngram")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("schedule", "inputs", "rest", "update", "text")
    if args.drafts:
        columns = ("schedule", "inputs", "check", "rest", "propose", "update", "text")
    print(f"{args.num_seqs} decoding requests, {args.steps} steps, microseconds per step")
    print(
        " context"
        + "".join(f"{name:>10}" for name in columns)
        + "       sum   10% .. 90%    sampling"
    )
    for context in args.contexts:
        found = measure(
            args.num_seqs, context, args.steps, args.drafts, args.method, args.temperature
        )
        if args.drafts:  # the controller now and then times a step without drafts
            found = [step for step in found if "check" in step and "propose" in step]
        for step in found:
            if args.drafts:
                step["check"] += step["observe"] - step["sample"]
            step["rest"] = step["run"] - sum(step.get(name, 0.0) for name in INSIDE)
            step["sum"] = sum(step[name] for name in columns)
        found.sort(key=lambda step: step["sum"])
        tenths = quantiles([step["sum"] for step in found], n=10)
        spread = f"{tenths[0]:.0f} .. {tenths[-1]:.0f}"
        most = found[: len(found) - len(found) // 20]
        means = {name: mean(step[name] for step in most) for name in (*columns, "sum", "sample")}
        cells = "".join(f"{means[name]:10.0f}" for name in (*columns, "sum"))
        print(f"{context:8}{cells}{spread:>13}{means['sample']:12.0f}")


if __name__ == "__main__":
    main()
