"""Generations: from a request to its text, however it ends."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from helpers.generating import LETTERS, generating, ids_of, output_of, pieces_of, request
from helpers.served_engine import FakeExecutor, gated_executor
from helpers.waiting import eventually

from kvik.config.server_config import ServerConfig
from kvik.core.types import FinishReason, Handover, RequestDelta, RequestReport
from kvik.engine import host
from kvik.engine.output import OutputSoFar, RequestOutput
from kvik.errors import CapacityError, OverloadError, ParamError
from kvik.server import generation as module
from kvik.server.errors import ABORTED, DEADLINE, FAILED, HttpError
from kvik.server.generation import Generation, Generations
from kvik.server.transfer import (
    MOVES_HEADER,
    RESUMED_HEADER,
    MovedOutput,
    Resumption,
    prompt_digest,
    signed,
)
from kvik.spec.adapters import Adapter


def counting(executor: FakeExecutor | None = None) -> FakeExecutor:
    """Return an executor that generates the letters in order."""
    executor = executor or FakeExecutor()
    executor.token = lambda step, row: step % 26
    return executor


async def text_of(generation) -> str:
    return "".join([delta.text async for deltas in pieces_of(generation) for delta in deltas])


@pytest.mark.parametrize("streaming", [True, False])
async def test_text_and_result(streaming):
    async with generating(counting()) as serving:
        generation = await serving.start(request("AB"), streaming=streaming)
        shown = await text_of(generation) if streaming else None
        output = await output_of(generation)
        assert len(output.text) == 8
        assert output.text in LETTERS * 2
        assert shown in (None, output.text)
        assert list(output.prompt_token_ids) == [0, 1] == list(generation.prompt_token_ids)
        assert output.outputs[0].finish_reason == "length"
        assert serving.watcher.tokens[generation.request_id] == 8
        assert serving.watcher.ended == {generation.request_id: "length"}


async def test_many_streams_get_their_own_text_and_few_pieces():
    """Pieces merge while a reader is away, so that slow readers cause no extra work."""

    async with generating(counting(), max_num_seqs=32, max_num_batched_tokens=256) as serving:
        started = [
            await serving.start(request([i], max_tokens=100, n=1 + i % 3), streaming=True)
            for i in range(10)
        ]
        for generation in started:
            await output_of(generation)
        for i, generation in enumerate(started):
            pieces = [deltas async for deltas in pieces_of(generation)]
            assert len(pieces) == 1
            assert [delta.index for delta in pieces[0]] == list(range(1 + i % 3))
            for delta, completion in zip(pieces[0], generation.result.outputs, strict=True):
                assert delta.text == completion.text
                assert delta.token_ids == completion.token_ids
                assert len(delta.token_ids) == 100
                assert delta.finish_reason == "length"


def test_logprobs_of_merged_pieces_are_in_order():
    from kvik.core.types import TokenLogprobs
    from kvik.engine.output import TextDelta, merged

    one, two, three = (TokenLogprobs(t, -1.0, 1) for t in (1, 2, 3))
    deltas = [
        TextDelta("a", 0, "x", [1], logprobs=[one]),
        TextDelta("a", 1, "y", [3], logprobs=[three]),
        TextDelta("a", 0, "z", [2], "stop", logprobs=[two], stop_reason=7),
    ]
    assert merged(deltas) == [
        TextDelta("a", 0, "xz", [1, 2], "stop", logprobs=[one, two], stop_reason=7),
        TextDelta("a", 1, "y", [3], logprobs=[three]),
    ]


async def test_a_stop_string_ends_one_sibling_early():
    executor = FakeExecutor(token=lambda step, row: (step % 5) if row else 30)

    async with generating(executor) as serving:
        generation = await serving.start(
            request("A", n=2, max_tokens=200, stop="DE"), streaming=True
        )
        shown = {0: "", 1: ""}
        reasons = {}
        async for deltas in pieces_of(generation):
            for delta in deltas:
                shown[delta.index] += delta.text
                if delta.finish_reason:
                    reasons[delta.index] = (delta.finish_reason, delta.stop_reason)
        stopped = [i for i in (0, 1) if reasons[i] == ("stop", "DE")]
        assert len(stopped) == 1
        assert "D" not in shown[stopped[0]]
        assert shown == {c.index: c.text for c in generation.result.outputs}


@pytest.mark.parametrize("streaming", [True, False])
async def test_tokens_after_a_stop_string_are_not_counted(streaming):
    """The engine computes them before it learns of the end."""
    gate = gated_executor()
    async with generating(gate) as serving:
        generation = await serving.start(request("A", stop="C"), streaming=streaming)
        name = generation.request_id
        for text in ("ABCDE", "FG"):
            serving.generations.take([RequestDelta(name, 0, ids_of(text))])
        serving.generations.take([RequestDelta(name, 0, [], FinishReason.STOP)])
        assert (await output_of(generation)).num_output_tokens == 3
        assert generation.record.num_output_tokens == serving.watcher.tokens[name] == 3
        gate.gate.set()


async def test_tokens_between_the_first_and_the_last_are_merged(monkeypatch):
    """Ten thousand steps per second must not cause as many events."""

    monkeypatch.setattr(host, "MAX_DELAY", 5.0)
    monkeypatch.setattr(host, "EVENTS_PER_SECOND", 0.1)
    async with generating(counting()) as serving:
        rings = 0
        generation = await serving.start(request("A", max_tokens=250), streaming=True)
        async for _ in pieces_of(generation):
            rings += 1
        assert rings <= 3  # the first, the last, and one more by thread scheduling


# Refusals


@pytest.mark.parametrize(
    ("request_of", "field"),
    [
        (lambda: request([]), "prompt"),
        (lambda: request([64]), "prompt"),
        (lambda: request("A" * 300), "prompt"),
        (lambda: request("A", bad_words=("x" * 70_000,)), "bad_words"),
        (lambda: request("A", logit_bias={64: 1.0}), "logit_bias"),
        (lambda: request("A", n=128), "n"),
    ],
)
async def test_impossible_requests_are_refused_and_leave_nothing(request_of, field):
    async with generating(max_queued_requests=16, max_requests=1000) as serving:
        with pytest.raises((ParamError, CapacityError)) as caught:
            await serving.start(request_of(), streaming=True)
        assert caught.value.field == field
        assert serving.watcher.refusals == [("", "invalid")]


@pytest.mark.parametrize("priority", [-5, 1])
async def test_a_priority_that_the_policy_ignores_is_refused(priority):
    """As in vLLM, whose message gateways look for."""

    async with generating() as serving:
        with pytest.raises(ParamError, match="Priority scheduling is not enabled") as caught:
            await serving.start(request("A", priority=priority), streaming=True)
        assert caught.value.field == "priority"

    async with generating(policy="priority") as serving:
        await output_of(await serving.start(request("A", priority=priority, max_tokens=1)))


async def test_a_batch_is_accepted_whole_or_not_at_all():
    gate = gated_executor()

    async with generating(gate, max_requests=3) as serving:
        for bad in (
            [request("A"), request([99])],
            [request("A"), request("B", n=2), request("C")],
        ):
            with pytest.raises((ParamError, OverloadError)):
                await serving.start_all(bad)
        gate.gate.set()
        await serving.at_rest()
        both = await serving.start_all([request("A"), request("BC")])
        assert [len((await output_of(g)).prompt_token_ids) for g in both] == [1, 2]


async def test_a_full_queue_of_the_engine_is_a_refusal_and_no_error():
    """Requests that it has preempted wait there again, but not in front of it."""
    gate = gated_executor()
    async with generating(gate, max_queued_requests=2) as serving:
        waiting = await serving.start_all([request("A") for _ in range(8)])
        gate.gate.set()
        ended = await asyncio.gather(*(output_of(one) for one in waiting), return_exceptions=True)
        assert {type(one) for one in ended} == {OverloadError, RequestOutput}
        refused = sum(isinstance(one, OverloadError) for one in ended)
        assert serving.watcher.refusals == [("", "queue")] * refused
        assert list(serving.watcher.ended.values()).count("refused") == refused


# Ends


@pytest.mark.parametrize("streaming", [True, False])
async def test_abort_while_queued_and_while_running(streaming):
    executor = gated_executor(after=3)
    async with generating(executor, max_num_seqs=1) as serving:
        running = await serving.start(request("A", max_tokens=250), streaming=streaming)
        await eventually(lambda: running.record.first_token is not None)
        queued = await serving.start(request("B", n=3, max_tokens=250), streaming=streaming)
        assert serving.admission.num_waiting == 3
        for generation in (queued, running):
            generation.abort()
            generation.abort()  # a second call has no effect
            executor.gate.set()
            with pytest.raises(HttpError) as caught:
                await output_of(generation)
            assert caught.value.code == ABORTED
        assert set(serving.watcher.ended.values()) == {"abort"}


async def test_the_servers_own_time_limit():
    config = ServerConfig(request_timeout=0.1)

    async with generating(FakeExecutor(seconds=0.005), config=config) as serving:
        generation = await serving.start(request("A", max_tokens=250, deadline_ms=60_000))
        with pytest.raises(HttpError) as caught:
            await output_of(generation)
        assert caught.value.code == DEADLINE


async def test_an_error_in_one_requests_text_affects_no_other(monkeypatch):
    executor = counting(gated_executor())
    async with generating(executor) as serving:
        bad = await serving.start(request("A", max_tokens=50), streaming=True)
        good = await serving.start(request("B", max_tokens=50), streaming=True)
        entry = serving.generations._processor._entries[bad.request_id]

        def fail(ids):
            raise ValueError("no such text")

        monkeypatch.setattr(entry.completions[0], "detokenizer", FailingDetokenizer(fail))
        executor.gate.set()
        with pytest.raises(HttpError, match="the engine failed in this request"):
            await output_of(bad)
        assert len((await output_of(good)).text) == 50
        assert serving.watcher.ended[bad.request_id] == "error"


class FailingDetokenizer:
    def __init__(self, push):
        self.push = push


async def test_a_reader_that_stalls_loses_its_own_request(monkeypatch):
    monkeypatch.setattr(module, "MAX_PENDING_TOKENS", 50)
    monkeypatch.setattr(host, "MAX_DELAY", 0.0)
    executor = counting(gated_executor(after=51))
    async with generating(executor) as serving:
        slow = await serving.start(request("A", max_tokens=200), streaming=True)
        whole = await serving.start(request("B", max_tokens=200))
        await eventually(lambda: slow.record.num_output_tokens >= 51)
        executor.gate.set()
        with pytest.raises(HttpError, match="too slow"):
            await output_of(slow)
        assert len((await output_of(whole)).text) == 200


async def test_the_end_of_the_engine_fails_running_requests():
    executor = FakeExecutor(seconds=0.05)

    async with generating(executor) as serving:
        generation = await serving.start(request("A", max_tokens=250), streaming=True)
        await anext(pieces_of(generation))
        await serving.engine.client.close()
        with pytest.raises(HttpError) as caught:
            await output_of(generation)
        assert caught.value.code == FAILED
        assert not serving.generations.live


# Requests sent to the engine


def sent(serving) -> list:
    """Record requests sent to the engine."""
    requests = []
    add = serving.engine.client.add
    serving.engine.client.add = lambda request: (requests.append(request), add(request))[1]
    return requests


async def test_ids_are_random_and_tenants_share_no_prefix():
    async with generating() as serving:
        requests = sent(serving)
        for tenant, salt in [("a", ""), ("b", ""), ("a", "s"), ("as", "")]:
            one = await serving.start(request("A", cache_salt=salt), tenant)
            await output_of(one)
        assert len({r.cache_salt for r in requests}) == 4
        assert len({r.request_id for r in requests}) == 4
        assert [r.tenant for r in requests] == ["a", "b", "a", "as"]


async def test_the_operator_may_let_tenants_share_prefixes():
    async with generating(config=ServerConfig(share_prefix_cache=True)) as serving:
        requests = sent(serving)
        for tenant, salt in [("a", ""), ("b", ""), ("b", "s")]:
            await serving.start(request("A", cache_salt=salt), tenant)
        assert [r.cache_salt for r in requests] == ["", "", "s"]


async def test_under_pressure_answers_are_shorter_if_the_operator_allows_it(monkeypatch):
    monkeypatch.setattr(module, "PRESSURE", 0.5)
    gate = gated_executor()
    config = ServerConfig(pressure_max_tokens=5)

    async with generating(gate, config=config, max_requests=4) as serving:
        free = [await serving.start(request("A", max_tokens=20)) for _ in range(2)]
        capped = await serving.start(request("A", max_tokens=20))
        small = await serving.start(request("A", max_tokens=3))
        gate.gate.set()
        lengths = [(await output_of(g)).num_output_tokens for g in [*free, capped, small]]
        assert lengths == [20, 20, 5, 3]
        assert [g.degraded for g in [*free, capped, small]] == ["", "", "max_tokens=5", ""]


async def test_bad_words_become_ids_outside_the_event_loop():
    async with generating() as serving:
        requests = sent(serving)
        await serving.start(request("A", bad_words=("Cat",)))
        cat = tuple(LETTERS.index(c) for c in "Cat")
        assert cat in requests[0].params.bad_words


async def test_stop_needs_a_tokenizer():
    async with generating() as serving:
        serving.texts.tokenizer = None
        client, config = serving.engine.client, ServerConfig()
        bare = Generations(client, serving.texts, serving.admission, [serving.watcher], config)
        with pytest.raises(ParamError, match="stop"):
            await bare.start_all([request([1], stop="x")], "", streaming=False)


async def test_bursts_are_not_too_much_for_an_active_reader(monkeypatch):
    """Many siblings get a token in the same step, as do all requests after a blocked event loop."""

    monkeypatch.setattr(module, "MAX_PENDING_TOKENS", 4)
    async with generating(FakeExecutor(seconds=0.005)) as serving:
        generation = await serving.start(request("A", n=8, max_tokens=20), streaming=True)
        async for _ in pieces_of(generation):
            pass
        assert [len(one.token_ids) for one in generation.result.outputs] == [20] * 8


async def test_the_event_loop_runs_while_many_prompts_are_sent():
    async with generating(max_requests=64, max_tokens=1 << 20) as serving:
        turns = 0

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.get_running_loop().create_task(other())
        all_of_them = await serving.start_all([request([1] * 200)] * 32)
        assert turns >= 32
        task.cancel()
        for generation in all_of_them:
            generation.abort()


@pytest.mark.parametrize("turns", [0, 3, 10, 40])
async def test_cancellation_while_many_are_sent_leaves_nothing(turns):
    async with generating(max_requests=64) as serving:
        requests = [request([1] * 20, max_tokens=200)] * 16
        task = asyncio.get_running_loop().create_task(serving.start_all(requests, streaming=True))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            for generation in await task:
                generation.abort()


async def test_requests_without_tokens_count_for_the_start_rate():
    """Embeddings have no tokens, and an echo may have none, but both take time in the queue."""

    gate = gated_executor()

    async with generating(gate) as serving:
        for _ in range(3):
            read = await serving.start(request("A"))
            await asyncio.sleep(0.02)
            delta = RequestDelta(read.request_id, 0, [], finish_reason=FinishReason.LENGTH)
            serving.generations.take([delta])
            await output_of(read)
        await serving.start(request("A"))
        with pytest.raises(OverloadError) as caught:
            await serving.start(request("A", deadline_ms=1))
        assert caught.value.field == "deadline_ms"
        serving.generations.abort_all("the test is over")
        gate.gate.set()


async def test_without_a_deadline_no_error_names_one():
    """The server's own limit ends running requests, but refuses none."""

    gate = FakeExecutor()

    async with generating(gate, config=ServerConfig(request_timeout=60.0)) as serving:
        await output_of(await serving.start(request("A")))
        gate.gate.clear()
        await serving.start(request("A"))
        serving.admission._start_rate._seconds = 1e6  # as slow as possible
        await serving.start(request("A"))
        with pytest.raises(OverloadError, match="deadline_ms"):
            await serving.start(request("A", deadline_ms=1000))
        serving.generations.abort_all("the test is over")
        gate.gate.set()


