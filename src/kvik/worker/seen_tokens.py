"""Which tokens each request has seen: what its penalties count."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvik.kernels.upload import upload


class SeenTokens:
    """Attributes:
    in_prompt: [slots, vocab] bool.
    counts: [slots, vocab] int32, occurrences in the output.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.in_prompt = torch.zeros(max_num_seqs, vocab_size, dtype=torch.bool, device=device)
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
        """slots, tokens: [n] int64."""
        add_counts(self.counts, slots, tokens)


def add_counts(counts: Tensor, rows: Tensor, tokens: Tensor) -> None:
    """One more of each token in its row.

    Args:
        counts: [rows, vocab] int32, changed in place.
        rows, tokens: [n] int64; the same pair may come several times.
    """
    counts.index_put_((rows, tokens), counts.new_ones(()), accumulate=True)
