"""Tokens that are held for a moment: nothing is lost, doubled or out of order."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from kvik.core.types import FinishReason, PromptUse, RequestDelta, TokenLogprobs
from kvik.server import held as module
from kvik.server.held import Held


class Reader:
    """What was handed on, in order, by completion."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[str, int]]] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], FinishReason] = {}

    def take(self, deltas: list[RequestDelta]) -> None:
        keys = [(delta.request_id, delta.index) for delta in deltas]
        assert len(set(keys)) == len(keys), "one delta for each completion"
        self.calls.append(keys)
        for key, delta in zip(keys, deltas, strict=True):
            assert key not in self.ends, "it had ended"
            self.tokens.setdefault(key, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.ends[key] = delta.finish_reason
            if delta.logprobs is not None:
                assert [one.token_id for one in delta.logprobs] == delta.token_ids


def delta(request: str, index: int, token: int, reason: FinishReason | None = None):
    logprobs = [TokenLogprobs(token, -1.0, 1)]
    return RequestDelta(request, index, [token], reason, logprobs=logprobs)


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.booleans(), st.floats(0, 0.05)),
        max_size=60,
    )
)
def test_every_token_once_and_in_order(steps):
    async def run() -> None:
        now = 0.0
        reader = Reader()
        held = Held(reader.take, lambda: now)
        sent: dict[tuple[str, int], list[int]] = {}
        for token, (request, index, urgent, seconds) in enumerate(steps):
            now += seconds
            sent.setdefault((request, index), []).append(token)
            held.add(delta(request, index, token))
            held.release([request] if urgent else [], 3)
            if urgent:
                assert reader.tokens[request, index][-1] == token
        held.release(list("abc"), 3)
        assert reader.tokens == sent

    asyncio.run(run())


def test_what_is_urgent_takes_nothing_else_along():
    async def run() -> None:
        now = 0.0
        reader = Reader()
        held = Held(reader.take, lambda: now)
        held.add(delta("a", 0, 1))
        held.release([], 100)  # nothing was handed on for long: at once
        held.add(delta("a", 0, 2))
        held.add(delta("b", 0, 3))
        held.release(["b"], 100)
        assert reader.calls == [[("a", 0)], [("b", 0)]]
        held.add(delta("a", 0, 4, FinishReason.LENGTH))
        held.release(["a"], 100)
        assert reader.tokens["a", 0] == [1, 2, 4]
        assert reader.ends == {("a", 0): FinishReason.LENGTH}

    asyncio.run(run())


def test_what_is_held_goes_on_by_itself_and_what_is_dropped_does_not():
    async def run() -> None:
        reader = Reader()
        held = Held(reader.take, asyncio.get_running_loop().time)
        for token in range(3):
            for request in ("a", "b"):
                held.add(delta(request, 0, token))
            held.release([], 10)
        held.drop("b")
        await asyncio.sleep(2 * module.MAX_HOLD)
        assert reader.tokens["a", 0] == [0, 1, 2]
        assert reader.tokens["b", 0] == [0]
        assert len(reader.calls) == 2

    asyncio.run(run())


def test_what_comes_before_a_first_token_stays_with_it():
    """Log probabilities of a prompt come in pieces, and what was cached of it with the token."""
    found: list[RequestDelta] = []
    held = Held(found.extend, lambda: 0.0)
    rows = [TokenLogprobs(token, -1.0, 1) for token in range(4)]
    used = PromptUse(3, 0)
    for piece in (rows[:2], rows[2:]):
        held.add(RequestDelta("a", 0, [], prompt_logprobs=piece))
    held.add(RequestDelta("a", 0, [7], prompt=used))
    held.release(["a"], 1)
    assert found == [RequestDelta("a", 0, [7], prompt=used, prompt_logprobs=rows)]
