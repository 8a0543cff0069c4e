"""Engine processes that crash, hang or cannot be loaded, and the fate of their requests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop
from helpers import engine_child
from helpers.engine_child import CRASH, HANG
from helpers.optional_native import needs_native
from helpers.served_engine import engine_request as request
from helpers.served_engine import tiny_config
from helpers.server_process import gone
from helpers.virtual_time import run_virtually
from helpers.waiting import eventually

from kvik import child_process
from kvik.core.types import FinishReason, RequestDelta
from kvik.engine.client import EngineClient
from kvik.engine.remote import EngineState
from kvik.engine.sources import RestartPolicy, Supervisor, restart_policy
from kvik.engine.wire import EngineStart
from kvik.errors import UnavailableError

pytestmark = pytest.mark.usefixtures("forked")
QUICK = RestartPolicy(
    stall=0.5, kill=30.0, exit=1.0, pause=0.01, longest_pause=0.05, crashes=3, window=60.0
)
PATIENT = RestartPolicy(stall=90.0, kill=90.0, exit=90.0, pause=0.01)  # longer than a test


class Rig:
    """A client with an engine process; `mode`: of `engine_child`, or another command."""

    def __init__(self, mode: str, policy: RestartPolicy) -> None:
        config = tiny_config()
        own = [sys.executable, str(Path(engine_child.__file__)), mode]
        command = [mode] if mode.startswith("/") else own
        self.printed: list[str] = []
        self.supervisor = Supervisor(command, EngineStart(config), policy, self.printed.append)
        self.client = EngineClient(config, [self.supervisor])
        self.deltas: list[RequestDelta] = []

    async def until(self, state: EngineState) -> None:
        await eventually(lambda: self.client.state is state)

    async def ended(self, name: str) -> RequestDelta:
        while True:
            for delta in self.deltas:
                if delta.request_id == name and delta.finish_reason is not None:
                    return delta
            await asyncio.sleep(0.002)

    async def restarted(self) -> None:
        """Wait until the engine has been replaced."""
        pid = self.supervisor.pid
        await eventually(lambda: self.supervisor.pid not in (pid, None))
        await self.until(EngineState.READY)


def exists(pid: int) -> bool:
    """Return whether a process exists; zombies count."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def open_files() -> set[str]:
    """Return the targets of this process's file descriptors."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


@asynccontextmanager
async def supervised(mode: str = "serve", policy: RestartPolicy = QUICK) -> AsyncIterator[Rig]:
    """Provide a client with an engine process, and check that it leaves nothing behind."""
    rig = Rig(mode, policy)
    files = open_files()
    rig.client.start(rig.deltas.extend)
    before = None
    try:
        yield rig
    finally:
        before, began = rig.supervisor.pid, time.monotonic()
        await rig.client.close()
        assert time.monotonic() - began < 30
    assert rig.supervisor.pid is None
    assert before is None or not exists(before)
    assert rig.client.num_unfinished == 0
    ends = [(d.request_id, d.index) for d in rig.deltas if d.finish_reason is not None]
    assert len(set(ends)) == len(ends)
    while new := open_files() - files:  # threads of other tests open and close files meanwhile
        assert time.monotonic() - began < 60, new
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
async def test_a_process_that_dies_is_replaced(loop_factory):
    """Detected by its end alone."""
    async with supervised("hangs:2", PATIENT) as rig:
        with pytest.raises(UnavailableError, match="being started"):
            rig.client.add(request())
        await rig.until(EngineState.READY)
        rig.client.add(request("a"))
        assert (await rig.ended("a")).finish_reason is FinishReason.LENGTH
        rig.client.add(request("b", n=2, max_tokens=200))
        await eventually(lambda: len({d.index for d in rig.deltas if d.request_id == "b"}) >= 2)
        os.kill(rig.supervisor.pid, signal.SIGKILL)
        lost = await rig.ended("b")
        assert lost.finish_reason is FinishReason.ERROR
        assert rig.client.state is EngineState.RESTARTING
        await rig.restarted()
        rig.client.add(request("c"))
        assert (await rig.ended("c")).finish_reason is FinishReason.LENGTH
        assert (await rig.client.stats()).delivered_tokens == 5
    assert sum(d.finish_reason is FinishReason.ERROR for d in rig.deltas) == 2


async def test_an_engine_that_sleeps_has_no_process_until_a_request_comes():
    async with supervised() as rig:
        with pytest.raises(UnavailableError, match="being started"):
            await rig.client.sleep()
        await rig.until(EngineState.READY)
        rig.client.add(request("a"))
        with pytest.raises(UnavailableError, match="cannot sleep while it has requests"):
            await rig.client.sleep()
        await rig.ended("a")
        pid = rig.supervisor.pid
        sleeping = asyncio.ensure_future(rig.client.sleep())
        await rig.until(EngineState.ASLEEP)
        rig.client.add(request("b"))  # while the process ends
        rig.client.add(replace(request("c"), deadline=time.monotonic()))
        await sleeping
        assert not exists(pid)
        assert (await rig.ended("b")).finish_reason is FinishReason.LENGTH
        assert (await rig.ended("c")).finish_reason is FinishReason.DEADLINE
        assert (await rig.client.stats()).delivered_tokens == 10
        await rig.client.sleep()
        assert rig.client.accepts
        await rig.client.reset_prefix_cache()
        assert (rig.client.state, rig.client.num_starts) == (EngineState.READY, 3)
        await rig.client.sleep()
        rig.client.add(request("d"))  # ends with the client


async def test_waiting_requests_are_served_by_the_next_engine():
    async with supervised("hangs:8", PATIENT) as rig:
        await rig.until(EngineState.READY)
        os.kill(rig.supervisor.pid, signal.SIGSTOP)  # until it has all of them
        for i in range(8):  # as many as can run at a time
            rig.client.add(request(f"r{i}", max_tokens=200))
        rig.client.add(request("waits"))
        os.kill(rig.supervisor.pid, signal.SIGCONT)
        await eventually(lambda: len({d.request_id for d in rig.deltas}) >= 8)
        os.kill(rig.supervisor.pid, signal.SIGKILL)
        for i in range(8):
            lost = await rig.ended(f"r{i}")
            assert (lost.finish_reason, lost.resendable) == (FinishReason.ERROR, True)
        assert (await rig.ended("waits")).finish_reason is FinishReason.LENGTH
    assert sum(len(d.token_ids) for d in rig.deltas if d.request_id == "waits") == 5


@pytest.mark.full
async def test_a_request_that_crashes_engines_crashes_two():
    """The reason has the exit status and the last output."""
    async with supervised() as rig:
        await rig.until(EngineState.READY)
        rig.client.add(request("a", [CRASH]))
        lost = await rig.ended("a")
        assert (lost.finish_reason, lost.resendable) == (FinishReason.ERROR, False)
        await eventually(lambda: "status" in rig.client.reason)
        assert rig.client.reason == "the engine process exited with status 3: here it goes"
        await rig.restarted()
        assert (rig.client.reason, rig.client.num_starts) == ("", 3)
        os.kill(rig.supervisor.pid, signal.SIGSEGV)
        await eventually(lambda: "SIGSEGV" in rig.client.reason)
    assert "here it goes\n" in "".join(rig.printed)


@pytest.mark.full
async def test_an_engine_that_keeps_crashing_is_not_restarted():
    async with supervised() as rig:
        for name in ("twice", "once"):  # the second engine may get it too
            await rig.until(EngineState.READY)
            rig.client.add(request(name, [CRASH]))
            await rig.ended(name)
        await rig.until(EngineState.FAILED)
        assert "crashed 3 times; at last: the engine process exited" in rig.client.reason
        with pytest.raises(UnavailableError, match="crashed 3 times"):
            rig.client.add(request("late"))
        assert rig.supervisor.pid is None


@pytest.mark.full
async def test_old_crashes_are_forgiven():
    async with supervised(
        policy=RestartPolicy(exit=1.0, pause=0.01, crashes=3, window=0.05)
    ) as rig:
        for i in range(2 * QUICK.crashes):
            await rig.until(EngineState.READY)
            rig.client.add(request(f"r{i}", [CRASH]))
            await rig.ended(f"r{i}")
        await rig.until(EngineState.READY)


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        pytest.param("broken", "this engine cannot even start", marks=pytest.mark.full),
        ("/no/such/command", "cannot be started"),
        ("unusable", "model: has no weights"),  # the process still ends when it is closed
    ],
)
async def test_an_engine_that_does_not_start_is_not_restarted(mode, reason):
    async with supervised(mode) as rig:
        await rig.until(EngineState.FAILED)
        assert reason in rig.client.reason


async def test_a_model_that_cannot_be_loaded_is_not_loaded_again():
    async with supervised("unusable") as rig:
        await eventually(rig.supervisor._task.done)  # its process has ended by itself
        assert (rig.client.state, rig.supervisor.pid) == (EngineState.FAILED, None)
        assert rig.client.reason == "model: has no weights"


@pytest.mark.full
async def test_a_model_that_was_loaded_before_is_loaded_again(tmp_path, caplog):
    """The missing resource, memory or a network disk, may be back soon."""

    async with supervised(
        f"once:{tmp_path / 'loaded'}", RestartPolicy(exit=1.0, pause=0.05, crashes=20)
    ) as rig:
        await rig.until(EngineState.READY)
        os.kill(rig.supervisor.pid, signal.SIGKILL)
        await asyncio.sleep(0)
        while (tmp_path / "loaded").exists():
            if "no weights" in rig.client.reason:
                (tmp_path / "loaded").unlink()
            await asyncio.sleep(0.001)
        await rig.until(EngineState.READY)
    assert any("model: has no weights" in record.getMessage() for record in caplog.records)


@pytest.mark.full
async def test_an_engine_that_hangs_is_stalled_and_then_replaced():
    async with supervised(policy=RestartPolicy(stall=0.5, kill=1.5, exit=1.0, pause=0.01)) as rig:
        await rig.until(EngineState.READY)
        rig.client.add(request("a", [HANG]))
        await rig.until(EngineState.STALLED)
        assert "no step was computed" in rig.client.reason
        with pytest.raises(UnavailableError, match="no step was computed"):
            rig.client.add(request("b"))
        lost = await rig.ended("a")
        assert lost.finish_reason is FinishReason.ERROR
        await rig.until(EngineState.READY)
        rig.client.add(request("c"))
        assert (await rig.ended("c")).finish_reason is FinishReason.LENGTH


@needs_native
@pytest.mark.full
async def test_an_engine_that_is_stopped_while_it_idles_is_replaced(monkeypatch):
    monkeypatch.setattr(child_process, "SILENT_SECONDS", 1.0)
    async with supervised("beats") as rig:
        for _ in range(5):  # the whole machine may stand still for a moment
            await rig.until(EngineState.READY)
            starts = rig.client.num_starts
            await asyncio.sleep(1.5)
            if rig.client.num_starts == starts:
                break
        assert rig.client.num_starts == starts
        os.kill(rig.supervisor.pid, signal.SIGSTOP)
        await rig.until(EngineState.RESTARTING)
        assert rig.client.reason == "the engine process has been silent for 1 s"
        await rig.until(EngineState.READY)


@pytest.mark.full
async def test_an_engine_that_was_slow_becomes_ready_again():
    async with supervised() as rig:
        await rig.until(EngineState.READY)
        pid = rig.supervisor.pid
        os.kill(pid, signal.SIGSTOP)
        rig.client.add(request("a"))
        await rig.until(EngineState.STALLED)
        os.kill(pid, signal.SIGCONT)
        await rig.until(EngineState.READY)
        assert (await rig.ended("a")).finish_reason is FinishReason.LENGTH
        assert rig.supervisor.pid == pid


@pytest.mark.full
async def test_an_idle_engine_does_not_stall():
    async with supervised() as rig:
        await rig.until(EngineState.READY)
        rig.client.add(request("a"))
        await rig.ended("a")
        await rig.until(EngineState.READY)  # it may have been slow
        for _ in range(100):
            await asyncio.sleep(0.01)
            assert rig.client.state is EngineState.READY


@pytest.mark.full
async def test_a_blocked_event_loop_does_not_mark_the_engine_as_stalled():
    async with supervised(policy=RestartPolicy(stall=1.0)) as rig:
        await rig.until(EngineState.READY)
        rig.client.add(request("a", max_tokens=240, ignore_eos=True))
        await eventually(lambda: rig.deltas)
        await rig.until(EngineState.READY)
        time.sleep(2.0)
        for _ in range(20):
            assert rig.client.state is EngineState.READY
            await asyncio.sleep(0.01)
        assert (await rig.ended("a")).finish_reason is FinishReason.LENGTH


class Still:
    """A client whose engine has work and sends no heartbeats."""

    num_unfinished = 1
    signs_of_life = 1
    changing = False
    state, reason = EngineState.READY, ""
    step_limit: float | None = None

    def set_state(self, state: EngineState, reason: str) -> None:
        self.state = state


@pytest.mark.full
async def test_time_in_which_the_event_loop_was_blocked_does_not_count():
    line = Still()
    supervisor = Supervisor(
        [], EngineStart(tiny_config()), RestartPolicy(stall=1.0, kill=0.2), print
    )
    watching = asyncio.create_task(supervisor._watch(line))
    await asyncio.sleep(0.1)
    time.sleep(2.0)
    await asyncio.sleep(0.01)
    assert line.state is EngineState.READY
    began = time.monotonic()
    assert "no step was computed" in await watching
    assert line.state is EngineState.STALLED
    assert time.monotonic() - began > 0.5


@pytest.mark.parametrize(
    ("limit", "loads", "stalls_at", "lost_at"),
    [
        (None, 0, 3600, 3630),
        (30.0, 0, 30, 60),
        (30.0, 200, 230, 260),
        (1920.0, 0, 1920, 1950),
        (7680.0, 0, 3600, 3630),
    ],
)
def test_the_stall_limit_follows_measured_steps(
    limit: float | None, loads: float, stalls_at: float, lost_at: float
) -> None:
    """A model whose steps may take an hour gets a shorter limit once they are known to be short.
    While an engine loads adapters, it computes none."""

    class Watched(Still):
        step_limit = limit
        stalled_at = until = 0.0

        @property
        def changing(self) -> bool:
            return asyncio.get_running_loop().time() < self.until

        def set_state(self, state: EngineState, reason: str) -> None:
            self.stalled_at = self.stalled_at or asyncio.get_running_loop().time()

    async def test() -> None:
        line, clock = Watched(), asyncio.get_running_loop().time
        line.until = clock() + loads
        supervisor = Supervisor([], EngineStart(tiny_config()), RestartPolicy(stall=3600.0), print)
        began = clock()
        await supervisor._watch(line)
        assert line.stalled_at - began == pytest.approx(stalls_at, abs=1.0)
        assert clock() - began == pytest.approx(lost_at, abs=1.0)

    run_virtually(test())


@pytest.mark.full
async def test_closing_ends_an_unresponsive_engine():
    async with supervised("deaf") as rig:
        await asyncio.sleep(0.5)
        assert rig.client.state is EngineState.STARTING


@pytest.mark.full
async def test_closing_ends_an_engine_that_hangs_in_a_step():
    async with supervised() as rig:
        await rig.until(EngineState.READY)
        rig.client.add(request("a", [HANG], n=3))
        await asyncio.sleep(0.1)
    assert [d.finish_reason for d in rig.deltas] == [FinishReason.ERROR] * 3


@pytest.mark.full
async def test_closing_at_any_moment():
    for delay in (0.0, 0.02, 0.1, 0.2):
        for mode in ("serve", "broken"):
            async with supervised(mode):
                await asyncio.sleep(delay)


@pytest.mark.usefixtures("fresh")
async def test_the_engine_process_has_its_own_group_in_the_same_session():
    """Signals of the terminal do not reach it. Linux shares processors between sessions, and would
    put all threads of another session on one core."""
    async with supervised() as rig:
        await rig.until(EngineState.READY)
        pid = rig.supervisor.pid
        assert os.getpgid(pid) == pid != os.getpgid(0) and os.getsid(pid) == os.getsid(0)


ORPHAN = """
import asyncio, os, signal, sys
sys.path.insert(0, {tests!r})
from engine.test_sources import Rig, request, QUICK, HANG
from kvik.engine.remote import EngineState

async def main():
    rig = Rig("serve", QUICK)
    rig.client.start(rig.deltas.extend)
    await rig.until(EngineState.READY)
    rig.client.add(request("a", max_tokens=200))
    print(rig.supervisor.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


@pytest.mark.usefixtures("fresh")
def test_the_engine_process_ends_when_its_parent_is_killed():
    script = ORPHAN.format(tests=str(Path(__file__).parents[1]))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, until = int(done.stdout), time.monotonic() + 10
    while not gone(pid):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_the_stall_limit_grows_with_the_time_of_a_step_on_a_cpu():
    config = tiny_config()
    assert 60.0 <= restart_policy(config).stall < 60.1
    large = tiny_config(max_num_batched_tokens=10**7)
    assert restart_policy(large).stall > 60.2
