"""Files that others may read at any moment, and that an interruption must not cut in two."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

DRAFT = ".kvik-"  # what the name of an unfinished file begins with


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
    draft = path.with_name(f"{DRAFT}{secrets.token_hex(8)}")
    try:
        with draft.open("wb") as file:
            yield file
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


@contextlib.contextmanager
def writing_whole_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes its name, and the place of the one that has it, when the block
    ends; when that fails it is gone, and the old one stays.

    Raises:
        OSError: it cannot be written.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft, old = (path.with_name(f"{DRAFT}{secrets.token_hex(8)}") for _ in range(2))
    try:
        draft.mkdir()
        yield draft
        try:
            if path.exists():
                path.replace(old)
            draft.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):  # another one has taken the place meanwhile
                old.replace(path)
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)


def can_write(path: Path) -> bool:
    """Whether a file may be put there, folders above that do not exist yet included."""
    if path.is_dir():
        return False
    if path.exists() and not path.is_file():
        return os.access(path, os.W_OK)
    folder = path.resolve().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
