"""Simulates replicas with a virtual clock: the real scheduler and router, without a model.

A function gives the time of a step, and every output token is the same. So only scheduling and
routing are computed, and an hour of load takes seconds. Cache hits, preemptions and queues are as
in real engines with these step times.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from random import Random

from kvik.core.block_pool import ContentLog, extend_hashes
from kvik.core.config import CacheConfig, SchedulerConfig, TierSizes
from kvik.core.plan import (
    DISK,
    MEMORY,
    NOWHERE,
    WAIT_SECONDS,
    ModelRunnerOutput,
    Moved,
    SchedulerOutput,
)
from kvik.core.routing import ReplicaReport, ReplicaRouter
from kvik.core.sampling_params import SamplingParams
from kvik.core.scheduler import Scheduler
from kvik.core.types import Request
from kvik.errors import ConfigError
from kvik.options import Integer, Number, Text, option
from kvik.planner.roofline import PlannedStep
from kvik.spec.kv import KVCacheSpec, KVGroup, group_layers
from kvik_bench.load.workload import TraceRow, read_trace

ANSWER = 1  # every output token
READ, WRITE = "read", "write"  # ways to and from the disk


# -- requests --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Traffic:
    """Conversations that share system prompts and grow, drawn from a seed."""

    requests: int = option(
        5000, Integer(1, 100_000_000), "turns of all conversations together, or of the trace"
    )
    rate: float = option(150.0, Number(0, 1e7, above=True), "turns a second")
    turns: float = option(5.0, Number(1, 1000), "turns of a conversation, on average")
    think: float = option(
        5.0, Number(0, 1e6, above=True), "seconds from an answer to the next turn, on average"
    )
    systems: int = option(
        16, Integer(1, 100_000), "system prompts; the i-th is used 1 / i as often as the first"
    )
    system_tokens: int = option(256, Integer(1, 1 << 20), "tokens of each system prompt")
    user_tokens: int = option(
        256, Integer(1, 1 << 20), "tokens that a turn adds to the prompt, on average"
    )
    output_tokens: int = option(64, Integer(1, 1 << 20), "tokens of an answer, on average")
    seed: int = option(0, Integer(0, (1 << 63) - 1), "seed of the load")
    trace: str | None = option(
        None,
        Text("a path", metavar="FILE"),
        "times and lengths of the requests, as for kvik bench serve; None: conversations",
    )
    speed: float = option(1.0, Number(1e-6, 1e6), "speed of the trace's clock")


@dataclass(slots=True)
class Turn:
    """A request of a conversation."""

    tokens: array[int]  # of the prompt
    known: int  # number of first tokens that earlier requests had in prompt or answer
    output: int
    rest: int  # number of turns of its conversation after this one
    random: Random
    # Of the full blocks of the prompt, or of its beginning.
    hashes: list[bytes] = field(default_factory=list)


class Conversations:
    """Draws the turns of `Traffic`, independently of the times of answers. A conversation that
    would exceed the model's context begins again after its system prompt. A trace has no texts, so
    each of its requests is a conversation of one turn that shares nothing.

    Raises:
        ConfigError: a system prompt leaves no room in the context, or a request of the trace does
            not fit it.
    """

    def __init__(self, traffic: Traffic, context: int) -> None:
        self._trace = [] if traffic.trace is None else _trace(traffic, traffic.trace, context)
        if not self._trace and traffic.system_tokens + 2 > context:
            raise ConfigError(
                "system_tokens",
                f"must be at most {context - 2}, as the model's context is {context}, "
                f"not {traffic.system_tokens}",
            )
        self._traffic, self._context = traffic, context
        random = Random(traffic.seed)
        self._prompts = [_text(random, traffic.system_tokens) for _ in range(traffic.systems)]
        self._weights = [1 / (i + 1) for i in range(traffic.systems)]
        self._random = random

    @property
    def num_requests(self) -> int:
        return len(self._trace) or self._traffic.requests

    def starts(self) -> Iterator[tuple[float, Turn]]:
        """Yield first turns with their times, until all turns together are `Traffic.requests`."""
        traffic, random, now, budget = self._traffic, self._random, 0.0, self._traffic.requests
        for row in self._trace:
            yield (
                row.offset,
                Turn(_text(random, row.prompt_tokens), 0, row.output_tokens, 0, random),
            )
        if self._trace:
            return
        used: set[int] = set()  # system prompts
        while budget > 0:
            turns = min(budget, 1 + int(random.expovariate(1 / max(traffic.turns - 0.5, 0.01))))
            budget -= turns
            rng = Random(random.getrandbits(64))
            (system,) = random.choices(range(traffic.systems), self._weights)
            seen_tokens = traffic.system_tokens if system in used else 0
            used.add(system)
            yield now, self._turn(self._prompts[system][:], seen_tokens, turns - 1, rng)
            now += random.expovariate(traffic.rate / traffic.turns)

    def after(self, turn: Turn) -> tuple[float, Turn]:
        """Return the turn after an answer, and the seconds until it is sent."""
        before = turn.tokens + array("I", (ANSWER,)) * turn.output
        pause = turn.random.expovariate(1 / self._traffic.think)
        following = self._turn(before, len(before), turn.rest - 1, turn.random)
        following.hashes = turn.hashes
        return pause, following

    def _turn(self, before: array[int], seen_tokens: int, rest: int, random: Random) -> Turn:
        traffic = self._traffic
        size = 1 + int(random.expovariate(1 / traffic.user_tokens))
        output = 1 + int(random.expovariate(1 / traffic.output_tokens))
        if len(before) + size + output > self._context:
            system = traffic.system_tokens
            before, seen_tokens = before[:system], min(seen_tokens, system)
            output = min(output, self._context - system - 1)
            size = min(size, self._context - system - output)
        before.extend(_text(random, size))
        return Turn(before, seen_tokens, output, rest, random)


def _trace(traffic: Traffic, path: str, context: int) -> list[TraceRow]:
    """Return the requests of a trace, at most `Traffic.requests`."""
    rows = read_trace(Path(path).expanduser(), traffic.speed, traffic.requests)
    longest = max(row.prompt_tokens + row.output_tokens for row in rows)
    if longest > context:
        reason = f"must have requests of at most {context} tokens, the model's context"
        raise ConfigError("trace", f"{reason}, not {longest}")
    return rows


def _text(random: Random, size: int) -> array[int]:
    """Return random tokens, a text that no other request has."""
    tokens = array("I")
    tokens.frombytes(random.randbytes(tokens.itemsize * size))
    return tokens


# -- engines ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: fixed, per computed token, and per key read."""

    step: float = 0.010
    token: float = 100e-6
    key: float = 20e-9

    def __call__(self, step: PlannedStep) -> float:
        keys = sum(count * (new + cached) for count, new, cached in step.runs)
        return self.step + step.rows * self.token + keys * self.key


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """The limits of a simulated engine, and the times of its steps and moves."""

    blocks: int = 4096
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    # Returns the seconds of a step.
    cost: Callable[[PlannedStep], float] = field(default_factory=StepCost)
    context: int = 1 << 30  # most tokens of a prompt and its answer
    # See `CacheConfig`.
    groups: tuple[KVGroup, ...] = group_layers([KVCacheSpec(1, 4, bytes_per_token=16)])
    checkpoints: int | None = None  # likewise
    tiers: TierSizes | None = None  # likewise
    memory_rate: float = 20e9  # bytes per second of copies to and from the tier
    disk_rate: float = 3e9  # likewise


