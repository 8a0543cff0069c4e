"""A text cut into windows that a model can read, so that every token is scored at most once.

Windows of `window` tokens begin every `stride` tokens of the text; each is read from nothing and
scores what no window before it scored. Nothing predicts the first token of a window, so it is not
scored: with `stride` < `window` that is only the first token of the text, and with a tokenizer that
puts BOS before a prompt none at all, as every window then begins with BOS, like every prompt. With
`stride` = `window` and no BOS it is the first token of each window.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvik.errors import ConfigError
from kvik.text.tokenizer import Tokenizer

# Texts to evaluate on: a file, or a story that ships with kvik, which no model was trained on.

MAX_BYTES = 64 << 20  # a tokenizer needs some fifty times as much
STORY = Path(__file__).with_name("held_out.txt")


def held_out_texts() -> list[str]:
    """The story alone: some 1500 tokens, enough to compare and too few for a leaderboard."""
    return [STORY.read_text(encoding="utf-8")]


def read_texts(path: Path, option: str = "data") -> list[str]:
    """The texts of a file: one of plain text, or one in the field "text" of each line of .jsonl.

    Args:
        option: what named the file, for errors.

    Raises:
        ConfigError: the file cannot be read as that, or holds no text.
    """
    try:
        if path.is_dir():
            raise ConfigError(option, f"{path} is a folder, not a file of text")
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(option, f"{path} has more than {MAX_BYTES >> 20} MiB")
        content = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(option, f"{path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(option, f"{path} is not UTF-8 (byte {error.start})") from None
    texts = list(_records(path, content, option)) if path.suffix == ".jsonl" else [content]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ConfigError(option, f"{path} holds no text")
    return texts


def _records(path: Path, content: str, option: str) -> Iterator[str]:
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(option, f"{path}, line {number} is not JSON") from None
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise ConfigError(option, f'{path}, line {number} has no field "text" with a string')
        yield text


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
