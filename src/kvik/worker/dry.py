"""DRY ("don't repeat yourself"): tokens that would continue a repetition become less likely.

If the last L >= allowed_length tokens occurred before, multiplier * base^(L - allowed_length) is
subtracted from the logit of the token that followed; of several occurrences the longest counts.
Matches do not cross a sequence breaker, and breakers are not penalised. Defined as in llama.cpp and
text-generation-webui (p-e-w 2024, oobabooga/text-generation-webui#5677).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from kvik.core.sampling_params import SamplingParams
from kvik.worker.logits_rules import NO_BIAS, Bias, Rule

LARGEST = 1e30  # largest penalty: the power soon exceeds the range of a float


class Dry(Rule):
    """The rule of one request."""

    reads_output = True

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        stop_ids: frozenset[int],
    ) -> None:
        self._multiplier, self._base = params.dry_multiplier, params.dry_base
        self._allowed_length = params.dry_allowed_length
        self._last_n = params.dry_penalty_last_n
        self._breakers = {ids[-1] for ids in params.word_ids("dry_sequence_breakers")}
        text = [*prompt_token_ids, *output_token_ids]
        if self._last_n > 0:
            text = text[-self._last_n :]
        self._ids = np.array(text, np.int64)
        # [i]: length of the longest match between tokens up to the i-th and the end of the text
        self._lengths = np.minimum(_suffix_matches(text), self._since_breaker(text))

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        return params.dry_multiplier > 0 and params.dry_penalty_last_n != 0

    def append(self, token: int) -> None:
        self._ids, self._lengths = self._after(self._ids, self._lengths, token)

    def bias(self, supposed: Sequence[int]) -> Bias:
        ids, lengths = self._ids, self._lengths
        for token in supposed:
            ids, lengths = self._after(ids, lengths, token)
        first = 0 if self._last_n < 0 else max(0, len(ids) - self._last_n)
        inside = np.arange(1, len(ids) - first)  # a match may not begin before the window
        matched = np.minimum(lengths[first:-1], inside)
        followers = ids[first + 1 :]
        penalised = (matched >= self._allowed_length) & ~np.isin(followers, list(self._breakers))
        if not penalised.any():
            return NO_BIAS
        tokens, places = np.unique(followers[penalised], return_inverse=True)
        longest = np.zeros(len(tokens), np.int64)
        np.maximum.at(longest, places, matched[penalised])
        with np.errstate(over="ignore"):
            power = np.float64(self._base) ** (longest - self._allowed_length)
        penalties = np.minimum(self._multiplier * power, LARGEST)
        return tokens, -penalties.astype(np.float32)

    def _since_breaker(self, text: Sequence[int]) -> int:
        """Return how many tokens follow the last breaker of a text."""
        count = takewhile(lambda token: token not in self._breakers, reversed(text))
        return sum(1 for _ in count)

    def _after(
        self, ids: NDArray[np.int64], lengths: NDArray[np.int64], token: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the text and its matches with one more token."""
        ids = np.append(ids, token)
        if token in self._breakers:
            return ids, np.zeros(len(ids), np.int64)
        longer = np.append(0, lengths) + 1  # continues the match that ended one token earlier
        return ids, np.where(ids == token, longer, 0)


def _suffix_matches(text: Sequence[int]) -> NDArray[np.int64]:
    """Return for each token the length of the longest match between tokens up to it and the end of
    the text.

    The Z function of the reversed text (Gusfield 1997, section 1.3), in linear time.
    """
    back, size = text[::-1], len(text)
    lengths = [size] * min(size, 1) + [0] * (size - 1)
    left = right = 0  # of the match that reaches furthest
    for i in range(1, size):
        length = min(right - i, lengths[i - left]) if i < right else 0
        while i + length < size and back[length] == back[i + length]:
            length += 1
        if i + length > right:
            left, right = i, i + length
        lengths[i] = length
    return np.array(lengths[::-1], np.int64)
