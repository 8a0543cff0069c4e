"""What to change about a plan that does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvik.config.kv_spec import KV_FORMATS
from kvik.planner.formats import WEIGHT_FORMATS
from kvik.planner.memory import Memory, bytes_of
from kvik.planner.parallel import MAX_DEVICES, can_share
from kvik.planner.setting import Setting
from kvik.planner.shape import ModelShape

MAX_TP = 8  # devices of one machine, between which layers can be shared at speed


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change after which the plan fits.

    Attributes:
        flags: of `kvik plan`.
        total: bytes on the fullest device then.
    """

    flags: str
    total: int


def remedies(shape: ModelShape, at: Setting, memory: Memory) -> tuple[Remedy, ...]:
    """The smallest change of each kind that makes it fit: fewer requests, a shorter context, a
    smaller KV or weight format, more devices; where only devices help, also the smallest formats on
    fewer of them. Empty: nothing helps."""
    changed = [
        *_work(at, memory),
        *_first(shape, _kv_formats(shape, at)),
        *_first(shape, _weight_formats(shape, at)),
    ]
    devices = list(_first(shape, _more_devices(shape, at)))
    if not changed:
        changed += _first(shape, _smaller_on_fewer(shape, at, devices))
    return tuple(_remedy(shape, at, setting) for setting in [*changed, *devices])


def _smaller_on_fewer(shape: ModelShape, at: Setting, enough: list[Setting]) -> Iterator[Setting]:
    """The smallest formats on fewer devices than are `enough` without them."""
    weights = min(WEIGHT_FORMATS, key=shape.weight_bytes)
    kv = min(KV_FORMATS, key=shape.kv_bytes_per_token)
    limit = min((setting.tp * setting.pp for setting in enough), default=MAX_DEVICES + 1)
    for devices in (at, *_more_devices(shape, at)):
        if devices.tp * devices.pp >= limit:
            return
        yield replace(devices, weight_format=weights)
        yield replace(devices, weight_format=weights, kv_format=kv)


def _work(at: Setting, memory: Memory) -> Iterator[Setting]:
    if memory.largest_batch:
        yield replace(at, batch=memory.largest_batch)
    if memory.longest_context:
        yield replace(at, context=memory.longest_context)


def _kv_formats(shape: ModelShape, at: Setting) -> Iterator[Setting]:
    """The largest first: what fits with more bits loses less."""
    for name in sorted(KV_FORMATS, key=shape.kv_bytes_per_token, reverse=True):
        yield replace(at, kv_format=name)


def _weight_formats(shape: ModelShape, at: Setting) -> Iterator[Setting]:
    for name in sorted(WEIGHT_FORMATS, key=shape.weight_bytes, reverse=True):
        yield replace(at, weight_format=name)


def _more_devices(shape: ModelShape, at: Setting) -> Iterator[Setting]:
    """Twice as many, again and again: sharing layers while the heads allow it, then in stages."""
    if at.device.link == 0:
        return
    tp, pp = at.tp, at.pp
    while 2 * tp * pp <= MAX_DEVICES:
        if can_share(shape, 2 * tp, pp) and 2 * tp <= MAX_TP:
            tp *= 2
        elif can_share(shape, tp, 2 * pp):
            pp *= 2
        else:
            return
        yield replace(at, tp=tp, pp=pp)


def _first(shape: ModelShape, settings: Iterable[Setting]) -> Iterator[Setting]:
    """The first that fits, if one does."""
    for setting in settings:
        needed, limit = bytes_of(shape, setting)
        if needed <= limit:
            yield setting
            return


def _remedy(shape: ModelShape, asked: Setting, changed: Setting) -> Remedy:
    named = {
        "dtype": (asked.weight_format, changed.weight_format),
        "kv-dtype": (asked.kv_format, changed.kv_format),
        "context": (asked.context, changed.context),
        "batch": (asked.batch, changed.batch),
        "tp": (asked.tp, changed.tp),
        "pp": (asked.pp, changed.pp),
    }
    flags = " ".join(f"--{name} {new}" for name, (old, new) in named.items() if new != old)
    needed, _ = bytes_of(shape, changed)
    return Remedy(flags, needed)
