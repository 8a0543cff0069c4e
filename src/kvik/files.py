"""Files that others may read at any moment, and that an interruption must not cut in two."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

NO_FILE = "it is no regular file"
DRAFT = ".kvik-"  # what the name of an unfinished file begins with
OLD = "-old"  # what the name of a folder that is being replaced ends in
GGUF = ".gguf"


def shared_memory(size: int) -> int:
    """Return the number of a file without a name, as large as asked and full of zeros."""
    if sys.platform == "linux":
        file = os.memfd_create("kvik")
    else:
        with tempfile.TemporaryFile() as made:
            file = os.dup(made.fileno())
    os.ftruncate(file, size)
    return file


def is_gguf(path: Path) -> bool:
    """Return whether a model's path names a GGUF file; else it names a folder."""
    return path.suffix.lower() == GGUF and not path.is_dir()


def regular(path: str, flags: int) -> int:
    """Open a regular file and nothing else, as `opener` of `open`: a pipe or a device of a model
    folder could be waited for without end.

    Raises:
        OSError: it cannot be opened, or is something else.
    """
    fd = os.open(path, flags | os.O_NONBLOCK)  # which opens a pipe without a writer at once
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, NO_FILE)
    return fd


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all; what is no file (a pipe, a device) is written to as it is.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    with writing_whole(path) as file:
        file.write(data)


@contextlib.contextmanager
def writing_whole(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name when the block ends, and is gone when that fails.

    Raises:
        OSError: it cannot be written.
    """
    path = path.resolve()  # a link stays, and what it points to is replaced
    with _draft(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as (draft, number):
        with os.fdopen(os.dup(number), "wb") as file:
            yield file
        draft.replace(path)


@contextlib.contextmanager
def writing_whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name, and the place of the one that has it, when the block
    ends; when that fails it is gone, and the old one stays.

    Raises:
        OSError: it cannot be written.
    """
    path = path.resolve()
    with working_folder(path) as draft:
        yield draft
        old = draft.with_name(draft.name + OLD)
        try:
            if path.exists():
                path.replace(old)
            draft.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):  # another one has taken the place meanwhile
                old.replace(path)
            raise
        finally:
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def working_folder(path: Path) -> Iterator[Path]:
    """A hidden folder next to `path`, for the work on it; removed when the block ends, or when the
    next work on `path` begins after this process was killed.

    Raises:
        OSError: it cannot be written.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _draft(path, None) as (draft, _):
        yield draft


@contextlib.contextmanager
def _draft(path: Path, flags: int | None) -> Iterator[tuple[Path, int]]:
    """A new draft of `path` and its descriptor; `flags` to open a file, None: a folder. It is
    locked as long as its process lives."""
    prefix = f"{DRAFT}{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:8]}-"
    _remove_drafts_of_the_dead(path, prefix)
    while True:
        draft = path.with_name(prefix + secrets.token_hex(8))
        if flags is None:
            draft.mkdir()
        try:
            number = os.open(draft, os.O_RDONLY if flags is None else flags, 0o666)
        except FileNotFoundError:
            if flags is None:  # taken for one of the dead before it was locked
                continue
            raise
        try:
            _lock(number)
        except BlockingIOError:
            os.close(number)
            continue
        except OSError:  # no locks on this file system: it is not taken for a dead one
            pass
        if draft.exists():
            break
        os.close(number)
    try:
        yield draft, number
    finally:
        os.close(number)
        _remove(draft)


def _remove_drafts_of_the_dead(path: Path, prefix: str) -> None:
    """Remove what killed processes left of their work on `path`. An old folder that was moved away
    is kept while nothing has taken its place."""
    for draft in path.parent.glob(f"{prefix}*"):
        if draft.name.endswith(OLD):
            if path.exists():
                _remove(draft)
            continue
        try:
            number = os.open(draft, os.O_RDONLY)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            _lock(number)
            _remove(draft)
        except OSError:  # a living process has it
            pass
        finally:
            os.close(number)


def _lock(number: int) -> None:
    """Raises BlockingIOError: a living process has locked it."""
    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def can_write(path: Path) -> bool:
    """Return whether a file may be put there, folders above that do not exist yet included."""
    if path.is_dir():
        return False
    if path.exists() and not path.is_file():
        return os.access(path, os.W_OK)
    folder = path.resolve().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