class SimulatedTiers:
    """`PageMover` in virtual time. There are three queues, each processed in order: copies of the
    memory tier, disk reads, and disk writes."""

    def __init__(self, engine: SimulatedEngine) -> None:
        assert engine.tiers is not None
        self._page_bytes = engine.tiers.page_bytes
        self._rates = {MEMORY: engine.memory_rate, READ: engine.disk_rate, WRITE: engine.disk_rate}
        self._free = dict.fromkeys(self._rates, 0.0)  # time at which each queue is idle
        self._done: list[tuple[float, int, Moved]] = []  # by time
        self._number = count()
        if engine.tiers.disk:
            heappush(self._done, (0.0, next(self._number), Moved(scanned=True)))

    def begin(self, plan: SchedulerOutput, now: float) -> None:
        """Begin the moves of a plan."""
        for store in plan.stores:
            size = self._page_bytes[store.key[0]]
            if store.place != NOWHERE:
                self._take(MEMORY, size, now)
            if store.on_disk:
                self._add(self._take(WRITE, size, now), Moved(stored=[store.key]))
        for load in plan.loads:
            sizes = {MEMORY: 0, DISK: 0}
            for key, _, place in load.pages:
                sizes[DISK if place == NOWHERE else MEMORY] += self._page_bytes[key[0]]
            ends, rates = now, []
            for tier, way in ((MEMORY, MEMORY), (DISK, READ)):
                if sizes[tier]:
                    ends = max(ends, self._take(way, sizes[tier], now))
                    rates.append((tier, sizes[tier], sizes[tier] / self._rates[way]))
            self._add(ends, Moved(loaded=[(load.ticket, [])], rates=rates))

    def take(self, now: float) -> Moved | None:
        """Return the moves that ended since the last call; None: none."""
        moved = None
        while self._done and self._done[0][0] <= now:
            _, _, move = heappop(self._done)
            moved = moved or Moved()
            moved.loaded.extend(move.loaded)
            moved.stored.extend(move.stored)
            moved.rates.extend(move.rates)
            moved = replace(moved, scanned=True) if move.scanned else moved
        return moved

    def wait(self, now: float) -> float:
        """Return the end of a plan without rows that begins now."""
        ends = now + WAIT_SECONDS
        return max(now, min(ends, self._done[0][0])) if self._done else ends

    def _take(self, way: str, size: int, now: float) -> float:
        """Copy some bytes; return the time of the end."""
        self._free[way] = max(now, self._free[way]) + size / self._rates[way]
        return self._free[way]

    def _add(self, at: float, moved: Moved) -> None:
        heappush(self._done, (at, next(self._number), moved))


