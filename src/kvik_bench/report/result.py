"""The result of a benchmark: figures by row, with every repeat; written as JSON."""

from __future__ import annotations

import os
import platform
import re
import resource
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Generic, Literal, TypeVar

import msgspec

from kvik import __version__
from kvik.config.config import ResolvedConfig
from kvik.config.hardware import detect
from kvik.config.units import show_bytes
from kvik.spec.kv import AUTO, formats_of


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that was measured once in each repeat."""

    name: str  # "TTFT p50"; equal in all rows that have it
    unit: str  # "ms", "tokens/s", "x" for a ratio, "" for a count, "%" for a share (0 to 100)
    values: tuple[float, ...]  # one for each repeat, at least one, all finite
    better: Literal["more", "less"] = "more"  # which direction is better
    definition: str = ""  # how the number is computed, one sentence without a full stop
    digits: int = 3  # number of significant digits shown
    most: float | None = None  # largest possible value; None: unknown

    @property
    def median(self) -> float:
        return median(self.values)

    @property
    def impossible(self) -> bool:
        """Whether the median exceeds the largest possible value, so that something is wrong."""
        return self.most is not None and self.median > self.most

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


Subject = TypeVar("Subject")
Subject_contra = TypeVar("Subject_contra", contravariant=True)


@dataclass(frozen=True, slots=True)
class Measure(Generic[Subject_contra]):
    """A figure of a run or of another subject."""

    name: str
    unit: str
    better: Literal["more", "less"]
    definition: str
    # From a subject to its value; None: there is nothing to measure.
    of: Callable[[Subject_contra], float | None]
    most: float | None = None  # the largest possible value; None: unknown

    def values(self, subjects: Iterable[Subject_contra]) -> tuple[float, ...]:
        """Return the value of each subject that has one."""
        return tuple(value for subject in subjects if (value := self.of(subject)) is not None)

    def figure(self, values: tuple[float, ...]) -> Figure:
        return Figure(self.name, self.unit, values, self.better, self.definition, most=self.most)


def figures(
    measures: Iterable[Measure[Subject]], subjects: Sequence[Subject], *, every: bool = True
) -> tuple[Figure, ...]:
    """Return the figures of the measures that all subjects have; with `every` false, that any
    has."""
    results = []
    for measure in measures:
        values = measure.values(subjects)
        if values and (len(values) == len(subjects) or not every):
            results.append(measure.figure(values))
    return tuple(results)


def ratios(
    name: str,
    measure: Measure[Subject],
    runs: Sequence[Subject],
    base: Sequence[Subject],
    definition: str,
) -> Figure:
    """Return the ratios of a measure to another subject's, round by round."""
    values = []
    for run, other in zip(runs, base, strict=True):
        above, below = measure.of(run), measure.of(other)
        assert above is not None and below is not None
        values.append(above / below)
    return Figure(name, "x", tuple(values), measure.better, definition)


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one subject: a batch size, a policy, an engine, a rung of a ladder."""

    label: str
    figures: tuple[Figure, ...]
    # Further facts and remarks about this row.
    facts: Mapping[str, str] = field(default_factory=dict)
    # Distributions by name with unit ("TTFT, ms"), all repeats together.
    series: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def figure(self, name: str) -> Figure | None:
        return next((figure for figure in self.figures if figure.name == name), None)


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of a result.

    "bars": figure `y` of each row, with its spread. "curve": figure `y` over figure `x`, a point
    for each row. "ecdf": the distribution of series `y`, a line for each row. "points": series `y`
    over series `x` (of equal length), a colour for each row.
    """

    kind: Literal["bars", "curve", "ecdf", "points"]
    title: str
    y: str
    x: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """The complete result of a benchmark."""

    kind: str  # the command: "latency", "throughput", "serve", ...
    # Conditions of the measurement: date, command, versions, machine, model, formats.
    facts: Mapping[str, str]
    rows: tuple[Row, ...]
    remarks: tuple[str, ...] = ()  # conclusions and warnings in words
    charts: tuple[Chart, ...] = ()
    group: str = "bench"  # first word of a command of two words; "" for a command of one word

    @property
    def title(self) -> str:
        """The command that makes such a result."""
        return " ".join(("kvik", *filter(None, (self.group, self.kind))))

    def names(self) -> Iterator[str]:
        """Distinct names of the figures, in the order of their first rows."""
        yield from dict.fromkeys(figure.name for row in self.rows for figure in row.figures)

    def to_json(self) -> str:
        """Return JSON, with medians and extremes in addition to the values, for simple readers."""
        plain = _encodable(msgspec.to_builtins(self))
        for row, source in zip(plain["rows"], self.rows, strict=True):
            for entry, figure in zip(row["figures"], source.figures, strict=True):
                entry |= {"median": figure.median, "low": figure.low, "high": figure.high}
                entry["impossible"] = figure.impossible
        return msgspec.json.format(msgspec.json.encode(plain), indent=1).decode()


def _encodable(plain: Any) -> Any:
    """Return plain values with "?" for what UTF-8 cannot encode, as in paths of other encodings."""
    if isinstance(plain, dict):
        return {key: _encodable(value) for key, value in plain.items()}
    if isinstance(plain, list | tuple):
        return [_encodable(value) for value in plain]
    return plain.encode(errors="replace").decode() if isinstance(plain, str) else plain


# The facts of a run: enough to repeat it, and to see which results are comparable.

PEAK_MEMORY = "peak resident memory of this process since it started"


def run_facts() -> Mapping[str, str]:
    """Return date, command, versions and machine."""
    hardware = detect()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(["kvik", *sys.argv[1:]]),
        "kvik": __version__,
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "machine": f"{hardware.cpu_name}, {hardware.cores} cores, "
        f"{show_bytes(hardware.memory_limit)} of memory",
        "load": f"{os.getloadavg()[0]:.1f} running processes in the last minute",
    }


def engine_facts(resolved: ResolvedConfig) -> Mapping[str, str]:
    """Return the decisions for the engine that affect speed."""
    runner, scheduler, cache = resolved.runner, resolved.scheduler, resolved.cache
    return {
        "model": runner.model_path,
        "architecture": resolved.model.architecture,
        "parameters": f"{resolved.model.num_parameters:,}",
        "dtype": runner.dtype,
        "quantization": runner.quantization,
        "device": runner.device,
        "kernels": f"{runner.kernels}, attention {runner.attention_backend}",
        "threads": str(runner.threads),
        "policy": scheduler.policy,
        "max_num_seqs": str(scheduler.max_num_seqs),
        "max_num_batched_tokens": str(scheduler.max_num_batched_tokens),
        "KV cache": f"{cache.num_blocks} blocks of {cache.block_size} tokens, "
        + " and ".join(formats_of(cache.groups)).replace(AUTO, runner.dtype),
        "prefix caching": "on" if cache.enable_prefix_caching else "off",
    }


def peak_memory() -> Figure:
    """Return the peak memory of this process, in MiB."""
    return Figure("peak memory", "MiB", (peak_bytes() / (1 << 20),), "less", PEAK_MEMORY)


def restart_peak() -> bool:
    """Reset `peak_bytes` to the current resident memory; return False if the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """Return the peak resident memory of this process. Linux reports it by program; its usage
    counters start with the memory of the parent."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        status = ""
    match = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    if match:
        return int(match[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
