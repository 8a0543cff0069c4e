"""Where the arrays of a step's inputs go: to new tensors, or to the same memory every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvik.kernels.upload import upload


class StepInputs(Protocol):
    """Attributes:
    fixed: an array lies where the last one of its name and shape lay, so tensors that were put
        before show what is put later.
    """

    fixed: bool

    def put(self, name: str, array: np.ndarray) -> Tensor:
        """The array as a tensor on the device, valid until the next step.

        Args:
            name: a field of `InputBatch` or `StepLayout`; the latter's are followed by the number
                of the KV group where groups differ.
        """
        ...

    def send(self) -> None:
        """All that was put is on its way: kernels that begin now find it."""
        ...


class FreshInputs:
    """A new tensor each time."""

    fixed = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._here = device.type == "cpu"

    def put(self, name: str, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array) if self._here else upload(array, self.device)

    def send(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The largest step. The three differ, so that a size says what it counts."""

    tokens: int
    seqs: int
    samples: int  # rows of logits: one for each row that samples, and one for each draft

    @staticmethod
    def of(max_num_batched_tokens: int, max_num_seqs: int, max_draft_rows: int = 0) -> StepSizes:
        tokens, seqs = max_num_batched_tokens, max_num_seqs
        seqs += seqs == tokens
        rows = max_num_seqs + max_draft_rows
        samples = next(n for n in range(rows, rows + 3) if n not in (tokens, seqs))
        return StepSizes(tokens, seqs, samples)


PARTS = 64  # of an input that are remembered


class FixedInputs:
    """Host memory that recorded kernels read; each step overwrites the first part of it."""

    fixed = True

    def __init__(
        self, sizes: StepSizes, num_groups: int, max_blocks: int, *, trees: bool = False
    ) -> None:
        """
        Args:
            trees: whether a step may hold trees of drafts.
        """
        self.sizes = sizes
        self.trees = trees
        self._arrays: dict[str, np.ndarray] = {
            "input_ids": np.zeros(sizes.tokens, np.int64),
            "positions": np.zeros(sizes.tokens, np.int64),
            "query_start_loc": np.zeros(sizes.seqs + 1, np.int32),
            "seq_lens": np.zeros(sizes.seqs, np.int32),
            "logits_indices": np.zeros(sizes.samples, np.int64),
        }
        if trees:
            self._arrays["tree"] = np.zeros(sizes.tokens, np.int64)
        for group in range(num_groups):
            self._arrays[f"slot_mapping {group}"] = np.zeros(sizes.tokens, np.int64)
            self._arrays[f"block_table {group}"] = np.zeros((sizes.seqs, max_blocks), np.int32)
        self._tensors = {name: torch.from_numpy(array) for name, array in self._arrays.items()}
        # Parts of them by their shape: most steps are as large as one that was not long ago.
        self._parts: dict[str, dict[tuple[int, ...], tuple[np.ndarray, Tensor]]] = {
            name: {} for name in self._arrays
        }

    def put(self, name: str, array: np.ndarray) -> Tensor:
        part = self._parts[name].get(array.shape)
        if part is None:
            part = self._part(name, array.shape)
        part[0][...] = array
        return part[1]

    def _part(self, name: str, shape: tuple[int, ...]) -> tuple[np.ndarray, Tensor]:
        parts, where = self._parts[name], tuple(map(slice, shape))
        if len(parts) == PARTS:
            parts.clear()
        parts[shape] = self._arrays[name][where], self._tensors[name][where]
        return parts[shape]

    def send(self) -> None:
        pass

    def whole(self, name: str) -> Tensor:
        """As large as the largest step's."""
        return self._tensors[name]
