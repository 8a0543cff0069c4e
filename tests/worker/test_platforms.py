"""Device-dependent parts: notices of the native build, the KV pool, the current device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.optional_native import needs_native

from kvik import LLM
from kvik.config.config import EngineConfig
from kvik.core.plan import ModelRunnerOutput
from kvik.launch import load_worker, resolve_config
from kvik.worker import worker as workers
from kvik.worker.model_runner import ModelRunner, RunningStep
from kvik.worker.platforms import ALIGNMENT, MARGIN, KVPool, inference_on, on_device
from kvik.worker.worker import Worker

CPU, SECOND = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture
def poor_build(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvik.kernels.cpu import native

    monkeypatch.setattr(native._native, "rejected_instruction_sets", lambda: ["amx"])


@needs_native
def test_notices_name_faulty_instruction_sets(poor_build: None) -> None:
    from kvik.kernels.cpu import native

    (wrong,) = native.notices()
    assert "amx compute wrongly" in wrong


@needs_native
def test_an_engine_logs_the_notices_at_start(
    poor_build: None, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(device="cpu", threads=2, max_model_len=64):
        assert "amx compute wrongly" in caplog.text


# The KV cache, in one allocation.


def test_kv_parts_share_one_aligned_allocation() -> None:
    pool = KVPool(3 * 1000)
    parts = [
        pool(5, 4, 2, dtype=torch.bfloat16, device=CPU),
        pool(7, dtype=torch.uint8, device=CPU),
        pool(5, 2, dtype=torch.float32, device=CPU),
    ]
    memory = {part.untyped_storage().data_ptr() for part in parts}
    assert len(memory) == 1
    starts = [part.storage_offset() * part.element_size() for part in parts]
    assert starts == [0, ALIGNMENT, 2 * ALIGNMENT]
    assert [tuple(part.shape) for part in parts] == [(5, 4, 2), (7,), (5, 2)]
    for i, part in enumerate(parts):
        assert part.is_contiguous() and not part.any()
        part.fill_(i + 1)
    assert [part.float().unique().tolist() for part in parts] == [[1], [2], [3]]


def test_a_kv_pool_refuses_more_than_the_plan() -> None:
    pool = KVPool(100)
    pool(100 + MARGIN - ALIGNMENT, dtype=torch.uint8, device=CPU)
    with pytest.raises(RuntimeError, match="planned"):
        pool(2 * ALIGNMENT, dtype=torch.uint8, device=CPU)


# The current device: a worker enters its own in any thread.


class Threads:
    """A current device per thread, as in CUDA: the first, until another is entered."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._each = threading.local()
        threads = self

        class device:
            def __init__(self, wanted: torch.device) -> None:
                self.index = wanted.index

            def __enter__(self) -> None:
                self.before, threads.current = threads.current, self.index

            def __exit__(self, *error: object) -> None:
                threads.current = self.before

        patch.setattr(torch.cuda, "device", device)

    @property
    def current(self) -> int:
        return getattr(self._each, "index", 0)

    @current.setter
    def current(self, index: int) -> None:
        self._each.index = index


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


def test_inference_is_entered_and_left_with_the_device(threads: Threads) -> None:
    inference = inference_on(SECOND)
    for _ in range(2):
        with inference():
            assert threads.current == 1 and torch.is_inference_mode_enabled()
        assert threads.current == 0 and not torch.is_inference_mode_enabled()
    with pytest.raises(ValueError, match="a step failed"), inference():
        raise ValueError("a step failed")
    assert threads.current == 0 and not torch.is_inference_mode_enabled()


def test_a_cpu_changes_no_current_device(threads: Threads) -> None:
    assert inference_on(CPU) is torch.inference_mode
    with on_device(CPU):
        assert threads.current == 0


@needs_native
def test_every_method_of_a_worker_enters_its_device(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker on the CPU, patched to enter the second GPU."""
    monkeypatch.setattr(workers, "on_device", lambda device: torch.cuda.device(SECOND))
    monkeypatch.setattr(workers, "inference_on", lambda device: inference_on(SECOND))
    seen: list[tuple[str, int]] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            seen.append((name, threads.current))
            return real(*args, **options)

        return call

    def nothing(*args: Any) -> torch.Tensor:
        return torch.zeros(1)

    monkeypatch.setattr(workers, "platform", noted("platform", workers.platform))
    monkeypatch.setattr(workers, "load_share", noted("load", workers.load_share))

    def output(*args: Any) -> ModelRunnerOutput:
        return ModelRunnerOutput(0, [])

    for name, result in (("begin", nothing), ("finish", output), ("read", nothing)):
        monkeypatch.setattr(ModelRunner, name, noted(name, result))
    worker: Worker = load_worker(resolve_config(EngineConfig(device="cpu", max_model_len=64)))

    def use() -> None:
        plan: Any = type("Plan", (), {"slots": (0,)})()
        worker.submit(plan)
        worker.result(RunningStep.__new__(RunningStep))
        worker.read(plan)
        model = worker._ready().network.model
        monkeypatch.setattr(model, "logits", noted("logits", nothing))
        monkeypatch.setattr(model, "enter", noted("enter", nothing))
        worker.logits(torch.zeros(1))
        worker.enter(torch.zeros(1), torch.zeros(1))
        worker._idle_work = (type("Idle", (), {"idle_step": noted("rest", bool)}),)
        assert worker.idle_step() is False
        worker._release_freed = noted("release", nothing)
        worker.stop()
        seen.append(("outside", threads.current))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    ways = ["platform", "load", "begin", "finish", "read", "logits", "enter", "rest", "release"]
    assert seen == [*((name, 1) for name in ways), ("outside", 0)]
