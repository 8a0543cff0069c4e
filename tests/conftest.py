"""Shared by all tests."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import tiers, warm_processes
from helpers.optional_triton import interpret_without_gpu
from hypothesis import settings

# By day every run has the same examples, so that failures do not depend on luck; at night new ones.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.register_profile("exploring", database=None, deadline=None, print_blob=True)

# Read when torch is loaded. Tests share cores: a torch operation on several threads would wait for
# a core or, if threads spin, occupy it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
interpret_without_gpu()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=(*tiers.TIERS, tiers.CHECK), default="fast", help="see helpers/tiers.py"
    )
    parser.addoption("--seed", help="of what is drawn (nightly tier: a new one by default)")
    parser.addoption("--no-limits", action="store_true", help="without helpers/limits.py")
    parser.addoption("--fuzz-seconds", default=3, help="how long tests with drawn input run")


def pytest_configure(config: pytest.Config) -> None:
    tiers.begin(config.getoption("--tier"), config.getoption("--seed"))
    explores = tiers.tier() == "nightly"
    settings.load_profile("exploring" if explores else "repeatable")
    if explores:
        config.option.hypothesis_seed = str(tiers.seed())
    if tiers.tier() in ("full", "nightly") and not config.getoption("--no-limits"):
        from helpers.limits import Limits  # imports torch

        whole_run = config.args == config.getini("testpaths")
        config.pluginmanager.register(Limits(whole_run=whole_run))


def pytest_report_header() -> str:
    return f"tier: {tiers.tier()}, seed: {tiers.seed()}"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave files without checks out of the tier `check`: it would import all to run five."""
    if tiers.tier() == tiers.CHECK and collection_path.name.startswith("test_"):
        return "mark.check" not in collection_path.read_text(encoding="utf-8") or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect items of later tiers; a case named on the command line always runs."""
    if not any("::" in argument for argument in config.args):
        kept = tiers.selected(items, tiers.tier())
        chosen = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = kept
    if "PYTEST_XDIST_WORKER" in os.environ:  # the slowest first, so that no worker is left waiting
        items.sort(key=lambda item: item.get_closest_marker("full") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect with the garbage collector off, and freeze modules and items: they stay, and scanning
    them takes 1.5 seconds of CPU each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests, in the event loop of the fixture `loop_factory` if there is one.
    Arguments that are asynchronous context managers are entered in that loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def whole() -> None:
        async with AsyncExitStack() as stack:
            arguments = {}
            for name in inspect.signature(pyfuncitem.obj).parameters:
                value = pyfuncitem.funcargs[name]
                if isinstance(value, AbstractAsyncContextManager):
                    value = await stack.enter_async_context(value)
                arguments[name] = value
            await asyncio.wait_for(pyfuncitem.obj(**arguments), 60)

    with asyncio.Runner(loop_factory=pyfuncitem.funcargs.get("loop_factory")) as runner:
        runner.run(whole())
    return True


@pytest.fixture(scope="session", autouse=True)
def no_calibration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide calibrations that `kvik calibrate` saved on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def exact_figures() -> Iterator[None]:
    """Wait for the figures of an engine: a server would show earlier ones on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("msgspec") is not None:  # else there are only tests of kernels, on a GPU
            patch.setattr("kvik.engine.remote.ANSWER_SECONDS", 30.0)
        yield


@pytest.fixture
def loads_always(monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers.page_moves import load_always  # few tests need what it imports

    load_always(monkeypatch)


@pytest.fixture(scope="module")
def forked() -> Iterator[None]:
    """Fork Python processes from one that has already imported torch and kvik."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            warm_processes.parent()
            patch.setattr(subprocess, "Popen", warm_processes.Popen)
        yield


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, forked: None) -> None:
    """Start Python processes as users do, in a module whose other tests fork them."""
    monkeypatch.setattr(subprocess, "Popen", warm_processes.Popen.__base__)


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Ctrl-C as in a terminal: a shell starts background jobs with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
