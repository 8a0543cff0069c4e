"""One `LLM` used by many threads, and in a forked process."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from helpers.faults import raising
from helpers.http_server import until
from helpers.served_engine import tiny_config

from kvik import LLM, ModelError, ParamError, SamplingParams
from kvik.config.config import ResolvedConfig
from kvik.engine.loop import Engine
from kvik.engine.thread import EngineThread

CONFIG = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "max_num_seqs": 8}
THREADS = 16
PROMPTS = ["Once upon a time", "The old king", "A bear", "One day, Tom", "The sea", "Lily had a"]
KINDS = [
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True),
    SamplingParams(seed=3, max_tokens=9, stop=["the", "."]),
    SamplingParams(seed=5, max_tokens=5, n=2, logprobs=1),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**CONFIG, threads=2) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_leaks(llm: LLM) -> Iterator[None]:
    yield
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)


def texts(outputs) -> list[list[str]]:
    return [[completion.text for completion in output.outputs] for output in outputs]


def in_threads(work: Callable[[int], object], count: int = THREADS) -> list[object]:
    with ThreadPoolExecutor(count) as pool:
        return [done.result(120) for done in [pool.submit(work, i) for i in range(count)]]


@pytest.mark.parametrize(
    "calls",
    [3, pytest.param(20, marks=pytest.mark.full), pytest.param(200, marks=pytest.mark.nightly)],
)
def test_calls_of_many_threads_give_the_outputs_of_one(llm: LLM, calls: int) -> None:
    """Batches, streams, embeddings, abandoned streams and invalid calls, all at once."""
    jobs = [(prompt, params) for prompt in PROMPTS for params in KINDS]
    right = [texts(llm.generate(prompt, params)) for prompt, params in jobs]
    vectors = [llm.embed(prompt)[0].embedding for prompt in PROMPTS]

    def work(thread: int) -> int:
        wrong = 0
        for call in range(calls):
            i = (thread * 7 + call * 5) % len(jobs)
            prompt, params = jobs[i]
            kind = (thread + call) % 8
            if kind == 0:
                with llm.stream(prompt, KINDS[0].with_changes(max_tokens=100)) as stream:
                    next(stream)
            elif kind == 1:
                with pytest.raises(ParamError):
                    llm.generate([10**9], params)
            elif kind == 2:
                wrong += llm.embed(prompt)[0].embedding != vectors[i // len(KINDS)]
            elif kind == 3 and params.n == 1:
                stream = llm.stream(prompt, params)
                wrong += "".join(delta.text for delta in stream) != right[i][0][0]
            else:
                others = jobs[i : i + 3]
                found = llm.generate([one for one, _ in others], [one for _, one in others])
                wrong += texts(found) != [one for each in right[i : i + 3] for one in each]
        return wrong

    assert in_threads(work) == [0] * THREADS


@pytest.mark.full
def test_calls_of_many_threads_share_their_steps(llm: LLM) -> None:
    alone = llm.stats().steps
    llm.generate("Once", KINDS[0].with_changes(max_tokens=200))
    alone = llm.stats().steps - alone
    before = llm.stats().steps
    engine, held = llm._engine, threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(engine.ask, lambda loop: (held.set(), until(lambda: len(engine._posted) == 6)))
        held.wait(60)
        in_threads(lambda i: llm.generate(PROMPTS[i], KINDS[0].with_changes(max_tokens=200)), 6)
    assert llm.stats().steps - before < 3 * alone


@pytest.mark.full
def test_ctrl_c_in_one_thread_does_not_affect_others(llm: LLM, default_sigint) -> None:
    params = KINDS[0].with_changes(max_tokens=120)
    right = texts(llm.generate(PROMPTS, params))
    began = threading.Event()

    def work() -> list[list[str]]:
        began.set()
        return texts(llm.generate(PROMPTS, params))

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(work)
        began.wait(60)
        timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            while True:
                llm.generate(["The old king"] * 4, params)
        assert other.result(60) == right


def test_ctrl_c_while_the_thread_starts_ends_it(
    monkeypatch: pytest.MonkeyPatch, default_sigint
) -> None:
    began, ended, start = threading.Event(), threading.Event(), threading.Thread.start

    def load(resolved: ResolvedConfig) -> Engine:
        began.set()
        try:
            for _ in range(1000):
                time.sleep(0.01)
        finally:
            ended.set()
        raise TimeoutError

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        began.wait(60)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        EngineThread(load, tiny_config())
    assert ended.is_set()


INTERRUPTED_IMPORT = """
import os, signal, sys, threading, time
from kvik import LLM, SamplingParams

def interrupt():
    while "torch.storage" not in sys.modules:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

options = {"device": "cpu", "threads": 1, "max_model_len": 64}
threading.Thread(target=interrupt).start()
try:
    LLM(**options)
    sys.exit("was not interrupted")
except KeyboardInterrupt:
    pass
with LLM(**options) as llm:
    llm.generate("Once", SamplingParams(max_tokens=1))
