"""Writes files and folders atomically: readers never see half of one, even after a crash."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import resource
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kvik.errors import KvikError

NO_FILE = "it is not a regular file"
LFS_START = b"version https://git-lfs"
LFS_POINTER = "it is a pointer of Git LFS: `git lfs pull` fetches the file"
DRAFT = ".kvik-"  # prefix of the name of an unfinished file
OLD = "-old"  # suffix of the name of a folder that is being replaced
GGUF = ".gguf"
SAFETENSORS = "model.safetensors"  # the weights of a folder: one file, or several with an index
SAFETENSORS_INDEX = "model.safetensors.index.json"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")  # of LoRA, by PEFT


def shared_memory(size: int) -> int:
    """Return the descriptor of an unnamed file of `size` zero bytes."""
    if sys.platform == "linux":
        file = os.memfd_create("kvik")
    else:
        with tempfile.TemporaryFile() as made:
            file = os.dup(made.fileno())
    os.ftruncate(file, size)
    return file


def allow_files(count: int) -> int:
    """Raise the soft limit of open files as far as the system lets us. Returns how many of the
    `count` ones it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return count
    allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def check_current_folder() -> None:
    """Raise `KvikError` if the current folder was deleted: torch's library MKL aborts there."""
    try:
        os.getcwd()
    except OSError:
        raise KvikError("folder", "the current one was deleted: change to another") from None


def is_named(path: Path) -> bool:
    """Return whether a folder names a file that models may lack. A link to nothing counts: reading
    it says that the model is damaged."""
    return os.path.lexists(path)


_FIRST_PART = re.compile(r"(.+-)00001-of-(\d{5})\.gguf", re.IGNORECASE)


def gguf_parts(path: Path) -> list[Path]:
    """Return the files of a model that a GGUF file is named like the first part of, by the names of
    llama.cpp: NAME-00001-of-00003.gguf and so on; of others, the file alone."""
    first = _FIRST_PART.fullmatch(path.name)
    if first is None:
        return [path]
    others = (f"{first[1]}{i:05}-of-{first[2]}{path.suffix}" for i in range(2, int(first[2]) + 1))
    return [path, *map(path.with_name, others)]


def is_gguf(path: Path) -> bool:
    """Return whether a model's path names a GGUF file rather than a folder."""
    return path.suffix.lower() == GGUF and not path.is_dir()


def regular(path: str, flags: int) -> int:
    """Open a regular file and nothing else; for `opener` of `open`. A pipe or device in a model
    folder could block forever.

    Raises:
        OSError: it cannot be opened, is not a regular file, or a clone without Git LFS made it.
    """
    fd = os.open(path, flags | os.O_NONBLOCK)  # does not wait for the writer of a pipe
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, NO_FILE)
    if os.pread(fd, len(LFS_START), 0) == LFS_START:
        os.close(fd)
        raise OSError(errno.EINVAL, LFS_POINTER)
    return fd


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all; a pipe or device is written directly. Raises OSError."""
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    with writing_whole(path) as file:
        file.write(data)


@contextlib.contextmanager
def writing_whole(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes its name when the block ends, and is deleted if the block fails.
    Raises OSError."""
    path = path.resolve()  # a link stays, and what it points to is replaced
    with _draft(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as (draft, number):
        with os.fdopen(os.dup(number), "wb") as file:
            yield file
        draft.replace(path)


@contextlib.contextmanager
def writing_whole_folder(path: Path) -> Iterator[Path]:
    """Make a folder that replaces `path` when the block ends. If the block fails, it is deleted and
    the old folder stays. Raises OSError if it cannot be written."""
    path = path.resolve()
    with working_folder(path) as draft:
        yield draft
        old = draft.with_name(draft.name + OLD)
        try:
            if path.exists():
                path.replace(old)
            draft.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):  # another process has written `path` meanwhile
                old.replace(path)
            raise
        finally:
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def working_folder(path: Path, *, alone: bool = False) -> Iterator[Path]:
    """Make a hidden folder next to `path` for temporary files. It is removed when the block ends;
    if this process is killed, by the next process that works on `path`.

    Args:
        alone: refuse to work on `path` while another process does.

    Raises:
        OSError: it cannot be written, or another process works on `path`.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    with _draft(path, None, alone=alone) as (draft, _):
        yield draft


@contextlib.contextmanager
def _draft(path: Path, flags: int | None, *, alone: bool = False) -> Iterator[tuple[Path, int]]:
    """Make a draft of `path`: a file opened with `flags`, or a folder if None. Yields it with its
    descriptor. The draft is locked as long as its process lives.

    Args:
        alone: raise BlockingIOError if a living process has another draft of `path`.
    """
    prefix = f"{DRAFT}{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:8]}-"
    if not _remove_drafts_of_the_dead(path, prefix) and alone:
        raise BlockingIOError(errno.EAGAIN, "another process is writing it")
    while True:
        draft = path.with_name(prefix + secrets.token_hex(8))
        if flags is None:
            draft.mkdir()
        try:
            number = os.open(draft, os.O_RDONLY if flags is None else flags, 0o666)
        except FileNotFoundError:
            if flags is None:  # another process removed it before it was locked
                continue
            raise
        try:
            lock(number)
        except BlockingIOError:
            os.close(number)
            continue
        except OSError:  # no locks on this file system; then nothing removes it either
            pass
        if draft.exists():
            break
        os.close(number)
    try:
        yield draft, number
    finally:
        os.close(number)
        _remove(draft)


def _remove_drafts_of_the_dead(path: Path, prefix: str) -> bool:
    """Remove drafts of `path` that killed processes left. An old folder that was moved away is kept
    until a new one has taken its place. Returns whether no living process has a draft."""
    no_others = True
    for draft in path.parent.glob(f"{prefix}*"):
        if draft.name.endswith(OLD):
            if path.exists():
                _remove(draft)
            continue
        try:
            number = os.open(draft, os.O_RDONLY)
        except OSError:  # removed meanwhile, or owned by another user
            continue
        try:
            lock(number)
            _remove(draft)
        except BlockingIOError:  # a living process has locked it
            no_others = False
        except OSError:  # no locks on this file system
            pass
        finally:
            os.close(number)
    return no_others


def lock(number: int) -> None:
    """Lock a descriptor; raises BlockingIOError if a living process has locked it."""
    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def can_write(path: Path, *, parents: bool = False) -> bool:
    """Return whether a file can be written there.

    Args:
        parents: missing parent folders will be created.
    """
    if path.is_dir():
        return False
    if path.exists() and not path.is_file():
        return os.access(path, os.W_OK)
    folder = path.resolve().parent
    while parents and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
