"""Pages have the contents of blocks, independent of their place, and detect damage."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.tiers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvik.nn.kv_formats import KVCache, allocate_kv
from kvik.nn.pages import (
    DevicePages,
    DeviceStatePages,
    GroupPages,
    JoinedPages,
    PageName,
    PagePart,
    StatePages,
    group_pages,
    is_good,
    seal,
)
from kvik.spec.kv import (
    PAGE_HEAD_BYTES,
    KVCacheSpec,
    KVGroup,
    group_layers,
    state_pages,
    stored_as,
)
from kvik.spec.shares import PipelineStage, cut_groups, kv_share, stage_groups

Maker = Callable[[Sequence[KVGroup], KVCache], Sequence[GroupPages]]
ALONE = PagePart(16)


def _by(*, heads_first: bool) -> Maker:
    return lambda groups, cache: group_pages(groups, groups, cache, ALONE, heads_first=heads_first)


MAKERS: dict[str, Maker] = {
    "native kernels": _by(heads_first=True),
    "numpy": _by(heads_first=False),
    "of a GPU": lambda groups, cache: [DevicePages(group, cache, 16) for group in groups],
}
NAME = PageName(b"f" * 16, 1, b"h" * 16)


def page_of() -> np.ndarray:
    page = np.random.default_rng(0).integers(0, 256, 300, dtype=np.uint8)
    seal(page, NAME, b"p" * 16)
    return page


def test_a_header_has_64_bytes_and_identifies_the_content() -> None:
    page = page_of()
    assert PAGE_HEAD_BYTES == 64 and is_good(page, NAME)
    for other in (
        PageName(b"g" * 16, 1, NAME.hash),
        PageName(NAME.fingerprint, 0, NAME.hash),
        PageName(NAME.fingerprint, 1, b"i" * 16),
    ):
        assert not is_good(page, other)


@given(bit=st.integers(0, 300 * 8 - 1))
@settings(max_examples=examples(500))
def test_a_flipped_bit_is_detected(bit: int) -> None:
    page = page_of()
    page[bit // 8] ^= 1 << bit % 8
    assert not is_good(page, NAME)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 299])
def test_a_torn_page_is_detected(length: int) -> None:
    assert not is_good(page_of()[:length], NAME)
    page = page_of()
    page[length:] = 0
    assert not is_good(page, NAME)


def spec(heads: int, dim: int, index: int = 0) -> KVCacheSpec:
    """index: width of an indexer's key."""
    return KVCacheSpec(heads, dim, (2 * heads * dim + index) * 4, index_bytes=index * 4)


@pytest.mark.parametrize("format", ["auto", "int8", "fp8", "int4"])
@pytest.mark.parametrize("kind", MAKERS)
def test_a_block_is_restored_in_another_place(format: str, kind: str) -> None:
    specs = stored_as([spec(2, 16), spec(2, 16), spec(4, 16)], format)
    groups = group_layers(specs)
    cache = allocate_kv(groups, 6, 16, torch.float32, torch.device("cpu"))
    for storage in cache.storages:
        storage.view(torch.uint8).random_(0, 256)
    whole = MAKERS[kind](groups, cache)
    for group, pages in zip(groups, whole, strict=True):
        assert pages.num_bytes == PAGE_HEAD_BYTES + 16 * group.bytes_per_token
        page = np.zeros(pages.num_bytes, np.uint8)
        pages.copy_out([2], page[None], [0])
        several = np.zeros((3, len(page) + 5), np.uint8)
        pages.copy_out([4, 2], several, [2, 1])
        assert np.array_equal(several[1, : len(page)], page) and not several[0].any()
        before = [storage.clone() for storage in cache.storages]
        pages.copy_in(several, [1], [5])
        for layer in group.layers:
            for tensor in cache.of(layer).tensors:
                first, second = tensor[2 * group.shares], tensor[5 * group.shares]
                assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
        for storage, old in zip(cache.storages, before, strict=True):
            assert torch.equal(storage.view(torch.uint8)[:5], old.view(torch.uint8)[:5])


def test_a_page_is_ordered_by_heads_whatever_the_kernels() -> None:
    """The native kernels have heads outermost in a block, other kernels tokens."""
    groups = group_layers([spec(2, 4)])
    block = torch.arange(16 * 2 * 4, dtype=torch.float32).view(16, 2, 4)  # [tokens, heads, dim]
    pages = []
    for kind, make in MAKERS.items():
        cache = allocate_kv(groups, 3, 16, torch.float32, torch.device("cpu"))
        by_heads = block.transpose(0, 1) if kind == "native kernels" else block
        cache.layers[0].k.view(3, -1)[1] = by_heads.flatten()
        pages.append(np.zeros(PAGE_HEAD_BYTES + 2 * 16 * 2 * 4 * 4, np.uint8))
        (whole,) = make(groups, cache)
        whole.copy_out([1], pages[-1][None], [0])
    assert all(np.array_equal(page, pages[0]) for page in pages) and pages[0].any()


