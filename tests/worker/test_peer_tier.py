"""Pages lent to other engines, over connections with all kinds of faults."""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from helpers.faulty_line import Fault, FaultyLine
from helpers.http_server import until
from helpers.tiers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from kvik.core.plan import PageKey, PageLease
from kvik.core.types import PageSource
from kvik.errors import ConfigError
from kvik.links import NONCE, Address
from kvik.nn.pages import PAGE_HEAD_BYTES
from kvik.worker import peer_tier
from kvik.worker.peer_tier import PageServer, PeerPages, page_server_at

TOKEN, FINGERPRINT = b"a token that both know", b"f" * 16
SIZES = (PAGE_HEAD_BYTES + 5000, PAGE_HEAD_BYTES + 700)  # of the pages of two groups
KEYS = [(i % 2, hashlib.md5(bytes([i])).digest()) for i in range(12)]
HERE = Address("127.0.0.1", 0)


class Memory:
    """A memory tier."""

    def __init__(self) -> None:
        self.slab = np.random.default_rng(0).integers(0, 256, (len(KEYS), max(SIZES)), np.uint8)
        self.right = self.slab.copy()

    def page(self, key: PageKey, place: int) -> np.ndarray:
        return self.slab[place][: SIZES[key[0]]]

    def lease(self, name: str = "a") -> PageLease:
        return PageLease(name, [(key, b"p" * 16, i) for i, key in enumerate(KEYS)])

    def is_right(self, i: int, page: np.ndarray) -> bool:
        right = self.right[i][PAGE_HEAD_BYTES : SIZES[KEYS[i][0]]]
        return bytes(page[PAGE_HEAD_BYTES:]) == bytes(right)


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def page_server(memory: Memory) -> Iterator[PageServer]:
    page_server = PageServer(HERE, TOKEN, FINGERPRINT, memory.page)
    yield page_server
    page_server.close()


@pytest.fixture
def peers() -> Iterator[PeerPages]:
    peers = PeerPages(TOKEN, FINGERPRINT)
    yield peers
    peers.close()


def source(where: PageServer | FaultyLine, lease: str = "a") -> PageSource:
    port = where.port if isinstance(where, FaultyLine) else where.address.port
    return PageSource("127.0.0.1", port, lease, 96)


def fetched(peers: PeerPages, memory: Memory, of: PageSource) -> list[bool]:
    """Return which pages arrived, and check their content."""
    came = []
    for key, page in zip(KEYS, peers.fetch(of, KEYS, SIZES), strict=True):
        came.append(page is not None)
        assert page is None or memory.is_right(KEYS.index(key), page)
    return came


def returned(page_server: PageServer, *names: str) -> None:
    """Wait until exactly these leases have ended."""
    found: list[str] = []

    def came() -> bool:
        found.extend(page_server.take_returned())
        return len(found) >= len(names)

    until(came)
    assert sorted(found) == sorted(names)


def test_only_leased_pages_are_fetched(
    memory: Memory, page_server: PageServer, peers: PeerPages
) -> None:
    page_server.lend(PageLease("a", memory.lease().pages[:7]))
    for _ in range(2):  # the second time over the same connection
        assert fetched(peers, memory, source(page_server)) == [True] * 7 + [False] * 5
    page_server.end("a")
    assert fetched(peers, memory, source(page_server)) == [False] * 12
    assert page_server.take_returned() == []


def test_fetches_wait_for_a_lease_that_begins_soon(
    memory: Memory, page_server: PageServer, peers: PeerPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_tier, "SOON_SECONDS", 60.0)
    timer = threading.Timer(0.2, page_server.lend, [memory.lease()])
    timer.start()
    assert fetched(peers, memory, source(page_server)) == [True] * 12
    timer.join()


def test_fetches_do_not_wait_long_for_a_missing_lease(
    memory: Memory, page_server: PageServer, peers: PeerPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_tier, "SOON_SECONDS", 0.1)
    assert fetched(peers, memory, source(page_server, "unknown")) == [False] * 12


