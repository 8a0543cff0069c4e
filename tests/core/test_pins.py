"""Guarantees of pins, and when they yield."""

from __future__ import annotations

import pytest
from helpers.simulation import Setup, Simulation
from helpers.windows import Seen, chunks

from kvik.core.block_pool import BlockPool
from kvik.core.pins import PinTable
from kvik.core.types import FinishReason, Pin, Request

MINUTES = 60.0


def serve(sim: Simulation, prompt: list[int], *pins: Pin, tenant: str = "") -> Request:
    """Run a single request to its end."""
    (request,) = sim.add(prompt, 1, tenant=tenant, pins=pins)
    while not request.finished:
        sim.step()
    sim.now += 0.1
    return request


def churn(sim: Simulation, start: int = 1000) -> None:
    """Run enough different prompts to evict everything unpinned."""
    for i in range(sim.setup.num_blocks + 1):
        token = start + i
        serve(sim, [token] * (2 * sim.setup.block_size), tenant="other")


def cached(sim: Simulation, prompt: list[int]) -> int:
    """Return how many tokens of the prompt are cached now; this does not count as use."""
    (request,) = sim.add(prompt, 1)
    found = sim.scheduler.kv.match(request).num_tokens
    sim.end(request)
    return found


def prompt_of(token: int, blocks: int = 4) -> list[int]:
    """Return a prompt of full blocks and one more token."""
    return [token] * (4 * blocks) + [0]


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6), (6, None, 11), (chunks(8), None)])
def test_a_pinned_prefix_is_not_evicted_by_other_requests(
    windows: tuple[Seen, ...],
) -> None:
    sim = Simulation(Setup(num_blocks=39, windows=windows))
    pinned, plain = prompt_of(1), prompt_of(2)
    serve(sim, plain)
    serve(sim, pinned, Pin(16, 5 * MINUTES))
    assert (cached(sim, pinned), cached(sim, plain)) == (16, 16)
    churn(sim)
    assert (cached(sim, pinned), cached(sim, plain)) == (16, 0)


def test_a_pin_covers_the_full_blocks_of_its_tokens() -> None:
    sim = Simulation(Setup(num_blocks=39))
    prompt = prompt_of(1)
    serve(sim, prompt, Pin(11, 5 * MINUTES))
    churn(sim)
    assert cached(sim, prompt) == 8


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6), (chunks(6), None)])
def test_a_pin_of_a_whole_prompt_keeps_its_last_block(
    windows: tuple[Seen, ...],
) -> None:
    """Longer prompts read the last block too. The same prompt recomputes its last token."""
    sim = Simulation(Setup(num_blocks=39, windows=windows))
    request = serve(sim, [1] * 16, Pin(16, 5 * MINUTES))
    assert request.num_pinned_tokens == 16
    churn(sim)
    assert cached(sim, [1] * 16 + [2]) == 16
    assert cached(sim, [1] * 16) == 12


def test_a_pin_expires_after_its_last_use() -> None:
    sim = Simulation(Setup(num_blocks=39))
    prompt = prompt_of(1)
    serve(sim, prompt, Pin(16, 100.0))
    sim.now += 90.0
    serve(sim, prompt)  # a use, although without a pin
    sim.now += 90.0
    churn(sim, 1000)
    assert cached(sim, prompt) == 16
    sim.now += 11.0
    churn(sim, 2000)
    assert cached(sim, prompt) == 0
    assert sim.scheduler.kv.pool.num_pinned == 0


def test_lookups_do_not_count_as_use() -> None:
    sim = Simulation(Setup(num_blocks=39))
    serve(sim, prompt_of(1), Pin(16, 100.0))
    sim.now += 90.0
    assert cached(sim, prompt_of(1)) == 16
    sim.now += 11.0
    sim.step()
    assert sim.scheduler.kv.pool.num_pinned == 0


def test_the_longer_of_two_times_counts() -> None:
    sim = Simulation(Setup(num_blocks=39))
    serve(sim, prompt_of(1), Pin(16, 60 * MINUTES))
    serve(sim, prompt_of(1), Pin(16, 5 * MINUTES))
    sim.now += 50 * MINUTES
    churn(sim)
    serve(sim, prompt_of(1))  # restarts the hour
    sim.now += 50 * MINUTES
    churn(sim)
    assert cached(sim, prompt_of(1)) == 16


def test_a_shorter_pin_of_the_same_prompt_outlives_a_longer_one() -> None:
    sim = Simulation(Setup(num_blocks=39))
    serve(sim, prompt_of(1), Pin(8, 60 * MINUTES), Pin(16, 5 * MINUTES))
    pool = sim.scheduler.kv.pool
    assert pool.num_pinned == 4  # they share two
    sim.now += 10 * MINUTES
    churn(sim)
    assert cached(sim, prompt_of(1)) == 8
    assert pool.num_pinned == 2


