"""Pages divided among several processes are not read before all have copied their parts, nor
overwritten."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from helpers.page_moves import Disk, key, plan

from kvik.core.plan import NOWHERE, PageLoad, PageStore
from kvik.errors import GroupLost
from kvik.nn.kv_formats import KVCache, allocate_kv
from kvik.nn.pages import GroupPages, PagePart, group_pages
from kvik.spec.kv import PAGE_HEAD_BYTES, KVCacheSpec, group_layers
from kvik.spec.shares import cut_groups
from kvik.worker import staged_mover as module
from kvik.worker.group import Message, OpenPages
from kvik.worker.page_copies import PageMemory, ProcessCopies, copy_pages
from kvik.worker.page_mover import TierParts
from kvik.worker.staged_mover import StagedPageMover

BLOCKS, SIZE = 40, 16
GROUPS = group_layers([KVCacheSpec(2, 4, 2 * 2 * 4 * 4)] * 2)
PAGE = PAGE_HEAD_BYTES + SIZE * GROUPS[0].bytes_per_token


def part(rank: int, size: int = 2) -> tuple[KVCache, tuple[GroupPages, ...]]:
    own = cut_groups(GROUPS, rank, size)
    cache = allocate_kv(own, BLOCKS, SIZE, torch.float32, torch.device("cpu"))
    share = PagePart(SIZE, rank, size)
    return cache, group_pages(GROUPS, own, cache, share, heads_first=False)


class Other:
    """The other process, which handles messages when the test says so."""

    def __init__(self) -> None:
        self.cache, self.pages = part(1)
        self.messages: deque[Message] = deque()
        self.lost = ""
        self.memory: PageMemory | None = None

    def send(self, message: Message) -> None:
        if self.lost:
            raise GroupLost("tensor_parallel_size", self.lost)
        self.messages.append(message)

    def run(self, most: int = 1000) -> None:
        for _ in range(min(most, len(self.messages))):
            message = self.messages.popleft()
            if isinstance(message, OpenPages):
                self.memory = PageMemory.open(message)
                continue
            copy_pages(self.pages, self.memory.rows, message)
            self.memory.confirm(1, message.number)


class World:
    """Two processes, and the cache and pages that a single one would have."""

    def __init__(self) -> None:
        self.cache, pages = part(0)
        self.other, self.disk = Other(), Disk()
        self.mover = StagedPageMover(
            pages, TierParts(4, self.disk), partial(ProcessCopies, pages, [self.other], [1])
        )
        self.other.run()
        self.whole, (self.pages,) = part(0, 1)

    def fill(self, block: int, seed: int) -> None:
        """Write a block in all processes."""
        generator = torch.Generator().manual_seed(seed)
        for layer in GROUPS[0].layers:
            for i, tensor in enumerate(self.whole.of(layer).tensors):
                tensor[block] = torch.rand(tensor.shape[1:], generator=generator)
                self.cache.of(layer).tensors[i][block] = tensor[block][:, :1]
                self.other.cache.of(layer).tensors[i][block] = tensor[block][:, 1:]

    def page(self, seed: int) -> np.ndarray:
        """Return the page of a block that was filled with `seed`."""
        self.fill(0, seed)
        found = np.zeros(PAGE, np.uint8)
        self.pages.copy_out([0], found[None], [0])
        return found

    def has(self, block: int, seed: int) -> tuple[bool, bool]:
        """Return by process whether the block has that content."""
        self.fill(0, seed)
        caches = (self.cache, self.other.cache)
        pairs = [[cache.of(layer).tensors for layer in GROUPS[0].layers] for cache in caches]
        first, second = (
            all(torch.equal(tensor[block], tensor[0]) for tensors in found for tensor in tensors)
            for found in pairs
        )
        return first, second


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.other.lost = made.other.lost or "the test is over"
    made.mover.close()


def test_the_disk_gets_a_page_once_all_have_copied_it(world: World) -> None:
    world.fill(5, seed=1)
    world.mover.begin(plan(0, PageStore(key(1), b"", 5, 0, on_disk=True)))
    world.mover.take(0)
    assert not world.disk.pages
    world.other.run()
    world.mover.take(0)
    assert np.array_equal(world.disk.pages[key(1)][64:], world.page(1)[64:])


def test_a_place_may_be_reused_in_the_meantime(world: World) -> None:
    """The first process is a step ahead, as in a pipeline."""
    for number in (1, 2):
        world.fill(4 + number, seed=number)
        store = PageStore(key(number), b"", 4 + number, 0, on_disk=True)
        world.mover.begin(plan(number, store))
    world.other.run()
    world.mover.take(2)
    for number in (1, 2):
        assert np.array_equal(world.disk.pages[key(number)][64:], world.page(number)[64:])


def loaded(world: World, step: int) -> list[tuple[int, list[int]]]:
    moved = world.mover.take(step)
    return [] if moved is None else moved.loaded


def test_a_page_is_loaded_after_the_previous_steps(world: World) -> None:
    world.fill(5, seed=1)
    world.mover.begin(plan(0, PageStore(key(1), b"", 5, 2, on_disk=False)))
    world.mover.begin(plan(3, PageLoad(7, [(key(1), 9, 2)])))
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        assert not loaded(world, 2)
    assert world.has(9, 1) == (False, False)
    until = time.monotonic() + 10
    while not (found := loaded(world, 3)):
        assert time.monotonic() < until
    assert found == [(7, [])]
    assert world.has(9, 1) == (True, False)  # the other one loads it before the next step
    world.other.run()
    assert world.has(9, 1) == (True, True)


@pytest.mark.parametrize("lag", [1, 2, 5])
def test_more_pages_than_rows_are_loaded(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is reused only after the slowest process has copied it."""
    monkeypatch.setattr(module, "STAGED", 4 * PAGE)
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.005)  # in each of many rounds
    world = World()
    numbers = range(1, 25)
    for number in numbers:
        world.disk.pages[key(number)] = world.page(number)
    del world.disk.pages[key(6)]
    pages = [(key(number), number, NOWHERE) for number in numbers]
    world.mover.begin(plan(0, PageLoad(7, pages)))
    found, until, rounds = [], time.monotonic() + 20, 0
    while not found:
        moved = world.mover.wait(0)
        found = [] if moved is None else moved.loaded
        rounds += 1
        if rounds % lag == 0:
            world.other.run(1)
        assert time.monotonic() < until
    world.other.run()
    assert found == [(7, [5])]
    for number in numbers:
        assert world.has(number, number) == ((number != 6,) * 2)
    world.mover.close()


def test_stores_to_disk_without_a_free_row_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STAGED", 4 * PAGE)
    world = World()
    stores = [PageStore(key(n), b"", n, NOWHERE, on_disk=True) for n in range(6)]
    world.mover.begin(plan(0, *stores))
    moved = world.mover.take(0)
    assert moved.lost == [key(4), key(5)]
    world.other.run()
    world.mover.begin(plan(1, *stores[4:]))  # the rows are free again
    world.other.run()
    assert world.mover.take(1) is None and len(world.disk.pages) == 6
    world.mover.close()


def test_closing_waits_for_copies_but_not_for_a_lost_process() -> None:
    world = World()
    world.fill(5, seed=1)
    world.mover.begin(plan(0, PageStore(key(1), b"", 5, NOWHERE, on_disk=True)))
    world.other.lost = "gone"
    began = time.monotonic()
    world.mover.close()
    assert time.monotonic() - began < module.END_SECONDS / 2 and not world.disk.pages
    again = World()
    again.mover.begin(plan(0, PageStore(key(1), b"", 5, NOWHERE, on_disk=True)))
    again.other.run()
    again.mover.close()
    assert again.disk.pages
