"""The parts of one server around an engine client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvik.config.server_config import ServerConfig
from kvik.core.sampling_params import SamplingParams
from kvik.engine.client import EngineClient
from kvik.errors import ConfigError, ParamError, shown
from kvik.server.access import Keys
from kvik.server.admission import Admission
from kvik.server.errors import model_not_found
from kvik.server.generation import Generations, Observer
from kvik.server.stored_responses import ResponseStore
from kvik.server.texts import Texts


class Drain:
    """Counts responses in progress, so that a stopping server can wait for them."""

    def __init__(self) -> None:
        self.started = False  # True: no new requests
        self.reason = ""  # what the server does, once started
        self.num_open = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def start(self, reason: str = "is being stopped") -> None:
        self.started, self.reason = True, reason

    def stop(self) -> None:
        """Accept requests again."""
        self.started = False

    def enter(self) -> None:
        self.num_open += 1
        self._empty.clear()

    def leave(self) -> None:
        self.num_open -= 1
        if self.num_open == 0:
            self._empty.set()

    async def wait(self, seconds: float) -> bool:
        """Wait until no response is in progress; False: some still are after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Server:
    """The parts of one server."""

    config: ServerConfig  # as set by the operator
    model_names: tuple[str, ...]  # names of the model; responses use the first
    engine: EngineClient  # runs the requests; `engine.config` describes the model
    texts: Texts  # tokenizer and chat template
    generations: Generations  # starts requests and delivers their output
    admission: Admission  # limits of the queue
    # Sampling parameters of the model's authors, used where a request sets none.
    default_params: SamplingParams
    keys: Keys = field(default_factory=Keys)  # API keys of the callers
    # Whether the server is stopping, and the responses in progress.
    drain: Drain = field(default_factory=Drain)
    # Responses that requests can continue.
    stored: ResponseStore = field(default_factory=ResponseStore)
    started: int = 0  # in seconds since 1970

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def max_model_len(self) -> int:
        """Limit on the tokens of prompt and output together."""
        return self.engine.config.scheduler.max_model_len

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters, which are models to clients."""
        return tuple(adapter.name for adapter in self.engine.config.runner.adapters)

    async def load_adapter(self, name: str, path: str) -> None:
        """See `EngineClient.load_adapter`."""
        if name in self.model_names:
            raise ParamError("name", f"must be another one: {shown(name)} is the model itself")
        await self.engine.load_adapter(name, path)

    async def unload_adapter(self, name: str) -> None:
        """See `EngineClient.unload_adapter`.

        Raises:
            HttpError: 404, there is no such adapter.
        """
        if name not in self.adapters:
            raise model_not_found(name, self.adapters)
        await self.engine.unload_adapter(name)

    def served(self, model: str | None) -> tuple[str, SamplingParams]:
        """Return the model name for the response to a request that names `model`, and the
        parameters of a request that sets none.

        Raises:
            HttpError: 404, `model` is neither the served one nor an adapter.
        """
        if model in self.adapters:
            return model, self.default_params.with_changes(adapter=model)
        if model and model not in self.model_names and not self.config.any_model_name:
            raise model_not_found(model, (*self.model_names, *self.adapters))
        name = model if model and self.config.any_model_name else self.model_name
        return name, self.default_params


def assemble(
    config: ServerConfig,
    engine: EngineClient,
    texts: Texts,
    default_params: SamplingParams,
    keys: Keys,
    model_names: Sequence[str],
    observers: Sequence[Observer] = (),
) -> Server:
    """Build a server. Its engine is started by `engine.start(server.generations.take)`."""
    scheduler = engine.config.scheduler
    for adapter in engine.config.runner.adapters:
        if adapter.name in model_names:
            raise ConfigError("adapters", f"{shown(adapter.name)} is a name of the model itself")
    admission = Admission(
        scheduler.max_queued_requests,
        scheduler.max_queued_tokens,
        shared=keys.needed,
        clock=time.monotonic,
    )
    return Server(
        config=config,
        model_names=tuple(model_names),
        engine=engine,
        texts=texts,
        generations=Generations(engine, texts, admission, observers, config),
        admission=admission,
        default_params=default_params,
        keys=keys,
        stored=ResponseStore(config.stored_response_bytes),
        started=int(time.time()),
    )


def model_names(config: ServerConfig, model: str, path: Path) -> tuple[str, ...]:
    """Return the names of the model: the operator's, else its hub id, folder or file name.

    Args:
        model: as given by the operator; "" is the bundled model.
        path: of the model's files.
    """
    if config.served_model_name:
        return tuple(dict.fromkeys(config.served_model_name))
    if model and not Path(model).expanduser().exists():
        return (model,)
    return (path.stem if path.is_file() else path.name,)