class SimulatedReplica:
    """A scheduler whose steps take virtual time."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        cache = CacheConfig(
            engine.block_size,
            engine.blocks,
            engine.groups,
            checkpoints=engine.checkpoints,
            tiers=engine.tiers,
        )
        limits = SchedulerConfig(
            engine.max_num_seqs,
            engine.max_num_batched_tokens,
            engine.blocks * engine.block_size,
            max_queued_requests=1 << 30,
            max_queued_tokens=1 << 50,
        )
        self.scheduler = Scheduler(limits, cache)
        self.busy = 0.0  # seconds of steps
        self.plan: SchedulerOutput | None = None  # being computed
        self.tiers = None if engine.tiers is None else SimulatedTiers(engine)
        self._log = ContentLog()
        self.scheduler.log_contents(self._log)

    def add(self, name: str, turn: Turn, now: float) -> None:
        params = SamplingParams(max_tokens=turn.output)
        self.scheduler.add(
            Request(
                request_id=name,
                index=0,
                params=params,
                token_ids=array("I", turn.tokens),
                num_prompt_tokens=len(turn.tokens),
                max_length=len(turn.tokens) + turn.output,
                stop_ids=frozenset(),
                seed=0,
                arrival=now,
                block_hashes=turn.hashes[:],
            ),
            now,
        )

    def begin(self, now: float) -> float | None:
        """Begin the next step; return the time of its end, or None if there is no work."""
        plan = self.plan = self.scheduler.schedule(now)
        if plan is None:
            return None
        if self.tiers is not None:
            self.tiers.begin(plan, now)
            if not plan.slots:
                return self.tiers.wait(now)
        seconds = self.engine.cost(_work(plan, self.scheduler.in_flight[-1].requests))
        self.busy += seconds
        return now + seconds

    def finish(self, now: float) -> list[tuple[str, bool, bool]]:
        """End the current step. Returns the requests that got their first or last token, and which
        of the two."""
        plan = self.plan
        assert plan is not None
        self.plan = None
        tokens = [[ANSWER] if samples else [] for samples in plan.samples]
        moved = None if self.tiers is None else self.tiers.take(now)
        deltas = self.scheduler.update(ModelRunnerOutput(plan.step, tokens, moved=moved), now)
        deltas += self.scheduler.take_finished()
        return [
            (delta.request_id, delta.prompt is not None, delta.finish_reason is not None)
            for delta in deltas
            if delta.prompt is not None or delta.finish_reason is not None
        ]

    def report(self) -> ReplicaReport:
        """Return an engine's report to its router."""
        scheduler = self.scheduler
        return ReplicaReport(
            self._log.take(), scheduler.kv.usage, scheduler.clock.prefill_tokens_per_second
        )