class HandClock:
    """The time of a module, advanced by the test."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.full
def test_leases_end_when_released_or_not_renewed(
    memory: Memory, page_server: PageServer, peers: PeerPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = HandClock()
    monkeypatch.setattr(peer_tier, "time", clock)
    monkeypatch.setattr(peer_tier, "LOOK_SECONDS", 0.02)
    for name in "abc":
        page_server.lend(memory.lease(name))
    peers.expect(source(page_server, "a"))
    peers.expect(source(page_server, "b"))
    ended: list[str] = []
    for _ in range(5):
        clock.now += peer_tier.RENEW_SECONDS
        with peers._changed:
            peers._changed.notify()  # otherwise it wakes after real time
        until(lambda: all(page_server._leased[n].until - clock.now == 30.0 for n in "ab"))
        ended += page_server.take_returned()
    until(lambda: ended + page_server.take_returned() == ["c"])
    peers.leave(source(page_server, "a"))
    returned(page_server, "a")
    peers.close()  # as if its process had died
    clock.now += peer_tier.LEASE_SECONDS + 1
    returned(page_server, "b")


def test_a_reused_place_is_never_taken_for_the_lent_page(
    memory: Memory, page_server: PageServer, peers: PeerPages
) -> None:
    page_server.lend(memory.lease())
    assert all(fetched(peers, memory, source(page_server)))
    page_server.end("a")
    memory.slab[:, PAGE_HEAD_BYTES:] ^= 0xFF  # other pages are stored there
    page_server.lend(PageLease("b", [(KEYS[0], b"p" * 16, 0)]))
    (page,) = peers.fetch(source(page_server, "b"), KEYS[:1], SIZES)
    assert page is not None and not memory.is_right(0, page)  # the seal belongs to the new content
    assert fetched(peers, memory, source(page_server, "a")) == [False] * 12


@pytest.mark.full
@settings(max_examples=examples(50), deadline=None)
@given(
    fault=st.builds(
        Fault, st.sampled_from(["flip", "cut", "stall"]), st.integers(0, 12 * 3100 + 200)
    )
)
def test_faults_of_a_connection_never_yield_a_wrong_page(fault: Fault) -> None:
    memory = Memory()
    page_server = PageServer(HERE, TOKEN, FINGERPRINT, memory.page)
    line, peers = FaultyLine("127.0.0.1", page_server.address.port), PeerPages(TOKEN, FINGERPRINT)
    line.fault = fault
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(peer_tier, "LEASE_SECONDS", 1e6)
            patch.setattr(peer_tier, "RETRY_SECONDS", 0.0)
            page_server.lend(memory.lease())
            with pytest.MonkeyPatch.context() as quick:
                quick.setattr(peer_tier, "MOVE_SECONDS", 0.05)
                quick.setattr("kvik.links.PROVING_SECONDS", 0.05)
                for _ in range(2):  # the second time perhaps over the same connection
                    fetched(peers, memory, source(line))
            line.fault = Fault()
            # On a slow machine, the time limit of a call does not decide which pages arrive.
            until(lambda: all(fetched(peers, memory, source(line))))
    finally:
        for each in (peers, line, page_server):
            each.close()


@pytest.mark.full
def test_a_silent_connection_delays_no_other(
    memory: Memory, page_server: PageServer, peers: PeerPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_server.lend(memory.lease())
    where = ("127.0.0.1", page_server.address.port)
    monkeypatch.setattr("kvik.links.PROVING_SECONDS", 1e6)
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(where)) for _ in range(8)]
        assert fetched(peers, memory, source(page_server)) == [True] * 12
        for stranger in strangers:  # none was refused before
            assert stranger.recv(NONCE)
            stranger.setblocking(False)
            with pytest.raises(BlockingIOError):
                stranger.recv(1)


@pytest.mark.parametrize("what", ["token", "fingerprint", "address", "address that says nothing"])
def test_an_incompatible_engine_is_reported_once_and_retried(
    memory: Memory,
    page_server: PageServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    if what == "address that says nothing":
        monkeypatch.setattr("kvik.links.PROVING_SECONDS", 0.3)
    page_server.lend(memory.lease())
    token = b"another one" if what == "token" else TOKEN
    peers = PeerPages(token, b"g" * 16 if what == "fingerprint" else FINGERPRINT)
    of, line = source(page_server), FaultyLine("127.0.0.1", page_server.address.port)
    if what.startswith("address"):
        line.fault = Fault("stall", 0)
        if what == "address":
            line.close()
        of = source(line)
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert fetched(peers, memory, of) == [False] * 12
        (warning,) = [
            each.getMessage() for each in caplog.records if "cannot be" in each.getMessage()
        ]
        assert f":{of.port}" in warning and "kv_token" in warning
        if what == "fingerprint":
            assert (b"g" * 4).hex() in warning and (b"f" * 4).hex() in warning
        monkeypatch.setattr(peer_tier.time, "monotonic", lambda now=time.monotonic: now() + 31)
        with caplog.at_level(logging.WARNING):
            fetched(peers, memory, of)
        assert sum("cannot be" in each.getMessage() for each in caplog.records) == 2
    finally:
        peers.close()
        line.close()


@pytest.mark.parametrize(
    "where", ["192.0.2.1", "127.0.0.1:70000", "no-such-host.invalid", "no..name"]
)
def test_an_address_of_another_machine_is_refused(where: str) -> None:
    with pytest.raises(ConfigError, match="kv_listen"):
        page_server_at(where, TOKEN, FINGERPRINT, Memory().page)


def test_a_given_port_is_used(memory: Memory, page_server: PageServer) -> None:
    with pytest.raises(ConfigError, match="kv_listen"):
        page_server_at(f"127.0.0.1:{page_server.address.port}", TOKEN, FINGERPRINT, memory.page)
