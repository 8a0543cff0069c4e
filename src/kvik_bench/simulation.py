"""Replicas under a virtual clock: the real scheduler and the real router, without a model.

A step takes as long as `StepCost` says, and every output token is the same, so only what is
scheduled where is simulated, and a run of an hour takes seconds. Hits, preemptions and queues are
those that engines would have with these step times.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random

from kvik.core.block_pool import ContentLog, extend_hashes
from kvik.core.config import CacheConfig, SchedulerConfig
from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.core.routing import ReplicaReport, ReplicaRouter
from kvik.core.sampling_params import SamplingParams
from kvik.core.scheduler import Scheduler
from kvik.core.types import Request
from kvik.options import Integer, Number, option
from kvik.spec.kv import KVCacheSpec, group_layers

ANSWER = 1  # every output token
WORDS = 1 << 15  # different tokens of prompts


# -- what is asked ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Traffic:
    """Conversations that share system prompts and grow, drawn from a seed."""

    requests: int = option(5000, Integer(1, 100_000_000), "turns of all conversations together")
    rate: float = option(150.0, Number(0, 1e7, above=True), "turns a second")
    turns: float = option(5.0, Number(1, 1000), "of a conversation, on average")
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
    seed: int = option(0, Integer(0, (1 << 63) - 1), "of everything that is drawn")


@dataclass(slots=True)
class Turn:
    """A request, and what follows it.

    Attributes:
        tokens: of the prompt.
        rest: turns of its conversation after this one.
    """

    tokens: array[int]
    output: int
    rest: int
    random: Random


class Conversations:
    """Draws the turns of `Traffic`. What is drawn does not depend on when answers end."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        random = Random(traffic.seed)
        self._prompts = [
            array("I", (random.randrange(2, WORDS) for _ in range(traffic.system_tokens)))
            for _ in range(traffic.systems)
        ]
        self._weights = [1 / (i + 1) for i in range(traffic.systems)]
        self._random = random

    def starts(self) -> Iterator[tuple[float, Turn]]:
        """Yield first turns with their times; all turns together are as many as wanted."""
        traffic, random, now, left = self._traffic, self._random, 0.0, self._traffic.requests
        while left > 0:
            turns = min(left, 1 + int(random.expovariate(1 / max(traffic.turns - 0.5, 0.01))))
            left -= turns
            own = Random(random.getrandbits(64))
            system = random.choices(self._prompts, self._weights)[0]
            yield now, self._turn(array("I", system), turns - 1, own)
            now += random.expovariate(traffic.rate / traffic.turns)

    def after(self, turn: Turn) -> tuple[float, Turn]:
        """Return the turn that follows an answer, and the seconds until it comes."""
        before = turn.tokens + array("I", (ANSWER,)) * turn.output
        pause = turn.random.expovariate(1 / self._traffic.think)
        return pause, self._turn(before, turn.rest - 1, turn.random)

    def _turn(self, before: array[int], rest: int, random: Random) -> Turn:
        traffic = self._traffic
        size = 1 + int(random.expovariate(1 / traffic.user_tokens))
        output = 1 + int(random.expovariate(1 / traffic.output_tokens))
        before.extend(random.randrange(2, WORDS) for _ in range(size))
        return Turn(before, output, rest, random)


# -- what answers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step: of any, of each token computed, and of each key that is read."""

    step: float = 0.010
    token: float = 100e-6
    key: float = 20e-9

    def seconds(self, tokens: int, keys: int) -> float:
        return self.step + tokens * self.token + keys * self.key


@dataclass(frozen=True, slots=True)
class SimulatedEngine:
    """The limits of a simulated engine, and how long its steps take."""

    blocks: int = 4096
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    cost: StepCost = field(default_factory=StepCost)


class SimulatedReplica:
    """A scheduler whose steps take virtual time."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        cache = CacheConfig(
            engine.block_size, engine.blocks, group_layers([KVCacheSpec(1, 4, bytes_per_token=16)])
        )
        limits = SchedulerConfig(
            engine.max_num_seqs,
            engine.max_num_batched_tokens,
            engine.blocks * engine.block_size,
            max_queued_requests=1 << 30,
            max_queued_tokens=1 << 50,
        )
        self.scheduler = Scheduler(limits, cache)
        self.busy = 0.0  # seconds
        self.plan: SchedulerOutput | None = None  # being computed
        self._log = ContentLog()
        self.scheduler.kv.pool.log_to(self._log)

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
            ),
            now,
        )

    def begin(self, now: float) -> float | None:
        """Begin the next step. Returns when it will be done; None: there is nothing to do."""
        plan = self.plan = self.scheduler.schedule(now)
        if plan is None:
            return None
        step = self.scheduler.in_flight[-1]
        keys = sum([request.num_computed_tokens for request in step.requests])
        seconds = self.engine.cost.seconds(step.num_tokens, keys)
        self.busy += seconds
        return now + seconds

    def finish(self, now: float) -> list[tuple[str, bool]]:
        """Take in the step that is done. Returns the requests that got a token, and whether it was
        their last."""
        plan = self.plan
        assert plan is not None
        self.plan = None
        tokens = [[ANSWER] if samples else [] for samples in plan.samples]
        deltas = self.scheduler.update(ModelRunnerOutput(plan.step, tokens), now)
        deltas += self.scheduler.take_ended()
        return [(delta.request_id, delta.finish_reason is not None) for delta in deltas]

    def report(self) -> ReplicaReport:
        """Return what an engine tells its router."""
        scheduler = self.scheduler
        return ReplicaReport(
            self._log.take(), scheduler.kv.usage, scheduler.clock.prefill_tokens_per_second
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a load.

    Attributes:
        prompt_tokens, hit_tokens: of all prompts, and of these the ones found in a cache.
        ideal_tokens: that one cache with all blocks ever computed would have had.
        seconds: until the last request ended, virtual.
        busy: seconds of each replica's steps.
        first_tokens: seconds until each request's first token, sorted.
        chosen: real seconds of each choice, if they were measured.
    """

    policy: str
    requests: int
    prompt_tokens: int
    hit_tokens: int
    ideal_tokens: int
    seconds: float
    busy: tuple[float, ...]
    first_tokens: tuple[float, ...]
    preemptions: int
    steps: int
    retried: int = 0
    chosen: tuple[float, ...] = ()

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / max(1, self.prompt_tokens)

    @property
    def imbalance(self) -> float:
        """The busiest replica over the mean of all."""
        return max(self.busy) * len(self.busy) / max(sum(self.busy), 1e-9)

    def ttft(self, share: float) -> float:
        """Return the time within which a share of the requests had their first token."""
        return self.first_tokens[min(len(self.first_tokens) - 1, int(share * self.requests))]


