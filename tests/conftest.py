"""Shared by all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from helpers.optional_triton import interpret_without_gpu
from hypothesis import settings

# The same examples in every run: a failure must not depend on luck. Explore with
# `pytest --hypothesis-profile=default`.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")

interpret_without_gpu()
# Read when torch is loaded. Threads that wait for each other would spin, which on a machine with
# other work takes the cores from those who are waited for: tests then take many times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seconds", default=10, help="how long tests that draw go on")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Several workers begin with what takes long: at the end the others would wait for it."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session", autouse=True)
def no_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `kvik calibrate` has saved on this machine decides no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Ctrl-C as in a terminal: a shell starts background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
