"""Files are whole or not there."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvik.config.files import can_write, write_whole


def test_a_file_is_written_with_the_permissions_of_any_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a name with spaces.json"
    write_whole(path, b"old")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    (tmp_path / "plain").write_bytes(b"")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("problem", [KeyboardInterrupt, OSError])
def test_an_interruption_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: type[BaseException]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def half(draft: Path, data: bytes) -> int:
        with draft.open("wb") as file:
            file.write(data[:1])
        raise problem

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(problem):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert can_write(pipe)
    writer = threading.Thread(target=write_whole, args=(pipe, b"data"))
    writer.start()
    assert pipe.read_bytes() == b"data"
    writer.join()
    assert pipe.is_fifo()


def test_where_a_file_may_be_put(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert can_write(tmp_path / "file") and can_write(tmp_path / "new")
    assert can_write(tmp_path / "a" / "b" / "new")
    assert not can_write(tmp_path)
    assert not can_write(tmp_path / "file" / "under a file")


def test_a_folder_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of the system, which root passes by: so its answer is put in its place."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert not can_write(tmp_path / "new")
    assert not can_write(tmp_path / "folder" / "new")
