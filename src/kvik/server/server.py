"""One server: its parts around an engine client, and whether it still takes requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvik.config.server_config import ServerConfig
from kvik.core.sampling_params import SamplingParams
from kvik.engine.client import AsyncEngineClient
from kvik.server.admission import Admission, Degradation
from kvik.server.errors import model_not_found
from kvik.server.generation import Generations, RequestLimits
from kvik.server.keys import Keys
from kvik.server.observer import Observer, Observers
from kvik.server.texts import Texts


class Drain:
    """Counts answers under way, so that the end of a server can wait for them."""

    def __init__(self) -> None:
        self.started = False  # no new work: the server is being stopped
        self.num_open = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def start(self) -> None:
        self.started = True

    def stop(self) -> None:
        """Take requests again."""
        self.started = False

    def enter(self) -> None:
        self.num_open += 1
        self._empty.clear()

    def leave(self) -> None:
        self.num_open -= 1
        if self.num_open == 0:
            self._empty.set()

    async def wait(self, seconds: float) -> bool:
        """Until nothing is under way; False: some still is after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Server:
    """One server.

    Attributes:
        config: what the operator asked for.
        model_names: what clients may call the model; answers use the first.
        engine: where requests are run; `engine.config` has the facts of the model.
        texts: tokenizer and chat template.
        generations: starts requests, and hands out what they bring.
        admission: decides whether there is room for one more.
        observer: is told of everything that happens to requests.
        default_params: what the model's authors advise; a request's own parameters go before.
        keys: who may call.
        drain: whether the server is being stopped.
        started: when, in seconds since 1970.
    """

    config: ServerConfig
    model_names: tuple[str, ...]
    engine: AsyncEngineClient
    texts: Texts
    generations: Generations
    admission: Admission
    observer: Observer
    default_params: SamplingParams
    keys: Keys = field(default_factory=Keys)
    drain: Drain = field(default_factory=Drain)
    started: int = 0

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    def check_model(self, model: str | None) -> None:
        """Raise `HttpError` 404 if a request names another model than the served one."""
        if model and model not in self.model_names:
            raise model_not_found(model)


def assemble(
    config: ServerConfig,
    engine: AsyncEngineClient,
    texts: Texts,
    default_params: SamplingParams,
    keys: Keys,
    model_names: Sequence[str],
    observers: Sequence[Observer] = (),
) -> Server:
    """The engine is not started: that is `engine.start(server.generations.take)`."""
    scheduler = engine.config.scheduler
    admission = Admission(
        scheduler.max_queued_requests,
        scheduler.max_queued_tokens,
        shared=keys.needed,
        clock=time.monotonic,
    )
    observer = Observers(observers)
    limits = RequestLimits(
        config.request_timeout,
        config.share_prefix_cache,
        Degradation(config.pressure_max_tokens),
    )
    return Server(
        config=config,
        model_names=tuple(model_names),
        engine=engine,
        texts=texts,
        generations=Generations(engine, texts, admission, observer, limits),
        admission=admission,
        observer=observer,
        default_params=default_params,
        keys=keys,
        started=int(time.time()),
    )


def model_names(config: ServerConfig, model: str, path: Path) -> tuple[str, ...]:
    """What clients call the model: what the operator says, else its hub id, or the name of its
    folder or file.

    Args:
        model: as it was asked for; "" is the bundled one.
        path: where it lies.
    """
    if config.served_model_name:
        return tuple(dict.fromkeys(config.served_model_name))
    if model and not Path(model).expanduser().exists():
        return (model,)
    return (path.stem if path.is_file() else path.name,)
