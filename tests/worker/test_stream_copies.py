"""Pages of a GPU's cache are read on the host only after their copies have ended.

A stand-in for a stream carries out copies in order, but the host sees their results only after it
has asked some times whether they have ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import matrix
from helpers.page_moves import Disk, key, plan

from kvik.core.plan import AT_PEER, NOWHERE, PageLease, PageLoad, PageStore
from kvik.core.types import PageSource
from kvik.errors import ConfigError
from kvik.nn.kv_formats import KVCache, allocate_kv
from kvik.nn.pages import DevicePages, DeviceStatePages, GroupPages, PagePart
from kvik.spec.kv import PAGE_HEAD_BYTES, KVCacheSpec, KVGroup, group_layers
from kvik.worker.page_copies import StreamCopies
from kvik.worker.page_mover import TierParts
from kvik.worker.staged_mover import StagedPageMover

ASKED = 3  # times until a copy has ended
SIZE = 16
GROUPS = group_layers([KVCacheSpec(2, 4, 2 * 2 * 4 * 4)] * 2)


class Stream:
    """What the host does not see yet."""

    def __init__(self) -> None:
        self.pending: list[tuple[np.ndarray, np.ndarray]] = []  # a row, its bytes
        self.seen = 0  # of everything that was ever pending

    def mark(self) -> StreamMark:
        return StreamMark(self, self.seen + len(self.pending))

    def land(self, until: int) -> None:
        count = max(0, until - self.seen)
        for row, content in self.pending[:count]:
            row[:] = content
        del self.pending[:count]
        self.seen += count

    def latest(self, row: np.ndarray) -> np.ndarray:
        """Return what a row has on the stream."""
        found = [content for other, content in self.pending if np.shares_memory(other, row)]
        return found[-1] if found else row


class StreamMark:
    def __init__(self, stream: Stream, place: int) -> None:
        self.stream, self.place, self.asked = stream, place, 0
        self.thread = threading.current_thread()

    def query(self) -> bool:
        assert threading.current_thread() is self.thread, "CUDA may be capturing a graph"
        self.asked += 1
        if self.asked >= ASKED:
            self.stream.land(self.place)
        return self.asked >= ASKED

    def synchronize(self) -> None:
        self.stream.land(self.place)

    def elapsed_time(self, end: StreamMark) -> float:
        assert end.asked >= ASKED
        return 1.0


class StreamPages:
    """Copies of `DevicePages` on the stand-in."""

    def __init__(self, pages: GroupPages, stream: Stream) -> None:
        self.num_bytes = pages.num_bytes
        self._pages, self._stream = pages, stream

    def copy_out(self, blocks: Sequence[int], pages: np.ndarray, rows: Sequence[int]) -> None:
        copied = np.zeros((len(rows), self.num_bytes), np.uint8)
        self._pages.copy_out(blocks, copied, range(len(rows)))
        for row, content in zip(rows, copied, strict=True):
            self._stream.pending.append((pages[row, : self.num_bytes], content))

    def copy_in(self, pages: np.ndarray, rows: Sequence[int], blocks: Sequence[int]) -> None:
        found = np.stack([self._stream.latest(pages[row, : self.num_bytes]) for row in rows])
        self._pages.copy_in(found, range(len(rows)), blocks)

    def complete(self, blocks: Sequence[int]) -> bool:
        return self._pages.complete(blocks)


def no_pinning(memory: np.ndarray) -> Callable[[], None]:
    return lambda: None


def mover_on_a_stream(pages: Sequence[GroupPages], tiers: TierParts) -> StagedPageMover:
    stream = Stream()
    lagging = [StreamPages(each, stream) for each in pages]
    make = partial(StreamCopies, lagging, mark=stream.mark, pin=no_pinning)
    return StagedPageMover(lagging, tiers, make)


@pytest.fixture
def cache() -> KVCache:
    made = allocate_kv(GROUPS, 12, SIZE, torch.float32, torch.device("cpu"))
    for storage in made.storages:
        storage.view(torch.uint8).random_(0, 256)
    return made


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def mover(cache: KVCache, disk: Disk) -> Iterator[StagedPageMover]:
    made = mover_on_a_stream([DevicePages(GROUPS[0], cache, SIZE)], TierParts(4, disk))
    yield made
    made.close()


def content(cache: KVCache, block: int) -> np.ndarray:
    page = np.zeros((1, PAGE_HEAD_BYTES + SIZE * GROUPS[0].bytes_per_token), np.uint8)
    DevicePages(GROUPS[0], cache, SIZE).copy_out([block], page, [0])
    return page[0, PAGE_HEAD_BYTES:]


def test_the_disk_gets_a_page_once_its_copy_has_ended(
    mover: StagedPageMover, cache: KVCache, disk: Disk
) -> None:
    expected = content(cache, 5)
    mover.begin(plan(0, PageStore(key(1), b"", 5, 0, on_disk=True)))
    for layer in GROUPS[0].layers:  # a step writes to the block
        for tensor in cache.of(layer).tensors:
            tensor[5] = 0
    mover.take(0)
    assert not disk.pages
    mover.wait(0)
    assert np.array_equal(disk.pages[key(1)][PAGE_HEAD_BYTES:], expected)


def test_a_page_is_loaded_while_its_store_has_not_ended(
    mover: StagedPageMover, cache: KVCache
) -> None:
    expected = content(cache, 5)
    mover.begin(plan(0, PageStore(key(1), b"", 5, 2, on_disk=False)))
    mover.begin(plan(1, PageLoad(7, [(key(1), 9, 2)])))
    moved = None
    while moved is None or not moved.loaded:
        moved = mover.wait(1)
    assert moved.loaded == [(7, [])]
    assert np.array_equal(content(cache, 9), expected)


class BrokenPeers:
    def __init__(self, *pages: np.ndarray) -> None:
        self.pages = pages

    def fetch(self, *request: object) -> Iterator[np.ndarray | None]:
        yield from self.pages
        raise UnicodeError("label too long")

    def close(self) -> None: ...


@pytest.mark.parametrize("pages", [(), (np.zeros(1 << 20, np.uint8),)], ids=["none", "too long"])
def test_a_load_ends_if_nothing_can_be_fetched_from_its_source(
    cache: KVCache, pages: tuple[np.ndarray, ...]
) -> None:
    tiers = TierParts(4, peers=BrokenPeers(*pages))
    mover = mover_on_a_stream([DevicePages(GROUPS[0], cache, SIZE)], tiers)
    source = PageSource("a" * 70, 1, "lease", SIZE)
    mover.begin(plan(0, PageLoad(7, [(key(1), 9, AT_PEER)], source)))
    waits = (mover.wait(0) for _ in range(100))
    assert next(moved.loaded for moved in waits if moved is not None) == [(7, [0])]
    mover.close()


def test_rates_are_those_of_the_copies(mover: StagedPageMover, cache: KVCache, disk: Disk) -> None:
    mover.begin(plan(0, PageStore(key(1), b"", 5, 2, on_disk=True)))
    mover.wait(0)
    pages = [(key(1), 9, 2), (key(1), 10, NOWHERE)]
    mover.begin(plan(1, PageLoad(7, pages)))
    rates: dict[str, tuple[int, float]] = {}
    while len(rates) < 2:
        moved = mover.wait(1)
        rates |= {} if moved is None else {tier: (n, s) for tier, n, s in moved.rates}
    size = len(content(cache, 9)) + PAGE_HEAD_BYTES
    assert rates["memory"] == (size, 1e-3)  # a millisecond, as the stream says
    assert rates["disk"][0] == size and rates["disk"][1] > 1e-3  # and the time to read it


def test_pages_that_other_engines_fetch_are_complete_when_they_are_lent(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: list[np.ndarray] = []  # as fetched in threads of their own
    mover = mover_on_a_stream([DevicePages(GROUPS[0], cache, SIZE)], TierParts(4))
    expected = content(cache, 5)

    class Server:
        def lend(self, lease: PageLease) -> None:
            with ThreadPoolExecutor(1) as threads:
                for key, _, place in lease.pages:
                    lent.append(threads.submit(mover._page_at, key, place).result().copy())

        def close(self) -> None: ...

    monkeypatch.setattr(mover, "_page_server", Server())
    lease = PageLease("lease", [(key(1), b"", 3)])
    store = PageStore(key(1), b"", 5, 3, on_disk=False)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(mover, "_store", refuse)
        mover.begin(plan(0, store))
    mover.begin(plan(1, leases=[lease]))  # was planned before the first failed
    assert not lent
    mover.begin(plan(2, store, leases=[lease]))
    (page,) = lent
    assert np.array_equal(page[PAGE_HEAD_BYTES:], expected)
    mover.close()


def refuse(stores: Sequence[PageStore]) -> None:
    raise RuntimeError("no memory is left")


def test_closing_waits_for_copies_before_it_unpins(cache: KVCache) -> None:
    stream, unpinned = Stream(), list[bool]()
    pages = [StreamPages(DevicePages(GROUPS[0], cache, SIZE), stream)]

    def pin(memory: np.ndarray) -> Callable[[], None]:
        return lambda: unpinned.append(not stream.pending)

    copies = StreamCopies(pages, 2, pages[0].num_bytes, stream.mark, pin)
    copies.copy(0, [5], [1], load=False)
    assert stream.pending
    copies.close()
    assert unpinned == [True]


def test_memory_that_cannot_be_pinned_is_refused(
    cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[int, ...]] = []

    def register(*args: int) -> int:
        called.append(args)
        return len(called) - 1  # an error for all but the first

    runtime = SimpleNamespace(
        cudaHostRegister=register,
        cudaHostUnregister=lambda *args: called.append(args),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    pages = [DevicePages(GROUPS[0], cache, SIZE)]
    copies = StreamCopies(pages, 2, pages[0].num_bytes)
    copies.close()
    address = copies.rows.ctypes.data
    assert called == [(address, copies.rows.nbytes, 0), (address,)]
    with pytest.raises(ConfigError, match="kv_tiers: .* cannot be pinned"):
        StreamCopies(pages, 2, pages[0].num_bytes)


def device_pages(
    groups: Sequence[KVGroup], local: object, cache: KVCache, share: PagePart, **_: bool
) -> Sequence[GroupPages]:
    return [DevicePages(group, cache, share.block_size) for group in groups]


MODELS = ("bundled", "windowed", "states")
FAST = "swap, siblings, three steps in flight"
TIERED = [
    pytest.param(column, marks=() if column.name == FAST else pytest.mark.full)
    for column in matrix.COLUMNS
    if "kv_tiers" in column.config and column.way == "LLM"
]


@pytest.mark.each(1)  # pages are copied alike whatever a model keeps in them
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("column", TIERED, ids=matrix.named)
def test_tokens_do_not_depend_on_where_pages_were(
    column: matrix.Column,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a whole engine, with blocks laid out as on a GPU."""
    if model == "states" and column.must == "swaps" and column.in_flight > 1:
        column = replace(column, must="preemptions")  # a state that later steps change is not kept
    monkeypatch.setattr("kvik.worker.page_copies.StatePages", DeviceStatePages)
    monkeypatch.setattr("kvik.worker.page_copies.group_pages", device_pages)
    monkeypatch.setattr("kvik.worker.worker.PageMover", mover_on_a_stream)
    options = {"dtype": "float32", "kernels": "torch"}
    found = matrix.run_column(
        column, matrix.params(column.siblings), matrix.make_model(model, tmp_path), **options
    )
    matrix.check_tokens(found, matrix.tokens_of(model))
