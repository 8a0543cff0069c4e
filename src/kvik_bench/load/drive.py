"""Sends a load to a target, and measures the client itself.

Closed loop: a number of users, each sending after an answer, so a slow server gets less load. Open
loop: requests are sent when they are due, whatever the server does. All times are taken from the
running event loop, so a test may run on a virtual clock.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvik.errors import ConfigError
from kvik.planner.serving import Slo
from kvik_bench.load.metrics import CONNECT, INTERRUPTED, RequestRecord
from kvik_bench.load.workload import LoadConversation, LoadWorkload

if TYPE_CHECKING:
    from kvik_bench.load.openai_target import OpenAITarget


FAILURE_PAUSE = 0.1  # seconds
MAX_UNCONNECTED = 5  # requests in a row without a connection; then the server is lost
START_GAP = 0.001  # seconds: about the client's time to open a connection and send
LOOP_LAG_PERIOD = 0.02  # seconds between samples of the event loop's delay


@dataclass(frozen=True, slots=True)
class Budget:
    """When to stop. Requests due earlier are still sent, and requests in flight are awaited."""

    num_requests: int | None = None
    duration: float | None = None  # seconds after which no conversation is due

    def turns(self, index: int, turns: int) -> int:
        """Return the number of turns of conversation `index` within the budget. It depends only on
        the index, so that timing does not decide what is sent."""
        if self.num_requests is None:
            return turns
        return max(min(turns, self.num_requests - index * turns), 0)


@dataclass(slots=True)
class RunLog:
    """The records of a run; complete at every moment, so that a run can be stopped."""

    records: list[RequestRecord] = field(default_factory=list)
    loop_lag: array[float] = field(default_factory=lambda: array("d"))  # seconds, sampled
    started: float = 0.0
    ended: float = 0.0
    cpu_seconds: float = 0.0  # of this process
    in_flight: int = 0
    finished: int = 0
    failed: int = 0
    output_tokens: int = 0  # of finished requests

    @property
    def cpu_share(self) -> float:
        """Processor time of this process as a share of one core, during the run."""
        return self.cpu_seconds / max(self.ended - self.started, 1e-9)


# (conversation, due, delay) -> whether it was completed
Talk = Callable[[LoadConversation, float, float], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` users, each pausing for `think_time` seconds after an answer.

    Their starts are slightly staggered: if all were sent at once, the first requests would wait for
    the client, which would distort their time to first token. After a failure users pause, so as
    not to flood a server that refuses requests.
    """

    concurrency: int
    think_time: float = 0.0

    async def run(self, talk: Talk, workload: LoadWorkload, budget: Budget) -> None:
        loop = asyncio.get_running_loop()
        deadline = _deadline(loop.time(), budget)
        numbers = iter(range(1 << 62))  # shared by the users

        async def user() -> None:
            due = loop.time()
            for index in numbers:
                turns = budget.turns(index, workload.turns)
                if not turns or due > deadline:
                    return
                conversation = workload.conversation(index).first(turns)  # made before it is due
                await asyncio.sleep(max(due - loop.time(), 0.0))
                success = await talk(conversation, due, 0.0)
                pause = self.think_time if success else max(self.think_time, FAILURE_PAUSE)
                due = loop.time() + pause

        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(user())
                await asyncio.sleep(START_GAP)


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """A conversation at each of `offsets`, seconds after the start."""

    offsets: Iterable[float]
    max_in_flight: int  # limit of conversations at a time; further ones wait, which is recorded

    async def run(self, talk: Talk, workload: LoadWorkload, budget: Budget) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        deadline = _deadline(start, budget)
        places = asyncio.Semaphore(self.max_in_flight)
        free_since = start  # time since which a slot is free, for this and later conversations

        async def guest(conversation: LoadConversation, due: float, delay: float) -> None:
            try:
                await talk(conversation, due, delay)
            finally:
                places.release()

        async with asyncio.TaskGroup() as group:
            for index, offset in enumerate(self.offsets):
                due = start + offset
                turns = budget.turns(index, workload.turns)
                if not turns or due > deadline:
                    break
                conversation = workload.conversation(index).first(turns)  # made before it is due
                await asyncio.sleep(max(due - loop.time(), 0.0))
                if places.locked():
                    await places.acquire()
                    free_since = loop.time()
                else:
                    await places.acquire()
                group.create_task(guest(conversation, due, max(free_since - due, 0.0)))


# When conversations start: `run` calls `talk` for each, and returns when all have ended.
Load = ClosedLoop | OpenLoop


@dataclass(frozen=True, slots=True)
class Level:
    """One load of a test."""

    label: str
    connections: int  # at most this many at a time
    load: Callable[[str], Load]  # for a seed


@dataclass(frozen=True, slots=True)
class LoadTest:
    """What to send and when. Each level and repeat has a different seed, so that the prefix cache
    has none of its prompts."""

    levels: tuple[Level, ...]
    workload: Callable[[str], LoadWorkload]  # for a seed
    budget: Budget
    slo: Slo | None = None
    think_time: float = 0.0
    repeats: int = 1
    warmup: int = 1  # requests
    seed: int = 0
    fresh: bool = True  # prompts have nothing in common


async def drive(
    load: Load,
    target: OpenAITarget,
    workload: LoadWorkload,
    budget: Budget,
    log: RunLog,
    think_time: float = 0.0,
) -> None:
    """Run a load to its end and record everything in `log`.

    When cancelled, requests in flight are recorded as interrupted.

    Args:
        think_time: seconds between the turns of a conversation.

    Raises:
        ConfigError: the server is lost: it takes no more connections.
    """
    loop = asyncio.get_running_loop()
    unconnected = 0  # requests since the last one that was sent

    async def talk(conversation: LoadConversation, due: float, delay: float) -> bool:
        nonlocal unconnected
        answers: list[str] = []
        for _ in conversation.turns:
            request = conversation.request(answers)
            record = RequestRecord(
                request.prompt_tokens,
                due,
                loop.time(),
                asked_tokens=request.output_tokens,
                held=delay,
            )
            log.records.append(record)
            log.in_flight += 1
            try:
                answer = await target.send(request, record)
            except asyncio.CancelledError:
                record.fail(INTERRUPTED)
                raise
            finally:
                log.in_flight -= 1
            log.finished += 1
            log.failed += not record.completed
            log.output_tokens += record.num_output_tokens
            unconnected = unconnected + 1 if record.error == CONNECT else 0
            if unconnected == MAX_UNCONNECTED:
                reason = f"{unconnected} requests in a row could not connect ({record.detail})"
                raise ConfigError("url", f"the server is lost: {reason}")
            if answer is None:
                return False
            answers.append(answer)
            if len(answers) < len(conversation.turns):
                due, delay = loop.time() + think_time, 0.0
                await asyncio.sleep(think_time)
        return True

    watcher = asyncio.create_task(_watch_loop(log))
    log.started = loop.time()
    cpu = time.process_time()
    try:
        await load.run(talk, workload, budget)
    except* ConfigError as group:
        raise group.exceptions[0] from None
    finally:
        log.ended = loop.time()
        log.cpu_seconds = time.process_time() - cpu
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher


async def _watch_loop(log: RunLog) -> None:
    """Sample how late the event loop wakes up: the delay of everything it does."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LOOP_LAG_PERIOD
        try:
            await asyncio.sleep(LOOP_LAG_PERIOD)
        finally:  # the run may end during the sleep
            log.loop_lag.append(max(loop.time() - due, 0.0))


def _deadline(start: float, budget: Budget) -> float:
    return float("inf") if budget.duration is None else start + budget.duration
