"""Files are written whole or not at all; those that people write may have a byte order mark."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from kvik.config.config import EngineConfig
from kvik.config.env import read_option_file
from kvik.files import (
    DRAFT,
    can_write,
    working_folder,
    write_whole,
    writing_whole,
    writing_whole_folder,
)
from kvik.planner.devices import read_device
from kvik.remote_server import RemoteServer
from kvik.server.access import read_keys
from kvik.text.tokenizer import read_template


def test_a_file_is_written_with_the_permissions_of_any_new_one(tmp_path: Path) -> None:
    path = tmp_path / "a name with spaces.json"
    write_whole(path, b"old")
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    (tmp_path / "plain").write_bytes(b"")
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("problem", [KeyboardInterrupt, OSError])
def test_an_interruption_leaves_the_old_file(tmp_path: Path, problem: type[BaseException]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(problem), writing_whole(path) as file:
        file.write(b"n")
        raise problem
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
    assert not can_write(tmp_path / "a" / "b" / "new")
    assert can_write(tmp_path / "a" / "b" / "new", parents=True)
    assert not can_write(tmp_path)
    assert not can_write(tmp_path / "file" / "under a file", parents=True)


def test_a_folder_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so the answer of the system is replaced."""
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert not can_write(tmp_path / "new")
    assert not can_write(tmp_path / "folder" / "new", parents=True)


def test_a_folder_takes_the_place_of_another_in_one_go(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder"
    for text in ("one", "two"):
        with writing_whole_folder(path) as draft:
            assert draft.parent == path.parent
            (draft / text).write_text(text)
        assert [entry.name for entry in path.iterdir()] == [text]
    assert list(path.parent.iterdir()) == [path]


def test_of_two_concurrent_writes_only_the_last_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    with writing_whole_folder(path) as last:
        with writing_whole_folder(path) as first:
            (first / "first").write_text("")
        (last / "last").write_text("")
    assert list(tmp_path.iterdir()) == [path]
    assert [entry.name for entry in path.iterdir()] == ["last"]


def test_a_target_created_in_the_meantime_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, replace = tmp_path / "folder", Path.replace
    path.mkdir()

    def taken(source: Path, target: Path) -> Path:
        if source == path:
            replace(source, target)
            path.mkdir()
            (path / "theirs").write_text("")
            return target
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", taken)
    with pytest.raises(OSError), writing_whole_folder(path) as draft:
        (draft / "ours").write_text("")
    assert list(tmp_path.iterdir()) == [path]
    assert [entry.name for entry in path.iterdir()] == ["theirs"]


@pytest.mark.parametrize("problem", [KeyboardInterrupt, OSError])
def test_an_interruption_leaves_the_old_folder(
    tmp_path: Path, problem: type[BaseException]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").write_text("old")
    with pytest.raises(problem), writing_whole_folder(tmp_path / "folder") as draft:
        (draft / "new").write_text("new")
        raise problem
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]
    assert (tmp_path / "folder" / "old").read_text() == "old"


KILLED = """
import os, signal, sys
from pathlib import Path
from kvik.files import working_folder, writing_whole, writing_whole_folder
with {kind}(Path(sys.argv[1])):
    print("working", flush=True)
    if sys.argv[2] == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
"""


@pytest.mark.parametrize("kind", [writing_whole, writing_whole_folder, working_folder])
def test_leftovers_of_killed_processes_are_removed_and_of_living_ones_kept(
    kind: Callable[[Path], AbstractContextManager[object]], tmp_path: Path
) -> None:
    def work(name: str, end: str) -> subprocess.Popen[bytes]:
        code = KILLED.format(kind=kind.__name__)
        command = [sys.executable, "-c", code, str(tmp_path / name), end]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(command, **pipes)

    for name in ("target", "other"):
        work(name, "dies").communicate()
    left = set(tmp_path.iterdir())
    assert len(left) == 2
    with work("target", "lives") as living:
        assert living.stdout.readline()
        drafts = set(tmp_path.iterdir())
        assert len(drafts) == 2 and len(drafts - left) == 1  # that of the dead process is gone
        with kind(tmp_path / "target"):
            assert drafts < set(tmp_path.iterdir())
        living.communicate()
        assert living.returncode == 0
    assert len([path for path in tmp_path.iterdir() if path.name.startswith(DRAFT)]) == 1


def test_the_old_folder_is_kept_until_the_new_one_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the process were killed between the two renames of the replacement."""
    path, replace = tmp_path / "folder", Path.replace
    path.mkdir()
    (path / "valuable").touch()

    def moved_away_alone(source: Path, target: Path) -> Path:
        if source != path:
            raise OSError("killed")
        return replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", moved_away_alone)
        with pytest.raises(OSError), writing_whole_folder(path):
            pass
    (old,) = tmp_path.iterdir()
    with pytest.raises(KeyboardInterrupt), writing_whole_folder(path):
        raise KeyboardInterrupt
    assert (old / "valuable").exists()
    for _ in range(2):
        with writing_whole_folder(path):
            pass
    assert list(tmp_path.iterdir()) == [path]


DEVICE = 'kind = "cpu"\nmemory = 1\nbandwidth = 1.0\nrates = {fp32 = 1.0}\n'
READERS: dict[str, tuple[str, Callable[[Path], Any], Any]] = {
    "keys of a server": (
        "sesame",
        lambda file: read_keys([], str(file)).caller(Headers({"x-api-key": "sesame"})) is not None,
        True,
    ),
    "key of a client": (
        "sesame",
        lambda file: RemoteServer.at("http://a", f"@{file}").key,
        "sesame",
    ),
    "options": (
        "max-model-len = 64",
        lambda file: read_option_file(str(file))[EngineConfig],
        {"max_model_len": 64},
    ),
    "hardware": (DEVICE, lambda file: read_device(file).memory, 1),
    "chat template": ("{{ messages }}", lambda file: read_template(str(file)), "{{ messages }}"),
}


@pytest.mark.parametrize(("text", "read", "expected"), READERS.values(), ids=READERS)
def test_a_byte_order_mark_is_no_text(
    text: str, read: Callable[[Path], Any], expected: object, tmp_path: Path
) -> None:
    """Editors and shells of Windows begin files with one."""
    file = tmp_path / "written.toml"
    file.write_text(text, "utf-8-sig")
    assert read(file) == expected
