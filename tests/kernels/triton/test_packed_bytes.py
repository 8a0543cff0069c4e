"""The memory plan counts quantised matrices as they lie in GPU memory, whole tiles included."""

from __future__ import annotations

import pytest
import torch
from helpers.optional_triton import NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

from kvik.kernels.triton.packed import empty
from kvik.kernels.weights import MatrixSpec
from kvik.spec.weight_kind import WeightKind

SCHEMES = (
    WeightKind("int4", 128, "zeros"),
    WeightKind("int4", 32, ordered=True),
    WeightKind("int4", 48, "minima"),
    WeightKind("int8"),
    WeightKind("int8", 64, activations="group"),
    WeightKind("fp8"),
    WeightKind("fp8", activations="static"),
    WeightKind("fp8", 128, activations="group"),
    WeightKind("fp8", 64, activations="group"),
)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 128), (1344, 200)])
def test_bytes_are_those_of_its_parts(scheme: WeightKind, inputs: int, outputs: int) -> None:
    device = torch.device("meta")
    packed = empty(MatrixSpec(scheme, outputs, inputs, False, None, torch.bfloat16, device))
    parts = [packed.values, packed.scales, packed.factors, packed.order, packed.input_scale]
    parts += [packed.arrivals, packed.squares.scales if packed.squares else None]
    taken = sum(part.nbytes for part in parts if part is not None)
    assert scheme.weight_bytes(inputs, outputs, "triton") == taken
