"""Reading the head of a file forwards: every length is checked before it is believed."""

from __future__ import annotations

import struct
from io import FileIO

from kvik.config.errors import ModelError
from kvik.config.fields import shown

MAX_HEAD_BYTES = 128 << 20  # vocabularies of half a million tokens take about 20 MB
CHUNK_BYTES = 1 << 20  # read at least at once
_LENGTH = struct.Struct("<Q")


class Cursor:
    """A place in a file of which no more is read than what is asked for, and a little ahead.

    Attributes:
        data: the file's bytes from its start, as far as they were read.
        at: the next byte.
    """

    def __init__(self, file: FileIO, name: str, size: int) -> None:
        """
        Args:
            name: of the file, for errors.
            size: of the file in bytes.
        """
        self._file = file
        self._name = name
        self._size = size
        self.data = bytearray()
        self.at = 0

    @property
    def left(self) -> int:
        """Bytes from here to the end of the file."""
        return self._size - self.at

    def error(self, what: str, message: str) -> ModelError:
        return ModelError(self._name, f"{what} {message}")

    def need(self, count: int, what: str) -> int:
        """See to it that the next `count` bytes are in `data`; their place there.

        Raises:
            ModelError: the file ends before, or it is too large a head.
        """
        if count > self.left:
            raise self.error(what, f"must have {count} more bytes, the file has {self.left}")
        end = self.at + count
        if end > MAX_HEAD_BYTES:
            raise self.error(what, f"must lie in the first {MAX_HEAD_BYTES >> 20} MiB of the file")
        while len(self.data) < end:
            ahead = max(end - len(self.data), min(CHUNK_BYTES, self._size - len(self.data)))
            piece = self._file.read(ahead)
            if not piece:
                raise self.error(what, "is cut off: the file has become shorter")
            self.data += piece
        return self.at

    def take(self, layout: struct.Struct, what: str) -> int | float:
        """One number."""
        place = self.need(layout.size, what)
        self.at += layout.size
        value: int | float = layout.unpack_from(self.data, place)[0]
        return value

    def whole(self, layout: struct.Struct, what: str) -> int:
        """One integer."""
        return int(self.take(layout, what))

    def name(self, what: str, most: int) -> str:
        """A string of 1 to `most` bytes."""
        text = self.string(what, most)
        if not text:
            raise self.error(what, "must not be empty")
        return text

    def string(self, what: str, most: int | None = None) -> str:
        """A length and as many bytes of UTF-8, at most `most`."""
        length = self.whole(_LENGTH, what)
        if most is not None and length > most:
            raise self.error(what, f"must have at most {most} bytes, not {length}")
        place = self.need(length, what)
        self.at += length
        try:
            return self.data[place : place + length].decode()
        except UnicodeDecodeError:
            raw = bytes(self.data[place : place + min(length, 60)])
            raise self.error(what, f"must be valid UTF-8, not {shown(raw)}") from None

    def skip_strings(self, count: int, what: str) -> None:
        """Go past `count` strings without decoding them."""
        unpack, data, at = _LENGTH.unpack_from, self.data, self.at
        for index in range(count):
            if at + 8 > len(data):
                self.at = at
                self.need(8, f"{what}[{index}]")
            (length,) = unpack(data, at)
            at += 8 + length
            if at > len(data):
                self.at = at - length
                self.need(length, f"{what}[{index}]")
        self.at = at
