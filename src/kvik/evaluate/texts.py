"""Texts to evaluate on: a file, or a story that ships with kvik, which no model was trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from kvik.config.errors import ConfigError

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
