"""Trains heads on hidden states, and measures them on held-out ones."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kvik.config.draft_heads import HeadsSpec
from kvik.errors import ConfigError
from kvik.evaluate.windows import Reader, ScoredWindow
from kvik.interrupts import deferred_interrupt
from kvik.nn.checkpoint import WHOLE, FolderCheckpoint
from kvik.nn.safetensors import read_header, write_safetensors

Progress = Callable[[str, float], None]  # progress(what is being done, share done)
HELD_OUT = 16  # every n-th window is held out of training


@dataclass(frozen=True, slots=True)
class Batch:
    """Some tokens of the text, and the tokens after them."""

    hidden: Tensor  # [rows, 1 + depth, hidden] fp32, at each token and at those after it
    ids: Tensor  # [rows, 1 + depth] int64, the tokens after it: ids[:, 0] follows hidden[:, 0]
    positions: Tensor  # [rows] int64, of the tokens themselves


@dataclass(frozen=True, slots=True)
class WindowStates:
    """The hidden states of windows of text, one after another."""

    ids: Tensor  # [tokens] int64
    hidden: Tensor  # [tokens, hidden], of the model's dtype
    starts: Tensor  # [windows + 1], first token of each

    def usable(self, depth: int, *, held_out: bool) -> Tensor:
        """Return the tokens with 1 + depth others after them in their window, [n] int64."""
        lengths = self.starts.diff()
        ends = torch.repeat_interleave(self.starts[1:], lengths)
        window = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        kept_out = window % HELD_OUT == HELD_OUT - 1
        at = torch.arange(len(self.ids))
        return at[(at + 1 + depth < ends) & (kept_out == held_out)]

    def batch(self, at: Tensor, depth: int) -> Batch:
        """Return the batch of some tokens.

        Args:
            at: [rows] int64, among `usable`.
        """
        behind = at[:, None] + torch.arange(1 + depth)
        window = torch.searchsorted(self.starts, at, right=True) - 1
        return Batch(self.hidden[behind].float(), self.ids[behind + 1], at - self.starts[window])


def check_windows(windows: Sequence[ScoredWindow], depth: int) -> None:
    """Raise ConfigError if windows are too few or too short for training and measuring."""
    if len(windows) < HELD_OUT:
        raise ConfigError(
            "data",
            f"must fill {HELD_OUT} windows or more, not {len(windows)}: more text is needed, or a "
            "smaller window",
        )
    longest = [0, 0]  # of the windows for training, and of those held out
    for i, window in enumerate(windows):
        kept_out = i % HELD_OUT == HELD_OUT - 1
        longest[kept_out] = max(longest[kept_out], len(window.token_ids))
    if min(longest) < 2 + depth:
        raise ConfigError("data", f"must have windows of more than {1 + depth} tokens")


def read_states(
    reader: Reader, windows: Sequence[ScoredWindow], file: Path, progress: Progress
) -> WindowStates:
    """Read windows with the model, and return the hidden states.

    Args:
        file: stores the hidden states, which may be larger than memory.

    Raises:
        OSError: the file cannot be written.
    """
    total = sum(len(window.token_ids) for window in windows)
    spec = reader.resolved.model
    dtype = getattr(torch, reader.resolved.runner.dtype)
    ids = torch.tensor([token for window in windows for token in window.token_ids])
    lengths = torch.tensor([0, *(len(window.token_ids) for window in windows)])
    done = 0
    with file.open("wb") as out:  # written before it is mapped: in a mapping, a full disk is SIGBUS
        for window in windows:
            for start in range(0, len(window.token_ids), reader.tokens_at_once):
                end = min(start + reader.tokens_at_once, len(window.token_ids))
                states = reader.read(window.token_ids, start, end).cpu().to(dtype).contiguous()
                out.write(states.view(torch.uint8).numpy().data)
                done += end - start
            progress("reading", done / total)
    flat = torch.from_file(str(file), shared=True, size=total * spec.hidden_size, dtype=dtype)
    hidden = flat.view(total, spec.hidden_size)
    return WindowStates(ids, hidden, lengths.cumsum(0))


# An interrupted training continues from its snapshot, with the same result as without a break.

FILE = "training.safetensors"
SECONDS = 60.0  # between two snapshots
SAMPLED = 512  # hidden states that identify a model
_STEP, _IDENTITY = "step", "identity"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a training between two steps."""

    step: int  # number of steps done
    tensors: Mapping[str, Tensor]  # everything that the next step depends on, by name