def simulate(
    traffic: Traffic,
    engine: SimulatedEngine,
    replicas: int,
    policy: str = "prefix",
    timer: Callable[[], float] | None = None,
    lose: tuple[float, int] | None = None,
) -> Outcome:
    """Run a load to its end.

    Args:
        policy: "prefix": by `ReplicaRouter`; "round-robin": one after another.
        timer: measures choices; None: they are not measured.
        lose: a time and a replica, which ends then: its requests begin again elsewhere.
    """
    return _Run(traffic, engine, replicas, policy, timer).run(lose)


class _Run:
    """One simulated load: events in the order of their times."""

    def __init__(
        self,
        traffic: Traffic,
        engine: SimulatedEngine,
        replicas: int,
        policy: str,
        timer: Callable[[], float] | None,
    ) -> None:
        self.engine = engine
        self.replicas = [SimulatedReplica(engine) for _ in range(replicas)]
        self.router = ReplicaRouter(
            [f"replica {i}" for i in range(replicas)], engine.block_size, engine.max_num_seqs
        )
        for i in range(replicas):
            self.router.set_available(i, True)
        self.alive = [True] * replicas
        self.policy, self.timer = policy, timer
        self.talk = Conversations(traffic)
        self.events: list[tuple[float, int, int | Turn]] = []  # a replica's step, or a request
        self.numbers = count()
        self.turns: dict[str, tuple[Turn, int, float]] = {}  # unfinished: where, since when
        self.waits: dict[str, float] = {}  # arrival of requests without a token
        self.known: set[bytes] = set()
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
            now, _, what = heappop(self.events)
            if lose is not None and now >= lose[0]:
                self._lose(lose[1], now)
                lose = None
            if isinstance(what, Turn):
                self._arrive(what, now)
            elif self.alive[what]:
                self._stepped(what, now)
        counters = [replica.scheduler.counters for replica in self.replicas]
        return Outcome(
            self.policy,
            self.done,
            self.prompts,
            sum(one.prefix_hits for one in counters),
            self.ideal,
            now,
            tuple(replica.busy for replica in self.replicas),
            tuple(sorted(self.first)),
            sum(one.preemptions for one in counters),
            sum(one.steps for one in counters),
            self.retried,
            tuple(self.chosen),
        )

    def _arrive(self, turn: Turn, now: float) -> None:
        name = f"r{next(self.numbers)}"
        hashes, size = self._hashes(turn.tokens), self.engine.block_size
        self.prompts += len(turn.tokens)
        usable = (len(turn.tokens) - 1) // size
        self.ideal += size * next(
            (i for i, piece in enumerate(hashes[:usable]) if piece not in self.known), usable
        )
        self.known.update(hashes)
        self._send(name, turn, hashes, now)
        self.waits[name] = now

    def _send(self, name: str, turn: Turn, hashes: Sequence[bytes], now: float) -> None:
        if self.policy == "round-robin":
            self.turn += 1
            while not self.alive[self.turn % len(self.replicas)]:
                self.turn += 1
            place = self.turn % len(self.replicas)
        else:
            began = self.timer() if self.timer else 0.0
            choice = self.router.choose(hashes, len(turn.tokens), now)
            if self.timer:
                self.chosen.append(self.timer() - began)
            assert choice is not None
            self.router.sent(name, choice, hashes, len(turn.tokens), now)
            place = choice.replica
        self.turns[name] = turn, place, now
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
        for name, last in replica.finish(now):
            if name in self.waits:
                self.first.append(now - self.waits.pop(name))
                if routed:
                    self.router.began(name, now)
            if last:
                turn = self.turns.pop(name)[0]
                self.done += 1
                self._answered(turn)
                if routed:
                    self.router.ended(name, now)
                if turn.rest:
                    pause, following = self.talk.after(turn)
                    heappush(self.events, (now + pause, next(self.numbers), following))
        if routed:
            self.router.report(place, replica.report())
        self._begin(place, now)

    def _answered(self, turn: Turn) -> None:
        """One cache with all blocks would have the answer, too."""
        self.known.update(self._hashes(turn.tokens + array("I", (ANSWER,)) * turn.output))

    def _hashes(self, tokens: array[int]) -> list[bytes]:
        """Return the hashes of the full blocks of a text."""
        hashes: list[bytes] = []
        size = self.engine.block_size
        extend_hashes(hashes, tokens, size, "", len(tokens) // size)
        return hashes

    def _lose(self, place: int, now: float) -> None:
        self.alive[place] = False
        self.router.set_available(place, False)
        self.router.forget(place)
        lost = [(name, turn) for name, (turn, where, _) in self.turns.items() if where == place]
        for name, turn in lost:
            self.router.ended(name, now)
            self.retried += 1
            self._send(name, turn, self._hashes(turn.tokens), now)
