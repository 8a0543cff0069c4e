"""EngineCore and the step loop over an executor without a model."""

from __future__ import annotations

import pytest
from helpers import invariants
from helpers.served_engine import engine_request as request

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest, FinishReason, Pin, PromptUse, RequestDelta
from kvik.errors import CapacityError, ParamError


def drain(rig, limit: int = 200) -> list[RequestDelta]:
    deltas = []
    for _ in range(limit):
        if not rig.loop.has_work:
            break
        deltas += rig.loop.step()
        invariants.check(rig.core.scheduler)
    assert not rig.loop.has_work, "the engine did not come to rest"
    pool = rig.core.scheduler.kv.pool
    assert pool.num_free == pool.num_blocks
    return deltas


def tokens_of(deltas: list[RequestDelta], name: str, index: int = 0) -> list[int]:
    return [t for d in deltas if (d.request_id, d.index) == (name, index) for t in d.token_ids]


def ends(deltas: list[RequestDelta]) -> dict[tuple[str, int], FinishReason]:
    return {(d.request_id, d.index): d.finish_reason for d in deltas if d.finish_reason}


@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_follows_eos(rig, depth):
    rig = rig(depth)
    rig.executor.token = lambda step, row: 63 if step == 2 else 1
    rig.core.add(request(max_tokens=20), 0.0)
    rig.core.add(request("b", max_tokens=20, ignore_eos=True), 0.0)
    deltas = drain(rig)
    assert tokens_of(deltas, "a") == [1, 1, 63]
    assert len(tokens_of(deltas, "b")) == 20
    assert ends(deltas)[("a", 0)] is FinishReason.STOP


