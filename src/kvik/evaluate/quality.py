"""Perplexity of a model on texts, and its distance from a reference model on the same text."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from torch import Tensor

from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.errors import ConfigError, ModelError
from kvik.evaluate.windows import (
    Reader,
    ScoredWindow,
    check_context,
    choose_window,
    count_scored,
    cut,
    loaded_reader,
    longest_window,
    prompt_prefix,
    read_together,
    resolve_reader,
)
from kvik.model_files import model_files
from kvik.text.tokenizer import Tokenizer

# Losses of next tokens, and the divergence from a reference model.
#
# In fp64, because the divergence of a good quantisation is a difference of nearly equal numbers.

COPIED_ROWS = 8  # rows of logits that are converted to fp64 at a time


def losses(logits: Tensor, ids: Tensor) -> Tensor:
    """Return -log softmax(logits)[id] of each row, in nats: [rows] fp64.

    Args:
        logits: [rows, vocab], any float dtype; -inf marks an impossible token.
        ids: [rows] int64.
    """
    parts = zip(torch.split(logits, COPIED_ROWS), torch.split(ids, COPIED_ROWS), strict=True)
    return torch.cat(
        [-part.double().log_softmax(-1).gather(1, some[:, None])[:, 0] for part, some in parts]
    )


def compared(logits: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Compare a model's distributions with a reference's, row by row.

    Args:
        logits, reference: [rows, vocab], any float dtype.

    Returns:
        KL(reference || model) in nats, [rows] fp64, and whether both have the same largest logit,
        [rows] bool; of ties the first counts.
    """
    divergence = []
    for mine, other in zip(
        *(torch.split(x, COPIED_ROWS) for x in (logits, reference)), strict=True
    ):
        log_q, log_p = mine.double().log_softmax(-1), other.double().log_softmax(-1)
        p = log_p.exp()
        terms = torch.where(p > 0, p * (log_p - log_q), 0.0)  # 0 log 0 is 0
        divergence.append(terms.sum(-1))
    return torch.cat(divergence), logits.argmax(-1) == reference.argmax(-1)


@contextmanager
def reading_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error, if that is a terminal; yields progress(scored, to score)."""
    bar = ProgressBar(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        disable=not sys.stderr.isatty(),
        transient=True,
    )
    with bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


LARGEST_LOSS = math.log(sys.float_info.max)

Progress = Callable[[int, int], None]  # tokens scored, tokens to score


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality of a model on some texts."""

    # window, stride: as in `windows.py`, in tokens.
    window: int
    stride: int
    losses: np.ndarray  # [scored tokens] fp32, each token's -log probability in nats
    # Mean over tokens of KL(reference || model) in nats; None without a reference.
    divergence: float | None = None
    # Share of tokens where both models' likeliest next token is the same.
    agreement: float | None = None

    @property
    def num_scored(self) -> int:
        return len(self.losses)

    @property
    def loss(self) -> float:
        """The mean loss, in nats."""
        return float(self.losses.mean(dtype=np.float64))

    @property
    def perplexity(self) -> float:
        """e to the mean loss; infinite if it exceeds the range of a float."""
        return math.exp(self.loss) if self.loss < LARGEST_LOSS else math.inf


@dataclass(frozen=True, slots=True)
class PerplexityChange:
    """The relative change of perplexity from a reference, and its standard error from the spread of
    the scored tokens' losses."""

    share: float
    error: float

    @staticmethod
    def between(reference: Quality, quality: Quality) -> PerplexityChange:
        """Return the change between two qualities on the same tokens."""
        change = quality.losses.astype(np.float64) - reference.losses
        error = change.std(ddof=1) / len(change) ** 0.5 if len(change) > 1 else 0.0
        return PerplexityChange(float(np.expm1(change.mean())), float(error))


@dataclass(frozen=True, slots=True)
class Reading:
    """The texts to read and their windows, the same for all compared models."""

    window: int
    stride: int
    texts: tuple[np.ndarray, ...]  # token ids of each, [tokens] int32, without the prefix
    prefix: tuple[int, ...]  # first tokens of every window
    vocab_size: int  # of the models that can read it

    @property
    def num_scored(self) -> int:
        return sum(
            count_scored(len(ids), len(self.prefix), self.window, self.stride) for ids in self.texts
        )

    def windows(self) -> Iterator[ScoredWindow]:
        """Yield windows one at a time: overlapping windows together are many times the texts."""
        for ids in self.texts:
            yield from cut(ids.tolist(), self.prefix, self.window, self.stride)


