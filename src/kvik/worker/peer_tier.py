"""Pages of other engines: one lends those of its memory tier, another one fetches them.

Both prove to each other that they know a token (`kvik.links`), and have the same fingerprint. Then
the engine that connected sends requests in frames: 4 bytes of length, then msgpack. The answer to a
fetch is a byte for each page, 1 if it exists, and then these pages, in the disk tier's format.

A lease ends when the other engine ends it, or has been silent for `LEASE_SECONDS`. A page that is
late, torn or changed counts as missing. After an error, that engine gets no requests for
`RETRY_SECONDS`.
"""

from __future__ import annotations

import logging
import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress

import msgspec
import numpy as np

from kvik.core.plan import PageKey, PageLease
from kvik.core.types import PageSource
from kvik.errors import ConfigError
from kvik.links import Address, Handshake, LinkError, LinkListener, connect
from kvik.nn.pages import FINGERPRINT_BYTES, PageName, is_good, seal

log = logging.getLogger(__name__)

OPTION = "kv_tiers"
LEASE_SECONDS = 30.0
RENEW_SECONDS = 10.0  # so two renewals may be lost
SOON_SECONDS = 2.0  # longest wait for a lease that the next plan begins
MOVE_SECONDS = 10.0  # timeout without progress while a page is transferred
JOB_SECONDS = 30.0  # for the pages of one fetch; by then requests stop waiting for them
IDLE_SECONDS = 60.0  # timeout of an idle connection
RETRY_SECONDS = 30.0
LOOK_SECONDS = 1.0  # between checks for expired leases
MAX_CONNECTIONS = 64
BATCH = 1 << 20  # bytes of pages per system call, or one page if larger
MAX_REQUEST = 1 << 20  # bytes
REMEMBERED = 1024  # leases that have ended
FETCH, RENEW, END = "fetch", "renew", "end"


class PageRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request to the engine that lends."""

    action: str  # `FETCH`, `RENEW` or `END`; the last two get no answer
    lease: str
    keys: list[PageKey] = []  # keys of the pages to fetch


class _LeasedPages:
    """Pages under a lease."""

    def __init__(self, lease: PageLease) -> None:
        self.pages = {key: (parent, place) for key, parent, place in lease.pages}
        self.sealed: set[PageKey] = set()
        self.until = time.monotonic() + LEASE_SECONDS


class PageServer:
    """Serves pages of the memory tier to other engines."""

    def __init__(
        self,
        where: Address,
        token: bytes,
        fingerprint: bytes,
        page: Callable[[PageKey, int], np.ndarray],
    ) -> None:
        """
        Args:
            where: an address of this machine; port 0: a free one.
            page: returns the bytes at a place of the memory tier, including the header.

        Raises:
            OSError: the address cannot be used.
        """
        self._fingerprint = fingerprint
        self._page = page
        self._leased: dict[str, _LeasedPages] = {}
        self._ended: deque[str] = deque(maxlen=REMEMBERED)
        self._returned: list[str] = []
        self._changed = threading.Condition()
        self._open = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._closing = False
        self._listener = LinkListener(where.host, token, where.port)
        self.address = self._listener.address  # address on which it listens
        threading.Thread(target=self._listen, name="pages-lend", daemon=True).start()

    def lend(self, lease: PageLease) -> None:
        """Begin a lease."""
        with self._changed:
            self._leased[lease.name] = _LeasedPages(lease)
            self._changed.notify_all()

    def end(self, name: str) -> None:
        """End a lease. Once this returns, its places are read only by transfers in progress, whose
        pages then fail their checksum if they have changed."""
        with self._changed:
            if self._leased.pop(name, None) is not None:
                self._ended.append(name)

    def take_returned(self) -> list[str]:
        """Return the leases that ended since the last call without `end`."""
        with self._changed:
            returned, self._returned = self._returned, []
        return returned

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._listener.close()

    def _listen(self) -> None:
        while not self._closing:
            try:
                peer = self._listener.next_peer(LOOK_SECONDS)
                if self._open.acquire(blocking=False):
                    threading.Thread(target=self._serve, args=(peer,), daemon=True).start()
                else:
                    peer.close()
            except TimeoutError:
                pass
            except OSError:
                if not self._closing:
                    time.sleep(LOOK_SECONDS)  # too many files are open
            self._expire()

    def _expire(self) -> None:
        now = time.monotonic()
        with self._changed:
            for name in [name for name, leased in self._leased.items() if leased.until < now]:
                log.warning("%s: no engine fetched the pages of %s in time", OPTION, name)
                self._return(name)

    def _return(self, name: str) -> None:
        if self._leased.pop(name, None) is not None:
            self._ended.append(name)
            self._returned.append(name)

    def _serve(self, stranger: socket.socket) -> None:
        """Serve one connection, with its handshake, so that a silent client delays no other one."""
        try:
            admitted = self._listener.admit(stranger)
            if admitted is None:
                return
            peer = _socket_of(admitted[1])
            with closing(peer), suppress(OSError, msgspec.MsgspecError):
                if _greet(peer, self._fingerprint) != self._fingerprint:
                    return  # the other engine reports it
                while not self._closing:
                    _limit(peer, IDLE_SECONDS)
                    self._answer(peer, _read_request(peer))
        except LinkError as error:
            log.warning("%s: an engine is refused: %s", OPTION, error)
        finally:
            self._open.release()

    def _answer(self, peer: socket.socket, request: PageRequest) -> None:
        if request.action == FETCH:
            self._send(peer, request)
            return
        with self._changed:
            if request.action == END:
                self._return(request.lease)
            elif request.lease in self._leased:
                self._leased[request.lease].until = time.monotonic() + LEASE_SECONDS

    def _send(self, peer: socket.socket, request: PageRequest) -> None:
        with self._changed:
            has_lease = lambda: request.lease in self._leased or request.lease in self._ended  # noqa: E731
            self._changed.wait_for(lambda: has_lease() or self._closing, SOON_SECONDS)
            leased = self._leased.get(request.lease)
            is_leased = [leased is not None and key in leased.pages for key in request.keys]
        _limit(peer, MOVE_SECONDS)
        peer.sendall(bytes(is_leased))
        keys = [key for key, is_there in zip(request.keys, is_leased, strict=True) if is_there]
        for some in _batches(keys, lambda key: len(self._page(key, 0))):
            _send_all(peer, [self._sealed(request.lease, key).data for key in some])

    def _sealed(self, name: str, key: PageKey) -> np.ndarray:
        """Return a page with its header.

        Raises:
            OSError: the lease has ended.
        """
        with self._changed:  # else the place could get another page before the header is written
            leased = self._leased.get(name)
            if leased is None:
                raise OSError("the lease has ended")
            leased.until = time.monotonic() + LEASE_SECONDS
            parent, place = leased.pages[key]
            page = self._page(key, place)
            if key not in leased.sealed:
                seal(page, PageName(self._fingerprint, *key), parent)
                leased.sealed.add(key)
            return page


def page_server_at(
    where: str, token: bytes, fingerprint: bytes, page: Callable[[PageKey, int], np.ndarray]
) -> PageServer:
    """Return a page_server at an address, HOST or HOST:PORT.

    Raises:
        ConfigError: the address is not on this machine, or in use.
    """
    host, _, port = where.rpartition(":") if re.search(r":\d+$", where) else (where, "", "0")
    reason = f"must be an address of this machine with a free port, not {where}"
    if int(port) >= 1 << 16:
        raise ConfigError("kv_listen", reason)
    try:
        return PageServer(Address(host.strip("[]"), int(port)), token, fingerprint, page)
    except OSError as error:
        raise ConfigError("kv_listen", f"{reason} ({error.strerror or error})") from None


class PeerPages:
    """Fetches pages of other engines. All methods but `fetch` are called in the worker's thread."""

    def __init__(self, token: bytes, fingerprint: bytes) -> None:
        self._token = token
        self._fingerprint = fingerprint
        self._idle: dict[Address, list[socket.socket]] = {}
        self._off: dict[Address, float] = {}  # end of the time without requests, after an error
        self._expected: dict[str, Address] = {}  # by lease
        self._to_end: list[tuple[str, Address]] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def expect(self, source: PageSource) -> None:
        """Renew the lease of pages that will be fetched, until `leave`."""
        with self._changed:
            self._expected[source.lease] = Address(source.host, source.port)
            if self._thread is None:
                self._thread = threading.Thread(target=self._renew, name="pages-renew", daemon=True)
                self._thread.start()

    def leave(self, source: PageSource) -> None:
        """End the lease of pages that are not needed any more."""
        with self._changed:
            address = self._expected.pop(source.lease, None)
            if address is not None:
                self._to_end.append((source.lease, address))
                self._changed.notify()

    def fetch(
        self, source: PageSource, keys: Sequence[PageKey], sizes: Sequence[int]
    ) -> Iterator[np.ndarray | None]:
        """Yield pages in order; None: the page is missing or damaged.

        Args:
            sizes: bytes of the pages of each KV group.
        """
        address, missing = Address(source.host, source.port), len(keys)
        try:
            for page in self._fetch(address, PageRequest(FETCH, source.lease, list(keys)), sizes):
                missing -= 1
                yield page
        except (OSError, LinkError) as error:
            self._disable(address, error)
        yield from [None] * missing

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
            for peers in self._idle.values():
                for peer in peers:
                    peer.close()
            self._idle.clear()

    def _fetch(
        self, address: Address, request: PageRequest, sizes: Sequence[int]
    ) -> Iterator[np.ndarray | None]:
        if self._is_off(address):
            return
        until = time.monotonic() + JOB_SECONDS
        peer, presence = self._request(address, request)
        damaged = 0
        try:
            present = [
                key for key, is_there in zip(request.keys, presence, strict=True) if is_there
            ]
            pages = self._pages(peer, present, sizes, until)
            for is_there in presence:
                view = next(pages) if is_there else None
                damaged += bool(is_there) and view is None
                yield view
        except BaseException:
            peer.close()
            raise
        if damaged:  # the rest of the stream cannot be trusted
            peer.close()
            reason = "%s: %d pages of the engine at %s:%d are damaged, and are computed here"
            log.warning(reason, OPTION, damaged, *_where(address))
            return
        self._give_back(address, peer)

    def _pages(
        self, peer: socket.socket, keys: Sequence[PageKey], sizes: Sequence[int], until: float
    ) -> Iterator[np.ndarray | None]:
        """Yield the pages received on a connection; None: the page is damaged."""
        data = np.empty(max(BATCH, *sizes), np.uint8)
        for some in _batches(keys, lambda key: sizes[key[0]]):
            if time.monotonic() > until:
                raise TimeoutError("its pages come too slowly")
            total, end = sum(sizes[key[0]] for key in some), 0
            _read_into(peer, data[:total].data)
            for key in some:
                first, end = end, end + sizes[key[0]]
                page = data[first:end]
                yield page if is_good(page, PageName(self._fingerprint, *key)) else None

    def _request(self, address: Address, request: PageRequest) -> tuple[socket.socket, bytes]:
        """Send a request. Returns the connection, and one byte for each page: 1 if it will come.

        Raises:
            OSError, LinkError: there is no connection.
        """
        with self._changed:
            idle = self._idle.get(address)
            peer = idle.pop() if idle else None
        if peer is not None and not _is_quiet(peer):
            peer.close()
            peer = None
        if peer is None:
            peer = self._connect(address)
        try:
            _send_request(peer, request)
            return peer, _read(peer, len(request.keys))
        except BaseException:
            peer.close()
            raise

    def _connect(self, address: Address) -> socket.socket:
        peer = _socket_of(connect(address, self._token, Handshake("pages", 0)))
        try:
            theirs = _greet(peer, self._fingerprint)
            if theirs != self._fingerprint:
                fingerprints = f"{theirs.hex()[:8]} there, {self._fingerprint.hex()[:8]} here"
                reason = f"it has pages of another model or format (fingerprint {fingerprints})"
                raise LinkError(f"{reason}: start both with the same model and options")
        except BaseException:
            peer.close()
            raise
        return peer

    def _give_back(self, address: Address, peer: socket.socket) -> None:
        with self._changed:
            if self._closing:
                peer.close()
            else:
                self._idle.setdefault(address, []).append(peer)

    def _is_off(self, address: Address) -> bool:
        with self._changed:
            return time.monotonic() < self._off.get(address, 0.0)

    def _disable(self, address: Address, error: Exception) -> None:
        with self._changed:
            was_off, now = self._off.get(address, 0.0), time.monotonic()
            self._off = {a: until for a, until in self._off.items() if until > now}
            self._off[address] = now + RETRY_SECONDS
            for peer in self._idle.pop(address, ()):
                peer.close()
        if now >= was_off and not self._closing:
            log.warning(
                "%s: pages of the engine at %s:%d cannot be fetched (%s); they are computed here, "
                "and the engine is tried again in %d s; both need the same kv_token",
                *(OPTION, *_where(address), error, RETRY_SECONDS),
            )

    def _renew(self) -> None:
        """Renew and end leases, in a separate thread."""
        due = time.monotonic() + RENEW_SECONDS
        while True:
            with self._changed:
                if not self._to_end and not self._closing:
                    self._changed.wait(max(0.0, due - time.monotonic()))
                if self._closing:
                    return
                requests = [(address, PageRequest(END, lease)) for lease, address in self._to_end]
                self._to_end.clear()
                if time.monotonic() >= due:
                    due = time.monotonic() + RENEW_SECONDS
                    requests += [
                        (to, PageRequest(RENEW, lease)) for lease, to in self._expected.items()
                    ]
            for address, request in requests:
                if not self._is_off(address):
                    try:
                        peer, _ = self._request(address, request)
                        self._give_back(address, peer)
                    except (OSError, LinkError) as error:
                        self._disable(address, error)


