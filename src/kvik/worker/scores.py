"""Log probabilities of tokens, and of the most likely ones beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvik.core.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Scores:
    """Of one token in each of some rows.

    Attributes:
        token_ids: [rows] int64.
        own: [rows] float32, log probability of the token.
        ranks: [rows] int64, 1 is the most likely token.
        top_ids, top: [rows, n] int64 and float32, the most likely tokens; of equals the lower ids
            first.
    """

    token_ids: Tensor
    own: Tensor
    ranks: Tensor
    top_ids: Tensor
    top: Tensor

    @staticmethod
    def room(rows: int, top: int, device: torch.device) -> Scores:
        """For some that come in pieces: what is made between large tensors and kept would leave
        holes where they were, too small for the next ones."""
        number, words = torch.float32, torch.int64
        return Scores(
            torch.empty(rows, dtype=words, device=device),
            torch.empty(rows, dtype=number, device=device),
            torch.empty(rows, dtype=words, device=device),
            torch.empty(rows, top, dtype=words, device=device),
            torch.empty(rows, top, dtype=number, device=device),
        )

    def put(self, first: int, piece: Scores) -> None:
        """A piece, from this row on."""
        for whole, part in zip(self.tensors, piece.tensors, strict=True):
            whole[first : first + len(part)] = part

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.token_ids, self.own, self.ranks, self.top_ids, self.top)


def score(logits: Tensor, token_ids: Tensor, top: int) -> Scores:
    """Nothing here looks at a value, so a device need not be waited for.

    Args:
        logits: [rows, vocab]. token_ids: [rows] int64.
        top: how many of the most likely tokens.
    """
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, token_ids[:, None])  # [rows, 1]
    ranks = (logprobs > own).sum(-1) + 1
    top_ids = _most_likely(logprobs, min(top, logprobs.shape[-1]))
    return Scores(token_ids, own[:, 0], ranks, top_ids, logprobs.gather(1, top_ids))


def told(arrays: Sequence[NDArray[np.generic]]) -> list[TokenLogprobs]:
    """What `Scores.tensors` hold, on the host."""
    token_ids, own, ranks, top_ids, top = (array.tolist() for array in arrays)
    return [
        TokenLogprobs(token, logprob, rank, tuple(zip(ids, values, strict=True)))
        for token, logprob, rank, ids, values in zip(
            token_ids, own, ranks, top_ids, top, strict=True
        )
    ]


def _most_likely(logprobs: Tensor, top: int) -> Tensor:
    """[rows, top] int64. topk may take any of equal values, so they are made to differ."""
    vocab = logprobs.shape[-1]
    if top == 0:
        return torch.empty(len(logprobs), 0, dtype=torch.int64, device=logprobs.device)
    bits = (logprobs + 0.0).view(torch.int32)  # -0.0 is 0.0
    bits ^= (bits >> 31) & 0x7FFFFFFF  # as integers they are ordered as the numbers are
    keys = bits.to(torch.int64)
    keys <<= 32
    keys += torch.arange(vocab - 1, -1, -1, device=logprobs.device)
    return keys.topk(top, dim=-1).indices
