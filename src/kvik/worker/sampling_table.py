"""Sampling parameters and state of the running requests, one row per slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvik.config.memory import DRAW_BYTES, RULES_BYTES
from kvik.core.sampling_params import SamplingParams
from kvik.kernels.draws import Draws, Truncation
from kvik.worker.logits_rules import Penalties, TokenRules, gather_edits
from kvik.worker.noise import uniform
from kvik.worker.sampling_batch import RandomRows, SamplingBatch
from kvik.worker.seen_tokens import SeenTokens


class _Need:
    """What a request asks beyond its most likely token, as bits: one OR over a batch plans its
    step. Plain integers, because enum flags cost microseconds per operation."""

    RANDOM = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    TYPICAL_P = 16
    PENALTIES = 32
    TOKEN_RULES = 64
    LOGPROBS = 128


_ROW = np.dtype(
    [
        ("needs", np.uint8),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float32),
        ("typical_p", np.float64),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("seed", np.uint64),
        ("num_prompt", np.int64),
        ("logprobs", np.int64),
    ]
)


# Bytes for each logit that penalties, with what they gather, and logprobs take.
PENALTY_BYTES, LOGPROB_BYTES = 32, 24


class SamplingTable:
    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        draw_bytes: int = DRAW_BYTES,
    ) -> None:
        """
        Args:
            draw_bytes: what `Ops.draw` takes for each logit where no row asks for typical_p.
        """
        self._vocab_size = vocab_size
        self._draw_bytes = draw_bytes
        self._device = device
        self._rows = np.zeros(max_num_seqs, _ROW)
        self._token_rules: dict[int, TokenRules] = {}  # by slot
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
        """A request enters a slot.

        Args:
            output_token_ids: what it had generated before a preemption.
            stop_ids: cannot be sampled before `params.min_tokens` output tokens.
        """
        self.clear(slot)
        top_k = params.top_k if params.top_k > 0 else self._vocab_size
        needs = _needs(params, self._vocab_size)
        if needs & _Need.PENALTIES:
            if self._seen is None:
                self._seen = SeenTokens(len(self._rows), self._vocab_size, self._device)
            self._seen.set(slot, prompt_token_ids, output_token_ids)
        if needs & _Need.TOKEN_RULES:
            self._token_rules[slot] = TokenRules(params, output_token_ids, stop_ids)
        self._rows[slot] = (
            needs,
            params.temperature,
            min(top_k, self._vocab_size),
            params.top_p,
            params.min_p,
            params.typical_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            seed % 2**64,
            len(prompt_token_ids),
            -1 if params.logprobs is None else params.logprobs,
        )

    def clear(self, slot: int) -> None:
        self._token_rules.pop(slot, None)
        self._rows["needs"][slot] = 0

    def append(
        self, slots: NDArray[np.integer], tokens: NDArray[np.integer]
    ) -> dict[int, Exception]:
        """Each slot's newest output token; a slot occurs once.

        Args:
            slots, tokens: [n].

        Returns:
            By index, what went wrong in the rules of one request alone.
        """
        failed: dict[int, Exception] = {}
        if self._seen is not None:
            counted = self._rows["needs"][slots] & _Need.PENALTIES != 0
            self._seen.append(self._ids(slots[counted]), self._ids(tokens[counted]))
        if self._token_rules:
            for i, (slot, token) in enumerate(zip(slots.tolist(), tokens.tolist(), strict=True)):
                if slot in self._token_rules:
                    try:
                        self._token_rules[slot].append(token)
                    except Exception as error:
                        failed[i] = error
        return failed

    def rows_at_once(self, slots: NDArray[np.integer], room: int) -> int:
        """How many of these slots are sampled together, so that it takes `room` bytes at most
        beside their logits; at least one.

        Args:
            slots: [rows].
        """
        needs = int(np.bitwise_or.reduce(self._rows["needs"][slots], initial=0))
        if not needs:
            return max(1, len(slots))
        step = 0
        if needs & _Need.RANDOM:
            step = DRAW_BYTES if needs & _Need.TYPICAL_P else self._draw_bytes
        if needs & _Need.PENALTIES:
            step = max(step, PENALTY_BYTES)
        if needs & _Need.LOGPROBS:
            step = max(step, LOGPROB_BYTES)
        return max(1, room // (self._vocab_size * (RULES_BYTES + step)))

    def batch(self, slots: NDArray[np.integer], positions: NDArray[np.integer]) -> SamplingBatch:
        """Plan the sampling of one token for each slot.

        Args:
            slots: [rows].
            positions: [rows], index in its sequence of the token to be sampled.
        """
        needs = int(np.bitwise_or.reduce(self._rows["needs"][slots], initial=0))
        if not needs:
            return SamplingBatch()
        rows = self._rows[slots]
        edits = None
        if needs & _Need.TOKEN_RULES:
            generated = (positions - rows["num_prompt"]).tolist()
            rules = [
                (row, self._token_rules[slot], generated[row])
                for row, slot in enumerate(slots.tolist())
                if slot in self._token_rules
            ]
            edits = gather_edits(rules, self._device)
        logprobs = {}
        if needs & _Need.LOGPROBS:
            wanted = rows["logprobs"].tolist()
            logprobs = {
                int(row): wanted[row] for row in np.flatnonzero(rows["needs"] & _Need.LOGPROBS)
            }
        return SamplingBatch(
            edits=edits,
            penalties=None if self._seen is None else self._penalties(self._seen, rows, slots),
            random=self._random(rows, positions, needs) if needs & _Need.RANDOM else None,
            logprobs=logprobs,
        )

    def _penalties(
        self, seen: SeenTokens, rows: NDArray[np.void], slots: NDArray[np.integer]
    ) -> Penalties | None:
        chosen = np.flatnonzero(rows["needs"] & _Need.PENALTIES)
        if not len(chosen):
            return None
        where = self._ids(slots[chosen])
        return Penalties(
            rows=self._ids(chosen),
            repetition=self._tensor(rows["repetition"][chosen])[:, None],
            frequency=self._tensor(rows["frequency"][chosen])[:, None],
            presence=self._tensor(rows["presence"][chosen])[:, None],
            in_prompt=seen.in_prompt[where],
            counts=seen.counts[where],
        )

    def _random(
        self, rows: NDArray[np.void], positions: NDArray[np.integer], needs: int
    ) -> RandomRows:
        chosen = np.flatnonzero(rows["needs"] & _Need.RANDOM)
        everything = len(chosen) == len(rows)
        rows, positions = rows[chosen], positions[chosen]
        truncation = Truncation(
            top_k=self._tensor(rows["top_k"]) if needs & _Need.TOP_K else None,
            top_p=self._tensor(rows["top_p"]) if needs & _Need.TOP_P else None,
            min_p=self._tensor(rows["min_p"]) if needs & _Need.MIN_P else None,
            typical_p=self._tensor(rows["typical_p"]) if needs & _Need.TYPICAL_P else None,
        )
        draws = Draws(
            temperature=self._tensor(rows["temperature"]),
            uniforms=self._tensor(uniform(rows["seed"], positions.astype(np.int64))),
            truncation=truncation,
        )
        return RandomRows(None if everything else self._ids(chosen), draws)

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array.copy()).to(self._device)

    def _ids(self, array: NDArray[np.integer]) -> Tensor:
        return self._tensor(array.astype(np.int64))


def _needs(params: SamplingParams, vocab_size: int) -> int:
    needs = 0
    if not params.greedy:
        needs |= _Need.RANDOM
        if 0 < params.top_k < vocab_size:
            needs |= _Need.TOP_K
        if params.top_p < 1:
            needs |= _Need.TOP_P
        if params.min_p > 0:
            needs |= _Need.MIN_P
        if params.typical_p < 1:
            needs |= _Need.TYPICAL_P
    if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty:
        needs |= _Need.PENALTIES
    if TokenRules.needed(params):
        needs |= _Need.TOKEN_RULES
    if params.logprobs is not None:
        needs |= _Need.LOGPROBS
    return needs
