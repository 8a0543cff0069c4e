"""Measurements of `kvik calibrate`: a machine's limits, and the costs of kvik's kernels on it.

No figure is specific to a model. Each is the cost of one kind of work (reading a weight from
memory, multiplying a weight by n rows, attending to a key, a call, a step). The cost of any model
is the sum of such costs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import median
from typing import Annotated, TypeVar

import msgspec

from kvik.config.compute import native_reason
from kvik.config.env import cache_folder
from kvik.config.hardware import Hardware
from kvik.errors import ConfigError
from kvik.files import write_whole

SCHEMA = 1  # of the file; files with other schemas are refused

# Working sets, in bytes, that count as read from a cache and as read from memory.
CACHED, STREAMED = 8 << 20, 64 << 20

# No measurement is beyond these, and sums and quotients of numbers within them are finite.
Count = Annotated[int, msgspec.Meta(ge=1)]
Rate = Annotated[float, msgspec.Meta(ge=1, le=1e21)]
Share = Annotated[float, msgspec.Meta(ge=1e-6, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class Machine(msgspec.Struct, frozen=True):
    """The machine that was measured, and when."""

    cpu: str
    threads: int
    kernels: str  # the CPU's best instruction set with native kernels, or "torch"
    kvik: str
    date: str = ""  # ISO 8601


class ReadRate(msgspec.Struct, frozen=True):
    """The rate of reading a working set repeatedly; one that fits into a cache is read faster."""

    bytes: Count
    rate: Rate  # the median of the samples
    low: float = 0.0  # the least sample; 0: not recorded
    high: float = 0.0  # the greatest; likewise

    @staticmethod
    def of(num_bytes: int, samples: Sequence[float]) -> ReadRate:
        return ReadRate(num_bytes, median(samples), min(samples), max(samples))


class LinearCosts(msgspec.Struct, frozen=True):
    """Costs of multiplying a number of rows by a matrix."""

    rows: Count
    call: Seconds  # seconds of a call, whatever the size of the matrix
    input: Seconds  # seconds for each input of all rows
    output: Seconds  # seconds for each output of all rows
    cached: Seconds  # seconds for each weight read from a cache
    # Seconds for each weight read from memory of unlimited speed: the kernel's time when reading is
    # not the limit.
    streamed: Seconds
    # Fraction of the memory's read rate that is reached when reading is the limit. Time beyond
    # `cached` is attributed to memory and scales with its rate, which varies over time and with the
    # working set.
    share: Share


class AttentionCosts(msgspec.Struct, frozen=True):
    """Costs of attention and of preparing it, for one head size."""

    head_dim: Count
    sequence: Seconds  # seconds per decoding sequence and layer
    # Seconds for each element of a key and its value, read once for all query heads.
    cached: Seconds
    streamed: Seconds  # likewise; see `LinearCosts`
    score: Seconds  # seconds for each element of a key and each query head, of a decoding query
    prefill: Rate  # operations per second over the visible pairs of a prompt
    rotated: Seconds  # seconds for each element of queries and keys that rotary embedding rotates
    # Seconds for each element of keys and values written to the cache, for a prompt.
    stored: Seconds
    scattered: Seconds  # likewise, for tokens that all belong to different sequences
    share: Share = 1.0  # as of `LinearCosts`


def read_seconds(costs: LinearCosts | AttentionCosts, working_set: float) -> float:
    """Return the seconds for each number read, for a working set in bytes."""
    return interpolate([(CACHED, costs.cached), (STREAMED, costs.streamed)], working_set)


def reached_share(costs: LinearCosts | AttentionCosts, working_set: float) -> float:
    """Return the fraction of the read rate that is reached with a working set."""
    return interpolate([(CACHED, 1.0), (STREAMED, costs.share)], working_set)


class StateCosts(msgspec.Struct, frozen=True):
    """Costs of one kind of operation on states: operations per second, of all cores."""

    first: Rate  # of a sequence's first token in a step, for which its state is read from memory
    further: Rate  # of the tokens after it


class HostCost(msgspec.Struct, frozen=True):
    """Seconds outside the kernels, for a step and for each sequence in it."""

    # Read by the kernels since the last step; they evict the engine's own code and data from the
    # CPU caches.
    bytes: Count
    step: Seconds
    row: Seconds


class ExchangeCost(msgspec.Struct, frozen=True):
    """Seconds of an exchange between processes that share layers and arrive at the same time."""

    processes: Count
    seconds: Seconds


class Calibration(msgspec.Struct, frozen=True):
    """What was measured on a machine."""

    machine: Machine
    reads: tuple[ReadRate, ...]  # by ascending bytes; the last is from memory
    peaks: dict[str, Rate]  # operations per second by arithmetic ("fp32", "bf16", "int8")
    # By kind of weight ("bf16", "int8", "int8-weight-only", "int4-g128", ...), rows ascending.
    linears: dict[str, tuple[LinearCosts, ...]]
    attention: tuple[AttentionCosts, ...]  # head_dim ascending
    launch: Seconds  # seconds of a small kernel in a step
    activation: Rate  # bytes per second that norms read and write
    logit: Seconds  # seconds for each logit that greedy sampling reads
    # By kind, see `StateSpec.flops`; {}: not measured.
    states: dict[str, StateCosts] = {}
    host: tuple[HostCost, ...] = ()  # by ascending bytes
    host_request: Seconds = 0.0  # seconds per request, outside both the kernels and the steps
    host_token: Seconds = 0.0  # likewise, per token of its prompt
    # Processes ascending; (): not measured, as with torch's kernels.
    exchanges: tuple[ExchangeCost, ...] = ()
    # Seconds of a message from one process to another, whatever its size; 0: not measured.
    hop: Seconds = 0.0
    hop_rate: Annotated[float, msgspec.Meta(ge=0, le=1e21)] = 0.0  # bytes/s of a large message
    disturbed: bool = False  # other processes used CPU time during the measurement
    schema: int = SCHEMA

    @property
    def bandwidth(self) -> float:
        """Bytes per second read from memory."""
        return self.reads[-1].rate

    def read_rate(self, working_set: float) -> float:
        """Return the bytes read per second if each step reads the same `working_set` bytes."""
        return interpolate([(r.bytes, r.rate) for r in self.reads], working_set)

    def host_seconds(self, working_set: float, sequences: int) -> float:
        """Return the seconds of a step outside its kernels."""
        if not self.host:
            return 0.0
        step = interpolate([(h.bytes, h.step) for h in self.host], working_set)
        return step + sequences * interpolate([(h.bytes, h.row) for h in self.host], working_set)

    def exchange_seconds(self, processes: int) -> float:
        """Return the seconds of an exchange; 0 if none was measured."""
        if not self.exchanges:
            return 0.0
        return interpolate([(cost.processes, cost.seconds) for cost in self.exchanges], processes)

    def hop_seconds(self, hops: int, num_bytes: float) -> float:
        """Return the seconds of `hops` consecutive messages; 0 if none was measured."""
        return hops * self.hop + num_bytes / self.hop_rate if self.hop_rate else 0.0

    def divided(self, cores: float, readers: int) -> Calibration:
        """Return the part of this machine that has 1 / `cores` of its cores, while `readers` such
        parts read memory. Single-threaded work takes the same time."""
        shared = tuple(name for name in LINEAR_TIMES if name != "call")
        reads = tuple(ReadRate(read.bytes, read.rate / readers) for read in self.reads)
        return msgspec.structs.replace(self._computing(1 / cores, shared), reads=reads)

    def at(self, reads: tuple[ReadRate, ...], speed: float) -> Calibration:
        """Return the same machine with other read rates and another core `speed` (1: the speed
        during calibration)."""
        return msgspec.structs.replace(
            self._computing(speed, LINEAR_TIMES),
            reads=reads,
            launch=self.launch / speed,
            host=tuple(_slower(host, _HOST, speed) for host in self.host),
            host_request=self.host_request / speed,
            host_token=self.host_token / speed,
        )

    def _computing(self, speed: float, linear_times: tuple[str, ...]) -> Calibration:
        """Return the same with kernels at another `speed`; for products only `linear_times`
        change."""
        return msgspec.structs.replace(
            self,
            peaks={name: rate * speed for name, rate in self.peaks.items()},
            linears={
                kind: tuple(_slower(cost, linear_times, speed) for cost in costs)
                for kind, costs in self.linears.items()
            },
            attention=tuple(
                msgspec.structs.replace(
                    _slower(cost, ATTENTION_TIMES, speed), prefill=cost.prefill * speed
                )
                for cost in self.attention
            ),
            states={
                kind: StateCosts(cost.first * speed, cost.further * speed)
                for kind, cost in self.states.items()
            },
            activation=self.activation * speed,
            logit=self.logit / speed,
        )


# Costs that increase on slower cores.
LINEAR_TIMES = ("call", "input", "output", "cached", "streamed")
ATTENTION_TIMES = ("sequence", "cached", "streamed", "score", "rotated", "stored", "scattered")
_HOST = ("step", "row")
_Costs = TypeVar("_Costs", bound=msgspec.Struct)


def _slower(costs: _Costs, names: tuple[str, ...], speed: float) -> _Costs:
    seconds = {name: getattr(costs, name) / speed for name in names}
    return msgspec.structs.replace(costs, **seconds)


def interpolate(points: list[tuple[float, float]], x: float) -> float:
    """Interpolate linearly in log x between points of ascending x; constant outside their range."""
    at = bisect_left(points, x, key=lambda point: point[0])
    if at == 0:
        return points[0][1]
    if at == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * log(x / x0) / log(x1 / x0)


def this_machine(hardware: Hardware, threads: int | None, version: str) -> Machine:
    """Return the facts that a calibration of this machine must match, without a date."""
    kernels = "torch" if native_reason(hardware) else hardware.native_isa
    return Machine(hardware.cpu_name, threads or hardware.cores, kernels, version)


def calibration_path() -> Path:
    return cache_folder() / "calibration.json"


def save(calibration: Calibration, path: Path) -> None:
    """Write a calibration atomically; raise ConfigError if the file cannot be written."""
    text = msgspec.json.format(msgspec.json.encode(calibration), indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise ConfigError("output", f"cannot write {str(path)!r} ({error.strerror})") from None


def load(path: Path) -> Calibration:
    """Read a saved calibration.

    Raises:
        ConfigError: the file is missing, damaged or of another version.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError("calibration", "there is none yet: run `kvik calibrate`") from None
    except OSError as error:
        raise ConfigError("calibration", f"{str(path)!r}: {error.strerror}") from None
    try:
        calibration = msgspec.json.decode(data, type=Calibration)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unusable(path, str(error)) from None
    wrong = _wrong(calibration)
    if wrong:
        raise _unusable(path, wrong)
    return calibration


