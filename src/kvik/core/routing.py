"""Which replica takes a request: the one whose work ends first with it, in seconds.

A replica is an engine of its own with all of the model. What it costs to give it a request is
counted in seconds, so nothing has to be weighed against anything else:

    what waits there       tokens of prompts that it has not computed, at the pace measured there
    + what comes           tokens of this prompt that its cache lacks, at the same pace
    + how full it is       the time that requests decode, times the square of the share of its KV
                           blocks or rows in use: a full replica preempts, and decodes slowly

Costs that differ by less than a tenth are equal, and among those rendezvous hashing decides
(Thaler and Ravishankar 1998) by the first part of the prompt that not all of them have. So several
routers send a new prefix to the same replica without talking to each other, an idle system spreads
different prefixes, and a replica that leaves moves its own prefixes only.

What caches hold is known from the engines, which report what they stored and removed, and expected
of requests that were just sent. Time is an argument, and nothing here waits or reads a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from kvik.core.block_pool import ContentChanges
from kvik.core.types import derive_seed

NEAR = 1.1  # costs up to this factor above the least count as equal
ALIKE = 2.0  # paces that differ by less than this factor are those of equal replicas
EXPECTED_SECONDS = 60.0  # until what a request should have left in a cache is no longer believed
MOST_EXPECTED = 200_000  # pieces of prompts believed of a replica that reports nothing
FIRST_PACE = 1000.0  # tokens a second, until a replica was measured
FIRST_DECODING = 5.0  # seconds that a request decodes, until the first has ended
DECAY = 0.95  # weight of a measurement relative to the next newer one in the running means
LEAST_SECONDS = 1e-4  # of a measured prompt: what came faster was computed before
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What an engine tells its router after steps.

    Attributes:
        changes: of its prefix cache since the report before; None: there were none.
        kv_usage: share of its blocks that requests hold, 0 to 1.
        prefill_rate: tokens of prompts a second, from its last steps; None: nothing was measured.
        served: weighted tokens that each tenant got since the report before (`FairShare`).
    """

    changes: ContentChanges | None = None
    kv_usage: float = 0.0
    prefill_rate: float | None = None
    served: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplicaChoice:
    """The replica that gets a request, by its number.

    Attributes:
        hit: pieces of the prompt that its cache is believed to hold.
        seconds: what it costs.
    """

    replica: int
    hit: int
    seconds: float


@dataclass(slots=True)
class _Sent:
    """A request that has not ended.

    Attributes:
        tokens: of its prompt that were to be computed.
        begun: when its first token came.
    """

    choice: ReplicaChoice
    hashes: Sequence[bytes]
    tokens: float
    sent: float
    begun: float | None = None


class _Mean:
    """A running mean of a ratio, as of tokens and the seconds they took."""

    def __init__(self) -> None:
        self._over = self._under = 0.0

    def note(self, over: float, under: float) -> None:
        self._over = self._over * DECAY + over
        self._under = self._under * DECAY + under

    @property
    def ratio(self) -> float | None:
        return self._over / self._under if self._under else None


