"""The audit finds each corruption, with an error that names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from helpers import invariants
from helpers.invariants import InvariantError
from helpers.simulation import Setup, Simulation

from kvik.core.pins import PinnedPrefix, PinTable
from kvik.core.scheduler import Scheduler
from kvik.core.types import Pin, RequestStatus

Corruption = Callable[[Scheduler], object]


def busy() -> Scheduler:
    """Return a scheduler with two siblings that share a block and another request running, two
    waiting, and a step in flight."""
    sim = Simulation(Setup(block_size=4, windows=(None, 6), max_num_seqs=3, depth=2))
    sim.add([0] * 9, max_tokens=30, n=2, stop_ids=frozenset())
    sim.add([1] * 5, max_tokens=30, stop_ids=frozenset())
    for _ in range(6):
        sim.step()
    sim.add([2] * 3)
    sim.add([2] * 4)
    scheduler = sim.scheduler
    assert (len(scheduler.running), len(scheduler.waiting), len(sim.in_flight)) == (3, 2, 1)
    assert max(scheduler.kv.pool.ref_counts) == 2
    return scheduler


def set_first(name: str, value: object) -> Corruption:
    return lambda s: setattr(s.running[0], name, value)


def add_to_first(name: str, value: int) -> Corruption:
    return lambda s: setattr(s.running[0], name, getattr(s.running[0], name) + value)


def swap_hash(s: Scheduler) -> None:
    s.running[0].block_hashes[0] = b"?" * 16


def index_twice(s: Scheduler) -> None:
    pool = s.kv.pool
    (_, block), *_ = pool.index_items()
    pool._index[(0, b"?")] = block


def index_wrongly(s: Scheduler) -> None:
    pool = s.kv.pool
    block = s.running[0].block_ids[0][0]
    pool.forget(block)
    pool.commit(block, (0, b"?"))


def copy_nothing(s: Scheduler) -> None:
    s.kv.pool._copies[s.running[2].block_ids[0][-1]] = (0, b"?")


def copy_unreferenced(s: Scheduler) -> None:
    pool = s.kv.pool
    (key, _), *_ = pool.index_items()
    pool._copies[pool.free_blocks()[0]] = key


def share_what_is_written(s: Scheduler) -> None:
    first, third = s.running[0], s.running[2]
    s.kv.pool.acquire(first.block_ids[0][-1])
    s.kv.pool.release([third.block_ids[0][-1]])
    third.block_ids[0][-1] = first.block_ids[0][-1]


def drop_what_is_seen(s: Scheduler) -> None:
    s.kv.pool.release([s.running[2].block_ids[0][0]])
    s.running[2].block_ids[0][0] = 0


def cut_free_list(s: Scheduler) -> None:
    s.kv.pool._next[0] = s.kv.pool._next[s.kv.pool._next[0]]


def drop_a_table_entry(s: Scheduler) -> None:
    s.kv.pool.release([s.running[0].block_ids[0].pop()])


def drop_last_blocks(s: Scheduler) -> None:
    for ids in s.running[0].block_ids:
        s.kv.pool.release([ids.pop()])


CORRUPTIONS: list[tuple[str, Corruption]] = [
    ("running requests are out of order", lambda s: s.running.reverse()),
    ("waiting requests are out of order", lambda s: s.waiting._requests.reverse()),
    ("running twice", lambda s: s.running.insert(0, s.running[0])),
    ("slots are lost or used twice", set_first("slot", 2)),
    ("slots are lost or used twice", lambda s: s._free_slots.append(7)),
    ("miscounts its tokens", lambda s: setattr(s.waiting, "num_tokens", 3)),
    ("status", set_first("status", RequestStatus.PREEMPTED)),
    ("status", lambda s: setattr(s.waiting.snapshot()[0], "status", RequestStatus.RUNNING)),
    ("holds blocks or a slot", lambda s: setattr(s.waiting.snapshot()[0], "block_ids", [[3], [4]])),
    ("waits with computed", lambda s: setattr(s.waiting.snapshot()[0], "num_computed_tokens", 1)),
    ("waits with computed", lambda s: setattr(s.waiting.snapshot()[0], "num_written_tokens", 1)),
    ("drops tokens before the first cut", set_first("num_cut_tokens", 4)),
    ("computed more than is known", add_to_first("num_computed_tokens", 1)),
    ("computed more than is known", set_first("num_computed_tokens", -1)),
    ("outgrew its limit", set_first("max_length", 9)),
    ("tables differ in length", drop_a_table_entry),
    ("computed past its blocks", drop_last_blocks),
    ("committed past its blocks", add_to_first("num_committed_blocks", 9)),
    ("block hashes do not fit", swap_hash),
    ("block hashes do not fit", lambda s: s.running[0].token_ids.__setitem__(0, 5)),
    ("tokens under way", add_to_first("num_written_tokens", 1)),
    ("miscounts pending", add_to_first("num_pending_tokens", 1)),
    ("free list is broken", lambda s: setattr(s.kv.pool, "num_free", 1)),
    ("free list is broken", cut_free_list),
    ("null block was handed out", lambda s: s.kv.pool.ref_counts.__setitem__(0, 1)),
    ("references", lambda s: s.kv.pool.acquire(s.running[0].block_ids[0][0])),
    ("references", lambda s: s.kv.pool.allocate(1)),
    ("references", lambda s: s.kv.pool.release(s.running[0].block_ids[0][:1])),
    ("lacks a block that it sees", drop_what_is_seen),
    ("writes into a shared block", share_what_is_written),
    ("is indexed twice", index_twice),
    ("indexed under another content", index_wrongly),
    ("is a copy of nothing", copy_nothing),
    ("is a copy without references", copy_unreferenced),
]


def pinned() -> Scheduler:
    """Return a scheduler with two pins of a prompt that two requests use, in both kinds of
    group."""
    sim = Simulation(Setup(windows=(None, 6), num_blocks=79))
    pins = (Pin(8, 60.0), Pin(16, 60.0))
    for _ in range(2):
        sim.add([1] * 17, 20, pins=pins)
        sim.step()
        sim.step()
    assert len(sim.scheduler.kv.pins.by_use) == 2
    return sim.scheduler


def first(pins: PinTable) -> PinnedPrefix:
    return next(iter(pins.by_use))


def end_of(held: PinnedPrefix) -> int:
    return held.blocks[-1]


def set_quota(name: str) -> Callable[[PinTable], object]:
    return lambda pins: setattr(pins, name, 3)


PIN_CORRUPTIONS: list[tuple[str, Callable[[PinTable], object]]] = [
    ("cannot be matched", lambda p: p.pool.forget(end_of(first(p)))),
    ("miscounts what it pins", lambda p: first(p).tenant.blocks.popitem()),
    ("pins too much", set_quota("max_of_tenant")),
    ("too much is pinned", set_quota("max_blocks")),
    ("pinned without a prefix", lambda p: p.pool.pin(end_of(first(p)))),
    ("pinned without a prefix", lambda p: p.pool.unpin(end_of(first(p)))),
    ("pins are listed wrongly", lambda p: p.by_use.popitem()),
    ("kept by pins are miscounted", lambda p: setattr(p.pool, "num_kept", 7)),
]


@pytest.mark.parametrize("state", [busy, pinned])
def test_a_healthy_scheduler_passes(state: Callable[[], Scheduler]) -> None:
    invariants.check(state())


@pytest.mark.parametrize(("message", "corrupt"), CORRUPTIONS)
def test_a_corruption_is_found(message: str, corrupt: Corruption) -> None:
    scheduler = busy()
    corrupt(scheduler)
    with pytest.raises(InvariantError, match=message):
        invariants.check(scheduler)


@pytest.mark.parametrize(("message", "corrupt"), PIN_CORRUPTIONS)
def test_a_corruption_of_pins_is_found(message: str, corrupt: Callable[[PinTable], object]) -> None:
    scheduler = pinned()
    corrupt(scheduler.kv.pins)
    with pytest.raises(InvariantError, match=message):
        invariants.check(scheduler)
