"""Generations over an engine without a model, to test the code around them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from helpers.served_engine import FakeExecutor, ServedEngine, engine_in_thread
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from kvik.config.server_config import ServerConfig
from kvik.core.sampling_params import SamplingParams
from kvik.engine.output import RequestOutput, TextDelta
from kvik.engine.remote import EngineState
from kvik.server.admission import Admission
from kvik.server.generation import (
    Generation,
    GenerationRecord,
    GenerationRequest,
    Generations,
    Observer,
    wait_for_change,
)
from kvik.server.texts import Texts
from kvik.text.tokenizer import Tokenizer

DEFAULTS = ServerConfig()
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789."  # token id -> letter


def letters(template: str | None = None) -> Tokenizer:
    """Return a tokenizer with one token per letter of `LETTERS`, and this chat template."""
    library = Library(models.BPE(vocab={c: i for i, c in enumerate(LETTERS)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return Tokenizer(library, chat_template=template)


@dataclass
class Watcher(Observer):
    """An observer that records its calls."""

    arrived_ids: list[str] = field(default_factory=list)
    ended: dict[str, str] = field(default_factory=dict)  # id -> reason
    tokens: dict[str, int] = field(default_factory=dict)
    refusals: list[tuple[str, str]] = field(default_factory=list)

    def arrived(self, life: GenerationRecord) -> None:
        self.arrived_ids.append(life.request_id)

    def delivered(self, life: GenerationRecord, index: int, num_tokens: int, now: float) -> None:
        self.tokens[life.request_id] = self.tokens.get(life.request_id, 0) + num_tokens

    def finished(self, life: GenerationRecord, output: RequestOutput | None, reason: str) -> None:
        assert life.request_id not in self.ended, "it ended twice"
        self.ended[life.request_id] = reason

    def refused(self, tenant: str, reason: str) -> None:
        self.refusals.append((tenant, reason))


@dataclass
class Generating:
    engine: ServedEngine
    generations: Generations
    admission: Admission
    watcher: Watcher
    texts: Texts

    async def start(
        self, request: GenerationRequest, tenant: str = "", *, streaming: bool = False
    ) -> Generation:
        (generation,) = await self.generations.start_all([request], tenant, streaming=streaming)
        return generation

    async def start_all(
        self, requests: list[GenerationRequest], *, streaming: bool = False
    ) -> list[Generation]:
        return await self.generations.start_all(requests, "", streaming=streaming)

    async def at_rest(self) -> None:
        """Wait until no request and no resource is left in the engine and in front of it."""
        await self.engine.at_rest()
        assert not self.generations.live
        assert (self.admission.num_waiting, self.admission.waiting_tokens) == (0, 0)
        assert self.watcher.ended.keys() == set(self.watcher.arrived_ids)


@asynccontextmanager
async def generating(
    executor: FakeExecutor | None = None,
    *,
    config: ServerConfig = DEFAULTS,
    max_requests: int = 64,
    max_tokens: int = 4096,
    **scheduler: Any,
) -> AsyncIterator[Generating]:
    """Provide generations, and check at the end that all resources are freed, unless the engine was
    closed.

    Args:
        scheduler: fields of `SchedulerConfig`.
    """
    async with engine_in_thread(None, executor or FakeExecutor(), **scheduler) as engine:
        texts = Texts(letters(), engine.client.config.scheduler.max_model_len)
        admission = Admission(max_requests, max_tokens, shared=False, clock=time.monotonic)
        watcher = Watcher()
        generations = Generations(engine.client, texts, admission, [watcher], config)
        engine.client.start(generations.take)
        await engine.ready()
        try:
            made = Generating(engine, generations, admission, watcher, texts)
            yield made
            if engine.client.state is not EngineState.CLOSED:
                await made.at_rest()
        finally:
            await texts.close()


async def pieces_of(generation: Generation) -> AsyncIterator[list[TextDelta]]:
    """Yield the output as it comes, until the generation ends."""
    while not generation.ended or generation._pending:
        if deltas := generation.take():
            yield deltas
        else:
            await wait_for_change(generation)
    if generation.failure is not None:
        raise generation.failure


async def output_of(generation: Generation) -> RequestOutput:
    """Wait for the whole result."""
    while not generation.ended:
        await wait_for_change(generation)
    if generation.failure is not None:
        raise generation.failure
    return generation.result


def request(prompt: str | list[int] = "AB", **params: Any) -> GenerationRequest:
    """Return a request; `params` are fields of it or of its sampling parameters."""
    own = {name: params.pop(name) for name in list(params) if name in _OWN}
    return GenerationRequest(ids_of(prompt), SamplingParams(**{"max_tokens": 8, **params}), **own)


def ids_of(prompt: str | list[int]) -> list[int]:
    return [LETTERS.index(letter) if isinstance(letter, str) else letter for letter in prompt]


_OWN = ("priority", "cache_salt", "deadline_ms", "pins", "pooling")
