"""The admin routes: an administrator's key, and a separate port."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from helpers.http_server import HttpServer, ask, http_server

from kvik.config.server_config import ServerConfig
from kvik.engine.remote import EngineState
from kvik.errors import ParamError, UnavailableError
from kvik.server.access import read_keys
from kvik.server.admin import make_admin_app
from kvik.server.server import Server

ADMIN = {"authorization": "Bearer boss"}


@dataclass
class Stubs:
    """Stubs of the engine and of the generations."""

    config: ClassVar[Any] = SimpleNamespace(runner=SimpleNamespace(role="both"))
    state: EngineState = EngineState.READY
    live: set[str] = field(default_factory=set)
    fill: float = 0.0

    def abort(self, request_id: str) -> bool:
        return request_id in self.live

    async def reset_prefix_cache(self) -> int:
        return 7

    @property
    def accepts(self) -> bool:
        return self.state in (EngineState.READY, EngineState.ASLEEP)

    async def sleep(self) -> None:
        if self.live:
            raise UnavailableError("engine", "cannot sleep")
        self.state = EngineState.ASLEEP

    async def ready(self) -> None:
        self.state = EngineState.READY

    async def stats(self) -> dict[str, int]:
        return {"steps": 3}

    def hand_over(self) -> None:
        pass

    refusal = ""

    def drain_replica(self, replica: int, *, drain: bool) -> int:
        if replica > 1:
            raise ParamError("replica", f"must be 0 to 1, not {replica}")
        return 5 if drain else 0


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Server:
    file: Path = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text("operator: boss admin\nuser: plain\n")
    stubs: Any = Stubs(live={"gen-1"})
    config = ServerConfig()
    return Server(config, ("m",), stubs, stubs, stubs, stubs, stubs, keys=read_keys([], str(file)))


@pytest.fixture(scope="module")
def server(parts: Server) -> Iterator[HttpServer]:
    with http_server(make_admin_app(parts)) as running:
        yield running


PATHS = [
    "/admin/replicas/0/drain",
    "/admin/abort",
    "/admin/reset_prefix_cache",
    "/admin/drain",
    "/admin/sleep",
    "/wake_up",
    "/admin/stats",
]


@pytest.mark.parametrize("path", PATHS)
def test_only_an_administrator_may(server: HttpServer, path: str) -> None:
    for method in ("GET", "POST"):
        assert ask(server, method, path, {}).status == 401
        reply = ask(server, method, path, {}, authorization="Bearer plain")
        assert (reply.status, reply.error["code"]) == (403, "admin_key_needed")
    assert ask(server, "GET", path, host="evil.example").status == 403


def test_the_actions_of_an_administrator(server: HttpServer, parts: Server) -> None:
    assert ask(server, "POST", "/admin/abort", {"request_id": "gen-1"}, **ADMIN).status == 200
    reply = ask(server, "POST", "/admin/abort", {"request_id": "gen-2"}, **ADMIN)
    assert (reply.status, reply.error["code"]) == (404, "request_not_found")
    assert ask(server, "POST", "/admin/reset_prefix_cache", {}, **ADMIN).json == {"num_blocks": 7}
    assert ask(server, "GET", "/admin/stats", **ADMIN).json == {"steps": 3}


def test_sleep(server: HttpServer, parts: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """By kvik's paths, and by vLLM's with a query and without a body."""
    refused = ask(server, "POST", "/admin/sleep", **ADMIN)
    assert (refused.status, refused.error["message"]) == (503, "engine: cannot sleep")
    monkeypatch.setattr(parts.engine, "live", set())
    for prefix, query in (("/admin", ""), ("", "?level=2")):
        assert ask(server, "POST", f"{prefix}/sleep{query}", **ADMIN).status == 200
        found = ask(server, "GET", f"{prefix}/is_sleeping", **ADMIN)
        assert found.json == {"is_sleeping": True}
        assert ask(server, "GET", "/health").status == 200
        assert ask(server, "POST", f"{prefix}/wake_up", **ADMIN).status == 200
        assert parts.engine.state is EngineState.READY


def test_draining_one_replica(server: HttpServer) -> None:
    for drain, left in ((True, 5), (False, 0)):
        found = ask(server, "POST", "/admin/replicas/1/drain", {"drain": drain}, **ADMIN)
        assert (found.status, found.json) == (200, {"unfinished": left})
    found = ask(server, "POST", "/admin/replicas/2/drain", {"drain": True}, **ADMIN)
    assert found.status == 400 and found.json["error"]["param"] == "replica"
    assert ask(server, "POST", "/admin/replicas/x/drain", {"drain": True}, **ADMIN).status == 404


def test_the_health_tells_that_all_replicas_are_drained(
    server: HttpServer, parts: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.engine, "refusal", "all replicas are drained")
    for path in ("/health", "/ready"):
        found = ask(server, "GET", path)
        assert (found.status, found.json["reason"]) == (503, "all replicas are drained")


def test_draining_and_resuming(server: HttpServer, parts: Server) -> None:
    assert ask(server, "POST", "/admin/drain", {"drain": True}, **ADMIN).status == 200
    assert parts.drain.started
    told = ask(server, "GET", "/health").json
    assert told["status"] == "draining" and "stopped" not in told["reason"]
    parts.drain.start()  # as on SIGTERM
    assert "stopped" in ask(server, "GET", "/health").json["reason"]
    assert ask(server, "POST", "/admin/drain", {"drain": False}, **ADMIN).status == 200
    assert not parts.drain.started
    assert ask(server, "GET", "/health").status == 200
