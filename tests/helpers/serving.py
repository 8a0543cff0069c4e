"""The whole HTTP side over an engine without a model: routes, checks, generations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from helpers.generating import Generating, Watcher, letters
from helpers.http_server import HttpServer, http_server
from helpers.served_engine import FakeExecutor, make_engine

from kvik.config.config import ResolvedConfig
from kvik.config.server_config import ServerConfig
from kvik.core.sampling_params import SamplingParams
from kvik.server.access import Keys
from kvik.server.app import make_app
from kvik.server.route import Route
from kvik.server.server import Server, assemble
from kvik.server.texts import Texts

DEFAULTS = ServerConfig()


@dataclass
class Served:
    http: HttpServer
    inner: Generating
    parts: Server

    def at_rest(self) -> None:
        """Wait until no request is left in the engine or in front of it."""
        self.http.call(self.inner.at_rest())


@contextmanager
def served(
    routes: Callable[[Server], Sequence[Route]],
    executor: FakeExecutor | None = None,
    *,
    max_requests: int = 64,
    keys: Keys | None = None,
    template: str | None = None,
    config: ResolvedConfig | None = None,
    server_config: ServerConfig = DEFAULTS,
    **scheduler: object,
) -> Iterator[Served]:
    """Provide a server on a real socket that generates letters, and check that it is idle at the
    end.

    Args:
        routes: of the API under test.
        template: for conversations.
        config: of the engine; None: of the fictitious model.
        scheduler: fields of `SchedulerConfig`.
    """
    scheduler = {"max_queued_requests": max_requests, "max_queued_tokens": 1 << 20, **scheduler}
    engine = make_engine(config, executor or FakeExecutor(), **scheduler)
    texts = Texts(letters(template), engine.client.config.scheduler.max_model_len)
    keys, watcher = keys or Keys(), Watcher()
    given = (texts, SamplingParams(), keys, ("letters",), [watcher])
    parts = assemble(server_config, engine.client, *given)

    async def start() -> None:
        engine.client.start(parts.generations.take)
        await engine.ready()

    async def close() -> None:
        await engine.client.close()
        await texts.close()

    with http_server(make_app(parts, routes(parts)), start=start, close=close) as http:
        inner = Generating(engine, parts.generations, parts.admission, watcher, texts)
        made = Served(http, inner, parts)
        yield made
        made.at_rest()
