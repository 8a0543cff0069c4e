"""The memory plan counts quantised matrices as they lie in GPU memory, whole tiles included."""

from __future__ import annotations

import pytest
import torch
from helpers.optional_triton import NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

from kvik.kernels.triton.packed import empty
from kvik.kernels.weights import MatrixSpec
from kvik.nn.parts import weight_kind
from kvik.spec.weights import LayerScheme

SCHEMES = (
    LayerScheme(4, 128),
    LayerScheme(4, 32, zeros=False, ordered=True),
    LayerScheme(4, 48, minima=True),
    LayerScheme(8),
    LayerScheme(8, 64, quantize_activations=True),
    LayerScheme(8, float8=True),
    LayerScheme(8, float8=True, fp8_activations="static"),
    LayerScheme(8, 128, float8=True, fp8_activations="group"),
    LayerScheme(8, 64, float8=True, fp8_activations="group"),
)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 128), (1344, 200)])
def test_bytes_are_those_of_its_parts(scheme: LayerScheme, inputs: int, outputs: int) -> None:
    kind, device = weight_kind(scheme, torch.bfloat16), torch.device("meta")
    packed = empty(MatrixSpec(kind, outputs, inputs, False, None, torch.bfloat16, device))
    parts = [packed.values, packed.scales, packed.factors, packed.order, packed.input_scale]
    parts += [packed.arrivals, packed.squares.scales if packed.squares else None]
    taken = sum(part.nbytes for part in parts if part is not None)
    assert scheme.weight_bytes(inputs, outputs, "triton") == taken