def _where(address: Address) -> tuple[str, int]:
    return address.host, address.port


def _socket_of(line: object) -> socket.socket:
    """Return a link's socket, with timeouts set."""
    from multiprocessing.connection import Connection

    assert isinstance(line, Connection)
    with closing(line):
        peer = socket.socket(fileno=socket.dup(line.fileno()))
    _limit(peer, MOVE_SECONDS)
    return peer


def _batches(keys: Sequence[PageKey], size: Callable[[PageKey], int]) -> Iterator[list[PageKey]]:
    """Divide pages into those that are sent together."""
    some: list[PageKey] = []
    total = 0
    for key in keys:
        if some and total + size(key) > BATCH:
            yield some
            some, total = [], 0
        some.append(key)
        total += size(key)
    if some:
        yield some


def _send_all(peer: socket.socket, views: list[memoryview]) -> None:
    while views:
        sent = peer.sendmsg(views)
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if views:
            views[0] = views[0][sent:]


def _limit(peer: socket.socket, seconds: float) -> None:
    """Set the timeout of calls in the kernel, so that one call receives a whole page; with a Python
    timeout, a call would return with each part."""
    peer.settimeout(None)
    full_seconds, part = divmod(seconds, 1.0)
    limit = struct.pack("ll", int(full_seconds), int(part * 1e6))
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _is_quiet(peer: socket.socket) -> bool:
    """Return whether a connection is open and has no unexpected data."""
    with suppress(BlockingIOError, InterruptedError):
        with suppress(ConnectionError):
            peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return False
    return True


def _greet(peer: socket.socket, fingerprint: bytes) -> bytes:
    """Exchange fingerprints. Returns the other one's."""
    peer.sendall(fingerprint)
    return _read(peer, FINGERPRINT_BYTES)


def _send_request(peer: socket.socket, request: PageRequest) -> None:
    data = msgspec.msgpack.encode(request)
    _limit(peer, MOVE_SECONDS)
    peer.sendall(len(data).to_bytes(4, "big") + data)


def _read_request(peer: socket.socket) -> PageRequest:
    size = int.from_bytes(_read(peer, 4), "big")
    if size > MAX_REQUEST:
        raise OSError("it requests too much")
    return msgspec.msgpack.decode(_read(peer, size), type=PageRequest)


def _read(peer: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    _read_into(peer, memoryview(data))
    return bytes(data)


def _read_into(peer: socket.socket, view: memoryview) -> None:
    """Fill `view` from a socket.

    Raises:
        OSError: the other side is gone, or timed out.
    """
    while view:
        count = peer.recv_into(view, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the connection was closed")
        view = view[count:]
