"""Pipeline stages on a Ray cluster with two nodes on this machine."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from helpers.faults import raising
from helpers.http_server import until
from helpers.optional_native import needs_native

from kvik import LLM, SamplingParams
from kvik.errors import ConfigError, GroupLost

pytestmark = needs_native

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
COMMON = {"device": "cpu", "threads": 3, "max_model_len": 256}
RAY = {**COMMON, "pipeline_parallel_size": 3, "distributed_executor_backend": "ray"}
TEXTS = ["Once upon a time", "The dog", "She said"]
STORE = {"object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="kvik was installed without kvik[ray]")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 1, "include_dashboard": False, **STORE}
    made = Cluster(initialize_head=True, head_node_args=head)
    made.add_node(num_cpus=1, **STORE)
    ray.init(address=made.address, log_to_driver=False, configure_logging=False)
    yield made
    ray.shutdown()
    made.shutdown()


def stages() -> list[int]:
    """Return the stages that Ray has started; others have addresses of their own."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                command = file.read()
        except OSError:
            continue
        if b"kvik.stage_process" in command and not (
            b"127.0.0.1" in command or b"10.231" in command
        ):
            found.append(int(name))
    return found


def answers(llm: LLM) -> list[object]:
    outputs = [one.outputs[0] for one in llm.generate(TEXTS, PARAMS)]
    return [(one.token_ids, one.logprobs, one.error) for one in outputs]


@pytest.mark.full
def test_stages_elsewhere_give_the_same_bits_and_lost_ones_are_named(cluster) -> None:
    """The place of a lost stage is free again."""
    with LLM(**COMMON) as llm:
        right = answers(llm)
    for _ in range(2):
        with LLM(**RAY) as llm:
            assert answers(llm) == right
            os.kill(min(stages()), signal.SIGKILL)
            try:
                error = llm.generate(TEXTS, PARAMS)[0].outputs[0].error
            except GroupLost as lost:  # the loss was known before
                error = str(lost)
            assert "has ended with signal 9" in error and "stage " in error
        until(lambda: not stages(), 10)


@pytest.mark.full
def test_a_full_cluster_is_one_error(cluster, monkeypatch) -> None:
    monkeypatch.setattr("kvik.ray_launcher.PLACE_SECONDS", 1.0)
    with pytest.raises(ConfigError, match="ray has not found 2 times 4 free CPUs"):
        LLM(**{**RAY, "threads": 12})
    assert not stages()


@pytest.mark.full
def test_ray_serve_has_kvik_in_its_replicas(cluster) -> None:
    serve = pytest.importorskip("ray.serve", reason="ray was installed without its server")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    example = Path(__file__).parents[1] / "examples" / "ray_serve.py"
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(runpy.run_path(str(example))["app"], name="kvik")
        body = json.dumps(
            {"model": "stories", "prompt": "Once", "max_tokens": 8, "seed": 0}
        ).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        assert answer["usage"]["completion_tokens"] == 8
    finally:
        serve.shutdown()


def test_without_ray_the_error_names_the_package_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="ray is missing: pip install") as caught:
        LLM(**RAY)
    assert caught.value.field == "distributed_executor_backend"


def test_ray_without_stages_has_nothing_to_place() -> None:
    with pytest.raises(ConfigError, match="only with pipeline_parallel_size of 2 or more"):
        LLM(**COMMON, distributed_executor_backend="ray")


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (raising(ConnectionError()), "ray start --head"),
        (
            raising(RuntimeError("Version mismatch:\nRay: 2.1")),
            "join .*: Version mismatch: Ray: 2.1",
        ),
        (lambda *_, **__: time.sleep(2), "has answered within 0 s: start one, or set RAY_ADDRESS"),
    ],
    ids=["none", "another version", "silent"],
)
def test_a_cluster_that_cannot_be_joined_is_one_error(monkeypatch, init, message) -> None:
    ray = pytest.importorskip("ray", reason="kvik was installed without kvik[ray]")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr("kvik.ray_launcher.PLACE_SECONDS", 0.2)
    with pytest.raises(ConfigError, match=message) as caught:
        LLM(**RAY)
    assert caught.value.field == "distributed_executor_backend" and "\n" not in str(caught.value)
