"""Drives a target with a load, and watches the client itself.

Closed loop: so many users, each sends when the answer before has come, so a slow server gets less
load. Open loop: requests come when they are due, whatever the server does, as in life.
All times are those of the running event loop, so a test may run on a virtual clock.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from kvik_bench.load.records import INTERRUPTED, RequestRecord
from kvik_bench.load.workload import LoadConversation, LoadRequest, LoadWorkload

# Where requests go, behind one protocol.


class Target(Protocol):
    """Something that answers requests."""

    async def send(self, request: LoadRequest, record: RequestRecord) -> str | None:
        """Send one request, once, and fill the record while the answer comes.

        Stamps `sent` as late as it can. Never raises for what the server does: it notes that as the
        record's error and returns None. Else it returns the answer's text. When cancelled, it
        leaves the record as it is and raises `CancelledError`.
        """


FAILURE_PAUSE = 0.1  # seconds
START_GAP = 0.001  # seconds: about what the client takes to open a connection and send
LOOP_LAG_PERIOD = 0.02  # seconds between two looks at the event loop's own delay


@dataclass(frozen=True, slots=True)
class Budget:
    """When to stop. What was due before is still sent, and what is in flight waited for."""

    num_requests: int | None = None
    duration: float | None = None  # seconds: no conversation is due later

    def turns(self, index: int, turns: int) -> int:
        """How many turns of conversation `index` fit. Depends on the number alone, so that timing
        does not decide what is sent."""
        if self.num_requests is None:
            return turns
        return max(min(turns, self.num_requests - index * turns), 0)


@dataclass(slots=True)
class RunLog:
    """What a run left behind; complete at every moment, so that a run can be stopped."""

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
        """Of one core, while the run lasted."""
        return self.cpu_seconds / max(self.ended - self.started, 1e-9)


Talk = Callable[[LoadConversation, float, float], Awaitable[bool]]


class Load(Protocol):
    """When conversations start."""

    async def run(self, talk: Talk, workload: LoadWorkload, budget: Budget) -> None:
        """Call `talk(conversation, due, held)` for each; return when all have ended. It answers
        whether the conversation came to its end."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` users, who pause for `think_time` seconds after each answer.

    They start one shortly after the other: sent in one moment, the first requests would wait for
    the client, and the time to their first token would be the client's. After a failure users
    pause for a moment, or a server that refuses would be flooded.
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
                ended = await talk(conversation, due, 0.0)
                pause = self.think_time if ended else max(self.think_time, FAILURE_PAUSE)
                due = loop.time() + pause

        async with asyncio.TaskGroup() as group:
            for _ in range(self.concurrency):
                group.create_task(user())
                await asyncio.sleep(START_GAP)


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """A conversation at each of `offsets`, seconds after the start.

    Attributes:
        max_in_flight: conversations at a time; one that is due later waits, and that is noted.
    """

    offsets: Iterable[float]
    max_in_flight: int

    async def run(self, talk: Talk, workload: LoadWorkload, budget: Budget) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        deadline = _deadline(start, budget)
        places = asyncio.Semaphore(self.max_in_flight)
        free_since = start  # until then there was no place, for those after it neither

        async def guest(conversation: LoadConversation, due: float, held: float) -> None:
            try:
                await talk(conversation, due, held)
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


async def drive(
    load: Load,
    target: Target,
    workload: LoadWorkload,
    budget: Budget,
    log: RunLog,
    think_time: float = 0.0,
) -> None:
    """Run a load to its end and note everything in `log`.

    When cancelled, requests in flight are noted as interrupted.

    Args:
        think_time: seconds between the turns of a conversation.
    """
    loop = asyncio.get_running_loop()

    async def talk(conversation: LoadConversation, due: float, held: float) -> bool:
        answers: list[str] = []
        for _ in conversation.turns:
            request = conversation.request(answers)
            record = RequestRecord(
                request.prompt_tokens,
                due,
                loop.time(),
                asked_tokens=request.output_tokens,
                held=held,
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
            if answer is None:
                return False
            answers.append(answer)
            if len(answers) < len(conversation.turns):
                due, held = loop.time() + think_time, 0.0
                await asyncio.sleep(think_time)
        return True

    watcher = asyncio.create_task(_watch_loop(log))
    log.started = loop.time()
    cpu = time.process_time()
    try:
        await load.run(talk, workload, budget)
    finally:
        log.ended = loop.time()
        log.cpu_seconds = time.process_time() - cpu
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher


async def _watch_loop(log: RunLog) -> None:
    """How much later than wished the event loop wakes up: the delay of everything it does."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LOOP_LAG_PERIOD
        try:
            await asyncio.sleep(LOOP_LAG_PERIOD)
        finally:  # the end of a run may come between
            log.loop_lag.append(max(loop.time() - due, 0.0))


def _deadline(start: float, budget: Budget) -> float:
    return float("inf") if budget.duration is None else start + budget.duration
