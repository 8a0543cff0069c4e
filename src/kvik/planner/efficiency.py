"""How close an engine gets to the limits of its machine, and its bottleneck in words.

The engine counts what its steps had to read and compute, and where its time was spent. Together
with the machine's ceilings this gives the least time that the steps can take (the roofline), and
thus how much of the time is explained, and by what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace

from kvik import __version__
from kvik.config.config import ResolvedConfig
from kvik.config.hardware import detect, find_gpus
from kvik.core.work import Work
from kvik.engine.stats import EngineStats, LoopTime
from kvik.errors import ConfigError
from kvik.planner.calibration import calibration_path, load, this_machine
from kvik.planner.devices import Device, Setting, cpu_device, this_device
from kvik.planner.families import read_shape
from kvik.planner.formats import arithmetic, weight_format
from kvik.planner.shape import ModelShape
from kvik.spec.kv import AUTO

MOSTLY = 0.5  # fraction of the time or of the steps
POSSIBLE = 1.2  # fraction of a ceiling that is still plausible, given the ceilings' accuracy

# What each bottleneck means, and how to relieve it.
WHAT_HELPS: Mapping[str, str] = {
    "load": "the engine could serve more than it is asked for",
    "queue": "more requests at a time would share one reading of the weights",
    "host": "the machine waits while steps are planned and text is made",
    "overhead": "larger steps, or fewer and larger kernels, would help",
    "weights bandwidth": "a larger batch or smaller weights would help",
    "KV bandwidth": "a smaller KV format or shorter contexts would help",
    "compute": "only a faster machine, a smaller model or a prefix cache would help",
    "executor": "the machine's limits are not known, so nothing finer can be said",
    "ceiling": "do not believe these figures: measure again while no other program runs, on a CPU "
    "after `kvik calibrate`",
}


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The limits of a machine: bytes read from memory and operations, both per second."""

    bandwidth: float
    compute: float


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The work of some steps."""

    steps: int
    weight_bytes: float  # bytes that had to be read
    kv_bytes: float  # bytes that had to be read; of states, also written
    state_bytes: float  # the part of `kv_bytes` for states; half of it was written
    flops: float  # operations that had to be computed

    @property
    def moved(self) -> float:
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency(StepTotals):
    """The work of an engine over an interval, and its bottleneck."""

    seconds: float  # length of the interval
    time: LoopTime  # parts of the interval, as counted by the engine
    tokens: int  # number computed
    ceiling: Ceiling | None  # None if the machine's speed is unknown
    floor: float | None  # the least seconds of these steps; None without a ceiling
    bottleneck: str  # a key of `WHAT_HELPS`
    reason: str  # the figure that shows the bottleneck
    missing: str = ""  # why there is no ceiling, or ""

    @property
    def read_rate(self) -> float:
        """Bytes read per second, excluding idle time."""
        return _ratio(self.moved, self.time.busy)

    @property
    def flop_rate(self) -> float:
        """Operations per second, excluding idle time."""
        return _ratio(self.flops, self.time.busy)

    @property
    def bandwidth_share(self) -> float | None:
        """Achieved / ceiling."""
        return self.read_rate / self.ceiling.bandwidth if self.ceiling else None

    @property
    def compute_share(self) -> float | None:
        """Achieved / ceiling."""
        return self.flop_rate / self.ceiling.compute if self.ceiling else None

    @property
    def possible(self) -> bool:
        """Whether no ceiling was exceeded; if one was, the figures are wrong."""
        return self.bottleneck != "ceiling"


def efficiency(
    before: EngineStats, after: EngineStats, seconds: float, shape: ModelShape, at: Setting
) -> Efficiency:
    """Return the efficiency between two readings of an engine's statistics.

    Args:
        seconds: time between them; all of it counts as work if the statistics have no times.
        at: if the device's speed is unknown, shares are absent and `missing` says why.
    """
    work = after.work.since(before.work)
    time = after.time.since(before.time)
    if after.time == LoopTime():
        time = LoopTime(executor=seconds)
    kinds = _split(work, shape, at)
    total = StepTotals(*map(sum, zip(*map(astuple, kinds), strict=True)))
    ceiling, needs, missing = None, None, ""
    try:
        ceiling = Ceiling(
            bandwidth=at.device.read_rate(_ratio(total.moved, total.steps)),
            compute=at.device.rate(arithmetic(at.weight_format, at.device.kind)),
        )
        needs = _needs(kinds, ceiling)
    except ConfigError as error:
        missing = error.message
    bottleneck, reason = _bottleneck(work, total, needs, time, ceiling)
    return Efficiency(
        *astuple(total),
        seconds=seconds,
        time=time,
        tokens=work.prefill_tokens + work.decode_tokens,
        ceiling=ceiling,
        floor=sum(needs.values()) if needs else None,
        bottleneck=bottleneck,
        reason=reason,
        missing=missing,
    )


def _split(work: Work, shape: ModelShape, at: Setting) -> tuple[StepTotals, StepTotals]:
    """Return the totals of steps that only decode and of steps with part of a prompt.

    The former are bound by reading, the latter by arithmetic, so each kind has its own floor.
    Decoding rows of mixed steps are assumed to be as long as the others. A row moves its state
    once; a mixed step has at least one chunk.
    """
    tokens = work.prefill_tokens + work.decode_tokens
    decode_rows = min(work.decode_step_tokens, tokens)
    share = min(1.0, _ratio(work.decode_step_tokens, work.decode_tokens))
    readers = [(cache, layers * cache.readers) for cache, layers in shape.caches]
    pair = sum(count * shape.pair_flops(cache) for cache, count in readers)
    pair /= sum(count for _, count in readers)

    def kind(
        steps: int, rows: int, sequences: int, logits: int, read: float, pairs: float
    ) -> StepTotals:
        # Routed experts: assume that all steps have the same number of rows, which maximises reads.
        weights = shape.read_bytes(at.weight_format, max(1, round(rows / steps))) if steps else 0.0
        states = sequences * shape.state_traffic(cached=1)
        flops = shape.matmul_flops(rows, logits) + pair * pairs
        return StepTotals(
            steps=steps,
            weight_bytes=steps * weights,
            kv_bytes=read + rows * shape.kv_bytes_per_token(at.kv_format) + states,
            state_bytes=states,
            flops=flops + rows * shape.state_flops.total(),
        )

    logits = min(decode_rows, work.logit_rows)
    read, pairs = share * work.decode_kv_bytes, share * work.decode_pairs
    return (
        kind(work.decode_steps, decode_rows, decode_rows, logits, read, pairs),
        kind(
            work.mixed_steps,
            tokens - decode_rows,
            work.mixed_steps + max(0, work.decode_tokens - decode_rows),
            work.logit_rows - logits,
            work.prefill_kv_bytes + work.decode_kv_bytes - read,
            work.prefill_pairs + work.decode_pairs - pairs,
        ),
    )


def _needs(kinds: tuple[StepTotals, ...], ceiling: Ceiling) -> dict[str, float]:
    """Return the seconds bound by each resource; reading and arithmetic overlap, so only the longer
    counts."""
    needs = {"weights bandwidth": 0.0, "KV bandwidth": 0.0, "compute": 0.0}
    for kind in kinds:
        weights, kv = kind.weight_bytes / ceiling.bandwidth, kind.kv_bytes / ceiling.bandwidth
        compute = kind.flops / ceiling.compute
        if compute > weights + kv:
            needs["compute"] += compute
        else:
            needs["weights bandwidth"] += weights
            needs["KV bandwidth"] += kv
    return needs


def _bottleneck(
    work: Work,
    total: StepTotals,
    needs: dict[str, float] | None,
    time: LoopTime,
    ceiling: Ceiling | None,
) -> tuple[str, str]:
    """Return the bottleneck, and the figure that shows it."""
    idle = _ratio(time.idle, time.idle + time.busy)
    if not total.steps:
        return "load", "no step was computed"
    # Check this first: nothing follows from wrong counts or a wrong calibration.
    impossible = _impossible(total, time, ceiling) if ceiling is not None else ""
    if impossible:
        return "ceiling", impossible
    if idle >= MOSTLY:
        return "load", f"idle for {idle:.0%} of the time"
    host = f"{_ratio(time.host, time.busy):.0%} of the time with work passed between the steps"
    if ceiling is None or needs is None:
        if time.host >= time.executor:
            return "host", host
        share = _ratio(time.executor, time.busy)
        return "executor", f"{share:.0%} of the time with work passed in the steps"
    floor = sum(needs.values())
    times = {**needs, "host": time.host, "overhead": max(0.0, time.executor - floor)}
    cause = max(times, key=times.__getitem__)
    if cause == "host":
        return "host", host
    if cause == "overhead":
        share = _ratio(time.executor - floor, time.busy)
        return cause, f"{share:.0%} of the time with work, the steps took longer than they must"
    short = _queue(work, total.steps)
    if cause == "weights bandwidth" and short:
        return "queue", short
    portion = f"{_ratio(needs[cause], floor):.0%} of the least time that these steps can take"
    if cause == "compute":
        rate = _ratio(total.flops, time.busy)
        peak = ceiling.compute
        return (
            cause,
            f"{portion} is arithmetic; {rate / peak:.2f} of {peak / 1e12:,.3g} TFLOP/s reached",
        )
    rate = _ratio(total.moved, time.busy)
    data = "weights" if cause == "weights bandwidth" else "the KV cache"
    reached = f"{rate / ceiling.bandwidth:.2f} of {ceiling.bandwidth / 1e9:,.3g} GB/s reached"
    return cause, f"{portion} goes to reading {data}; {reached}"


def _impossible(total: StepTotals, time: LoopTime, ceiling: Ceiling) -> str:
    """Return which ceiling was exceeded, in words; "" if none was."""
    for work, peak, label in (
        (total.moved, ceiling.bandwidth, f"{ceiling.bandwidth / 1e9:,.3g} GB/s"),
        (total.flops, ceiling.compute, f"{ceiling.compute / 1e12:,.3g} TFLOP/s"),
    ):
        share = _ratio(work, time.busy * peak)
        if share > POSSIBLE:
            return f"{share:.0%} of the {label} that this machine can do, which is impossible"
    return ""


def _queue(work: Work, steps: int) -> str:
    """Return, in words, what requests waited for in most steps; "" if they did not wait."""
    for short, resource in (
        (work.block_short_steps, "KV blocks"),
        (work.slot_short_steps, "one of max_num_seqs places"),
    ):
        if short >= MOSTLY * steps:
            rows = (work.prefill_tokens + work.decode_tokens) / steps
            return (
                f"in {short / steps:.0%} of the steps requests waited for {resource}, with "
                f"{rows:,.0f} tokens a step"
            )
    return ""


def _ratio(part: float, total: float) -> float:
    return part / total if total > 0 else 0.0


# The planner's description of an engine's model and its device.


@dataclass(frozen=True, slots=True)
class RunningModel:
    """An engine's model and its device, whose speed is known if the machine was calibrated."""

    resolved: ResolvedConfig
    shape: ModelShape
    device: Device

    @staticmethod
    def of(resolved: ResolvedConfig) -> RunningModel:
        runner = resolved.runner
        shape = replace(read_shape(runner.model_path), kernels=runner.kernels)
        return RunningModel(resolved, shape, running_device(resolved))

    @property
    def setting(self) -> Setting:
        runner = self.resolved.runner
        # Layers may differ in format: the most common one represents all.
        specs = (spec for group in self.resolved.cache.groups for spec in group.specs)
        ((stored, _),) = Counter(spec.format for spec in specs).most_common(1)
        return Setting(
            self.device,
            weight_format(runner.dtype, runner.quantization),
            weight_format(runner.dtype) if stored == AUTO else stored,
        )

    @property
    def kv_bytes_per_token(self) -> float:
        return self.shape.kv_bytes_per_token(self.setting.kv_format)

    def efficiency(self, before: EngineStats, after: EngineStats, seconds: float) -> Efficiency:
        """Return the efficiency between two readings of the statistics, `seconds` apart."""
        return efficiency(before, after, seconds, self.shape, self.setting)


def running_device(resolved: ResolvedConfig) -> Device:
    """Return an engine's device, with the calibration for its kernels and number of threads."""
    if resolved.runner.device != "cpu":
        return this_device(detect(find_gpus()), calibration_path())
    hardware = detect()
    if resolved.runner.kernels != "native":
        hardware = replace(hardware, native=False)
    runner = resolved.runner
    threads = runner.threads * runner.ranks * max(1, len(runner.stages))  # of all processes
    machine = this_machine(hardware, threads, __version__)
    try:
        return cpu_device(load(calibration_path()), machine, hardware.memory_limit)
    except ConfigError as error:
        memory = hardware.memory_limit
        return Device("this", "cpu", memory, None, {}, unknown=error.message)
