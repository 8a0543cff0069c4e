"""The engine as `kvik.launch` makes it, without a frontend; and a no-op forward pass."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import torch
from place import DEVICE, REHEARSED
from shapes import write_config
from torch import Tensor

from kvik.attention.triton import TritonAttention
from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.config.graph_sizes import decoding_sizes, drafting_sizes
from kvik.config.hardware import detect, find_gpus
from kvik.config.model_source import find_model
from kvik.config.resolve import resolve
from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest, RequestDelta
from kvik.engine.core import EngineCore
from kvik.engine.loop import EngineLoop
from kvik.model_files import model_files
from kvik.worker import platforms
from kvik.worker.captures import NO_CAPTURE_PEERS, Captured, CapturePeers, GraphMemory
from kvik.worker.graphs import Graph, StepOutput
from kvik.worker.input_batch import InputBatch
from kvik.worker.model_runner import ModelRunner, RunningStep
from kvik.worker.replays import DecodeGraphs
from kvik.worker.step_inputs import Arrival
from kvik.worker.worker import Worker


class Skipped(Graph):
    """A forward pass that computes nothing and returns token 7."""

    def __init__(self, rows: int, hidden: int, vocab: int, device: torch.device) -> None:
        self._hidden = torch.zeros(1, hidden, dtype=torch.bfloat16, device=device)
        self._logits = torch.zeros(rows, vocab, device=device)
        self._top = torch.zeros(rows, device=device)
        self._ids = torch.full((rows,), 7, dtype=torch.int64, device=device)

    def run(self, batch: InputBatch) -> StepOutput:
        rows = len(batch.tensors.logits_indices)
        hidden = self._hidden.expand(len(batch.tensors.input_ids), -1)
        return StepOutput(hidden, self._logits[:rows], self._top[:rows], self._ids[:rows])


class KeepsErrors:
    """A worker's executor that keeps the last error: the loop reports only one line of it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.depth, self.in_turn, self.lost = worker.depth, worker.in_turn, ""
        self.error: Exception | None = None
        self.idle_step, self.stop = worker.idle_step, worker.stop

    def submit(self, plan: SchedulerOutput) -> RunningStep:
        try:
            return self._worker.submit(plan)
        except Exception as error:
            self.error = error
            raise

    def result(self, handle: object) -> ModelRunnerOutput:
        try:
            return self._worker.result(handle)
        except Exception as error:
            self.error = error
            raise


@dataclass(slots=True)
class Engine:
    """The parts of an engine without a frontend, whose packages a bare machine may lack."""

    resolved: ResolvedConfig
    loop: EngineLoop
    executor: KeepsErrors
    runner: ModelRunner
    graph_memory: GraphMemory | None
    serial: Iterator[int] = field(default_factory=count)

    @classmethod
    def load(cls, model: str, **options) -> Engine:
        """Load an engine as `launch` does. options: fields of `EngineConfig`."""
        on_gpu = options.get("kernels", "triton") == "triton"
        if REHEARSED:
            options["kernels"] = "torch"
        config = EngineConfig(model=model, **options)
        path = find_model(model)
        gpus = () if config.device == "cpu" else find_gpus()
        resolved = resolve(config, model_files(path).spec(), detect(gpus), str(path))
        worker = rehearsed_worker(resolved) if REHEARSED and on_gpu else Worker(resolved)
        executor = KeepsErrors(worker)
        loop = EngineLoop(EngineCore(resolved), executor, time.monotonic)
        runner = worker._ready()  # its parts get replaced
        return cls(resolved, loop, executor, runner, worker._graphs)

    @classmethod
    def random(cls, shape: str, **options) -> Engine:
        """Load an engine with a shape of `shapes.py` and random weights in bfloat16."""
        options |= {"dtype": "bfloat16", "device": DEVICE.type, "load_format": "random"}
        with tempfile.TemporaryDirectory() as folder:
            return cls.load(str(write_config(shape, Path(folder))), **options)

    def add(self, prompt: Sequence[int], tokens: int) -> str:
        name = str(next(self.serial))
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self.loop.add(EngineRequest(name, prompt, params))
        return name

    def step(self) -> list[RequestDelta]:
        """Run one step; raises the error of a request that failed."""
        deltas = self.loop.step()
        for delta in deltas:
            if delta.error is not None:
                raise self.executor.error or RuntimeError(delta.error)
        return deltas

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            self.loop.end(name)
        while self.loop.has_work:
            self.loop.step()

    def close(self) -> None:
        self.loop.close()


def answers(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Return greedy answers of `tokens` tokens."""
    found: dict[str, list[int]] = {engine.add(prompt, tokens): [] for prompt in prompts}
    try:
        while engine.loop.has_work:
            for delta in engine.step():
                found[delta.request_id] += delta.token_ids
    finally:
        engine.drop(list(found))
    return list(found.values())


def captured_sizes(graph: Graph) -> frozenset[int]:
    """Return the batch sizes whose decode steps are already captured."""
    if not isinstance(graph, DecodeGraphs):
        return frozenset()
    return frozenset(size.rows for size in graph.captured if size.longest == 1)


# In a rehearsal: a GPU worker without a GPU. Triton's platform on CPU tensors, with simulated graph
# capture, and results that arrive late, as on an asynchronous device.


class CalledAgain:
    """Replaces `CudaCapturer`."""

    def __init__(self, device: torch.device) -> None:
        pass

    def capture(self, call: Callable[[], None], peers: CapturePeers = NO_CAPTURE_PEERS) -> Captured:
        call()
        return Captured(call, 0, 0)


class LateCopies:
    """Replaces `PinnedCopies`."""

    depth = 2

    def start(self, tensors: Sequence[Tensor]) -> Arrival:
        copies = [tensor.clone() for tensor in tensors]
        return lambda: [copy.numpy() for copy in copies]


def rehearsed_worker(resolved: ResolvedConfig) -> Worker:
    """Return the worker. resolved: for a CPU, with torch's kernels; no user option gives this
    combination."""
    everywhere = frozenset({"cpu", "cuda"})
    TritonAttention.caps = replace(TritonAttention.caps, devices=everywhere)
    platforms.CudaCapturer = CalledAgain
    seqs, speculation = resolved.scheduler.max_num_seqs, resolved.speculation
    sizes = decoding_sizes(seqs)
    if speculation is not None:
        drafts = speculation.num_draft_tokens, speculation.max_draft_rows
        sizes += drafting_sizes(seqs, *drafts, tree=speculation.trees)
    runner = replace(
        resolved.runner,
        kernels="triton",
        attention_backend="triton",
        graph_sizes=sizes,
        graph_memory=1 << 30,  # these graphs take only the memory of their outputs
    )
    return Worker(replace(resolved, runner=runner), copies=LateCopies())
