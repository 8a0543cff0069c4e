"""The whole route table over a real socket, for programs that others wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import pytest
from helpers.story_site import Site, story_site

from kvik.server.app import all_routes
from kvik.server.metrics import RequestMetricsObserver


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with story_site(lambda parts: all_routes(parts, RequestMetricsObserver())) as made:
        yield made
        made.at_rest()


@pytest.fixture
def offline(tmp_path: object) -> Mapping[str, str]:
    """The environment of a program that must not look for anything outside this machine."""
    switches = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
    return {**os.environ, **dict.fromkeys(switches, "1"), "HF_HOME": f"{tmp_path}/hf"}
