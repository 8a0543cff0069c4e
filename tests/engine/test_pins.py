"""Pins from the engine's door to its statistics."""

from __future__ import annotations

from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest, Pin, PromptUse, RequestDelta


def wish(name: str, tenant: str, n: int = 1) -> EngineRequest:
    params = SamplingParams(max_tokens=3, n=n)
    return EngineRequest(name, [1] * 21, params, tenant=tenant, pins=(Pin(20, 60.0),))


def drain(rig) -> list[RequestDelta]:
    deltas = []
    while rig.loop.has_work:
        deltas += rig.loop.step()
    return deltas


def test_a_prompts_use_comes_with_its_first_token_and_with_the_report(rig):
    rig = rig()
    size = rig.core.config.cache.block_size
    written = 20 // size * size
    for name, expected in (("a", PromptUse(0, written)), ("b", PromptUse(written, 0))):
        rig.core.add(wish(name, "t"), rig.clock())
        deltas = drain(rig)
        assert [delta.prompt for delta in deltas] == [expected, None, None]
        report = deltas[-1].report
        assert PromptUse(report.num_cached_tokens, report.num_pinned_tokens) == expected
    stats = rig.core.stats()
    assert stats.pinned_blocks == written // size
    assert stats.kv_usage == 0.0


def test_all_siblings_may_make_the_pin(rig):
    """Whichever of them gets so far."""
    rig = rig()
    rig.core.add(wish("a", "t", n=2), rig.clock())
    rig.core.end("a", rig.clock(), index=0)
    drain(rig)
    assert rig.core.stats().pinned_blocks == 20 // rig.core.config.cache.block_size


def test_a_reset_lets_go_of_everything(rig):
    rig = rig()
    rig.core.add(wish("a", "t"), rig.clock())
    drain(rig)
    cached = rig.core.stats().cached_blocks
    assert cached > 0
    assert rig.core.reset_prefix_cache() == cached
    stats = rig.core.stats()
    assert (stats.cached_blocks, stats.pinned_blocks) == (0, 0)
    rig.core.add(wish("b", "t"), rig.clock())
    assert drain(rig)[0].prompt.num_cached_tokens == 0