class _Replica:
    """What is known of a replica.

    Attributes:
        key: of its name, for rendezvous hashing.
        holds: pieces that its cache is believed to hold, expected ones included.
        expected: of these, those that it has not reported, and until when they are believed.
        number: of the last report of changes; -1: a report of everything is needed.
        backlog: tokens of prompts sent whose first token has not come.
        unfinished: requests.
        seconds: what waits there, and how full it is, as costs.
        rate: tokens a second, as told or measured; None: neither.
        per_token: seconds of a prompt's token, as a cost.
        trust: tokens that were in its cache, per token that was believed to be.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.key = derive_seed(crc32(name.encode("utf-8", "surrogatepass")), 1) & _MASK
        self.holds: set[bytes] = set()
        self.expected: dict[bytes, float] = {}
        self.number = -1
        self.reports = False
        self.backlog = 0.0
        self.unfinished = 0
        self.kv_usage = 0.0
        self.told_rate: float | None = None
        self.rate: float | None = None
        self.measured = _Mean()
        self.last_begun = float("-inf")
        self.seconds = 0.0
        self.per_token = 1 / FIRST_PACE
        self.trust = _Mean()
        self.trusted = 1.0


class ReplicaRouter:
    """Chooses replicas, and keeps what is needed for that.

    Args:
        names: of the replicas, which are known by their place in this list from now on.
        piece: tokens that a hash covers; prompts are measured in the same unit.
        rows: requests that a replica computes at a time.
        lifetime: seconds for which what a request should have left in a cache is believed.
    """

    def __init__(
        self,
        names: Sequence[str],
        piece: float,
        rows: int,
        lifetime: float = EXPECTED_SECONDS,
    ) -> None:
        self.piece = piece
        self._rows = rows
        self._lifetime = lifetime
        self._replicas = [_Replica(name) for name in names]
        self._holders: dict[bytes, int] = {}  # bit i: replica i is believed to hold it
        self._available = 0  # the same bits
        self._sent: dict[str, _Sent] = {}
        self._deadlines: deque[tuple[float, int, bytes]] = deque()
        self._decoding = _Mean()
        self._common_rate = FIRST_PACE
        self._num_chosen = 0

    # -- what happens ----------------------------------------------------------------------------

    def set_available(self, replica: int, available: bool) -> None:
        """Say whether a replica may get requests."""
        self._weigh(self._replicas[replica])
        bit = 1 << replica
        self._available = self._available | bit if available else self._available & ~bit

    def report(self, replica: int, report: ReplicaReport) -> bool:
        """Take in a report.

        Returns:
            False if one before it is missing: then a report of everything is needed, and until it
            comes only what is sent is expected to be there.
        """
        one = self._replicas[replica]
        one.kv_usage = report.kv_usage
        one.told_rate = report.prefill_rate or one.told_rate
        self._weigh(one)
        one.reports = True
        changes = report.changes
        if changes is None:
            return True
        if changes.cleared:
            self.forget(replica)
        elif one.number < 0 or changes.number != one.number + 1:
            self.forget(replica)
            return False
        one.number = changes.number
        bit, holders, holds, expected = 1 << replica, self._holders, one.holds, one.expected
        for piece in changes.stored:
            holders[piece] = holders.get(piece, 0) | bit
            holds.add(piece)
            expected.pop(piece, None)
        for piece in changes.removed:
            self._drop(replica, piece)
        return True

    def forget(self, replica: int) -> None:
        """A replica's cache is empty, as after a start, or not known."""
        one = self._replicas[replica]
        bit, holders = 1 << replica, self._holders
        for piece in one.holds:
            left = holders[piece] & ~bit
            if left:
                holders[piece] = left
            else:
                del holders[piece]
        one.holds.clear()
        one.expected.clear()
        one.number = -1
        one.kv_usage = 0.0

    def sent(
        self,
        request_id: str,
        choice: ReplicaChoice,
        hashes: Sequence[bytes],
        num_tokens: float,
        now: float,
    ) -> None:
        """A request was given to the replica that `choose` named."""
        one = self._replicas[choice.replica]
        tokens = max(0.0, num_tokens - choice.hit * self.piece)
        self._sent[request_id] = _Sent(choice, hashes, tokens, now)
        one.backlog += tokens
        one.unfinished += 1
        self._expect(choice.replica, hashes, choice.hit, now)
        self._weigh(one)

    def began(self, request_id: str, now: float) -> None:
        """The first token of a request came."""
        sent = self._sent.get(request_id)
        if sent is None or sent.begun is not None:
            return
        one = self._replicas[sent.choice.replica]
        seconds = now - max(sent.sent, one.last_begun)
        if sent.tokens and seconds >= LEAST_SECONDS:
            one.measured.note(sent.tokens, seconds)
        one.last_begun = sent.begun = now
        one.backlog = max(0.0, one.backlog - sent.tokens)
        self._weigh(one)

    def ended(self, request_id: str, now: float, cached: float | None = None) -> None:
        """A request ended, or was lost.

        Args:
            cached: tokens of its prompt that were in the cache; None: not known.
        """
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return
        one = self._replicas[sent.choice.replica]
        one.unfinished -= 1
        if sent.begun is None:
            one.backlog = max(0.0, one.backlog - sent.tokens)
        else:
            self._decoding.note(now - sent.begun, 1.0)
        if not one.reports and sent.begun is not None:
            believed = sent.choice.hit * self.piece
            if cached is not None and believed:
                one.trust.note(min(cached, believed), believed)
            self._expect(sent.choice.replica, sent.hashes, 0, now)
        self._weigh(one)

    # -- the choice ------------------------------------------------------------------------------

    def choose(
        self,
        hashes: Sequence[bytes],
        num_tokens: float,
        now: float,
        session: str = "",
        avoid: Collection[int] = (),
    ) -> ReplicaChoice | None:
        """Choose a replica for a prompt; None: none is available.

        Args:
            hashes: chained, of the prompt's full pieces; equal ones mean equal prefixes.
            session: of requests that belong together, by which near-ties are decided.
            avoid: replicas that are not wanted.
        """
        self._expire(now)
        among = self._available
        for replica in avoid:
            among &= ~(1 << replica)
        if not among:
            return None
        hits = self._hits(hashes, among)
        replicas, piece = self._replicas, self.piece
        costs: list[tuple[float, int]] = []
        for replica, hit in hits.items():
            one = replicas[replica]
            missing = max(0.0, num_tokens - hit * piece * one.trusted)
            costs.append((one.seconds + missing * one.per_token, replica))
        least = min(costs)[0] * NEAR
        near = [choice for choice in costs if choice[0] <= least]
        if len(near) == 1:
            seconds, replica = near[0]
        else:
            key = self._key(hashes, min(hits[replica] for _, replica in near), session)
            seconds, replica = max(near, key=lambda cost: _mix(key ^ replicas[cost[1]].key))
        self._num_chosen += 1
        return ReplicaChoice(replica, hits[replica], seconds)

    def seconds(self, replica: int) -> float:
        """Return what waits at a replica, and how full it is, as a cost."""
        return self._replicas[replica].seconds

    def num_held(self, replica: int) -> int:
        """Return how many pieces a replica is believed to hold."""
        return len(self._replicas[replica].holds)

    # -- inside ----------------------------------------------------------------------------------

    def _hits(self, hashes: Sequence[bytes], among: int) -> dict[int, int]:
        """Return how many first pieces each of the replicas holds.

        A cache that holds a piece holds those before it, as pools evict the last ones first: so
        the end is searched for by halves, for all replicas at once.
        """
        holders = self._holders
        hits: dict[int, int] = {}
        parts = [(0, len(hashes), among)]
        while parts:
            low, high, some = parts.pop()
            while low < high:
                middle = (low + high) // 2 if low else 0  # most prompts hit nothing or a lot
                longer = holders.get(hashes[middle], 0) & some
                if longer != some:
                    if longer:
                        parts.append((middle + 1, high, longer))
                        some &= ~longer
                    high = middle
                else:
                    low = middle + 1
            while some:
                bit = some & -some
                hits[bit.bit_length() - 1] = low
                some ^= bit
        return hits

    def _key(self, hashes: Sequence[bytes], common: int, session: str) -> int:
        """Return the number by which near-ties are decided."""
        if session:
            return crc32(session.encode("utf-8", "surrogatepass")) * 0x9E3779B1 & _MASK
        if hashes:
            return int.from_bytes(hashes[min(common, len(hashes) - 1)][:8], "little")
        return self._num_chosen * 0x9E3779B97F4A7C15 & _MASK

    def _weigh(self, one: _Replica) -> None:
        """Compute what a replica costs anew."""
        one.rate = one.told_rate or one.measured.ratio
        rates = [other.rate for other in self._replicas if other.rate]
        common = sum(rates) / len(rates) if rates else FIRST_PACE
        if not self._common_rate / NEAR < common < self._common_rate * NEAR:
            self._common_rate = common
            for other in self._replicas:
                self._weigh_at(other, common)
        else:
            self._weigh_at(one, self._common_rate)

    def _weigh_at(self, one: _Replica, common: float) -> None:
        """Weigh a replica. Its pace is that of all, unless it is one of another kind: else the one
        that was quickest by chance would get everything."""
        rate = one.rate or common
        one.per_token = 1 / (common if common / ALIKE < rate < common * ALIKE else rate)
        trust = one.trust.ratio
        one.trusted = 1.0 if trust is None else trust
        full = max(one.kv_usage, one.unfinished / self._rows)
        decoding = self._decoding.ratio
        decoding = FIRST_DECODING if decoding is None else decoding
        one.seconds = one.backlog * one.per_token + decoding * full * full

    def _expect(self, replica: int, hashes: Sequence[bytes], first: int, now: float) -> None:
        """Expect the pieces from the first on in a replica's cache."""
        one, bit, holders = self._replicas[replica], 1 << replica, self._holders
        until = now + self._lifetime
        for piece in hashes[first:]:
            if piece in one.expected:
                del one.expected[piece]  # to be the last of them
            elif piece in one.holds:
                continue
            else:
                holders[piece] = holders.get(piece, 0) | bit
                one.holds.add(piece)
            one.expected[piece] = until
            self._deadlines.append((until, replica, piece))
        while len(one.expected) > MOST_EXPECTED:
            self._drop(replica, next(iter(one.expected)))

    def _expire(self, now: float) -> None:
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            until, replica, piece = deadlines.popleft()
            if self._replicas[replica].expected.get(piece) == until:
                self._drop(replica, piece)

    def _drop(self, replica: int, piece: bytes) -> None:
        """A piece is no longer in a replica's cache."""
        one = self._replicas[replica]
        one.expected.pop(piece, None)
        if piece not in one.holds:
            return
        one.holds.remove(piece)
        left = self._holders[piece] & ~(1 << replica)
        if left:
            self._holders[piece] = left
        else:
            del self._holders[piece]


def _mix(key: int) -> int:
    """Return a number that depends on all bits of another (the finaliser of MurmurHash3)."""
    key ^= key >> 33
    key = key * 0xFF51AFD7ED558CCD & _MASK
    key ^= key >> 33
    key = key * 0xC4CEB9FE1A85EC53 & _MASK
    return key ^ key >> 33
