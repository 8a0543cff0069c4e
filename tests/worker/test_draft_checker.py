"""What a step's accepted rows say of its drafts."""

from __future__ import annotations

import numpy as np

from kvik.worker.sampler import StepTokens
from kvik.worker.speculator import CheckedDrafts


def test_paths_are_the_drafts_whose_rows_are_output() -> None:
    found = StepTokens(np.zeros(9, np.int64), {}, {})
    # Three requests with 4, 0 and 3 drafts; of the first, nodes 2 and 4 were right.
    first, rows = np.array([0, 5, 6]), np.array([0, 2, 4, 5, 6, 7])
    checked = CheckedDrafts(found, first, rows, np.array([3, 1, 2]))
    assert checked.newest.tolist() == [4, 5, 7]
    assert checked.paths(4).astype(int).tolist() == [[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]
