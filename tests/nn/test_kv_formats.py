"""The KV pool has the planned size, and layers of different groups share storage."""

from __future__ import annotations

import pytest
import torch
from helpers.configs import PUBLIC
from helpers.windows import as_window

from kvik.models.model_spec import ModelSpec
from kvik.nn.kv_formats import KVCache, allocate_kv
from kvik.spec.kv import KV_FORMATS, KVCacheSpec, block_bytes, group_layers, stored_as

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def spec(window: int | None, heads: int = 2, head_dim: int = 8) -> KVCacheSpec:
    return KVCacheSpec(heads, head_dim, 2 * heads * head_dim * 2, as_window(window))


def specs(windows: list[int | None]) -> list[KVCacheSpec]:
    return [spec(window) for window in windows]


def pool_bytes(kv: KVCache) -> int:
    return sum(storage.nbytes for storage in kv.storages)


WINDOWS = [
    [None] * 4,
    [None, 7, 7, None],
    [None, 7, 7, 7],  # one full layer to three window layers: split into equal groups
    [None, None, 7, 7, 7],  # no multiple: one storage is idle in some blocks
    [None] * 4 + [7] * 22,  # six groups of window layers, two of them with three
]


@pytest.mark.parametrize("skipped", [(), (0,), (1, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("format", ["auto", *KV_FORMATS])
@pytest.mark.parametrize("windows", WINDOWS)
def test_a_pool_takes_the_planned_bytes(windows, format, skipped) -> None:
    groups = group_layers(stored_as(specs(windows), format, skipped))
    kv = allocate_kv(groups, 10, 16, BF16, CPU)
    assert len(kv.layers) == len(windows)
    assert pool_bytes(kv) == 10 * block_bytes(groups, 16)
    assert not any(storage.view(torch.uint8).any() for storage in kv.storages)


@pytest.mark.parametrize("windows", WINDOWS)
def test_skipped_layers_keep_the_dtype_and_the_block_table(windows) -> None:
    plain = group_layers(specs(windows))
    groups = group_layers(stored_as(specs(windows), "int8", (1, 3)))
    assert [group.layers for group in groups] == [group.layers for group in plain]
    kv = allocate_kv(groups, 4, 16, BF16, CPU).layers
    dtypes = [layer.k.dtype for layer in kv]
    assert [dtypes[i] == BF16 for i in range(len(kv))] == [i in (1, 3) for i in range(len(kv))]
    assert {dtype for dtype in dtypes if dtype != BF16} == {torch.int8}
    for layer in kv:
        assert (layer.k_scales is None) == (layer.k.dtype == BF16)


@pytest.mark.parametrize("skipped", [(), (0,), (2,), (0, 1)])
def test_layers_of_one_group_never_share(skipped) -> None:
    groups = group_layers(stored_as(specs([None, 7, 7, None]), "int8", skipped))
    kv = allocate_kv(groups, 4, 4, torch.float32, CPU).layers
    for group in groups:
        assert len({kv[layer].k.data_ptr() for layer in group.layers}) == len(group.layers)
    if skipped in ((), (0, 1)):  # as many of each format in both groups
        place = [layer.k.data_ptr() for layer in kv]
        assert place[0] == place[1] and place[3] == place[2] and kv[0].v.data_ptr() != place[0]


@pytest.mark.parametrize("windows", WINDOWS)
def test_no_layer_shares_if_blocks_belong_to_all_groups(windows) -> None:
    groups = group_layers(stored_as(specs(windows), "int8", (1,)))
    kv = allocate_kv(groups, 10, 16, BF16, CPU, separate=True)
    assert [layer.k.dtype == BF16 for layer in kv.layers] == [i == 1 for i in range(len(windows))]
    places = {t.data_ptr() for layer in kv.layers for t in layer.tensors}
    assert len(places) == 4 * len(windows) - 2
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


# (layers that see all keys, heads, head_dim), then those with a window; places per block for one of
# the largest layers; padding of all groups in such places.
SHAPES = [
    ((5, 2, 16), (25, 8, 8), 3, 2.5),  # Gemma 4 26B: two full layers in place of one with a window
    ((10, 4, 16), (50, 16, 8), 5, 0),  # 31B
    ((3, 1, 16), (12, 1, 8), 3, 0),  # E2B: two layers with a window in the space of a full one
    ((2, 3, 8), (4, 2, 8), 2, 0),  # sizes without a common fraction: separate memory
]


def test_entries_share_the_memory_of_what_they_are_made_of() -> None:
    specs = ModelSpec.from_config(PUBLIC["DeepSeek-V4-Flash"]).kv_specs(2)
    groups = group_layers(specs)
    kv = allocate_kv(groups, 3, 16, BF16, CPU)
    assert pool_bytes(kv) == 3 * block_bytes(groups, 16) == 3 * 16 * 3072 * 2


@pytest.mark.parametrize("format", ["auto", "int8", "int4"])
@pytest.mark.parametrize(("full", "windowed", "places", "padding"), SHAPES)
def test_layers_of_different_heads_share_memory(full, windowed, places, padding, format) -> None:
    kinds = [spec(None, *full[1:])] * full[0] + [spec(7, *windowed[1:])] * windowed[0]
    groups = group_layers(stored_as(kinds, format))
    largest = max(spec.numbers for spec in kinds)
    assert max(group.places(format) for group in groups) == places
    used = sum(spec.numbers * group.shares for group in groups for spec in group.specs)
    if largest % min(spec.numbers for spec in kinds) == 0:
        used = sum(spec.numbers for spec in kinds)
        assert len(groups) * places - used / largest == padding
    kv = allocate_kv(groups, 6, 16, BF16, CPU)
    assert pool_bytes(kv) == 6 * block_bytes(groups, 16)
    # Writing to a layer's part of a block changes no other layer of the group, and no other block.
    for group in groups:
        for block in (0, 5):
            written = [kv.of(layer).tensors for layer in group.layers]
            for i, tensors in enumerate(written):
                for tensor in tensors:
                    tensor[block * group.shares].fill_(i + 1)
            for i, tensors in enumerate(written):
                assert all((tensor[block * group.shares] == i + 1).all() for tensor in tensors)
            for storage in kv.storages:
                assert not storage[[b for b in range(6) if b != block]].any()
                storage.zero_()
