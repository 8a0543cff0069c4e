"""Choose the replica for a request: the one expected to finish its work, with the request, first.

A replica is a separate engine with the whole model. All parts of the cost of giving it a request
are in seconds, so they need no weights:

    backlog                prompt tokens that it has not computed yet, at its measured rate
    + this prompt          tokens of this prompt that its cache lacks, at the same rate
    + how full it is       mean decoding time of a request, times the square of the share of its KV
                           blocks or rows in use: a full replica preempts, and decodes slowly

Costs that differ by less than a tenth count as equal. Among those, rendezvous hashing (Thaler and
Ravishankar 1998) decides, by the first piece of the prompt that not all of them have. So several
routers send a new prefix to the same replica without communicating, an idle system spreads
different prefixes, and when a replica leaves, only its prefixes move.

The contents of caches are known from the engines, which report what they stored and removed; the
prefixes of requests just sent are expected there too. Time is an argument; nothing here waits or
reads a clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from kvik.core.block_pool import ContentChanges
from kvik.core.step_clock import RunningRatio
from kvik.core.types import derive_seed

NEAR = 1.1  # costs up to this factor above the least count as equal
ALIKE = 2.0  # replicas whose rates differ by less than this factor count as equally fast
EXPECTED_SECONDS = 60.0  # for which what a request should have left in a cache is expected there
MAX_EXPECTED = 200_000  # pieces of prompts expected at a replica that reports nothing
INITIAL_RATE = 1000.0  # tokens per second, assumed until a replica was measured
FIRST_DECODING = 5.0  # seconds that a request decodes, assumed until the first has ended
MIN_SECONDS = 1e-4  # for a measurement of a prompt: faster ones were computed before
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What an engine reports to its router after steps."""

    # Of its prefix cache since the previous report; None: there were none.
    changes: ContentChanges | None = None
    kv_usage: float = 0.0  # share of its blocks that requests hold, 0 to 1
    # Prompt tokens per second in its last steps; None: nothing was measured.
    prefill_rate: float | None = None
    # Weighted tokens that each tenant got since the previous report (`FairShare`).
    served: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReplicaChoice:
    """The replica that gets a request, by its number."""

    replica: int
    hit: int  # pieces of the prompt that its cache is believed to hold
    seconds: float  # its cost


@dataclass(slots=True)
class _Sent:
    """A request that has not ended."""

    choice: ReplicaChoice
    hashes: Sequence[bytes]
    tokens: float  # prompt tokens that the replica had to compute, as estimated
    sent: float
    begun: float | None = None  # time of its first token


class _Replica:
    """What is known of a replica."""

    def __init__(self, name: str) -> None:
        # Hash of its name, for rendezvous hashing.
        self.key = derive_seed(crc32(name.encode("utf-8", "surrogatepass")), 1) & _MASK
        # Pieces that its cache is believed to hold, expected ones included.
        self.holds: set[bytes] = set()
        # Those of them that it has not reported, and when that belief expires, in this order; the
        # first entry is found at once.
        self.expected: OrderedDict[bytes, float] = OrderedDict()
        self.number = -1  # of the last report of changes; -1: a full report is needed
        self.reports = False
        self.backlog = 0.0  # prompt tokens of requests sent whose first token has not come
        self.unfinished = 0  # number of requests
        self.kv_usage = 0.0
        self.reported_rate: float | None = None
        self.rate: float | None = None  # tokens per second, as reported or measured; None: neither
        self.measured = RunningRatio()
        self.last_begun = float("-inf")
        self.seconds = 0.0  # cost of its backlog and of how full it is
        self.per_token = 1 / INITIAL_RATE  # cost of a prompt token in seconds
        self.trust = RunningRatio()  # tokens that were in its cache, per token believed to be there
        self.trusted = 1.0