class SnapshotStore:
    """The snapshot of a training in a file."""

    def __init__(self, file: Path, identity: str) -> None:
        """
        Args:
            identity: of the training, see `identity_of`.
        """
        self.file = file
        self.identity = identity
        self._written = time.monotonic()

    def saved(self) -> Snapshot | None:
        """Return the snapshot of an earlier run; None: there is none.

        Raises:
            ConfigError: the snapshot is of another training.
            ModelError: the file is damaged.
        """
        if not self.file.is_file():
            return None
        checkpoint = FolderCheckpoint(((self.file, read_header(self.file)),))
        selections = dict.fromkeys(checkpoint.entries, WHOLE)
        tensors = {run.name: run.values.clone() for run in checkpoint.runs(selections)}
        step, identity = (tensors.pop(name, None) for name in (_STEP, _IDENTITY))
        if step is None or identity is None or bytes(identity.tolist()).decode() != self.identity:
            raise ConfigError(
                "output",
                f"{self.file} holds an unfinished training of another model, text or recipe: "
                "delete it, or choose another folder",
            )
        return Snapshot(int(step), tensors)

    def due(self) -> bool:
        return time.monotonic() - self._written >= SECONDS

    def keep(self, snapshot: Snapshot) -> None:
        """Write a snapshot.

        Raises:
            OSError: it cannot be written; the file before is kept then.
        """
        facts = {
            _STEP: torch.tensor(snapshot.step),
            _IDENTITY: torch.tensor(list(self.identity.encode()), dtype=torch.uint8),
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_safetensors(self.file, {**snapshot.tensors, **facts})
        self._written = time.monotonic()


def identity_of(recipe: object, states: WindowStates) -> str:
    """Return a digest of the recipe, the text, and some hidden states, which identify the model."""
    digest = hashlib.sha256(json.dumps(repr(recipe)).encode())
    sample = states.hidden[: min(SAMPLED, int(states.starts[1]))].float()
    for tensor in (states.ids, states.starts, sample):
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


RANKS = 10  # accuracies are measured for this many of the likeliest tokens
MEASURED = 20_000  # largest number of held-out tokens
WARM_UP = 0.05  # share of the steps


class Trainee(Protocol):
    """Heads with trainable parameters."""

    spec: HeadsSpec

    @property
    def parameters(self) -> list[Tensor]: ...

    def loss(self, batch: Batch) -> Tensor: ...

    def logits(self, batch: Batch) -> Tensor:
        """Return logits [rows, depth, vocab]; depth k guesses batch.ids[:, k + 1]."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by their names in a checkpoint."""
        ...


@dataclass(frozen=True, slots=True)
class Schedule:
    """Length and learning rate of a training."""

    tokens: int  # number of training tokens; the text may be read several times
    rows: int  # tokens of a step
    rate: float  # the highest learning rate; it rises during the first steps, then falls to 0
    seed: int

    @property
    def steps(self) -> int:
        return max(1, self.tokens // self.rows)

    def rate_at(self, step: int) -> float:
        done = (step + 1) / self.steps
        if done < WARM_UP:
            return self.rate * done / WARM_UP
        return self.rate * 0.5 * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP)))


