"""The description of the API, for programs and for readers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import pytest
from helpers.http_server import HttpServer, ask, http_server
from starlette.requests import Request
from starlette.responses import Response

from kvik.config.server_config import ServerConfig
from kvik.server import pages
from kvik.server.access import read_keys
from kvik.server.app import App
from kvik.server.app import openai_routes as openai
from kvik.server.route import Route
from kvik.server.server import Drain


class Wish(msgspec.Struct):
    """What is <wished> for."""

    n: Annotated[int, msgspec.Meta(ge=1, le=8, description="how <many> `of` them")]
    words: list[str] = []


async def nothing(request: Request) -> Response:
    return Response()


TABLE = [
    Route("/v1/wish", nothing, body=Wish, answer=Wish, note="Wish <for> it."),
    Route("/v1/things/{thing:path}", nothing, "GET", note="One thing."),
    Route("/open", nothing, "GET", open=True, note="For all."),
    Route("/ui/style.css", nothing, "GET", open=True),
]


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    routes = [*TABLE, *pages.document_routes(TABLE)]
    with http_server(App(routes, read_keys(["k"]), Drain(), ServerConfig(host=""))) as running:
        yield running


def test_the_schema_names_the_path_of_a_proxy() -> None:
    assert pages.document(TABLE, "/llm")["servers"] == [{"url": "/llm"}]
    assert pages.document(TABLE)["servers"] == [{"url": "/"}]


def test_the_schema_has_what_the_decoder_enforces(server: HttpServer) -> None:
    reply = ask(server, "GET", "/openapi.json")
    assert reply.status == 200
    described = reply.json
    assert described["openapi"].startswith("3.1")
    assert set(described["paths"]) == {
        "/v1/wish",
        "/v1/things/{thing}",
        "/open",
        "/openapi.json",
        "/docs",
    }
    wish = described["components"]["schemas"]["Wish"]
    assert wish["required"] == ["n"]
    assert (wish["properties"]["n"]["minimum"], wish["properties"]["n"]["maximum"]) == (1, 8)
    post = described["paths"]["/v1/wish"]["post"]
    assert post["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/Wish")
    assert {"200", "400", "401", "429", "503"} == set(post["responses"])
    assert "security" in post
    assert "security" not in described["paths"]["/open"]["get"]
    (parameter,) = described["paths"]["/v1/things/{thing}"]["get"]["parameters"]
    assert parameter["name"] == "thing"


def test_the_page_loads_nothing_else(server: HttpServer) -> None:
    reply = ask(server, "GET", "/docs")
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    page = reply.body.decode()
    assert "Wish &lt;for&gt; it." in page
    assert "how &lt;many&gt; <code>of</code> them" in page
    assert "<!-- " not in page
    assert not re.search(r"<script|https?://|<for>|<many>|<wished>", page)
    assert '<a href="#Wish">Wish</a>' in page
    assert 'id="Wish"' in page


def test_errors_have_the_shape_of_their_api() -> None:
    table = [Route(path, nothing, body=Wish, note="x") for path in ("/v1/messages", "/v1/wish")]
    paths = pages.document(table)["paths"]
    for path, name in (("/v1/messages", "MessagesError"), ("/v1/wish", "Error")):
        content = paths[path]["post"]["responses"]["400"]["content"]
        assert content["application/json"]["schema"] == {"$ref": pages.REFERENCE + name}


def test_every_reference_has_a_target() -> None:
    parts: Any = None
    described = pages.document(openai(parts))
    names = set(described["components"]["schemas"])
    references = re.findall(r'"\$ref": "([^"]*)"', json.dumps(described))
    assert references
    assert {reference.removeprefix(pages.REFERENCE) for reference in references} <= names
    assert pages.render(described).count("<h3") == len(names) + sum(
        len(methods) for methods in described["paths"].values()
    )


@pytest.fixture(scope="module")
def playground() -> Iterator[HttpServer]:
    app = App(pages.playground_routes(), read_keys([]), Drain(), ServerConfig(host=""))
    with http_server(app) as running:
        yield running


FILES = [route.path for route in pages.playground_routes()]


@pytest.mark.parametrize("path", FILES)
def test_cached_files_are_not_sent_again(playground: HttpServer, path: str) -> None:
    first = ask(playground, "GET", path)
    tag = first.headers["etag"]
    assert first.status == 200 and first.headers["cache-control"] == "no-cache"
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = ask(playground, "GET", path, if_none_match=known)
        assert (again.status, again.body) == (304, b"")
        assert (again.headers["etag"], again.headers["cache-control"]) == (tag, "no-cache")
    for known in ('"other"', tag.strip('"'), ""):
        again = ask(playground, "GET", path, if_none_match=known)
        assert (again.status, again.body) == (200, first.body)


def test_other_contents_have_other_tags(playground: HttpServer) -> None:
    assert len({ask(playground, "GET", path).headers["etag"] for path in FILES}) == len(FILES) > 3
