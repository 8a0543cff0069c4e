"""Drafts without a model: the tokens that followed earlier occurrences of the end of a text.

Prompt lookup (`ngram`; Saxena 2023) takes the latest occurrence of the last tokens in the text
itself. Every step searches the whole text of a request with vector instructions. That takes a few
microseconds and grows with the text far more slowly than attention does. It needs no memory, and no
index that would have to be built for a long prompt.

`suffix` takes the tokens that followed most often, after SuffixDecoding (Oliaro et al. 2024,
2411.04975), with an automaton instead of a tree. It finds the longest suffix of a request's text
that occurred before, in the text itself or in earlier outputs of the same tenant. A longer suffix
and a more probable continuation give more drafts.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvik.worker.drafters.base import Drafter, DraftRows, Drafts
from kvik.worker.request_table import RequestTable


class NgramDrafter(Drafter):
    def __init__(self, table: RequestTable, min_ngram: int, max_ngram: int) -> None:
        """
        Args:
            min_ngram, max_ngram: least and most tokens at the end of a text to search for.
        """
        self._table = table
        self._min, self._max = min_ngram, max_ngram

    def propose(self, rows: DraftRows) -> Drafts:
        texts, counts = self._table.token_ids, self._table.num_tokens[rows.slots].tolist()
        drafts = []
        for slot, count, limit in zip(
            rows.slots.tolist(), counts, rows.limits.tolist(), strict=True
        ):
            text = texts[slot, :count]
            end = latest_match(text, self._min, self._max)
            drafts.append(continued(text, end, limit) if end else [])
        return Drafts.of(drafts)


def latest_match(text: NDArray[np.integer], shortest: int, longest: int) -> int:
    """Find the latest earlier occurrence of the longest possible run of a text's last tokens.

    Returns:
        The index of the token after it; 0 if no run of at least `shortest` tokens occurs.

    Args:
        text: [tokens].
    """
    ends = (text[:-1] == text[-1]).nonzero()[0]  # where such a run ends, ascending
    if not len(ends):
        return 0
    length = 1
    while length < longest and (len(ends) > 1 or length < shortest):
        longer = ends if ends[0] >= length else ends[1:]  # only the first can be too early
        longer = longer[text[longer - length] == text[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return int(ends[-1]) + 1 if length >= shortest else 0


def continued(text: NDArray[np.integer], start: int, count: int) -> list[int]:
    """Return `count` tokens of a text from `start` on. Beyond its end the text continues with the
    returned tokens, so a periodic text continues endlessly.

    Args:
        text: [tokens]. start: below their number.
    """
    tokens: list[int] = text[start : start + count].tolist()
    while len(tokens) < count:
        tokens += tokens[: count - len(tokens)]
    return tokens


# A suffix automaton (Blumer et al. 1985) contains all substrings of a text and grows token by
# token. Each state is a set of substrings that end at the same positions of the text, with the
# length of the longest; its link leads to the longest suffix that ends at more positions. Each
# state counts its positions, so the frequency of each continuation is known.

SEPARATOR = -1  # separates texts; never proposed
_NONE = -1
_MANY = -2  # token of a state whose edges are in a dict
# A new token adds a position to all states on the path to the root. In a text of one repeated token
# the path is as long as the text, so only this many states are counted.
_COUNTED = 64
_ROOT = 0


@dataclass(frozen=True, slots=True)
class SuffixMatch:
    """The most frequent continuation of a suffix."""

    tokens: list[int]  # those that followed most often
    score: float  # expected number of correct tokens, by the frequencies so far


NO_MATCH = SuffixMatch([], 0.0)


class SuffixAutomaton:
    """An automaton of at most two states per token, of about 60 bytes each."""

    def __init__(self) -> None:
        self.num_tokens = 0  # number of appended tokens
        self.last = _ROOT  # the state of the whole text
        self._length = array("i", [0])  # of a state's longest substring
        self._link = array("i", [_NONE])
        self._count = array("i", [0])  # positions where it ends; 0 for the root
        # Most states have one edge, which needs no dict.
        self._token = array("i", [_NONE])
        self._target = array("i", [_NONE])
        self._edges: dict[int, dict[int, int]] = {}

    def append(self, token: int) -> None:
        self.num_tokens += 1
        length, link, count = self._length, self._link, self._count
        state, new = self.last, self._add(length[self.last] + 1)
        target = _NONE
        while state != _NONE and (target := self._follow(state, token)) == _NONE:
            self._set(state, token, new)
            state = link[state]
        if state == _NONE:
            link[new] = _ROOT
        elif length[target] == length[state] + 1:
            link[new] = target
        else:
            link[new] = link[target] = self._split(target, state, token)
        self.last = new
        for _ in range(_COUNTED):
            if new == _ROOT:
                break
            count[new] += 1
            new = link[new]

    @property
    def repeated(self) -> tuple[int, int]:
        """State and length of the longest suffix of the text that also occurs earlier in it."""
        state = max(self._link[self.last], _ROOT)
        return state, self._length[state]

    def advance(self, state: int, length: int, tokens: Iterable[int]) -> tuple[int, int]:
        """Continue matching another text against this one.

        Args:
            state, length: of the longest suffix read so far that occurs in this text; 0, 0 at the
                start. Invalid once this text grows.
            tokens: the next tokens of the other text.

        Returns:
            State and length after the tokens.
        """
        lengths, links = self._length, self._link
        for token in tokens:
            target = self._follow(state, token)
            while target == _NONE and state != _ROOT:
                state = links[state]
                length = lengths[state]
                target = self._follow(state, token)
            state, length = (target, length + 1) if target != _NONE else (_ROOT, 0)
        return state, length

    def continuation(self, state: int, limit: int, threshold: float) -> SuffixMatch:
        """Return the most frequent continuation, token by token, as long as its probability is at
        least `threshold`. At the end of the text, a shorter suffix is continued."""
        tokens: list[int] = []
        probability, score = 1.0, 0.0
        while len(tokens) < limit and state != _ROOT:
            token, target, share = self._most_frequent(state)
            if token == SEPARATOR:
                break
            if token == _MANY:  # nothing followed
                state = self._link[state]
                continue
            probability *= share
            if probability < threshold:
                break
            score += probability
            tokens.append(token)
            state = target
        return SuffixMatch(tokens, score)

    def _most_frequent(self, state: int) -> tuple[int, int, float]:
        """Return token, target and share of the most frequent edge; of equal ones the oldest."""
        edges = self._edges.get(state)
        if edges is None:
            target = self._target[state]
            return (_MANY if target == _NONE else self._token[state]), target, 1.0
        count = self._count
        token = max(edges, key=lambda edge: count[edges[edge]])
        target = edges[token]
        return token, target, count[target] / max(1, sum([count[to] for to in edges.values()]))

    def _add(self, length: int) -> int:
        self._length.append(length)
        self._link.append(_NONE)
        self._count.append(0)
        self._token.append(_NONE)
        self._target.append(_NONE)
        return len(self._length) - 1

    def _split(self, split: int, state: int, token: int) -> int:
        """Add a state for the substrings of `split` that end at more positions than its longest."""
        new = self._add(self._length[state] + 1)
        self._link[new] = self._link[split]
        self._count[new] = self._count[split]
        self._token[new], self._target[new] = self._token[split], self._target[split]
        if split in self._edges:
            self._edges[new] = self._edges[split].copy()
        while state != _NONE and self._follow(state, token) == split:
            self._set(state, token, new)
            state = self._link[state]
        return new

    def _follow(self, state: int, token: int) -> int:
        if self._token[state] == token and self._target[state] != _NONE:
            return self._target[state]
        edges = self._edges.get(state)
        return _NONE if edges is None else edges.get(token, _NONE)

    def _set(self, state: int, token: int, target: int) -> None:
        if state in self._edges:
            self._edges[state][token] = target
        elif self._target[state] == _NONE or self._token[state] == token:
            self._token[state], self._target[state] = token, target
        else:
            self._edges[state] = {self._token[state]: self._target[state], token: target}
            self._token[state], self._target[state] = _MANY, _NONE


DRAFTS_PER_MATCHED = 2  # drafts for each token of the matched suffix
MIN_PROBABILITY = 0.2  # of all drafts of a row together
MAX_TOKENS = 16384  # in the automaton of a text, or the two of a tenant
MAX_TENANTS = 64  # whose outputs are stored: those with the most recently ended requests
MAX_LEARNED_PER_STEP = 1024  # tokens of a text in a step: about 4 ms
CONTEXT = 64  # tokens of a text that are matched against earlier outputs


class SuffixDrafter(Drafter):
    def __init__(self, table: RequestTable, shared: bool, max_tokens: int = MAX_TOKENS) -> None:
        """
        Args:
            shared: also search earlier outputs of the same tenant.
            max_tokens: most tokens of a text in its automaton; a longer prompt is truncated at the
                start.
        """
        self._table = table
        self._max_tokens = max_tokens
        self._texts: dict[int, _RequestText] = {}  # by slot
        self._outputs = TenantOutputs(max_tokens) if shared else None

    def enter(self, slot: int) -> None:
        length = int(self._table.num_tokens[slot])
        half = self._max_tokens // 2  # the rest is for the output
        self._texts[slot] = _RequestText(self._max_tokens, max(0, length - half))

    def leave(self, slot: int) -> None:
        del self._texts[slot]
        if self._outputs is not None:
            first, last = self._table.num_prompt[slot], self._table.num_tokens[slot]
            output = self._table.token_ids[slot, first:last].tolist()
            self._outputs.add(self._table.tenants[slot], output)

    def propose(self, rows: DraftRows) -> Drafts:
        drafts = []
        for slot, limit in zip(rows.slots.tolist(), rows.limits.tolist(), strict=True):
            text, length = self._texts[slot], int(self._table.num_tokens[slot])
            tokens = self._table.token_ids[slot]
            end = min(length, text.num_read + MAX_LEARNED_PER_STEP)
            best = text.continuation(tokens[text.num_read : end].tolist(), length, limit)
            if self._outputs is not None:
                before = tokens[max(0, length - CONTEXT) : length].tolist()
                by_outputs = self._outputs.continuation(self._table.tenants[slot], before, limit)
                best = max(best, by_outputs, key=lambda continuation: continuation.score)
            drafts.append(best.tokens)
        return Drafts.of(drafts)


class _RequestText:
    """The text of one request, as far as it has been read."""

    def __init__(self, max_tokens: int, start: int) -> None:
        self.num_read = start
        self._max_tokens = max_tokens
        self._automaton = SuffixAutomaton()
        self._match = (0, 0)

    def continuation(self, new: list[int], length: int, limit: int) -> SuffixMatch:
        """Read on, and return the continuation of the text.

        Args:
            new: the next tokens of the text.
            length: length of the text; there is no continuation until all of it has been read.
        """
        self.num_read += len(new)
        automaton = self._automaton
        free = self._max_tokens - automaton.num_tokens
        for token in new[:free]:
            automaton.append(token)
        if free > 0:
            self._match = automaton.repeated
        self._match = automaton.advance(*self._match, new[free:])
        if self.num_read < length:
            return NO_MATCH
        return _continuation(automaton, *self._match, limit)


@dataclass(slots=True)
class _Outputs:
    """Outputs of one tenant: the current automaton, the one before it, and outputs to add."""

    young: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    old: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    waiting: deque[list[int]] = field(default_factory=deque)


class TenantOutputs:
    """Earlier outputs by tenant, so that drafts never reveal another tenant's outputs.

    Memory is bounded: a full automaton replaces the previous one, and the tenants without recent
    requests are forgotten.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens // 2
        self._tenants: OrderedDict[str, _Outputs] = OrderedDict()

    def add(self, tenant: str, output: list[int]) -> None:
        """Queue a finished output. It is learned step by step when the tenant needs drafts."""
        if not output:
            return
        outputs = self._tenants.setdefault(tenant, _Outputs())
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        outputs.waiting.append([*output[-self._max_tokens :], SEPARATOR])
        while sum(map(len, outputs.waiting)) > 2 * self._max_tokens:
            outputs.waiting.popleft()

    def continuation(self, tenant: str, before: list[int], limit: int) -> SuffixMatch:
        """Return the continuation of a text by earlier outputs of the tenant.

        Args:
            before: the end of a text.
        """
        outputs = self._tenants.get(tenant)
        if outputs is None:
            return NO_MATCH
        if outputs.waiting:
            self._learn(outputs)
        matches = (
            _continuation(automaton, *automaton.advance(0, 0, before), limit)
            for automaton in (outputs.young, outputs.old)
        )
        return max(matches, key=lambda continuation: continuation.score)

    def _learn(self, outputs: _Outputs) -> None:
        """Learn a limited number of the queued tokens."""
        first = outputs.waiting[0]
        for token in first[:MAX_LEARNED_PER_STEP]:
            outputs.young.append(token)
        del first[:MAX_LEARNED_PER_STEP]
        if first:
            return
        outputs.waiting.popleft()
        if outputs.young.num_tokens >= self._max_tokens:
            outputs.old, outputs.young = outputs.young, SuffixAutomaton()


def _continuation(automaton: SuffixAutomaton, state: int, length: int, limit: int) -> SuffixMatch:
    return automaton.continuation(state, min(limit, DRAFTS_PER_MATCHED * length), MIN_PROBABILITY)
