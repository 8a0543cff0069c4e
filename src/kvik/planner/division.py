"""What dividing a model costs: what its parts send each other, and what a pipeline leaves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvik.planner.devices import Setting
from kvik.planner.parallel import Collectives, collectives
from kvik.planner.roofline import ACTIVATION_BYTES, decode, decode_rate, step_time
from kvik.planner.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Division:
    """A model on several processes of a CPU, or on several GPUs.

    Attributes:
        cut: "exact" or "fast" (see `planner/parallel.py`).
        collectives: None: no layer is shared.
        layer_bytes: of a token, that collectives carry in a layer.
        exact: of GPUs, the collectives of the other cut; None: of a CPU, or no layer is shared.
        hop_bytes: of a token, from a stage to the next.
        exchange, hop: seconds of one, as measured; None: not measured, or not of a CPU.
        step: seconds that all of them add to a decoding step; None: the speed is unknown.
        rate: tokens/s of decoding, as expected; None: the speed is unknown.
        rate_of_one: the same with one stage on this machine; None: each stage has a memory of its
            own, there is one, or the speed is unknown.
    """

    cut: str
    collectives: Collectives | None
    layer_bytes: int
    exact: Collectives | None
    hop_bytes: int
    exchange: float | None
    hop: float | None
    step: float | None
    rate: float | None
    rate_of_one: float | None


def division_of(shape: ModelShape, at: Setting) -> Division | None:
    """Return what the division costs; None: there is none."""
    if at.parts == 1:
        return None
    found = collectives(shape, exact=at.exact) if at.tp > 1 else None
    measured = at.device.calibration if at.exact else None
    step = rate = rate_of_one = None
    if at.device.rated:
        time = step_time(shape, at, decode(at.group, at.context))
        step = sum(part.expected for part in time.parts if part.bound == "links")
        rate = at.batch / time.expected
        if at.exact and at.pp > 1:
            _, rate_of_one = decode_rate(shape, replace(at, pp=1))
    return Division(
        cut="exact" if at.exact else "fast",
        collectives=found,
        layer_bytes=found.numbers * ACTIVATION_BYTES if found else 0,
        exact=None if at.exact or not found else collectives(shape, exact=True),
        hop_bytes=shape.hidden_size * ACTIVATION_BYTES if at.pp > 1 else 0,
        exchange=measured.exchange_seconds(at.tp) or None if measured and found else None,
        hop=measured.hop or None if measured else None,
        step=step,
        rate=rate,
        rate_of_one=rate_of_one,
    )
