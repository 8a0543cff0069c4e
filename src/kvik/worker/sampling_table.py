"""Sampling parameters and state of the running requests, one row per slot."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvik.config.step_memory import DRAW_BYTES, RULES_BYTES
from kvik.core.sampling_params import PARAMETERS, TRUNCATIONS, SamplingParams
from kvik.core.structured import Grammars, TextMatcher
from kvik.kernels.ops import Draws, Masks, Penalties, Truncation
from kvik.kernels.upload import upload
from kvik.worker.dry import Dry
from kvik.worker.logits_rules import Edits, Rule, TokenRules, gather_edits
from kvik.worker.sampling_batch import (
    NOTHING,
    GuessedRows,
    Guesses,
    Offers,
    RandomRows,
    SamplingBatch,
    Supposed,
    TypicalRows,
)


class SeenTokens:
    """The tokens of each request that its penalties count."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        # [slots, vocab] bool.
        self.in_prompt = torch.zeros(max_num_seqs, vocab_size, dtype=torch.bool, device=device)
        # [slots, vocab] int32, occurrences in the output.
        self.counts = torch.zeros(max_num_seqs, vocab_size, dtype=torch.int32, device=device)

    def set(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        device = self.counts.device
        self.in_prompt[slot] = False
        self.in_prompt[slot].index_fill_(0, upload(np.array(prompt, np.int64), device), True)
        self.counts[slot] = 0
        if output:
            ids = upload(np.array(output, np.int64), device)
            add_counts(self.counts, torch.full_like(ids, slot), ids)

    def append(self, slots: Tensor, tokens: Tensor) -> None:
        """Count output tokens. slots, tokens: [n] int64."""
        add_counts(self.counts, slots, tokens)


def add_counts(counts: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """Add 1 to the count of each token in its row.

    Args:
        counts: [rows, vocab] int32, changed in place.
        rows, tokens: [n] int64; pairs may repeat.
    """
    counts.index_put_((rows, tokens), counts.new_ones(()), accumulate=True)


# Random numbers that do not depend on how many were drawn before.
#
# With a stateful generator, a request's numbers would change with the other requests of its batch.
# Here the number for (seed, position, stream) is a hash of the three: a chain of splitmix64
# finalisers (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).

# Streams: uses of a position that must not share a number. The token, the acceptance of its draft,
# and the draft.
SAMPLE, ACCEPT, DRAFT = 0, 1, 2

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def uniform(
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int64],
    stream: int | NDArray[np.int64] = SAMPLE,
) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each seed and position, a multiple of 2^-53.

    Args:
        seeds: [n], int64 seeds as two's complement.
        positions: [n], index of the token in its sequence.
        stream: separates the uses of one position; one for all, or [n].
    """
    state = _mix(seeds)
    state = _mix(state ^ positions.astype(np.uint64))
    state = _mix(state ^ np.asarray(stream).astype(np.uint64))
    return (state >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = z + _GAMMA  # arrays wrap around silently
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


# Rules on the host, in the order in which they are applied to a request.
RULES: tuple[type[Rule], ...] = (TokenRules, Dry)


class _Need:
    """Bits of what a request needs beyond its most likely token. The OR over a batch decides what
    its step does. Plain integers, because enum flags cost microseconds per operation."""

    RANDOM = 1
    PENALTIES = 2
    TOKEN_RULES = 4
    LOGPROBS = 8
    GRAMMAR = 16
    BEAM = 32  # log probabilities by its rules
    TRUNCATION = 64  # bit of the first of `TRUNCATIONS`; those of the others follow


_TRUNCATION_BITS = {one.name: _Need.TRUNCATION << number for number, one in enumerate(TRUNCATIONS)}
_WHOLE_ROWS = sum(
    _TRUNCATION_BITS[one.name] for one in TRUNCATIONS if one.facts["truncates"] == "whole rows"
)
_COLUMNS = {one.name: one.facts["column"] for one in PARAMETERS.values() if one.facts["column"]}
_values = attrgetter(*_COLUMNS)
_ROW = np.dtype(
    [
        ("needs", np.uint16),
        ("seeded", np.bool_),
        ("seed", np.uint64),
        ("num_prompt", np.int64),
        ("logprobs", np.int64),
        *_COLUMNS.items(),
    ]
)


# Bytes for each logit that penalties (with the counts they gather) and logprobs take.
PENALTY_BYTES, LOGPROB_BYTES = 32, 24


class SamplingTable:
    """Sampling parameters and state of the running requests, one row per slot. In its methods,
    `slots` are those of the rows of a batch: [rows]."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        draw_bytes: int = DRAW_BYTES,
        grammars: Grammars | None = None,
    ) -> None:
        """
        Args:
            draw_bytes: bytes that `Ops.draw` takes for each logit if no row needs a truncation
                that sorts whole rows.
            grammars: of requests whose text is structured; None: there are none.
        """
        self._vocab_size = vocab_size
        self._draw_bytes = draw_bytes
        self._device = device
        self._rows = np.zeros(max_num_seqs, _ROW)
        self._needs, self._seeded = self._rows["needs"], self._rows["seeded"]  # views
        self._token_rules: dict[int, list[Rule]] = {}  # by slot
        self._grammars = grammars
        self._matchers: dict[int, TextMatcher] = {}  # by slot
        self._seen: SeenTokens | None = None  # large, so made for the first request with penalties

    def set(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        stop_ids: frozenset[int],
    ) -> None:
        """Assign a slot to a request.

        Args:
            output_token_ids: tokens that it generated before a preemption.
            stop_ids: tokens that cannot be sampled before `params.min_tokens` output tokens.

        Raises:
            ValueError: there is no grammar of its text.
        """
        self.clear(slot)
        needs = _needs(params, self._vocab_size)
        if needs & _Need.PENALTIES:
            if self._seen is None:
                self._seen = SeenTokens(len(self._rows), self._vocab_size, self._device)
            self._seen.set(slot, prompt_token_ids, output_token_ids)
        if needs & _Need.TOKEN_RULES:
            self._token_rules[slot] = [
                rule(params, prompt_token_ids, output_token_ids, stop_ids)
                for rule in RULES
                if rule.needed(params)
            ]
        if params.structured is not None:
            if self._grammars is None:
                raise ValueError("this engine has no grammars")
            self._matchers[slot] = self._grammars.matcher(
                params.structured, sorted(stop_ids), output_token_ids
            )
        self._rows[slot] = (
            needs,
            params.seed is not None,
            seed % 2**64,
            len(prompt_token_ids),
            -1 if params.logprobs is None else params.logprobs,
            *_values(params),
        )
        if not needs & _TRUNCATION_BITS["top_k"]:
            self._rows[slot]["top_k"] = self._vocab_size  # means all tokens to the kernels

    def clear(self, slot: int) -> None:
        self._token_rules.pop(slot, None)
        self._matchers.pop(slot, None)
        self._needs[slot] = 0

    def append(
        self, slots: NDArray[np.integer], tokens: NDArray[np.integer]
    ) -> dict[int, Exception]:
        """Append the newest output tokens of some slots: `append_to_counts` and `append_to_rules`.

        Args:
            slots, tokens: [n]; the tokens of a slot are in order.

        Returns:
            Errors in the rules of single requests, by index.
        """
        if self._seen is not None:
            self.append_to_counts(slots, self._ids(tokens))
        return self.append_to_rules(slots, tokens)

    def append_to_counts(self, slots: NDArray[np.integer], tokens: Tensor) -> None:
        """Append sampled tokens to the counts of penalties, on the device.

        Args:
            slots: [n]. tokens: [n] int64.
        """
        if self._seen is None:
            return
        counted = (self._needs[slots] & _Need.PENALTIES).nonzero()[0]
        if len(counted):
            mine = tokens.index_select(0, self._ids(counted))
            self._seen.append(self._ids(slots[counted]), mine)

    def append_to_rules(
        self, slots: NDArray[np.integer], tokens: NDArray[np.integer]
    ) -> dict[int, Exception]:
        """Append tokens to the rules on the host. Arguments and result as in `append`."""
        failed: dict[int, Exception] = {}
        if self._token_rules or self._matchers:
            for i, (slot, token) in enumerate(zip(slots.tolist(), tokens.tolist(), strict=True)):
                try:
                    for rule in self._token_rules.get(slot, ()):
                        rule.append(token)
                    if slot in self._matchers:
                        self._matchers[slot].append(token)
                except Exception as error:
                    failed[i] = error
        return failed

    def structured(self, slots: NDArray[np.integer]) -> dict[int, TextMatcher]:
        """Return the matchers of the structured texts of some requests, by row."""
        if not self._matchers:
            return {}
        pairs = ((row, self._matchers.get(slot)) for row, slot in enumerate(slots.tolist()))
        return {row: matcher for row, matcher in pairs if matcher is not None}

    def ended(self, slots: NDArray[np.integer]) -> dict[int, int]:
        """Return the structured texts that are complete: row -> how many tokens were appended after
        the end."""
        matchers = self.structured(slots)
        return {row: matcher.num_surplus for row, matcher in matchers.items() if matcher.ended}

    def waits(self, slots: NDArray[np.integer]) -> bool:
        """Return whether the rules of any of these requests need its newest token before the
        next one is sampled."""
        if self._needs_of(slots) & _Need.GRAMMAR:
            return True
        rules = self._token_rules
        return bool(rules) and any(
            rule.reads_output for slot in slots.tolist() for rule in rules.get(slot, ())
        )

    def must_match(self, slots: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return which of these requests must give the same tokens with and without drafts: greedy
        requests, and those with a seed of their own. They must not get sampled drafts."""
        greedy = self._needs[slots] & _Need.RANDOM == 0
        matching: NDArray[np.bool_] = self._seeded[slots] | greedy
        return matching

    def _needs_of(self, slots: NDArray[np.integer]) -> int:
        """Return the OR of the needs of these requests."""
        needs = self._needs[slots]
        return int(np.bitwise_or.reduce(needs)) if np.count_nonzero(needs) else 0

    def plain(self, slots: NDArray[np.integer]) -> bool:
        """Return whether these requests only need their most likely tokens."""
        return not self._needs_of(slots)

    def reads_output(self, slots: NDArray[np.integer]) -> bool:
        """Return whether rules of any of these requests depend on its output."""
        return self._needs_of(slots) & (_Need.PENALTIES | _Need.TOKEN_RULES | _Need.GRAMMAR) != 0

    def rows_at_once(
        self, slots: NDArray[np.integer], max_bytes: int, *, shares: bool = False
    ) -> int:
        """Return how many of these rows can be sampled together with at most `max_bytes` in
        addition to their logits; at least one.

        Args:
            shares: the probabilities of all tokens are needed, not only a drawn token.
        """
        needs = self._needs_of(slots)
        if not needs:
            return max(1, len(slots))
        step = 0
        if needs & _Need.RANDOM:
            whole_rows = shares or needs & _WHOLE_ROWS
            step = DRAW_BYTES if whole_rows else self._draw_bytes
        if needs & _Need.PENALTIES:
            step = max(step, PENALTY_BYTES)
        if needs & _Need.LOGPROBS:
            step = max(step, LOGPROB_BYTES)
        return max(1, max_bytes // (self._vocab_size * (RULES_BYTES + step)))

    def batch(
        self,
        slots: NDArray[np.integer],
        positions: NDArray[np.integer],
        supposed: Supposed = NOTHING,
        judged: Guesses | Offers | None = None,
        stream: int | NDArray[np.int64] = SAMPLE,
    ) -> SamplingBatch:
        """Plan the sampling of one token for each row. A slot has several rows when drafts are
        checked: each row then assumes that the drafts before it are accepted.

        Args:
            positions: [rows], index in its sequence of the token to be sampled.
            supposed: the drafts that each row follows.
            judged: sampled drafts, for rows that check them instead of drawing; or drafts that rows
                may accept although they were not sampled.
            stream: what the drawn tokens are for (see `uniform`); one for all rows, or [rows].
        """
        needs = self._needs_of(slots)
        if not needs:
            return SamplingBatch()
        rows = self._rows[slots]
        logprobs = {}
        if needs & _Need.LOGPROBS:
            num_top = rows["logprobs"].tolist()
            logprobs = {
                int(row): num_top[row] for row in np.flatnonzero(rows["needs"] & _Need.LOGPROBS)
            }
        random = guessed = typical = None
        if needs & _Need.RANDOM:
            draws = rows["needs"] & _Need.RANDOM != 0
            if isinstance(judged, Guesses):
                draws[judged.rows] = False
                guessed = self._guessed(judged, rows, positions, needs)
            elif judged is not None:
                typical = self._typical(judged, rows, positions, needs)
            if draws.any():
                chosen = np.flatnonzero(draws)
                some = None if len(chosen) == len(rows) else self._ids(chosen)
                stream = stream if isinstance(stream, int) else stream[chosen]
                drawn = self._draws(rows[chosen], positions[chosen], needs, stream)
                random = RandomRows(some, drawn)
        beams = np.flatnonzero(rows["needs"] & _Need.BEAM) if needs & _Need.BEAM else None
        seen = self._seen
        return SamplingBatch(
            edits=self._edits(rows, slots, positions, supposed, needs),
            penalties=None if seen is None else self._penalties(seen, rows, slots, supposed),
            masks=self._masks(slots, supposed) if needs & _Need.GRAMMAR else None,
            random=random,
            guessed=guessed,
            typical=typical,
            logprobs=logprobs,
            beams=None if beams is None else self._ids(beams),
        )

    def _edits(
        self,
        rows: NDArray[np.void],
        slots: NDArray[np.integer],
        positions: NDArray[np.integer],
        supposed: Supposed,
        needs: int,
    ) -> Edits | None:
        if not needs & _Need.TOKEN_RULES:
            return None
        generated = (positions - rows["num_prompt"]).tolist()
        rules = [
            (row, self._token_rules[slot], generated[row])
            for row, slot in enumerate(slots.tolist())
            if slot in self._token_rules
        ]
        return gather_edits(rules, self._device, supposed.by_row())

    def uniforms(
        self,
        slots: NDArray[np.integer],
        positions: NDArray[np.integer],
        stream: int | NDArray[np.int64],
    ) -> Tensor:
        """Return the random numbers with which `batch` draws these tokens.

        Args:
            slots: [rows]. positions: [tokens, rows]. stream: one for all rows, or [rows].

        Returns:
            [tokens, rows] float64.
        """
        seeds = self._rows["seed"][slots]
        return self._tensor(uniform(seeds, positions.astype(np.int64), stream))

    def _penalties(
        self,
        seen: SeenTokens,
        rows: NDArray[np.void],
        slots: NDArray[np.integer],
        supposed: Supposed,
    ) -> Penalties | None:
        counted = rows["needs"] & _Need.PENALTIES != 0
        chosen = np.flatnonzero(counted)
        if not len(chosen):
            return None
        where = self._ids(slots[chosen])
        in_prompt, counts = seen.in_prompt, seen.counts
        if len(supposed.rows):
            in_prompt, counts = in_prompt[where], counts[where]  # copies
            where = self._ids(np.arange(len(chosen)))
            mine = counted[supposed.rows]
            places = np.searchsorted(chosen, supposed.rows[mine])
            add_counts(counts, self._ids(places), self._ids(supposed.tokens[mine]))
        return Penalties(
            rows=self._ids(chosen),
            seen=where,
            repetition=self._tensor(rows["repetition_penalty"][chosen]),
            frequency=self._tensor(rows["frequency_penalty"][chosen]),
            presence=self._tensor(rows["presence_penalty"][chosen]),
            in_prompt=in_prompt,
            counts=counts,
        )

    def _masks(self, slots: NDArray[np.integer], supposed: Supposed) -> Masks:
        matchers = self.structured(slots)
        words = np.empty((len(matchers), self._vocab_size // 32 + 1), np.int32)
        drafts = supposed.by_row()
        for i, (row, matcher) in enumerate(matchers.items()):
            words[i] = matcher.mask(drafts.get(row, ()))
        rows = np.array(list(matchers), np.int64)
        return Masks(rows=self._tensor(rows), words=upload(words, self._device))

    def _guessed(
        self, guesses: Guesses, rows: NDArray[np.void], positions: NDArray[np.integer], needs: int
    ) -> GuessedRows:
        rows, positions = rows[guesses.rows], positions[guesses.rows]
        accept = uniform(rows["seed"], positions.astype(np.int64), ACCEPT)
        return GuessedRows(
            rows=self._ids(guesses.rows),
            token_ids=self._ids(guesses.token_ids),
            probs=guesses.probs,
            accept=self._tensor(accept),
            draws=self._draws(rows, positions, needs, SAMPLE),
        )

    def _typical(
        self, offers: Offers, rows: NDArray[np.void], positions: NDArray[np.integer], needs: int
    ) -> TypicalRows | None:
        free = rows["needs"][offers.rows] & _Need.RANDOM != 0
        free &= ~rows["seeded"][offers.rows]
        chosen, owners = np.unique(offers.rows[free], return_inverse=True)
        if not len(chosen):
            return None
        return TypicalRows(
            rows=self._ids(chosen),
            owners=self._ids(owners),
            token_ids=self._ids(offers.token_ids[free]),
            draws=self._draws(rows[chosen], positions[chosen], needs, SAMPLE),
            rule=offers.rule,
        )

    def _draws(
        self,
        rows: NDArray[np.void],
        positions: NDArray[np.integer],
        needs: int,
        stream: int | NDArray[np.int64],
    ) -> Draws:
        truncation = Truncation(
            **{
                name: self._tensor(rows[name])
                for name, bit in _TRUNCATION_BITS.items()
                if needs & bit
            }
        )
        return Draws(
            temperature=self._tensor(rows["temperature"]),
            uniforms=self._tensor(uniform(rows["seed"], positions.astype(np.int64), stream)),
            truncation=truncation,
        )

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return upload(array.copy(), self._device)

    def _ids(self, array: NDArray[np.integer]) -> Tensor:
        return self._tensor(array.astype(np.int64))


def _needs(params: SamplingParams, vocab_size: int) -> int:
    needs = 0
    if not params.greedy:
        needs |= _Need.RANDOM
        for truncation in TRUNCATIONS:
            if getattr(params, truncation.name) != truncation.default:
                needs |= _TRUNCATION_BITS[truncation.name]
        if not 0 < params.top_k < vocab_size:
            needs &= ~_TRUNCATION_BITS["top_k"]
    if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty:
        needs |= _Need.PENALTIES
    if any(rule.needed(params) for rule in RULES):
        needs |= _Need.TOKEN_RULES
    if params.structured is not None:
        needs |= _Need.GRAMMAR
    if params.logprobs is not None:
        needs |= _Need.LOGPROBS
    if params.num_beams > 1:
        needs |= _Need.BEAM
    return needs
