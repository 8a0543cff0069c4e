"""The chat template of the model, rendered by processes that are killed when they take too long."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from kvik.config.errors import ParamError
from kvik.engine.child import python_command
from kvik.text.template_process import (
    LENGTH_BYTES,
    Rendered,
    Rendering,
    TemplateSource,
    framed,
)

COMMAND = python_command("kvik.text.template_process")
WORKERS = 2  # so that a rendering that takes long holds up no short one
SECONDS = 3.0  # for one rendering
MAX_TEXT = 64 << 20  # bytes that a rendering may answer


class Templates:
    """Renders conversations. Processes start when they are needed and stay.

    Args:
        source: of the template; `ChatTemplate` has accepted it.
        seconds: that a rendering may take.
        command: what is started, for tests.
    """

    def __init__(
        self,
        source: TemplateSource,
        *,
        workers: int = WORKERS,
        seconds: float = SECONDS,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._source = source
        self._seconds = seconds
        self._command = command
        self._idle: asyncio.LifoQueue[_Worker | None] = asyncio.LifoQueue()
        for _ in range(workers):
            self._idle.put_nowait(None)
        self._live: set[_Worker] = set()

    async def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """As `ChatTemplate.render`.

        Raises:
            ParamError: also when it takes too long or too much memory.
        """
        try:
            frame = framed(Rendering(messages, add_generation_prompt, tools, variables))
        except (RecursionError, UnicodeEncodeError, TypeError, OverflowError):
            raise ParamError("messages", "must be JSON values of valid Unicode") from None
        worker = await self._idle.get()
        try:
            while True:
                fresh = worker is None
                worker = worker or await self._start()
                try:
                    rendered = await asyncio.wait_for(worker.ask(frame), self._seconds)
                    break
                except (EOFError, OSError) as error:
                    if fresh or isinstance(error, TimeoutError):
                        raise
                    await self._kill(worker)  # it may have died while it was idle
                    worker = None
        except BaseException as error:  # cancelled, too: its answer would be read as the next one's
            if worker is not None:
                await self._kill(worker)
            worker = None
            if isinstance(error, TimeoutError):
                reason = f"rendering them takes more than {self._seconds:g} seconds"
                raise ParamError("messages", reason) from None
            if isinstance(error, (EOFError, OSError, msgspec.DecodeError)):
                raise ParamError("messages", "the chat template fails on them") from None
            raise
        finally:
            self._idle.put_nowait(worker)
        if rendered.error:
            raise ParamError(rendered.field, rendered.error)
        return rendered.text

    async def close(self) -> None:
        for worker in list(self._live):
            await self._kill(worker)

    async def _start(self) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
            start_new_session=True,
        )
        worker = _Worker(process)
        self._live.add(worker)
        worker.write(framed(self._source))
        return worker

    async def _kill(self, worker: _Worker) -> None:
        self._live.discard(worker)
        await worker.kill()


class _Worker:
    """One process, asked one thing at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout

    def write(self, frame: bytes) -> None:
        self._stdin.write(frame)

    async def ask(self, frame: bytes) -> Rendered:
        """Raises EOFError or OSError when the process has ended."""
        if self._stdin.is_closing():  # some event loops raise RuntimeError on a write to it
            raise EOFError
        self._stdin.write(frame)
        await self._stdin.drain()
        size = int.from_bytes(await self._stdout.readexactly(LENGTH_BYTES), "big")
        if size > MAX_TEXT:
            raise EOFError
        return msgspec.msgpack.decode(await self._stdout.readexactly(size), type=Rendered)

    async def kill(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
        self._stdin.close()
        await self._process.wait()
