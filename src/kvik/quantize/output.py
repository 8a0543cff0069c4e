"""The folder that a quantised model is saved into: a shard for each block, config.json last.

Until then a hidden folder in it says which run this is, and what became of each block. So a run
that was cut off goes on with the first block that has no shard; the result has the same bytes.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from kvik.config.model_source import CONFIG
from kvik.config.units import show_bytes
from kvik.errors import ConfigError
from kvik.files import DRAFT, write_whole
from kvik.nn.checkpoint import INDEX
from kvik.nn.safetensors import read_header
from kvik.nn.safetensors_writer import Stored, write_safetensors
from kvik.quantize.source import Source
from kvik.spec.fields import read_json
from kvik.spec.stored_weights import KEY

STATE = ".unfinished"
RUN, LOCK = "run.json", "lock"
REPORT = "quantization_report.json"
# What is taken over of the model's folder: tokenizer, templates, defaults, cards and licences.
TAKEN = ("*.json", "*.jinja", "*.txt", "*.md", "*.model", "*.tiktoken", "LICENSE*", "NOTICE*")
INDICES, OWN = "*.index.json", (CONFIG, REPORT)
SPARE = 64 << 20  # bytes that must stay free


@dataclass(frozen=True, slots=True)
class SavedLayer:
    """A linear layer in the checkpoint.

    Attributes:
        bits: of a code; None: it stayed as it was.
        weights: how many numbers it has.
        bytes: of all its tensors, without the bias.
        error, on_inputs: as of `LayerResult`.
    """

    name: str
    bits: int | None
    weights: int
    bytes: int
    error: float
    on_inputs: bool


class Output:
    """A folder that a run saves into.

    Attributes:
        work: for what the calibration keeps between blocks.
    """

    def __init__(self, folder: Path, source: Source) -> None:
        self.folder = folder
        self._source = source
        self._state = folder / STATE
        self.work = self._state / "work"

    @contextmanager
    def begin(self, run: Mapping[str, object]) -> Iterator[None]:
        """Start, or go on with what `run`, a JSON object that tells runs apart, has begun. Within,
        no other process can.

        Raises:
            ConfigError: the folder holds something else, or another process is working in it.
        """
        try:
            if self.folder.exists() and not self._state.exists() and any(self.folder.iterdir()):
                raise ConfigError("output", f"{str(self.folder)!r} is not empty: name another")
            self._state.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._state / LOCK, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            raise ConfigError(
                "output", f"cannot write {str(self.folder)!r} ({error.strerror})"
            ) from None
        try:
            self._claim(lock, json.dumps(run, sort_keys=True, indent=1))
            yield
        finally:
            os.close(lock)

    def _claim(self, lock: int, run: str) -> None:
        name = str(self.folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError("output", f"another run is working in {name!r}") from None
        begun = self._state / RUN
        if begun.exists() and begun.read_text() != run:
            if self.saved():
                raise ConfigError(
                    "output",
                    f"{name!r} holds a part of another run: finish that with its model and flags, "
                    "or remove the folder",
                )
            shutil.rmtree(self.work, ignore_errors=True)
        for draft in (*self.folder.glob(f"{DRAFT}*"), *self._state.glob(f"{DRAFT}*")):
            draft.unlink()
        write_whole(begun, run.encode())

    def check_room(self, num_bytes: int) -> None:
        """Whether so many bytes, less those of the blocks that are saved, can be written.

        Raises:
            ConfigError: they cannot.
        """
        saved = (self._shard(i).stat().st_size for i in range(len(self.saved())))
        need = num_bytes - sum(saved) + SPARE
        place = self.folder.resolve()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if need > free:
            raise ConfigError(
                "output",
                f"needs about {show_bytes(need)} of disk, {show_bytes(free)} are free in "
                f"{str(place)!r}",
            )

    def saved(self) -> list[tuple[SavedLayer, ...]]:
        """The blocks that are finished, from the first one on."""
        found = []
        for index in range(self._source.spec.num_layers):
            if not (self._record(index).exists() and self._shard(index).exists()):
                break
            layers = json.loads(self._record(index).read_bytes())
            found.append(tuple(SavedLayer(**layer) for layer in layers))
        return found

    def save_block(
        self, index: int, tensors: Mapping[str, Tensor | Stored], layers: Sequence[SavedLayer]
    ) -> None:
        """
        Raises:
            OSError: it cannot be written.
        """
        record = json.dumps([asdict(layer) for layer in layers], indent=1)
        write_whole(self._record(index), record.encode())
        write_safetensors(self._shard(index), tensors)  # last: it says that the block is finished

    def finish(self, quantization: Mapping[str, object]) -> int:
        """Writes what is not in blocks, the other files, and config.json last.

        Returns:
            bytes of all tensors.

        Raises:
            OSError: a file cannot be written.
        """
        source, blocks = self._source, self._source.spec.num_layers
        write_safetensors(self._shard(blocks), source.rest())
        owners: dict[str, str] = {}
        total = 0
        for index in range(blocks + 1):
            shard = self._shard(index)
            entries = read_header(shard)
            owners |= {entry.name: shard.name for entry in entries}
            total += sum(entry.size for entry in entries)
        listed = {"metadata": {"total_size": total}, "weight_map": dict(sorted(owners.items()))}
        write_whole(self.folder / INDEX, _json(listed))
        for pattern in TAKEN:
            for path in source.folder.glob(pattern):
                if path.is_file() and path.name not in OWN and not path.match(INDICES):
                    write_whole(self.folder / path.name, path.read_bytes())
        config = read_json(source.folder / CONFIG)
        write_whole(self.folder / CONFIG, _json({**config, KEY: quantization}))
        return total

    def report(self, report: Mapping[str, object]) -> Path:
        """Saves the report, which ends the run.

        Raises:
            ConfigError: it cannot be written.
        """
        ended = self.folder / f"{DRAFT}{STATE}"  # at once, and not file by file
        try:
            write_whole(self.folder / REPORT, _json(report))
            self._state.replace(ended)
        except OSError as error:
            raise ConfigError(
                "output", f"the report cannot be written ({error.strerror})"
            ) from None
        shutil.rmtree(ended, ignore_errors=True)
        return self.folder / REPORT

    def abandon(self) -> None:
        """Removes what a run without a finished block has left."""
        if not self.saved():
            shutil.rmtree(self._state, ignore_errors=True)
            if self.folder.exists() and not any(self.folder.iterdir()):
                self.folder.rmdir()

    def _record(self, index: int) -> Path:
        return self._state / f"block-{index:05}.json"

    def _shard(self, index: int) -> Path:
        count = self._source.spec.num_layers + 1
        return self.folder / f"model-{index + 1:05}-of-{count:05}.safetensors"


def _json(value: Mapping[str, object]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
