"""Measures what a `Calibration` says of this machine. No model's own shapes are used: what is
measured here must explain models it has not seen."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import torch  # before the extension, which then shares torch's threads
from msgspec.structs import replace

from kvik import __version__
from kvik.config.compute import native_reason
from kvik.config.hardware import Hardware
from kvik.planner.calibration import Calibration, ReadRate, this_machine
from kvik_bench.inprocess.rounds import OTHERS, Watch, disturbance
from kvik_bench.machine.effort import Effort
from kvik_bench.machine.host import measure_host
from kvik_bench.machine.kernels import (
    Readings,
    measure_attention,
    measure_linears,
    measure_small,
)
from kvik_bench.machine.stage import Stage, TorchStage

CHANGED = 1.15  # from where on the memory's rates during one calibration are worth a word


Tell = Callable[[str, float], None]  # what comes next, share done


def make_stage(hardware: Hardware, threads: int, effort: Effort) -> Stage:
    """The kernels that the engine would run here."""
    if native_reason(hardware):
        return TorchStage(threads, effort.reads[-1])
    from kvik_bench.machine.native_stage import NativeStage

    return NativeStage(threads, effort.reads[-1])


def calibrate(
    hardware: Hardware, threads: int, effort: Effort, tell: Tell
) -> tuple[Calibration, tuple[str, ...]]:
    """Measure everything. Also what a reader should know of the measurement, in words."""
    torch.manual_seed(0)
    watch = Watch()
    stage = make_stage(hardware, threads, effort)
    steps = len(effort.kinds) + len(effort.head_dims) + 4
    done = 0

    def next_is(what: str) -> None:
        nonlocal done
        tell(what, done / steps)
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
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = replace(this_machine(hardware, threads, __version__), date=date)
    # the rate the products were measured at counts for memory: one figure for one calibration
    memory = ReadRate.of(effort.reads[-1], [reads[-1].rate, *readings.rates])
    found = Calibration(
        machine=machine,
        reads=(*reads[:-1], memory),
        peaks=peaks,
        linears=linears,
        attention=tuple(attention),
        launch=small.launch,
        activation=small.activation,
        logit=small.logit,
    )
    next_is("engine")
    found = measure_host(found, stage.limits, effort)
    others = watch.others()
    found = replace(found, disturbed=others > OTHERS)
    tell("", 1.0)
    return found, remarks(others, readings.rates)


def remarks(others: float, rates: list[float]) -> tuple[str, ...]:
    """What may make the figures wrong."""
    found = [*filter(None, [disturbance(others)])]
    ordered = sorted(rates)
    low, high = ordered[len(rates) // 10], ordered[-1 - len(rates) // 10]
    if high > CHANGED * low:
        found.append(
            f"memory was read at {low / 1e9:.0f} to {high / 1e9:.0f} GB/s during the measurement:"
            " this machine changes its speed"
        )
    return tuple(found)
