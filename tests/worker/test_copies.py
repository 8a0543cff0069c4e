"""How results come back from a GPU, as far as it can be told without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvik.worker.step_inputs import AtOnce, PinnedCopies
from kvik.worker.worker import best_copies


def test_results_of_a_gpu_are_waited_for_when_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies are begun without waiting, into pinned memory, and an event behind them says when they
    are there: by then the device may have written other things to the tensors."""
    told: list[str] = []
    empty, copy = torch.empty, Tensor.copy_

    class Event:
        def record(self) -> None:
            told.append("recorded")

        def synchronize(self) -> None:
            told.append("waited")

    def pinned(shape: torch.Size, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        assert pin_memory
        return empty(shape, dtype=dtype)

    def begun(self: Tensor, source: Tensor, *, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        told.append("copied")
        return copy(self, source)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(Tensor, "copy_", begun)
    ids, shares = torch.arange(3), torch.ones(2, 2)
    arrival = PinnedCopies().start([ids, shares])
    assert told == ["copied", "copied", "recorded"]
    ids.zero_()
    found = arrival.wait()
    assert told[3:] == ["waited"]
    assert [array.tolist() for array in found] == [[0, 1, 2], [[1.0, 1.0], [1.0, 1.0]]]


def test_a_gpu_has_two_steps_in_flight() -> None:
    assert best_copies(torch.device("cuda:0")).depth == 2
    assert isinstance(best_copies(torch.device("cpu")), AtOnce)
