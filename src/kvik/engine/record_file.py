"""The file of the flight recorder: what it holds, and how it lies on disk.

A line of text, then frames: 4 bytes length, 4 bytes checksum, and an event in msgpack. A checksum
goes on from the one before it, so that frames that were changed, lost or moved are found. A crash
may cut off the last one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import msgspec

from kvik.config.config import ResolvedConfig
from kvik.config.errors import KvikError
from kvik.core.types import EngineRequest, FinishReason

MAGIC = b"kvik flight recording, format 1\n"
MAX_FRAME = 256 << 20  # bytes
_HEAD = struct.Struct("<II")


class RecordError(KvikError):
    """A file that is no recording, or was changed."""


class Header(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Where a recording begins.

    Attributes:
        version: of kvik.
        config: every decision that the engine was started with, and the facts of the model.
        readings: of the worker's clock, while it was made.
    """

    version: str
    config: ResolvedConfig
    readings: list[float]


class Added(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A request came. `seed`: that its first completion draws with."""

    now: float
    request: EngineRequest
    seed: int


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Somebody outside ended a request."""

    now: float
    request_id: str
    index: int | None
    reason: FinishReason
    error: str | None


class CacheReset(msgspec.Struct, frozen=True, array_like=True, tag=3):
    now: float


class Planned(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A step was planned.

    Attributes:
        digest: of the whole plan; what follows is in it as well.
        slots, num_scheduled_tokens: [rows], to say where a plan differs.
    """

    now: float
    step: int
    digest: bytes
    slots: list[int]
    num_scheduled_tokens: list[int]


class NothingPlanned(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The core was asked for a plan and had none; deadlines may have passed."""

    now: float


class Finished(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The oldest plan in flight was computed.

    Attributes:
        token_ids, num_draft_tokens, errors: see `ModelRunnerOutput`.
        digest: of log probabilities and vectors; empty if there were none.
        readings: of the worker's clock, in order.
    """

    now: float
    step: int
    token_ids: list[list[int]]
    num_draft_tokens: list[int] | None
    errors: dict[int, str]
    digest: bytes
    readings: list[float]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The oldest plan in flight could not be computed."""

    now: float
    error: str
    readings: list[float]


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The last event; without it the engine ended on a sudden."""

    reason: str


Event = Added | Ended | CacheReset | Planned | NothingPlanned | Finished | Failed | Stopped

_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(Header).decode
_decode_event = msgspec.msgpack.Decoder(Event).decode


def version() -> str:
    """Of kvik, as it is installed."""
    try:
        return metadata.version("kvik")
    except metadata.PackageNotFoundError:
        return "from source"


def encode(event: Header | Event) -> bytes:
    """An event as the body of a frame.

    Raises:
        Exception: something in it cannot be encoded.
    """
    return _encode(event)


class FrameWriter:
    """Bodies -> frames, in the order in which they are written."""

    def __init__(self) -> None:
        self._checksum = crc32(MAGIC)

    def frame(self, body: bytes) -> bytes:
        self._checksum = crc32(body, self._checksum)
        return _HEAD.pack(len(body), self._checksum) + body


class RecordReader:
    """A recording from its beginning.

    Attributes:
        cut: how many bytes of a last, incomplete frame were passed over, once all is read.
    """

    def __init__(self, file: BinaryIO, name: str) -> None:
        """
        Raises:
            RecordError: it is no recording that can be replayed.
        """
        self._file, self._name = file, name
        self.cut = 0
        if file.read(len(MAGIC)) != MAGIC:
            raise RecordError("recording", f"{name} is none, or of another version of kvik")
        self._at, self._checksum = len(MAGIC), crc32(MAGIC)
        body = self._frame()
        if body is None:
            raise RecordError("recording", f"{name} ends before anything happened")
        try:
            self.header = _decode_header(body)
        except (msgspec.DecodeError, ValueError) as error:
            raise self._damaged(f"it was made by another version of kvik ({error})") from None

    def events(self) -> Iterator[Event]:
        """All that follow, up to where the file was cut off.

        Raises:
            RecordError: the file was changed.
        """
        while (body := self._frame()) is not None:
            try:
                yield _decode_event(body)
            except (msgspec.DecodeError, ValueError) as error:
                raise self._damaged(str(error)) from None

    def _frame(self) -> bytes | None:
        head = self._file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            self.cut = len(head)
            return None
        size, checksum = _HEAD.unpack(head)
        if size > MAX_FRAME:
            raise self._damaged(f"a frame of {size} bytes")
        body = self._file.read(size)
        if len(body) < size:
            self.cut = len(head) + len(body)
            return None
        self._checksum = crc32(body, self._checksum)
        if self._checksum != checksum:
            raise self._damaged("it was changed since it was recorded")
        self._at += len(head) + size
        return body

    def _damaged(self, why: str) -> RecordError:
        return RecordError("recording", f"{self._name} is damaged at byte {self._at}: {why}")


def open_recording(path: Path) -> BinaryIO:
    """Raises `RecordError` if the file cannot be read."""
    try:
        return path.open("rb")
    except OSError as error:
        raise RecordError("recording", f"{path} cannot be read: {error.strerror}") from None
