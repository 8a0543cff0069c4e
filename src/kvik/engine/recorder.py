"""The flight recorder: writes all that determines the engine's behaviour to a file for replay.

The core is a function of its inputs and their times, the worker a function of the plans and its
clock's readings. So these are recorded, with a digest of each plan and the tokens of each step. The
file contains the token ids of prompts and outputs, which reveal their text.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import msgspec

from kvik.config.config import ResolvedConfig
from kvik.core.plan import ModelRunnerOutput, Moved, SchedulerOutput
from kvik.core.types import EngineRequest, FinishReason
from kvik.engine.loop import LoopObserver
from kvik.engine.wire import MAX_FRAME, encode
from kvik.errors import KvikError
from kvik.files import can_write
from kvik.spec.adapters import Adapter
from kvik.version import __version__

# The format of the file: a line of text, then frames: 4 bytes length, 4 bytes checksum, and an
# event in msgpack. Each checksum continues the one before it, so that changed, lost or moved frames
# are found. A crash may cut off the last frame.

MAGIC = b"kvik flight recording, format 1\n"
_HEAD = struct.Struct("<II")


class RecordError(KvikError):
    """The file is not a recording, or was changed."""


class Header(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The first event of a recording."""

    version: str  # of kvik
    # All decisions that the engine was started with, and the facts of the model.
    config: ResolvedConfig
    readings: list[float]  # of the worker's clock while it started


