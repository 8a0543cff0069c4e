"""Files of text: plain, one JSON object a line, and what is wrong with others."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvik.errors import ConfigError
from kvik.evaluate.windows import held_out_texts, read_texts


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_plain_text_is_one_text(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "\ufeffOne day\n\nthe fóx\n".encode())
    assert read_texts(path) == ["One day\n\nthe fóx\n"]


def test_lines_of_json_are_texts_of_their_own(tmp_path: Path) -> None:
    content = b'{"text": "One\\nday", "id": 1}\r\n\n{"text": " "}\n{"text": "\\u2028two"}'
    assert read_texts(write(tmp_path, "a.jsonl", content)) == ["One\nday", "\u2028two"]


@pytest.mark.parametrize(
    ("name", "content", "wrong"),
    [
        ("a.txt", b" \n", "holds no text"),
        ("a.txt", b"caf\xe9", "is not UTF-8 \\(byte 3\\)"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2 is not JSON"),
        ("a.jsonl", b'{"story": "a"}', 'line 1 has no field "text" with a string'),
        ("a.jsonl", b'"a"', 'line 1 has no field "text"'),
        ("a.jsonl", b'{"text": 3}', 'line 1 has no field "text"'),
        ("a.jsonl", b"", "holds no text"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
    ],
)
def test_what_is_no_text(tmp_path: Path, name: str, content: bytes, wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"data: .*{wrong}"):
        read_texts(write(tmp_path, name, content))


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data: .* is a folder"):
        read_texts(tmp_path)
    with pytest.raises(ConfigError, match=r"data: .* cannot be read \(No such file"):
        read_texts(tmp_path / "none")


def test_the_story_that_ships() -> None:
    (story,) = held_out_texts()
    assert story.startswith("The Clockmaker's Goose") and len(story) > 4000
