"""Tokens that are held for a moment: nothing is lost, doubled or out of order."""

from __future__ import annotations

import copy

from hypothesis import given
from hypothesis import strategies as st

from kvik.core.plan import SchedulerOutput
from kvik.core.types import FinishReason, PromptUse, RequestDelta, TokenLogprobs
from kvik.engine import host as module
from kvik.engine.host import DeltaBuffer


class Reader:
    """What was handed on, in order, by completion."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[str, int]]] = []
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], FinishReason] = {}

    def take(self, deltas: list[RequestDelta]) -> None:
        keys = [(delta.request_id, delta.index) for delta in deltas]
        assert len(set(keys)) == len(keys), "one delta for each completion"
        if keys:
            self.calls.append(keys)
        for key, delta in zip(keys, deltas, strict=True):
            assert key not in self.ends, "it had ended"
            self.tokens.setdefault(key, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.ends[key] = delta.finish_reason
            if delta.logprobs is not None:
                assert [one.token_id for one in delta.logprobs] == delta.token_ids


def delta(
    request: str,
    index: int,
    token: int,
    reason: FinishReason | None = None,
    prompt: PromptUse | None = None,
) -> RequestDelta:
    logprobs = [TokenLogprobs(token, -1.0, 1)]
    return RequestDelta(request, index, [token], reason, logprobs=logprobs, prompt=prompt)


def plan(num_tokens: int) -> SchedulerOutput:
    return SchedulerOutput(0, [0], [num_tokens], [0], [True])


@given(
    st.lists(
        st.tuples(
            st.lists(
                st.tuples(
                    st.sampled_from("abc"),
                    st.integers(0, 2),
                    st.sampled_from([None, None, None, "first", "last"]),
                ),
                max_size=5,
                unique_by=lambda one: one[:2],
            ),
            st.floats(0, 0.05),
            st.integers(1, 64),
        ),
        max_size=40,
    )
)
def test_every_token_once_and_in_order(steps):
    now = 0.0
    reader = Reader()
    held = DeltaBuffer(reader.take)
    sent: dict[tuple[str, int], list[int]] = {}
    token, ended = 0, set()
    for brought, seconds, tokens_of_next in steps:
        deltas, urgent = [], []
        for request, index, event in brought:
            if (request, index) in ended:
                continue
            token += 1
            sent.setdefault((request, index), []).append(token)
            reason = FinishReason.LENGTH if event == "last" else None
            prompt = PromptUse(0, 0) if event == "first" else None
            deltas.append(delta(request, index, token, reason, prompt))
            if event:
                urgent.append((request, index, token))
            if event == "last":
                ended.add((request, index))
        kept = copy.deepcopy([one.token_ids for one in deltas])
        lists = [one.token_ids for one in deltas]
        now += seconds
        reader.take(held.take(deltas, now))
        for request, index, newest in urgent:
            assert reader.tokens[request, index][-1] == newest
        held.planned(plan(tokens_of_next), now)
        assert lists == kept, "the engine's own lists were changed"
    reader.take(held.release(now))
    assert reader.tokens == sent
    assert set(reader.ends) == ended
    assert held.release(now) == []


def test_what_is_urgent_takes_nothing_else_along():
    reader = Reader()
    held = DeltaBuffer(reader.take)
    reader.take(held.take([delta("a", 0, 1)], 7.0))  # nothing was handed on for long: at once
    reader.take(held.take([delta("a", 0, 2), delta("b", 0, 3, prompt=PromptUse(0, 0))], 7.0))
    assert reader.calls == [[("a", 0)], [("b", 0)]]
    reader.take(held.take([delta("a", 0, 4, FinishReason.LENGTH)], 7.0))
    assert reader.tokens["a", 0] == [1, 2, 4]
    assert reader.ends == {("a", 0): FinishReason.LENGTH}


def test_the_more_streams_the_longer_and_never_longer_than_that():
    for streams, seconds in ((1, 1 / module.EVENTS_PER_SECOND), (10_000, module.MAX_DELAY)):
        held = DeltaBuffer(lambda deltas: None)
        everyone = [delta(str(i), 0, 1) for i in range(streams)]
        assert len(held.take(copy.deepcopy(everyone), 7.0)) == streams
        assert held.take(copy.deepcopy(everyone), 7.0 + 0.9 * seconds) == []
        assert len(held.take(copy.deepcopy(everyone), 7.0 + 1.1 * seconds)) == streams


def test_nothing_is_held_through_a_step_that_is_much_longer():
    reader = Reader()
    held = DeltaBuffer(reader.take)
    everyone = [delta(name, 0, 1) for name in "abcd"]
    reader.take(held.take(copy.deepcopy(everyone), 7.0))
    held.planned(plan(4), 7.0)
    assert held.take(copy.deepcopy(everyone), 7.0) == []
    held.planned(plan(8), 7.0)  # little longer
    assert len(reader.calls) == 1
    held.planned(plan(17), 7.0)
    assert len(reader.calls) == 2 and reader.tokens["a", 0] == [1, 1]
    held.planned(plan(400), 7.0)  # nothing is held now
    assert len(reader.calls) == 2


def test_what_comes_before_a_first_token_stays_with_it():
    """Log probabilities of a prompt come in pieces, and what was cached of it with the token."""
    held = DeltaBuffer(lambda deltas: None)
    held.release(7.0)
    rows = [TokenLogprobs(token, -1.0, 1) for token in range(4)]
    used = PromptUse(3, 0)
    for piece in (rows[:2], rows[2:]):
        assert held.take([RequestDelta("a", 0, [], prompt_logprobs=piece)], 7.0) == []
    found = held.take([RequestDelta("a", 0, [7], prompt=used)], 7.0)
    assert found == [RequestDelta("a", 0, [7], prompt=used, prompt_logprobs=rows)]