"""


@pytest.mark.full
@pytest.mark.usefixtures("default_sigint")
def test_a_start_succeeds_after_one_that_was_interrupted() -> None:
    """Torch, half imported, cannot be imported again: most attempts crash."""
    command = [sys.executable, "-c", INTERRUPTED_IMPORT]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def test_closing_fails_the_calls_of_other_threads() -> None:
    llm = LLM(**CONFIG, threads=1)
    began = threading.Event()

    def work() -> None:
        with llm.stream("Once", KINDS[0].with_changes(max_tokens=200)) as stream:
            next(stream)
            began.set()
            for _ in range(10_000):
                llm.generate(PROMPTS, KINDS[0].with_changes(max_tokens=200))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(work)
        began.wait(60)
        llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            waiting.result(60)
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("Once", KINDS[0])


@pytest.mark.full
def test_an_unreferenced_engine_ends() -> None:
    before = set(threading.enumerate())
    llm = LLM(**CONFIG, threads=1)
    stream = llm.stream("Once", KINDS[0])
    gone = weakref.ref(llm)
    del llm
    assert sum(len(delta.token_ids) for delta in stream) == 6  # a stream keeps its engine alive
    del stream
    gc.collect()
    assert gone() is None
    assert set(threading.enumerate()) <= before


def test_an_engine_that_sleeps_is_freed_and_the_next_call_loads_it() -> None:
    with LLM(**CONFIG, threads=2) as llm:
        right = texts(llm.generate(PROMPTS, KINDS[0]))
        executor = weakref.ref(llm._loop.executor)
        with llm.stream("Once", KINDS[0].with_changes(max_tokens=200)) as stream:
            next(stream)
            with pytest.raises(RuntimeError, match="cannot sleep"):
                llm.sleep()
        for wake in (llm.wake_up, llm.stats, llm.reset_prefix_cache):
            llm.sleep()
            llm.sleep()
            assert llm.is_sleeping and executor() is None
            wake()
            assert not llm.is_sleeping
        llm.sleep()
        answers = in_threads(lambda i: texts(llm.generate(PROMPTS, KINDS[0])), 4)
        assert answers == [right] * 4
        assert llm.stats().num_running == 0
        llm.sleep()
    with pytest.raises(RuntimeError, match="closed"):
        llm.wake_up()


def test_an_engine_that_cannot_be_loaded_again_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(**CONFIG, threads=2) as llm:
        llm.sleep()
        with monkeypatch.context() as patch:
            patch.setattr(llm._engine, "_load", raising(ModelError("model", "is gone")))
            for call in (llm.wake_up, partial(llm.generate, "Once", KINDS[0])):
                with pytest.raises(ModelError, match="is gone"):
                    call()
        assert llm.generate("Once", KINDS[0])[0].num_output_tokens


def test_closing_ends_an_engine_while_it_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()

    def load(resolved: ResolvedConfig) -> Engine:
        began.set()
        while True:
            time.sleep(0.01)

    llm = LLM(**CONFIG, threads=2)
    llm.sleep()
    monkeypatch.setattr(llm._engine, "_load", load)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(llm.generate, "Once", KINDS[0])
        began.wait(60)
        llm.close()
        with pytest.raises(RuntimeError, match="closed"):
            waiting.result(60)


@pytest.mark.full
def test_an_unreferenced_stream_ends(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    poll = llm._loop.poll
    monkeypatch.setattr(llm._loop, "poll", lambda *how: (time.sleep(0.05), poll(*how))[1])
    stream = llm.stream("Once", KINDS[0].with_changes(max_tokens=200))
    next(stream)
    assert llm.stats().num_running == 1
    del stream
    gc.collect()
    assert llm.stats().num_running == 0


def test_an_engine_that_fails_tells_all_callers_and_serves_the_next(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(_: int) -> None:
        with pytest.raises(RuntimeError, match="broken"):
            llm.generate("Once", KINDS[0])

    (right,) = llm.generate("Once", KINDS[0])
    with monkeypatch.context() as patch:
        patch.setattr(llm._loop, "poll", raising(ZeroDivisionError("broken")))
        in_threads(work, 4)
    assert llm.generate("Once", KINDS[0])[0].text == right.text


def in_fork(work: Callable[[], str]) -> str:
    """Return the result of `work` in a fork of this process."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            result = work()
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        os.write(write, result.encode())
        os._exit(0)
    os.close(write)
    until = time.monotonic() + 60
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the fork hangs")
        time.sleep(0.01)
    with os.fdopen(read) as pipe:
        return pipe.read()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_has_no_engine_and_can_load_its_own(llm: LLM) -> None:
    (right,) = llm.generate("Once upon a time", KINDS[0])
    hello = [{"role": "user", "content": "Hello"}]
    rendered = llm.render_chat(hello)
    stream = llm.stream("Once upon a time", KINDS[0])
    uses: list[Callable[[], object]] = [
        lambda: llm.generate("Once", KINDS[0]),
        lambda: next(stream),
        llm.stats,
        lambda: llm.stream("Once"),
        lambda: llm.render_chat(hello),
    ]
    for use in uses:
        result = in_fork(lambda use=use: str(use()))
        assert result.startswith("RuntimeError") and str(os.getpid()) in result and "fork" in result

    def load() -> str:
        llm.close()  # no effect: the engine is the parent's
        with LLM(**CONFIG, threads=2) as other:
            return other.generate("Once upon a time", KINDS[0])[0].text

    assert in_fork(load) == right.text
    assert "".join(delta.text for delta in stream) == right.text
    assert llm.render_chat(hello) == rendered
