"""A server with scripted answers that records when it wrote which bytes.

It uses the client's clock (`time.monotonic` is the same for all processes), so that a test can
compare the client's figures with the real times, however busy the machine is.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

DONE = b"data: [DONE]\n\n"


@dataclass
class Reply:
    """A scripted reply: bytes are written, numbers are seconds to wait."""

    steps: Sequence[float | bytes] = ()
    status: int = 200
    content_type: str = "text/event-stream"
    close: bool = False  # close the connection without ending the body


@dataclass
class Received:
    """A request, with the times of its arrival and of the writes of its answer."""

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes
    arrived: float
    connection: int
    written: list[float] = field(default_factory=list)

    @property
    def body(self) -> dict:
        return json.loads(self.raw)


class FakeServer:
    """Serves in its own thread. `reply` is called with each request."""

    def __init__(self, reply: Callable[[Received], Reply]) -> None:
        self._reply = reply
        self.requests: list[Received] = []
        self.connections = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.url = ""

    def __enter__(self) -> FakeServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def stop(self) -> None:
        """Close all connections and take no more."""
        with suppress(RuntimeError):  # it has stopped
            self._loop.call_soon_threadsafe(self._stopped.set)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self.serve())
        self._loop.close()

    async def serve(self, port: int = 0) -> None:
        self._stopped = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stopped.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        self.connections += 1
        number = self.connections
        try:
            while await self._serve_one(reader, writer, number):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client closed the connection, or the test has ended
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve_one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int
    ) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, path, _ = head[0].split(" ")
        pairs = (line.partition(":") for line in head[1:] if line)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        raw = await reader.readexactly(int(headers.get("content-length", "0")))
        request = Received(method, path, headers, raw, time.monotonic(), connection)
        self.requests.append(request)
        reply = self._reply(request)
        writer.write(
            f"HTTP/1.1 {reply.status} Status\r\nContent-Type: {reply.content_type}\r\n"
            "Transfer-Encoding: chunked\r\n\r\n".encode()
        )
        for step in reply.steps:
            if isinstance(step, bytes):
                request.written.append(time.monotonic())
                writer.write(b"%x\r\n%s\r\n" % (len(step), step))
                await writer.drain()
            else:
                await asyncio.sleep(step)
        if reply.close:
            return False
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str, finish: str | None = None, **fields: object) -> bytes:
    """Return a chunk of /v1/completions."""
    return event(choices=[{"index": 0, "text": piece, "finish_reason": finish}], **fields)


def delta(content: str | None = None, finish: str | None = None, **others: object) -> bytes:
    """Return a chunk of /v1/chat/completions."""
    return event(
        choices=[{"index": 0, "delta": {"content": content, **others}, "finish_reason": finish}]
    )


def usage(prompt_tokens: int, completion_tokens: int, **details: object) -> dict:
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, **details}


def stream(tokens: int, first: float = 0.0, gap: float = 0.0, prompt_tokens: int = 7) -> Reply:
    """Return an ordinary answer of /v1/completions: one chunk per token, then the usage."""
    steps: list[float | bytes] = []
    for i in range(tokens):
        wait = first if i == 0 else gap
        if wait:
            steps.append(wait)
        steps.append(text(f" t{i}", "length" if i == tokens - 1 else None))
    end = event(choices=[], usage=usage(prompt_tokens, tokens)) + DONE
    return Reply([*steps, end])


def models(request: Received) -> Reply | None:
    """Return the reply to /v1/models; None for other requests."""
    if request.path != "/v1/models":
        return None
    return Reply([b'{"data": [{"id": "fake"}]}'], content_type="application/json")
