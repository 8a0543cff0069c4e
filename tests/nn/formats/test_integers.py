"""Codes with scales become the weight that the engine multiplies."""

from __future__ import annotations

import pytest
import torch
from helpers.stored_models import multiplied_out, rounded

from kvik.nn.formats.integers import weight_of
from kvik.spec.stored_weights import StoredScheme


@pytest.mark.parametrize(
    ("scheme", "kind", "group"),
    [
        (StoredScheme("gptq", 4, 128), "int4", 128),
        # Larger groups than kernels multiply, with the same scales.
        (StoredScheme("gptq", 4, 256), "int4", 128),
        (StoredScheme("gptq", 4, 256, symmetric=False), "int4", 128),
        (StoredScheme("gptq", 3, 192), "int4", 64),
        (StoredScheme("gptq", 4), "int4", 128),
        (StoredScheme("gptq", 8, 256), "int8", 256),
        (StoredScheme("gptq", 4, 12), "float32", 0),
        (StoredScheme("gptq", 4, 256, symmetric=False, ordered=True), "int4", 128),
        (StoredScheme("gptq", 4, 12, symmetric=False, ordered=True), "float32", 0),
    ],
)
def test_weight(scheme: StoredScheme, kind: str, group: int) -> None:
    w = torch.randn(5, 768, generator=torch.Generator().manual_seed(0))
    w *= torch.arange(1, 769) / 100  # scales differ between groups
    codes = rounded(w, scheme)
    weight = weight_of(codes, scheme)
    assert weight.kind.codes == kind
    assert torch.equal(weight.dequantized(), multiplied_out(codes))
    assert weight.kind.group == group
