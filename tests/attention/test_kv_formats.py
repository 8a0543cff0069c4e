"""Every backend over caches of other formats than the model's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.attention_backends import KV_FORMATS as FORMATS
from helpers.attention_backends import STEPS, make_backend
from torch import Tensor

from kvik.attention.base import read
from kvik.kernels.kv_rounding import SCALES, round_vectors, unround_vectors

# Error of attention over normal numbers, relative to the length of the result. Measured: 0.0032,
# 0.0459, 0.0109 and 0.161; a third more is allowed.
DISTANCE = {"fp32": 1e-6, "bf16": 0.0043, "fp8": 0.06, "int8": 0.0146, "int4": 0.214}
formats = pytest.mark.parametrize("format", FORMATS)
steps = pytest.mark.parametrize("name", STEPS)


def kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    return unround_vectors(*round_vectors(x, dtype)) if dtype in SCALES else x.to(dtype).float()


@pytest.mark.parametrize("window", [None, 17])
@formats
@steps
def test_attends_over_rounded_keys_and_values(backend, make_step, name, format, window):
    """Including the step's own keys and values: a prefill sees a token as all later steps do."""
    step = make_step(STEPS[name], kv_dtype=FORMATS[format], dim=32)
    stored = replace(
        step,
        keys=[kept(x, FORMATS[format]) for x in step.keys],
        values=[kept(x, FORMATS[format]) for x in step.values],
    )
    stored.check(step.run(backend, window), window, atol=4e-6)


@formats
def test_error_bounds(backend, make_step, format):
    """Compared with attention over unrounded keys and values."""
    step = make_step([(300, 40), (120, 1), (0, 64)], kv_dtype=FORMATS[format], dim=64)
    expected = step.expected()
    distance = float((step.run(backend).double() - expected).norm() / expected.norm())
    assert distance < DISTANCE[format]
    assert format == "fp32" or distance > 0.5 * DISTANCE[format]  # it did store fewer bits


def test_reads_stored_values(make_step):
    """In torch's layout, element by element."""
    backend = make_backend("reference")
    for dtype in FORMATS.values():
        step = make_step([(0, 20)], kv_dtype=dtype, dim=32)
        backend.run(step.attend(backend))
        found = read(step.kv.k, step.kv.k_scales, step.layout.slot_mapping)
        assert torch.equal(found.float(), kept(step.k, dtype))
