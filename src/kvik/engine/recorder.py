"""The flight recorder: all that decides what the engine does, into a file that can be replayed.

The core is a function of what it is told and when, and the worker of the plans and of the readings
of its clock. So these are written down, with a digest of each plan and the tokens of each step. The
token ids of prompts and outputs are in the file, which is as good as their text.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Iterator
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import msgspec

from kvik.config.config import ResolvedConfig
from kvik.core.plan import ModelRunnerOutput, SchedulerOutput
from kvik.core.types import EngineRequest, FinishReason
from kvik.engine.loop import LoopObserver
from kvik.errors import ConfigError, KvikError

# The file of the flight recorder: what it holds, and how it lies on disk.
#
# A line of text, then frames: 4 bytes length, 4 bytes checksum, and an event in msgpack. A checksum
# goes on from the one before it, so that frames that were changed, lost or moved are found. A crash
# may cut off the last one.

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


log = logging.getLogger(__name__)

DEFAULT_LIMIT = 1 << 30  # bytes
PREVIOUS = ".previous"  # follows the name of the recording before this one
_LAST_FRAMES = 256  # bytes that are kept free for the last word

_canonical = msgspec.msgpack.Encoder().encode


def plan_digest(plan: SchedulerOutput) -> bytes:
    """The same for equal plans, whatever process made them: their sets are made in the same way of
    the same integers, and so are in the same order."""
    return blake2b(_canonical(plan), digest_size=8).digest()


def output_digest(output: ModelRunnerOutput) -> bytes:
    """Of what a step found beside tokens; empty if that is nothing."""
    if not output.logprobs and not output.prompt_logprobs and not output.embeddings:
        return b""
    found = (output.logprobs, output.prompt_logprobs, output.embeddings)
    return blake2b(_canonical(found), digest_size=8).digest()


class ClockTape:
    """A clock whose readings are kept until they are taken away."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._readings: list[float] = []

    def __call__(self) -> float:
        now = self._clock()
        self._readings.append(now)
        return now

    def take(self) -> list[float]:
        readings, self._readings = self._readings, []
        return readings


class Recorder(LoopObserver):
    """Writes what it is told. When that is not possible any more, as the disk is full or the file
    has reached its limit, it says so once and the engine goes on without it.

    A plan is written before it is computed, so that a step which kills the process is the last one
    in the file. A file that is there already is kept beside the new one, and none before that.
    """

    def __init__(
        self, path: Path, config: ResolvedConfig, tape: ClockTape, limit: int = DEFAULT_LIMIT
    ) -> None:
        """
        Args:
            tape: the clock of the worker, which has been made.
            limit: bytes of the file; when they are used up, recording ends.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._path, self._tape, self._limit = path, tape, limit
        self._frames = FrameWriter()
        self._pending = bytearray(MAGIC)
        self._size = 0  # bytes written
        self._file: int | None = _create(path)
        self._pending += self._frames.frame(encode(Header(version(), config, tape.take())))
        self._flush()

    def added(self, request: EngineRequest, seed: int, now: float) -> None:
        self._write(lambda: Added(now, request, seed))

    def ended(
        self,
        request_id: str,
        index: int | None,
        reason: FinishReason,
        error: str | None,
        now: float,
    ) -> None:
        self._write(lambda: Ended(now, request_id, index, reason, error))

    def cache_reset(self, now: float) -> None:
        self._write(lambda: CacheReset(now))

    def planned(self, plan: SchedulerOutput | None, now: float) -> None:
        if plan is None:
            self._write(lambda: NothingPlanned(now))
        else:
            self._write(
                lambda: Planned(
                    now, plan.step, plan_digest(plan), plan.slots, plan.num_scheduled_tokens
                )
            )
        self._flush()

    def finished(self, output: ModelRunnerOutput, now: float) -> None:
        self._write(
            lambda: Finished(
                now,
                output.step,
                output.token_ids,
                output.num_draft_tokens,
                output.errors,
                output_digest(output),
                self._tape.take(),
            )
        )

    def failed(self, error: str, now: float) -> None:
        self._write(lambda: Failed(now, error, self._tape.take()))

    def idle(self) -> None:
        self._flush()

    def close(self) -> None:
        self._stop("the engine was closed")

    def _write(self, event: Callable[[], Event]) -> None:
        """Total: whatever is wrong with an event ends the recording and nothing else."""
        if self._file is None:
            self._tape.take()
            return
        try:
            body = encode(event())
        except Exception as error:
            log.warning("recording ends: %s: %s", type(error).__name__, error)
            self._stop("an event could not be encoded")
            return
        if self._size + len(self._pending) + len(body) > self._limit - _LAST_FRAMES:
            log.warning("recording ends: %s has reached %d bytes", self._path, self._limit)
            self._stop("the file had reached its limit")
            return
        self._pending += self._frames.frame(body)

    def _flush(self) -> None:
        if self._file is None or not self._pending:
            return
        try:
            while self._pending:
                written = os.write(self._file, self._pending)
                del self._pending[:written]
                self._size += written
        except OSError as error:
            log.warning("recording ends: %s: %s", self._path, error.strerror)
            self._close()

    def _stop(self, reason: str) -> None:
        """With a last word, if it can be written."""
        if self._file is not None:
            self._pending += self._frames.frame(encode(Stopped(reason)))
            self._flush()
            self._close()

    def _close(self) -> None:
        self._pending.clear()
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _create(path: Path) -> int:
    """A new file that nobody else may read; what had its name is kept under another."""
    try:
        if path.is_file():
            path.replace(path.with_name(path.name + PREVIOUS))
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError("record", f"cannot be written: {path}: {error.strerror}") from None