def stale(calibration: Calibration, machine: Machine) -> str | None:
    """Return why a calibration does not apply to this machine; None if it does."""
    facts: Mapping[str, tuple[object, object]] = {
        "CPU": (calibration.machine.cpu, machine.cpu),
        "number of threads": (calibration.machine.threads, machine.threads),
        "kernels": (calibration.machine.kernels, machine.kernels),
    }
    for name, (then, now) in facts.items():
        if then != now:
            return f"measured with another {name} ({then}, now {now}): run `kvik calibrate` again"
    return None


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        "calibration", f"{str(path)!r} cannot be used ({reason}): run `kvik calibrate`"
    )


def _wrong(calibration: Calibration) -> str | None:
    """Return, in words, what cannot be a measurement; None if all is plausible. Decoding has
    checked the range of each number."""
    if calibration.schema != SCHEMA:
        return f"schema {calibration.schema}, not {SCHEMA}"
    if not (
        calibration.reads
        and calibration.peaks
        and calibration.attention
        and all(calibration.linears.values())
    ):
        return "nothing measured"
    rows = [[cost.rows for cost in costs] for costs in calibration.linears.values()]
    ascending = [
        [r.bytes for r in calibration.reads],
        [a.head_dim for a in calibration.attention],
        *rows,
    ]
    ascending.append([h.bytes for h in calibration.host])
    ascending.append([cost.processes for cost in calibration.exchanges])
    if any(a >= b for run in ascending for a, b in pairwise(run)):
        return "out of order"
    return None
