"""The audit finds each corruption of pins, with an error that names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers.simulation import Setup, Simulation

from kvik.core import invariants
from kvik.core.invariants import InvariantError
from kvik.core.pins import PinnedPrefix, PinTable
from kvik.core.types import Pin

Corruption = Callable[[PinTable], object]


def pinned() -> Simulation:
    """Return a simulation with two pins of a prompt that two requests use, in both kinds of
    group."""
    sim = Simulation(Setup(windows=(None, 6), num_blocks=79))
    pins = (Pin(8, 60.0), Pin(16, 60.0))
    for _ in range(2):
        sim.add([1] * 17, 20, pins=pins)
        sim.step()
        sim.step()
    assert len(sim.scheduler.kv.pins.by_use) == 2
    return sim


def first(pins: PinTable) -> PinnedPrefix:
    return next(iter(pins.by_use))


def end_of(held: PinnedPrefix) -> int:
    assert held.end is not None
    return held.end.blocks[0]


def lose_a_parent(pins: PinTable) -> None:
    (tenant,) = pins.tenants.values()
    del tenant.nodes[next(iter(tenant.nodes))]


def use_once_more(pins: PinTable) -> None:
    held = first(pins)
    assert held.end is not None
    held.end.uses += 1


def set_quota(name: str) -> Corruption:
    return lambda pins: setattr(pins, name, 3)


CORRUPTIONS: list[tuple[str, Corruption]] = [
    ("lost its beginning", lose_a_parent),
    ("pinned in vain", lambda p: p.pool.forget(end_of(first(p)))),
    ("cannot be matched", lambda p: p.pool.forget(first(p).window[0])),
    ("node of pins is miscounted", use_once_more),
    ("miscounts what it pins", lambda p: setattr(first(p).tenant, "num_blocks", 1)),
    ("pins too much", set_quota("most_of_tenant")),
    ("too much is pinned", set_quota("most_blocks")),
    ("pinned without a prefix", lambda p: p.pool.pin(end_of(first(p)))),
    ("pinned without a prefix", lambda p: p.pool.unpin(end_of(first(p)))),
    ("pins are listed wrongly", lambda p: p.by_use.popitem()),
    ("kept by pins are miscounted", lambda p: setattr(p.pool, "num_kept", 7)),
]


def test_sound_pins_pass() -> None:
    invariants.check(pinned().scheduler)


@pytest.mark.parametrize(("message", "corrupt"), CORRUPTIONS)
def test_a_corruption_is_found(message: str, corrupt: Corruption) -> None:
    sim = pinned()
    corrupt(sim.scheduler.kv.pins)
    with pytest.raises(InvariantError, match=message):
        invariants.check(sim.scheduler)
