"""How often Triton compiles anew while steps differ in their tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.optional_triton import INTERPRETED_ONLY, NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

from helpers.compilations import compilation
from triton.runtime.interpreter import InterpretedFunction

from kvik.kernels.triton import norm
from kvik.kernels.triton.matrix import TritonMatrices
from kvik.kernels.triton.matrix_shapes import FEW
from kvik.kernels.weights import MatrixSpec
from kvik.spec.weight_kind import WeightKind

pytestmark = INTERPRETED_ONLY
CPU = torch.device("cpu")
TOKENS = range(1, 130)
CLASSES = 1 + sum(tile.tokens < max(TOKENS) for tile in FEW)  # of sizes of tiles


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What would be compiled: kernels with all that they are compiled for."""
    found: set[str] = set()

    def bind(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.add(compilation(self, *args, **options))

    monkeypatch.setattr(InterpretedFunction, "run", bind)
    return found


@pytest.mark.parametrize(
    ("kind", "kernels"),
    [
        (WeightKind("int4", 128, "zeros"), 1),
        (WeightKind("int8", activations="token"), 2),
        (WeightKind("int8", 128, activations="group"), 2),
        (WeightKind("fp8"), 1),
    ],
    ids=str,
)
def test_products_compile_once_for_each_class_of_tokens(
    kind: WeightKind, kernels: int, compiled: set[str]
) -> None:
    matrices, inputs = TritonMatrices(CPU), 4096
    matrix = matrices.matrix(MatrixSpec(kind, 256, inputs, False, None, torch.bfloat16, CPU))
    for tokens in TOKENS:
        matrices.linear(torch.empty(tokens, inputs, dtype=torch.bfloat16), matrix, None)
    assert len(compiled) == CLASSES + kernels - 1


def test_norms_compile_once(compiled: set[str]) -> None:
    weight = torch.empty(64)
    for tokens in TOKENS:
        norm.rms_norm(torch.empty(tokens, 64), weight, 1e-5)
        norm.layer_norm(torch.empty(tokens, 64), weight, weight, 1e-5)
    assert len(compiled) == 2
