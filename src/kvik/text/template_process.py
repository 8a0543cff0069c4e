"""Chat templates in a process that can be killed: `python -m kvik.text.template_process`.

A template is an untrusted program. Its sandbox bounds its work, and this process bounds the rest:
the parent kills it when an answer takes too long, and the system refuses it more memory. It reads
frames from stdin, a length in 4 bytes and msgpack: the template first, then renderings, each of
which is answered on stdout. It ends at the end of stdin.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO

import msgspec

from kvik.errors import KvikError
from kvik.text.chat_template import ChatTemplate

LENGTH_BYTES = 4
MAX_MEMORY = 1 << 30


class TemplateSource(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of `ChatTemplate`."""

    source: str | None
    bos_token: str | None
    eos_token: str | None


class Rendering(msgspec.Struct, frozen=True, array_like=True):
    """The arguments of `ChatTemplate.render`."""

    messages: Sequence[Mapping[str, object]]
    add_generation_prompt: bool = True
    tools: Sequence[Mapping[str, object]] | None = None
    variables: Mapping[str, object] | None = None


class Rendered(msgspec.Struct, frozen=True, array_like=True):
    """The text, or which field is wrong and why."""

    text: str = ""
    field: str = ""
    error: str = ""


def framed(message: object) -> bytes:
    """Encode a message as a frame."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def read_frame(stream: BinaryIO) -> bytes | None:
    """Read the body of the next frame; None at the end."""
    size = stream.read(LENGTH_BYTES)
    if len(size) < LENGTH_BYTES:
        return None
    return stream.read(int.from_bytes(size, "big"))


def answer(template: ChatTemplate, data: bytes) -> Rendered:
    try:
        asked = msgspec.msgpack.decode(data, type=Rendering)
        text = template.render(
            asked.messages, asked.add_generation_prompt, asked.tools, asked.variables
        )
        return Rendered(text)
    except KvikError as error:
        return Rendered(field=error.field, error=error.message)
    except (MemoryError, RecursionError, msgspec.DecodeError) as error:
        kind = type(error).__name__
        return Rendered(field="messages", error=f"the chat template fails on them: {kind}")


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    with suppress(ValueError, OSError):  # not every system limits it
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    frames, answers = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(frames)
    if first is None:
        return 0
    made = msgspec.msgpack.decode(first, type=TemplateSource)
    template = ChatTemplate(made.source, made.bos_token, made.eos_token)
    while (data := read_frame(frames)) is not None:
        try:
            reply = framed(answer(template, data))
        except UnicodeEncodeError:  # half a surrogate pair, which is no valid text
            reply = framed(Rendered(field="messages", error="must be valid Unicode"))
        answers.write(reply)
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
