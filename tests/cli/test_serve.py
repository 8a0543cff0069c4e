"""`kvik serve`: its flags, and the whole command as a process."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
from helpers.commands import Command

from kvik.cli.main import main
from kvik.cli.serve import build_parser, read_configs
from kvik.config.config import EngineConfig
from kvik.config.model_source import BUNDLED
from kvik.config.server_config import ServerConfig
from kvik.server.server import model_names

MAX_FLAGS = 55
MODELS = (BUNDLED, BUNDLED.parent / "stories-draft")


def configs(*arguments: str) -> tuple[EngineConfig, ServerConfig]:
    return read_configs(build_parser().parse_intermixed_args(arguments))


def test_the_command_has_few_flags() -> None:
    flags = [
        action
        for action in build_parser()._actions
        if action.option_strings
        and "--help" not in action.option_strings
        and action.help is not argparse.SUPPRESS
    ]
    assert len(flags) <= MAX_FLAGS


def test_flags_have_the_names_of_other_servers() -> None:
    engine, server = configs(
        *("some/model", "--max-model-len", "4k", "--max-num-seqs", "8", "--kv-cache-dtype", "fp8"),
        *("--attention-sinks", "4", "--window", "1k"),
        *("--max-num-batched-tokens", "512", "--gpu-memory-utilization", "0.5"),
        *("--host", "0.0.0.0", "--port", "80", "--api-key", "a", "--api-key", "b"),
        *("--served-model-name", "x", "--no-enable-prefix-caching", "--seed", "-7"),
    )
    assert (engine.model, engine.max_model_len, engine.max_num_seqs) == ("some/model", 4096, 8)
    assert (engine.attention_sinks, engine.window) == (4, 1024)
    assert (engine.max_num_batched_tokens, engine.memory_utilization) == (512, 0.5)
    assert (engine.kv_cache_dtype, engine.enable_prefix_caching) == ("fp8", False)
    assert engine.seed == -7
    assert (server.host, server.port, server.api_key) == ("0.0.0.0", 80, ("a", "b"))
    assert server.served_model_name == ("x",)
    assert configs() == (EngineConfig(), ServerConfig())


@pytest.mark.parametrize(
    ("arguments", "model", "names"),
    [
        (["some/model", "--served-model-name", "a", "b"], "some/model", ("a", "b")),
        (["--served-model-name", "a", "b", "--port", "1"], "", ("a", "b")),
        (["m", "--served-model-name", "a", "b", "--served-model-name", "c"], "m", ("a", "b", "c")),
        (["--served-model-name=a", "some/model"], "some/model", ("a",)),
        (["--served-model-name", "a", "--port", "1", "some/model"], "some/model", ("a",)),
    ],
)
def test_a_model_may_have_several_names(
    arguments: list[str], model: str, names: tuple[str, ...]
) -> None:
    engine, server = configs(*arguments)
    assert (engine.model, server.served_model_name) == (model, names)


def test_flags_override_the_environment_and_that_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kvik.toml"
    file.write_text(
        "model = 'file'\nport = 1\nlog-level = 'debug'\nshutdown-timeout = 5\n"
        "max-num-seqs = 1\nblock-size = 1\nnum-blocks = 7\nageing = 2.5\n"
        "any-model-name = true\npressure-max-tokens = 8\n"
    )
    monkeypatch.setenv("KVIK_PORT", "2")
    monkeypatch.setenv("KVIK_ALLOWED_HOST", "one.example,*")
    monkeypatch.setenv("KVIK_LOG_LEVEL", "error")
    monkeypatch.setenv("KVIK_MAX_NUM_SEQS", "2")
    monkeypatch.setenv("KVIK_BLOCK_SIZE", "2")
    monkeypatch.setenv("KVIK_PRESSURE_MAX_TOKENS", "9")
    engine, server = configs("--config", str(file), "--port", "3", "--max-num-seqs", "3")
    assert (server.port, server.log_level, server.shutdown_timeout) == (3, "error", 5.0)
    assert server.allowed_host == ("one.example", "*")
    assert (engine.max_num_seqs, engine.block_size) == (3, 2)
    assert (engine.num_blocks, engine.ageing) == (7, 2.5)  # these have no flags
    assert (server.any_model_name, server.pressure_max_tokens) == (True, 9)  # nor do these
    assert engine.model == "file"
    assert configs("flag", "--config", str(file))[0].model == "flag"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--port", "x"], "--port: must be an integer"),
        (["--port", "70000"], "--port: must be an integer in [0, 65535]"),
        (["--metrics-compat", "x"], "--metrics-compat: must be one of"),
        (["--allowed-host", "gpu.example:80"], "--allowed-host: must be a name without a port"),
        (
            ["--served-model-name", "a", "some/model"],
            "--served-model-name: takes all names that fol",
        ),
        (["--served-model-name", "a", "."], "--served-model-name: takes all names that follow it"),
        (["--admin-port", "0"], "--admin-port: needs a single API key, or one marked admin"),
        (["--api-key", ""], "--api-key: must be printable"),
        (["--config", "/no/such"], "--config: '/no/such' cannot be read"),
        (["--host", "no.such.host.invalid"], "--host: "),
        (["--role", "first"], "--role: must be one of"),
        (["--host", "192.0.2.1"], "--host: "),  # of no machine
        (["--gpu-memory-utilization", "x"], "must be a number"),
        (["/no/such/model", "--record", "/dev/null", "--port", "0"], "--record: '/dev/null' must"),
        (["/no/such/model", "--port", "0"], "model: there is no folder"),
    ],
)
def test_an_error_is_in_one_line(arguments: list[str], part: str, command: Command) -> None:
    assert part in command.refusal("serve", *arguments)


def test_an_error_in_the_config_file_names_keys_and_no_flags(
    tmp_path: Path, command: Command
) -> None:
    (tmp_path / "kvik.toml").write_text("max-num-seqs = true")
    error = command.refusal("serve", "--config", str(tmp_path / "kvik.toml"))
    assert error.startswith("--config: ") and "--max-num-seqs" not in error


def test_a_port_in_use_is_reported_before_the_model_is_loaded(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        error = command.refusal("serve", "/no/such/model", "--port", port)
    assert error.startswith(f"--port: cannot listen on 127.0.0.1 port {port}")


@pytest.mark.parametrize(
    ("arguments", "warned"),
    [
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--api-key", "a"], False),
        (["--host", "127.0.0.1"], False),
    ],
)
def test_a_server_without_keys_on_a_public_address_is_warned_of(
    arguments: list[str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["serve", "/no/such/model", "--port", "0", *arguments]) == 2
    assert ("without an API key" in caplog.text) == warned


def test_the_served_names_of_the_model(tmp_path: Path) -> None:
    file = tmp_path / "story.gguf"
    file.touch()
    named = ServerConfig(served_model_name=("a", "b", "a"))
    assert model_names(named, "", tmp_path) == ("a", "b")
    assert model_names(ServerConfig(), "", Path("/x/bundled/stories")) == ("stories",)
    assert model_names(ServerConfig(), "owner/name", Path("/hub/snapshots/0")) == ("owner/name",)
    assert model_names(ServerConfig(), str(file), file) == ("story",)
    assert model_names(ServerConfig(), str(tmp_path), tmp_path) == (tmp_path.name,)


# The whole command


class Process:
    """A ready server, and its output until then."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.printed: list[str] = []
        for line in process.stdout:
            self.printed.append(line.rstrip("\n"))
            if self.printed[-1] == "ready":
                break
        assert self.printed[-1] == "ready", self.printed

    @property
    def url(self) -> str:
        line = next(line for line in self.printed if "playground on " in line)
        return line.partition("playground on ")[2].partition(",")[0]

    def connect(self, timeout: float = 60) -> HTTPConnection:
        port = int(self.url.rstrip("/").rpartition(":")[2])
        return HTTPConnection("127.0.0.1", port, timeout=timeout)


