"""Run the tokenizer and chat template outside the event loop, in a limited number of threads and
processes."""

from __future__ import annotations

import asyncio
import copy
import logging
import secrets
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TypeVar

from kvik.core.sampling_params import SamplingParams
from kvik.errors import ModelError, Overflow, OverloadError, ParamError
from kvik.spec.model import ModelFacts
from kvik.text.answer_format import (
    AUTO,
    PLAIN_FORMAT,
    AnswerFormat,
    answer_format,
    check_tool_format,
)
from kvik.text.chat_template import ChatTemplate
from kvik.text.grammar_check import GrammarCheck
from kvik.text.infill import Infiller
from kvik.text.pooled_inputs import PooledInput
from kvik.text.tokenizer import Tokenizer

T = TypeVar("T")

log = logging.getLogger(__name__)

NO_TOKENIZER = "needs a tokenizer, and this model has none"


class FairSemaphore:
    """Limits how many tasks run at once; waiting tenants take turns.

    So a flood by one tenant delays another by at most one task. Within a tenant, tasks run in order
    of arrival.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def acquire(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a place and keep it until the block ends."""
        await self._take(tenant)
        try:
            yield
        finally:
            self._release()

    async def _take(self, tenant: str) -> None:
        if self._free:  # which implies that no task waits
            self._free -= 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # the place was granted in the meantime
                self._release()
            raise

    def _release(self) -> None:
        self._free += 1
        while self._free and self._waiting:
            tenant, places = self._waiting.popitem(last=False)
            place = places.popleft()
            if places:
                self._waiting[tenant] = places  # behind the other tenants
            if not place.done():  # else it was cancelled
                self._free -= 1
                place.set_result(None)


MAX_WAITING_CHARS = 128 << 20  # of all texts that wait for a thread or a template
MAX_TENANT_CHARS = 64 << 20  # the same for one tenant


class TextQuota:
    """Limits the number of waiting characters, per tenant and in total.

    A tenant with nothing waiting may add any number, so that no text is refused forever.
    """

    def __init__(self) -> None:
        self._reserved: dict[str, int] = {}

    @contextmanager
    def reserve(self, tenant: str, num_chars: int) -> Iterator[None]:
        """Count characters as waiting until the block ends. Raises OverloadError if too many are
        waiting already, of this tenant or in total."""
        of_tenant, of_all = self._reserved.get(tenant, 0), sum(self._reserved.values())
        if of_tenant and of_tenant + num_chars > MAX_TENANT_CHARS:
            raise OverloadError("queue", "too much text of this key waits", 1.0, of_caller=True)
        if of_all and of_all + num_chars > MAX_WAITING_CHARS:
            raise OverloadError(
                "queue", "too much text waits to be tokenised", 1.0, of_caller=False
            )
        self._reserved[tenant] = of_tenant + num_chars
        try:
            yield
        finally:
            self._reserved[tenant] -= num_chars
            if not self._reserved[tenant]:
                del self._reserved[tenant]


WORKERS = 2  # so that a slow rendering does not delay a short one


class Templates:
    """Renders conversations in threads, each with its own `ChatTemplate` and process.

    Args:
        make: makes a `ChatTemplate`. Templates are made when needed, and then kept.
        workers: maximum number of concurrent renderings.
    """

    def __init__(self, make: Callable[[], ChatTemplate], workers: int = WORKERS) -> None:
        self._make = make
        self._places = FairSemaphore(workers)
        self._threads = ThreadPoolExecutor(workers, "template")
        self._idle: list[ChatTemplate] = []
        self._live: set[ChatTemplate] = set()

    async def render(self, render: Callable[[ChatTemplate], str], tenant: str = "") -> str:
        """Return what a function renders with a template, and raise what it raises."""
        loop = asyncio.get_running_loop()
        async with self._places.acquire(tenant):
            template = self._idle.pop() if self._idle else self._make()
            self._live.add(template)
            try:
                return await loop.run_in_executor(self._threads, render, template)
            except asyncio.CancelledError:
                self._live.discard(template)
                template.close()
                raise
            finally:
                if template in self._live:
                    self._idle.append(template)

    async def close(self) -> None:
        for template in self._live:
            template.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


INLINE_CHARS = 2048  # tokenised in the event loop: waking a thread would take longer
THREADS = 2
# The longest vocabulary entries are runs of spaces or of one character, about 100 bytes long: a
# text has at least one token per this many bytes.
MAX_BYTES_PER_TOKEN = 128
# Typical text has 3 to 5 bytes per token. If a text is longer than this many characters per token
# of the context, its beginning is tokenised first.
PROBE_BYTES_PER_TOKEN = 8
# If the beginning of a text is cut off, the first tokens of the rest may differ from the whole
# text's tokens.
CUT_TOKENS = 64