def train(
    trainee: Trainee,
    states: WindowStates,
    schedule: Schedule,
    keeper: SnapshotStore,
    progress: Progress,
) -> bool:
    """Train, from the snapshot of an earlier run if there is one. Ctrl-C ends the training early
    and keeps what was learned, with a snapshot.

    Returns:
        Whether all steps were done.

    Raises:
        ConfigError: the snapshot is of another training, or the loss is not finite at this rate.
    """
    depth = trainee.spec.depth
    usable = states.usable(depth, held_out=False)
    generator = torch.Generator().manual_seed(schedule.seed)
    for tensor in trainee.parameters:
        tensor.requires_grad_()
    optimizer = torch.optim.AdamW(trainee.parameters, betas=(0.9, 0.98), weight_decay=0.01)
    snapshot = keeper.saved()
    if snapshot is not None:
        _restore(snapshot, trainee.parameters, optimizer, generator)
    done, is_between = 0 if snapshot is None else snapshot.step, True  # steps
    try:
        while done < schedule.steps:
            with deferred_interrupt():
                is_between = False
                for group in optimizer.param_groups:
                    group["lr"] = schedule.rate_at(done)
                drawn = torch.randint(len(usable), (schedule.rows,), generator=generator)
                loss = trainee.loss(states.batch(usable[drawn], depth))
                if not math.isfinite(loss.item()):
                    raise ConfigError(
                        "rate", f"must be below {schedule.rate:g}: the loss is not finite"
                    )
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(trainee.parameters, 1.0)
                optimizer.step()
                done, is_between = done + 1, True
            if keeper.due():
                keeper.keep(_snapshot(done, trainee.parameters, optimizer, generator))
            progress(f"training, loss {loss.item():.3f}", done / schedule.steps)
    except KeyboardInterrupt:
        if not done or not is_between:  # nothing was learned, or it is the second within a step
            raise
        keeper.keep(_snapshot(done, trainee.parameters, optimizer, generator))
        return False
    finally:
        for tensor in trainee.parameters:
            tensor.requires_grad_(False)
    return True


def _snapshot(
    step: int, parameters: list[Tensor], optimizer: torch.optim.AdamW, generator: torch.Generator
) -> Snapshot:
    tensors = {"generator": generator.get_state()}
    for i, parameter in enumerate(parameters):
        tensors[f"{i}.value"] = parameter
        for name, value in optimizer.state[parameter].items():
            tensors[f"{i}.{name}"] = value
    return Snapshot(step, tensors)


def _restore(
    snapshot: Snapshot,
    parameters: list[Tensor],
    optimizer: torch.optim.AdamW,
    generator: torch.Generator,
) -> None:
    generator.set_state(snapshot.tensors["generator"])
    with torch.no_grad():
        for i, parameter in enumerate(parameters):
            parameter.copy_(snapshot.tensors[f"{i}.value"])
            names = "step", "exp_avg", "exp_avg_sq"
            optimizer.state[parameter] = {name: snapshot.tensors[f"{i}.{name}"] for name in names}


def accuracies(
    trainee: Trainee, states: WindowStates, rows: int, progress: Progress
) -> tuple[tuple[float, ...], ...]:
    """Return how often the r-th likeliest token is right on held-out text: [depth][RANKS]."""
    depth = trainee.spec.depth
    usable = states.usable(depth, held_out=True)
    usable = usable[:: -(-len(usable) // MEASURED)]
    ranks = min(RANKS, trainee.spec.vocab_size)
    right = torch.zeros(depth, ranks)
    with torch.no_grad():
        for first in range(0, len(usable), rows):
            batch = states.batch(usable[first : first + rows], depth)
            likely = trainee.logits(batch).topk(ranks, dim=-1).indices  # [rows, depth, ranks]
            right += (likely == batch.ids[:, 1:, None]).sum(0)
            progress("measuring", min(1.0, (first + rows) / len(usable)))
    shares = right / len(usable)
    return tuple(tuple(round(share, 4) for share in row) for row in shares.tolist())
