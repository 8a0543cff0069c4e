"""Several engines behind one client: routing, sums, losses and retries."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import engine_child
from helpers.scripted_engine import REPORT, Scripted, end, token
from helpers.served_engine import engine_in_thread, engine_request, tiny_config
from helpers.waiting import eventually

from kvik.core.block_pool import ContentChanges, extend_hashes
from kvik.core.routing import ReplicaReport
from kvik.core.sampling_params import SamplingParams
from kvik.core.types import EngineRequest, FinishReason, Handover, PageSource, RequestDelta
from kvik.engine.client import EngineClient
from kvik.engine.core import salt_of
from kvik.engine.host import Reporter
from kvik.engine.remote import EngineState
from kvik.engine.sources import RestartPolicy, Supervisor
from kvik.engine.wire import Add, Credit, End, EngineStart, HandOver, Query, Ready, Report, Unusable
from kvik.engine.wire import engine_request as engine_request_of
from kvik.errors import ParamError, UnavailableError
from kvik.spec.adapters import Adapter

PROMPT = list(range(1, 41))  # ten blocks


class Cluster:
    """Replicas whose engines are played by the test."""

    def __init__(self, count: int = 2) -> None:
        self.sources = [Scripted() for _ in range(count)]
        config = tiny_config()
        self.all = EngineClient(config, self.sources)
        self.deltas: list[RequestDelta] = []

    async def __aenter__(self) -> Cluster:
        self.all.start(self.deltas.extend)
        assert self.all.state is EngineState.STARTING
        for source in self.sources:
            source.send(Ready())
        await self.settle()
        assert (self.all.state, self.all.reason) == (EngineState.READY, "")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.all.close()
        for source in self.sources:
            source.sock.close()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0.002)

    def holds(self, replica: int, prompt: list[int]) -> None:
        hashes: list[bytes] = []
        extend_hashes(hashes, prompt, 4, "", len(prompt) // 4)
        report = ReplicaReport(ContentChanges(1, hashes, [], cleared=True), 0.0, 1000.0)
        self.sources[replica].send(Report(report))

    async def prefers(self, replica: int, others: tuple[int, ...] = (0,)) -> None:
        """Make requests with `PROMPT` go to a replica."""
        self.holds(replica, PROMPT)
        for other in others:
            self.holds(other, [9] * 4)
        await self.settle()

    def place(self, name: str, **params: object) -> int:
        """Add a request, and return its replica, of two."""
        self.all.add(engine_request(name, PROMPT, **params))
        return 0 if self.added()[0] else 1

    def added(self) -> list[list[str]]:
        """Return the ids of the requests that each engine got since the last call."""
        return [[m.request_id for m in s.received() if isinstance(m, Add)] for s in self.sources]

    async def lose(self, replica: int) -> None:
        self.sources[replica].sock.close()
        await self.settle()

    async def send(self, replica: int, *messages: object) -> None:
        self.sources[replica].send(*messages)
        await self.settle()

    async def step(self, replica: int, *deltas: RequestDelta) -> None:
        self.sources[replica].step(*deltas)
        await self.settle()

    async def again(self, replica: int) -> None:
        self.sources[replica].connect()
        await self.send(replica, Ready())

    @property
    def ends(self) -> list[tuple[str, FinishReason]]:
        return [(d.request_id, d.finish_reason) for d in self.deltas if d.finish_reason]


async def test_requests_go_where_their_prefix_is():
    async with Cluster(3) as cluster:
        await cluster.prefers(2, (0, 1))
        cluster.all.add(engine_request("a", [*PROMPT, 50]))
        assert cluster.added() == [[], [], ["a"]]
        await cluster.step(2, token("a"), end("a"))
        assert cluster.ends == [("a", FinishReason.LENGTH)]
        assert cluster.all.num_unfinished == 0


async def test_tenants_under_other_salts_share_no_hits():
    async with Cluster(2) as cluster:
        await cluster.prefers(0, (1,))
        chosen = set()
        for i in range(20):
            params = SamplingParams(max_tokens=2)
            cluster.all.add(EngineRequest(f"{i}", PROMPT, params, cache_salt=f"s{i}"))
            chosen.update(i for i, ids in enumerate(cluster.added()) if ids)
        assert chosen == {0, 1}


async def test_requests_lost_before_a_token_are_sent_to_another_once():
    async with Cluster(2) as cluster:
        first = cluster.place("a")
        await cluster.lose(first)
        assert cluster.all.state is EngineState.READY
        assert cluster.added()[1 - first] == ["a"]
        assert cluster.deltas == []
        await cluster.again(first)
        await cluster.lose(1 - first)
        ((name, reason),) = cluster.ends
        assert (name, reason) == ("a", FinishReason.ERROR)
        assert f"replica {1 - first}" in cluster.deltas[-1].error
        assert not cluster.deltas[-1].resendable  # it may have crashed both
        assert cluster.added()[first] == []


async def test_begun_requests_end_with_an_error_that_names_the_replica():
    async with Cluster(2) as cluster:
        first = cluster.place("a")
        await cluster.step(first, token("a"))
        await cluster.lose(first)
        assert cluster.ends == [("a", FinishReason.ERROR)]
        assert cluster.deltas[-1].error.startswith(f"replica {first}: ")
        assert cluster.added()[1 - first] == []


async def test_siblings_are_lost_and_sent_again_together():
    async with Cluster(2) as cluster:
        first = cluster.place("a", n=3)
        await cluster.lose(first)
        await cluster.step(1 - first, *(end("a", i) for i in range(3)))
        assert [(d.index, d.finish_reason) for d in cluster.deltas] == [
            (i, FinishReason.LENGTH) for i in range(3)
        ]


async def test_ended_requests_are_not_sent_again():
    async with Cluster(2) as cluster:
        first = cluster.place("a")
        cluster.all.end("a")
        assert [type(m) for m in cluster.sources[first].received()] == [End]
        await cluster.lose(first)
        assert len(cluster.ends) == 1
        assert cluster.added()[1 - first] == []


async def test_closing_ends_waiting_requests():
    async with Cluster(1) as cluster:
        cluster.all.add(engine_request("a", PROMPT))
        await cluster.lose(0)
    assert cluster.ends == [("a", FinishReason.ERROR)]


async def test_a_replica_that_cannot_be_loaded_does_not_affect_others():
    cluster = Cluster(2)
    cluster.all.start(cluster.deltas.extend)
    await cluster.send(0, Unusable("model", "has no weights"))
    assert cluster.all.state is EngineState.STARTING
    cluster.sources[1].send(Ready())
    await cluster.all.ready()
    cluster.all.add(engine_request("a"))
    assert cluster.added()[1] == ["a"]
    await cluster.__aexit__()


async def test_the_client_fails_when_all_replicas_have():
    cluster = Cluster(2)
    cluster.all.start(cluster.deltas.extend)
    for source in cluster.sources:
        source.send(Unusable("model", "has no weights"))
    with pytest.raises(UnavailableError, match="no weights"):
        await cluster.all.ready()
    assert cluster.all.state is EngineState.FAILED
    await cluster.__aexit__()


async def test_a_draining_replica_gets_no_new_requests():
    async with Cluster(2) as cluster:
        await cluster.prefers(1)
        cluster.all.add(engine_request("a", [*PROMPT, 7]))
        assert cluster.all.drain_replica(1, drain=True) == 1
        for i in range(5):
            cluster.all.add(engine_request(f"b{i}", [*PROMPT, 7]))
        assert cluster.added() == [[f"b{i}" for i in range(5)], ["a"]]
        await cluster.step(1, token("a"), end("a"))
        assert cluster.ends == [("a", FinishReason.LENGTH)]
        assert cluster.all.drain_replica(1, drain=False) == 0
        cluster.all.add(engine_request("c", [*PROMPT, 7]))
        assert cluster.added()[1] == ["c"]
        for replica, refusal in ((1, ""), (0, "all replicas are drained")):
            cluster.all.drain_replica(replica, drain=True)
            assert cluster.all.refusal == refusal
        cluster.all.drain_replica(0, drain=False)
        await cluster.lose(0)  # the other one is ready, but drained
        assert cluster.all.state is EngineState.READY
        with pytest.raises(UnavailableError, match=r"replica 0: .*; replica 1: is drained"):
            cluster.all.add(engine_request("d"))
        assert cluster.all.refusal.startswith("replica 0: ")
        with pytest.raises(ParamError, match="0 to 1") as raised:
            cluster.all.drain_replica(2, drain=True)
        assert raised.value.field == "replica"


def handed(name: str, *new: int, index: int = 0) -> RequestDelta:
    """Return the last delta of an output that continues elsewhere, with its last tokens `new`."""
    source = PageSource("127.0.0.1", 9000, name, 41)
    handover = Handover([1, *new], 5, source, REPORT, index)
    last = RequestDelta(name, index, [*new], FinishReason.MOVED, report=REPORT)
    return replace(last, handed=handover)


async def test_requests_of_a_draining_replica_continue_in_another():
    async with Cluster(2) as cluster:
        await cluster.prefers(1)
        cluster.all.add(engine_request("a", [*PROMPT, 7]))
        await cluster.step(1, token("a"))
        cluster.all.drain_replica(1, drain=True)
        assert [m.request_id for m in cluster.sources[1].received() if isinstance(m, HandOver)] == [
            "a"
        ]
        await cluster.step(1, handed("a", 2, 3))
        (added,) = [m for m in cluster.sources[0].received() if isinstance(m, Add)]
        request = engine_request_of.decode(added.request)
        (resumed,) = request.resumed
        assert request.prompt_token_ids == [*PROMPT, 7] and resumed.source.lease == "a"
        assert resumed.output_token_ids == [1, 2, 3] and resumed.seed == 5
        assert not cluster.ends and cluster.all.num_unfinished == 1
        await cluster.step(0, token("a"), end("a"))
        assert [delta.token_ids for delta in cluster.deltas] == [[1], [2, 3], [1], []]
        assert cluster.ends == [("a", FinishReason.LENGTH)]


async def test_another_replica_continues_with_no_other_adapter():
    async with Cluster(2) as cluster:
        old, new = (Adapter("mine", f"/{i}", f"{i}", ()) for i in range(2))
        cluster.all.config = cluster.all.config.with_adapters((old,))
        first = cluster.place("a", adapter="mine")
        cluster.all.drain_replica(first, drain=True)
        cluster.all.config = cluster.all.config.with_adapters((new,))  # it is handed over already
        cluster.sources[first].received()
        await cluster.step(first, token("a"), handed("a", 2))
        assert cluster.ends == [("a", FinishReason.ERROR)]
        assert not cluster.added()[1 - first]
        second = cluster.place("b", adapter="mine")
        await cluster.step(second, token("b"))
        cluster.all.drain_replica(first, drain=False)
        cluster.all.config = cluster.all.config.with_adapters(())
        cluster.all.drain_replica(second, drain=True)
        assert not [m for m in cluster.sources[second].received() if isinstance(m, HandOver)]
        await cluster.step(second, end("b"))
        assert cluster.ends[1:] == [("b", FinishReason.LENGTH)]


async def test_a_request_that_ends_while_it_is_handed_over_ends_once():
    async with Cluster(2) as cluster:
        await cluster.prefers(1)
        for name in "ab":
            cluster.all.add(engine_request(name, [*PROMPT, 7]))
        cluster.all.drain_replica(1, drain=True)
        cluster.all.end("a", None, FinishReason.STOP)
        await cluster.step(1, handed("a"), handed("b"))
        assert cluster.added()[0] == ["b"]
        assert cluster.ends == [("a", FinishReason.STOP)]
        await cluster.lose(0)  # before anything of it was delivered: it is sent once more
        cluster.all.drain_replica(1, drain=False)
        await cluster.settle()
        assert cluster.added()[1] == ["b"]


async def test_siblings_continue_together_except_those_that_end():
    async with Cluster(2) as cluster:
        await cluster.prefers(1)
        cluster.all.add(engine_request("a", [*PROMPT, 7], n=4))
        first, second = cluster.sources[1], cluster.sources[0]
        first.step(*(token("a", index) for index in range(4)))
        first.step(end("a", index=1))
        await cluster.settle()
        cluster.all.drain_replica(1, drain=True)
        cluster.all.end("a", 2, FinishReason.STOP)  # the replica did not receive this in time
        first.step(handed("a", 2), handed("a", 3, index=2))
        await cluster.settle()
        assert not cluster.added()[0]  # one is missing
        first.step(handed("a", 4, index=3))
        await cluster.settle()
        (added,) = [m for m in second.received() if isinstance(m, Add)]
        resumed = engine_request_of.decode(added.request).resumed
        assert [(one.index, one.output_token_ids) for one in resumed] == [(0, [1, 2]), (3, [1, 4])]
        second.step(token("a"), token("a", 3), end("a"), end("a", index=3))
        await cluster.settle()
        assert cluster.all.num_unfinished == 0
        ends = {d.index: d.finish_reason for d in cluster.deltas if d.finish_reason is not None}
        assert ends.pop(2) is FinishReason.STOP
        assert ends == dict.fromkeys((0, 1, 3), FinishReason.LENGTH)
        assert len(cluster.ends) == 4


async def test_without_another_replica_requests_end_in_place():
    async with Cluster(2) as cluster:
        first = cluster.place("a")
        await cluster.lose(1 - first)
        assert cluster.all.drain_replica(first, drain=True) == 1
        assert cluster.sources[first].received() == []


async def test_a_gap_in_the_reports_requests_a_full_report():
    async with Cluster(1) as cluster:
        cluster.holds(0, PROMPT)
        await cluster.send(0, Report(ReplicaReport(ContentChanges(3, [], []))))
        asked = [m.question for m in cluster.sources[0].received() if isinstance(m, Query)]
        assert asked == ["report_all"]


async def test_each_engine_is_credited_with_what_others_served(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvik.engine.client.CREDIT_SECONDS", 0.01)
    async with Cluster(3) as cluster:
        cluster.sources[0].send(Report(ReplicaReport(served={"a": 5, "b": 2})))
        cluster.sources[1].send(Report(ReplicaReport(served={"a": 10})))
        credits: list[Counter[str]] = [Counter() for _ in range(3)]
        async with asyncio.timeout(10):
            while credits != [{"a": 10}, {"a": 5, "b": 2}, {"a": 15, "b": 2}]:
                await asyncio.sleep(0.01)
                for count, source in zip(credits, cluster.sources, strict=True):
                    for message in source.received():
                        if isinstance(message, Credit):
                            count.update(message.served)


async def test_statistics_are_summed_and_views_merged():
    async with engine_in_thread() as one, engine_in_thread() as other:
        both = EngineClient(one.client.config, [one.source, other.source])
        deltas: list[RequestDelta] = []
        both.start(deltas.extend)
        await eventually(lambda: all(link.state is EngineState.READY for link in both.links))
        for i in range(12):
            both.add(engine_request(f"{i}", [i, i + 1, i + 2]))
        await eventually(lambda: sum(d.finish_reason is not None for d in deltas) >= 12)
        stats, view, parts = await both.stats(), await both.live(), await both.replicas()
        assert stats.delivered_tokens == 60 == view.stats.delivered_tokens
        assert stats.num_blocks == 1024 == view.blocks.num_blocks
        assert [part.stats.delivered_tokens > 0 for part in parts] == [True, True]
        assert sum(part.stats.steps for part in parts) == stats.steps
        assert stats.work.decode_tokens == sum(p.stats.work.decode_tokens for p in parts)
        assert len({r.number for r in view.finished}) == len(view.finished) == 12
        assert list(view.steps.ended) == sorted(view.steps.ended)
        assert view.steps.first + len(view.steps.ended) == stats.steps
        assert await both.reset_prefix_cache() == stats.cached_blocks > 0
        await both.close()


async def test_an_engine_reports_the_content_of_its_cache():
    async with engine_in_thread() as served:
        reporter = Reporter(served.core.scheduler)
        first = reporter.next_report(0.0, idle=False)
        assert first.changes.cleared
        deltas: list[RequestDelta] = []
        served.client.start(deltas.extend)
        await served.ready()
        served.client.add(engine_request("a", range(1, 13), max_tokens=2))
        await served.at_rest()
        assert reporter.next_report(0.001, idle=False) is None  # too early
        second = reporter.next_report(1.0, idle=False)
        hashes: list[bytes] = []
        salt = salt_of(served.core.config, engine_request("a", range(1, 13)))
        extend_hashes(hashes, list(range(1, 13)), 4, salt, 3)
        assert second.changes.stored == hashes
        assert second.served == {"": 12 + 2}  # an output token was computed, which counts twice


QUICK = RestartPolicy(
    stall=5.0, kill=30.0, exit=1.0, pause=0.01, longest_pause=0.05, crashes=99, window=60.0
)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
async def test_a_replica_may_be_killed_at_any_moment(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Every request ends exactly once: with an error if it had begun, otherwise as usual."""
    drawn = random.Random(seed)
    config = tiny_config()
    command = [sys.executable, str(Path(engine_child.__file__)), "plain"]
    sources = [
        Supervisor(command, EngineStart(config, reports=True), QUICK, lambda text: None)
        for _ in range(2)
    ]
    both, deltas = EngineClient(config, sources), list[RequestDelta]()
    before = set(os.listdir("/dev/shm"))
    both.start(deltas.extend)
    pids = set()
    async with asyncio.timeout(120):
        names = set()
        for turn in range(12):
            await eventually(lambda: all(link.state is EngineState.READY for link in both.links))
            pids.update(source.pid for source in sources)
            for i in range(10):
                name = f"{turn}-{i}"
                tokens = [drawn.randrange(1, 50) for _ in range(drawn.randrange(1, 40))]
                both.add(engine_request(name, tokens, max_tokens=drawn.randrange(1, 20)))
                names.add(name)
            await asyncio.sleep(drawn.random() * 0.03)
            pid = sources[drawn.randrange(2)].pid
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        await eventually(lambda: not both.num_unfinished)
    ends = Counter(d.request_id for d in deltas if d.finish_reason is not None)
    assert ends == dict.fromkeys(names, 1)
    begun = set()
    for delta in deltas:
        if delta.finish_reason is FinishReason.ERROR:
            assert delta.error.startswith("replica ")
        if delta.token_ids:
            begun.add(delta.request_id)
    crashes = [each.getMessage() for each in caplog.records if "(crash " in each.getMessage()]
    assert crashes and all(each.startswith("replica ") for each in crashes)
    lost = {d.request_id for d in deltas if d.finish_reason is FinishReason.ERROR}
    assert len(lost) < 0.8 * len(names)  # about half of them were at a killed replica
    await both.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert set(os.listdir("/dev/shm")) <= before
