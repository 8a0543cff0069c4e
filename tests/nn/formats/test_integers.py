"""Codes with scales -> the weight that the engine multiplies."""

from __future__ import annotations

import pytest
import torch
from helpers.stored_models import multiplied_out, rounded

from kvik.kernels.weights import FloatWeight, Int4Weight, Int8Weight, OrderedWeight
from kvik.nn.formats.integers import weight_of
from kvik.spec.stored_weights import StoredScheme


@pytest.mark.parametrize(
    ("scheme", "kind", "group"),
    [
        (StoredScheme("gptq", 4, 128), Int4Weight, 128),
        # larger groups than kernels multiply, with the same scales
        (StoredScheme("gptq", 4, 256), Int4Weight, 128),
        (StoredScheme("gptq", 4, 256, symmetric=False), Int4Weight, 128),
        (StoredScheme("gptq", 3, 192), Int4Weight, 64),
        (StoredScheme("gptq", 4), Int4Weight, 128),
        (StoredScheme("gptq", 8, 256), Int8Weight, 256),
        (StoredScheme("gptq", 4, 12), FloatWeight, 0),
        (StoredScheme("gptq", 4, 256, symmetric=False, ordered=True), OrderedWeight, 128),
        (StoredScheme("gptq", 4, 12, symmetric=False, ordered=True), FloatWeight, 0),
    ],
)
def test_weight(scheme: StoredScheme, kind: type, group: int) -> None:
    w = torch.randn(5, 768, generator=torch.Generator().manual_seed(0))
    w *= torch.arange(1, 769) / 100  # scales differ from group to group
    codes = rounded(w, scheme)
    weight = weight_of(codes, scheme)
    assert type(weight) is kind
    assert torch.equal(weight.dequantized(), multiplied_out(codes))
    plain = weight.plain if isinstance(weight, OrderedWeight) else weight
    assert isinstance(plain, FloatWeight) or plain.group == group
