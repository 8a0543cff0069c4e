"""From a calibration's figures to the cost of one matrix, one layer's attention, one layer's rest.

Without a calibration a cost is nothing beside the roofline's floor.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import exp, log

from kvik.config.quantization import layer_scheme
from kvik.planner.calibration import (
    AttentionPace,
    Calibration,
    LinearPace,
    interpolate,
)
from kvik.planner.devices import Device
from kvik.planner.formats import WEIGHT_FORMATS
from kvik.planner.shape import UNQUANTIZED_ROLES, Matrix, ModelShape

# Small kernels of a layer: two norms, rotary positions, storing K and V, and attention's own call;
# of a step: token and position vectors, the last norm, the rows that are sampled, their largest.
LAYER_CALLS, STEP_CALLS = 5, 5
ACTIVATION_BYTES = 2


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes that are read in turn, step after step, and bytes a second at which they come."""

    working_set: float
    rate: float


@dataclass(frozen=True, slots=True)
class LinearCost:
    """What multiplying with matrices of one kind costs; without paces, what reading them does."""

    paces: tuple[LinearPace, ...]

    @staticmethod
    def of(device: Device, weight_format: str, matrix: Matrix) -> LinearCost:
        measured = device.calibration
        if measured is None:
            return LinearCost(())
        kind = linear_kind(weight_format, matrix)
        # a quick calibration leaves kinds out: groups of another size cost about the same
        alike = [k for k in measured.linears if k.partition("-g")[0] == kind.partition("-g")[0]]
        found = kind if kind in measured.linears else next(iter(alike), "")
        return LinearCost(measured.linears.get(found, ()))

    def seconds(self, rows: float, matrix: Matrix, num_bytes: float, reading: Reading) -> float:
        """Of one matrix of so many bytes, what is written of its outputs included."""
        if not self.paces:
            return 0.0
        pace = pace_at(self.paces, rows)
        working = matrix.inputs * matrix.outputs * pace.weight(reading.working_set)
        moving = num_bytes / (reading.rate * pace.share)
        beside = pace.call + matrix.inputs * pace.input + matrix.outputs * pace.output
        return beside + max(moving, working)


def linear_kind(weight_format: str, matrix: Matrix) -> str:
    """How a calibration names what a matrix becomes in a weight format."""
    facts = WEIGHT_FORMATS[weight_format]
    head = matrix.role == "head"
    if not facts.quantization or matrix.role in UNQUANTIZED_ROLES:
        return "bf16" if facts.quantization else weight_format
    scheme = layer_scheme(facts.quantization, matrix.inputs, head=head)
    assert scheme is not None
    if scheme.group:
        return f"int4-g{scheme.group}"
    if scheme.float8:
        return "fp8"
    return "int8" if scheme.quantize_activations else "int8-weight-only"


def pace_at(paces: tuple[LinearPace, ...], rows: float) -> LinearPace:
    """Between the measured numbers of rows times are straight lines in log-log, which fits both
    what grows with the rows and what does not; beyond the last they grow with the rows."""
    last = paces[-1]
    if rows >= last.rows:
        more = rows / last.rows
        return LinearPace(
            round(rows),
            last.call * more,
            last.input * more,
            last.output * more,
            last.cached * more,
            last.streamed * more,
            last.share,
        )
    at = bisect_left([pace.rows for pace in paces], rows)
    if at == 0:
        return paces[0]
    low, high = paces[at - 1], paces[at]
    part = log(rows / low.rows) / log(high.rows / low.rows)
    return LinearPace(
        round(rows),
        _between(low.call, high.call, part),
        _between(low.input, high.input, part),
        _between(low.output, high.output, part),
        _between(low.cached, high.cached, part),
        _between(low.streamed, high.streamed, part),
        low.share + (high.share - low.share) * part,
    )


def _between(low: float, high: float, part: float) -> float:
    if low <= 0 or high <= 0:
        return low + (high - low) * part
    return exp(log(low) + (log(high) - log(low)) * part)


def attention_pace(device: Device, head_dim: int) -> AttentionPace | None:
    """For heads of a size between those that were measured."""
    if device.calibration is None:
        return None
    paces = device.calibration.attention

    def at(name: str) -> float:
        points = [(float(pace.head_dim), float(getattr(pace, name))) for pace in paces]
        return interpolate(points, head_dim)

    costs = (at("sequence"), at("cached"), at("streamed"), at("score"), at("prefill"))
    return AttentionPace(head_dim, *costs, at("rotated"), at("stored"), at("scattered"))


def small_seconds(
    shape: ModelShape, measured: Calibration, pace: AttentionPace, prompted: int, decoded: int
) -> float:
    """Of the kernels of a step that are neither products nor attention proper.

    Args:
        prompted, decoded: rows that are neighbours in a sequence, and that are not.
    """
    keys = sum(cache.layers * cache.elements for cache in shape.caches)  # K and V
    queries = shape.num_layers * shape.num_heads * shape.head_dim
    normed = (2 * shape.num_layers + 1) * 2 * shape.hidden_size * ACTIVATION_BYTES
    row = normed / measured.activation + (queries + keys / 2) * pace.rotated
    seconds = (shape.num_layers * LAYER_CALLS + STEP_CALLS) * measured.launch
    seconds += (prompted + decoded) * row
    return seconds + keys * (prompted * pace.stored + decoded * pace.scattered)