def test_pages_on_a_gpu_are_copied_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """More pages than there is memory for at a time, of tensors of which not all bytes of a head
    are a multiple of eight."""
    groups = group_layers(stored_as([spec(3, 20)], "int8"))
    cache = allocate_kv(groups, 9, 4, torch.float32, torch.device("cpu"))
    for storage in cache.storages:
        storage.view(torch.uint8).random_(0, 256)
    pages = DevicePages(groups[0], cache, 4)
    (right,) = group_pages(groups, groups, cache, PagePart(4), heads_first=False)
    blocks, rows = [7, 1, 3, 2, 8], [0, 4, 2, 1, 3]
    found, expected = (np.zeros((5, pages.num_bytes), np.uint8) for _ in range(2))
    right.copy_out(blocks, expected, rows)
    monkeypatch.setattr(pages, "_at_once", 2)
    pages.copy_out(blocks, found, rows)
    assert np.array_equal(found[:, PAGE_HEAD_BYTES:], expected[:, PAGE_HEAD_BYTES:])
    pages.copy_in(found, rows, [4, 5, 6, 0, 8])
    for tensor in cache.layers[0].tensors:
        same = tensor.view(torch.uint8)
        assert torch.equal(same[[4, 5, 6, 0]], same[blocks[:4]])


@pytest.mark.parametrize("format", ["auto", "int8", "int4"])
@pytest.mark.parametrize(("ranks", "heads"), [(1, 4), (2, 4), (3, 4), (4, 2), (3, 2), (2, 1)])
def test_processes_write_and_read_their_parts_of_a_page(
    format: str, ranks: int, heads: int
) -> None:
    """Of two stages with as many ranks each. Heads shared by several ranks are in a page once."""
    specs = stored_as([spec(heads, 16), spec(heads, 16, index=8), spec(heads, 16)], format)
    groups = group_layers(specs)
    alone = allocate_kv(groups, 4, 16, torch.float32, torch.device("cpu"))
    for storage in alone.storages:
        storage.view(torch.uint8).random_(0, 256)
    (whole,) = group_pages(groups, groups, alone, ALONE, heads_first=False)
    right, found = (np.zeros(whole.num_bytes, np.uint8) for _ in range(2))
    whole.copy_out([1], right[None], [0])
    for stage in PipelineStage.all_of((1, 3)):
        for rank in range(ranks):
            own = cut_groups(stage_groups(groups, stage), rank, ranks)
            cache = allocate_kv(own, 4, 16, torch.float32, torch.device("cpu"))
            share = PagePart(16, rank, ranks)
            (pages,) = group_pages(groups, own, cache, share, heads_first=False)
            assert pages.num_bytes == whole.num_bytes
            pages.copy_in(right[None], [0], [3])
            begin, end = kv_share(heads, rank, ranks)
            for layer in stage.layers:
                kv = cache.of(layer)
                for tensor, all_heads in zip(kv.tensors, alone.of(layer).tensors, strict=True):
                    some = slice(None) if tensor is kv.index else slice(begin, end)
                    part = all_heads[1][:, some].contiguous().view(torch.uint8)
                    assert torch.equal(tensor[3].view(torch.uint8), part)
            before = found.copy()
            pages.copy_out([3], found[None], [0])
            if rank and kv_share(heads, rank - 1, ranks) == (begin, end):
                assert np.array_equal(found, before)  # written by another rank
    assert np.array_equal(found[PAGE_HEAD_BYTES:], right[PAGE_HEAD_BYTES:])


@pytest.mark.parametrize("kind", ["numpy", "native", "of a GPU"])
def test_pages_of_two_caches_with_the_same_blocks(kind: str) -> None:
    """Their bytes follow each other in a page."""
    caches, made, first = [], [], PAGE_HEAD_BYTES
    for heads, dim in ((2, 16), (3, 8)):
        (group,) = group_layers([spec(heads, dim)])
        cache = allocate_kv([group], 6, 16, torch.float32, torch.device("cpu"))
        for storage in cache.storages:
            storage.view(torch.uint8).random_(0, 256)
        if kind == "of a GPU":
            made.append(DevicePages(group, cache, 16, first))
        else:
            native = kind == "native"
            made += group_pages([group], [group], cache, ALONE, heads_first=native, first=first)
        assert made[-1].num_bytes == first + 16 * group.bytes_per_token
        first = made[-1].num_bytes
        caches.append(cache)
    pages = JoinedPages(*made)
    rows = np.full((3, pages.num_bytes + 5), 7, np.uint8)
    pages.copy_out([5, 2], rows, [2, 0])
    assert (rows[1] == 7).all() and (rows[:, :PAGE_HEAD_BYTES] == 7).all()
    assert (rows[:, pages.num_bytes :] == 7).all()
    pages.copy_in(rows, [2, 0], [0, 1])
    for storage in (storage for cache in caches for storage in cache.storages):
        of_bytes = storage.view(torch.uint8)
        assert torch.equal(of_bytes[[0, 1]], of_bytes[[5, 2]])


