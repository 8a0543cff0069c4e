"""`kvik serve` as users start it: two processes, observed from outside."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.http_server import ask

from kvik.server.texts import THREADS

# Threads of the server's pools, which start with their first work.
POOLED = THREADS + min(32, (os.cpu_count() or 1) + 4)


@dataclass(frozen=True)
class ProcessResources:
    """Resources of a process; `memory` is its private memory in bytes."""

    files: int
    threads: int
    memory: int


@dataclass
class ServerProcess:
    process: subprocess.Popen[str]
    port: int
    key: str = ""  # sent with each GET

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine_pid(self) -> int:
        """The id of the process with the model."""
        found = [pid for pid in children(self.process.pid) if "engine_process" in command(pid)]
        (pid,) = found
        return pid

    def get(self, path: str) -> tuple[int, bytes]:
        key = f"Bearer {self.key}" if self.key else None
        answer = ask(self, "GET", path, authorization=key)
        return answer.status, answer.body

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        answer = ask(self, "POST", path, body, timeout=60)
        return answer.status, answer.json

    def metrics(self) -> dict[str, float]:
        """Return kvik's metrics, those without further labels under their plain names."""
        _, text = self.get("/metrics")
        rows = re.findall(r'^kvik:(\w+)\{model_name="[^"]*"\} (\S+)$', text.decode(), re.MULTILINE)
        return {name: float(value) for name, value in rows}

    def wait_ready(self, seconds: float = 600.0) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "it ended"
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.05)
        raise TimeoutError("it is not ready")

    def resources(self) -> tuple[ProcessResources, ProcessResources]:
        """Return the resources of the HTTP process and of the engine's."""
        return resources(self.process.pid), resources(self.engine_pid)


@contextmanager
def server_process(*flags: str, exit_code: int = 0) -> Iterator[ServerProcess]:
    """Provide a ready server of the bundled model on a free port, and drain it at the end.

    Args:
        exit_code: expected exit code.
    """
    port = free_port()
    process = subprocess.Popen(
        serve_command(port, *flags),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    server = ServerProcess(process, port)
    try:
        server.wait_ready()
        yield server
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == exit_code
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve_command(port: int, *flags: str) -> Sequence[str]:
    words = ("serve", "--port", str(port), "--log-level", "warning", *flags)
    return (sys.executable, "-m", "kvik", *words)


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    own = [int(word) for word in text.split()]
    return own + [grandchild for child in own for grandchild in children(child)]


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def gone(pid: int) -> bool:
    """Return whether a process has ended; zombies count as ended."""
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state in "ZX"
    return True


def resources(pid: int) -> ProcessResources:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return ProcessResources(
        files=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(status["Threads"]),
        memory=int(status["RssAnon"].split()[0]) * 1024,
    )
