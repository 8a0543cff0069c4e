"""A stage on another host, with its own network and /dev/shm, over a link that delays and loses
packets and goes down."""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import pytest

pytest.importorskip("kvik.kernels.cpu._native", reason="kvik has no native kernels here")

from kvik import LLM, SamplingParams, stage_process
from kvik.child_process import python_command
from kvik.errors import ConfigError
from kvik.rank_process import Process

HERE, THERE = "10.231.7.1", "10.231.7.2"
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
DELAY = (0.008, 0.012)  # seconds
LOSS, LATER = 0.05, 0.1  # share, seconds more if reordered
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
COMMON = {"device": "cpu", "threads": 2, "max_model_len": 256}
STAGES = {**COMMON, "pipeline_parallel_size": 2}
pytestmark = pytest.mark.full

TEXTS = ["Once upon a time", "The dog", "She said"]


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, timeout=20)


def open_tun(name: str) -> int:
    """Create a network device whose packets are read and written here."""
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return file


class LossyWire:
    """Forwards packets between two devices, with delays, reordering and losses."""

    def __init__(self, files: tuple[int, int]) -> None:
        self._files, self._dice = files, random.Random(0)
        self._closing, self.lost = threading.Event(), 0
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(5)
        for file in self._files:
            os.close(file)

    def _carry(self) -> None:
        others = dict(zip(self._files, reversed(self._files), strict=True))
        under_way: list[tuple[float, int, int, bytes]] = []  # time of arrival, destination
        count = 0
        while not self._closing.is_set():
            wait = under_way[0][0] - time.monotonic() if under_way else LATER
            for file in select.select(self._files, (), (), min(max(wait, 0.0), LATER))[0]:
                packet, count = os.read(file, 1 << 16), count + 1
                if self._dice.random() < LOSS:
                    self.lost += 1
                    continue
                comes = time.monotonic() + self._dice.uniform(*DELAY)
                heapq.heappush(under_way, (comes, count, others[file], packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, file, packet = heapq.heappop(under_way)
                with suppress(OSError):  # a device is down
                    os.write(file, packet)


class OtherHost:
    """A network namespace behind a pair of virtual devices, as a `Launcher`."""

    host, is_local = HERE, False

    def __init__(self, *, lossy: bool = False) -> None:
        self.name = f"kvik{os.getpid() % 10_000}"
        self.device, there = f"{self.name}a", f"{self.name}b"
        self.wire: LossyWire | None = None
        run(f"ip netns add {self.name}")
        if lossy:
            self.wire = LossyWire((open_tun(self.device), open_tun(there)))
            run(f"ip link set {there} netns {self.name}")
        else:
            run(f"ip link add {self.device} type veth peer name {there} netns {self.name}")
        run(f"ip addr add {HERE}/24 dev {self.device}")
        run(f"ip link set {self.device} up")
        for change in (f"addr add {THERE}/24 dev {there}", f"link set {there} up"):
            run(f"ip netns exec {self.name} ip {change}")

    def start(self, stage: int, arguments: Sequence[str], token: str) -> Process:
        mounted = 'mount -t tmpfs none /dev/shm && exec "$@"'
        inner = ("unshare", "--mount", "sh", "-c", mounted, "sh")
        command = python_command("kvik.stage_process", *arguments, THERE)
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *inner, *command], stdin=subprocess.PIPE
        )
        with process.stdin:
            process.stdin.write(token.encode())
        return process

    def stop(self) -> None:
        pass

    def delete(self) -> None:
        if self.wire is not None:
            self.wire.close()
        subprocess.run(["ip", "link", "del", self.device], capture_output=True, check=False)
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True, check=False)


@pytest.fixture
def other_host(request, monkeypatch) -> Iterator[OtherHost]:
    """Provide a host, behind a lossy wire if the test requests one."""
    if sys.platform != "linux" or os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux, root and iproute2")
    lossy = getattr(request, "param", False)
    if lossy and not os.path.exists("/dev/net/tun"):
        pytest.skip("this system has no network devices of a program (/dev/net/tun)")
    try:
        made = OtherHost(lossy=lossy)
    except (OSError, subprocess.SubprocessError):
        pytest.skip("this system allows no network namespaces")
    monkeypatch.setattr(stage_process, "LocalLauncher", lambda: made)
    yield made
    made.delete()


def answers(options: dict[str, object]) -> list[object]:
    with LLM(**options) as llm:
        outputs = llm.generate(TEXTS, PARAMS)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


@pytest.mark.parametrize("other_host", [False, True], ids=["plain", "lossy"], indirect=True)
def test_the_link_does_not_change_answers(other_host) -> None:
    assert answers(STAGES) == answers(COMMON)
    assert other_host.wire is None or other_host.wire.lost


def test_a_broken_link_is_one_error_in_time(other_host, monkeypatch) -> None:
    monkeypatch.setattr("kvik.links.SILENT_SECONDS", 4)
    with LLM(**STAGES) as llm:
        assert llm.generate(TEXTS, PARAMS)[0].outputs[0].error is None
        run(f"ip link set {other_host.device} down")
        began = time.monotonic()
        error = llm.generate(TEXTS, PARAMS)[0].outputs[0].error
        assert "stage 0 cannot be reached" in error and time.monotonic() - began < 4 + 5


def test_a_host_that_cannot_reach_this_one_ends_the_start(other_host, monkeypatch) -> None:
    run(f"ip link set {other_host.device} down")
    with pytest.raises(ConfigError, match=f"stage 0 cannot connect to the engine at {HERE}"):
        LLM(**STAGES)
