"""A server of the story model in this process, with routes chosen by the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from helpers.http_server import HttpServer, http_server
from helpers.served_engine import ServedEngine, bundled, make_engine

from kvik.config.server_config import ServerConfig
from kvik.model_files import model_files
from kvik.server.access import Keys
from kvik.server.app import all_routes, make_app
from kvik.server.generation import Observer
from kvik.server.metrics import RequestMetricsObserver
from kvik.server.route import Route
from kvik.server.server import Server, assemble
from kvik.server.texts import Texts

NAMES = ("stories", "org/stories")
MAX_MODEL_LEN = 512
NO_KEYS = Keys()


def every_route(parts: Server) -> list[Route]:
    return all_routes(parts, RequestMetricsObserver())


@dataclass
class Site:
    """A server, its engine and its parts."""

    server: HttpServer
    engine: ServedEngine
    parts: Server

    @property
    def url(self) -> str:
        return self.server.url

    def at_rest(self) -> None:
        """Wait until no request, slot or block is in use."""
        self.server.call(self.engine.at_rest())
        assert not self.parts.generations.live


@contextmanager
def story_site(
    routes: Callable[[Server], Sequence[Route]],
    keys: Keys = NO_KEYS,
    engine: ServedEngine | None = None,
    observers: Sequence[Observer] = (),
    template: str | None = None,
    **scheduler: object,
) -> Iterator[Site]:
    """Serve until the block ends; only one site at a time.

    Args:
        engine: configuration of the story model, if not the default.
        observers: of the requests.
        template: for chats, in place of the model's.
        scheduler: fields of `SchedulerConfig` to change.
    """
    engine = engine or make_engine(*bundled(), **scheduler)
    config = engine.client.config
    files = model_files(Path(config.runner.model_path))
    tokenizer = files.tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    texts = Texts(tokenizer, config.scheduler.max_model_len, model=config.model)
    params = files.default_params()
    parts = assemble(ServerConfig(), engine.client, texts, params, keys, NAMES, observers)

    async def start() -> None:
        engine.client.start(parts.generations.take)
        await engine.ready()

    async def close() -> None:
        await texts.close()
        await engine.client.close()

    with http_server(make_app(parts, routes(parts)), start=start, close=close) as server:
        yield Site(server, engine, parts)


def site_fixture(
    routes: Callable[[Server], Sequence[Route]] | None = None, keys: Keys = NO_KEYS, **how: Any
) -> Any:
    """Return a fixture of a module: a site (`story_site`) that is at rest after its tests.

    Args:
        routes: None: all of the main port, whose metrics count the requests.
    """

    @pytest.fixture(scope="module")
    def site() -> Iterator[Site]:
        requests = RequestMetricsObserver()
        table = routes or (lambda parts: all_routes(parts, requests))
        with story_site(table, keys, observers=[requests], **how) as made:
            yield made
            made.at_rest()

    return site
