"""A training that was cut short goes on where it was, and ends as if it had not been."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvik.config.errors import ConfigError
from kvik.nn.checkpoint import FolderCheckpoint
from kvik.nn.safetensors import read_header
from kvik.nn.safetensors_writer import write_safetensors
from kvik.training.states import States

FILE = "training.safetensors"
SECONDS = 60.0  # between two writings
SAMPLED = 512  # hidden states that tell one model from another
_STEP, _IDENTITY = "step", "identity"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Attributes:
    step: how many are done.
    tensors: all that the next step depends on, by name.
    """

    step: int
    tensors: Mapping[str, Tensor]


class Keeper:
    """The snapshot of a training in a file."""

    def __init__(
        self, file: Path, identity: str, clock: Callable[[], float], seconds: float = SECONDS
    ) -> None:
        """
        Args:
            identity: of the training, see `identity_of`.
            seconds: from one writing to the next.
        """
        self.file = file
        self.identity = identity
        self.clock = clock
        self.seconds = seconds
        self._written = clock()

    def found(self) -> Snapshot | None:
        """What an earlier run left; None: nothing.

        Raises:
            ConfigError: it is of another training.
            ModelError: the file is damaged.
        """
        if not self.file.is_file():
            return None
        checkpoint = FolderCheckpoint(((self.file, read_header(self.file)),))
        whole = dict.fromkeys(checkpoint.entries, False)
        tensors = {run.name: run.values.clone() for run in checkpoint.runs(whole)}
        step, identity = (tensors.pop(name, None) for name in (_STEP, _IDENTITY))
        if step is None or identity is None or bytes(identity.tolist()).decode() != self.identity:
            raise ConfigError(
                "output",
                f"{self.file} is what another model, text or recipe has learned so far: "
                "delete it, or choose another folder",
            )
        return Snapshot(int(step), tensors)

    def due(self) -> bool:
        return self.clock() - self._written >= self.seconds

    def keep(self, snapshot: Snapshot) -> None:
        """Raises OSError: it cannot be written. What was there before stays then."""
        own = {
            _STEP: torch.tensor(snapshot.step),
            _IDENTITY: torch.tensor(list(self.identity.encode()), dtype=torch.uint8),
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(self.file, {**snapshot.tensors, **own})
        self._written = self.clock()


def identity_of(recipe: object, states: States) -> str:
    """A digest of all that decides what is learned: the recipe, the text, and the model by some of
    its hidden states."""
    digest = hashlib.sha256(json.dumps(repr(recipe)).encode())
    sample = states.hidden[: min(SAMPLED, int(states.starts[1]))].float()
    for tensor in (states.ids, states.starts, sample):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
