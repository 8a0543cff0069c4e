"""Adapters are models to clients: a request names one as its model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from helpers.adapters import draw_pairs, linear_layers, write_adapter
from helpers.http_server import ask
from helpers.served_engine import make_engine
from helpers.story_site import NAMES, Site, every_route, story_site

from kvik.config.config import EngineConfig
from kvik.errors import ConfigError
from kvik.launch import launch, resolve_config
from kvik.server.admin import ADAPTERS
from kvik.server.route import Route, routes_of
from kvik.server.server import Server
from kvik.server.texts import Texts

PROMPT = "Once upon a time"
MESSAGES = [{"role": "user", "content": PROMPT}]
OPTIONS = {"device": "cpu", "dtype": "float32", "threads": 1, "max_num_seqs": 8, "num_blocks": 64}


def with_admin_routes(parts: Server) -> list[Route]:
    """Return the routes of both ports, as one process can serve one site."""
    return [*every_route(parts), *routes_of(*ADAPTERS)(parts)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("adapters")
    layers = linear_layers(resolve_config(EngineConfig()).model)
    folders = {
        name: write_adapter(folder / name, draw_pairs(layers, seed=seed, size=0.5))
        for seed, name in enumerate(("pirate", "org/poet"))
    }
    named = tuple(f"{name}={path}" for name, path in folders.items())
    room = {"max_adapters": 3, "max_adapter_rank": 4}
    engine = launch(EngineConfig(**OPTIONS, **room, max_model_len=512, adapters=named))
    served = make_engine(engine.resolved, engine.loop.executor)
    with story_site(with_admin_routes, engine=served) as made:
        yield made
        made.at_rest()
    engine.loop.close()


def test_they_are_listed_after_the_names_of_the_model(site: Site) -> None:
    listed = ask(site.server, "GET", "/v1/models").json["data"]
    assert [(one["id"], one["parent"]) for one in listed] == [
        *((name, None) for name in NAMES),
        *((name, NAMES[0]) for name in ("pirate", "org/poet")),
    ]
    assert ask(site.server, "GET", "/v1/models/org/poet").json["root"] == "org/poet"


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES},
    "/v1/responses": {"input": PROMPT},
    "/completion": {"prompt": PROMPT},
    "/v1/embeddings": {"input": PROMPT},
}


@pytest.mark.parametrize("path", ROUTES)
def test_each_route_answers_with_the_named_one(site: Site, path: str) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    more = {} if path == "/v1/embeddings" else {"temperature": 0, limit: 24}
    answers = {}
    for name in (NAMES[0], "pirate", "org/poet"):
        reply = ask(site.server, "POST", path, {**ROUTES[path], **more, "model": name})
        assert reply.status == 200 and reply.json["model"] == name
        for key in ("choices", "content", "output", "data"):
            if key in reply.json:
                answers[name] = str(reply.json[key])
                break
    parts = [answer.partition("'id'")[0] for answer in answers.values()]
    if path == "/v1/responses":
        parts = [answer.partition("'text'")[2] for answer in answers.values()]
    assert len(set(parts)) == 3


def test_kviks_own_route_names_it_as_a_parameter(site: Site) -> None:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    texts = [
        ask(site.server, "POST", "/v1/generate", {**body, "adapter": name}).json["text"]
        for name in ("", "pirate")
    ]
    expected = [
        ask(site.server, "POST", "/v1/completions", {**body, "model": name}).json["choices"]
        for name in (NAMES[0], "pirate")
    ]
    assert texts == [choices[0]["text"] for choices in expected] and texts[0] != texts[1]


def test_others_are_not_found(site: Site) -> None:
    reply = ask(site.server, "POST", "/v1/completions", {"prompt": PROMPT, "model": "poet"})
    assert (reply.status, reply.error["param"]) == (404, "model")
    assert "pirate, org/poet" in reply.error["message"]
    for path in ("/v1/generate", "/v1/completions", "/completion"):
        reply = ask(site.server, "POST", path, {"prompt": PROMPT, "adapter": "poet"})
        assert (reply.status, reply.error["param"]) == (404, "adapter")


def test_a_name_of_the_model_itself_is_refused(site: Site) -> None:
    config = site.engine.client.config
    adapter = replace(config.runner.adapters[0], name=NAMES[0])
    config = replace(config, runner=replace(config.runner, adapters=(adapter,)))
    engine = make_engine(config, site.engine.executor)
    refused = pytest.raises(ConfigError, match="adapters: 'stories' is a name of the model itself")
    with refused, story_site(every_route, engine=engine):
        pass


ADMIN = {
    "/admin/adapters/load": "/admin/adapters/unload",
    "/v1/load_lora_adapter": "/v1/unload_lora_adapter",
}


@pytest.mark.parametrize("path", ADMIN)
def test_an_operator_loads_and_unloads_them(site: Site, path: str) -> None:
    name, folder, unload = "lora_name", "lora_path", ADMIN[path]
    adapters = site.engine.client.config.runner.adapters
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24}

    def text(model: str) -> str:
        reply = ask(site.server, "POST", "/v1/completions", {**body, "model": model})
        return str(reply.json["choices"][0]["text"])

    def names() -> list[str]:
        return [one["id"] for one in ask(site.server, "GET", "/v1/models").json["data"]]

    loading = {name: "mate", folder: adapters[0].folder}
    reply = ask(site.server, "POST", path, loading)
    assert (reply.status, reply.json) == (200, {"done": True})
    assert names() == [*NAMES, "pirate", "org/poet", "mate"]
    assert ask(site.server, "GET", "/v1/models/mate").json["parent"] == NAMES[0]
    assert text("mate") == text("pirate") != text("org/poet")
    wrong = [
        ({**loading, name: NAMES[1]}, name),
        (loading, name),
        ({**loading, name: "a=b"}, name),
        ({**loading, name: "other", folder: "/nowhere"}, "adapters"),
        ({**loading, name: "other"}, "adapters"),  # no slot is free
        ({name: "other"}, folder),
    ]
    for bad, field in wrong:
        reply = ask(site.server, "POST", path, bad)
        assert (reply.status, reply.error["param"]) == (400, field), bad
    reply = ask(site.server, "POST", unload, {name: "mate"})
    assert (reply.status, reply.json) == (200, {"done": True})
    for again, field in (
        (ask(site.server, "POST", "/v1/completions", {**body, "model": "mate"}), "model"),
        (ask(site.server, "POST", unload, {name: "mate"}), name),
        (ask(site.server, "GET", "/v1/models/mate"), "model"),
    ):
        error = again.error
        assert (again.status, error["code"], error["param"]) == (404, "model_not_found", field)
    assert names() == [*NAMES, "pirate", "org/poet"]


@pytest.mark.parametrize("constraint", [{}, {"regex": "[a-z ]{9}"}])
@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/completions", "model"), ("/v1/completions", "adapter"), ("/v1/generate", "adapter")],
)
def test_one_that_is_unloaded_while_a_request_is_prepared_is_not_found(
    site: Site, path: str, field: str, constraint: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prompt is being tokenised, or its constraint compiled. The error names the field that
    chose it."""
    folder = site.engine.client.config.runner.adapters[0].folder
    loading = {"lora_name": "mate", "lora_path": folder}
    assert ask(site.server, "POST", "/admin/adapters/load", loading).status == 200
    body = {field: "mate", "prompt": PROMPT, **constraint}
    begun, unloaded = threading.Event(), threading.Event()
    encode = Texts.encode

    async def encode_late(*arguments: Any, **options: Any) -> list[int]:
        begun.set()
        await asyncio.to_thread(unloaded.wait)
        return await encode(*arguments, **options)

    def build_late(constraint: object) -> Future[object]:
        begun.set()
        return pool.submit(unloaded.wait)

    if constraint:
        monkeypatch.setattr(site.engine.executor, "build_grammar", build_late)
    else:
        monkeypatch.setattr(Texts, "encode", encode_late)
    with ThreadPoolExecutor() as pool:
        late = pool.submit(ask, site.server, "POST", path, body)
        assert begun.wait(30)
        ask(site.server, "POST", "/admin/adapters/unload", {"lora_name": "mate"})
        unloaded.set()
        reply = late.result()
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert reply.error["param"] == field
