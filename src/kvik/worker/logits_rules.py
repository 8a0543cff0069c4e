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


class TokenRules:
    """logit_bias, allowed_token_ids, bad_words and min_tokens of one request."""

    def __init__(
        self, params: SamplingParams, output_token_ids: Sequence[int], stop_ids: frozenset[int]
    ) -> None:
        bias = params.logit_bias or {}
        self.bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias_values = np.fromiter(bias.values(), np.float32, len(bias))
        allowed = params.allowed_token_ids
        self.allowed = None if allowed is None else np.array(allowed, np.int64)
        self._min_tokens = params.min_tokens
        self._stop_ids = sorted(stop_ids)
        self._bad_tokens = sorted({word[0] for word in params.bad_word_ids if len(word) == 1})
        # Longer words by the token before the last, the only one that must be compared each step.
        self._bad_words: dict[int, list[tuple[int, ...]]] = {}
        for word in params.bad_word_ids:
            if len(word) > 1:
                self._bad_words.setdefault(word[-2], []).append(word)
        self._output = list(output_token_ids) if self._bad_words else []

    @staticmethod
    def needed(params: SamplingParams) -> bool:
        return bool(
            params.logit_bias
            or params.allowed_token_ids is not None
            or params.bad_words
            or params.min_tokens
        )

    @property
    def reads_output(self) -> bool:
        """Words of several tokens are banned by those that came before."""
        return bool(self._bad_words)

    def append(self, token: int) -> None:
        if self._bad_words:
            self._output.append(token)

    def banned(self, num_output_tokens: int, supposed: Sequence[int] = ()) -> list[int]:
        """Tokens that must not come next, after so many output tokens, of which the last are
        `supposed`: nobody appended them."""
        banned = list(self._bad_tokens)
        if num_output_tokens < self._min_tokens:
            banned += self._stop_ids
        if self._bad_words and (supposed or self._output):
            last = supposed[-1] if supposed else self._output[-1]
            for word in self._bad_words.get(last, ()):
                missing = len(word) - 1 - len(supposed)
                begun = self._output[-missing:] if missing > 0 else []
                if (*begun, *supposed[-len(word) + 1 :]) == word[:-1]:
                    banned.append(word[-1])
        return banned


@dataclass(frozen=True, slots=True)
class Edits:
    """The token rules of a batch, flattened: entry i concerns logit [rows[i], ids[i]].

    Attributes:
        bias: rows, ids, values to add.
        allowed: rows, ids that stay possible in the rows that occur.
        restricted: [n] the rows that occur in `allowed`.
        banned: rows, ids that become impossible.
    """

    bias: tuple[Tensor, Tensor, Tensor]
    allowed: tuple[Tensor, Tensor]
    restricted: Tensor
    banned: tuple[Tensor, Tensor]

    def apply(self, logits: Tensor) -> None:
        """logits: [rows, vocab] float32, changed in place."""
        rows, ids, values = self.bias
        logits.index_put_((rows, ids), values, accumulate=True)
        if len(self.restricted):
            kept = logits[self.allowed]
            logits.index_fill_(0, self.restricted, -torch.inf)
            logits[self.allowed] = kept
        # A plain number would be copied to the device, which waits for it.
        logits.index_put_(self.banned, logits.new_full((), -torch.inf))


def gather_edits(
    rules: Sequence[tuple[int, TokenRules, int]],
    device: torch.device,
    supposed: Mapping[int, Sequence[int]],
) -> Edits:
    """Args:
    rules: row, its rules, its number of output tokens.
    supposed: by row, the last of them, if the rules have not heard of them.
    """
    bias = [(row, r.bias_ids) for row, r, _ in rules]
    allowed = [(row, r.allowed) for row, r, _ in rules if r.allowed is not None]
    banned = [
        (row, np.array(r.banned(count, supposed.get(row, ())), np.int64)) for row, r, count in rules
    ]
    values = np.concatenate([r.bias_values for _, r, _ in rules])
    return Edits(
        bias=(*_flatten(bias, device), upload(values, device)),
        allowed=_flatten(allowed, device),
        restricted=upload(np.array([row for row, _ in allowed], np.int64), device),
        banned=_flatten(banned, device),
    )


def _flatten(entries: list[tuple[int, _Ids]], device: torch.device) -> tuple[Tensor, Tensor]:
    rows = np.repeat([row for row, _ in entries], [len(ids) for _, ids in entries])
    ids = np.concatenate([ids for _, ids in entries]) if entries else np.empty(0)
    put = (upload(a.astype(np.int64), device) for a in (rows, ids))
    return next(put), next(put)