async def test_no_other_adapter_continues_a_request(monkeypatch):
    """Neither here, nor on a server that gets it."""
    adapters, token = [Adapter("mine", f"/{i}", f"{i}", ()) for i in range(2)], "of servers"
    async with generating(config=ServerConfig(kv_token=token)) as serving:
        client, asked = serving.engine.client, []
        for name in ("add", "check", "end"):
            monkeypatch.setattr(client, name, lambda *args: None)
        monkeypatch.setattr(client, "hand_over", asked.append)

        def choose(adapter: Adapter) -> None:
            client.config = client.config.with_adapters((adapter,))

        async def start(**headers: str) -> Generation:
            asking = [request("AB", adapter="mine")]
            (made,) = await serving.generations.start_all(
                asking, "", streaming=True, headers=headers
            )
            return made

        choose(adapters[0])
        first = await start(**{MOVES_HEADER: "1"})
        choose(adapters[1])
        second = await start(**{MOVES_HEADER: "1"})
        serving.generations.hand_over()
        assert asked == [second.request_id]
        report = RequestReport(90.0, 95.0, None, 100.0, 16, 1)
        state = Handover([], 7, None, report)
        output = MovedOutput.of(0, OutputSoFar([], [], False), state, 100.0, 0)
        digest = prompt_digest(ids_of("AB"), adapters[0].digest)
        resumption = Resumption("gen-1", 1, digest, None, False, [output])
        resumed = {RESUMED_HEADER: signed(resumption, token.encode())}
        with pytest.raises(HttpError, match="another prompt"):
            await start(**resumed)
        choose(adapters[0])
        for generation in (first, second, await start(**resumed)):
            generation.abort()
