"""The residual stream of all calibration windows, between two blocks: in a file, not in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvik.config.errors import ModelError
from kvik.config.files import writing_whole

STEP_TOKENS = 4096  # that run through a block together


@dataclass(frozen=True, slots=True)
class HiddenFile:
    """[windows, tokens, hidden] of `dtype`, whole or not there."""

    path: Path
    shape: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def step(self) -> int:
        """Windows that are read together."""
        return max(1, STEP_TOKENS // self.shape[1])

    def check(self) -> None:
        """
        Raises:
            ModelError: the file is not there, or not as it was written.
        """
        count, tokens, hidden = self.shape
        size = count * tokens * hidden * self.dtype.itemsize
        if not self.path.is_file() or self.path.stat().st_size != size:
            raise ModelError(
                "work", f"{str(self.path)!r} is missing or of another pass: begin again"
            )

    def read(self) -> Iterator[Tensor]:
        """[up to `step`, tokens, hidden] at a time.

        Raises:
            ModelError: the file has become shorter.
        """
        windows, tokens, hidden = self.shape
        row = tokens * hidden * self.dtype.itemsize
        with self.path.open("rb") as file:
            for first in range(0, windows, self.step):
                count = min(self.step, windows - first)
                data = bytearray(count * row)
                if file.readinto(data) != len(data):
                    raise ModelError("work", f"{str(self.path)!r} has become shorter")
                flat = torch.frombuffer(data, dtype=self.dtype)
                yield flat.view(count, tokens, hidden)

    def write(self, pieces: Iterable[Tensor]) -> None:
        """Pieces [windows, tokens, hidden] in order."""
        with writing_whole(self.path) as file:
            for piece in pieces:
                flat = piece.to(self.dtype).cpu().contiguous().view(-1)
                file.write(flat.view(torch.uint8).numpy().data)
