"""Processes that compute one model together: the place of each, and what the first tells others.

A model may be cut in two directions. A group (tensor parallelism) has a share of every matrix in
each process, and all of them compute each layer together. A pipeline has some of the layers in each
stage, which is a process or a group, and its stages compute different steps at a time.

Does not import torch, as those processes are started before the first one does.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run the recorded forward over the inputs that lie there."""

    tokens: int
    seqs: int
    samples: int


@dataclass(frozen=True, slots=True)
class StageStep:
    """Run the forward of a stage's layers; or, in a group whose steps are not recorded, of all.

    Attributes:
        inputs: of the step, by their names: shape and bytes.
        block_copies, state_copies: to be made before it; see `CopyBlocks`, `CopyStates`.
    """

    inputs: dict[str, tuple[list[int], bytes]]
    block_copies: list[tuple[int, int]]
    state_copies: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class CopyBlocks:
    """Copy blocks of the cache: pairs of source and target."""

    pairs: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class CopyStates:
    """Copy the states of requests: pairs of source and target, in order."""

    pairs: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class MoveTokens:
    """Move what the layers of a KV group have stored; see `EngineNetwork.move`."""

    group: int
    places: list[list[int]]


@dataclass(frozen=True, slots=True)
class ReadLogits:
    """Compute the logits of the first rows of the common memory."""

    rows: int


@dataclass(frozen=True, slots=True)
class Enter:
    """Look tokens at some positions up as the model takes them in."""

    ids: list[int]
    positions: list[int]


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Give the memory of some blocks back to the system."""

    blocks: list[int]


@dataclass(frozen=True, slots=True)
class OpenPages:
    """Map the memory in which pages of the cache lie that all processes copy; see `PageMemory`.

    Attributes:
        rows, row_bytes: of pages.
    """

    path: str
    rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class CopyPages:
    """Copy the own part of blocks of a KV group to rows of pages, or the other way.

    Attributes:
        number: to be told when it is done.
        load: from pages to blocks.
    """

    number: int
    load: bool
    group: int
    blocks: list[int]
    rows: list[int]


Message = (
    RunStep
    | StageStep
    | CopyBlocks
    | CopyStates
    | MoveTokens
    | ReadLogits
    | Enter
    | GiveBack
    | OpenPages
    | CopyPages
)
_KINDS: tuple[type[Any], ...] = (
    RunStep,
    StageStep,
    CopyBlocks,
    CopyStates,
    MoveTokens,
    ReadLogits,
    Enter,
    GiveBack,
    OpenPages,
    CopyPages,
)
MESSAGES: Mapping[str, type[Any]] = {kind.__name__: kind for kind in _KINDS}


class GroupMember(Protocol):
    """A process of a group, as its kernels see it."""

    @property
    def digest(self) -> str:
        """Of what it has loaded: equal in all processes of a group."""
        ...

    def begin(self) -> None:
        """See `Others`, as of the next two."""
        ...

    def share(self, hidden: Tensor) -> Tensor: ...

    def spread(self, hidden: Tensor) -> Tensor: ...

    def give_up(self) -> None:
        """Let this process wait for the others no more: one of them is lost."""
        ...

    def close(self) -> None:
        """Give back what joins it to the others; safe to call twice."""
        ...


class Others(Protocol):
    """The other processes, as the first one sees them."""

    @property
    def lost(self) -> str:
        """Which of them is gone, and how; "": they are all there."""
        ...

    def tell(self, message: Message) -> None:
        """Send a message to each of them.

        Raises:
            GroupLost: one of them is gone.
        """
        ...

    def together(self, message: Message) -> AbstractContextManager[None]:
        """Return a context in which this process does what the others are told to do. If it cannot,
        the group is lost: they would wait, and meet it in something else.

        Raises:
            GroupLost: one of them is gone, at the begin or at the end.
        """
        ...

    def begin(self) -> None:
        """Calls that are not recorded begin."""
        ...

    def share(self, hidden: Tensor) -> Tensor:
        """The same, and return some rows where the others will find them, at the begin of the
        common memory; or else they wait for `spread`."""
        ...

    def spread(self, hidden: Tensor) -> Tensor:
        """Of what `share` returned, once the others were told to read it."""
        ...

    def meet(self, group: GroupMember) -> None:
        """Wait until they have loaded.

        Raises:
            ConfigError: one of them cannot, or has recorded something else.
            GroupLost: one of them is gone.
        """
        ...

    def stop(self) -> None:
        """End them; safe to call twice."""
        ...


@dataclass(frozen=True, slots=True)
class Seat:
    """A process' place in its group.

    Attributes:
        memory: [bytes] uint8 that all share.
        others: of the first process; None: it is another one.
        file: path of the file in which processes that torch joins find each other.
    """

    rank: int
    size: int
    memory: np.ndarray
    others: Others | None = None
    file: str = ""


class EarlierStages(Protocol):
    """The stages before the last one, as that one sees them. They do what they are told in order,
    the first stage at once, each other one when it has what the one before has made."""

    @property
    def lost(self) -> str:
        """Which of them is gone, and how; "": they are all there."""
        ...

    def tell(self, message: Message) -> None:
        """Send a message to each of them.

        Raises:
            GroupLost: one of them is gone.
        """
        ...

    def entered(self) -> bytes:
        """Wait for what they have made of the oldest step that was not asked for: [tokens, hidden].

        Raises:
            GroupLost: one of them is gone.
        """
        ...

    def give_up(self, why: str) -> None:
        """Let every later call raise `GroupLost`: the stages and the last one are out of step."""
        ...

    def meet(self) -> None:
        """Wait until they have loaded.

        Raises:
            ConfigError: one of them cannot.
        """
        ...

    def stop(self) -> None:
        """End them; safe to call twice."""
        ...