class ReplicaRouter:
    """Chooses replicas, and keeps the state needed for that.

    Args:
        names: of the replicas; from then on each is identified by its index in this list.
        piece: tokens that a hash covers; prompts are measured in the same unit.
        rows: requests that a replica computes at a time.
        lifetime: seconds for which what a request should have left in a cache is expected there.
    """

    def __init__(
        self, names: Sequence[str], piece: float, rows: int, lifetime: float = EXPECTED_SECONDS
    ) -> None:
        self.piece = piece
        self._rows = rows
        self._lifetime = lifetime
        self._replicas = [_Replica(name) for name in names]
        self._holders: dict[bytes, int] = {}  # bit i: replica i is believed to hold it
        self._available = 0  # the same bits
        self._sent: dict[str, _Sent] = {}
        self._decoding = RunningRatio()
        self._common_rate = INITIAL_RATE
        self._num_chosen = 0

    # -- what happens ----------------------------------------------------------------------------

    def set_available(self, replica: int, available: bool) -> None:
        """Set whether a replica may get requests."""
        self._update_costs(self._replicas[replica])
        bit = 1 << replica
        self._available = self._available | bit if available else self._available & ~bit

    def report(self, replica: int, report: ReplicaReport) -> bool:
        """Process a report.

        Returns:
            False if an earlier one is missing: then a full report is needed, and until it comes
            only prompts sent from now on are expected in the cache.
        """
        state, changes = self._replicas[replica], report.changes
        complete = changes is None or changes.cleared or changes.number == state.number + 1
        if changes is not None and (changes.cleared or not complete):
            self.forget(replica)
        state.kv_usage = report.kv_usage
        state.reported_rate = report.prefill_rate or state.reported_rate
        state.reports = True
        self._update_costs(state)
        if changes is None or not complete:
            return complete
        state.number = changes.number
        bit, holders, holds, expected = 1 << replica, self._holders, state.holds, state.expected
        for piece in changes.stored:
            holders[piece] = holders.get(piece, 0) | bit
            holds.add(piece)
            expected.pop(piece, None)
        for piece in changes.removed:
            self._drop(replica, piece)
        return True

    def forget(self, replica: int) -> None:
        """Forget the contents of a replica's cache: it is empty, as after a start, or unknown."""
        state = self._replicas[replica]
        for piece in list(state.holds):
            self._drop(replica, piece)
        state.number = -1
        state.kv_usage = 0.0

    def sent(
        self,
        request_id: str,
        choice: ReplicaChoice,
        hashes: Sequence[bytes],
        num_tokens: float,
        now: float,
    ) -> None:
        """Note that a request was sent to the replica that `choose` returned."""
        state = self._replicas[choice.replica]
        tokens = max(0.0, num_tokens - choice.hit * self.piece)
        self._sent[request_id] = _Sent(choice, hashes, tokens, now)
        state.backlog += tokens
        state.unfinished += 1
        self._expect(choice.replica, hashes, choice.hit, now)
        self._update_costs(state)

    def began(self, request_id: str, now: float) -> None:
        """Note that the first token of a request came."""
        sent = self._sent.get(request_id)
        if sent is None or sent.begun is not None:
            return
        state = self._replicas[sent.choice.replica]
        seconds = now - max(sent.sent, state.last_begun)
        if sent.tokens and seconds >= MIN_SECONDS:
            state.measured.note(sent.tokens, seconds)
        state.last_begun = sent.begun = now
        state.backlog = max(0.0, state.backlog - sent.tokens)
        self._update_costs(state)

    def ended(self, request_id: str, now: float, cached: float | None = None) -> None:
        """Note that a request ended, or was lost.

        Args:
            cached: tokens of its prompt that were in the cache; None: unknown.
        """
        sent = self._sent.pop(request_id, None)
        if sent is None:
            return
        state = self._replicas[sent.choice.replica]
        state.unfinished -= 1
        if sent.begun is None:
            state.backlog = max(0.0, state.backlog - sent.tokens)
        else:
            self._decoding.note(now - sent.begun, 1.0)
        if not state.reports and sent.begun is not None:
            believed = sent.choice.hit * self.piece
            if cached is not None and believed:
                state.trust.note(min(cached, believed), believed)
            self._expect(sent.choice.replica, sent.hashes, 0, now)
        self._update_costs(state)

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
            hashes: chained hashes of the prompt's full pieces; equal hashes mean equal prefixes.
            session: name shared by requests that belong together; it decides near-ties.
            avoid: replicas not to choose.
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
            state = replicas[replica]
            missing = max(0.0, num_tokens - hit * piece * state.trusted)
            costs.append((state.seconds + missing * state.per_token, replica))
        limit = min(costs)[0] * NEAR
        cheapest = [choice for choice in costs if choice[0] <= limit]
        if len(cheapest) == 1:
            seconds, replica = cheapest[0]
        else:
            key = self._key(hashes, min(hits[replica] for _, replica in cheapest), session)
            seconds, replica = max(cheapest, key=lambda cost: _mix(key ^ replicas[cost[1]].key))
        self._num_chosen += 1
        return ReplicaChoice(replica, hits[replica], seconds)

    # -- inside ----------------------------------------------------------------------------------

    def _hits(self, hashes: Sequence[bytes], among: int) -> dict[int, int]:
        """Return how many leading pieces each of the replicas holds.

        A cache that holds a piece holds all before it, since pools evict the last ones first. So
        the end is found by binary search, for all replicas at once.
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
        """Return the number that decides near-ties."""
        if session:
            return crc32(session.encode("utf-8", "surrogatepass")) * 0x9E3779B1 & _MASK
        if hashes:
            return int.from_bytes(hashes[min(common, len(hashes) - 1)][:8], "little")
        return self._num_chosen * 0x9E3779B97F4A7C15 & _MASK

    def _update_costs(self, state: _Replica) -> None:
        """Compute the costs of a replica again."""
        state.rate = state.reported_rate or state.measured.ratio
        rates = [other.rate for other in self._replicas if other.rate]
        common = sum(rates) / len(rates) if rates else INITIAL_RATE
        if not self._common_rate / NEAR < common < self._common_rate * NEAR:
            self._common_rate = common
            for other in self._replicas:
                self._set_costs(other, common)
        else:
            self._set_costs(state, self._common_rate)

    def _set_costs(self, state: _Replica, common: float) -> None:
        """Compute the costs of a replica. It uses the common rate unless its own is clearly
        different: otherwise the replica that was fastest by chance would get all requests."""
        rate = state.rate or common
        state.per_token = 1 / (common if common / ALIKE < rate < common * ALIKE else rate)
        trust = state.trust.ratio
        state.trusted = 1.0 if trust is None else trust
        full = max(state.kv_usage, state.unfinished / self._rows)
        decoding = self._decoding.ratio
        decoding = FIRST_DECODING if decoding is None else decoding
        state.seconds = state.backlog * state.per_token + decoding * full * full

    def _expect(self, replica: int, hashes: Sequence[bytes], first: int, now: float) -> None:
        """Expect the pieces from number `first` on in a replica's cache."""
        state, bit, holders = self._replicas[replica], 1 << replica, self._holders
        until = now + self._lifetime
        for piece in hashes[first:]:
            if piece in state.expected:
                del state.expected[piece]  # it becomes the last entry
            elif piece in state.holds:
                continue
            else:
                holders[piece] = holders.get(piece, 0) | bit
                state.holds.add(piece)
            state.expected[piece] = until
        while len(state.expected) > MAX_EXPECTED:
            self._drop(replica, next(iter(state.expected)))

    def _expire(self, now: float) -> None:
        for replica, state in enumerate(self._replicas):
            while state.expected:
                piece, until = next(iter(state.expected.items()))
                if until > now:
                    break
                self._drop(replica, piece)

    def _drop(self, replica: int, piece: bytes) -> None:
        """Note that a piece is no longer in a replica's cache."""
        state = self._replicas[replica]
        state.expected.pop(piece, None)
        if piece not in state.holds:
            return
        state.holds.remove(piece)
        other_holders = self._holders[piece] & ~(1 << replica)
        if other_holders:
            self._holders[piece] = other_holders
        else:
            del self._holders[piece]


def _mix(key: int) -> int:
    """Return a number that depends on all bits of another (the finaliser of MurmurHash3)."""
    key ^= key >> 33
    key = key * 0xFF51AFD7ED558CCD & _MASK
    key ^= key >> 33
    key = key * 0xC4CEB9FE1A85EC53 & _MASK
    return key ^ key >> 33
