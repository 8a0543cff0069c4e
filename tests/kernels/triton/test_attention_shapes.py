"""How attention is divided: by the sequence alone, within the planned workspace."""

from __future__ import annotations

import pytest
from helpers.optional_triton import NO_TRITON

pytest.importorskip("triton", reason=NO_TRITON)

import torch
import triton
import triton.language as tl
from helpers.optional_triton import device

from kvik.config.step_memory import TRITON_WORKSPACE
from kvik.kernels.triton.attention_paged import PagedStep, SequenceRun, runs_of
from kvik.kernels.triton.attention_shapes import (
    TALLEST,
    WORKSPACE,
    Tiles,
    lengths,
    max_queries,
    max_splits,
    prefill_tiles,
    split,
    split_tiles,
    tallest,
)


@triton.jit
def split_kernel(seen, tiles, out):
    keys, splits = split(tl.load(seen), tl.load(tiles))
    tl.store(out, keys)
    tl.store(out + 1, splits)


def cut(seen: int, tiles: int) -> tuple[int, int]:
    """Return keys per split and the number of splits, computed on the device."""
    arguments = [torch.tensor([n], dtype=torch.int32, device=device()) for n in (seen, tiles)]
    out = torch.zeros(2, dtype=torch.int32, device=device())
    split_kernel[(1,)](*arguments, out)
    keys, splits = out.tolist()
    return keys, splits


@pytest.mark.parametrize("tiles", [1, 2, 8, 48, 128, 300])
def test_splits_cover_a_context_within_the_planned_number(tiles):
    for seen in (0, 1, 127, 128, 129, 1000, 8192, 8193, 131072):
        keys, splits = cut(seen, tiles)
        assert keys % 128 == 0 and (splits - 1) * keys < max(seen, 1) <= max(splits, 1) * keys
        assert splits <= max_splits(seen, tiles)


def test_a_single_long_sequence_is_spread_over_a_gpu():
    keys, splits = cut(8192, 8)
    assert (keys, splits) == (512, 16)  # 8 KV heads: 128 programs
    assert cut(1024, 8) == (128, 8)
    assert cut(100, 8) == (128, 1)


def test_which_sequences_are_short():
    assert max_queries(4, 8) == 128  # 8 tiles of 64 rows for each of 8 KV heads: half a GPU
    assert max_queries(1, 64) == 64  # the most nodes of a tree
    assert max_queries(8, 1) == TALLEST * 64 // 8


def test_a_batch_is_summed_up_by_number_of_queries():
    assert runs_of((1, 1, 7, 1, 7), (9, 30, 7, 4, 20)) == (
        SequenceRun(1, first=0, last=3, start=0, end=10, context=30),
        SequenceRun(7, first=2, last=4, start=2, end=17, context=20),
    )


def test_layers_with_the_same_heads_and_kind_of_cache_are_planned_together():
    counts = torch.tensor([0, 1], dtype=torch.int32)
    step = PagedStep(counts, counts, counts, None, None, 16, None, runs_of((1, 90), (500, 90)))

    def planned(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, kept: torch.dtype):
        return step.launches(
            torch.empty(91, heads, dim, dtype=dtype), torch.empty(9, 16, kv_heads, dim, dtype=kept)
        )

    usual = (8, 2, 64, torch.bfloat16, torch.bfloat16)
    assert planned(*usual) is planned(*usual)
    others = {"heads": 4, "kv_heads": 4, "dim": 128, "dtype": torch.float32, "kept": torch.int8}
    for i, other in enumerate(others.values()):
        assert planned(*usual[:i], other, *usual[i + 1 :]) != planned(*usual)


def buffers(tiles: Tiles, asynchronous: bool) -> int:
    """Return the buffers of K and V; asynchronous products of Hopper still read the previous
    ones."""
    return (tiles.num_stages - 1) // 2 + asynchronous


@pytest.mark.parametrize("head_dim", [1, 64, 80, 128, 192, 256, 320, 512])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("shared", [227 << 10, 163 << 10, 99 << 10])
def test_tiles_fit_shared_memory(head_dim, itemsize, shared):
    """Queries, and K and V of the tiles in flight and in use."""
    wide, hopper = max(32, triton.next_power_of_2(head_dim)), shared == 227 << 10
    for m in (16, 32, 64):
        if m > tallest(head_dim, itemsize, "float"):
            continue
        tiles = split_tiles(m, head_dim, itemsize, shared=shared)
        assert tiles.n >= 16
        kept = buffers(tiles, hopper and itemsize == 2 and m == 64)
        assert (m + 2 * kept * tiles.n) * wide * itemsize <= shared
    for edges in (False, True):
        tiles = prefill_tiles(head_dim, itemsize, kind="float", edges=edges, shared=shared)
        kept = buffers(tiles, hopper and itemsize == 2 and tiles.m >= 64)
        assert 16 <= tiles.edge <= tiles.n
        assert (tiles.m + 2 * kept * tiles.n) * wide * itemsize <= shared


def test_a_number_of_tokens_of_every_class() -> None:
    """The first is for the prefill kernel; the others are the most of a tile, of products or of the
    split kernel."""
    assert lengths([(32, 8)], 8192) == (257, 256, 128, 64, 32, 16, 8, 4, 1)
    assert lengths([(14, 2)], 8192) == (293, 292, 256, 128, 64, 32, 16, 8, 4, 2, 1)
    assert lengths([(128, 1)], 8192)[:4] == (257, 256, 128, 64)  # more heads than rows of a tile
    # Layers of both kinds, as in Gemma 4, with different longest prompts of the split kernel.
    assert lengths([(16, 8), (16, 2)], 8192) == (257, 256, 128, 64, 32, 16, 8, 4, 2, 1)
    assert lengths([(32, 8)], 20) == (20, 16, 8, 4, 1)


def test_the_memory_plan_covers_the_workspace():
    assert TRITON_WORKSPACE >= WORKSPACE
