"""`kvik bench serve`: the whole command, with a server in this process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.bench_results import read_result
from helpers.commands import Command
from helpers.fake_server import (
    DONE,
    FakeServer,
    Received,
    Reply,
    event,
    models,
    stream,
    text,
    usage,
)

from kvik.cli.main import main
from kvik.config.model_source import BUNDLED
from kvik.text.tokenizer import Tokenizer
from kvik_bench.cli.serve import Progress
from kvik_bench.load.drive import MAX_UNCONNECTED, RunLog
from kvik_bench.report.result import Result, Row


def reply(request: Received) -> Reply:
    return models(request) or stream(request.body["max_tokens"], first=0.005, gap=0.001)


def bench(fake: FakeServer, tmp_path: Path, *words: str, code: int = 0) -> Result:
    out = tmp_path / "result.json"
    assert main(["bench", "serve", "--url", fake.url, "--json", str(out), *words]) == code
    return read_result(out.read_bytes())


def figures(row: Row) -> dict[str, float]:
    return {figure.name: figure.median for figure in row.figures}


def measured(fake: FakeServer, warmup: int = 1) -> list[Received]:
    """Return the requests without the query for models, the probe and warm-ups."""
    return [r for r in fake.requests if r.method == "POST"][1 + warmup :]


def test_a_closed_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(reply) as fake:
        result = bench(
            fake, tmp_path, "--concurrency", "3", "--num-requests", "10", "--output-tokens", "5",
            "--slo", "ttft=10s",
        )  # fmt: skip
        asked = measured(fake)
    assert len(asked) == 10
    assert {request.body["model"] for request in asked} == {"fake"}
    assert {request.body["max_tokens"] for request in asked} == {5}
    assert {len(request.body["prompt"].split()) for request in asked} == {128}
    assert len({request.connection for request in asked}) == 3
    (row,) = result.rows
    found = figures(row)
    assert row.label == "concurrency 3" and row.facts["requests"] == "10 completed, 0 failed"
    assert row.facts["tokens"] == "70 in, 50 out"
    assert found["goodput"] == pytest.approx(found["request throughput"])
    assert found["output throughput"] == pytest.approx(5 * found["request throughput"])
    assert 5 < found["TTFT p50"] < 500 and found["E2E p50"] > found["TTFT p50"]
    assert result.kind == "serve" and result.facts["model"] == "fake"
    names = "max_tokens, ignore_eos, include_usage, continuous_usage_stats"
    assert result.facts["fields sent"] == names
    out = capsys.readouterr().out
    assert "TTFT p99" in out and "send -> first non-empty output token" in out


def test_levels_and_repeats(tmp_path: Path) -> None:
    with FakeServer(reply) as fake:
        result = bench(
            fake, tmp_path, "--concurrency", "1,2", "--repeats", "2", "--num-requests", "3",
            "--output-tokens", "2", "--warmup", "2",
        )  # fmt: skip
        prompts = [request.body["prompt"] for request in measured(fake, warmup=0)]
    assert [row.label for row in result.rows] == ["concurrency 1", "concurrency 2"]
    assert all(len(figure.values) == 2 for row in result.rows for figure in row.figures)
    assert len(prompts) == len(set(prompts)) == 14  # no prefix cache helps later ones
    assert "curve" in {chart.kind for chart in result.charts}


def test_an_open_loop(tmp_path: Path) -> None:
    with FakeServer(reply) as fake:
        result = bench(
            fake, tmp_path, "--rate", "200", "--arrivals", "constant", "--duration", "0.3s",
            "--output-tokens", "2",
        )  # fmt: skip
        assert 50 < len(measured(fake)) <= 61
    (row,) = result.rows
    assert row.label == "200 requests/s, constant"
    assert row.facts["requests"].endswith(" 0 failed")


def test_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    rows = [("18:17:03.0000000", 30, 3), ("18:18:03.0000000", 20, 2), ("18:19:03.0000000", 1, 9)]
    text = "".join(f"2023-11-16 {time},{p},{o}\n" for time, p, o in rows)
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + text)
    with FakeServer(reply) as fake:
        result = bench(fake, tmp_path, "--trace", str(trace), "--speed", "600", "--limit", "2")
        warm_up, first, second = measured(fake, warmup=0)
    assert [len(r.body["prompt"].split()) for r in (first, second)] == [30, 20]
    assert [r.body["max_tokens"] for r in (first, second)] == [3, 2]
    assert second.arrived - warm_up.written[-1] > 0.09  # the first may have been late
    assert second.arrived - first.arrived < 30
    assert result.rows[0].label == "azure.csv x600"


def test_the_same_seed_sends_the_same_bytes(tmp_path: Path) -> None:
    """For any timing: the number of connections and the server's delays differ."""

    def bodies(*words: str) -> list[bytes]:
        with FakeServer(reply) as fake:
            options = ("--num-requests", "12", "--output-tokens", "1..5", "--prefix-tokens", "9")
            bench(fake, tmp_path, *options, "--rate", "300", *words)
            return sorted(request.raw for request in measured(fake))

    first = bodies("--seed", "5")
    assert bodies("--seed", "5", "--max-in-flight", "1") == first != bodies("--seed", "6")


