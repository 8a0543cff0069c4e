"""Pages computed by one engine and fetched by another."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.faulty_line import Fault, FaultyLine
from helpers.http_server import until
from helpers.matrix import OBJECT, make_model
from helpers.optional_native import needs_native
from helpers.served_columns import played_again

from kvik import SamplingParams
from kvik.cli.main import main
from kvik.config.config import EngineConfig
from kvik.core.types import EngineRequest, Handover, PageSource, RequestDelta
from kvik.engine.loop import EngineLoop
from kvik.launch import load_loop, resolve_config
from kvik.worker import peer_tier

pytestmark = pytest.mark.usefixtures("forked")
TOKEN = b"a secret of the test"
TINY = {"device": "cpu", "threads": 1, "num_blocks": 60, "max_model_len": 512}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
PROMPT = [random.Random(0).randrange(5, 1000) for _ in range(205)]  # 12 blocks and 13 tokens


def engine(role: str, token: bytes = TOKEN, **options: object) -> EngineLoop:
    if role == "prefill":
        options = {"kv_tiers": "memory:32MiB", **options}
    return load_loop(resolve_config(EngineConfig(role=role, **{**TINY, **options})), token=token)


@pytest.fixture(scope="module")
def prefiller() -> Iterator[EngineLoop]:
    with closing(engine("prefill")) as loop:
        yield loop


@pytest.fixture
def decoder() -> Iterator[EngineLoop]:
    with closing(engine("decode")) as loop:
        yield loop


def run(loop: EngineLoop, request: EngineRequest, seconds: float = 60.0) -> list[RequestDelta]:
    """Return all deltas of a request that runs alone."""
    loop.add(request)
    deltas: list[RequestDelta] = []
    until = time.monotonic() + seconds
    while not deltas or deltas[-1].finish_reason is None:
        assert time.monotonic() < until
        deltas += loop.step()
    return deltas


def prefill(loop: EngineLoop, name: str) -> PageSource:
    params = GREEDY.with_changes(max_tokens=1)
    last = run(loop, EngineRequest(name, PROMPT, params, lends=True))[-1]
    assert last.page_source is not None
    settle(loop)
    return last.page_source


def settle(loop: EngineLoop) -> None:
    for _ in range(10):
        loop.step()


def answer(deltas: list[RequestDelta]) -> list[object]:
    """Return tokens and log probabilities, to the bit."""
    return [(delta.token_ids, delta.logprobs) for delta in deltas if delta.token_ids]


def tokens_of(deltas: list[RequestDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def computed(loop: EngineLoop) -> int:
    return loop.stats().work.prefill_tokens


@pytest.fixture(scope="module")
def alone() -> list[object]:
    with closing(engine("both")) as loop:
        return answer(run(loop, EngineRequest("alone", PROMPT, GREEDY)))


def test_the_decoder_computes_less_than_a_block_with_the_same_bits(
    prefiller: EngineLoop, decoder: EngineLoop, alone: list[object]
) -> None:
    source = prefill(prefiller, "bits")
    assert source.num_tokens == 192
    assert "bits" in prefiller.core.scheduler.moves.leases
    deltas = run(decoder, EngineRequest("bits", PROMPT, GREEDY, source=source))
    assert answer(deltas) == alone
    assert computed(decoder) == len(PROMPT) - 192
    (peer,) = decoder.stats().moves.tiers
    assert (peer.name, peer.loaded, peer.failed) == ("peer", 12, 0)
    until(lambda: no_leases(prefiller))  # the decoder has ended it


def test_a_lease_without_renewal_ends_and_frees_its_pages(
    prefiller: EngineLoop, decoder: EngineLoop, alone: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_tier, "LEASE_SECONDS", 0.1)
    source = prefill(prefiller, "expires")
    until(lambda: no_leases(prefiller))
    assert not prefiller.core.scheduler.moves.index.tiers["memory"].busy
    deltas = run(decoder, EngineRequest("expires", PROMPT, GREEDY, source=source))
    assert answer(deltas) == alone
    assert computed(decoder) == len(PROMPT)


@pytest.mark.parametrize("what", ["flip", "cut", "stall"])
@pytest.mark.parametrize("at", [0, 70, 88, 130, 50_000])
def test_faults_of_the_connection_do_not_change_the_answer(
    prefiller: EngineLoop,
    decoder: EngineLoop,
    alone: list[object],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    at: int,
) -> None:
    monkeypatch.setattr(peer_tier, "MOVE_SECONDS", 0.3)
    monkeypatch.setattr("kvik.links.PROVING_SECONDS", 0.3)
    source = prefill(prefiller, f"{what}-{at}")
    with closing(FaultyLine(source.host, source.port)) as line:
        line.fault = Fault(what, at)
        request = EngineRequest("faulty", PROMPT, GREEDY, source=replace(source, port=line.port))
        assert answer(run(decoder, request)) == alone
    assert 13 <= computed(decoder) <= len(PROMPT)
    assert decoder.stats().moves.tiers[0].failed > 0


@pytest.mark.parametrize("why", ["gone", "another model", "no peers"])
def test_a_prompt_whose_pages_cannot_be_taken_is_computed(
    decoder: EngineLoop, alone: list[object], caplog: pytest.LogCaptureFixture, why: str
) -> None:
    with ExitStack() as stack:
        options = {"kv_cache_dtype": "int8"} if why == "another model" else {}
        other = stack.enter_context(closing(engine("prefill", **options)))
        source = prefill(other, why)
        if why == "gone":
            stack.close()
        loop = stack.enter_context(closing(engine("both"))) if why == "no peers" else decoder
        assert answer(run(loop, EngineRequest(why, PROMPT, GREEDY, source=source))) == alone
        assert computed(loop) == len(PROMPT)
    assert ("fingerprint" in caplog.text) == (why == "another model")


ONE, TWO = {"threads": 1}, {"threads": 2}
RANKS, STAGES = {**TWO, "tensor_parallel_size": 2}, {**TWO, "pipeline_parallel_size": 2}


@needs_native
@pytest.mark.full
@pytest.mark.parametrize(
    ("lends", "fetches"), [(RANKS, ONE), (ONE, RANKS), (STAGES, RANKS), (ONE, STAGES)]
)
def test_pages_do_not_depend_on_the_number_of_processes(
    lends: dict[str, int], fetches: dict[str, int], alone: list[object]
) -> None:
    with (
        closing(engine("prefill", **lends)) as lender,
        closing(engine("decode", **fetches)) as loop,
    ):
        for name in ("a", "b"):
            source = prefill(lender, name)
            deltas = run(loop, EngineRequest(name, PROMPT, GREEDY, source=source))
            assert answer(deltas) == alone
            assert loop.stats().moves.tiers[0].failed == 0
            loop.reset_prefix_cache()
        assert computed(loop) == 2 * (len(PROMPT) - 192)
        assert loop.stats().moves.tiers[0].loaded == 24


def resumed(request: EngineRequest, handover: Handover) -> EngineRequest:
    return replace(request, resumed=(handover,))


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("kind", ["greedy", "seeded", "unseeded", "structured"])
def test_a_request_continues_in_another_engine_with_the_same_bits(
    prefiller: EngineLoop, decoder: EngineLoop, kind: str, steps: int
) -> None:
    drawn = GREEDY.with_changes(temperature=1.0, repetition_penalty=1.2, max_tokens=20)
    params = {
        "greedy": GREEDY,
        "seeded": drawn.with_changes(seed=3),
        "unseeded": drawn,
        "structured": drawn.with_changes(seed=4, structured=OBJECT, max_tokens=60),
    }[kind]
    request = EngineRequest(f"handed {kind} {steps}", PROMPT, params)
    first: list[RequestDelta] = []
    prefiller.add(request)
    while len(answer(first)) < steps:
        first += prefiller.step()
    prefiller.hand_over(request.request_id)
    while first[-1].finish_reason is None:
        first += prefiller.step()
    settle(prefiller)
    handover = first[-1].handed
    assert handover.output_token_ids == tokens_of(first)
    assert not prefiller.core.has_requests and prefiller.core.scheduler.kv.usage == 0
    then = run(decoder, resumed(request, handover))
    assert computed(decoder) <= 1
    with closing(engine("both")) as alone:
        seed = params.seed if params.seed is not None else handover.seed
        right = run(alone, replace(request, params=params.with_changes(seed=seed)))
    assert answer(first) + answer(then) == answer(right)
    assert then[-1].finish_reason is right[-1].finish_reason
    assert then[-1].report.num_output_tokens == len(tokens_of(right))


@pytest.mark.full
@pytest.mark.parametrize("steps", [1, 5])
def test_siblings_continue_separately_with_the_same_bits(
    prefiller: EngineLoop, decoder: EngineLoop, steps: int
) -> None:
    drawn = GREEDY.with_changes(temperature=1.0, seed=3, max_tokens=9, n=3)
    request = EngineRequest(f"siblings {steps}", PROMPT, drawn)

    def run_all(loop: EngineLoop, ends: int) -> list[RequestDelta]:
        found: list[RequestDelta] = []
        while sum(delta.finish_reason is not None for delta in found) < ends:
            found += loop.step()
        return found

    prefiller.add(request)
    first: list[RequestDelta] = []
    while any(len(of(first, index)) < steps for index in range(3)):
        first += prefiller.step()
    prefiller.end(request.request_id, 1)
    first += run_all(prefiller, 1)
    prefiller.hand_over(request.request_id)
    last = run_all(prefiller, 2)
    settle(prefiller)
    handovers = tuple(delta.handed for delta in last)
    assert [one.index for one in handovers] == [0, 2]
    assert len({one.source.lease for one in handovers}) == 2
    assert not prefiller.core.has_requests and prefiller.core.scheduler.kv.usage == 0
    decoder.add(replace(request, resumed=handovers))
    then = run_all(decoder, 2)
    assert computed(decoder) <= 2
    with closing(engine("both")) as alone:
        alone.add(request)
        right = run_all(alone, 3)
    for index in (0, 2):
        assert of(first, index) + of(last, index) + of(then, index) == of(right, index)
    assert not of(then, 1)
    settle(decoder)
    until(lambda: no_leases(prefiller))


def no_leases(loop: EngineLoop) -> bool:
    run(loop, EngineRequest("another", [1, 2, 3], GREEDY.with_changes(max_tokens=1)))
    return not loop.core.scheduler.moves.leases


def of(deltas: list[RequestDelta], index: int) -> list[object]:
    """Return tokens and log probabilities of one sibling, to the bit."""
    return answer([delta for delta in deltas if delta.index == index])


def test_a_hand_over_is_replayed(tmp_path: Path) -> None:
    config = EngineConfig(role="prefill", kv_tiers="memory:32MiB", **TINY)
    resolved, path = resolve_config(config), tmp_path / "flight"
    with closing(load_loop(resolved, path, token=TOKEN)) as loop:
        loop.add(EngineRequest("a", PROMPT, GREEDY))
        loop.add(EngineRequest("b", PROMPT[:50], GREEDY))
        for _ in range(4):
            loop.step()
        loop.hand_over("a")
        while loop.core.has_requests:
            loop.step()
    played = played_again(resolved, path)
    assert played.difference is None and played.requests == 2


@pytest.mark.parametrize(
    "processes",
    [
        {},
        pytest.param(
            {"tensor_parallel_size": 2, "threads": 2}, marks=[pytest.mark.full, needs_native]
        ),
    ],
)
def test_what_was_fetched_is_computed_again_for_a_replay(
    processes: dict[str, int], prefiller: EngineLoop, tmp_path: Path, capsys
) -> None:
    """Of a prompt, a request that continues within a block, and siblings; pages of one are
    missing."""
    params = GREEDY.with_changes(temperature=1.0, seed=1, max_tokens=30)
    name = f"{len(processes)} processes"
    source = prefill(prefiller, f"prompt {name}")
    requests = [EngineRequest("prompt", PROMPT, GREEDY, source=source)]
    requests.append(replace(requests[0], request_id="gone", source=replace(source, lease="none")))
    for request in (
        EngineRequest(f"alone {name}", PROMPT[:43], params, cache_salt="of another one"),
        EngineRequest(f"siblings {name}", PROMPT[5:80], params.with_changes(n=2)),
    ):
        prefiller.add(request)
        found: list[RequestDelta] = []
        while sum(len(delta.token_ids) for delta in found) < 9:
            found += prefiller.step()
        prefiller.hand_over(request.request_id)
        handed = []
        while len(handed) < request.params.n:
            handed += [delta.handed for delta in prefiller.step() if delta.handed is not None]
        requests.append(replace(request, resumed=tuple(handed)))
    settle(prefiller)
    config = EngineConfig(role="decode", **{**TINY, **processes})
    resolved, file = resolve_config(config), tmp_path / "flight"
    with closing(load_loop(resolved, file, token=TOKEN)) as loop:
        for request in requests:
            loop.add(request)
            while loop.core.has_requests:
                loop.step()
        (peer,) = loop.stats().moves.tiers
        assert peer.loaded > 12 and loop.stats().moves.totals.loaded_tokens > 192
    assert main(["replay", str(file)]) == 0, capsys.readouterr()
    played = played_again(resolved, file)  # reports the missing pages
    assert "a page that was loaded" in played.difference.what


def test_states_are_fetched_with_the_pages_of_their_blocks(tmp_path: Path, capsys) -> None:
    """Of a prompt, and of a request that continues within a block; also in a replay."""
    model = {**make_model("states", tmp_path), "max_model_len": 250}
    prompt = [5 + token % 91 for token in PROMPT]
    config = EngineConfig(role="decode", **{**TINY, **model})
    resolved, file = resolve_config(config), tmp_path / "flight"
    with closing(engine("prefill", **model)) as lender:
        params = GREEDY.with_changes(max_tokens=1)
        last = run(lender, EngineRequest("a", prompt, params, lends=True))[-1]
        begun = EngineRequest("b", prompt[:90], GREEDY)
        lender.add(begun)
        first: list[RequestDelta] = []
        while len(answer(first)) < 5:
            first += lender.step()
        lender.hand_over("b")
        while first[-1].finish_reason is None:
            first += lender.step()
        settle(lender)
        sources = last.page_source, first[-1].handed.source
        assert [source.num_tokens for source in sources] == [192, 94]
        requests = [EngineRequest("a", prompt, GREEDY, source=last.page_source)]
        requests.append(resumed(begun, first[-1].handed))
        with closing(load_loop(resolved, file, token=TOKEN)) as loop:
            found = [answer(run(loop, request)) for request in requests]
            assert computed(loop) <= len(PROMPT) - 192 + 1
            assert loop.stats().moves.tiers[0].failed == 0
    with closing(engine("both", **model)) as alone:
        right = [
            answer(run(alone, EngineRequest(r.request_id, r.prompt_token_ids, GREEDY)))
            for r in requests
        ]
    assert [found[0], answer(first) + found[1]] == right
    assert main(["replay", str(file)]) == 0, capsys.readouterr()


def test_leases_end_with_their_blocks(prefiller: EngineLoop) -> None:
    prefill(prefiller, "reset")
    prefiller.reset_prefix_cache()
    moves = prefiller.core.scheduler.moves
    assert not moves.leases and not moves.index.tiers["memory"].busy
    settle(prefiller)
    assert not prefiller.executor._mover._page_server._leased
