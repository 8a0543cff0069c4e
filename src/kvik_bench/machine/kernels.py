"""Measures the costs of kernels: per call, weight, key, and byte of activations."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch
from torch import Tensor

from kvik.kernels.ops import Sequences, StateHeads
from kvik.kernels.weights import (
    Activation,
    Matrix,
    MatrixSpec,
    Weight,
    float_weight,
    int4_weight,
    int8_weight,
)
from kvik.planner.calibration import CACHED, AttentionCosts, LinearCosts, StateCosts
from kvik.planner.formats import weight_facts
from kvik.spec.kv import STATE_BYTES, StateSpec
from kvik.spec.model import DTYPE_BYTES
from kvik.spec.weights import layer_kind
from kvik_bench.inprocess.rounds import undisturbed
from kvik_bench.machine.stage import (
    BLOCK_SIZE,
    CPU,
    REPEATED,
    Attended,
    Call,
    Effort,
    Limits,
    Stage,
    Track,
    device_seconds,
)

PATIENCE, MIN_SAMPLES = 0.25, 2  # seconds for long samples, and their least number
PACKED_ROWS = 64  # random rows, which the other rows repeat
ROWS = 512  # of small kernels
LIMITED = 1.1  # a kernel is bound by reading if its time / the reading time is at most this
IN_CACHE = 4  # consecutive products with a small matrix, so that it is in the cache

# Approximate inputs, outputs and activation of small matrices.
Sizes = tuple[int, int, Activation | None]
SMALL: tuple[Sizes, ...] = (
    (128, 128, None),
    (128, 4096, None),
    (256, 1536, None),
    (384, 384, None),
    (384, 2048, "silu_and_mul"),
    (1024, 1024, None),
    (1152, 320, None),
    (2048, 256, None),
)
# A layer that fits a large cache, and a layer that fits no cache.
MEDIUM: tuple[Sizes, ...] = ((640, 640, None), (640, 3456, "silu_and_mul"), (1664, 640, None))
LARGE: tuple[Sizes, ...] = ((1280, 1280, None), (1280, 6912, "silu_and_mul"), (3456, 1280, None))
# Layers of each kind whose states are timed.
STATES = (
    StateSpec(4096, 4),
    StateSpec.recurrent(8, 8, 128, 128, 4),
    StateSpec.recurrent(8, 8, 128, 128, 4, gates=1 + 128),
    StateSpec.recurrent(1, 16, 128, 64, 4, gates=1),
    StateSpec.by_channels(2048, 16, 4, 64, bias=False, eps=None),
)


@dataclass(slots=True)
class Readings:
    """The rate of memory next to each sample."""

    limits: Limits
    rates: list[float] = field(default_factory=list)

    def take(self) -> float:
        self.rates.append(self.limits.memory_rate())
        return self.rates[-1]


@dataclass(frozen=True, slots=True)
class SmallCosts:
    """See `Calibration`."""

    launch: float
    activation: float
    logit: float


def measure_linears(
    stage: Stage, kind: str, effort: Effort, readings: Readings
) -> tuple[LinearCosts, ...]:
    """Return the costs at each number of rows: of calls, inputs and outputs from small matrices; of
    weights from layers that fit a cache and layers that do not."""
    max_rows = max(effort.rows)
    small = [_matrix(stage, kind, size) for size in SMALL]
    calls = [call for call in _products(stage, small, max_rows) for _ in range(IN_CACHE)]
    repeated = stage.track(calls, max_rows)
    columns = [
        [1.0] * len(small),
        [float(m.spec.inputs) for m in small],
        [float(m.spec.rows) for m in small],
        [float(m.spec.rows * m.spec.inputs) for m in small],
    ]
    cached = _LayerStack(stage, kind, MEDIUM, CACHED, max_rows)
    streamed = _LayerStack(stage, kind, LARGE, effort.streamed, max_rows)
    costs = []
    for rows in effort.rows:
        times = _typical(lambda rows=rows: repeated(rows), effort.samples)  # type: ignore[misc]
        best = [min(times[i * IN_CACHE + 1 : (i + 1) * IN_CACHE]) for i in range(len(small))]
        call, input, output, _ = nonnegative_fit(columns, best)
        overheads = (call, input, output)
        cache_time = (
            undisturbed(cached.seconds(rows, overheads) for _ in range(effort.samples + 1))
            / cached.weights
        )
        samples: list[tuple[float, float]] = []
        started = time.perf_counter()
        while len(samples) < MIN_SAMPLES or (
            len(samples) < effort.samples and time.perf_counter() - started < PATIENCE
        ):
            samples.append((streamed.seconds(rows, overheads), readings.take()))
        memory_time = undisturbed(duration for duration, _ in samples) / streamed.weights
        share = median(streamed.bytes / (rate * duration) for duration, rate in samples)
        costs.append(
            LinearCosts(rows, *overheads, cache_time, *streaming(cache_time, memory_time, share))
        )
    return tuple(costs)


def streaming(cache_time: float, memory_time: float, share: float) -> tuple[float, float]:
    """Return `streamed` and `share` of costs.

    Args:
        cache_time, memory_time: seconds per element from a cache and from memory.
        share: of the memory rate that was reached from memory.
    """
    if share * LIMITED > 1 or memory_time > LIMITED * cache_time:
        # Memory was the limit, even if its full rate was not reached, as with keys in small
        # scattered blocks: the additional time is waiting for memory.
        return min(cache_time, memory_time), min(1.0, share)
    return memory_time, 1.0


class _LayerStack:
    """A sequence of equal layers, of about `num_bytes` bytes in total."""

    def __init__(
        self, stage: Stage, kind: str, sizes: Sequence[Sizes], num_bytes: int, most_rows: int
    ) -> None:
        layer = sum(
            _stored_bytes(stage, kind, _inputs(kind, i), outputs) for i, outputs, _ in sizes
        )
        count = max(1, round(num_bytes / layer))
        matrices = [_matrix(stage, kind, size) for _ in range(count) for size in sizes]
        self.bytes, self.calls = count * layer, len(matrices)
        self.inputs = sum(m.spec.inputs for m in matrices)
        self.outputs = sum(m.spec.rows for m in matrices)
        self.weights = sum(m.spec.rows * m.spec.inputs for m in matrices)
        self._track = stage.track(_products(stage, matrices, most_rows), most_rows)

    def seconds(self, rows: int, overheads: tuple[float, float, float]) -> float:
        """Return the seconds of all weights, minus the costs of calls, inputs and outputs."""
        duration, (call, input, output) = sum(self._track(rows)), overheads
        rest = duration - self.calls * call - self.inputs * input - self.outputs * output
        return max(duration / 10, rest)


def measure_attention(
    stage: Stage, head_dim: int, launch: float, effort: Effort, readings: Readings
) -> AttentionCosts:
    """Return the costs with heads of one size: decoding from cache and memory, and a prompt."""
    works = [
        Attended(sequences, 1, context, (4 * group, 4), head_dim)
        for sequences, context, group in (
            (1, 256, 1), (1, 256, 4), (1, 1024, 4), (8, 64, 4), (8, 256, 1), (8, 256, 4),
            (32, 128, 1), (32, 128, 4),
        )
    ]  # fmt: skip
    times = []
    for work in works:
        attend = stage.attention(work)
        attend()
        times.append(
            max(launch / 10, undisturbed(attend() for _ in range(effort.samples)) - launch)
        )
    sequence, _, score = nonnegative_fit(
        [
            [float(work.sequences) for work in works],
            [float(work.key_elements) for work in works],
            [float(work.score_elements) for work in works],
        ],
        times,
    )
    cache_keys, memory_keys = (_Keys(stage, head_dim, size) for size in (CACHED, effort.streamed))
    overheads = (launch, sequence, score)
    cached = (
        undisturbed(cache_keys.seconds(overheads) for _ in range(effort.samples + 1))
        / cache_keys.elements
    )
    samples = [(memory_keys.seconds(overheads), readings.take()) for _ in range(effort.samples)]
    share = median(4 * memory_keys.elements / (rate * duration) for duration, rate in samples)
    streamed = undisturbed(duration for duration, _ in samples) / memory_keys.elements
    streamed, share = streaming(cached, streamed, share)
    prompt = Attended(1, 512, 512, (16, 4), head_dim)
    attend = stage.attention(prompt)
    attend()
    seconds = undisturbed(attend() for _ in range(effort.samples))
    return AttentionCosts(
        head_dim,
        sequence,
        cached,
        streamed,
        score,
        4 * prompt.score_elements / seconds,
        *measure_positions(stage, head_dim, effort.samples),
        share,
    )


class _Keys:
    """Sequences that decode one after another, with about `num_bytes` bytes of keys and values."""

    def __init__(self, stage: Stage, head_dim: int, num_bytes: int) -> None:
        works = [Attended(4, 1, 256, (16, 8), head_dim)]
        works *= max(1, round(num_bytes / (4 * works[0].key_elements)))
        self.elements = sum(work.key_elements for work in works)
        self._scores = sum(work.score_elements for work in works)
        self._sequences, self._calls = sum(work.sequences for work in works), len(works)
        self._attend = [stage.attention(work) for work in works]

    def seconds(self, overheads: tuple[float, float, float]) -> float:
        """Return the seconds of all keys, minus the costs of calls, sequences and scores."""
        duration, (launch, sequence, score) = sum(attend() for attend in self._attend), overheads
        rest = duration - self._calls * launch - self._sequences * sequence - self._scores * score
        return max(duration / 10, rest)


def measure_positions(stage: Stage, head_dim: int, samples: int) -> tuple[float, float, float]:
    """Return `rotated`, `stored` and `scattered` of `AttentionCosts`."""
    heads = torch.randn(ROWS, 16, head_dim).bfloat16()
    rotation = torch.randn(ROWS, head_dim)

    def rotate(count: int) -> object:
        return stage.ops.rotary(heads[:count, 8:], heads[:count, :8], rotation[:count])

    adjacent_slots = [torch.arange(ROWS)] * REPEATED
    # each row in a separate block, which is no longer in a cache
    few = heads[: ROWS // 16]
    scattered_slots = torch.randperm(4 * REPEATED * len(few)).view(4 * REPEATED, -1) * BLOCK_SIZE
    elements = 16 * head_dim
    return (
        _each_row(stage.track([rotate] * REPEATED, ROWS), ROWS, samples) / elements,
        _each_row(stage.store(heads, adjacent_slots), ROWS, samples) / (2 * elements),
        _each_row(stage.store(few, scattered_slots.unbind()), len(few), samples) / (2 * elements),
    )


def measure_states(stage: Stage, effort: Effort) -> dict[str, StateCosts]:
    """Return the costs of each kind of operation on states: of tokens of sequences whose states fit
    no cache, and of a prompt."""
    costs = {}
    for spec in STATES:
        *_, kind = spec.flops  # of a layer with a recurrence, that is timed
        count = max(1, effort.streamed // (STATE_BYTES * spec.size))
        first = _states_seconds(stage, spec, count, 1, effort.samples)
        prompt = _states_seconds(stage, spec, 1, max(effort.rows), effort.samples)
        costs[kind] = StateCosts(
            count * spec.flops[kind] / first, max(effort.rows) * spec.flops[kind] / prompt
        )
    return costs


def _states_seconds(
    stage: Stage, spec: StateSpec, sequences: int, tokens: int, samples: int
) -> float:
    """Return the seconds of the recurrence, or if there is none the convolution, over `tokens`
    tokens of each of some sequences."""
    rows = sequences * tokens
    of = Sequences(
        starts=torch.arange(0, rows + 1, tokens, dtype=torch.int32),
        lengths=torch.full((sequences,), 1 + tokens, dtype=torch.int32),
        rows=torch.arange(sequences, dtype=torch.int32),
        longest=tokens,
    )
    matrix = spec.value_heads, spec.key_dim, spec.value_dim
    kept = torch.zeros(sequences, spec.width - 1, spec.channels)
    x = torch.randn(rows, spec.inputs or spec.channels).bfloat16()
    weight = torch.randn(spec.width, spec.channels).bfloat16()
    matrices, log = torch.zeros(sequences, *matrix), torch.zeros(sequences, 0, 0)
    gates = torch.randn(rows, spec.gates * spec.value_heads).bfloat16()
    offsets = torch.randn(spec.decays * spec.value_heads)
    heads = StateHeads(
        decay=torch.randn(matrix if spec.by_channel else matrix[:1]),
        bias=offsets,
        key_heads=spec.key_heads,
        skip=None if spec.delta else offsets,
    )

    def run() -> object:
        if spec.value_heads:
            return stage.ops.recurrence(x, gates, heads, matrices, log, of)
        return stage.ops.causal_conv(x, weight, None, kept, of, True)

    run()
    return undisturbed(device_seconds(run, CPU) for _ in range(samples))


def measure_small(stage: Stage, samples: int) -> SmallCosts:
    """Return the costs of norms and of the choice of the largest logit."""
    dim, vocab = 1024, 65_536
    x, weight = torch.randn(ROWS, dim).bfloat16(), torch.ones(dim).bfloat16()
    logits = torch.randn(8, vocab)

    def norm(count: int) -> object:
        return stage.ops.rms_norm(x[:count], weight, 1e-5)

    def choose(count: int) -> object:
        return stage.ops.largest(logits[:count])

    norms = stage.track([norm] * REPEATED, ROWS)
    chosen = stage.track([choose] * REPEATED, len(logits))
    return SmallCosts(
        launch=_one_row(norms, samples),
        activation=4 * dim / _each_row(norms, ROWS, samples),
        logit=_each_row(chosen, len(logits), samples) / vocab,
    )


def _one_row(track: Track, samples: int) -> float:
    return median(_typical(lambda: track(1), samples)[1:])


def _each_row(track: Track, rows: int, samples: int) -> float:
    """Return the seconds that each row adds to a call."""
    single = _one_row(track, samples)
    total = median(_typical(lambda: track(rows), samples)[1:])
    return max(total - single, single / 100) / (rows - 1)


def nonnegative_fit(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the costs of columns by a least-squares fit of the relative errors; a cost that would
    be negative is 0."""
    matrix = np.array(columns, dtype=np.float64).T / np.array(seconds)[:, None]
    costs = np.zeros(len(columns))
    used = list(range(len(columns)))
    while used:
        solution, *_ = np.linalg.lstsq(matrix[:, used], np.ones(len(seconds)), rcond=None)
        if (solution >= 0).all():
            costs[used] = solution
            break
        used.remove(used[int(solution.argmin())])
    return [float(cost) for cost in costs]