def test_token_ids(tmp_path: Path) -> None:
    words = ["--num-requests", "2", "--prompt-tokens", "6", "--output-tokens", "2"]
    with FakeServer(reply) as fake:
        bench(fake, tmp_path, *words, "--vocab-size", "5000")
        bench(fake, tmp_path, *words, "--tokenizer", str(BUNDLED), "--prefix-tokens", "3")
        prompts = [r.body["prompt"] for r in fake.requests if r.method == "POST"]
    assert [len(prompt) for prompt in prompts] == [6] * 4 + [9] * 4
    assert max(prompts[4] + prompts[5]) < Tokenizer.load(BUNDLED).vocab_size
    assert prompts[6][:3] == prompts[7][:3] != prompts[5][:3]  # the warm-up has its own prefix


def test_conversations_grow(tmp_path: Path) -> None:
    with FakeServer(reply) as fake:
        bench(
            fake, tmp_path, "--endpoint", "chat", "--turns", "2", "--num-requests", "4",
            "--concurrency", "1", "--output-tokens", "2", "--prompt-tokens", "3",
            "--prefix-tokens", "5", "--think-time", "20ms",
        )  # fmt: skip
        one, two, three, _ = measured(fake)
    roles = [message["role"] for message in two.body["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert two.body["messages"][:2] == one.body["messages"]
    assert two.body["messages"][2]["content"] == " t0 t1"
    assert two.arrived - one.written[-1] > 0.015
    assert three.body["messages"][0] == one.body["messages"][0]  # the prefix is shared
    assert three.body["messages"][1] != one.body["messages"][1]


def test_texts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("Tell me a story\nAnd another one\n")
    with FakeServer(reply) as fake:
        options = ["--prompts", str(tmp_path / "prompts.txt"), "--num-requests", "3"]
        bench(fake, tmp_path, *options, "--concurrency", "1", "--output-tokens", "2")
        prompts = [request.body["prompt"] for request in measured(fake)]
    assert prompts == ["Tell me a story", "And another one", "Tell me a story"]


def test_failures_are_counted_and_the_run_continues(tmp_path: Path) -> None:
    def fails(request: Received) -> Reply:
        broken = Reply([b"engine died"], status=500)
        return broken if len(fake.requests) % 3 == 0 else reply(request)

    with FakeServer(fails) as fake:
        words = ["--num-requests", "9", "--concurrency", "1", "--output-tokens", "2"]
        result = bench(fake, tmp_path, *words, code=1)
    assert result.rows[0].facts["requests"] == "6 completed, 3 failed"
    assert result.remarks[0] == "concurrency 1: 3 of 9 requests failed: HTTP 500 (engine died)."


def test_a_run_in_which_everything_failed_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(request: Received) -> Reply:
        return models(request) or Reply([b"engine died"], status=500)

    with FakeServer(fails) as fake:
        words = ["--num-requests", "3", "--json", str(tmp_path / "r.json")]
        assert main(["bench", "serve", "--url", fake.url, *words]) == 1
    assert "3 of 3 requests failed" in capsys.readouterr().out
    (row,) = read_result((tmp_path / "r.json").read_bytes()).rows
    assert row.facts["requests"] == "0 completed, 3 failed"


@pytest.mark.parametrize("load", [("--concurrency", "3"), ("--rate", "200")])
def test_a_lost_server_ends_the_run_with_its_measurements(
    load: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def dies(request: Received) -> Reply:
        if len(fake.requests) > 60:
            fake.stop()
            return Reply([b""], close=True)
        return reply(request)

    with FakeServer(dies) as fake:
        words = ["--num-requests", "500", "--output-tokens", "2", *load]
        result = bench(fake, tmp_path, *words, code=2)
    completed, failed = map(int, re.findall(r"\d+", result.rows[0].facts["requests"]))
    assert completed >= 5 and MAX_UNCONNECTED <= failed < 200
    assert "kvik: error: --url: the server is lost: 5 requests in a" in capsys.readouterr().err


def test_a_server_that_has_seen_the_prompts(tmp_path: Path) -> None:
    def knows(request: Received) -> Reply:
        known = usage(100, 2, prompt_tokens_details={"cached_tokens": 90})
        return models(request) or Reply(
            [text("a"), text("b", "length"), event(choices=[], usage=known) + DONE]
        )

    with FakeServer(knows) as fake:
        words = ["--num-requests", "2", "--output-tokens", "2"]
        fresh = bench(fake, tmp_path, *words)
        shared = bench(fake, tmp_path, *words, "--prefix-tokens", "90")
    assert any("has it seen them before" in remark for remark in fresh.remarks)
    assert not any("has it seen them before" in remark for remark in shared.remarks)


def test_the_key_is_sent_and_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    with FakeServer(reply) as fake:
        for words in (
            ["--api-key", "s3cret"],
            ["--api-key=s3cret"],
            [f"--api-key=@{tmp_path}/key"],
        ):
            options = ["--num-requests", "1", "--output-tokens", "2", *words]
            monkeypatch.setattr(sys, "argv", ["kvik", "bench", "serve", *options])
            bench(fake, tmp_path, *options)
        assert {r.headers["authorization"] for r in fake.requests} == {"Bearer s3cret"}
    assert "s3cret" not in (tmp_path / "result.json").read_text() + capsys.readouterr().out


def test_a_server_that_is_too_slow_for_the_load(tmp_path: Path) -> None:
    """With one answer in flight at a time and more due, the load was not kept."""
    with FakeServer(reply) as fake:
        result = bench(
            fake, tmp_path, "--rate", "500", "--arrivals", "constant", "--max-in-flight", "1",
            "--num-requests", "20", "--output-tokens", "4",
        )  # fmt: skip
    assert any("were held back" in remark for remark in result.remarks)
    assert figures(result.rows[0])["held p99"] > 20


def test_progress_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    log = RunLog(in_flight=3, finished=10, failed=1, output_tokens=500)
    progress.show("8 requests/s, poisson", log, 2.0)
    progress.show("short", log, 4.0)
    progress.end()
    first, second, blank, rest = capsys.readouterr().err.split("\r")[1:]
    text = "8 requests/s, poisson: 2 s, 10 done, 3 in flight, 1 failed, 250 tokens/s"
    assert first == text
    assert second.rstrip().startswith("short: 4 s") and len(second) == len(first)
    assert not blank.strip() and not rest


def test_invalid_options_are_refused(command: Command) -> None:
    for words, message in (
        (["--rate", "1", "--concurrency", "1"], "--rate: cannot be combined with --concurrency"),
        (["--trace", "x", "--output-tokens", "9"], "--output-tokens: cannot be combined with"),
        (["--max-in-flight", "9"], "--max-in-flight: needs --rate or --trace"),
        (["--prefix-tokens", "9", "--prompts", "x"], "--prefix-tokens: cannot be combined with"),
        (["--speed", "2"], "--speed: needs --trace"),
        (["--prefixes", "2"], "--prefixes: needs --prefix-tokens"),
        (["--rate", "0"], "--rate: must be a positive number"),
        (["--rate", "1,1"], "--rate: must be different numbers"),
        (["--concurrency", "0"], "--concurrency: must be"),
        (["--concurrency", "9" * 20], "--concurrency: must be"),
        (["--num-requests", "0"], "--num-requests: must be an integer"),
        (["--prefix-tokens", "9" * 20], "--prefix-tokens: must be an integer"),
        (["--vocab-size", "9" * 20], "--vocab-size: must be an integer"),
        (["--turns", "9" * 20], "--turns: must be an integer"),
        (["--warmup", "-1"], "--warmup: must be"),
        (["--duration", "5"], "--duration: must be a time"),
        (["--slo", "ttft"], "--slo: must be like"),
        (["--prompt-tokens", "x"], "--prompt-tokens: must be like"),
        (["--trace", "/no/such.csv"], "--trace: cannot be read"),
        (["--prompts", "/no/such.txt"], "--prompts: cannot be read"),
        (["--url", "ftp://x"], "--url: must be like http"),
        (["--extra-body", "{"], "--extra-body: must be a JSON object"),
        (["--api-key", "@/no/such"], "--api-key: cannot be read"),
        (["--vocab-size", "9", "--endpoint", "chat"], "--vocab-size: makes token ids"),
        (["--vocab-size", "9", "--turns", "2"], "--vocab-size: makes token ids"),
        (["--repeats", "0"], "--repeats: must be at least 1"),
        (["--url", "http://127.0.0.1:9"], "--url: http://127.0.0.1:9 cannot be reached"),
        (["--endpoint", "soap"], "--endpoint: invalid choice"),
    ):
        error = command.refusal("bench", "serve", "--url", "http://127.0.0.1:9", *words)
        assert error.startswith(message)


def test_a_missing_aiohttp_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    error = command.refusal("bench", "serve", "--url", "http://127.0.0.1:9")
    assert "pip install 'kvik[bench]'" in error


@pytest.mark.parametrize(
    ("number", "ctrl_c"),
    [
        (signal.SIGINT, signal.default_int_handler),
        pytest.param(signal.SIGTERM, signal.default_int_handler, marks=pytest.mark.full),
        # As in background jobs of a shell.
        pytest.param(signal.SIGTERM, signal.SIG_IGN, marks=pytest.mark.full),
    ],
)
def test_an_ended_run_prints_its_measurements(
    number: signal.Signals, ctrl_c: Any, tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    with FakeServer(reply) as fake:
        command = [sys.executable, "-m", "kvik", "bench", "serve", "--url", fake.url]
        command += ["--duration", "1h", "--output-tokens", "3", "--json", str(out)]
        default = signal.signal(signal.SIGINT, ctrl_c)  # children inherit it
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        signal.signal(signal.SIGINT, default)
        deadline = time.monotonic() + 60
        while len(fake.requests) < 40 and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(process.pid, number)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert b"Traceback" not in errors
    assert b"TTFT p50" in output
    result = json.loads(out.read_text())
    completed = re.match(r"(\d+) completed", result["rows"][0]["facts"]["requests"])
    assert completed and int(completed[1]) >= 20
