"""Contexts of 128k with each method to stretch positions, equally exact at any position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.attention_backends import NAMES, make_backend
from helpers.paged_model import PagedModel
from helpers.tiny_models import reference_logits, save_tiny, tokens

from kvik.kernels.reference.ops import REFERENCE
from kvik.nn.rope import Rope

POSITIONS, LENGTH = 131_072, 48
FACTORS = [1.0, 1.5, 2.0, 3.0, 6.0, 12.0, 20.0, 32.0]
SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": FACTORS,  # used by transformers for a short text
        "long_factor": FACTORS,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 16.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


@pytest.fixture(scope="module", params=SCALINGS)
def case(request: Any, tmp_path_factory: Any) -> tuple[Path, list[int], torch.Tensor]:
    """Return a model, a text, and its logits by transformers."""
    folder = tmp_path_factory.mktemp(request.param)
    rope = {"rope_theta": 10_000.0, **SCALINGS[request.param]}
    options = {"max_position_embeddings": POSITIONS, "head_dim": 16, "rope_parameters": rope}
    model = save_tiny(folder, "Llama", **options)
    ids = tokens(LENGTH)
    return folder, ids, reference_logits(model, ids)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("end", [LENGTH, 100_000, POSITIONS, 1 << 20])
def test_logits_are_those_of_transformers_at_any_position(case, name, end, monkeypatch):
    """Only differences of positions matter, so a text that ends at the last position has the logits
    of one that begins at 0, where transformers' fp32 angles are exact."""
    folder, ids, expected = case
    at = Rope.at
    monkeypatch.setattr(Rope, "at", lambda rope, p: at(rope, p + end - LENGTH))
    backend = make_backend(name)
    ops = REFERENCE if name == "reference" else backend._ops
    for chunk in (0, 7):
        model = PagedModel(
            folder, ops=ops, backend=backend, max_model_len=max(end, POSITIONS), block_size=16
        )
        found = model.logits(ids, chunk)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
