"""Which layer is quantised how, and what it weighs."""

from __future__ import annotations

import pytest

from kvik.spec.weights import LayerScheme, layer_scheme

W8A8 = LayerScheme(8, quantize_activations=True)


@pytest.mark.parametrize(
    ("quantization", "inputs", "head", "scheme"),
    [
        ("none", 128, False, None),
        ("none", 128, True, None),
        ("int8", 100, False, W8A8),
        ("int8", 100, True, W8A8),
        ("int8-weight-only", 128, False, LayerScheme(8)),
        ("int8-weight-only", 128, True, LayerScheme(8)),
        ("int4", 4864, False, LayerScheme(4, 128)),
        ("int4", 704, False, LayerScheme(4, 64)),
        ("int4", 288, False, LayerScheme(4, 32)),
        ("int4", 100, False, W8A8),
        ("int4", 128, True, W8A8),
        ("fp8", 100, False, LayerScheme(8, float8=True)),
        ("fp8", 128, True, LayerScheme(8, float8=True)),
    ],
)
def test_scheme(quantization: str, inputs: int, head: bool, scheme: LayerScheme | None) -> None:
    assert layer_scheme(quantization, inputs, head=head) == scheme


def test_bytes_of_a_layer() -> None:
    assert LayerScheme(8).weight_bytes(100, 7) == 700 + 4 * 7
    assert LayerScheme(4, 32).weight_bytes(96, 7) == 48 * 7 + 3 * 7 * (4 + 1)


def test_the_native_kernels_keep_groups_in_two_bytes() -> None:
    """Beside four for each output; minima are kept as scales are, zero points in a byte."""
    for scheme, of_group in (
        (LayerScheme(8, 32), 2),
        (LayerScheme(4, 32, zeros=False), 2),
        (LayerScheme(4, 32), 2 + 1),
        (LayerScheme(4, 32, minima=True), 2 + 2),
        (LayerScheme(8, 32, float8=True), 4),
    ):
        values = 96 * 7 * scheme.bits // 8
        expected = values + 4 * 7 + 3 * 7 * of_group
        assert scheme.weight_bytes(96, 7, "native") == expected
    assert LayerScheme(8).weight_bytes(100, 7, "native") == 700 + 4 * 7
    assert LayerScheme(4, 32, minima=True).weight_bytes(96, 7) == 48 * 7 + 3 * 7 * 8
