"""The Anthropic routes on a real socket, with the story model."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest
from helpers.http_server import HttpServer
from helpers.story_site import Site, site_fixture

from kvik.server.anthropic import routes

site = site_fixture(routes)


@pytest.fixture(scope="module")
def server(site: Site) -> HttpServer:
    return site.server


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=site.url, api_key="none", max_retries=0) as made:
        yield made
