"""Measures a `Calibration` of this machine, and the engine's own costs.

The shapes are not taken from any model: the measurements must predict unknown models.
"""

from __future__ import annotations

import datetime
import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import linear_regression, mean, median

import numpy as np
import torch
from msgspec.structs import replace

from kvik import __version__
from kvik.child_process import live_with_parent, python_command
from kvik.config.compute import native_reason
from kvik.config.config import EngineConfig
from kvik.config.hardware import Hardware, detect
from kvik.config.model_source import find_model
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest
from kvik.engine.output import OutputProcessor
from kvik.launch import launch
from kvik.planner.calibration import (
    Calibration,
    ExchangeCost,
    HostCost,
    Machine,
    ReadRate,
    save,
    this_machine,
)
from kvik.planner.devices import Device, Setting
from kvik.planner.families import read_shape
from kvik.planner.roofline import PlannedStep, decode, prefill, step_time
from kvik.spec.shares import MAX_RANKS
from kvik_bench.inprocess.rounds import OTHERS, Watch, disturbance, undisturbed
from kvik_bench.machine.kernels import (
    Readings,
    measure_attention,
    measure_linears,
    measure_small,
    measure_states,
)
from kvik_bench.machine.stage import FULL, Effort, Limits, Stage, TorchStage

EXCHANGES = 1000  # consecutive exchanges in a sample
MESSAGES = 200
SMALL, LARGE = 64, 4 << 20  # bytes of a message


def measure_exchanges(threads: int, samples: int) -> tuple[ExchangeCost, ...]:
    """Return the costs for 2, 4, 8, ... processes, up to the number of threads."""
    costs, count = [], 2
    while count <= min(threads, MAX_RANKS):
        costs.append(ExchangeCost(count, exchange_seconds(count, samples)))
        count *= 2
    return tuple(costs)


def exchange_seconds(processes: int, samples: int) -> float:
    """Return the seconds of an exchange between running threads, the median of some runs. They
    share memory and wait in the same way as processes."""
    from kvik.kernels.cpu.group import Group
    from kvik.kernels.cpu.native import Native

    memory, tapes = np.zeros(1 << 20, np.uint8), []
    for rank in range(processes):
        native = Native(1)
        group = Group(native, memory, rank, processes)
        with native.record({1: 0}) as recording:
            for _ in range(EXCHANGES):
                group.exchange()
        tapes.append((native, recording))
    times = []
    with ThreadPoolExecutor(processes) as pool:
        for _ in range(samples + 1):
            start = time.perf_counter()
            list(pool.map(lambda tape: tape[0].replay(tape[1], (1,)), tapes))
            times.append((time.perf_counter() - start) / EXCHANGES)
    return median(times[1:])


def hop_seconds(messages: int = MESSAGES) -> tuple[float, float]:
    """Return the seconds of a small message that wakes another process, and the bytes per second of
    a large one."""
    ours, theirs = socket.socketpair()
    command = python_command(__name__, str(theirs.fileno()))
    with theirs:
        child = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
    with child, Connection(ours.detach()) as line:

        def seconds(size: int, count: int) -> float:
            data, times = bytes(size), []
            for _ in range(count):
                start = time.perf_counter()
                line.send_bytes(data)
                line.recv_bytes()
                times.append(time.perf_counter() - start)
            return median(times)

        small, large = seconds(SMALL, messages), seconds(LARGE, messages // 10)
    return small / 2, LARGE / max(1e-9, large - small)


def main(arguments: Sequence[str]) -> int:
    """Answer each message, until the other process has ended."""
    line = Connection(int(arguments[0]))
    live_with_parent(line.fileno())
    with suppress(EOFError, OSError):
        while True:
            line.recv_bytes()
            line.send_bytes(b"")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


# The engine's own cost of a step: scheduling, batch tables, sampling, text. It is measured with a
# tiny network, whose kernel times are known and subtracted. Between steps memory is read, because a
# model's weights evict the engine's own code and data from the CPU caches.

PROMPT, PROMPTS = 16, (16, 512)  # prompt tokens for timing steps, and for timing prompts
NETWORK = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}