@pytest.mark.parametrize("where", ["raises", "raises_late"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_failed_step_ends_its_requests_and_later_ones_are_served(rig, where, depth):
    rig = rig(depth)
    rig.core.add(request("a"), 0.0)
    setattr(rig.executor, where, RuntimeError("device lost"))
    deltas = rig.loop.step() + drain(rig)
    assert ends(deltas) == {("a", 0): FinishReason.ERROR}
    assert "device lost" in next(d.error for d in deltas if d.error)
    rig.core.add(request("b"), 0.0)
    assert ends(drain(rig)) == {("b", 0): FinishReason.LENGTH}


@pytest.mark.parametrize("where", ["raises", "raises_late"])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_interrupt_inside_a_step_leaves_the_engine_in_order(rig, where, depth):
    rig = rig(depth)
    rig.core.add(request("a"), 0.0)
    rig.loop.step()
    setattr(rig.executor, where, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        rig.loop.step()
    rig.core.add(request("b"), 0.0)
    reasons = ends(drain(rig))
    # A step that never began has no result to wait for; one that did begin has.
    lost = where == "raises"
    assert reasons[("a", 0)] is (FinishReason.ERROR if lost else FinishReason.LENGTH)
    assert reasons[("b", 0)] is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_at_any_moment_frees_everything(rig, depth):
    for steps_before in range(8):
        made = rig(depth, max_num_batched_tokens=4)
        made.core.add(request("a", range(1, 11), n=2), 0.0)
        made.core.add(request("b"), 0.0)
        deltas = [d for _ in range(steps_before) for d in made.loop.step()]
        made.core.end("a", 0.0)
        invariants.check(made.core.scheduler)
        assert not [r for r in made.core.scheduler.running if r.request_id == "a"]
        deltas += drain(made)
        reasons = ends(deltas)
        assert reasons[("b", 0)] is FinishReason.LENGTH
        assert reasons[("a", 0)] in (FinishReason.ABORT, FinishReason.LENGTH)
        made.core.end("a", 0.0)  # it has ended: no effect
        made.core.end("never seen", 0.0)
        assert made.loop.step() == []


def test_one_sibling_can_end_alone(rig):
    rig = rig()
    rig.core.add(request("a", n=2, max_tokens=10), 0.0)
    for _ in range(3):
        rig.loop.step()
    rig.core.end("a", 0.0, index=1, reason=FinishReason.STOP)
    reasons = ends(drain(rig))
    assert reasons == {("a", 0): FinishReason.LENGTH, ("a", 1): FinishReason.STOP}


def test_a_request_id_is_served_once_at_a_time(rig):
    rig = rig()
    rig.core.add(request("a"), 0.0)
    with pytest.raises(ParamError, match="already"):
        rig.core.add(request("a"), 0.0)
    drain(rig)
    rig.core.add(request("a"), 0.0)
    drain(rig)


def test_the_queue_is_bounded_in_requests_and_tokens(rig):
    limited = rig(max_queued_requests=3)
    for name in "abc":
        limited.core.add(request(name), 0.0)
    with pytest.raises(CapacityError, match="max_queued_requests"):
        limited.core.add(request("d"), 0.0)
    limited.core.check(request("d", n=3))
    with pytest.raises(CapacityError, match="n: must be at most max_queued_requests"):
        limited.core.check(request("d", n=4))  # never, even with an empty queue
    with pytest.raises(CapacityError, match="the queue is full"):  # n counts
        limited = rig(max_queued_requests=3)
        limited.core.add(request("a", n=2), 0.0)
        limited.core.add(request("b", n=2), 0.0)
    limited = rig(max_queued_tokens=10)
    limited.core.add(request("a", range(9)), 0.0)
    with pytest.raises(CapacityError, match="max_queued_tokens"):
        limited.core.add(request("b"), 0.0)
    assert len(tokens_of(drain(limited), "a")) == 5


def test_unseeded_requests_differ_and_repeat_with_the_engine_seed(rig):
    def seeds() -> list[int]:
        fresh = rig()
        fresh.core.add(request("a", n=2), 0.0)
        fresh.core.add(request("b"), 0.0)
        fresh.core.add(request("c", seed=7, n=2), 0.0)
        fresh.loop.step()
        return [r.seed for r in sorted(fresh.core.scheduler.running, key=lambda r: r.serial)] + [
            r.seed for r in fresh.core.scheduler.waiting
        ]

    first = seeds()
    assert first == seeds()
    assert len(set(first)) == len(first)
    assert 7 in first


def test_poll_honours_its_timeout(rig):
    rig = rig(policy="dynamic", batch_size=4, max_wait=5.0)
    rig.loop.add(request("a"))
    assert rig.loop.poll(0.1, rig.clock.sleep) == []
    assert rig.clock.slept == [pytest.approx(0.1)]
    rig.loop.close()
    assert rig.executor.stopped == 1


def test_reports_have_the_times(rig):
    rig = rig()
    rig.core.add(request(max_tokens=2), rig.clock())
    rig.clock.now += 1
    rig.loop.step()
    rig.clock.now += 3
    report = drain(rig)[-1].report
    assert (report.arrival, report.first_scheduled, report.first_token, report.finished) == (
        100.0,
        101.0,
        101.0,
        104.0,
    )


def test_stats_count(rig):
    rig = rig(max_num_seqs=1)
    rig.core.add(request("a", range(9), max_tokens=3), 0.0)
    rig.core.add(request("b", range(9), max_tokens=3), 0.0)
    rig.loop.step()
    stats = rig.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.queued_tokens) == (1, 1, 9)
    assert 0 < stats.kv_usage < 1
    # 9 prompt tokens are in three blocks of four.
    assert (stats.kv_used_tokens, stats.kv_allocated_tokens, stats.peak_blocks) == (9, 12, 3)
    drain(rig)
    stats = rig.core.stats()
    assert (stats.kv_used_tokens, stats.kv_allocated_tokens, stats.peak_blocks) == (0, 0, 3)
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)
    assert stats.delivered_tokens == 6
    assert stats.prefix_queries == 18
    assert stats.prefix_hits == 8  # two full blocks of four
    assert stats.prefix_hit_rate == pytest.approx(8 / 18)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_can_be_computed_without_sampling(rig, depth):
    for length in (1, 4, 5, 31, 33, 64):
        made = rig(depth, max_num_batched_tokens=8)
        made.core.add(request(prompt=[2] * 7), 0.0)
        alone = EngineRequest("p", [1] * length, SamplingParams(max_tokens=0, prompt_logprobs=0))
        made.core.add(alone, 0.0)
        deltas = drain(made)
        assert tokens_of(deltas, "p") == []
        assert ends(deltas)[("p", 0)] is FinishReason.LENGTH


# -- pins: from the request to the statistics -----------------------------------------------------


def pinning(name: str, tenant: str, n: int = 1) -> EngineRequest:
    params = SamplingParams(max_tokens=3, n=n)
    return EngineRequest(name, [1] * 21, params, tenant=tenant, pins=(Pin(20, 60.0),))


def test_prompt_use_is_in_the_first_delta_and_in_the_report(rig):
    rig = rig()
    size = rig.core.config.cache.block_size
    written = 20 // size * size
    for name, expected in (("a", PromptUse(0, written)), ("b", PromptUse(written, 0))):
        rig.core.add(pinning(name, "t"), rig.clock())
        deltas = drain(rig)
        assert [delta.prompt for delta in deltas] == [expected, None, None]
        report = deltas[-1].report
        assert PromptUse(report.num_cached_tokens, report.num_pinned_tokens) == expected
    stats = rig.core.stats()
    assert stats.pinned_blocks == written // size
    assert stats.kv_usage == 0.0


def test_all_siblings_may_make_the_pin(rig):
    """Whichever computes the tokens first."""
    rig = rig()
    rig.core.add(pinning("a", "t", n=2), rig.clock())
    rig.core.end("a", rig.clock(), index=0)
    drain(rig)
    assert rig.core.stats().pinned_blocks == 20 // rig.core.config.cache.block_size
