"""LoRA adapters that requests choose, as facts: their names, and the ranks of their matrices."""

from __future__ import annotations

import hashlib
import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvik.errors import ModelError, shown
from kvik.files import ADAPTER_FILES, regular

MAX_ADAPTERS = 512
ADAPTER_NAME = r"[^\0=]{1,256}"
ADAPTER_RANK = 16  # default of the largest rank
NO_ADAPTER = -1  # number of the adapter of requests that choose none
# Names of tensors in an adapter's file: `base_model.model.` is the wrapper of PEFT, and
# `base_layer` the layer that an adapter wraps, or a module of which it wraps several parameters.
TENSOR_NAME = re.compile(
    r"base_model\.model\.(.+?)(?P<inner>(?:\.base_layer)*)\."
    r"(?:lora_(?P<linear>[AB])\.weight|lora_embedding_(?P<embedding>[AB])|(?P<whole>weight|bias))"
)
INNER = ".base_layer"  # ends the name of the module of which PEFT wraps another parameter too
_IN_BLOCK = re.compile(r"[^.]+\.\d+\..+")
MAX_HEADER_BYTES = 100_000_000


def in_block(layer: str) -> str:
    """Return a layer's name from its block on, since what precedes differs between checkpoints."""
    match = _IN_BLOCK.search(layer)
    return layer if match is None else match[0]


def is_stack(layer: str, of_expert: str) -> bool:
    """Return whether PEFT adapts all experts of a block by stacked matrices under this name.

    Args:
        of_expert: the name of one layer of one expert.
    """
    block, named = in_block(layer.replace(INNER, "")), in_block(of_expert)
    same_block = block.split(".")[:2] == named.split(".")[:2]
    return same_block and (block.endswith(".experts") or named.startswith(f"{block}."))


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that requests choose by its name."""

    name: str
    folder: str  # of its files
    digest: str  # of its files. Requests share prefix blocks only if they have the same adapter.
    # Times of their last changes. Unless one differs, nothing is read to compare.
    changed_ns: tuple[int, ...]

    @staticmethod
    def read(name: str, folder: Path) -> Adapter:
        """Return the adapter in a folder.

        Raises:
            ModelError: a file cannot be read.
        """
        digest, changed = hashlib.sha256(), []
        for file in ADAPTER_FILES:
            try:
                with open(folder / file, "rb", opener=regular) as opened:
                    changed.append(os.fstat(opened.fileno()).st_mtime_ns)
                    digest.update(hashlib.file_digest(opened, "sha256").digest())
            except OSError as error:
                reason = f"{shown(name)}: {file} cannot be read ({error.strerror})"
                raise ModelError("adapters", reason) from None
        return Adapter(name, str(folder), digest.hexdigest(), tuple(changed))

    def check_unchanged(self) -> None:
        """Raise ModelError if the files are no longer those of the digest."""
        paths = [Path(self.folder) / file for file in ADAPTER_FILES]
        with suppress(OSError):  # `read` reports it
            if tuple(path.stat().st_mtime_ns for path in paths) == self.changed_ns:
                return
        if Adapter.read(self.name, Path(self.folder)).digest != self.digest:
            reason = f"{shown(self.name)}: its files have changed since it was named"
            raise ModelError("adapters", reason)

    def sizes(self) -> dict[str, tuple[int, int, int]]:
        """Return rank, inputs and outputs of each adapted linear layer, by its name from its block
        on; of stacks, the ranks of all experts together.

        The loader checks the file; a broken one adapts nothing here.
        """
        path = Path(self.folder) / ADAPTER_FILES[1]
        try:
            with open(path, "rb", opener=regular) as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(min(length, MAX_HEADER_BYTES)))
            shapes = {
                match[1] + match["inner"] + match["linear"]: list(map(int, header[name]["shape"]))
                for name in header
                if (match := TENSOR_NAME.fullmatch(name)) and match["linear"]
            }
            layers = [name.removesuffix("A") for name in shapes if name.endswith("A")]
            return {
                in_block(layer): (
                    shapes[f"{layer}A"][0],
                    shapes[f"{layer}A"][1],
                    shapes[f"{layer}B"][0],
                )
                for layer in layers
            }
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return {}
