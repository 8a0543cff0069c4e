"""Text to tokens and back beside the event loop: what is long is tokenised in threads, and a text
that no context can hold is refused before that."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from kvik.config.errors import ModelError, Overflow, ParamError
from kvik.server.templates import WORKERS, Templates
from kvik.server.turns import Room, Turns
from kvik.text.chat_template import ChatTemplate
from kvik.text.template_process import TemplateSource
from kvik.text.tokenizer import Tokenizer

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
        self._encoding, self._rendering = Turns(THREADS), Turns(WORKERS)
        self._room = Room(MAX_WAITING_CHARS, MAX_TENANT_CHARS)
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