def _typical(run: Callable[[], list[float]], samples: int) -> list[float]:
    """Return the typical seconds of each call, after a warm-up run."""
    run()
    return [undisturbed(times) for times in zip(*(run() for _ in range(samples)), strict=True)]


def _group(kind: str) -> int:
    return int(kind.rpartition("g")[2]) if kind.startswith("int4") else 0


def _inputs(kind: str, about: int) -> int:
    """Return a number of inputs that the kind's group divides and no larger group does."""
    group = _group(kind)
    return about if group in (0, 128) else (about // group | 1) * group


def _stored_bytes(stage: Stage, kind: str, inputs: int, outputs: int) -> int:
    facts = weight_facts(kind.partition("-g")[0])
    stored = layer_kind(facts.quantization or "none", inputs, head=False)
    if stored is None:
        return inputs * outputs * DTYPE_BYTES[facts.dtype]
    return stored.weight_bytes(inputs, outputs, stage.kernels)


def _matrix(stage: Stage, kind: str, size: Sizes) -> Matrix:
    """Return a matrix of random rows, repeated: the values do not affect speed."""
    about, outputs, activation = size
    rows = _random_rows(kind, _inputs(kind, about))
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    spec = MatrixSpec(rows.kind, outputs, rows.inputs, False, activation, dtype, CPU)
    matrix = stage.ops.matrix(spec)
    for first in range(0, outputs, PACKED_ROWS):
        stage.ops.pack_rows(matrix, first, rows)
    return matrix


def _random_rows(kind: str, inputs: int) -> Weight:
    if kind in ("fp32", "bf16"):
        values = torch.randn(PACKED_ROWS, inputs) * inputs**-0.5
        return float_weight(values if kind == "fp32" else values.bfloat16())
    group = _group(kind)
    if not group:
        values = torch.randint(-127, 128, (PACKED_ROWS, inputs), dtype=torch.int8)
        return int8_weight(values, torch.full((PACKED_ROWS,), 1e-3), kind == "int8")
    groups = (PACKED_ROWS, inputs // group)
    packed = torch.randint(0, 256, (PACKED_ROWS, inputs // 2), dtype=torch.uint8)
    zeros = torch.full(groups, 8, dtype=torch.uint8)
    return int4_weight(packed, torch.full(groups, 1e-2), zeros, group)


def _products(stage: Stage, matrices: Sequence[Matrix], most_rows: int) -> list[Call]:
    """Return a sequence of products. Products of equal width share their inputs, because the
    engine's activations stay in the cache."""
    inputs: dict[int, Tensor] = {}
    for matrix in matrices:
        spec = matrix.spec
        if spec.inputs not in inputs:
            inputs[spec.inputs] = torch.randn(most_rows, spec.inputs).to(spec.out_dtype)

    def product(matrix: Matrix) -> Call:
        x = inputs[matrix.spec.inputs]
        return lambda rows: stage.ops.linear(x[:rows], matrix, None)

    return [product(matrix) for matrix in matrices]
