"""Rules that change the logits of single tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvik.core.sampling_params import SamplingParams
from kvik.kernels.upload import upload

_Ids = NDArray[np.int64]
Bias = tuple[_Ids, NDArray[np.float32]]  # ids, each once, and what is added to their logits


NO_BIAS: Bias = (np.empty(0, np.int64), np.empty(0, np.float32))


class Rule:
    """A rule of one request that changes logits of single tokens, evaluated on the host.

    Subclasses override what they need; the defaults change nothing. `sampling_table.RULES` lists
    them.
    """

    allowed: _Ids | None = None  # ids of the only possible tokens; None: all are possible
    # The next token's logits depend on the newest tokens, which must be appended before it is
    # sampled.
    reads_output = False

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        stop_ids: frozenset[int],
    ) -> None:
        """
        Args:
            output_token_ids: tokens generated before a preemption.
            stop_ids: must not be sampled before `params.min_tokens` output tokens.
        """

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        """Return whether a request needs this rule."""
        return False

    def append(self, token: int) -> None:
        """Record the newest output token."""

    def bias(self, supposed: Sequence[int]) -> Bias:
        """Return (ids, values to add to their logits).

        Args:
            supposed: the last output tokens, which are drafts and have not been appended.
        """
        return NO_BIAS

    def banned(self, num_output_tokens: int, supposed: Sequence[int]) -> list[int]:
        """Return tokens that must not come next.

        Args:
            num_output_tokens: including `supposed`.
            supposed: see `bias`.
        """
        return []


class TokenRules(Rule):
    """logit_bias, allowed_token_ids, bad_words and min_tokens of one request."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        stop_ids: frozenset[int],
    ) -> None:
        bias = params.logit_bias or {}
        self._bias: Bias = (
            np.fromiter(bias.keys(), np.int64, len(bias)),
            np.fromiter(bias.values(), np.float32, len(bias)),
        )
        allowed = params.allowed_token_ids
        self.allowed = None if allowed is None else np.array(allowed, np.int64)
        self._min_tokens = params.min_tokens
        self._stop_ids = sorted(stop_ids)
        bad_words = params.word_ids("bad_words")
        self._bad_tokens = sorted({word[0] for word in bad_words if len(word) == 1})
        # Longer words by their second to last token, the only one to compare in each step.
        self._bad_words: dict[int, list[tuple[int, ...]]] = {}
        for word in bad_words:
            if len(word) > 1:
                self._bad_words.setdefault(word[-2], []).append(word)
        self._output = list(output_token_ids) if self._bad_words else []
        self.reads_output = bool(self._bad_words)

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        return bool(
            params.logit_bias
            or params.allowed_token_ids is not None
            or params.bad_words
            or params.min_tokens
        )

    def append(self, token: int) -> None:
        if self._bad_words:
            self._output.append(token)

    def bias(self, supposed: Sequence[int]) -> Bias:
        return self._bias

    def banned(self, num_output_tokens: int, supposed: Sequence[int] = ()) -> list[int]:
        banned = list(self._bad_tokens)
        if num_output_tokens < self._min_tokens:
            banned += self._stop_ids
        if self._bad_words and (supposed or self._output):
            last = supposed[-1] if supposed else self._output[-1]
            for word in self._bad_words.get(last, ()):
                missing = len(word) - 1 - len(supposed)
                before = self._output[-missing:] if missing > 0 else []
                if (*before, *supposed[-len(word) + 1 :]) == word[:-1]:
                    banned.append(word[-1])
        return banned


@dataclass(frozen=True, slots=True)
class Edits:
    """The token rules of a batch, flattened: entry i concerns logit [rows[i], ids[i]]."""

    bias: tuple[Tensor, Tensor, Tensor]  # rows, ids, values to add
    allowed: tuple[Tensor, Tensor]  # rows, and the ids that stay possible in these rows
    restricted: Tensor  # [n] the rows that occur in `allowed`
    banned: tuple[Tensor, Tensor]  # rows, ids that become impossible

    def apply(self, logits: Tensor) -> None:
        """Apply the rules to logits, [rows, vocab] float32, in place."""
        rows, ids, values = self.bias
        logits.index_put_((rows, ids), values, accumulate=True)
        if len(self.restricted):
            allowed = logits[self.allowed]
            logits.index_fill_(0, self.restricted, -torch.inf)
            logits[self.allowed] = allowed
        # A Python number would be copied to the device synchronously.
        logits.index_put_(self.banned, logits.new_full((), -torch.inf))


def gather_edits(
    rules: Sequence[tuple[int, Sequence[Rule], int]],
    device: torch.device,
    supposed: Mapping[int, Sequence[int]],
) -> Edits:
    """Evaluate the rules of a batch.

    Args:
        rules: row, its rules, its number of output tokens.
        supposed: row -> its last output tokens, if they have not been appended to the rules.
    """
    biases, allowed, banned = [], [], []
    for row, mine, count in rules:
        drafts = supposed.get(row, ())
        biases.append((row, *_added([rule.bias(drafts) for rule in mine])))
        allowed += [(row, rule.allowed) for rule in mine if rule.allowed is not None]
        ids = [token for rule in mine for token in rule.banned(count, drafts)]
        banned.append((row, np.array(ids, np.int64)))
    values = np.concatenate([values for _, _, values in biases])
    return Edits(
        bias=(*_flatten([(row, ids) for row, ids, _ in biases], device), upload(values, device)),
        allowed=_flatten(allowed, device),
        restricted=upload(np.array([row for row, _ in allowed], np.int64), device),
        banned=_flatten(banned, device),
    )


def _added(biases: Sequence[Bias]) -> Bias:
    """Sum biases per token: on a device the order of two additions to one logit is undefined."""
    some = [bias for bias in biases if len(bias[0])]
    if len(some) < 2:
        return some[0] if some else NO_BIAS
    ids, places = np.unique(np.concatenate([ids for ids, _ in some]), return_inverse=True)
    values = np.zeros(len(ids), np.float32)
    np.add.at(values, places, np.concatenate([values for _, values in some]))
    return ids, values


def _flatten(entries: list[tuple[int, _Ids]], device: torch.device) -> tuple[Tensor, Tensor]:
    rows = np.repeat([row for row, _ in entries], [len(ids) for _, ids in entries])
    ids = np.concatenate([ids for _, ids in entries]) if entries else np.empty(0)
    put = (upload(a.astype(np.int64), device) for a in (rows, ids))
    return next(put), next(put)