class Added(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A request arrived. `seed`: of its first completion."""

    now: float
    request: EngineRequest
    seed: int


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A request was ended from outside."""

    now: float
    request_id: str
    index: int | None
    reason: FinishReason
    error: str | None


class HandedOver(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """A request was handed over to another engine, if possible."""

    now: float
    request_id: str


class CacheReset(msgspec.Struct, frozen=True, array_like=True, tag=3):
    now: float


class GaveBack(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The memory of up to `count` unused blocks was given back."""

    now: float
    count: int


class AdapterChanged(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """An adapter was loaded into a slot; None: it was unloaded."""

    name: str
    adapter: Adapter | None
    slot: int


class Planned(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A step was planned."""

    now: float
    step: int
    digest: bytes  # of the whole plan, including what follows
    slots: list[int]  # [rows], to show where a plan differs
    num_scheduled_tokens: list[int]  # likewise


class NothingPlanned(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The core had nothing to plan; deadlines may have passed."""

    now: float


class Finished(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The oldest plan in flight was computed."""

    now: float
    step: int
    token_ids: list[list[int]]  # see `ModelRunnerOutput`
    num_draft_tokens: list[int] | None  # likewise
    errors: dict[int, str]  # likewise
    digest: bytes  # of log probabilities and vectors; empty if there were none
    readings: list[float]  # of the worker's clock, in order
    moved: Moved | None = None  # see `ModelRunnerOutput`


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The oldest plan in flight could not be computed."""

    now: float
    error: str
    readings: list[float]


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The last event; absent if the engine died."""

    reason: str


Event = (
    Added
    | Ended
    | HandedOver
    | CacheReset
    | GaveBack
    | AdapterChanged
    | Planned
    | NothingPlanned
    | Finished
    | Failed
    | Stopped
)

_decode_header = msgspec.msgpack.Decoder(Header).decode
_decode_event = msgspec.msgpack.Decoder(Event).decode


class FrameWriter:
    """Makes frames of bodies, in the order in which they are written."""

    def __init__(self) -> None:
        self._checksum = crc32(MAGIC)

    def frame(self, body: bytes) -> bytes:
        self._checksum = crc32(body, self._checksum)
        return _HEAD.pack(len(body), self._checksum) + body


class RecordReader:
    """Reads a recording from its beginning."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        """Read the head of the file.

        Raises:
            RecordError: it is not a recording that can be replayed.
        """
        self._file, self._name = file, name
        self.cut = 0  # bytes of an incomplete last frame that were skipped, once all is read
        if file.read(len(MAGIC)) != MAGIC:
            raise RecordError(
                "recording", f"{name} is not a recording, or is one of another version of kvik"
            )
        self._at, self._checksum = len(MAGIC), crc32(MAGIC)
        body = self._frame()
        if body is None:
            raise RecordError("recording", f"{name} ends before anything happened")
        try:
            self.header = _decode_header(body)
        except (msgspec.DecodeError, ValueError) as error:
            raise self._damaged(f"it was made by another version of kvik ({error})") from None

    def events(self) -> Iterator[Event]:
        """Yield the events after the header, up to where the file was cut off.

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

    def _damaged(self, reason: str) -> RecordError:
        return RecordError("recording", f"{self._name} is damaged at byte {self._at}: {reason}")


def open_recording(path: Path) -> BinaryIO:
    """Open the file of a recording; raises `RecordError` if it cannot be read."""
    try:
        return path.open("rb")
    except OSError as error:
        raise RecordError("recording", f"{path} cannot be read: {error.strerror}") from None


log = logging.getLogger(__name__)

DEFAULT_LIMIT = 1 << 30  # bytes
PREVIOUS = ".previous"  # suffix of the previous recording's name
_LAST_FRAMES = 256  # bytes reserved for `Stopped`


def plan_digest(plan: SchedulerOutput) -> bytes:
    """Return a digest that is the same for equal plans in any process.

    Sets in them are built from the same integers in the same way, so they have the same order.
    """
    return blake2b(encode(plan), digest_size=8).digest()


def output_digest(output: ModelRunnerOutput) -> bytes:
    """Return a digest of log probabilities and vectors; empty if there are none."""
    if not output.logprobs and not output.prompt_logprobs and not output.embeddings:
        return b""
    content = (output.logprobs, output.prompt_logprobs, output.embeddings)
    return blake2b(encode(content), digest_size=8).digest()


class ClockTape:
    """A clock that keeps its readings until they are taken."""

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
    """Writes what it observes. If that fails, because the disk is full, the file was deleted or has
    reached its limit, it logs a warning once and the engine continues without it.

    A plan is written before it is computed, so that a step which kills the process is the last one
    in the file. An existing file is renamed, and replaces the one renamed before.
    """

    def __init__(
        self, path: Path, config: ResolvedConfig, tape: ClockTape, limit: int = DEFAULT_LIMIT
    ) -> None:
        """Begin the file.

        Args:
            tape: the clock of the worker, which was already built with it.
            limit: bytes of the file, after which recording ends.
        """
        self._path, self._tape, self._limit = path, tape, limit
        self._frames = FrameWriter()
        self._pending = bytearray(MAGIC)
        self._size = 0  # bytes written
        self._file: int | None = None
        try:
            self._file = _create(path)
        except OSError as error:  # an engine that starts again must not fail for its recording
            log.warning("there is no recording: %s: %s", path, error.strerror)
        self._pending += self._frames.frame(encode(Header(__version__, config, tape.take())))
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

    def handed_over(self, request_id: str, now: float) -> None:
        self._write(lambda: HandedOver(now, request_id))

    def cache_reset(self, now: float) -> None:
        self._write(lambda: CacheReset(now))

    def gave_back(self, count: int, now: float) -> None:
        self._write(lambda: GaveBack(now, count))

    def adapter_changed(self, name: str, adapter: Adapter | None, slot: int) -> None:
        self._write(lambda: AdapterChanged(name, adapter, slot))

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
                output.moved,
            )
        )

    def failed(self, error: str, now: float) -> None:
        self._write(lambda: Failed(now, error, self._tape.take()))

    def idle(self) -> None:
        self._flush()

    def _write(self, event: Callable[[], Event]) -> None:
        """Write an event. An error ends only the recording."""
        if self._file is None:
            self._tape.take()
            return
        try:
            body = encode(event())
        except Exception as error:
            log.warning("recording ends: %s: %s", type(error).__name__, error)
            self.close("an event could not be encoded")
            return
        if self._size + len(self._pending) + len(body) > self._limit - _LAST_FRAMES:
            log.warning("recording ends: %s has reached %d bytes", self._path, self._limit)
            self.close("the file had reached its limit")
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
            if not os.fstat(self._file).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "the file was deleted")
        except OSError as error:
            log.warning("recording ends: %s: %s", self._path, error.strerror)
            self._close()

    def close(self, reason: str) -> None:
        """End the recording with `Stopped`, if that can be written."""
        if self._file is not None:
            self._pending += self._frames.frame(encode(Stopped(reason)))
            self._flush()
            self._close()

    def _close(self) -> None:
        self._pending.clear()
        if self._file is not None:
            os.close(self._file)
            self._file = None


def can_record(path: Path) -> bool:
    """Return whether a recording can begin there: in a new file, or in place of an older one."""
    return can_write(path) and (path.is_file() or not os.path.lexists(path))


def _create(path: Path) -> int:
    """Create a file that only its owner may read; an existing one is renamed."""
    if path.is_file():
        path.replace(path.with_name(path.name + PREVIOUS))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
