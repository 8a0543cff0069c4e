"""What next-token distributions say: of the token that came, and beside another model's.

In fp64: the divergence of a good quantisation is a difference of nearly equal numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

COPIED_ROWS = 8  # rows of logits that are widened at a time


@dataclass(frozen=True, slots=True)
class Compared:
    """Attributes:
    divergence: [rows] fp64, KL(reference || model) in nats.
    agrees: [rows] bool, both have the same largest logit; of equals the first counts.
    """

    divergence: Tensor
    agrees: Tensor


def losses(logits: Tensor, ids: Tensor) -> Tensor:
    """-log softmax(logits)[id] of each row, in nats: [rows] fp64.

    Args:
        logits: [rows, vocab], any float dtype; -inf marks an impossible token. ids: [rows] int64.
    """
    parts = zip(torch.split(logits, COPIED_ROWS), torch.split(ids, COPIED_ROWS), strict=True)
    return torch.cat(
        [-part.double().log_softmax(-1).gather(1, some[:, None])[:, 0] for part, some in parts]
    )


def compared(logits: Tensor, reference: Tensor) -> Compared:
    """Return a model's distributions beside a reference's, row by row.

    Args:
        logits, reference: [rows, vocab], any float dtype.
    """
    divergence = []
    for mine, other in zip(
        *(torch.split(x, COPIED_ROWS) for x in (logits, reference)), strict=True
    ):
        log_q, log_p = mine.double().log_softmax(-1), other.double().log_softmax(-1)
        p = log_p.exp()
        terms = torch.where(p > 0, p * (log_p - log_q), 0.0)  # 0 log 0 is 0
        divergence.append(terms.sum(-1))
    return Compared(torch.cat(divergence), logits.argmax(-1) == reference.argmax(-1))