def test_reports_distinguish_newly_pinned_from_cached_tokens() -> None:
    sim = Simulation(Setup(num_blocks=59))

    def figures(request: Request) -> tuple[int, int]:
        report = sim.ended[request.key].report
        return report.num_cached_tokens, report.num_pinned_tokens

    five = 5 * MINUTES
    assert figures(serve(sim, prompt_of(1), Pin(16, five))) == (0, 16)
    assert figures(serve(sim, prompt_of(1), Pin(16, five))) == (16, 0)
    longer = [1] * 16 + [2] * 8 + [0]
    assert figures(serve(sim, longer, Pin(16, five), Pin(24, five))) == (16, 8)
    assert figures(serve(sim, prompt_of(3))) == (0, 0)
    assert figures(serve(sim, prompt_of(3), Pin(16, five))) == (16, 0)  # pinned, not written


def test_siblings_write_a_pinned_prefix_once() -> None:
    sim = Simulation(Setup(num_blocks=59))
    requests = sim.add(prompt_of(1), 4, n=3, pins=(Pin(16, 60.0),))
    sim.drain()
    assert [request.num_pinned_tokens for request in requests] == [16, 0, 0]


def test_a_tenant_over_its_quota_loses_its_least_recently_used_pin() -> None:
    sim = Simulation(Setup(num_blocks=40, pinned_share=1.0, tenant_pinned_share=0.25))  # 10 blocks
    for token in (1, 2):
        serve(sim, prompt_of(token), Pin(16, 60 * MINUTES), tenant="a")
    serve(sim, prompt_of(9), Pin(16, 60 * MINUTES), tenant="b")
    serve(sim, prompt_of(1), tenant="a")
    serve(sim, prompt_of(3), Pin(16, 60 * MINUTES), tenant="a")
    churn(sim)
    assert [cached(sim, prompt_of(token)) for token in (1, 2, 3, 9)] == [16, 0, 16, 16]


def test_a_pin_larger_than_the_quota_is_refused_and_evicts_none() -> None:
    sim = Simulation(Setup(num_blocks=40, tenant_pinned_share=0.25))
    serve(sim, prompt_of(1), Pin(16, 60 * MINUTES))
    request = serve(sim, prompt_of(2, blocks=11), Pin(16, 60 * MINUTES), Pin(44, 60 * MINUTES))
    assert request.num_pinned_tokens == 16  # the shorter one is pinned
    churn(sim)
    assert [cached(sim, prompt_of(1)), cached(sim, prompt_of(2, blocks=11))] == [16, 16]


def test_over_the_total_quota_the_largest_tenant_loses_its_oldest_pin() -> None:
    sim = Simulation(Setup(num_blocks=40, pinned_share=0.5, tenant_pinned_share=0.5))  # 20 blocks
    for token in (1, 2, 3):
        serve(sim, prompt_of(token), Pin(16, 60 * MINUTES), tenant="a")
    for token in (4, 5):
        serve(sim, prompt_of(token), Pin(16, 60 * MINUTES), tenant="b")
    late = serve(sim, prompt_of(6), Pin(16, 60 * MINUTES), tenant="c")
    assert late.num_pinned_tokens == 16
    churn(sim)
    assert [cached(sim, prompt_of(t)) for t in range(1, 7)] == [0, 16, 16, 16, 16, 16]


def test_a_new_pin_of_the_largest_tenant_is_refused() -> None:
    sim = Simulation(Setup(num_blocks=40, pinned_share=0.25, tenant_pinned_share=0.25))
    serve(sim, prompt_of(1), Pin(16, 60 * MINUTES), tenant="a")
    late = serve(sim, prompt_of(2, blocks=7), Pin(28, 60 * MINUTES), tenant="b")
    assert late.num_pinned_tokens == 0
    churn(sim)
    assert cached(sim, prompt_of(1)) == 16


def test_between_equal_tenants_the_new_pin_is_refused() -> None:
    sim = Simulation(Setup(num_blocks=40, pinned_share=0.15, tenant_pinned_share=0.15))  # 6 blocks
    for token, tenant in ((1, "a"), (2, "b")):
        request = serve(sim, prompt_of(token), Pin(16, 60 * MINUTES), tenant=tenant)
        assert request.num_pinned_tokens == (16 if tenant == "a" else 0)


def test_of_one_prompt_the_longer_pin_is_dropped_first() -> None:
    sim = Simulation(Setup(num_blocks=8, budget=64, pinned_share=1.0, tenant_pinned_share=1.0))
    serve(sim, prompt_of(1), Pin(8, 60 * MINUTES), Pin(16, 60 * MINUTES))
    serve(sim, [8] * 23)  # six of the eight blocks
    assert cached(sim, prompt_of(1)) == 8
    assert sim.scheduler.kv.pool.num_pinned == 2


