"""Files that others may read at any moment, and that an interruption must not cut in two."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all; what is no file (a pipe, a device) is written to as it is.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = path.resolve()  # a link stays, and what it points to is replaced
    draft = path.with_name(f".kvik-{secrets.token_hex(8)}")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


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
