"""The pool: sizes are as planned, and layers of different groups share storage."""

from __future__ import annotations

import pytest
import torch

from kvik.config.kv_spec import KVCacheSpec, KVGroup, KVKind, block_bytes, group_layers
from kvik.nn.kv_formats import DenseKV, allocate_kv

CPU = torch.device("cpu")


def spec(window: int | None, heads: int = 2) -> KVCacheSpec:
    kind = KVKind.FULL if window is None else KVKind.SLIDING_WINDOW
    return KVCacheSpec(kind, heads, 8, 2 * heads * 8 * 2, window)


@pytest.mark.parametrize(
    "windows",
    [
        [None] * 4,
        [None, 7, 7, None],
        [None, 7, 7, 7],  # one full layer to three window layers: cut into equal parts
        [None, None, 7, 7, 7],  # no multiple: one storage is idle in full blocks
    ],
)
def test_a_pool_takes_the_bytes_that_were_planned(windows: list[int | None]) -> None:
    groups = group_layers([spec(window) for window in windows])
    kv = allocate_kv(groups, 10, 16, DenseKV(torch.bfloat16), CPU)
    assert len(kv) == len(windows)
    storages = {layer.k.data_ptr(): layer.k for layer in kv}
    storages |= {layer.v.data_ptr(): layer.v for layer in kv}
    assert sum(t.nbytes for t in storages.values()) == 10 * block_bytes(groups, 16)
    for layer in kv:
        assert layer.k.shape == layer.v.shape == (10, 16, 2, 8)
        assert layer.k.dtype == torch.bfloat16 and not layer.k.any()


def test_layers_of_one_group_never_share() -> None:
    groups = group_layers([spec(window) for window in (None, 7, 7, None)])
    kv = allocate_kv(groups, 4, 4, DenseKV(torch.float32), CPU)
    for group in groups:
        assert len({kv[layer].k.data_ptr() for layer in group.layers}) == len(group.layers)
    assert kv[0].k is kv[1].k and kv[3].k is kv[2].k and kv[0].v is not kv[0].k


def test_bytes_of_a_token() -> None:
    assert DenseKV(torch.float16).bytes_per_token(8, 128) == 2 * 8 * 128 * 2
    assert DenseKV(torch.float32).bytes_per_token(2, 8) == 2 * spec(None).bytes_per_token


def test_groups_of_different_heads_are_refused() -> None:
    groups = (KVGroup(spec(None), (0,)), KVGroup(spec(7, heads=4), (1,)))
    with pytest.raises(ValueError, match="one head shape"):
        allocate_kv(groups, 4, 4, DenseKV(torch.float32), CPU)
