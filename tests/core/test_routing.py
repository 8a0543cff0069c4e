"""Routing of requests to replicas: tables, and properties over random histories."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest
from helpers.tiers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvik.core.block_pool import BlockPool, ContentChanges, ContentLog, extend_hashes
from kvik.core.config import TierSizes
from kvik.core.plan import MEMORY
from kvik.core.routing import EXPECTED_SECONDS, ReplicaReport, ReplicaRouter
from kvik.core.tier_index import TierIndex

PIECE = 16


def chain(*tokens: int) -> list[bytes]:
    """Return the hashes of a prompt with one block per number."""
    hashes: list[bytes] = []
    extend_hashes(hashes, [t for t in tokens for _ in range(PIECE)], PIECE, "", len(tokens))
    return hashes


def router(count: int = 4, rows: int = 64) -> ReplicaRouter:
    made = ReplicaRouter([f"replica {i}" for i in range(count)], PIECE, rows)
    for i in range(count):
        made.set_available(i, True)
    return made


def holds(
    made: ReplicaRouter, replica: int, *stored: bytes, number: int = 1, kv: float = 0.0
) -> None:
    changes = ContentChanges(number, list(stored), [], cleared=number == 1)
    assert made.report(replica, ReplicaReport(changes, kv, 1000.0))


def send(
    made: ReplicaRouter, name: str, prompt: list[bytes], now: float = 0.0, **how: object
) -> int:
    choice = made.choose(prompt, len(prompt) * PIECE, now, **how)
    made.sent(name, choice, prompt, len(prompt) * PIECE, now)
    return choice.replica


def test_the_replica_that_has_the_prefix_takes_the_request():
    made, prompt = router(), chain(*range(20))
    holds(made, 2, *prompt[:15])
    choice = made.choose(prompt, 20 * PIECE, 0.0)
    assert (choice.replica, choice.hit) == (2, 15)
    assert choice.seconds == pytest.approx(5 * PIECE / 1000)


def test_waiting_work_outweighs_a_short_prefix():
    made, prompt = router(2), chain(*range(20))
    holds(made, 0, *prompt[:10])
    holds(made, 1)
    assert send(made, "a", prompt) == 0
    long = chain(*range(100, 150))
    assert send(made, "b", long, avoid=[1]) == 0
    assert made.choose(prompt, 20 * PIECE, 0.0).replica == 1
    made.began("b", 1.0)
    assert made.choose(prompt, 20 * PIECE, 1.0).replica == 0  # nothing waits there any more


def test_a_full_replica_gets_no_prompts_that_others_compute_soon():
    made, prompt = router(2), chain(*range(20))
    holds(made, 0, *prompt[:10], kv=1.0)
    holds(made, 1)
    assert made.choose(prompt, 20 * PIECE, 0.0).replica == 1


def test_a_full_report_says_how_full_the_replica_is():
    made, prompt = router(2), chain(*range(20))
    holds(made, 0, *prompt[:10], kv=1.0)
    holds(made, 1)
    assert send(made, "a", prompt, avoid=[1]) == 0
    made.ended("a", 0.0)
    assert made.choose(prompt, 20 * PIECE, 0.0).replica == 1


def test_only_present_replicas_are_chosen():
    made, prompt = router(3), chain(1, 2, 3)
    holds(made, 1, *prompt)
    made.set_available(1, False)
    assert {send(made, f"{i}", prompt) for i in range(9)} <= {0, 2}
    assert made.choose(prompt, 48, 0.0, avoid=[0, 2]) is None
    made.set_available(0, False)
    made.set_available(2, False)
    assert made.choose(prompt, 48, 0.0) is None
    made.set_available(1, True)
    assert made.choose(prompt, 48, 0.0).replica == 1


def test_requests_that_were_just_sent_count_as_computed_there_for_a_minute():
    made, prompt = router(8), chain(*range(50))
    for i in range(8):
        holds(made, i)
    first = send(made, "a", prompt)
    made.began("a", 1.0)
    made.ended("a", 2.0)
    assert made.choose(prompt, 800, 59.0).hit == 50
    assert made.choose(prompt, 800, 59.0).replica == first
    assert made.choose(prompt, 800, EXPECTED_SECONDS + 0.1).hit == 0
    assert not made._replicas[first].holds


def test_answers_count_as_cached_without_reports():
    made, prompt = router(1), chain(*range(50))
    send(made, "a", prompt)
    made.began("a", 1.0)
    made.ended("a", 50.0)
    assert made.choose(prompt, 800, EXPECTED_SECONDS + 49.0).hit == 50
    assert made.choose(prompt, 800, EXPECTED_SECONDS + 51.0).hit == 0


def test_requests_of_one_prompt_take_memory_once():
    made, prompt = router(1), chain(*range(400))

    def serve(first: int, count: int) -> None:
        for i in range(first, first + count):
            send(made, f"{i}", prompt, now=i / 1000)
            made.began(f"{i}", i / 1000)
            made.ended(f"{i}", i / 1000)

    serve(0, 10)
    tracemalloc.start()
    serve(10, 200)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 1 << 20


def test_reports_are_valid_longer_than_expectations():
    made, prompt = router(1), chain(*range(5))
    send(made, "a", prompt)
    holds(made, 0, *prompt)  # cleared: a full report
    made.report(0, ReplicaReport(ContentChanges(2, [], [prompt[4]])))
    assert made.choose(prompt, 80, 1000.0).hit == 4


def test_a_gap_between_reports_is_noticed():
    made, prompt = router(1), chain(*range(5))
    holds(made, 0, *prompt)
    assert not made.report(0, ReplicaReport(ContentChanges(3, [], [prompt[4]])))
    assert made.choose(prompt, 80, 0.0).hit == 0
    assert not made.report(0, ReplicaReport(ContentChanges(4, prompt, [])))
    assert made.report(0, ReplicaReport(ContentChanges(5, prompt[:3], [], cleared=True)))
    assert made.report(0, ReplicaReport(ContentChanges(6, prompt[3:], [])))
    assert made.choose(prompt, 80, 0.0).hit == 5


def test_a_server_that_caches_less_than_expected_is_trusted_less():
    made, prompt = ReplicaRouter(["a", "b"], PIECE, 64, lifetime=600.0), chain(*range(50))
    made.set_available(0, True)
    for i in range(20):
        choice = made.choose(prompt, 800, float(i))
        made.sent(f"{i}", choice, prompt, 800, float(i))
        made.began(f"{i}", i + 0.5)
        made.ended(f"{i}", i + 0.6, cached=0.0)
    assert made.choose(prompt, 800, 20.0).seconds > 0.2
    made.set_available(1, True)
    seconds = [made.choose(prompt, 800, 20.0, avoid=[i]).seconds for i in (0, 1)]
    assert seconds[0] == pytest.approx(seconds[1], rel=0.3)  # the prefix saves nothing


@pytest.mark.parametrize("count", [1, 2, 8, pytest.param(64, marks=pytest.mark.full)])
def test_cold_prompts_spread_and_equal_ones_meet(count: int):
    made = router(count)
    chosen = [made.choose(chain(i, 1), 32, 0.0).replica for i in range(64 * count)]
    assert chosen == [made.choose(chain(i, 1), 32, 0.0).replica for i in range(64 * count)]
    shares = [chosen.count(i) for i in range(count)]
    assert sum(shares) == 64 * count
    assert min(shares) >= 24 and max(shares) <= 120


def test_two_routers_agree_without_communication():
    one, other = router(8), router(8)
    for i in range(100):
        prompt = chain(i, 2)
        assert one.choose(prompt, 32, 0.0) == other.choose(prompt, 32, 7.0)


def test_a_replica_that_leaves_moves_its_own_prefixes_only():
    made = router(8)
    before = {i: made.choose(chain(i), 16, 0.0).replica for i in range(400)}
    made.set_available(3, False)
    after = {i: made.choose(chain(i), 16, 0.0).replica for i in range(400)}
    assert all(after[i] == before[i] for i in before if before[i] != 3)
    moved = {after[i] for i in before if before[i] == 3}
    assert len(moved) > 4 and 3 not in moved


def test_conversations_under_a_common_prompt_spread_where_all_have_it():
    made, common = router(4), [1, 2, 3, 4]
    for i in range(4):
        holds(made, i, *chain(*common))
    chosen = {made.choose(chain(*common, 100 + i), 80, 0.0).replica for i in range(40)}
    assert chosen == {0, 1, 2, 3}


def test_a_session_decides_near_ties():
    made = router(8)
    assert len({made.choose(chain(i), 16, 0.0, session="s").replica for i in range(20)}) == 1
    assert len({made.choose([], 5, 0.0, session=f"{i}").replica for i in range(50)}) > 4


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 2**32))
def test_hits_are_those_of_a_walk_along_the_prompt(seed: int):
    random = Random(seed)
    count = random.randint(1, 9)
    made = router(count)
    prompts = [chain(*(random.randint(0, 2) for _ in range(12))) for _ in range(4)]
    known: list[set[bytes]] = []
    for i in range(count):
        mine = {h for p in prompts for h in p[: random.randint(0, 12)]}
        holds(made, i, *mine)
        known.append(mine)
    for prompt in prompts:
        for i in range(count):
            choice = made.choose(prompt, 192, 0.0, avoid=set(range(count)) - {i})
            walked = next((n for n, h in enumerate(prompt) if h not in known[i]), len(prompt))
            assert (choice.replica, choice.hit) == (i, walked)


@settings(max_examples=examples(100), deadline=None)
@given(st.integers(0, 2**32))
def test_any_history_ends_without_work_and_with_known_reports(seed: int):
    random, made, now = Random(seed), router(3), 0.0
    logs, numbers, sent = [set() for _ in range(3)], [0, 0, 0], dict[str, int]()
    for i in range(60):
        now += random.random() * 20
        prompt = chain(*(random.randint(0, 2) for _ in range(6)))
        match random.randrange(5):
            case 0:
                sent[f"{i}"] = send(made, f"{i}", prompt, now)
            case 1 if sent:
                made.began(random.choice(list(sent)), now)
            case 2 if sent:
                name = random.choice(list(sent))
                made.ended(name, now)
                made.ended(name, now)  # once is enough
                del sent[name]
            case 3:
                replica = random.randrange(3)
                stored, removed = prompt[: random.randint(0, 6)], list(logs[replica])[:2]
                removed = [h for h in removed if h not in stored]
                numbers[replica] += 1
                first = numbers[replica] == 1
                changes = ContentChanges(numbers[replica], stored, removed, cleared=first)
                assert made.report(replica, ReplicaReport(changes))
                logs[replica] = logs[replica] - set(removed) | set(stored)
            case 4:
                replica = random.randrange(3)
                made.forget(replica)
                numbers[replica], logs[replica] = 0, set()
    for name in sent:
        made.ended(name, now)
    made.choose([], 1, now + 2 * EXPECTED_SECONDS)  # expectations have expired
    for replica in range(3):
        assert made._replicas[replica].seconds < 1e-6
        assert made._replicas[replica].holds == logs[replica]


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 2**32))
def test_a_log_replayed_is_the_index_of_the_pool(seed: int):
    random, pool, log = Random(seed), BlockPool(12), ContentLog()
    pool.log_to(log)
    logged: set[bytes] = set()
    held: list[int] = []

    def read() -> None:
        changes = log.take()
        if changes is not None:
            if changes.cleared:
                logged.clear()
            assert not set(changes.stored) & set(changes.removed)
            logged.update(changes.stored)
            logged.difference_update(changes.removed)

    for _ in range(80):
        match random.randrange(7):
            case 0 | 1 if pool.num_free:
                held += pool.allocate(1)
            case 2 if held:
                content = chain(random.randrange(8))[0]
                pool.commit(random.choice(held), (random.randrange(2), content))
            case 3 if held:
                pool.release([held.pop(random.randrange(len(held)))])
            case 4 if held:
                pool.forget(random.choice(held))
            case 5 if random.random() < 0.2:
                pool.forget_all()
            case 6:
                read()
    read()
    if seed % 2:
        log.restart()  # from the beginning, whatever was reported
        pool.log_to(log)
        read()
    assert logged == {content for (group, content), _ in pool.index_items() if group == 0}


def test_a_log_has_contents_of_the_cache_and_the_memory_tier() -> None:
    """A content is removed when both have lost it."""
    log, pool = ContentLog(), BlockPool(2)
    index = TierIndex(TierSizes((1,), 1, 0))
    key = (0, b"a")
    pool.log_to(log)
    index.log_to(log)

    def logged() -> tuple[list[bytes], list[bytes]]:
        changes = log.take()
        return ([], []) if changes is None else (changes.stored, changes.removed)

    (block,) = pool.allocate(1)
    pool.commit(block, key)
    assert logged() == ([b"a"], [])
    index.store(key, on_disk=False)
    index.finish(key, MEMORY)
    assert logged() == ([], [])  # it was known
    pool.release([block])
    pool.allocate(2)
    assert logged() == ([], [])  # the tier has it
    index.store((0, b"b"), on_disk=False)
    assert logged() == ([], [b"a"])
    index.finish((0, b"b"), MEMORY)
    assert logged() == ([b"b"], [])
    log.restart()
    index.log_to(log)
    changes = log.take()
    assert changes.cleared and changes.stored == [b"b"]
