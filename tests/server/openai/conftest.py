"""The OpenAI routes on a real socket, with the story model."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import openai
import pytest
from helpers.story_site import MAX_MODEL_LEN, Site, site_fixture

from kvik.llm import LLM
from kvik.server.app import openai_routes

site = site_fixture(openai_routes)


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http(site: Site) -> Iterator[httpx2.Client]:
    """For requests that the real client cannot send."""
    with httpx2.Client(base_url=site.url, timeout=60) as made:
        yield made


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """Return the same model in this process."""
    with LLM(
        device="cpu",
        dtype="float32",
        threads=1,
        max_num_seqs=8,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=512,
    ) as made:
        yield made