def measure_host(measured: Calibration, limits: Limits, effort: Effort) -> Calibration:
    """Return the calibration with the engine's own costs added."""
    with tempfile.TemporaryDirectory(prefix="kvik-") as name:
        folder = Path(name)
        vocab = _write(folder)
        shape = read_shape(name)
        device = Device("this", "cpu", 0, measured.bandwidth, measured.peaks, calibration=measured)

        def kernels(step: PlannedStep) -> float:
            return step_time(shape, Setting(device, "bf16", "bf16"), step).expected

        with closing(_Engine(folder, vocab, measured.machine, effort, limits)) as engine:
            hosts = []
            for flushed in effort.flushed:
                overheads = [
                    engine.step_seconds(batch, effort.tokens, flushed)
                    - kernels(decode(batch, PROMPT + effort.tokens // 2))
                    for batch in effort.batches
                ]
                hosts.append(HostCost(max(flushed, 1), *line_through(effort.batches, overheads)))
            cold = hosts[-1].step + hosts[-1].row
            extra = [
                engine.prompt_seconds(tokens, effort.samples, effort.flushed[-1])
                - kernels(prefill(tokens))
                - cold
                for tokens in PROMPTS
            ]
            request, token = line_through(PROMPTS, extra)
    return replace(measured, host=tuple(hosts), host_request=request, host_token=token)


def _write(folder: Path) -> int:
    """Write the network's folder, with the bundled tokenizer; return the size of the vocabulary."""
    bundled = find_model("")
    vocab = int(json.loads((bundled / "config.json").read_text())["vocab_size"])
    (folder / "config.json").write_text(json.dumps({**NETWORK, "vocab_size": vocab}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, folder / name)
    return vocab


class _Engine:
    """An engine whose steps are timed one by one."""

    def __init__(
        self, folder: Path, vocab: int, machine: Machine, effort: Effort, limits: Limits
    ) -> None:
        longest, max_batch = max(PROMPTS) + effort.tokens, max(effort.batches)
        engine = launch(
            EngineConfig(
                model=str(folder),
                load_format="random",
                dtype="bfloat16",
                device="cpu",
                threads=machine.threads,
                kernels="torch" if machine.kernels == "torch" else "native",
                max_model_len=longest,
                max_num_seqs=max_batch,
                max_num_batched_tokens=max(PROMPTS),
                num_blocks=(max_batch + 1) * (longest // 16 + 2),
            )
        )
        self._loop, self._limits = engine.loop, limits
        self._processor = OutputProcessor(engine.tokenizer)
        self._vocab, self._random, self._serial = vocab, random.Random(0), 0
        self.close = engine.loop.close

    def step_seconds(self, batch: int, tokens: int, flushed: int) -> float:
        """Return the time of a step with one token for each of `batch` sequences, after reading
        `flushed` bytes."""
        for _ in range(batch):
            self._add(PROMPT, tokens)
        while True:  # until every prompt is computed
            done = self._loop.poll()
            self._processor.process(done)
            if len(done) == batch:
                break
        times = []
        for _ in range(tokens - batch // 16 - 3):
            times.append(self._timed_step(flushed))
        while self._loop.has_work:
            self._processor.process(self._loop.poll())
        return undisturbed(times)

    def prompt_seconds(self, tokens: int, samples: int, flushed: int) -> float:
        """Return the time of a request for one token, from arrival to end."""
        times = []
        for _ in range(samples + 1):
            self._flush(flushed)
            started = time.perf_counter()
            self._add(tokens, 1)
            while self._loop.has_work:
                self._processor.process(self._loop.poll())
            times.append(time.perf_counter() - started)
        return undisturbed(times[1:])

    def _timed_step(self, flushed: int) -> float:
        self._flush(flushed)
        started = time.perf_counter()
        self._processor.process(self._loop.poll())
        return time.perf_counter() - started

    def _flush(self, num_bytes: int) -> None:
        if num_bytes:
            self._limits.read_rate(num_bytes)

    def _add(self, tokens: int, output: int) -> None:
        self._serial += 1
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        prompt = [self._random.randrange(self._vocab) for _ in range(tokens)]
        request = EngineRequest(f"calibrate-{self._serial}", prompt, params)
        self._processor.add(request, None, streaming=False)
        self._loop.add(request)


def line_through(xs: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return the least-squares fit of a + b * x, with neither below 0."""
    slope = max(0.0, linear_regression(xs, seconds).slope)
    return max(0.0, mean(seconds) - slope * mean(xs)), slope


CHANGED = 1.15  # ratio of memory rates during one calibration that is worth a remark


Tell = Callable[[str, float], None]  # next measurement, share done


def make_stage(hardware: Hardware, threads: int, effort: Effort) -> Stage:
    """Return the stage with the kernels that the engine would use here."""
    if native_reason(hardware):
        return TorchStage(threads, effort.reads[-1])
    from kvik_bench.machine.native_stage import NativeStage

    return NativeStage(threads, effort.reads[-1])


def calibrate(
    hardware: Hardware, threads: int, effort: Effort, tell: Tell
) -> tuple[Calibration, tuple[str, ...]]:
    """Measure everything. Return the calibration, and remarks on the measurement."""
    torch.manual_seed(0)
    watch = Watch()
    stage = make_stage(hardware, threads, effort)
    steps = len(effort.kinds) + len(effort.head_dims) + 5 + (stage.kernels == "native")
    done = 0

    def next_is(label: str) -> None:
        nonlocal done
        tell(label, done / steps)
        done += 1

    readings = Readings(stage.limits)
    with torch.inference_mode():
        next_is("memory and caches")
        reads = tuple(
            ReadRate.of(size, [stage.limits.read_rate(size) for _ in range(effort.samples)])
            for size in effort.reads
        )
        next_is("arithmetic")
        peaks = {name: stage.limits.peak(name) for name in ("fp32", "bf16", "int8")}
        next_is("small kernels")
        small = measure_small(stage, effort.samples)
        linears = {}
        for kind in effort.kinds:
            next_is(f"products, {kind}")
            linears[kind] = measure_linears(stage, kind, effort, readings)
        attention = []
        for head_dim in effort.head_dims:
            next_is(f"attention, heads of {head_dim}")
            attention.append(measure_attention(stage, head_dim, small.launch, effort, readings))
        next_is("states")
        states = measure_states(stage, effort)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = replace(this_machine(hardware, threads, __version__), date=date)
    # memory's rate is the one during the products, so that a calibration has a single figure
    memory = ReadRate.of(effort.reads[-1], [reads[-1].rate, *readings.rates])
    calibration = Calibration(
        machine=machine,
        reads=(*reads[:-1], memory),
        peaks=peaks,
        linears=linears,
        attention=tuple(attention),
        states=states,
        launch=small.launch,
        activation=small.activation,
        logit=small.logit,
    )
    next_is("engine")
    calibration = measure_host(calibration, stage.limits, effort)
    if stage.kernels == "native":  # only these are divided among processes
        next_is("processes")
        hop, rate = hop_seconds()
        exchanges = measure_exchanges(threads, effort.samples)
        calibration = replace(calibration, exchanges=exchanges, hop=hop, hop_rate=rate)
    share = watch.others()
    calibration = replace(calibration, disturbed=share > OTHERS)
    tell("", 1.0)
    return calibration, remarks(share, readings.rates)


def calibrate_into(path: Path, threads: int | None = None) -> None:
    """Measure everything and save the calibration, for the programs in benchmarks/."""
    hardware = detect()
    calibration, doubts = calibrate(
        hardware, threads or hardware.cores, FULL, lambda label, share: None
    )
    print(f"calibrated: {calibration.bandwidth / 1e9:.1f} GB/s", *doubts, sep="\n  ", flush=True)
    save(calibration, path)


def speeds_now(limits: Limits, facts: Calibration) -> list[float]:
    """Return the current read rates, and the cores' speed relative to a calibration."""
    peak = sum(limits.peak("bf16") for _ in range(3)) / 3
    return [*(limits.read_rate(r.bytes) for r in facts.reads), peak / facts.peaks["bf16"]]


def remarks(share: float, rates: list[float]) -> tuple[str, ...]:
    """Return reasons to doubt the figures."""
    doubts = [*filter(None, [disturbance(share)])]
    ordered = sorted(rates)
    low, high = ordered[len(rates) // 10], ordered[-1 - len(rates) // 10]
    if high > CHANGED * low:
        doubts.append(
            f"memory was read at {low / 1e9:.0f} to {high / 1e9:.0f} GB/s during the measurement:"
            " this machine changes its speed"
        )
    return tuple(doubts)
