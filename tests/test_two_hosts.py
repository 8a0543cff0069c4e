"""A stage on another host: a network and a /dev/shm of its own, behind a link that delays, loses,
and goes down."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

pytest.importorskip("kvik.kernels.cpu._native", reason="kvik has no native kernels here")

from kvik import LLM, SamplingParams, stage_process
from kvik.child_process import python_command
from kvik.errors import ConfigError
from kvik.links import SILENT_SECONDS
from kvik.rank_process import Process

HERE, THERE = "10.231.7.1", "10.231.7.2"
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
COMMON = {"device": "cpu", "threads": 2, "max_model_len": 256}
STAGES = {**COMMON, "pipeline_parallel_size": 2}
pytestmark = pytest.mark.full

TEXTS = ["Once upon a time", "The dog", "She said"]


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, timeout=20)


class OtherHost:
    """A network namespace behind a pair of virtual devices, as a `Launcher`."""

    host, here = HERE, False

    def __init__(self) -> None:
        self.name = f"kvik{os.getpid() % 10_000}"
        self.device = f"{self.name}a"
        run(f"ip netns add {self.name}")
        run(f"ip link add {self.device} type veth peer name {self.name}b netns {self.name}")
        run(f"ip addr add {HERE}/24 dev {self.device}")
        run(f"ip link set {self.device} up")
        for change in (f"addr add {THERE}/24 dev {self.name}b", f"link set {self.name}b up"):
            run(f"ip netns exec {self.name} ip {change}")

    def start(self, stage: int, arguments: Sequence[str], token: str) -> Process:
        inner = (
            "unshare",
            "--mount",
            "sh",
            "-c",
            'mount -t tmpfs none /dev/shm && exec "$@"',
            "sh",
        )
        command = python_command("kvik.stage_process", *arguments, THERE)
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *inner, *command], stdin=subprocess.PIPE
        )
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(token.encode())
        return process

    def stop(self) -> None:
        pass

    def delete(self) -> None:
        subprocess.run(["ip", "link", "del", self.device], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True, check=False)


@pytest.fixture
def other_host(monkeypatch) -> Iterator[OtherHost]:
    if sys.platform != "linux" or os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux, root and iproute2")
    try:
        made = OtherHost()
    except (OSError, subprocess.SubprocessError):
        pytest.skip("this system allows no network namespaces")
    monkeypatch.setattr(stage_process, "LocalLauncher", lambda: made)
    yield made
    made.delete()


def answers(options: dict[str, object]) -> list[object]:
    with LLM(**options) as llm:
        outputs = llm.generate(TEXTS, PARAMS)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


@pytest.mark.parametrize("trouble", ["", "delay 10ms 2ms loss 1%"])
def test_what_lies_between_changes_nothing(other_host, trouble: str) -> None:
    alone = answers(COMMON)
    if trouble:
        try:
            run(f"tc qdisc add dev {other_host.device} root netem {trouble}")
        except (OSError, subprocess.SubprocessError):
            pytest.skip("this system has no netem")
    assert answers(STAGES) == alone


def test_a_link_that_goes_down_is_one_error_in_time(other_host) -> None:
    with LLM(**STAGES) as llm:
        assert llm.generate(TEXTS, PARAMS)[0].outputs[0].error is None
        run(f"ip link set {other_host.device} down")
        began = time.monotonic()
        error = llm.generate(TEXTS, PARAMS)[0].outputs[0].error
        assert (
            "stage 0 cannot be reached" in error and time.monotonic() - began < SILENT_SECONDS + 5
        )


def test_a_host_that_cannot_reach_this_one_ends_the_start(other_host, monkeypatch) -> None:
    run(f"ip link set {other_host.device} down")
    with pytest.raises(ConfigError, match=f"stage 0 cannot connect to the engine at {HERE}"):
        LLM(**STAGES)
