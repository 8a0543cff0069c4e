"""Inputs of a step: sizes that can be told apart, memory that stays where it is."""

from __future__ import annotations

import numpy as np
import pytest

from kvik.worker.step_inputs import FixedInputs, StepSizes


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 9, 10])
@pytest.mark.parametrize("seqs", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_sizes_differ_and_are_large_enough(tokens: int, seqs: int, drafts: int) -> None:
    sizes = StepSizes.of(tokens, seqs, drafts)
    assert len({sizes.tokens, sizes.seqs, sizes.samples}) == 3
    assert sizes.tokens == tokens
    assert seqs <= sizes.seqs <= seqs + 2
    assert seqs + drafts <= sizes.samples <= seqs + drafts + 2


def test_arrays_go_to_the_same_memory_every_step() -> None:
    inputs = FixedInputs(StepSizes(8, 3, 4), num_groups=2, max_blocks=5)
    first = inputs.put("input_ids", np.arange(6))
    second = inputs.put("input_ids", np.array([7, 8]))
    assert first.tolist() == [7, 8, 2, 3, 4, 5]
    assert second.tolist() == [7, 8]
    assert second.data_ptr() == inputs.whole("input_ids").data_ptr()
    table = inputs.put("block_table 1", np.array([[1, 2], [3, 4]], np.int32))
    assert table.tolist() == [[1, 2], [3, 4]]
    assert table.stride() == inputs.whole("block_table 1").stride() == (5, 1)
    assert not inputs.whole("block_table 0").any()


def test_a_step_that_is_too_large_is_refused() -> None:
    inputs = FixedInputs(StepSizes(4, 2, 3), num_groups=1, max_blocks=1)
    with pytest.raises(ValueError, match="broadcast"):
        inputs.put("input_ids", np.arange(5))


def test_parts_of_any_shape_are_of_the_same_memory() -> None:
    """However many there were: only some of them are remembered."""
    inputs = FixedInputs(StepSizes(200, 3, 4), num_groups=1, max_blocks=1)
    for count in [*range(1, 150), *range(150, 0, -1), 7, 150, 7]:
        tensor = inputs.put("positions", np.arange(count) + count)
        assert tensor.tolist() == list(range(count, 2 * count))
        assert tensor.data_ptr() == inputs.whole("positions").data_ptr()
