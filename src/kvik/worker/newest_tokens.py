"""The newest token of each running request, on the device: known there before the host knows it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvik.kernels.upload import upload


class NewestTokens:
    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)  # [slots]

    def note(self, slots: np.ndarray, token_ids: Tensor) -> None:
        """slots: [rows]. token_ids: [rows] int64, what each sampled."""
        self._ids.index_copy_(0, upload(slots, self._ids.device), token_ids)

    def fill(self, input_ids: Tensor, places: np.ndarray, slots: np.ndarray) -> None:
        """Put the newest tokens of some slots where they are computed.

        Args:
            input_ids: [tokens] int64, changed in place. places, slots: [rows].
        """
        device = self._ids.device
        newest = self._ids.index_select(0, upload(slots, device))
        input_ids.index_copy_(0, upload(places, device), newest)