@pytest.mark.parametrize("heads_first", [True, False])
def test_a_stage_without_layers_of_a_group_copies_nothing(heads_first: bool) -> None:
    groups = group_layers([spec(2, 16)] * 2)
    cache = allocate_kv(groups, 4, 16, torch.float32, torch.device("cpu"))
    (none,) = (replace(group, specs=(), layers=()) for group in groups)
    (pages,) = group_pages(groups, [none], cache, ALONE, heads_first=heads_first)
    page = np.ones((1, pages.num_bytes), np.uint8)
    pages.copy_out([3], page, [0])
    pages.copy_in(page, [0], [3])
    assert page.all() and not any(storage.any() for storage in cache.storages)


@pytest.mark.parametrize("wide", [True, False])
def test_the_native_checksum_is_that_of_zlib(wide: bool) -> None:
    """At all lengths around the numbers of bytes taken at once."""
    native = pytest.importorskip("kvik.kernels.cpu._native")
    if not native.has_crc32():
        return  # zlib's is used
    data = np.random.default_rng(0).integers(0, 256, 65_544, np.uint8)
    for first, start in ((0, 12345), (1, 0xFFFFFFFF), (7, 0)):
        for size in [*range(600), 1023, 1024, 1279, 1280, 4096, 4990, 65_537]:
            some = data[first : first + size]
            assert native.crc32(some, start, wide) == zlib.crc32(some.data, start)


@pytest.mark.parametrize("format", ["auto", "int8", "int4"])
def test_native_copies_are_those_of_numpy(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    native = pytest.importorskip("kvik.kernels.cpu._native")
    groups = group_layers(stored_as([spec(2, 16), spec(2, 16), spec(4, 16)], format))
    cache = allocate_kv(groups, 6, 16, torch.float32, torch.device("cpu"))
    for storage in cache.storages:
        storage.view(torch.uint8).random_(0, 256)
    quick = group_pages(groups, groups, cache, ALONE, heads_first=True)
    called: list[str] = []
    copy = native.copy_pages
    monkeypatch.setattr(native, "copy_pages", lambda *each: (called.append(""), copy(*each))[1])
    with monkeypatch.context() as without:
        without.setattr("kvik.nn.pages._native", lambda: None)
        plain = group_pages(groups, groups, cache, ALONE, heads_first=True)
    for one, other in zip(quick, plain, strict=True):
        found = [np.zeros((3, one.num_bytes + 9), np.uint8) for _ in range(2)]
        one.copy_out([5, 2], found[0], [2, 0])
        count = len(called)
        assert count
        other.copy_out([5, 2], found[1], [2, 0])
        assert len(called) == count and np.array_equal(*found)
        after = []
        for pages in (one, other):
            for storage in cache.storages:
                storage.view(torch.uint8).fill_(1)
            pages.copy_in(found[0], [2], [3])
            after.append([storage.view(torch.uint8).clone() for storage in cache.storages])
        assert all(torch.equal(*pair) for pair in zip(*after, strict=True))
        for block, row in ((6, 0), (-1, 0), (0, 3)):
            with pytest.raises(IndexError):
                one.copy_out([block], found[0], [row])
        with pytest.raises(IndexError):
            one.copy_in(found[0][:, : one.num_bytes - 1], [0], [0])


@pytest.mark.parametrize("block_page", [80, 100, 5000])
@pytest.mark.parametrize("kind", [StatePages, DeviceStatePages])
def test_a_state_is_restored_in_another_row(kind: type[StatePages], block_page: int) -> None:
    """Also by two stages, which have the states of the first two and of the last layer."""
    pool = torch.randn(4, 30)
    count, size = state_pages(4 * 30, block_page)
    assert size <= max(block_page, 73) and (count == 1) == (block_page > 300)
    covered = np.arange(4, dtype=np.int32)
    whole = kind(pool, 0, size, count, covered)
    pages = np.full((count, size + 3), 255, np.uint8)
    whole.copy_out(range(2 * count, 3 * count), pages, range(count))
    stages = [pool[:, :17].clone(), pool[:, 17:].clone()]
    parts = [
        kind(stages[0], 0, size, count),
        kind(stages[1], 4 * 17, size, count, np.arange(4, dtype=np.int32)),
    ]
    same = np.full_like(pages, 255)
    for part in parts:
        part.copy_out(range(2 * count, 3 * count), same, range(count))
        part.copy_in(pages, range(count), range(count))
    assert np.array_equal(same, pages)
    assert torch.equal(torch.cat(stages, 1)[0], pool[2])
    whole.copy_in(pages, range(count), range(3 * count, 4 * count))
    assert whole.complete(range(3 * count, 4 * count))
    assert torch.equal(pool[3], pool[2]) and covered.tolist() == [0, 1, 2, 2]


def test_pages_of_two_copies_of_a_state_do_not_fit() -> None:
    """They were made after different numbers of drafts."""
    covered = np.array([5, 6, 0], np.int32)
    states = StatePages(torch.randn(3, 30), 0, 72 + 60, 2, covered)
    pages = np.zeros((2, 72 + 60), np.uint8)
    states.copy_out([0, 3], pages, [0, 1])
    states.copy_in(pages, [0, 1], [4, 5])
    assert not states.complete([4, 5])
