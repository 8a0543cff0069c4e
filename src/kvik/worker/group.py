"""Processes that compute one model together: the rank of each, and messages from the first one.

A model may be divided in two ways. In a group (tensor parallelism) each process has a share of
every matrix, and all compute each layer together. In a pipeline each stage, which is a process or a
group, has some of the layers, and stages compute different steps at the same time.

Does not import torch, since the other processes are started before the first one imports it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, get_args

from kvik.spec.adapters import Adapter

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RunStep:
    """Run a recorded forward over its inputs in the shared memory."""

    tokens: int
    seqs: int
    samples: int
    drafts: bool = False  # that of the network that drafts; see `EngineNetwork.drafting`


@dataclass(frozen=True, slots=True)
class CutKeys:
    """A cut of what the layers of a KV group keep of a request; see `BudgetCut`."""

    group: int
    slot: int
    end: int  # number of computed tokens
    source: bytes  # [keys] int64, KV positions of all tokens of the request that they have
    target: bytes  # [tokens] int64, KV positions for the kept tokens


@dataclass(frozen=True, slots=True)
class SentStep:
    """Run the forward over these inputs: of a stage's layers, or in a group that torch.distributed
    connects."""

    inputs: dict[str, tuple[list[int], bytes]]  # inputs of the step: name -> (shape, bytes)
    cuts: list[CutKeys] = field(default_factory=list)  # budget cuts before it
    # block_copies, state_copies: copies to make after these; see `CopyCaches`.
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    drafts: bool = False  # as in `RunStep`


@dataclass(frozen=True, slots=True)
class CaptureStep:
    """Capture steps of a size in a group of torch.distributed; see `DecodeGraphs.capture`."""

    number: int
    drafts: bool  # as in `RunStep`


@dataclass(frozen=True, slots=True)
class WarmUpStep:
    """Make the next call of the warm-up in such a group."""

    drafts: bool  # as in `RunStep`


@dataclass(frozen=True, slots=True)
class IdleStep:
    """Spend idle time of a stage, then reply whether more remains: any byte, or none."""


@dataclass(frozen=True, slots=True)
class CopyCaches:
    """Copy blocks of the cache, and the states of requests; see `EngineNetwork.copy`."""

    blocks: list[tuple[int, int]]
    states: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class MoveTokens:
    """Move what the layers of a KV group have stored; see `EngineNetwork.move`."""

    group: int
    places: list[list[int]]


@dataclass(frozen=True, slots=True)
class ReadLogits:
    """Compute the logits of the first rows of the shared memory."""

    rows: int
    drafts: bool  # by the network that drafts


@dataclass(frozen=True, slots=True)
class Enter:
    """Compute the model's input of tokens at some positions."""

    ids: list[int]
    positions: list[int]


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Give the memory of some blocks back to the system."""

    blocks: list[int]


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Read an adapter into a slot, and reply why that fails, or ""."""

    slot: int
    adapter: Adapter


@dataclass(frozen=True, slots=True)
class OpenPages:
    """Map the memory of the pages that all processes copy; see `PageMemory`."""

    path: str
    # rows, row_bytes: number of pages, and bytes of each.
    rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class CopyPages:
    """Copy this process's part of blocks of a KV group to rows of pages, or back."""

    number: int  # number to report when it is done
    load: bool  # copy from pages to blocks
    group: int
    blocks: list[int]
    rows: list[int]


Message = (
    RunStep
    | SentStep
    | CaptureStep
    | WarmUpStep
    | IdleStep
    | CopyCaches
    | MoveTokens
    | CutKeys
    | ReadLogits
    | Enter
    | GiveBack
    | LoadAdapter
    | OpenPages
    | CopyPages
)
_MESSAGES: Mapping[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Return a message as bytes for another process."""
    import msgspec  # an engine of one process does without

    return msgspec.msgpack.encode((type(message).__name__, message))


def decode(data: bytes) -> Message:
    """Return the message that `encode` has made bytes of."""
    import msgspec

    name, fields = msgspec.msgpack.decode(data)
    message: Message = msgspec.convert(fields, _MESSAGES[name])
    return message


class GroupMember(Protocol):
    """A process of a group, as seen by its kernels."""

    @property
    def digest(self) -> str:
        """Digest of what it has loaded: equal in all processes of a group."""
        ...

    def begin(self) -> None:
        """See `OtherRanks`; likewise the next two."""
        ...

    def share(self, hidden: Tensor) -> Tensor: ...

    def spread(self, hidden: Tensor) -> Tensor: ...

    def give_up(self) -> None:
        """Stop waiting for the others: one of them is lost."""
        ...

    def close(self) -> None:
        """Free what connects it to the others; safe to call twice."""
        ...


class Followers(Protocol):
    """Processes that compute with this one, as it directs."""

    @property
    def lost(self) -> str:
        """Which of them is gone, and how; "": they are all there."""
        ...

    def send(self, message: Message) -> None:
        """Send a message to each of them.

        Raises:
            GroupLost: one of them is gone.
        """
        ...

    def ask(self, message: LoadAdapter) -> None:
        """Send this message, and wait until each of them has done it.

        Raises:
            ConfigError: one of them could not.
            GroupLost: one of them is gone.
        """
        ...

    def stop(self) -> None:
        """End them; safe to call twice."""
        ...


class OtherRanks(Followers, Protocol):
    """The other processes, as seen by the first one."""

    def jointly(self, message: Message) -> AbstractContextManager[None]:
        """Send a message, and return a context in which this process does the same. If it fails,
        the group is lost: the others would wait, and then exchange data of different operations.

        Raises:
            GroupLost: one of them is gone, at the beginning or at the end.
        """
        ...

    def begin(self) -> None:
        """Begin calls that are not recorded."""
        ...

    def share(self, hidden: Tensor) -> Tensor:
        """Begin such calls, and return some rows at the beginning of the shared memory, where the
        others read them; without shared memory, they wait for `spread`."""
        ...

    def spread(self, hidden: Tensor) -> Tensor:
        """Send the others what `share` returned, after the message that makes them read it."""
        ...

    def wait_loaded(self, group: GroupMember) -> None:
        """Wait until they have loaded.

        Raises:
            ConfigError: one of them cannot, or has recorded something different.
            GroupLost: one of them is gone.
        """
        ...


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What a process needs to join its group."""

    rank: int
    size: int
    memory: np.ndarray  # [bytes] uint8, shared by all
    ranks: OtherRanks | None = None  # set in the first process only
    file: str = ""  # path of the file by which processes of torch.distributed find each other


class EarlierStages(Followers, Protocol):
    """The stages before the last one, as seen by the last one. They process messages in order: the
    first stage at once, each other stage when it has the result of the one before."""

    def entered(self) -> bytes:
        """Wait for their results of the oldest step not fetched yet; see `EnteredStates.put`.

        Raises:
            GroupLost: one of them is gone.
        """
        ...

    def idle_step(self) -> bool:
        """Let each of them spend idle time; see `Executor.idle_step`.

        Raises:
            GroupLost: one of them is gone.
        """
        ...

    def give_up(self, reason: str) -> None:
        """Make every later call raise `GroupLost`: the last stage and the others compute different
        steps."""
        ...

    def wait_loaded(self) -> None:
        """Wait until they have loaded.

        Raises:
            ConfigError: one of them cannot.
        """
        ...