def test_requests_evict_pinned_blocks_before_waiting_or_preempting() -> None:
    """Pins neither delay nor preempt requests; the one unused for longest is dropped first."""
    sim = Simulation(Setup(num_blocks=16, budget=64, pinned_share=1.0, tenant_pinned_share=1.0))
    for token in (1, 2, 3):
        serve(sim, prompt_of(token), Pin(16, 60 * MINUTES))
    serve(sim, prompt_of(1))
    kv = sim.scheduler.kv
    assert kv.pool.num_pinned == 12
    assert kv.usage == 0.0  # pins do not count as usage
    (request,) = sim.add([8] * 31, 1)
    sim.step()
    assert request.finished  # without waiting
    assert [cached(sim, prompt_of(token)) for token in (1, 2, 3)] == [16, 0, 16]
    sim.drain()
    assert sim.scheduler.counters.preemptions == 0


def test_a_pin_in_use_is_kept_if_another_frees_blocks() -> None:
    sim = Simulation(Setup(num_blocks=16, budget=64, pinned_share=1.0, tenant_pinned_share=1.0))
    for token in (1, 2):
        serve(sim, prompt_of(token), Pin(16, 60 * MINUTES))
    sim.add(prompt_of(1), 20)
    sim.step()
    serve(sim, prompt_of(2))  # used after the one in use began
    sim.add([8] * 31, 1)
    sim.step()
    assert [held.first for held in sim.scheduler.kv.pins.by_use] == [
        sim.scheduler.running[0].block_hashes[0]
    ]
    sim.drain()


def test_a_failed_request_unpins_the_blocks_it_wrote() -> None:
    sim = Simulation(Setup(num_blocks=39))
    serve(sim, prompt_of(1), Pin(16, 60 * MINUTES))
    serve(sim, prompt_of(2), Pin(16, 60 * MINUTES))
    (request,) = sim.add(prompt_of(1), 8)
    sim.failing_row = 0
    sim.step()
    assert request.finish_reason is FinishReason.ERROR
    assert [cached(sim, prompt_of(token)) for token in (1, 2)] == [0, 16]
    assert sim.scheduler.kv.pool.num_pinned == 4


def test_a_reset_drops_pins_and_everything_else() -> None:
    sim = Simulation(Setup(num_blocks=39))
    serve(sim, prompt_of(1), Pin(16, 60 * MINUTES))
    serve(sim, prompt_of(2))
    (running,) = sim.add(prompt_of(3), 8)
    sim.step()
    sim.step()
    assert sim.scheduler.kv.reset() == 12
    sim.check()
    assert [cached(sim, prompt_of(token)) for token in (1, 2, 3)] == [0, 0, 0]
    assert not running.finished
    sim.drain()


def test_without_a_prefix_cache_nothing_is_pinned() -> None:
    sim = Simulation(Setup(num_blocks=39, caching=False))
    request = serve(sim, prompt_of(1), Pin(16, 60 * MINUTES))
    assert request.num_pinned_tokens == sim.scheduler.kv.pool.num_pinned == 0


def test_an_aborted_request_pins_its_computed_blocks() -> None:
    sim = Simulation(Setup(num_blocks=39, budget=8))
    (request,) = sim.add(prompt_of(1), 4, pins=(Pin(8, 60.0), Pin(16, 60.0)))
    sim.step()
    sim.end(request, FinishReason.ABORT)
    assert sim.scheduler.kv.pool.num_pinned == 2


def test_a_pin_needs_all_blocks_that_a_window_matches() -> None:
    """A prefix that cannot be matched is not pinned."""
    config = Setup(windows=(9,)).cache
    pool = BlockPool(config.num_blocks)
    pins = PinTable(pool, config)
    blocks = pool.allocate(4)
    hashes = [b"a", b"b", b"c", b"d"]
    for block, key in zip(blocks, hashes, strict=True):
        pool.commit(block, (0, key))
    pool.forget(blocks[2])  # the next query sees the last two blocks
    assert not pins.pin("", hashes, 60.0, 0.0)
    assert pool.num_pinned == 0
    pool.commit(blocks[2], (0, b"c"))
    assert pins.pin("", hashes, 60.0, 0.0)
    assert sorted(pool.pin_counts()) == blocks[2:]


def test_many_short_pins_leave_nothing_behind() -> None:
    sim = Simulation(Setup(num_blocks=29))
    serve(sim, [99] * 5, Pin(4, 30 * MINUTES), tenant="first")  # expires before others drop
    for i in range(300):
        serve(sim, [100 + i] * 5, Pin(4, 60 * MINUTES))
    assert len(sim.scheduler.kv.pins._ends) < 150
    sim.now += 61 * MINUTES
    sim.step()
    pins = sim.scheduler.kv.pins
    assert (len(pins._ends), len(pins.by_use), pins.tenants) == (0, 0, {})