def measure_quality(
    config: EngineConfig,
    texts: Sequence[str],
    *,
    window: int | None = None,
    stride: int | None = None,
    reference: EngineConfig | None = None,
    progress: Progress | None = None,
) -> Quality:
    """Load a model, read the texts with it, and free it.

    Args:
        texts: read separately; no window spans two.
        window: tokens at once; None: the context, at most 2048.
        stride: tokens between windows; None: the window.
        reference: reads the same windows, for `divergence` and `agreement`; both models are in
            memory.
        progress: called with (tokens scored, tokens to score) after each window.

    Raises:
        KvikError: a model cannot be used, the models tokenise the text differently, or there is too
            little text.
    """
    configs, longest = [config], longest_window(config)
    if reference is not None:
        configs.append(reference)
        try:
            longest = min(longest, longest_window(reference))
        except ModelError as error:
            field = "reference" if error.field == "model" else error.field
            raise ModelError(field, error.message) from None
    size, step = choose_window(longest, window, stride)
    resolved = [resolve_reader(variant, size) for variant in configs]
    reading = prepare(resolved[0], texts, size, step)
    for variant in resolved[1:]:
        check_same(reading, variant, texts)
    if reference is None:
        with loaded_reader(resolved[0]) as model:
            return read(reading, model, None, progress)
    check_context(*resolved)
    with loaded_reader(resolved[1]) as other, loaded_reader(resolved[0]) as model:
        return read(reading, model, other, progress)


def prepare(resolved: ResolvedConfig, texts: Sequence[str], window: int, stride: int) -> Reading:
    """Tokenise texts for a model.

    Raises:
        KvikError: the model has no tokenizer, or there is no token to score.
    """
    tokenizer = _tokenizer(resolved)
    prefix = prompt_prefix(tokenizer)
    if len(prefix) >= window:
        raise ConfigError("window", f"must be more than the {len(prefix)} tokens of every prompt")
    ids = tuple(_ids(tokenizer, text) for text in texts)
    reading = Reading(window, stride, ids, prefix, resolved.model.vocab_size)
    if not reading.num_scored:
        raise ConfigError("data", "has no token to score: it needs at least two")
    return reading


def check_same(reading: Reading, resolved: ResolvedConfig, texts: Sequence[str]) -> None:
    """Check that a model's distributions are over the same tokens.

    Raises:
        ConfigError: its vocabulary has another size, or its tokenizer splits the texts differently.
    """
    name, size = resolved.runner.model_path, resolved.model.vocab_size
    if size != reading.vocab_size:
        raise ConfigError(
            "reference", f"{name} has {size} tokens, the other model {reading.vocab_size}"
        )
    tokenizer = _tokenizer(resolved)
    same = prompt_prefix(tokenizer) == reading.prefix and all(
        np.array_equal(_ids(tokenizer, text), ids)
        for text, ids in zip(texts, reading.texts, strict=True)
    )
    if not same:
        raise ConfigError("reference", f"{name} splits the text into other tokens")


def read(
    reading: Reading, model: Reader, reference: Reader | None, progress: Progress | None = None
) -> Quality:
    """Read the texts with loaded models; raise ModelError if a model's logits are NaN."""
    readers = [model] if reference is None else [model, reference]
    total = reading.num_scored
    token_losses = np.empty(total, np.float32)
    divergence, agreed, done = 0.0, 0, 0
    for window in reading.windows():
        for piece in read_together(readers, window):
            count = len(piece.ids)
            token_losses[done : done + count] = _checked(losses(piece.logits[0], piece.ids), model)
            done += count
            if reference is not None:
                distances, agrees = compared(*piece.logits)
                divergence += float(_checked(distances, reference).sum())
                agreed += int(agrees.sum())
        if progress is not None:
            progress(done, total)
    if reference is None:
        return Quality(reading.window, reading.stride, token_losses)
    return Quality(reading.window, reading.stride, token_losses, divergence / done, agreed / done)


def _checked(values: torch.Tensor, reader: Reader) -> np.ndarray:
    array: np.ndarray = values.cpu().numpy()
    if np.isnan(array).any():
        raise ModelError("weights", f"{reader.resolved.runner.model_path}: its logits are NaN")
    return array


def _ids(tokenizer: Tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)


def _tokenizer(resolved: ResolvedConfig) -> Tokenizer:
    return model_files(Path(resolved.runner.model_path)).tokenizer()
