"""Training data of heads: the tokens of a text, and the model's last hidden state at each of them.

The engine's own kernels compute the hidden states from the weights as they are served, so that
heads train on what they will read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvik.errors import ConfigError
from kvik.evaluate.windows import Reader, ScoredWindow

Progress = Callable[[str, float], None]  # progress(what is being done, share done)
HELD_OUT = 16  # one window of this many is held out of training


@dataclass(frozen=True, slots=True)
class Batch:
    """Some tokens of the text, and the tokens after them.

    Attributes:
        hidden: [rows, 1 + depth, hidden] fp32, at each token and at those after it.
        ids: [rows, 1 + depth] int64, the tokens after it: ids[:, 0] follows hidden[:, 0].
        positions: [rows] int64, of the tokens themselves.
    """

    hidden: Tensor
    ids: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class WindowStates:
    """The hidden states of windows of text, one after another.

    Attributes:
        ids: [tokens] int64. hidden: [tokens, hidden], of the model's dtype.
        starts: [windows + 1], first token of each.
    """

    ids: Tensor
    hidden: Tensor
    starts: Tensor

    def usable(self, depth: int, *, held_out: bool) -> Tensor:
        """Return the tokens with 1 + depth others after them in their window, [n] int64."""
        lengths = self.starts.diff()
        ends = torch.repeat_interleave(self.starts[1:], lengths)
        window = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        kept_out = window % HELD_OUT == HELD_OUT - 1
        at = torch.arange(len(self.ids))
        return at[(at + 1 + depth < ends) & (kept_out == held_out)]

    def batch(self, at: Tensor, depth: int) -> Batch:
        """Return the batch of some tokens.

        Args:
            at: [rows] int64, among `usable`.
        """
        behind = at[:, None] + torch.arange(1 + depth)
        window = torch.searchsorted(self.starts, at, right=True) - 1
        return Batch(self.hidden[behind].float(), self.ids[behind + 1], at - self.starts[window])


def check_windows(windows: Sequence[ScoredWindow], depth: int) -> None:
    """Check that windows are enough for training and for measuring.

    Raises:
        ConfigError: they are not.
    """
    if len(windows) < HELD_OUT:
        raise ConfigError(
            "data",
            f"must fill {HELD_OUT} windows or more, not {len(windows)}: more text is needed, or a "
            "smaller window",
        )
    longest = [0, 0]  # of the windows for training, and of those held out
    for i, window in enumerate(windows):
        kept_out = i % HELD_OUT == HELD_OUT - 1
        longest[kept_out] = max(longest[kept_out], len(window.token_ids))
    if min(longest) < 2 + depth:
        raise ConfigError("data", f"must have windows of more than {1 + depth} tokens")


def read_states(
    reader: Reader, windows: Sequence[ScoredWindow], file: Path, progress: Progress
) -> WindowStates:
    """Let the model read windows, and return the hidden states.

    Args:
        file: holds the hidden states, which may be larger than memory.
    """
    total = sum(len(window.token_ids) for window in windows)
    spec = reader.resolved.model
    dtype = getattr(torch, reader.resolved.runner.dtype)
    size = total * spec.hidden_size
    flat = torch.from_file(str(file), shared=True, size=size, dtype=dtype)
    hidden = flat.view(total, spec.hidden_size)
    ids = torch.tensor([token for window in windows for token in window.token_ids])
    lengths = torch.tensor([0, *(len(window.token_ids) for window in windows)])
    done = 0
    for window in windows:
        for start in range(0, len(window.token_ids), reader.tokens_at_once):
            end = min(start + reader.tokens_at_once, len(window.token_ids))
            found = reader.read(window.token_ids, start, end)
            hidden[done : done + end - start] = found.cpu()
            done += end - start
        progress("reading", done / total)
    return WindowStates(ids, hidden, lengths.cumsum(0))
