"""Endless texts: fluent far beyond the window, in constant memory."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from helpers.optional_native import needs_native
from helpers.server_process import server_process

from kvik import LLM, SamplingParams
from kvik.cli.main import main
from kvik.config.model_source import BUNDLED

pytestmark = [needs_native, pytest.mark.full, pytest.mark.usefixtures("forked")]

TEXT = (BUNDLED.parent / "calibration" / "text.txt").read_text(encoding="utf-8")
SINKS, WINDOW, SEGMENTS = 4, 252, 21
SIZE = SINKS + WINDOW


def change_bundled(folder: Path, name: str, **changes: Any) -> None:
    """Copy the bundled model to `folder` with some values of a file changed."""
    for file in BUNDLED.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    values = json.loads((folder / name).read_text())
    (folder / name).unlink()
    (folder / name).write_text(json.dumps({**values, **changes}))


def perplexities(texts: int, segments: int, **options: Any) -> list[float]:
    """Return the perplexity of each segment of the texts; a segment has as many tokens as are
    visible."""
    length = segments * SIZE
    with LLM(device="cpu", threads=1, max_num_seqs=1, max_model_len=length, **options) as llm:
        ids = llm.tokenizer.encode(TEXT)
        sums = [0.0] * segments
        for i in range(texts):
            text = ids[i * SEGMENTS * SIZE :][:length]
            output = llm.generate(text, SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
            for place, one in enumerate(output.prompt_logprobs):
                sums[place // SIZE] += one.logprob if one is not None else 0.0
    return [math.exp(-total / texts / SIZE) for total in sums]


def test_perplexity_stays_over_twenty_windows(tmp_path: Path) -> None:
    found = perplexities(4, SEGMENTS, attention_sinks=SINKS, window=WINDOW)
    assert found[-1] <= 1.05 * found[1]
    change_bundled(tmp_path, "config.json", max_position_embeddings=10 * SIZE)
    dense = perplexities(2, 10, model=str(tmp_path))
    assert dense[-1] > 1.5 * dense[1]  # trained for four segments


STREAM = """
import sys
from kvik import LLM, SamplingParams
def resident():
    return int(open("/proc/self/statm").read().split()[1])
first, last = int(sys.argv[1]), int(sys.argv[2])
with LLM(device="cpu", threads=1, max_num_seqs=1, attention_sinks=4, window=60) as llm:
    assert llm.resolved.scheduler.max_model_len == 1 << 20
    params = SamplingParams(temperature=0.8, seed=1, ignore_eos=True, max_tokens=last + 1)
    stream, count, begin, end = llm.stream("Once upon a time", params), 0, 0, 0
    for delta in stream:
        count += len(delta.token_ids)
        begin = resident() if count == first else begin
        end = resident() if count == last else end
    stats = llm.stats()
    (output,) = stream.output.outputs
    assert len(output.token_ids) == last + 1 and stats.num_blocks <= 5 + 2048 // 16 + 2, stats
    text = llm.tokenizer.decode(output.token_ids)
    assert output.text.strip() == text.strip(), (output.text[-80:], text[-80:])
    print(end / begin - 1)
"""


def grown(first: int, last: int) -> float:
    """Return the relative growth of resident memory between two numbers of tokens.

    NumPy asks for huge pages for large arrays: one more token would make 2 MiB resident.
    """
    run = [sys.executable, "-c", STREAM, str(first), str(last)]
    small = {**os.environ, "NUMPY_MADVISE_HUGEPAGE": "0"}
    done = subprocess.run(run, capture_output=True, text=True, check=False, env=small)
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stream_far_beyond_the_trained_length_takes_no_more_memory() -> None:
    assert grown(2_500, 4_500) < 0.002  # after 134 pages: each page was written once


ENDLESS = 2500  # tokens; the model was trained for 1,024
MESSAGES = [{"role": "user", "content": "Tell me of a dog."}]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once upon a time", "stream_options": {"include_usage": True}},
    "/v1/chat/completions": {"messages": MESSAGES, "stream_options": {"include_usage": True}},
    "/v1/messages": {"messages": MESSAGES},
}


def stream(url: str, path: str) -> list[dict[str, Any]]:
    """Return the events of an answer of `ENDLESS` tokens."""
    body = {"model": "m", "max_tokens": ENDLESS, "stream": True, **STREAMS[path]}
    with httpx2.stream("POST", f"{url}{path}", json=body, timeout=240) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


SEEN = ("--attention-sinks", "4", "--window", "60", "--max-model-len", str(ENDLESS + 1000))
FLAGS = (*SEEN, "--device", "cpu", "--threads", "1")


@pytest.fixture
def endless(tmp_path: Path) -> str:
    """Return the bundled model with a chat template, which never ends a text."""
    never = 210  # half of a character that no story contains: one of 10^9 tokens
    change_bundled(tmp_path, "config.json", eos_token_id=never)
    change_bundled(tmp_path, "generation_config.json", eos_token_id=never)
    change_bundled(tmp_path, "tokenizer_config.json", chat_template=TEMPLATE, eos_token=None)
    return str(tmp_path)


def test_a_chat_goes_on_far_beyond_the_trained_length(
    endless: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also its second answer, after a conversation that is longer than the training context."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tell me of a dog.\nAnd then?\n/stats\n"))
    assert main(["chat", endless, *FLAGS, "--max-tokens", str(ENDLESS // 2)]) == 0
    out, err = capsys.readouterr()
    assert out.count(f"{ENDLESS // 2} output tokens") == 1 and "full" not in err
    assert_goes_on(out)


@pytest.mark.nightly
def test_servers_stream_far_beyond_the_trained_length(endless: str) -> None:
    """All three APIs stream at once; the words stay those of the stories."""
    flags = (*FLAGS, "--served-model-name", "m")
    with server_process(endless, *flags) as server, ThreadPoolExecutor() as pool:
        found = dict(zip(STREAMS, pool.map(lambda p: stream(server.url, p), STREAMS), strict=True))
        metrics = server.metrics()
    assert metrics["kv_cache_usage_perc"] == 0
    for path in ("/v1/completions", "/v1/chat/completions"):
        *events, last = found[path]
        assert last["usage"]["completion_tokens"] == ENDLESS
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        texts = [one["choices"][0] for one in events]
        text = "".join(t.get("text") or t.get("delta", {}).get("content") or "" for t in texts)
        assert_goes_on(text)
    end = next(one for one in found["/v1/messages"] if one["type"] == "message_delta")
    assert end["delta"]["stop_reason"] == "max_tokens"
    assert end["usage"]["output_tokens"] == ENDLESS
    deltas = [one for one in found["/v1/messages"] if one["type"] == "content_block_delta"]
    assert_goes_on("".join(one["delta"]["text"] for one in deltas))


def assert_goes_on(text: str) -> None:
    """Check that the end of a text has the words of its beginning, since the model knows few."""
    words = text.lower().split()
    assert len(words) > ENDLESS // 4
    usual = set(words[: len(words) // 5])
    assert sum(word in usual for word in words[-400:]) > 150, words[-60:]


@pytest.mark.nightly
@pytest.mark.usefixtures("fresh")
@pytest.mark.timeout(7200)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_hundred_thousand_tokens_take_no_more_memory() -> None:
    assert grown(10_000, 200_000) < 0.01
