"""The threads that run kernels together, and their number."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from helpers.native import normal

from kvik.kernels.cpu import _native
from kvik.kernels.cpu.native import Native
from kvik.kernels.cpu.ops import native_ops

MS = 1_000_000
# Runs as nanoseconds, waited, drawn, offered.
EVEN = (10 * MS, 0, 50, 100)  # both threads take half
ALONE = (20 * MS, 0, 100, 100)  # the other thread did not run
LATE = (24 * MS, 18 * MS, 40, 50)  # it ran, but was preempted

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def sizes(most: int, runs: Sequence[tuple[int, int, int, int]]) -> Iterator[int]:
    """Yield the size of a team after each run."""
    size = _native.TeamSize(most)
    for run in runs:
        size.ran(*run)
        yield size.working


@pytest.mark.parametrize(
    ("run", "working"),
    [
        (EVEN, 2),
        (LATE, 1),
        ((10 * MS, MS, 50, 100), 2),  # an uneven share
        ((10 * MS, 0, 90, 100), 2),  # it still helps
        ((20 * MS, 0, 100, 100), 2),  # alone, without waiting for the other
        ((10 * MS, 9 * MS, 0, 0), 2),  # no loops to share
    ],
)
def test_a_team_shrinks_if_one_thread_fewer_would_be_faster(
    run: tuple[int, int, int, int], working: int
) -> None:
    assert list(sizes(2, [run] * 10))[-1] == working


def test_occasional_slow_runs_do_not_shrink_a_team() -> None:
    assert set(sizes(2, [EVEN, EVEN, EVEN, LATE, EVEN, EVEN] * 5)) == {2}


def test_large_teams_shrink_thread_by_thread() -> None:
    late = (24 * MS, 18 * MS, 10, 10)
    found = list(sizes(4, [late] * 20))
    assert set(found) == {4, 3, 2, 1}
    assert found == sorted(found, reverse=True)


def test_a_team_grows_again_when_cores_are_free() -> None:
    size = _native.TeamSize(2)
    while size.working == 2:
        size.ran(*LATE)
    for _ in range(1000):
        size.ran(*(ALONE if size.working == 1 else EVEN))
    assert size.working == 2


def test_trials_cost_a_bounded_share_of_the_time() -> None:
    size = _native.TeamSize(2)
    lost = total = trials = 0
    for _ in range(20_000):
        run = ALONE if size.working == 1 else (30 * MS, 24 * MS, 40, 50)
        fewer = 7.5 * MS  # the time of one thread alone for the second part
        lost += run[0] - fewer if size.working == 2 else 0
        total += run[0]
        trials += size.working == 2
        size.ran(*run)
    assert trials > 10
    assert lost / total < 0.04


def test_a_fixed_number_of_threads_stays() -> None:
    runtime = _native.Runtime(_native.instruction_sets()[0], 3)
    assert runtime.working == 3


# The threads themselves.


def helpers() -> set[Path]:
    """Return the folders in /proc of helper threads, including those of other tests."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread may have ended
            if (task / "comm").read_text() == "kvik-team\n":
                found.add(task)
    return found


def started(count: int, others: set[Path]) -> set[Path]:
    """Wait until new threads have their names, since kernels do not wait for their start."""
    for _ in range(500):
        if len(own := helpers() - others) >= count:
            break
        time.sleep(0.01)
    assert len(own) == count
    return own


def normed(native: Native) -> torch.Tensor:
    return native_ops(native).rms_norm(normal(512, 1024), torch.ones(1024), 1e-5)


@needs_linux
def test_threads_start_on_demand_and_end_with_their_team() -> None:
    others = helpers()
    native = Native(threads=3)
    assert helpers() <= others
    normed(native)
    own = started(2, others)
    del native
    assert not own & helpers()


@needs_linux
def test_signals_are_left_to_the_threads_of_the_program() -> None:
    native, others = Native(threads=2), helpers()
    normed(native)
    for thread in started(1, others):
        (blocked,) = [
            int(line.split()[1], 16)
            for line in (thread / "status").read_text().splitlines()
            if line.startswith("SigBlk")
        ]
        assert blocked & 1 << 1  # SIGINT


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_computes_without_the_threads() -> None:
    native = Native(threads=3)
    expected = normed(native)
    child = os.fork()
    if child == 0:
        equal = (normed(native).numpy() == expected.numpy()).all()  # torch has threads too
        del native
        os._exit(0 if equal else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(normed(native), expected)
