"""A text cut into windows that a model can read, so that every token is scored at most once.

Windows of `window` tokens begin every `stride` tokens of the text; each is read from nothing and
scores what no window before it scored. Nothing predicts the first token of a window, so it is not
scored: with `stride` < `window` that is only the first token of the text, and with a tokenizer that
puts BOS before a prompt none at all, as every window then begins with BOS, like every prompt. With
`stride` = `window` and no BOS it is the first token of each window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvik.config.errors import ConfigError
from kvik.text.tokenizer import Tokenizer

LONGEST_DEFAULT = 2048  # what most papers read at once


@dataclass(frozen=True, slots=True)
class Window:
    """Attributes:
    token_ids: what is read, BOS included; at least two.
    first_scored: index of the first token that is scored, at least 1; all after it are, too.
    """

    token_ids: tuple[int, ...]
    first_scored: int


def choose_window(longest: int, window: int | None, stride: int | None) -> tuple[int, int]:
    """The window and stride that were asked for, or the defaults.

    Args:
        longest: tokens that the models can read at once.

    Raises:
        ConfigError: `window` or `stride` is out of range.
    """
    chosen = min(longest, LONGEST_DEFAULT) if window is None else window
    if not 2 <= chosen <= longest:
        raise ConfigError("window", f"must be 2 to {longest} (the context), not {chosen}")
    step = chosen if stride is None else stride
    if not 1 <= step <= chosen:
        raise ConfigError("stride", f"must be 1 to {chosen} (the window), not {step}")
    return chosen, step


def cut(ids: Sequence[int], prefix: Sequence[int], window: int, stride: int) -> Iterator[Window]:
    """The windows of one text. A text of fewer tokens is one shorter window; one of which no token
    can be scored has none.

    Args:
        ids: the text alone.
        prefix: tokens that begin every window (BOS); they count as part of it.
        window: longest window in tokens, more than the prefix has.
        stride: tokens of the text from one window to the next; at most what a window has of them.
    """
    for start, end, first in _spans(len(ids), len(prefix), window, stride):
        yield Window((*prefix, *ids[start:end]), first)


def count_scored(length: int, num_prefix: int, window: int, stride: int) -> int:
    """Tokens that the windows of a text score together.

    Args:
        length: of the text, in tokens.
        num_prefix: tokens of the prefix.
    """
    return sum(
        num_prefix + end - start - first
        for start, end, first in _spans(length, num_prefix, window, stride)
    )


def _spans(
    length: int, num_prefix: int, window: int, stride: int
) -> Iterator[tuple[int, int, int]]:
    """Of each window: its first token of the text, the one after its last, and the index in the
    window of the first that it scores."""
    room = window - num_prefix
    stride = min(stride, room)
    scored = 0  # up to here, by the windows before
    for start in range(0, length, stride):
        end = min(start + room, length)
        first = max(num_prefix + scored - start, 1)
        if num_prefix + end - start > first:
            yield start, end, first
        scored = end
        if end == length:
            return


def prompt_prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the tokenizer puts before a prompt."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a", add_special_tokens=True)
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start])
    return ()
