"""A worker without a model that knows the content of every cell of the KV cache.

It applies plans exactly as `core/plan.py` documents them. Instead of K and V it writes into each
cell an identity of everything they depend on: the KV group, the tenant and all tokens up to this
one. Before sampling it reads every key that its queries see and checks its identity, so that a
block that is shared, freed, copied or kept wrongly is found at the first wrong forward. Sampled
tokens are a function of the sequence alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import log

from helpers.windows import cut_points, seen

from kvik.core.config import CacheConfig
from kvik.core.plan import (
    AT_PEER,
    BudgetCut,
    ModelRunnerOutput,
    Moved,
    NewRequest,
    PageKey,
    PageLoad,
    SchedulerOutput,
)
from kvik.core.types import TokenLogprobs
from kvik.spec.visible_keys import Budget

EOS = 7
Cell = tuple[int, int]  # KV group, identity of the sequence up to the token


class ContentError(AssertionError):
    """A forward would have read or written the wrong K/V."""


def start_state(salt: str) -> int:
    return zlib.crc32(salt.encode())


def extend_state(state: int, token: int) -> int:
    """Return the identity of a sequence extended by `token`."""
    return hash((state, token))


def next_token(state: int) -> int:
    """Return the "model's" next token: 0, 1 or 2, sometimes EOS."""
    number = (state >> 9) % 1009
    return EOS if number < 40 else number % 3


def likely_tokens(state: int) -> list[tuple[int, float]]:
    """Return the "model's" next tokens with their log probabilities, the likeliest first."""
    weights = {token: 1 + (state >> 3 * token) % 997 for token in (0, 1, 2, EOS)}
    total = sum(weights.values())
    pairs = [(token, log(weight / total)) for token, weight in weights.items()]
    return sorted(pairs, key=lambda pair: -pair[1])


def expected_output(
    prompt: list[int], salt: str, max_tokens: int, *, stop_id: int | None = EOS
) -> list[int]:
    """Return the tokens that a request must get under any schedule."""
    state = start_state(salt)
    for token in prompt:
        state = extend_state(state, token)
    output: list[int] = []
    while len(output) < max_tokens and output[-1:] != [stop_id]:
        output.append(next_token(state))
        state = extend_state(state, output[-1])
    return output


def expected_embedding(prompt: list[int], salt: str, pooling: str) -> list[float]:
    """Return the vector that a prompt must get: the sum, and its number of tokens."""
    state, states = start_state(salt), []
    for token in prompt:
        state = extend_state(state, token)
        states.append(state)
    return _pool(states if pooling == "mean" else states[-1:])


def expected_prompt_logprobs(prompt: list[int], salt: str, first: int) -> list[TokenLogprobs]:
    """Return the logprobs that a prompt must get from `first` on; each identifies all tokens up to
    its own."""
    state, found = start_state(salt), []
    for token in prompt:
        state = extend_state(state, token)
        found.append(TokenLogprobs(token, -float(state % 1009), 1))
    return found[max(1, first) :]  # the token at 0 has no prediction


def kept_of(tokens: list[int], budget: Budget, queries: list[int], states: list[int]) -> list[int]:
    """Return which tokens a budget keeps: the first, the last, and others by the last queries.

    Args:
        states: of all tokens.
        queries: states of the last queries.
    """
    first, others, last = (
        tokens[: budget.first],
        tokens[budget.first : len(tokens) - budget.last],
        tokens[len(tokens) - budget.last :],
    )
    chosen = sorted(others, key=lambda t: hash((*queries, states[t])))
    return first + sorted(chosen[: budget.tokens - budget.min_tokens]) + last


def expected_kept(budget: Budget, prompt: int, end: int, states: list[int]) -> list[int]:
    """Return by definition which tokens a budget keeps after `end` tokens, in order of place."""
    tokens, before = [], 0
    for cut in cut_points(budget, prompt, end):
        tokens += range(before, cut)
        tokens = kept_of(tokens, budget, states[cut - budget.last : cut], states)
        before = cut
    return tokens + list(range(before, end))


def _pool(states: list[int]) -> list[float]:
    return [float(sum(state % 1009 for state in states)), float(len(states))]


@dataclass
class Row:
    """The state of a slot in the worker."""

    tokens: list[int]
    num_computed: int
    tables: list[list[int]]
    salt: str
    drafts: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)  # after each token
    broken: bool = False  # a step failed: its writes are garbage and must not be read
    pooling: str | None = None
    num_prompt: int = 0
    pooled: list[int] = field(default_factory=list)  # states of the tokens computed in this slot
    scored: list[TokenLogprobs] | None = None  # of the same tokens; None: not requested
    first_scored: int = 0
    only_prompt: bool = False  # nothing is sampled
    first_keys: list[int] = field(default_factory=list)  # by group
    held: list[list[int]] = field(default_factory=list)  # by group, tokens from the first key on
    queries: dict[int, int] = field(default_factory=dict)  # states of tokens computed in this slot
    num_top: int | None = None  # likeliest tokens to report with each sampled one

    def first_states(self, count: int) -> list[int]:
        """Return the identities of the prefixes of 1 to `count` tokens."""
        if count:
            self.state(count)
        return self.states[:count]

    def state(self, count: int) -> int:
        """Return the identity of the first `count` tokens."""
        while len(self.states) < count:
            before = self.states[-1] if self.states else start_state(self.salt)
            self.states.append(extend_state(before, self.tokens[len(self.states)]))
        return self.states[count - 1] if count else start_state(self.salt)


State = dict[int, int]  # identities by number of tokens: what a state covers, then each draft
GARBAGE: State = {-1: 0}  # left by a step that failed
Page = list[Cell | None] | tuple[int, State]  # content of a block, or a part of a state


class FakeTiers:
    """Stores pages as plans demand, with injected failures."""

    def __init__(
        self,
        cache: CacheConfig,
        cells: list[list[Cell | None]],
        pool: dict[int, State],
    ) -> None:
        assert cache.tiers is not None
        self.cells, self.pool = cells, pool
        self.groups, self.parts = len(cache.groups), cache.tiers.state_pages
        self.memory: list[tuple[PageKey, Page] | None] = [None] * cache.tiers.memory
        self.disk: dict[PageKey, Page] = {}
        self.under_way: list[PageLoad] = []
        self.at_once = True  # loads end in the step that begins them
        self._seen: set[int] = set()
        self._bad: set[int] = set()  # of the next loads, which fail
        self._num_loads = 0
        self._moved = Moved(scanned=True, address=("peer", 1))
        self._off = False
        self.peer: dict[PageKey, Page] = {}  # all that was ever stored
        self.leases: dict[str, list[tuple[int, tuple[PageKey, Page] | None]]] = {}
        self.missed: set[PageKey] = set()  # by plans that failed before they stored them

    def begin(self, plan: SchedulerOutput, *, fails: bool = False) -> None:
        """Begin the moves of a plan. If that fails, nothing is stored."""
        for key in plan.drops:
            self.disk.pop(key, None)
        for name in plan.ended_leases:
            self.leases.pop(name, None)
        if fails:
            self.missed.update(store.key for store in plan.stores)
            return
        for store in plan.stores:
            content: Page
            if store.key[0] < self.groups:
                content = self.cells[store.block][:]
            else:
                row, part = divmod(store.block, self.parts)
                content = part, self.pool.get(row, {})
            self.peer[store.key] = content
            if store.place >= 0:
                self.memory[store.place] = (store.key, content)
            if store.on_disk:
                if self._off:
                    self._moved.lost.append(store.key)
                else:
                    self.disk[store.key] = content
                    self._moved.stored.append(store.key)
        for lease in plan.leases:
            for key, _, place in lease.pages:
                found = self.memory[place]
                if (found is None or found[0] != key) and key not in self.missed:
                    raise ContentError(f"place {place} is lent as {key} and does not hold it")
            self.leases[lease.name] = [(place, self.memory[place]) for _, _, place in lease.pages]
        for name, pages in self.leases.items():
            if any(self.memory[place] is not found for place, found in pages):
                raise ContentError(f"a page of the lease {name} was overwritten")
        for load in plan.loads:
            if load.ticket not in self._seen:
                self._seen.add(load.ticket)
                self.under_way.append(load)
                for key, block, _ in load.pages:
                    if key[0] < self.groups:
                        self.cells[block] = [None] * len(self.cells[block])
                    else:
                        self.pool[block // self.parts] = {}

    def end(self, *, wait: bool) -> Moved | None:
        """Finish completed moves; at least one load if the step waits for it."""
        count = len(self.under_way) if self.at_once else int(wait)
        done, self.under_way = self.under_way[:count], self.under_way[count:]
        for load in done:
            failed = []
            states: dict[int, State] = {}  # by index of the page
            for i, (key, block, place) in enumerate(load.pages):
                content = (self.peer if place == AT_PEER else self.disk).get(key)
                assert (place == AT_PEER) <= (load.source is not None)
                if place >= 0:
                    found = self.memory[place]
                    if found is None or found[0] != key:
                        raise ContentError(f"place {place} does not hold {key} any more")
                    content = found[1]
                self._num_loads += 1
                if content is None or self._num_loads in self._bad:
                    failed.append(i)
                elif key[0] < self.groups:
                    self.cells[block] = content[:]
                elif content[0] != block % self.parts:
                    raise ContentError(f"part {content[0]} of a state is loaded as {block}")
                else:
                    states[i] = content[1]
            if any(state != states[min(states)] for state in states.values()):
                failed = sorted({*failed, *states})  # they are of several copies
            elif states and len(states) == self.parts:
                (row,) = {load.pages[i][1] // self.parts for i in states}
                self.pool[row] = states[min(states)]
            self._moved.loaded.append((load.ticket, failed))
            self._moved.rates.append(("memory", 100 * len(load.pages), 0.001))
        moved, self._moved = self._moved, Moved()
        return moved

    def fail(self, which: str, number: int) -> None:
        keys = list(self.disk)
        if which == "load":
            self._bad.add(self._num_loads + 1 + number)
        elif which == "slow":
            self._moved.rates.append((("memory", "disk")[number % 2], 1, 10.0**number))
        elif which == "gone" and keys:
            del self.disk[keys[number % len(keys)]]
        elif which == "lost" and keys:
            key = keys[number % len(keys)]
            del self.disk[key]
            self._moved.lost.append(key)
        elif which == "found" and keys:  # as if written by another engine
            self._moved.found.extend(keys[: number + 1])
        elif which == "returned" and self.leases:
            name = [*self.leases][number % len(self.leases)]
            del self.leases[name]
            self._moved.returned.append(name)
        elif which == "off" and number == 0:
            self._off, self._moved.off = True, "no space is left"


FAULTS = ("load", "load", "slow", "gone", "lost", "found", "returned", "off")
PAGE = 1000  # bytes of a page


class FakeWorker:
    def __init__(self, cache: CacheConfig, salt_of: Callable[[NewRequest], str]) -> None:
        self.block_size = cache.block_size
        self.windows = [group.spec.window for group in cache.groups]
        self.budgets = [group.spec.budget for group in cache.groups]
        self.cells: list[list[Cell | None]] = [
            [None] * cache.block_size for _ in range(cache.pool_size)
        ]
        self.rows: dict[int, Row] = {}
        self.salt_of = salt_of
        self.stateful = cache.checkpoints is not None
        self.pool: dict[int, State] = {}  # by row
        self.num_drafts = 0  # proposed after each step
        self.broken: dict[int, list[bool]] = {}  # step -> which rows compute garbage
        self.tiers = None if cache.tiers is None else FakeTiers(cache, self.cells, self.pool)

    def move(self, plan: SchedulerOutput, *, fails: bool) -> ModelRunnerOutput | None:
        """Run a step without rows; None if it fails."""
        self.tiers.begin(plan, fails=fails)
        if fails:
            return None
        moved = self.tiers.end(wait=True)
        return ModelRunnerOutput(plan.step, [], moved=moved)

    def execute(
        self, plan: SchedulerOutput, *, failing_row: int | None = None, fails: bool = False
    ) -> ModelRunnerOutput | None:
        """Run a step; None if it fails as a whole."""
        if self.tiers is not None:
            self.tiers.begin(plan, fails=fails and plan.step % 2 == 1)  # else it fails later
        self._apply(plan)
        if fails:
            for slot in plan.slots:
                self.rows[slot].broken = True
                self.pool[slot] = {}
            for _, target in plan.state_copies:
                self.pool[target] = GARBAGE
        for cut in plan.budget_cuts:
            self._cut(cut)
        if fails:
            return None
        for source, target in plan.block_copies:
            self.cells[target] = self.cells[source][:]
        written: set[tuple[int, int]] = set()
        states = [self._write(plan, i, written) for i in range(len(plan.slots))]
        self.broken[plan.step] = [self.rows[slot].broken for slot in plan.slots]
        for i in range(len(plan.slots)):
            self._read(plan, i, states[i])
        errors = {}
        if failing_row is not None:
            row = failing_row % len(plan.slots)
            errors[row] = "sampling failed"
            self.rows[plan.slots[row]].broken = True
            self.pool[plan.slots[row]] = {}
        logprobs = self._rank(plan)
        tokens = [self._sample(plan, i) for i in range(len(plan.slots))]
        drafts = [len(self.rows[slot].drafts) for slot in plan.slots]
        return ModelRunnerOutput(
            plan.step,
            tokens,
            drafts,
            logprobs=logprobs,
            prompt_logprobs=self._score(plan, states),
            embeddings=self._embed(plan, states),
            errors=errors,
            moved=None if self.tiers is None else self.tiers.end(wait=False),
        )

    def _apply(self, plan: SchedulerOutput) -> None:
        for slot in plan.freed_slots:
            del self.rows[slot]
        for source, target in plan.state_copies:
            self.pool[target] = self.pool.get(source, {})
        for new in plan.new_requests:
            if new.slot in self.rows:
                raise ContentError(f"slot {new.slot} is given away while in use")
            self.rows[new.slot] = Row(
                new.token_ids[:],
                new.num_computed_tokens,
                [ids[:] for ids in new.block_ids],
                self.salt_of(new),
                pooling=new.pooling,
                num_prompt=new.num_prompt_tokens,
                scored=None if new.params.prompt_logprobs is None else [],
                first_scored=new.params.prompt_logprobs_start,
                only_prompt=new.pooling is not None or new.params.max_tokens == 0,
                first_keys=[0] * len(new.block_ids),
                held=[list(range(new.num_computed_tokens)) for _ in new.block_ids],
                num_top=new.params.logprobs,
            )
        for slot, group, ids in plan.new_blocks:
            self.rows[slot].tables[group] += ids

    def _cut(self, cut: BudgetCut) -> None:
        """Move the tokens that a budget keeps, and check that they are the right ones."""
        row, budget, size = self.rows[cut.slot], self.budgets[cut.group], self.block_size
        table, first = row.tables[cut.group], row.first_keys[cut.group]
        if row.num_computed != cut.end:
            raise ContentError(f"a cut after {cut.end} of {row.num_computed} tokens")
        found = [self.cells[table[p // size]][p % size] for p in range(first, cut.end)]
        where = range(cut.first_key // size, -(-cut.end // size))
        if len(where) != len(cut.block_ids):
            raise ContentError(f"{len(cut.block_ids)} blocks for {where}")
        table[where.start : where.stop] = cut.block_ids
        held = row.held[cut.group]
        if row.broken:
            held[:] = held[-(cut.end - cut.first_key) :]
            row.first_keys[cut.group] = cut.first_key
            return
        states = row.first_states(cut.end)
        right = self._cells(row, cut.group, held, states)
        if found != right:
            raise ContentError(f"slot {cut.slot}, group {cut.group}: keeps of {found}")
        last = range(cut.end - budget.last, cut.end)
        if any(p not in row.queries for p in last):
            raise ContentError(f"queries are missing that choose what is kept: {last}")
        kept = kept_of(held, budget, [row.queries[p] for p in last], states)
        if kept != expected_kept(budget, row.num_prompt, cut.end, states):
            raise ContentError(f"slot {cut.slot}, group {cut.group} keeps {kept}")
        row.held[cut.group], row.first_keys[cut.group] = kept, cut.first_key
        for place, cell in enumerate(self._cells(row, cut.group, kept, states), cut.first_key):
            self.cells[table[place // size]][place % size] = cell

    def _cells(self, row: Row, group: int, tokens: Sequence[int], states: list[int]) -> list[Cell]:
        """Return the contents that the cells of tokens must have. They depend on the length of the
        prompt for tokens computed after a budget dropped some."""
        budgets = filter(None, self.budgets)
        cuts = (cut_points(budget, row.num_prompt, len(states)) for budget in budgets)
        drop = min(chain.from_iterable(cuts), default=len(states))
        return [
            (group, states[p] if p < drop else hash((states[p], row.num_prompt))) for p in tokens
        ]

    def _rank(self, plan: SchedulerOutput) -> dict[int, list[TokenLogprobs]]:
        """Return by row the likeliest next tokens, where a token is sampled and they are wanted."""
        ranked = {}
        for i, slot in enumerate(plan.slots):
            row = self.rows[slot]
            if plan.samples[i] and row.num_top is not None:
                top = tuple(likely_tokens(row.state(len(row.tokens)))[: row.num_top])
                ranked[i] = [TokenLogprobs(*top[0], 1, top)]
        return ranked

    def _embed(self, plan: SchedulerOutput, states: list[list[int]]) -> dict[int, list[float]]:
        """Return by row the vectors of finished prompts."""
        done: dict[int, list[float]] = {}
        for i, slot in enumerate(plan.slots):
            row = self.rows[slot]
            if row.pooling is None or row.broken:
                continue
            row.pooled += states[i][row.num_computed - plan.num_scheduled_tokens[i] :]
            if row.num_computed == row.num_prompt:
                done[i] = _pool(row.pooled if row.pooling == "mean" else row.pooled[-1:])
        return done

    def _score(
        self, plan: SchedulerOutput, states: list[list[int]]
    ) -> dict[int, list[TokenLogprobs]]:
        """Return by row the logprobs of finished prompts."""
        done: dict[int, list[TokenLogprobs]] = {}
        for i, slot in enumerate(plan.slots):
            row = self.rows[slot]
            if row.scored is None or row.broken:
                continue
            end = row.num_computed
            start = end - plan.num_scheduled_tokens[i]
            for p in range(max(1, start, row.first_scored), min(end, row.num_prompt)):
                row.scored.append(TokenLogprobs(row.tokens[p], -float(states[i][p] % 1009), 1))
            if end >= row.num_prompt:
                done[i], row.scored = row.scored, None
        return done

    def _span(self, plan: SchedulerOutput, i: int) -> tuple[Row, int, int, list[int]]:
        """Return row i, its first and last + 1 position in this step, and its drafts."""
        row = self.rows[plan.slots[i]]
        drafts = row.drafts[: plan.num_draft_tokens[i]]
        return row, row.num_computed, row.num_computed + plan.num_scheduled_tokens[i], drafts

    def _write(self, plan: SchedulerOutput, i: int, written: set[tuple[int, int]]) -> list[int]:
        """Write the step's cells of row i, and return the identities of all prefixes to its end."""
        row, start, end, drafts = self._span(plan, i)
        if start and self.pool.get(plan.slots[i]) == GARBAGE:
            row.broken = True
        if not row.broken:
            known = len(row.tokens)
            if len(drafts) != plan.num_draft_tokens[i]:
                raise ContentError("more drafts are planned than were proposed")
            samples = end - len(drafts) == known and not row.only_prompt
            if samples != plan.samples[i] or end - len(drafts) > known:
                raise ContentError(f"tokens {start}..{end} of {known} with {plan.samples[i]=}")
        states = [] if row.broken else row.first_states(end - len(drafts))
        for draft in drafts:
            if not row.broken:
                states.append(extend_state(states[-1], draft))
        if self.stateful:
            slot = plan.slots[i]
            found = self.pool.get(slot, {})
            if start and not row.broken and found.get(start) != row.state(start):
                raise ContentError(f"slot {slot} continues from the state {found}, not {start}")
            first = end - len(drafts)
            self.pool[slot] = dict(enumerate(states[first - 1 :], first)) if states else {}
        for group, table in enumerate(row.tables):
            cells = None if row.broken else self._cells(row, group, range(start, end), states)
            for p in range(start, end):
                block, offset = table[p // self.block_size], p % self.block_size
                if block == 0:
                    raise ContentError("a write goes into the null block")
                if (block, offset) in written:
                    raise ContentError(f"two rows write into block {block}")
                written.add((block, offset))
                self.cells[block][offset] = cells and cells[p - start]
            row.held[group] += range(start, end)
        row.queries.update({p: states[p] for p in range(start, end) if not row.broken})
        return states

    def _read(self, plan: SchedulerOutput, i: int, states: list[int]) -> None:
        row, start, end, _ = self._span(plan, i)
        if row.broken:
            return
        for group, table in enumerate(row.tables):
            budget, first = self.budgets[group], row.first_keys[group]
            if budget and start:
                right = expected_kept(budget, row.num_prompt, start, states)
                if row.held[group][: start - first] != right:
                    raise ContentError(f"slot {plan.slots[i]}, group {group} has {row.held[group]}")
            before = range(first, start + 1) if budget else seen(start, self.windows[group])
            keys = [*before, *range(start + 1, end)]
            tokens = [row.held[group][p - first] for p in keys] if budget else keys
            found = [self.cells[table[p // self.block_size]][p % self.block_size] for p in keys]
            if found != self._cells(row, group, tokens, states):
                raise ContentError(f"slot {plan.slots[i]}, group {group}: {keys} hold {found}")

    def _sample(self, plan: SchedulerOutput, i: int) -> list[int]:
        row, _, end, drafts = self._span(plan, i)
        row.num_computed = end
        row.drafts = []
        if row.broken or not plan.samples[i]:
            return []
        state = row.state(len(row.tokens))
        sampled = []
        for draft in drafts:
            sampled.append(next_token(state))
            if sampled[-1] != draft:
                break
            state = extend_state(state, draft)
        else:
            sampled.append(next_token(state))
        rejected = len(drafts) + 1 - len(sampled)
        row.num_computed -= rejected
        for held in row.held:
            del held[len(held) - rejected :]
        row.tokens += sampled
        row.drafts = self._propose(row.state(len(row.tokens)))
        return sampled

    def _propose(self, state: int) -> list[int]:
        """Return drafts of which the first few are right, sometimes all or none."""
        right = (state >> 5) % (self.num_drafts + 1)
        drafts = []
        for i in range(self.num_drafts):
            token = next_token(state)
            drafts.append(token if i < right else (token + 1) % 3)
            state = extend_state(state, token)
        return drafts
