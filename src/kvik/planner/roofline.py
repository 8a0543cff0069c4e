"""The time of one step: the least by bytes and operations, and the expected on this machine.

The roofline (Williams et al. 2009): a part of a step takes at least the time to read its bytes, and
at least the time to compute its operations, max(bytes / bandwidth, operations / rate). A step takes
the sum of its parts. A calibration adds the cost of calls, and how close kvik's kernels come to
either limit.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from math import exp, log

from kvik.errors import ConfigError
from kvik.planner.calibration import (
    ATTENTION_TIMES,
    LINEAR_TIMES,
    AttentionCosts,
    Calibration,
    LinearCosts,
    interpolate,
    reached_share,
    read_seconds,
)
from kvik.planner.devices import Device, Setting
from kvik.planner.formats import WEIGHT_FORMATS, arithmetic, kv_facts
from kvik.planner.parallel import (
    ACTIVATION_BYTES,
    collectives,
    shares,
    stage_runs,
    together,
    unevenness,
)
from kvik.planner.search import smallest
from kvik.planner.shape import MatrixGroup, ModelShape, read_keys
from kvik.spec.model import LOGIT_BYTES
from kvik.spec.weight_kind import WeightKind

# Costs of one matrix, of attention and of the other kernels, from a calibration. Without one they
# are 0, which leaves the roofline's floor.

# Small kernels per layer: two norms, rotary positions, storing K and V, and the call of attention;
# per step: token and position vectors, the last norm, selecting the sampled rows, their maximum.
LAYER_CALLS, STEP_CALLS = 5, 5


def product_costs(device: Device, kind: str) -> tuple[LinearCosts, ...]:
    """Return the costs of products with matrices of a kind, named by `linear_kind`; (): not
    measured."""
    measured = device.calibration
    if measured is None:
        return ()
    # A quick calibration omits some kinds: other group sizes cost about the same.
    alike = [k for k in measured.linears if k.partition("-g")[0] == kind.partition("-g")[0]]
    match = kind if kind in measured.linears else next(iter(alike), "")
    return measured.linears.get(match, ())


def linear_kind(kind: WeightKind | None, weight_format: str) -> str:
    """Return the name that a calibration uses for a kind of matrix; None: floats."""
    if kind is None:
        return "bf16" if WEIGHT_FORMATS[weight_format].quantization else weight_format
    if kind.group:
        return f"int4-g{kind.group}"
    if kind.codes == "fp8":
        return "fp8"
    return "int8-weight-only" if kind.activations == "float" else "int8"


def costs_at(costs: tuple[LinearCosts, ...], rows: float) -> LinearCosts:
    """Return the costs at a number of rows.

    Between measured numbers of rows the costs are interpolated linearly in log-log, which fits both
    costs that grow with the rows and costs that do not. Beyond the last they grow with the rows.
    """
    last = costs[-1]
    if rows >= last.rows:
        more = rows / last.rows
        times = {name: getattr(last, name) * more for name in LINEAR_TIMES}
        return LinearCosts(rows=round(rows), share=last.share, **times)
    at = bisect_left([cost.rows for cost in costs], rows)
    if at == 0:
        return costs[0]
    low, high = costs[at - 1], costs[at]
    part = log(rows / low.rows) / log(high.rows / low.rows)
    times = {name: _between(getattr(low, name), getattr(high, name), part) for name in LINEAR_TIMES}
    share = low.share + (high.share - low.share) * part
    return LinearCosts(rows=round(rows), share=share, **times)


def _between(low: float, high: float, part: float) -> float:
    if low <= 0 or high <= 0:
        return low + (high - low) * part
    return exp(log(low) + (log(high) - log(low)) * part)


def attention_costs(device: Device, head_dim: int) -> AttentionCosts | None:
    """Return the costs of attention, interpolated between the measured head sizes; None without a
    calibration."""
    if device.calibration is None:
        return None
    costs = device.calibration.attention

    def at(name: str) -> float:
        points = [(float(cost.head_dim), float(getattr(cost, name))) for cost in costs]
        return interpolate(points, head_dim)

    values = {name: at(name) for name in ("prefill", "share", *ATTENTION_TIMES)}
    return AttentionCosts(head_dim=head_dim, **values)


def small_seconds(
    shape: ModelShape,
    measured: Calibration,
    cost: AttentionCosts,
    prompted: int,
    decoded: int,
    processes: int,
) -> float:
    """Return the seconds of a step's kernels other than products and attention.

    Args:
        prompted, decoded: rows that are adjacent in a sequence, and rows that are not.
        processes: number of processes that share layers; each normalises all rows.
    """
    keys = sum(layers * cache.numbers for cache, layers in shape.caches)  # K and V
    queries = shape.num_layers * shape.num_heads * shape.head_dim
    normed = (2 * shape.num_layers + 1) * 2 * shape.hidden_size * ACTIVATION_BYTES
    row = processes * normed / measured.activation + (queries + keys / 2) * cost.rotated
    seconds = (shape.num_layers * LAYER_CALLS + STEP_CALLS) * measured.launch
    seconds += (prompted + decoded) * row
    return seconds + keys * (prompted * cost.stored + decoded * cost.scattered)


MAX_ROWS = 1 << 20  # end of the search for a compute-bound batch


@dataclass(frozen=True, slots=True)
class StepPart:
    """One part of a step, on one of the devices that share it."""

    name: str
    floor: float  # seconds at peak figures
    expected: float  # seconds by the calibration; without one, the floor
    bound: str  # "bandwidth", "compute", "host" or "links"
    reading: float = 0.0  # seconds of only reading its bytes
    computing: float = 0.0  # seconds of only computing its operations


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of a step."""

    # "weights", "head", "kv cache" (of decoding), "attention" (of prompts), "states", "small
    # kernels", "sampling", "host", "links", "exchanges", "hops"; only those that take time.
    parts: tuple[StepPart, ...]

    @property
    def floor(self) -> float:
        return sum(part.floor for part in self.parts)

    @property
    def expected(self) -> float:
        return sum(part.expected for part in self.parts)

    @property
    def reading(self) -> float:
        """Seconds if only reading memory took time."""
        return sum(part.reading for part in self.parts)

    @property
    def computing(self) -> float:
        """Seconds if only arithmetic took time."""
        return sum(part.computing for part in self.parts)

    @property
    def bound(self) -> str:
        """The limit that accounts for most of the expected time: "bandwidth", "compute", "host" or
        "links"."""
        seconds: dict[str, float] = {}
        for part in self.parts:
            seconds[part.bound] = seconds.get(part.bound, 0.0) + part.expected
        return max(seconds, key=lambda bound: seconds[bound])


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The work of a step."""

    # Equal sequences, as (number of sequences, new tokens, cached tokens before them).
    runs: tuple[tuple[int, int, int], ...]
    drafted: int = 0  # drafts among the new tokens, whose logits are also computed

    @property
    def rows(self) -> int:
        return sum(count * new for count, new, _ in self.runs)

    @property
    def sequences(self) -> int:
        return sum(count for count, _, _ in self.runs)

    @property
    def sampled(self) -> int:
        """Number of rows whose logits are computed."""
        return self.sequences + self.drafted


def decode(batch: int, context: int) -> PlannedStep:
    """Return a step of one token for each of `batch` sequences, which then have `context`
    tokens."""
    return PlannedStep(((batch, 1, context - 1),))


def verify(batch: int, context: int, drafts: int) -> PlannedStep:
    """Return `decode` with `drafts` more tokens per sequence."""
    return PlannedStep(((batch, 1 + drafts, context - 1),), drafted=batch * drafts)


def prefill(tokens: int, cached: int = 0) -> PlannedStep:
    """Return a step with `tokens` prompt tokens of one sequence, after `cached` tokens in the
    cache."""
    return PlannedStep(((1, tokens, cached),))


def step_time(shape: ModelShape, at: Setting, step: PlannedStep) -> StepTime:
    """Return the latency of one step. The stages of a pipeline run one after another. On a CPU each
    stage has a part of the cores, and shares the memory with other busy stages.

    Raises:
        ConfigError: the device's speed is unknown (`Device.rated`), it has no link, or `at.tp`
            devices cannot share a layer.
    """
    if at.exact:
        cores = float(at.pp)
        if at.busy > 1:
            cores *= unevenness(
                shape, stage_runs(shape, at.pp, at.weight_format, at.kv_format, at.context)
            )
        part = replace(at, device=at.device.divided(cores, at.busy))
        work = _Work.of(together(shape, at.tp), part, step)
    else:
        (part_of_layers,) = shares(
            shape, at.tp, 1, at.weight_format, whole_experts=at.expert_parallel
        )
        work = _Work.of(part_of_layers, at, step)
    parts = [*work.parts(), *_messages(shape, at, step)]
    return StepTime(tuple(part for part in parts if part.expected > 0))


def decode_rate(shape: ModelShape, at: Setting) -> tuple[float, float]:
    """Return (ceiling, expected) tokens per second of all requests together."""
    time = step_time(shape, at, decode(at.group, at.context))
    return at.batch / time.floor, at.batch / time.expected


def prefill_rate(shape: ModelShape, at: Setting, prompt: int) -> tuple[float, float]:
    """Return (ceiling, expected) prompt tokens per second while all requests compute prompts of
    this length."""
    time = step_time(shape, at, PlannedStep(((at.group, prompt, 0),)))
    return at.batch * prompt / time.floor, at.batch * prompt / time.expected


def compute_bound_batch(shape: ModelShape, at: Setting) -> int | None:
    """Return the smallest batch whose decoding is bound by arithmetic; None if the KV cache, which
    grows with the batch, always takes longer to read."""

    def compute_bound(batch: int) -> bool:
        time = step_time(shape, at, decode(replace(at, batch=batch).group, at.context))
        return time.computing >= time.reading

    return smallest(compute_bound, MAX_ROWS)


@dataclass(frozen=True, slots=True)
class _Work:
    """A step on one device."""

    shape: ModelShape
    at: Setting
    step: PlannedStep
    working_set: float  # bytes that every step reads; assumed to be entirely cached or not at all
    read_rate: float  # bytes per second at which the working set is read

    @classmethod
    def of(cls, shape: ModelShape, at: Setting, step: PlannedStep) -> _Work:
        read = shape.read_bytes(at.weight_format, step.rows)
        for count, new, cached in step.runs:
            read += count * (shape.kv_read_bytes(new + cached, at.kv_format) + shape.state_bytes)
        return cls(shape, at, step, read, at.device.read_rate(read))

    @property
    def processes(self) -> int:
        """Number of CPU processes that share each layer."""
        return self.at.tp if self.at.exact else 1

    def parts(self) -> list[StepPart]:
        inner = [m for m in self.shape.matrices if m.multiplied and m.role != "head"]
        head = [m for m in self.shape.matrices if m.multiplied and m.role == "head"]
        rows, sampled = self.step.rows, self.step.sampled
        logits = sampled * sum(m.outputs for m in head)
        parts = [
            self._products("weights", inner, rows, 0),
            self._products("head", head, sampled, LOGIT_BYTES),
            self._attention("kv cache", decoding=True),
            self._attention("attention", decoding=False),
            self._states(),
        ]
        measured = self.at.device.calibration
        cost = attention_costs(self.at.device, self.shape.head_dim)
        if measured is not None and cost is not None:
            prompts = self._runs(decoding=False)
            prompted = sum(count * new for count, new, _ in prompts)
            rest = rows - prompted
            small = small_seconds(self.shape, measured, cost, prompted, rest, self.processes)
            parts.append(StepPart("small kernels", 0.0, small, "host"))
            reading = logits * LOGIT_BYTES / self.read_rate
            choosing = max(reading, self.processes * logits * measured.logit)  # in the first
            parts.append(StepPart("sampling", reading, choosing, "host", reading))
            host = measured.host_seconds(self.working_set, self.step.sequences)
            for count, new, _ in prompts:
                host += count * (measured.host_request + new * measured.host_token)
            parts.append(StepPart("host", 0.0, host, "host"))
        return parts

    def _runs(self, *, decoding: bool) -> list[tuple[int, int, int]]:
        """Return the sequences that decode (drafts included), or those with a prompt."""
        drafts = self.step.drafted > 0
        return [run for run in self.step.runs if (run[1] == 1 or drafts) == decoding]

    def _products(self, name: str, matrices: list[MatrixGroup], rows: int, item: int) -> StepPart:
        """Return the products; each output writes `item` bytes to memory. 0: to a cache."""
        at, rate = self.at, self.read_rate
        num_bytes = flops = expected = 0.0
        for matrix in matrices:
            moved = self.shape.read_of(matrix, at.weight_format, rows)
            moved += item * rows * matrix.outputs
            num_bytes += moved
            flops += 2.0 * matrix.active_parameters * rows
            copies = matrix.touched(rows)
            if copies:
                # of routed experts each gets its share of the rows
                part = rows * matrix.active / matrix.experts if matrix.experts else rows
                expected += copies * self._product(matrix, max(1.0, part), moved / copies)
        unit = at.device.rate(arithmetic(at.weight_format, at.device.kind))
        return _part(name, num_bytes / rate, flops / unit, expected)

    def _product(self, matrix: MatrixGroup, rows: float, num_bytes: float) -> float:
        """Return the seconds of one product; 0 if its costs were not measured.

        Args:
            num_bytes: bytes of the matrix and of those outputs that are written to memory.
        """
        kind = self.shape.kind_of(matrix, self.at.weight_format)
        costs = product_costs(self.at.device, linear_kind(kind, self.at.weight_format))
        if not costs:
            return 0.0
        cost = costs_at(costs, rows)
        working = matrix.inputs * matrix.outputs * read_seconds(cost, self.working_set)
        moving = num_bytes / (self.read_rate * reached_share(cost, self.working_set))
        inputs = self.processes * matrix.inputs  # each process prepares all inputs
        return cost.call + inputs * cost.input + matrix.outputs * cost.output + max(moving, working)

    def _attention(self, name: str, *, decoding: bool) -> StepPart:
        """Return the attention of decoding sequences, drafts included, or of prompts."""
        shape, at, rate = self.shape, self.at, self.read_rate
        num_bytes = flops = expected = 0.0
        cost = attention_costs(at.device, shape.head_dim)
        for count, new, cached in self._runs(decoding=decoding):
            read = float(count * shape.kv_read_bytes(new + cached, at.kv_format))
            computed = count * shape.attention_flops(new, new + cached)
            num_bytes += read
            flops += computed
            if cost is not None and decoding:
                reached = rate * reached_share(cost, self.working_set)
                expected += shape.num_layers * count * cost.sequence
                expected += max(read / reached, self._scoring(cost, count, new, new + cached))
            elif cost is not None:
                expected += max(read / rate, computed / cost.prefill)
        unit = "bf16" if kv_facts(at.kv_format).bits <= 16 else "fp32"
        return _part(name, num_bytes / rate, flops / at.device.rate(unit), expected)

    def _scoring(self, cost: AttentionCosts, count: int, new: int, context: int) -> float:
        """Return the seconds of kernels for decoding sequences where reading is not the limit."""
        seconds, seconds_per_value = 0.0, read_seconds(cost, self.working_set)
        for cache, layers in self.shape.caches:
            seen = layers * cache.readers * count * read_keys(cache, context)
            keys = cache.num_kv_heads * cache.head_dim
            score = new * self.shape.num_heads * cache.head_dim * cost.score
            seconds += seen * (keys * seconds_per_value + score)
        return seconds

    def _states(self) -> StepPart:
        """Return the states of all sequences. Kernels hold a state while they process its
        tokens."""
        shape, runs = self.shape, self.step.runs
        num_bytes = float(sum(n * shape.state_traffic(cached) for n, _, cached in runs))
        flops = float(self.step.rows * shape.state_flops.total())
        computing = flops / self.at.device.rate("fp32") if flops else 0.0
        measured, expected = self.at.device.calibration, 0.0
        further = self.step.rows - self.step.sequences
        for kind, each in shape.state_flops.items():
            cost = measured and measured.states.get(kind)
            if cost:
                expected += self.step.sequences * each / cost.first + further * each / cost.further
        return _part("states", num_bytes / self.read_rate, computing, expected)


def _part(name: str, reading: float, computing: float, expected: float) -> StepPart:
    floor = max(reading, computing)
    bound = "bandwidth" if reading >= computing else "compute"
    expected = max(floor, expected)
    return StepPart(name, floor, expected, bound, reading, computing)


def _messages(shape: ModelShape, at: Setting, step: PlannedStep) -> list[StepPart]:
    """Return the communication of a step. GPUs have two ring all-reduces per layer and one message
    between stages, timed by their bytes. CPU processes have exchanges and hops, timed by the
    calibration. Raises ConfigError if the device has no link."""
    tp, pp, device = at.tp, at.pp, at.device
    if tp == pp == 1:
        return []
    message = step.rows * shape.hidden_size * ACTIVATION_BYTES
    ops = collectives(shape, exact=at.exact, whole_experts=at.expert_parallel)
    if at.exact:
        if (measured := device.calibration) is None:
            return []
        parts = []
        if tp > 1:
            seconds = ops.count * measured.exchange_seconds(tp)
            parts.append(StepPart("exchanges", 0.0, seconds, "links"))
        # Each stage is notified of a step, notifies its processes, and sends its result on.
        hops = (pp > 1) + (pp - 1) + pp * (tp > 1)
        seconds = measured.hop_seconds(hops, (pp - 1) * message)
        return [*parts, StepPart("hops", 0.0, seconds, "links")]
    if not device.link:
        raise ConfigError("tp" if tp > 1 else "pp", f"{device.name} has no link to other devices")
    sent = ops.count * message * 2 * (tp - 1) / tp + (pp - 1) * message
    seconds = sent / device.link
    return [StepPart("links", seconds, seconds, "links")]
