"""Drafts from what the end of a text was followed by before, weighed by how often.

After SuffixDecoding (Oliaro et al. 2024, 2411.04975), with an automaton instead of a tree: it is
asked for the longest suffix of a request's text that stood somewhere before, in the text itself or
in earlier outputs of the same tenant, and continues with the tokens that followed most often. The
longer the suffix and the surer its continuation, the more is drafted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kvik.worker.drafters.base import DraftRows, Drafts
from kvik.worker.drafters.suffix_automaton import (
    NO_CONTINUATION,
    SEPARATOR,
    Continuation,
    SuffixAutomaton,
)
from kvik.worker.request_table import RequestTable

PER_MATCHED = 2  # drafts for each token of the suffix that was found
LEAST_LIKELY = 0.2  # all drafts of a row together
MAX_TOKENS = 16384  # that the automaton of a text, or the two of a tenant, hold
MAX_TENANTS = 64  # of whom outputs are kept: of those whose requests ended last
LEARNED_AT_ONCE = 1024  # tokens of a text in one step: some 4 ms
CONTEXT = 64  # tokens that are read to find one's place in another's texts


class SuffixDrafter:
    def __init__(self, table: RequestTable, shared: bool, max_tokens: int = MAX_TOKENS) -> None:
        """
        Args:
            shared: look into earlier outputs of the same tenant, too.
            max_tokens: that an automaton holds of a text. Of a longer prompt it is the end.
        """
        self._table = table
        self._max_tokens = max_tokens
        self._texts: dict[int, _OwnText] = {}  # by slot
        self._outputs = TenantOutputs(max_tokens) if shared else None

    def enter(self, slot: int) -> None:
        known = int(self._table.num_tokens[slot])
        half = self._max_tokens // 2  # the rest is for the output
        self._texts[slot] = _OwnText(self._max_tokens, max(0, known - half))

    def leave(self, slot: int) -> None:
        del self._texts[slot]
        if self._outputs is not None:
            first, last = self._table.num_prompt[slot], self._table.num_tokens[slot]
            output = self._table.token_ids[slot, first:last].tolist()
            self._outputs.add(self._table.tenants[slot], output)

    def propose(self, rows: DraftRows) -> Drafts:
        found = []
        for slot, limit in zip(rows.slots.tolist(), rows.limits.tolist(), strict=True):
            text, known = self._texts[slot], int(self._table.num_tokens[slot])
            tokens = self._table.token_ids[slot]
            room = LEARNED_AT_ONCE
            best = text.continuation(
                tokens[text.num_read : min(known, text.num_read + room)].tolist(), known, limit
            )
            if self._outputs is not None:
                before = tokens[max(0, known - CONTEXT) : known].tolist()
                others = self._outputs.continuation(self._table.tenants[slot], before, limit)
                best = max(best, others, key=lambda continuation: continuation.score)
            found.append(best.tokens)
        return Drafts.of(found)


class _OwnText:
    """The text of one request, as far as it was read."""

    def __init__(self, max_tokens: int, start: int) -> None:
        self.num_read = start
        self._max_tokens = max_tokens
        self._automaton = SuffixAutomaton()
        self._match = (0, 0)

    def continuation(self, new: list[int], known: int, limit: int) -> Continuation:
        """
        Args:
            new: the next tokens of the text.
            known: tokens of the text; while not all of them were read, there is no continuation.
        """
        self.num_read += len(new)
        automaton = self._automaton
        room = self._max_tokens - automaton.num_tokens
        for token in new[:room]:
            automaton.append(token)
        if room > 0:
            self._match = automaton.repeated
        self._match = automaton.advance(*self._match, new[room:])
        if self.num_read < known:
            return NO_CONTINUATION
        return _continuation(automaton, *self._match, limit)


@dataclass(slots=True)
class _Outputs:
    """Of one tenant: what was learned last, and before."""

    young: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    old: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    waiting: deque[list[int]] = field(default_factory=deque)


class TenantOutputs:
    """Earlier outputs, by tenant: nobody's drafts show what another tenant's requests said.

    Memory is bounded: an automaton that is full replaces the one before it, and tenants who have
    not been seen for long are forgotten.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens // 2
        self._tenants: OrderedDict[str, _Outputs] = OrderedDict()

    def add(self, tenant: str, output: list[int]) -> None:
        """An output that ended. It is learned bit by bit, when the tenant asks."""
        if not output:
            return
        outputs = self._tenants.setdefault(tenant, _Outputs())
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        outputs.waiting.append([*output[-self._max_tokens :], SEPARATOR])
        while sum(map(len, outputs.waiting)) > 2 * self._max_tokens:
            outputs.waiting.popleft()

    def continuation(self, tenant: str, before: list[int], limit: int) -> Continuation:
        """
        Args:
            before: the end of a text.
        """
        outputs = self._tenants.get(tenant)
        if outputs is None:
            return NO_CONTINUATION
        if outputs.waiting:
            self._learn(outputs)
        found = (
            _continuation(automaton, *automaton.advance(0, 0, before), limit)
            for automaton in (outputs.young, outputs.old)
        )
        return max(found, key=lambda continuation: continuation.score)

    def _learn(self, outputs: _Outputs) -> None:
        """Some of what waits."""
        first = outputs.waiting[0]
        for token in first[:LEARNED_AT_ONCE]:
            outputs.young.append(token)
        del first[:LEARNED_AT_ONCE]
        if first:
            return
        outputs.waiting.popleft()
        if outputs.young.num_tokens >= self._max_tokens:
            outputs.old, outputs.young = outputs.young, SuffixAutomaton()


def _continuation(automaton: SuffixAutomaton, state: int, length: int, limit: int) -> Continuation:
    return automaton.continuation(state, min(limit, PER_MATCHED * length), LEAST_LIKELY)
