"""The real engine in its own process, with the bundled model."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from helpers.stored_models import CONFIGS, SIZES, save_quantised
from helpers.tiny_models import save_tiny
from helpers.waiting import eventually

from kvik import LLM, SamplingParams
from kvik.build import build_engine
from kvik.config.config import EngineConfig, ResolvedConfig
from kvik.core.types import EngineRequest, FinishReason, RequestDelta
from kvik.engine import wire
from kvik.engine.client import EngineClient
from kvik.engine.remote import EngineState
from kvik.engine.wire import EngineStart, FrameReader
from kvik.engine_process import engine_in_process
from kvik.launch import resolve_config
from kvik.spec.kv import KV_FORMATS

pytestmark = pytest.mark.usefixtures("forked")
OPTIONS = {"device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": 128}
PROMPTS = [[1, 2, 3], [1, 400, 5, 77], [1] * 40]
PARAMS = SamplingParams(max_tokens=12, seed=3, logprobs=1, prompt_logprobs=0)


@pytest.fixture(scope="module")
def resolved() -> ResolvedConfig:
    return resolve_config(EngineConfig(**OPTIONS, num_blocks=64))


def in_process(
    resolved: ResolvedConfig,
    test: Callable[[EngineClient, list[RequestDelta]], Awaitable[None]],
    record: Path | None = None,
) -> None:
    async def whole() -> None:
        client = engine_in_process(resolved, sys.stderr.write, record)
        deltas: list[RequestDelta] = []
        client.start(deltas.extend)
        try:
            await asyncio.wait_for(test(client, deltas), 60)
        finally:
            await client.close()

    asyncio.run(whole())


@pytest.mark.full
@pytest.mark.usefixtures("fresh")
def test_the_engine_process_gives_the_tokens_of_the_engine_in_process(resolved, tmp_path):
    async def test(client, deltas):
        await eventually(lambda: client.state is EngineState.READY)
        for i, prompt in enumerate(PROMPTS):
            client.add(EngineRequest(str(i), prompt, PARAMS))
        await eventually(lambda: not client.num_unfinished)
        for i, output in enumerate(expected):
            mine = [d for d in deltas if d.request_id == str(i)]
            assert [t for d in mine for t in d.token_ids] == output.outputs[0].token_ids
            logprobs = [p for d in mine for p in d.logprobs or ()]
            assert logprobs == output.outputs[0].logprobs
            (read,) = [d.prompt_logprobs for d in mine if d.prompt_logprobs is not None]
            assert read == output.prompt_logprobs[1:]
            assert mine[-1].report.num_preemptions == 0

    with LLM("", **OPTIONS) as llm:
        expected = llm.generate(PROMPTS, PARAMS, progress=False)
    record = tmp_path / "recording"
    in_process(resolved, test, record)
    assert record.stat().st_size > 0


@pytest.mark.full
def test_a_model_that_cannot_be_used_fails_with_the_reason(resolved, tmp_path):
    broken = replace(resolved, runner=replace(resolved.runner, model_path=str(tmp_path)))

    async def test(client, deltas):
        await eventually(lambda: client.state is EngineState.FAILED)
        assert "safetensors" in client.reason
        assert "\n" not in client.reason

    in_process(broken, test)


@pytest.mark.full
def test_ctrl_c_and_a_hang_up_do_not_end_the_engine_process(resolved):
    async def test(client, deltas):
        pid = client.links[0].source.pid
        await eventually(lambda: client.state is EngineState.READY)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            subprocess.run(["kill", f"-{number}", str(pid)], check=True)
        client.add(EngineRequest("a", [1, 2, 3], SamplingParams(max_tokens=3)))
        await eventually(lambda: not client.num_unfinished)
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert client.links[0].source.pid == pid

    in_process(resolved, test)


LOADS_FOR_EVER = """
import sys, time
from kvik import engine_process
engine_process.load_loop = lambda *_, **options: time.sleep(1000)
engine_process.main(sys.argv[1:])
"""


@pytest.mark.full
def test_loading_stops_when_the_client_is_gone(resolved):
    ours, theirs = socket.socketpair()
    with subprocess.Popen(
        [sys.executable, "-c", LOADS_FOR_EVER, str(theirs.fileno())], pass_fds=[theirs.fileno()]
    ) as process:
        theirs.close()
        ours.sendall(wire.frame(EngineStart(resolved)))
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        ours.close()
        assert process.wait(10) == 1


@pytest.mark.usefixtures("fresh")
def test_a_parent_that_sends_nothing(resolved):
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "kvik.engine_process", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        time.sleep(0.1)
        ours.close()
        assert process.wait(10) == 0


# Every stored format, and every KV format.
STORED = dict(zip(CONFIGS, cycle(KV_FORMATS), strict=False))
CASES = (*STORED, "engine folder", "draft model")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save_tiny(folder, "Qwen2", **SIZES)
    return folder


def stored_options(case: str, plain: Path, work: Path) -> dict[str, Any]:
    """Return the options of an engine for a case."""
    folder = work / "quantised"
    config = CONFIGS.get(case, CONFIGS["awq"])
    save_quantised(plain, folder, work / "twin", config)
    common = {"model": str(folder), "device": "cpu", "threads": 1}
    planned = {"num_blocks": 32, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    match case:
        case "engine folder":
            build_engine(EngineConfig(**common), work / "engine", lambda done, total: None)
            return {**common, **planned, "model": str(work / "engine")}
        case "draft model":
            wish = {"method": "draft_model", "model": str(folder), "adaptive": False}
            wish |= {"num_speculative_tokens": 3}
            return {**common, **planned, "model": str(plain), "speculative_config": wish}
        case _:
            return {**common, **planned, "kv_cache_dtype": STORED[case]}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_quantised_checkpoints_are_served(case: str, plain: Path, tmp_path: Path) -> None:
    options = stored_options(case, plain, tmp_path)
    resolved = resolve_config(EngineConfig(**options))
    start = EngineStart(resolved)
    (body,) = FrameReader().feed(wire.frame(start))
    assert wire.to_start.decode(body) == start
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

    served: list[RequestDelta] = []

    async def serve(client: EngineClient, deltas: list[RequestDelta]) -> None:
        await eventually(lambda: client.state is not EngineState.STARTING)
        assert client.state is EngineState.READY, client.reason
        client.add(EngineRequest("a", [1, 2, 3], greedy))
        await eventually(lambda: not client.num_unfinished)
        served.extend(deltas)

    in_process(resolved, serve)
    assert served[-1].finish_reason is FinishReason.LENGTH
    with LLM(**options) as llm:
        (output,) = llm.generate([[1, 2, 3]], greedy)
    tokens = [token for delta in served for token in delta.token_ids]
    assert tokens == output.outputs[0].token_ids
