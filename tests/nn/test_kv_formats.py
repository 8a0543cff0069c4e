"""The pool: sizes are as planned, and layers of different groups share storage."""

from __future__ import annotations

import pytest
import torch

from kvik.attention.base import LayerKV
from kvik.nn.kv_formats import allocate_apart, allocate_kv
from kvik.spec.kv import (
    KV_FORMATS,
    KVCacheSpec,
    KVGroup,
    block_bytes,
    group_layers,
    stored_as,
)

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def spec(window: int | None, heads: int = 2) -> KVCacheSpec:
    return KVCacheSpec(heads, 8, 2 * heads * 8 * 2, window)


def specs(windows: list[int | None]) -> list[KVCacheSpec]:
    return [spec(window) for window in windows]


def pool_bytes(kv: tuple[LayerKV, ...]) -> int:
    """Of all layers, what they share counted once."""
    return sum({t.data_ptr(): t.nbytes for layer in kv for t in layer.tensors}.values())


WINDOWS = [
    [None] * 4,
    [None, 7, 7, None],
    [None, 7, 7, 7],  # one full layer to three window layers: cut into equal parts
    [None, None, 7, 7, 7],  # no multiple: one storage is idle in full blocks
]


@pytest.mark.parametrize("skipped", [(), (0,), (1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("format", ["auto", *KV_FORMATS])
@pytest.mark.parametrize("windows", WINDOWS)
def test_a_pool_takes_the_bytes_that_were_planned(windows, format, skipped) -> None:
    groups = group_layers(stored_as(specs(windows), format, skipped))
    kv = allocate_kv(groups, 10, 16, BF16, CPU)
    assert len(kv) == len(windows)
    assert pool_bytes(kv) == 10 * block_bytes(groups, 16)
    assert not any(t.view(torch.uint8).any() for layer in kv for t in layer.tensors)


@pytest.mark.parametrize("windows", WINDOWS)
def test_skipped_layers_keep_the_dtype_and_the_block_table(windows) -> None:
    plain = group_layers(specs(windows))
    groups = group_layers(stored_as(specs(windows), "int8", (1, 3)))
    assert [group.layers for group in groups] == [group.layers for group in plain]
    kv = allocate_kv(groups, 4, 16, BF16, CPU)
    dtypes = [layer.k.dtype for layer in kv]
    assert [dtypes[i] == BF16 for i in range(len(kv))] == [i in (1, 3) for i in range(len(kv))]
    assert {dtype for dtype in dtypes if dtype != BF16} == {torch.int8}
    for layer in kv:
        assert (layer.k_scales is None) == (layer.k.dtype == BF16)


@pytest.mark.parametrize("skipped", [(), (0,), (2,), (0, 1)])
def test_layers_of_one_group_never_share(skipped) -> None:
    groups = group_layers(stored_as(specs([None, 7, 7, None]), "int8", skipped))
    kv = allocate_kv(groups, 4, 4, torch.float32, CPU)
    for group in groups:
        assert len({kv[layer].k.data_ptr() for layer in group.layers}) == len(group.layers)
    if skipped in ((), (0, 1)):  # as many of each format in both groups
        assert kv[0].k is kv[1].k and kv[3].k is kv[2].k and kv[0].v is not kv[0].k


@pytest.mark.parametrize("windows", WINDOWS)
def test_where_blocks_belong_to_all_groups_no_layer_shares(windows) -> None:
    groups = group_layers(stored_as(specs(windows), "int8", (1,)))
    kv = allocate_apart(groups, 10, 16, BF16, CPU)
    assert [layer.k.dtype == BF16 for layer in kv] == [i == 1 for i in range(len(windows))]
    assert len({t.data_ptr() for layer in kv for t in layer.tensors}) == 4 * len(windows) - 2
    assert pool_bytes(kv) == 10 * 16 * sum(group.bytes_per_token for group in groups)


@pytest.mark.parametrize(
    ("format", "head", "number"),
    [
        ("fp32", 0, 4),
        ("bf16", 0, 2),
        ("fp16", 0, 2),
        ("fp8", 2, 1),
        ("int8", 2, 1),
        ("int4", 2, 0.5),
    ],
)
def test_bytes_of_a_token(format: str, head: int, number: float) -> None:
    (one,) = stored_as([KVCacheSpec(8, 128, 0)], format)
    assert one.bytes_per_token == 2 * 8 * (128 * number + head)


def test_groups_of_different_heads_are_refused() -> None:
    groups = (KVGroup((spec(None),), (0,)), KVGroup((spec(7, heads=4),), (1,)))
    with pytest.raises(ValueError, match="one head shape"):
        allocate_kv(groups, 4, 4, torch.float32, CPU)