def _work(plan: SchedulerOutput, requests: list[Request]) -> PlannedStep:
    """Return the work of a step. Decoding requests all get their mean length, so that the work of
    many is quickly costed."""
    runs: list[tuple[int, int, int]] = []
    decoding = cached = 0
    for request, new in zip(requests, plan.num_scheduled_tokens, strict=True):
        before = request.num_computed_tokens - new
        if new == 1:
            decoding += 1
            cached += before
        else:
            runs.append((1, new, before))
    if decoding:
        runs.append((decoding, 1, cached // decoding))
    return PlannedStep(tuple(runs))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a load."""

    policy: str
    requests: int
    prompt_tokens: int  # of all prompts
    hit_tokens: int  # their cache hits
    ideal_tokens: int  # hits of a single cache with all blocks ever computed
    seconds: float  # virtual time until the last request ended
    busy: tuple[float, ...]  # seconds of each replica's steps
    first_tokens: tuple[float, ...]  # seconds until each request's first token, sorted
    preemptions: int
    steps: int
    retried: int
    chosen: tuple[float, ...]  # real seconds of each routing choice, if measured, sorted
    loaded_tokens: int  # hits that were loaded from tiers

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def imbalance(self) -> float:
        """Busy time of the busiest replica / mean over all."""
        return max(self.busy) * len(self.busy) / max(sum(self.busy), 1e-9)

    def ttft(self, share: float) -> float:
        """Return the time to first token that a share of the requests does not exceed."""
        return quantile(self.first_tokens, share)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value that a share of ordered values does not exceed."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def simulate(
    traffic: Traffic,
    engine: SimulatedEngine,
    replicas: int,
    policy: str = "prefix",
    timer: Callable[[], float] | None = None,
    lose: tuple[float, int] | None = None,
    tell: Callable[[float], None] | None = None,
) -> Outcome:
    """Run a load to its end.

    Args:
        policy: "prefix": by `ReplicaRouter`; "round-robin": replicas in order.
        timer: measures routing choices; None: they are not measured.
        lose: a time and a replica that ends then: its requests restart on other replicas.
        tell: called now and then with the share of requests that have ended.

    Raises:
        ConfigError: a request does not fit into the KV cache of an engine.
    """
    return _Run(traffic, engine, replicas, policy, timer, tell).run(lose)


class _Run:
    """One simulated load: events in the order of their times."""

    def __init__(
        self,
        traffic: Traffic,
        engine: SimulatedEngine,
        replicas: int,
        policy: str,
        timer: Callable[[], float] | None,
        tell: Callable[[float], None] | None,
    ) -> None:
        self.engine, self.tell = engine, tell
        self.replicas = [SimulatedReplica(engine) for _ in range(replicas)]
        self.router = ReplicaRouter(
            [f"replica {i}" for i in range(replicas)], engine.block_size, engine.max_num_seqs
        )
        for i in range(replicas):
            self.router.set_available(i, True)
        self.alive = [True] * replicas
        self.policy, self.timer = policy, timer
        self.talk = Conversations(traffic, engine.context)
        self.events: list[tuple[float, int, int | Turn]] = []  # end of a replica's step, or request
        self.numbers = count()
        self.turns: dict[str, tuple[Turn, int]] = {}  # unfinished, with their replicas
        self.waits: dict[str, float] = {}  # arrival of requests without a token
        self.ideal = self.prompts = self.done = self.retried = 0
        self.first: list[float] = []
        self.chosen: list[float] = []
        self.turn = 0

    def run(self, lose: tuple[float, int] | None) -> Outcome:
        starts = self.talk.starts()
        following = next(starts, None)
        now = 0.0
        while self.events or following is not None:
            if following is not None and (not self.events or following[0] <= self.events[0][0]):
                now, turn = following
                following = next(starts, None)
                self._arrive(turn, now)
                continue
            now, _, event = heappop(self.events)
            if lose is not None and now >= lose[0]:
                self._lose(lose[1], now)
                lose = None
            if isinstance(event, Turn):
                self._arrive(event, now)
            elif self.alive[event]:
                self._stepped(event, now)
        if self.turns:  # they wait for blocks that their engine does not have
            longest = max(len(turn.tokens) for turn, _ in self.turns.values())
            raise ConfigError(
                "num_blocks",
                f"must be more: prompts of up to {longest} tokens and their answers do not fit "
                f"{self.engine.blocks} blocks of {self.engine.block_size} tokens",
            )
        counters = [replica.scheduler.counters for replica in self.replicas]
        return Outcome(
            policy=self.policy,
            requests=self.done,
            prompt_tokens=self.prompts,
            hit_tokens=sum(counter.prefix_hits for counter in counters),
            ideal_tokens=self.ideal,
            seconds=now,
            busy=tuple(replica.busy for replica in self.replicas),
            first_tokens=tuple(sorted(self.first)),
            preemptions=sum(counter.preemptions for counter in counters),
            steps=sum(counter.steps for counter in counters),
            retried=self.retried,
            chosen=tuple(sorted(self.chosen)),
            loaded_tokens=sum(
                replica.scheduler.moves.counters.loaded_tokens
                for replica in self.replicas
                if replica.scheduler.moves is not None
            ),
        )

    def _arrive(self, turn: Turn, now: float) -> None:
        name = f"r{next(self.numbers)}"
        size = self.engine.block_size
        del turn.hashes[turn.known // size :]  # of a conversation that began again
        extend_hashes(turn.hashes, turn.tokens, size, "", len(turn.tokens) // size)
        self.prompts += len(turn.tokens)
        self.ideal += turn.known // size * size
        self._send(name, turn, now)
        self.waits[name] = now

    def _send(self, name: str, turn: Turn, now: float) -> None:
        if self.policy == "round-robin":
            self.turn += 1
            while not self.alive[self.turn % len(self.replicas)]:
                self.turn += 1
            place = self.turn % len(self.replicas)
        else:
            start = self.timer() if self.timer else 0.0
            choice = self.router.choose(turn.hashes, len(turn.tokens), now)
            if self.timer:
                self.chosen.append(self.timer() - start)
            assert choice is not None
            self.router.sent(name, choice, turn.hashes, len(turn.tokens), now)
            place = choice.replica
        self.turns[name] = turn, place
        replica = self.replicas[place]
        replica.add(name, turn, now)
        if replica.plan is None:
            self._begin(place, now)

    def _begin(self, place: int, now: float) -> None:
        ends = self.replicas[place].begin(now)
        if ends is not None:
            heappush(self.events, (ends, next(self.numbers), place))

    def _stepped(self, place: int, now: float) -> None:
        replica, routed = self.replicas[place], self.policy != "round-robin"
        for name, first, last in replica.finish(now):
            if first and name in self.waits:  # a second time if its replica was lost
                self.first.append(now - self.waits.pop(name))
                if routed:
                    self.router.began(name, now)
            if last:
                turn, _ = self.turns.pop(name)
                self.done += 1
                total = self.talk.num_requests
                if self.tell is not None and self.done % max(1, total // 100) == 0:
                    self.tell(self.done / total)
                if routed:
                    self.router.ended(name, now)
                if turn.rest:
                    pause, following = self.talk.after(turn)
                    heappush(self.events, (now + pause, next(self.numbers), following))
        if routed:
            self.router.report(place, replica.report())
        self._begin(place, now)

    def _lose(self, place: int, now: float) -> None:
        self.alive[place] = False
        self.router.set_available(place, False)
        self.router.forget(place)
        lost = [(name, turn) for name, (turn, where) in self.turns.items() if where == place]
        for name, turn in lost:
            self.router.ended(name, now)
            self.retried += 1
            self._send(name, turn, now)