@contextmanager
def serving(*arguments: str, errors: int = subprocess.PIPE) -> Iterator[Process]:
    command = [sys.executable, "-m", "kvik", "serve", "--port", "0", *arguments]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environ
    ) as process:
        try:
            yield Process(process)
        finally:
            process.kill()


@pytest.mark.full
def test_the_bundled_model_is_served_and_a_signal_ends_it() -> None:
    small = ("--device", "cpu", "--threads", "1", "--max-num-seqs", "4", "--max-model-len", "256")
    with serving(*small, "--api-key", "sesame", "--shutdown-timeout", "60") as server:
        decisions = [line.split()[0] for line in server.printed]
        assert {"max_model_len", "kernels", "dtype"} <= set(decisions)
        assert server.url.startswith("http://127.0.0.1:")
        connection = server.connect()
        connection.request("GET", "/health")
        response = connection.getresponse()
        assert (response.status, json.loads(response.read())["status"]) == (200, "ok")
        headers = {"authorization": "Bearer sesame", "content-type": "application/json"}
        body = {"prompt": "Once upon a time", "max_tokens": 200, "stream": True, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        assert response.status == 200
        assert response.readline().startswith(b"data: {")
        server.process.send_signal(signal.SIGTERM)
        rest = response.read()  # the stream continues to its end
        assert rest.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in rest
        connection.close()
        _, errors = server.process.communicate(timeout=60)
        assert server.process.returncode == 0, errors
        assert "Traceback" not in errors
        assert "sesame" not in errors
        assert "Once upon" not in errors


@pytest.mark.full
def test_a_collector_that_does_not_answer_does_not_keep_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("opentelemetry.sdk")
    small = ("--device", "cpu", "--threads", "1", "--max-num-seqs", "4", "--max-model-len", "256")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        monkeypatch.setenv("KVIK_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1000")
        with serving(*small) as server:
            connection = server.connect()
            body = json.dumps({"prompt": "A fox", "max_tokens": 2})
            connection.request(
                "POST", "/v1/completions", body, {"content-type": "application/json"}
            )
            assert connection.getresponse().status == 200
            connection.close()
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(25) == 0  # the library alone would wait for 30 s


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="the size of a pipe is set")
def test_requests_are_answered_while_the_log_has_no_reader() -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)  # bytes: some forty requests
    small = ("--device", "cpu", "--threads", "1", "--max-num-seqs", "4", "--max-model-len", "256")
    with serving(*small, errors=writing) as server:
        connection = server.connect(timeout=10)
        for _ in range(100):
            connection.request("GET", "/v1/models")
            response = connection.getresponse()
            assert response.status == 200
            response.read()
        connection.close()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        os.close(writing)
        with os.fdopen(reading) as log:
            assert "/v1/models 200" in log.read()


@pytest.mark.full
def test_a_quantised_model_is_served_with_a_quantised_draft_model(tmp_path: Path) -> None:
    folders = [str(tmp_path / "model"), str(tmp_path / "draft")]
    fast = ("--method", "rtn", "--bits", "4", "--eval", "none", "--no-speed", "--device", "cpu")
    for model, folder in zip(MODELS, folders, strict=True):
        assert main(["quantize", str(model), "-o", folder, *fast]) == 0
    small = ("--device", "cpu", "--threads", "1", "--max-num-seqs", "4", "--max-model-len", "256")
    drafting = ("--spec-method", "draft_model", "--spec-model", folders[1], "--spec-tokens", "2")
    with serving(folders[0], *small, *drafting, "--kv-cache-dtype", "int8") as server:
        connection = server.connect()
        body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        head = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), head)
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        assert response.status == 200, answer
        assert answer["usage"]["completion_tokens"] == 8
