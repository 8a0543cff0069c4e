"""`build_app`: the server of an `AsyncLLM`, alone and mounted in another application."""

from __future__ import annotations

import asyncio
import json
import runpy
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import uvicorn
from helpers.waiting import eventually
from starlette.applications import Starlette
from starlette.routing import Mount

from kvik import AsyncLLM, ConfigError
from kvik.server import build_app

EXAMPLE = Path(__file__).parents[2] / "examples" / "async_server.py"
OPTIONS: dict[str, Any] = {"device": "cpu", "threads": 1, "max_model_len": 128}
BODY = {"model": "stories", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


def engine_of(**options: Any) -> AsyncLLM:
    return AsyncLLM("", engine="thread", **OPTIONS, **options)


@asynccontextmanager
async def served(app: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """Serve the app in a plain uvicorn, as a user's program does."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
        task = asyncio.create_task(server.serve([listening]))
        while not server.started:
            assert not task.done()
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with httpx2.AsyncClient(base_url=url, timeout=30) as client:
            yield client
        server.should_exit = True
        await task


async def test_the_app_alone_loads_the_engine_serves_and_closes_it():
    engine = engine_of()
    async with served(build_app(engine, served_model_name=("stories",))) as client:
        assert (await client.get("/health")).status_code == 200
        answer = (await client.post("/v1/completions", json=BODY)).json()
        assert answer["model"] == "stories"
    assert engine.client.state == "closed"


async def test_requests_by_http_and_python_share_the_engine_and_cache():
    engine = engine_of()
    async with engine, served_below("/llm", engine) as client:
        prompt = "Once upon a time there was a fox who lived in a wood with her children. " * 2
        # A request over HTTP uses the model's defaults for the rest.
        params = engine.default_params.with_changes(max_tokens=8, temperature=0)
        mine = await engine.generate(prompt, params).result()
        body = {**BODY, "prompt": prompt}
        del body["model"]
        answer = (await client.post("/llm/v1/completions", json=body)).json()
        assert answer["choices"][0]["text"] == mine.text
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        lines = [
            line
            async for line in (
                await client.post("/llm/v1/completions", json={**body, "stream": True})
            ).aiter_lines()
        ]
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == mine.text
        metrics = (await client.get("/llm/metrics")).text
        assert 'request_success_total{finished_reason="length"' in metrics
        assert (await engine.stats()).steps > 0
        page = await client.get("/llm/")
        assert page.status_code == 200 and "<html" in page.text
        described = (await client.get("/llm/openapi.json")).json()
        assert described["servers"] == [{"url": "/llm"}]


@asynccontextmanager
async def served_below(prefix: str, engine: AsyncLLM, **options: Any):
    outer = Starlette(routes=[Mount(prefix, build_app(engine, **options))])
    async with served(outer) as client:
        yield client


async def test_keys_and_hosts_hold_below_another_app():
    async with engine_of() as engine, served_below("/a", engine, api_key=("secret",)) as client:
        assert (await client.get("/a/v1/models")).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert (await client.get("/a/v1/models", headers=headers)).status_code == 200
    async with engine_of() as engine, served_below("/a", engine) as client:
        refused = await client.get("/a/v1/models", headers={"host": "evil.example"})
        assert refused.status_code == 403


async def test_the_format_of_tool_calls_is_the_one_of_the_options():
    tools = [{"type": "function", "function": {"name": "look"}}]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "max_tokens": 1}
    async with engine_of() as engine:  # whose template shows no format
        for options, status in (({}, 400), ({"tool_format": "hermes"}, 200)):
            async with served_below("/a", engine, **options) as client:
                answer = await client.post("/a/v1/chat/completions", json=body)
                assert answer.status_code == status
        with pytest.raises(ConfigError, match="tool_format"):
            build_app(engine, tool_format="herms")


async def test_a_client_that_goes_away_frees_its_request():
    async with engine_of() as engine, served_below("/a", engine) as client:
        body = {"prompt": "Once", "max_tokens": 100, "n": 8, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/a/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                break
        await eventually(lambda: not engine.client.num_unfinished)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"port": 80}, "port"),
        ({"record": "file"}, "record"),
        ({"api_keys": ("a",)}, "api_keys"),
        ({"request_timeout": -1}, "request_timeout"),
    ],
)
def test_options_of_the_program_and_unknown_ones_are_refused(options, field):
    with pytest.raises(ConfigError) as caught:
        build_app(engine_of(), **options)
    assert caught.value.field == field


@pytest.mark.full
async def test_the_example_with_fastapi():
    pytest.importorskip("fastapi")
    app = runpy.run_path(str(EXAMPLE), run_name="example")["app"]
    async with served(app) as client:
        story = await client.get("/story", params={"beginning": "Once upon a time", "tokens": 5})
        assert story.status_code == 200 and story.text.strip()
        for field, wrong in (
            ("tokens", {"beginning": "Once", "tokens": 0}),
            ("beginning", {"beginning": ""}),
        ):
            refused = await client.get("/story", params=wrong)
            assert refused.status_code == 422
            assert refused.json()["detail"][0]["loc"] == ["query", field]
        answer = await client.post("/llm/v1/completions", json={**BODY, "model": None})
        assert answer.json()["usage"]["completion_tokens"] == 8
