"""Names in requests are only compared with served names, and never opened."""

from __future__ import annotations

import pytest
from helpers.http_server import ask
from helpers.story_site import NAMES, Site, site_fixture

from kvik.server.access import read_keys

KEY = {"authorization": "Bearer right"}


site = site_fixture(keys=read_keys(["right"]))


HOSTILE = [
    "../../../etc/passwd",
    "/etc/passwd",
    "~/.ssh/id_rsa",
    "C:\\Windows\\win.ini",
    "file:///etc/passwd",
    "./stories",
    "stories\n",
    "stories\x00.gguf",
    "%2e%2e%2f",
    "${HOME}",
    "a" * 512,
]
MESSAGES = [{"role": "user", "content": "Hi"}]
ROUTES = [
    ("/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}),
    ("/v1/embeddings", {"input": "Hi"}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ("/tokenize", {"prompt": "Hi"}),
    ("/invocations", {"prompt": "Hi", "max_tokens": 1}),
]


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
@pytest.mark.parametrize(("path", "body"), ROUTES, ids=lambda v: v if isinstance(v, str) else "")
def test_a_name_that_is_not_served_is_not_found(
    site: Site, path: str, body: dict[str, object], name: str
) -> None:
    reply = ask(site.server, "POST", path, {**body, "model": name}, **KEY)
    assert reply.status == 404, reply.body
    if path.startswith("/v1/messages"):
        assert reply.json["error"]["type"] == "not_found_error"
    else:
        assert (reply.error["code"], reply.error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize(
    "written",
    [
        "../../../etc/passwd",
        "%2e%2e/%2e%2e/etc/passwd",
        "file:%2f%2f%2fetc%2fpasswd",
        "http://169.254.169.254/",
        "stories%00",
        "",
        "%252e%252e",
    ],
)
def test_a_name_in_a_path_that_is_not_served_is_not_found(site: Site, written: str) -> None:
    reply = ask(site.server, "GET", f"/v1/models/{written}", **KEY)
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert b"root:" not in reply.body


@pytest.mark.parametrize("name", NAMES)
def test_served_names_are_found(site: Site, name: str) -> None:
    assert ask(site.server, "GET", f"/v1/models/{name}", **KEY).json["id"] == name
    for path, body in ROUTES:
        reply = ask(site.server, "POST", path, {**body, "model": name}, **KEY)
        assert reply.status == 200
        assert reply.json.get("model", NAMES[0]) == NAMES[0]  # answers have the first name


@pytest.mark.parametrize(
    "path",
    [
        "/admin/abort",
        "/admin/drain",
        "/admin/reset_prefix_cache",
        "/admin/stats",
        "/abort",
        "/v1/load_lora_adapter",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_admin_routes_are_not_on_this_port(site: Site, method: str, path: str) -> None:
    assert ask(site.server, method, path, {}).status == 401
    reply = ask(site.server, method, path, {}, **KEY)
    assert (reply.status, reply.error["code"]) == (404, "not_found")