class Texts:
    """The tokenizer and the chat template of the served model, for one tenant: see `of`.

    Args:
        tokenizer: None if the model has none; then prompts must be token ids.
        max_model_len: tokens of prompt and output together.
        tool_format: format of the model's tool calls, one of `TOOL_FORMATS`.
        model: facts about the served model; None: a model that answers conversations.

    Raises:
        ConfigError: the format is unknown, or the tokenizer lacks its markers.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        tool_format: str = AUTO,
        model: ModelFacts | None = None,
    ) -> None:
        self._model = model
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._threads = ThreadPoolExecutor(THREADS, "tokenize")
        self._places = FairSemaphore(THREADS)
        self._quota = TextQuota()
        self._templates: Templates | None = None
        self._grammars = None if tokenizer is None else GrammarCheck(tokenizer)
        self._checks = FairSemaphore(1)
        self._no_template = "this model has no tokenizer"
        if tokenizer is not None:
            source = (tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
            try:
                ChatTemplate(*source)
                self._templates = Templates(lambda: ChatTemplate(*source))
            except ModelError as error:
                self._no_template = str(error)
        if tokenizer is not None and tool_format == AUTO:
            # This renders probes while the engine loads.
            self._format = self._threads.submit(answer_format, tokenizer)
            self._format.add_done_callback(_tell_format)
        else:
            self._set_format(tool_format)
        self._tenant = ""

    @property
    def form(self) -> AnswerFormat:
        """The format of the model's answers."""
        return self._format.result()

    def with_format(self, tool_format: str) -> Texts:
        """Return a copy for another format of tool calls; "auto" keeps this one. Raises ConfigError
        as the constructor."""
        other = copy.copy(self)
        if tool_format != AUTO:
            other._set_format(tool_format)
        return other

    def _set_format(self, tool_format: str) -> None:
        check_tool_format(tool_format)
        self._format = Future()
        self._format.set_result(
            PLAIN_FORMAT if self.tokenizer is None else answer_format(self.tokenizer, tool_format)
        )

    def of(self, tenant: str) -> Texts:
        """Return a copy for another tenant; tenants share threads and processes fairly."""
        other = copy.copy(self)
        other._tenant = tenant
        return other

    async def encode(
        self, text: str, add_special_tokens: bool = True, keep: int | None = None
    ) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            keep: tokens to keep, from the end; None: all, and they must fit into the context.

        Raises:
            ParamError: `text` has certainly more tokens than the context, or there is no tokenizer.
            OverloadError: too much text waits already.
        """
        tokenizer = self._require_tokenizer("prompt")
        if len(text) <= INLINE_CHARS:
            ids = tokenizer.encode(text, add_special_tokens)
            return ids if keep is None else ids[-keep:]
        if keep is None and len(text) > self.max_model_len * MAX_BYTES_PER_TOKEN:
            raise self._too_long(len(text) // MAX_BYTES_PER_TOKEN)
        encode = self._encode if keep is None else partial(_encode_end, keep=keep)
        return await self._in_thread(len(text), encode, tokenizer, text, add_special_tokens)

    def _encode(self, tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        probe = self.max_model_len * PROBE_BYTES_PER_TOKEN
        if len(text) > probe:
            first = tokenizer.encode(text[:probe], add_special_tokens)
            if len(first) > self.max_model_len + 1:
                raise self._too_long(len(first) - 1)
        return tokenizer.encode(text, add_special_tokens)

    async def infill(
        self,
        prefix: str,
        suffix: str,
        params: SamplingParams,
        answer: str = "",
        files: Sequence[tuple[str, str]] = (),
        limit: int | None = None,
    ) -> tuple[list[int], SamplingParams, int]:
        """Return the token ids of the prompt for the gap between two texts, the parameters with the
        tokens that end its answer, and the number of files in the prompt; see `Infiller.ids`.

        Raises:
            ParamError: the texts have certainly more tokens than the context, the model has no
                tokens for insertion, or there is no tokenizer.
            OverloadError: too much text waits already.
        """
        tokenizer = self._require_tokenizer("prompt")
        num_chars = len(prefix) + len(suffix) + len(answer)
        if num_chars > self.max_model_len * MAX_BYTES_PER_TOKEN:
            raise self._too_long(num_chars // MAX_BYTES_PER_TOKEN)

        def make() -> tuple[list[int], SamplingParams, int]:
            infiller = Infiller(tokenizer)
            ids, num_files = infiller.ids(prefix, suffix, answer, files, limit)
            return ids, infiller.params(params), num_files

        num_chars += sum(len(name) + len(text) for name, text in files)
        return make() if num_chars <= INLINE_CHARS else await self._in_thread(num_chars, make)

    async def _in_thread(self, num_chars: int, work: Callable[..., T], *args: object) -> T:
        """Run work on this many characters of text, when it is the tenant's turn."""
        loop = asyncio.get_running_loop()
        with self._quota.reserve(self._tenant, num_chars):
            async with self._places.acquire(self._tenant):
                return await loop.run_in_executor(self._threads, work, *args)

    async def input(
        self, make: Callable[..., PooledInput], texts: Sequence[str], keep: int | None = None
    ) -> PooledInput:
        """Return the model's input for a text to embed, or for a pair of texts to score.

        Args:
            make: a function of `text.pooled_inputs` that takes the tokenizer and the texts.
            keep: number of tokens that `make` keeps; None: all, and they must fit into the context.

        Raises:
            ParamError: the texts have certainly more tokens than fit, or there is no tokenizer.
            OverloadError: too much text waits already.
        """
        tokenizer = self._require_tokenizer("input")
        longest = self.max_model_len * MAX_BYTES_PER_TOKEN
        if keep is not None:
            texts = [text[:longest] for text in texts]
        num_chars = sum(map(len, texts))
        if num_chars <= INLINE_CHARS:
            return make(tokenizer, *texts)
        if num_chars > longest and keep is None:
            raise self._too_long(num_chars // MAX_BYTES_PER_TOKEN)
        return await self._in_thread(num_chars, make, tokenizer, *texts)

    async def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Render the prompt of a conversation with the chat template, which adds the BOS token
        itself.

        Raises:
            ParamError: the messages are malformed, or the template refuses them, takes too long or
                fails; or the model has no template, or does not generate text.
            OverloadError: too much text waits already.
        """
        if self._model is not None and self._model.encoder:
            self._model.check_writes()
        if self._templates is None:
            raise ParamError("messages", f"cannot be rendered: {self._no_template}")
        num_chars = sum(len(str(message.get("content"))) for message in messages)
        shown_messages = [
            self.form.for_template(message) if message.get("tool_calls") else message
            for message in messages
        ]
        try:
            with self._quota.reserve(self._tenant, num_chars):
                return await self._templates.render(
                    lambda template: template.render(
                        shown_messages, add_generation_prompt, tools, variables
                    ),
                    self._tenant,
                )
        except ModelError as error:
            raise ParamError("messages", f"cannot be rendered: {error}") from None

    async def render_to_continue(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Render the prompt up to the end of the last message, which the model then continues.

        Trailing white space is removed, as many templates do anyway. A random mark locates the end:
        the message's last characters may also occur in what the template appends ("<" in
        "<|im_end|>").

        Raises:
            ParamError, OverloadError: see `render`; ParamError also if the template changes the
                message.
        """
        *before, last = messages
        content = str(last["content"]).rstrip()
        mark = secrets.token_hex(16)
        text = await self.render(
            [*before, {**last, "content": content + mark}],
            add_generation_prompt=False,
            tools=tools,
            variables=variables,
        )
        place = text.rfind(mark)
        if not content or place < 0:
            raise ParamError(
                "continue_final_message",
                "the chat template does not show the last message as it is",
            )
        return text[:place]

    async def checked(self, params: SamplingParams) -> tuple[SamplingParams, tuple[str, ...]]:
        """Check the constraint on the output; see `GrammarCheck.checked`.

        Raises:
            ParamError: the constraint cannot be used, or there is no tokenizer.
            OverloadError: too much text waits already.
        """
        constraint = params.structured
        if constraint is None:
            return params, ()
        if self._grammars is None:
            raise ParamError(constraint.name, NO_TOKENIZER)
        if self._grammars.knows(params):
            return self._grammars.checked(params)
        with self._quota.reserve(self._tenant, len(constraint.source)):
            async with self._checks.acquire(self._tenant):
                return await asyncio.to_thread(self._grammars.checked, params)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        if self.tokenizer is None:
            raise ParamError("tokens", NO_TOKENIZER)
        return self.tokenizer.decode(ids, skip_special_tokens)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._grammars is not None:
            self._grammars.close()
        if self._templates is not None:
            await self._templates.close()

    def _require_tokenizer(self, field: str) -> Tokenizer:
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


def _encode_end(tokenizer: Tokenizer, text: str, add_special_tokens: bool, keep: int) -> list[int]:
    """Return the last token ids of a text; tokenise no more of the text than they need."""
    for bytes_per_token in (PROBE_BYTES_PER_TOKEN, MAX_BYTES_PER_TOKEN):
        end = text[-(keep + CUT_TOKENS) * bytes_per_token :]
        ids = tokenizer.encode(end, add_special_tokens)
        if len(end) == len(text) or len(ids) >= keep + CUT_TOKENS:
            break
    return ids[-keep:]


def _tell_format(answer_format: Future[AnswerFormat]) -> None:
    if not answer_format.cancelled() and answer_format.exception() is None:
        log.info(
            "format of tool calls, by the chat template: %s", answer_format.result().tool_format
        )
