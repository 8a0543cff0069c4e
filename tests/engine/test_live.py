"""The live view of an engine: the map of blocks, the last steps, a timeline of requests."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from kvik.core.block_pool import BlockPool
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest
from kvik.engine import live
from kvik.engine.core import EngineCore
from kvik.engine.live import (
    MAX_CELLS,
    MAX_FINISHED,
    MAX_RUNNING,
    MAX_STEPS,
    MAX_WAITING,
    RATE_SECONDS,
    BlockMap,
    LiveCollector,
    LiveRequest,
    LiveView,
    Phase,
    block_map,
)
from kvik.engine.loop import EngineLoop

FREE, CACHED, SHARED, PINNED, OWNED = live.BlockState


class Watched:
    """An engine and its collector, driven as by the host. A step takes `seconds`."""

    def __init__(self, rig, seconds: float = 0.125) -> None:
        self.rig, self.seconds = rig, seconds
        self.collector = LiveCollector(rig.core)

    def add(self, name: str, length: int, max_tokens: int = 5) -> None:
        # No two prompts share a block.
        prompt = [1 + (hash_of(name) + i * i) % 60 for i in range(length)]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.rig.loop.add(EngineRequest(name, prompt, params))

    def step(self) -> None:
        began = self.rig.clock.now
        deltas = self.rig.loop.step()
        self.rig.clock.now += self.seconds
        self.collector.step(began, self.rig.clock.now, deltas)

    def view(self) -> LiveView:
        return self.collector.view(self.rig.clock.now, self.rig.loop.stats())


def hash_of(name: str) -> int:
    return sum(ord(letter) * 7**place for place, letter in enumerate(name))


@pytest.fixture
def watched(rig) -> Watched:
    return Watched(rig())


def cells_of(found: BlockMap) -> list[int]:
    return list(struct.unpack(f"<{len(found.cells) // 2}H", found.cells))


# -- the map of blocks ---------------------------------------------------------------------------


def test_the_states_of_a_block() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(6)
    assert blocks == [1, 2, 3, 4, 5, 6]
    pool.acquire(2)  # by two requests of the view
    pool.commit(1, (0, b"own"))  # its owner still uses it
    for block in (4, 5):
        pool.commit(block, (0, b"%d" % block))
    pool.pin(5)
    pool.release([4, 5])
    # 6 is used by a request that is not in the view; 7 and 8 were never used.
    found = block_map(pool, [[[1, 2]], [[2, 3]]])
    assert cells_of(found) == [OWNED, SHARED, OWNED + 1, CACHED, PINNED, SHARED, FREE, FREE]
    assert (found.num_blocks, found.blocks_per_cell) == (8, 1)
    assert (found.num_free, found.num_cached) == (4, 3)


def test_a_pinned_block_in_use_is_shown_as_owned() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.commit(block, (0, b"x"))
    pool.pin(block)
    assert cells_of(block_map(pool, [[[block]]])) == [OWNED, FREE]


def test_every_kv_group_is_painted_and_the_null_block_is_not() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    found = block_map(pool, [[[0, 0, blocks[0]], [blocks[3]]], [[blocks[1]], [0, blocks[2]]]])
    assert cells_of(found) == [OWNED, OWNED + 1, OWNED + 1, OWNED, FREE]


def test_every_owner_is_seen_where_a_cell_is_several_blocks() -> None:
    """Wherever its blocks are in the cell, not only in the sampled place."""
    pool = BlockPool(12)
    tables = [pool.allocate(1) for _ in range(12)]
    for place in range(4):
        mine = [[tables[place + 4 * cell]] for cell in range(3)]
        found = block_map(pool, mine, max_cells=3)
        assert found.blocks_per_cell == 4 and found.num_blocks == 12
        assert cells_of(found) == [OWNED, OWNED + 1, OWNED + 2]


def test_an_owned_block_hides_free_ones_of_the_same_cell() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(8)
    pool.release([block for block in blocks if block != 6])
    assert cells_of(block_map(pool, [[[6]]], max_cells=2)) == [FREE, OWNED]


def test_a_last_cell_of_fewer_blocks() -> None:
    pool = BlockPool(10)
    blocks = pool.allocate(10)
    found = block_map(pool, [[blocks[:8]], [blocks[9:]]], max_cells=4)
    assert found.blocks_per_cell == 3
    assert cells_of(found) == [OWNED, OWNED, OWNED, OWNED + 1]


@pytest.mark.parametrize("num_blocks", [1, MAX_CELLS, MAX_CELLS + 1, 10 * MAX_CELLS + 3])
def test_the_map_is_bounded(num_blocks: int) -> None:
    found = block_map(BlockPool(num_blocks), [])
    cells = cells_of(found)
    assert len(cells) <= MAX_CELLS and set(cells) == {FREE}
    assert (len(cells) - 1) * found.blocks_per_cell < num_blocks
    assert num_blocks <= len(cells) * found.blocks_per_cell


def test_sampling_very_many_blocks_still_sees_every_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "MAX_LOOKED_AT", 8)
    pool = BlockPool(400)
    tables = [[pool.allocate(100)] for _ in range(4)]
    owners = {cell - OWNED for cell in cells_of(block_map(pool, tables)) if cell >= OWNED}
    assert owners == {0, 1, 2, 3}


def test_the_map_of_a_running_engine(watched: Watched) -> None:
    for name, length in (("a", 9), ("b", 5)):
        watched.add(name, length, max_tokens=20)
    watched.step()
    view = watched.view()
    cells = cells_of(view.blocks)
    for owner, request in enumerate(view.running, OWNED):
        assert cells.count(owner) == request.blocks > 0
    assert view.blocks.num_free == 32 - sum(request.blocks for request in view.running)


# -- steps and rates -----------------------------------------------------------------------------


def test_a_new_engine(watched: Watched) -> None:
    view = watched.view()
    assert view.steps.ended == () and view.rates.steps == 0
    assert (view.running, view.waiting, view.finished) == ((), (), ())


def test_a_view_lists_the_figures_of_each_step(watched: Watched) -> None:
    watched.add("a", 40, max_tokens=3)  # 32 tokens fit into a step
    for _ in range(4):
        watched.step()
    steps = watched.view().steps
    assert steps.first == 0
    assert steps.prefill_tokens == (32, 8, 0, 0)
    assert steps.decode_tokens == (0, 0, 1, 1)
    assert steps.running == (1, 1, 1, 0)
    assert steps.waiting == steps.preemptions == (0,) * 4
    assert steps.seconds == (0.125,) * 4
    assert steps.ended == (100.125, 100.25, 100.375, 100.5)


def test_loop_iterations_without_a_step_are_not_listed(watched: Watched) -> None:
    watched.add("a", 4, max_tokens=1)
    for _ in range(5):
        watched.step()
    assert len(watched.view().steps.ended) == 1


def test_only_the_last_steps_are_kept(watched: Watched) -> None:
    for turn in range(5):
        watched.add(f"r{turn}", 3, max_tokens=50)
        for _ in range(50):
            watched.step()
    view = watched.view()
    assert view.stats.steps == 250
    assert len(view.steps.ended) == MAX_STEPS and view.steps.first == 50
    assert view.steps.ended[-1] == watched.rig.clock.now


def test_rates(watched: Watched) -> None:
    watched.add("a", 8, max_tokens=40)
    for _ in range(20):  # 16 of them in the last two seconds
        watched.step()
    rates = watched.view().rates
    assert rates.steps == 16 / RATE_SECONDS and rates.decode_tokens == 16 / RATE_SECONDS
    assert rates.prefill_tokens == 0
    watched.rig.clock.now += RATE_SECONDS
    assert watched.view().rates == live.Rates()


def test_rates_if_the_ring_is_shorter_than_their_period(rig) -> None:
    watched = Watched(rig(), seconds=2**-10)
    for turn in range(5):
        watched.add(f"r{turn}", 3, max_tokens=50)
        for _ in range(50):
            watched.step()
    assert watched.view().rates.steps == 1024.0  # not 200 in two seconds


def test_the_difference_of_two_views_has_the_new_steps_and_requests(watched: Watched) -> None:
    watched.add("a", 8, max_tokens=2)
    watched.add("b", 8, max_tokens=6)
    for _ in range(3):
        watched.step()
    earlier = watched.view()
    assert [request.number for request in earlier.finished] == [0]
    for _ in range(3):
        watched.step()
    later = watched.view()
    news = later.after(earlier)
    assert news.steps.first == 3 and news.steps.ended == later.steps.ended[3:]
    assert [request.number for request in news.finished] == [1]
    assert replace(news, steps=later.steps, finished=later.finished) == later
    assert later.after(later).steps.ended == () == later.after(later).finished


# -- timeline of requests ------------------------------------------------------------------------


def only(requests: tuple[LiveRequest, ...]) -> LiveRequest:
    (request,) = requests
    return request


def test_the_phases_of_a_request(watched: Watched) -> None:
    watched.add("a", 40, max_tokens=3)
    waits = only(watched.view().waiting)
    assert (waits.number, waits.phase, waits.arrival) == (0, Phase.WAITING, 100.0)
    assert waits.first_scheduled is waits.first_token is waits.finished is None
    assert (waits.prompt_tokens, waits.output_tokens, waits.blocks) == (40, 0, 0)

    watched.rig.clock.now = 101.0
    watched.step()
    reads = only(watched.view().running)
    assert (reads.phase, reads.computed, reads.blocks) == (Phase.PREFILL, 32, 8)
    assert (reads.first_scheduled, reads.first_token) == (101.0, None)

    watched.step()
    writes = only(watched.view().running)
    assert (writes.phase, writes.output_tokens) == (Phase.DECODE, 1)
    assert (writes.first_scheduled, writes.first_token) == (101.0, 101.125)

    watched.step()
    watched.step()
    view = watched.view()
    assert view.running == ()
    over = only(view.finished)
    assert (over.phase, over.finish_reason) == (Phase.FINISHED, "length")
    assert (over.arrival, over.first_scheduled, over.first_token) == (100.0, 101.0, 101.125)
    assert over.finished == 101.375
    assert (over.prompt_tokens, over.output_tokens, over.blocks) == (40, 3, 0)


def test_a_request_that_is_aborted_while_waiting(watched: Watched) -> None:
    watched.add("a", 4)
    watched.rig.loop.end("a")
    watched.step()
    over = only(watched.view().finished)
    assert (over.finish_reason, over.first_scheduled, over.first_token) == ("abort", None, None)


def test_preempted_requests(watched: Watched) -> None:
    for name in "abcd":  # 60 tokens each would be 60 blocks; there are 32
        watched.add(name, 20, max_tokens=40)
    while not watched.rig.core.scheduler.counters.preemptions:
        watched.step()
    view = watched.view()
    assert view.steps.preemptions[-1] == view.stats.preemptions > 0
    gone = [request for request in view.waiting if request.phase is Phase.PREEMPTED]
    assert gone and all(request.preemptions == 1 and request.blocks == 0 for request in gone)
    assert all(request.first_token is not None for request in gone)


def test_siblings_have_numbers_of_their_own(watched: Watched) -> None:
    params = SamplingParams(n=3, max_tokens=4, temperature=1.0)
    watched.rig.loop.add(EngineRequest("a", [1, 2, 3], params))
    watched.add("b", 4)
    assert [request.number for request in watched.view().waiting] == [0, 1, 2, 3]


def test_a_view_is_bounded(rig) -> None:
    watched = Watched(rig(max_num_seqs=4))
    for i in range(MAX_WAITING + 40):
        watched.add(f"r{i}", 3, max_tokens=1)
    view = watched.view()
    assert len(view.waiting) == MAX_WAITING and view.stats.num_waiting == MAX_WAITING + 40
    assert [request.number for request in view.waiting] == list(range(MAX_WAITING))
    while watched.rig.loop.has_work:
        watched.step()
    finished = watched.view().finished
    assert len(finished) == MAX_FINISHED
    assert [request.number for request in finished] == list(range(8, MAX_WAITING + 40))


def test_a_view_of_very_many_running_requests(rig) -> None:
    made = rig(max_num_seqs=400, max_num_batched_tokens=400)
    config = made.core.config
    core = EngineCore(replace(config, cache=replace(config.cache, num_blocks=2000)))
    loop = EngineLoop(core, made.executor, made.clock)
    watched = Watched(replace(made, core=core, loop=loop))
    for i in range(300):
        watched.add(f"r{i}", 1, max_tokens=9)
    for _ in range(3):
        watched.step()
    view = watched.view()
    assert len(view.running) == MAX_RUNNING < view.stats.num_running
    cells = cells_of(view.blocks)
    # The blocks of the others have owners outside the view.
    assert cells.count(SHARED) == view.stats.num_running - MAX_RUNNING
