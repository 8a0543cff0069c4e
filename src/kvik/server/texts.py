"""Text to tokens and back beside the event loop: what is long is tokenised in threads, and a text
that no context can hold is refused before that."""

from __future__ import annotations

import asyncio
import copy
import secrets
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress

import msgspec

from kvik.engine.process import python_command
from kvik.errors import ModelError, Overflow, OverloadError, ParamError
from kvik.text.chat_template import ChatTemplate
from kvik.text.template_process import LENGTH_BYTES, Rendered, Rendering, TemplateSource, framed
from kvik.text.tokenizer import Tokenizer


class FairSemaphore:
    """Places for a piece of work each. Who waits for one gets it in the order of tenants, round and
    round, and within a tenant in the order of arrival."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        await self._take(tenant)
        try:
            yield
        finally:
            self._free += 1
            self._next()

    async def _take(self, tenant: str) -> None:
        if self._free:  # then nobody waits
            self._free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # it was given, and is not wanted
                self._free += 1
                self._next()
            raise

    def _next(self) -> None:
        """Give a free place to who is next."""
        while self._free and self._waiting:
            tenant, places = self._waiting.popitem(last=False)
            place = places.popleft()
            if places:
                self._waiting[tenant] = places  # behind the others
            if not place.done():  # nobody stopped waiting for it
                self._free -= 1
                place.set_result(None)


class TextQuota:
    """Bounds what all tenants, and each of them, hold at the same time, in characters.

    Who holds nothing may bring any number, so that nothing is refused for ever.
    """

    def __init__(self, most: int, most_of_tenant: int) -> None:
        self._most = most
        self._most_of_tenant = most_of_tenant
        self._held: dict[str, int] = {}

    @contextmanager
    def hold(self, tenant: str, num_chars: int) -> Iterator[None]:
        """
        Raises:
            OverloadError: too much is held already, by this tenant or by all.
        """
        mine, all_held = self._held.get(tenant, 0), sum(self._held.values())
        if mine and mine + num_chars > self._most_of_tenant:
            raise OverloadError("queue", "too much of your text waits", 1.0, own=True)
        if all_held and all_held + num_chars > self._most:
            raise OverloadError("queue", "too much text waits to be tokenised", 1.0, own=False)
        self._held[tenant] = mine + num_chars
        try:
            yield
        finally:
            self._held[tenant] -= num_chars
            if not self._held[tenant]:
                del self._held[tenant]


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


INLINE_CHARS = 2048  # tokenised at once: a thread would take longer to wake
THREADS = 2

# No text has fewer tokens than this says: the longest entries of a vocabulary are runs of spaces
# or of one sign, of some 100 bytes at most.
MAX_BYTES_PER_TOKEN = 128

# Usual text has 3 to 5 bytes a token. When more than this for each token of the context is given,
# its beginning tells whether the rest is worth reading.
PROBE_BYTES_PER_TOKEN = 8
MAX_WAITING_CHARS = 128 << 20  # of texts that wait for a thread or a template, all together
MAX_TENANT_CHARS = 64 << 20  # and those of one tenant


class Texts:
    """The tokenizer and the chat template of the served model, for one tenant: see `of`.

    Args:
        tokenizer: None if the model has none; prompts are token ids then.
        max_model_len: tokens that prompt and output may have together.
    """

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._threads = ThreadPoolExecutor(THREADS, "tokenize")
        self._encoding, self._rendering = FairSemaphore(THREADS), FairSemaphore(WORKERS)
        self._room = TextQuota(MAX_WAITING_CHARS, MAX_TENANT_CHARS)
        self._templates, self._no_template = _templates(tokenizer)
        self._tenant = ""

    def of(self, tenant: str) -> Texts:
        """The same, for the texts of this tenant: all tenants take turns."""
        other = copy.copy(self)
        other._tenant = tenant
        return other

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt.

        Raises:
            ParamError: `text` has certainly more tokens than the context, or there is no tokenizer.
            OverloadError: too much text waits already.
        """
        tokenizer = self._known("prompt")
        if len(text) <= INLINE_CHARS:
            return tokenizer.encode(text, add_special_tokens)
        if len(text) > self.max_model_len * MAX_BYTES_PER_TOKEN:
            raise self._too_long(len(text) // MAX_BYTES_PER_TOKEN)
        with self._room.hold(self._tenant, len(text)):
            async with self._encoding.turn(self._tenant):
                return await self._encode(tokenizer, text, add_special_tokens)

    async def _encode(self, tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        loop = asyncio.get_running_loop()
        probe = self.max_model_len * PROBE_BYTES_PER_TOKEN
        if len(text) > probe:
            first = await loop.run_in_executor(
                self._threads, tokenizer.encode, text[:probe], add_special_tokens
            )
            if len(first) > self.max_model_len + 1:
                raise self._too_long(len(first) - 1)
        return await loop.run_in_executor(self._threads, tokenizer.encode, text, add_special_tokens)

    async def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt that the chat template makes of a conversation.

        Raises:
            ParamError: the messages are malformed, the template refuses them, takes too long or
                fails; or the model has none.
            OverloadError: too much text waits already.
        """
        self._known("messages")
        if self._templates is None:
            raise ParamError("messages", f"cannot be rendered: {self._no_template}")
        num_chars = sum(len(str(message.get("content"))) for message in messages)
        with self._room.hold(self._tenant, num_chars):
            async with self._rendering.turn(self._tenant):
                return await self._templates.render(
                    messages,
                    add_generation_prompt=add_generation_prompt,
                    tools=tools,
                    variables=variables,
                )

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Token ids of a conversation. The template writes BOS itself."""
        text = await self.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables=variables,
        )
        return await self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._known("tokens").decode(ids, skip_special_tokens)

    @property
    def has_template(self) -> bool:
        return self._templates is not None

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._templates is not None:
            await self._templates.close()

    def _known(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ParamError(field, "must be token ids: this model has no tokenizer")
        return self.tokenizer

    def _too_long(self, at_least: int) -> ParamError:
        return ParamError(
            "prompt",
            f"has more than {at_least} tokens, which do not fit into the context of "
            f"{self.max_model_len} (max_model_len)",
            overflow=Overflow(self.max_model_len, at_least, counted=False),
        )


def _templates(tokenizer: Tokenizer | None) -> tuple[Templates | None, str]:
    """What renders conversations, or why nothing does."""
    if tokenizer is None:
        return None, "this model has no tokenizer"
    made = (tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    try:
        ChatTemplate(*made)
    except ModelError as error:
        return None, f"chat_template: {error.message}"
    return Templates(TemplateSource(*made)), ""


async def render_to_continue(
    texts: Texts,
    messages: Sequence[Mapping[str, object]],
    variables: Mapping[str, object] | None = None,
) -> str:
    """The text of a conversation to the end of its last message, without what the template writes
    behind that. White space at its end is left out, as many templates do anyway.

    The end is found by a mark that no message can hold: the last words themselves may well come
    again in what follows ("<" in "<|im_end|>").
    """
    *before, last = messages
    content = str(last["content"]).rstrip()
    mark = secrets.token_hex(16)
    text = await texts.render(
        [*before, {**last, "content": content + mark}],
        add_generation_prompt=False,
        variables=dict(variables or {}),
    )
    place = text.rfind(mark)
    if not content or place < 0:
        raise ParamError(
            "continue_final_message", "the chat template does not show the last message as it is"
        )
    return text[:place]
