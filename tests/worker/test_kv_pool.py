"""A KV cache in one allocation."""

from __future__ import annotations

import pytest
import torch

from kvik.worker.platforms import ALIGNMENT, MARGIN, KVPool

CPU = torch.device("cpu")


def test_parts_lie_side_by_side_in_one_piece() -> None:
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


def test_more_than_was_planned_is_refused() -> None:
    pool = KVPool(100)
    pool(100 + MARGIN - ALIGNMENT, dtype=torch.uint8, device=CPU)
    with pytest.raises(RuntimeError, match="planned"):
        pool(2 * ALIGNMENT, dtype=torch.uint8, device=CPU)
