"""Inputs of a step (distinct sizes, fixed memory), and the copies of its results to the host."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from helpers.fake_gpu import CUDA, fake_gpu
from torch import Tensor

from kvik.worker.step_inputs import (
    AtOnce,
    EnteredStates,
    FixedInputs,
    PinnedCopies,
    StepSizes,
)
from kvik.worker.worker import best_copies


def test_sizes_differ_and_are_large_enough() -> None:
    for tokens, seqs, drafts in product(range(1, 11), range(1, 10), range(4)):
        sizes = StepSizes.of(tokens, seqs, drafts)
        assert len({sizes.tokens, sizes.seqs, sizes.samples}) == 3
        assert sizes.tokens == tokens
        assert seqs <= sizes.seqs <= seqs + 2
        assert seqs + drafts <= sizes.samples <= seqs + drafts + 2


def test_arrays_use_the_same_memory_every_step() -> None:
    inputs = FixedInputs(StepSizes(8, 3, 4), num_groups=2, max_blocks=5)
    first = inputs.put("input_ids", np.arange(6))
    second = inputs.put("input_ids", np.array([7, 8]))
    assert first.tolist() == [7, 8, 2, 3, 4, 5]
    assert second.tolist() == [7, 8]
    assert second.data_ptr() == inputs.full("input_ids").data_ptr()
    table = inputs.put("block_table 1", np.array([[1, 2], [3, 4]], np.int32))
    assert table.tolist() == [[1, 2], [3, 4]]
    assert table.stride() == inputs.full("block_table 1").stride() == (5, 1)
    assert not inputs.full("block_table 0").any()


def test_a_step_that_is_too_large_is_refused() -> None:
    inputs = FixedInputs(StepSizes(4, 2, 3), num_groups=1, max_blocks=1)
    with pytest.raises(ValueError, match="broadcast"):
        inputs.put("input_ids", np.arange(5))


def test_parts_of_any_shape_share_memory() -> None:
    """The number of remembered shapes is bounded."""
    inputs = FixedInputs(StepSizes(200, 3, 4), num_groups=1, max_blocks=1)
    for count in [*range(1, 150), *range(150, 0, -1), 7, 150, 7]:
        tensor = inputs.put("positions", np.arange(count) + count)
        assert tensor.tolist() == list(range(count, 2 * count))
        assert tensor.data_ptr() == inputs.full("positions").data_ptr()


# Copies from a GPU, with patched CUDA calls.


def test_results_of_a_gpu_are_copied_at_once_and_awaited_when_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies are non-blocking into pinned memory, and an event marks their end, when the device may
    already have overwritten the tensors."""
    events: list[str] = []
    empty, copy = torch.empty, Tensor.copy_

    class Event:
        def record(self) -> None:
            events.append("recorded")

        def synchronize(self) -> None:
            events.append("waited")

    def pinned(shape: torch.Size, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        assert pin_memory
        return empty(shape, dtype=dtype)

    def begun(self: Tensor, source: Tensor, *, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        events.append("copied")
        return copy(self, source)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(Tensor, "copy_", begun)
    ids, shares = torch.arange(3), torch.ones(2, 2)
    arrival = PinnedCopies().start([ids, shares])
    assert events == ["copied", "copied", "recorded"]
    ids.zero_()
    found = arrival()
    assert events[3:] == ["waited"]
    assert [array.tolist() for array in found] == [[0, 1, 2], [[1.0, 1.0], [1.0, 1.0]]]


def test_results_of_a_stage_are_copied_before_the_next_ones_overwrite_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the host has read nothing of the step in between, and the device is behind."""
    due: list[tuple[Tensor, Tensor]] = []
    copy = Tensor.copy_

    class Event:
        def record(self) -> None: ...

        def synchronize(self) -> None:
            while due:
                copy(*due.pop(0))

    def begun(self: Tensor, source: Tensor, *, non_blocking: bool = False) -> Tensor:
        assert non_blocking
        due.append((self, source))
        return self

    steps = [np.full((2, 3, 4), number, np.float32) for number in (1, 2)]
    with fake_gpu():
        monkeypatch.setattr(torch.cuda, "Event", Event)
        states = EnteredStates(2, 5, 4, torch.float32, CUDA)
        monkeypatch.setattr(Tensor, "copy_", begun)
        for step in steps:
            states.put(step.tobytes())
        for step in steps:
            assert [tensor.tolist() for tensor in states.first(3)] == step.tolist()
            Event().synchronize()


def test_a_gpu_has_two_steps_in_flight() -> None:
    assert best_copies(torch.device("cuda:0")).depth == 2
    assert isinstance(best_copies(torch.device("cpu")), AtOnce)
