"""The weights that a path names, whatever kind of files they are in."""

from __future__ import annotations

from pathlib import Path

from kvik.files import is_gguf
from kvik.nn.checkpoint import Checkpoint, open_checkpoint
from kvik.nn.gguf_checkpoint import open_gguf


def open_weights(path: Path) -> Checkpoint:
    """Of a folder with safetensors files, or of a GGUF file; only descriptions are read.

    Raises:
        ModelError: there is nothing that can be loaded, or a description is malformed.
    """
    return open_gguf(path) if is_gguf(path) else open_checkpoint(path)
