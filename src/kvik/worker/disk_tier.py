"""The disk tier: pages as files, which outlive the engine and are shared by equal engines.

    <folder>/<fingerprint>/<hh>/<hash>-<group>.kv

The fingerprint covers everything that keys and values depend on except tokens. Engines with
different fingerprints do not see each other's pages, but share the quota. A file is written under a
name that begins with a dot, then renamed; nothing is synchronised, since a torn page fails its
checksum. A page that is too short, foreign or changed counts as missing, and is deleted.

One thread scans the names, writes and deletes; loads read in separate threads. `usage` holds the
total bytes of all files of the folder, including files being written. Every change of it takes a
lock, so that several engines together stay within the quota. An engine that is alone counts again
when it starts, and others wait for that before they write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import struct
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Empty, Queue

import numpy as np

from kvik.config.units import show_bytes
from kvik.core.plan import Moved, PageKey
from kvik.core.types import PageSource
from kvik.errors import ConfigError
from kvik.files import regular
from kvik.nn.pages import PageName, is_good, seal
from kvik.worker.page_mover import PageFolder

log = logging.getLogger(__name__)

OPTION = "kv_tiers"
MAX_WAITING = 256 << 20  # bytes that wait to be written, including those of preempted requests
MAX_SPARE = 16 << 20  # bytes of spare buffers per page size: allocating takes longer than copying
CLOSE_SECONDS = 10.0  # for pending writes at the end
LOOK_SECONDS = 5.0  # between scans for pages of other engines
LOCK_SECONDS = 5.0  # for the lock of `usage`, which others hold for two system calls
COUNT_SECONDS = 120.0  # for another engine that counts
# `usage` is wrong if it exceeds the files by more: each engine writes one page at a time.
MAX_UNWRITTEN = 256 << 20
OLD_SECONDS = 3600.0  # since the last use of a page, after which reading it updates its time
USAGE, USERS = "usage", "users"
_NAME = re.compile(r"([0-9a-f]{32})-(\d{1,4})\.kv")
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_BYTES = struct.Struct("<q")


class DiskTier(PageFolder):
    """The pages of one fingerprint."""

    def __init__(self, folder: str, fingerprint: bytes, quota: int) -> None:
        """
        Args:
            quota: bytes of all files of the folder.

        Raises:
            ConfigError: the folder cannot be used.
        """
        self._root = usable_folder(folder, quota)
        self._fingerprint = fingerprint
        self._quota = quota
        self._pages_folder = self._root / fingerprint.hex()
        with _named(self._root):
            self._pages_folder.mkdir(mode=0o700, exist_ok=True)
            _check_ours(self._pages_folder)
            self._usage = os.open(self._root / USAGE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._users = os.open(self._root / USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._files = [self._usage, self._users]  # to be closed
        self._lock = threading.Lock()
        self._usage_lock = threading.Lock()  # of the file, among the threads of this engine
        self._stored: list[PageKey] = []
        self._lost: list[PageKey] = []
        self._added: list[PageKey] = []
        self._scanned = False
        self._off = ""
        self._num_bad = 0  # files that were no pages
        self._reported = self._reported_off = False
        # Pages to delete for new ones, oldest first: mtime, path, key if of this fingerprint.
        self._oldest: deque[tuple[int, Path, PageKey | None]] = deque()
        self._list_again = 0.0  # earliest time of the next listing for `_oldest`
        self._listed_at: dict[str, int] = {}  # folder -> its mtime when it was listed
        self._listed: dict[str, set[PageKey]] = {}  # folder -> its pages
        self._end = threading.Event()
        # In order, so that a page stored after it was dropped stays. (key, (parent, page)): write
        # it; (key, None): delete it; None: report all pages.
        self._jobs: Queue[tuple[PageKey, tuple[bytes, np.ndarray] | None] | None] = Queue()
        self._waiting = 0  # bytes that wait to be written
        self._spare: dict[int, list[np.ndarray]] = {}  # size -> buffers of written pages
        self._news = threading.Event()
        self._thread = threading.Thread(target=self._work, name="pages-disk", daemon=True)
        self._thread.start()

    # -- the engine's thread ---------------------------------------------------------------------

    def store(self, key: PageKey, parent: bytes, page: np.ndarray) -> bool:
        if self._off or self._waiting + len(page) > MAX_WAITING:
            return False
        with self._lock:
            self._waiting += len(page)
            spare = self._spare.get(len(page))
            copy = spare.pop() if spare else np.empty_like(page)
        copy[:] = page
        self._jobs.put((key, (parent, copy)))
        return True

    def drop(self, key: PageKey) -> None:
        if not self._off:
            self._jobs.put((key, None))

    def read(self, key: PageKey, page: np.ndarray) -> bool:
        path = Path(*_place(self._pages_folder, key))
        try:
            file = regular(str(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            facts = os.fstat(file)
            is_complete = facts.st_size == len(page) and _read(file, page)
            if is_complete and abs(time.time() - facts.st_mtime) > OLD_SECONDS:
                os.utime(file)
        except OSError as error:
            self._disable(error)
            return False
        finally:
            os.close(file)
        if is_complete and is_good(page, PageName(self._fingerprint, *key)):
            return True
        with self._lock:
            self._num_bad += 1
            bad = self._num_bad
        if bad & (bad - 1) == 0:  # the 1st, 2nd, 4th, ...: on a bad disk there are many
            message = "%s: %s is not a page of this engine, and is deleted (%d so far)"
            log.warning(message, OPTION, path.name, bad)
        self._remove(path)
        return False

    def take(self) -> Moved:
        self._news.clear()
        with self._lock:
            moved = Moved(
                stored=self._stored,
                lost=self._lost,
                found=self._added,
                scanned=self._scanned,
                off="" if self._reported_off else self._off,
            )
            self._stored, self._lost, self._added = [], [], []
            self._reported = self._reported or self._scanned
            self._scanned, self._reported_off = False, bool(self._off)
        return moved

    def publish_again(self) -> None:
        with self._lock:
            if self._reported:
                self._reported, self._reported_off = False, False
                self._jobs.put(None)

    def wait(self, seconds: float) -> None:
        self._news.wait(seconds)

    def close(self) -> None:
        self._end.set()
        self._thread.join(CLOSE_SECONDS)
        while self._files and not self._thread.is_alive():
            os.close(self._files.pop())

    # -- its own thread --------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._scan()
        except OSError as error:
            self._disable(error)
        with self._lock:
            self._scanned = True
        self._news.set()
        looked = time.monotonic()
        while not (self._off or (self._end.is_set() and self._jobs.empty())):
            try:
                with contextlib.suppress(Empty):
                    job = self._jobs.get(timeout=0.05)
                    self._report_all() if job is None else self._do(*job)
                if time.monotonic() - looked > LOOK_SECONDS:
                    self._find_changes()
                    looked = time.monotonic()
            except OSError as error:
                self._disable(error)
        with self._lock:  # a tier that is turned off keeps no pages
            self._jobs, self._spare = Queue(), {}

    def _do(self, key: PageKey, stored: tuple[bytes, np.ndarray] | None) -> None:
        if stored is None:
            path = Path(*_place(self._pages_folder, key))
            self._remove(path)
            self._listed.get(path.parent.name, set()).discard(key)
            return
        try:
            self._write(key, *stored)
        finally:
            with self._lock:
                self._waiting -= len(stored[1])
                size, spare = len(stored[1]), self._spare.setdefault(len(stored[1]), [])
                if (len(spare) + 1) * size <= MAX_SPARE:
                    spare.append(stored[1])
            self._news.set()

    def _write(self, key: PageKey, parent: bytes, page: np.ndarray) -> None:
        shelf, name = _place(self._pages_folder, key)
        path, draft = f"{shelf}/{name}", f"{shelf}/.{name}.{os.getpid()}-{id(self):x}"
        if os.path.exists(path):  # another engine has stored it
            self._has_stored(key)
            return
        if not self._make_room(len(page)):
            with self._lock:
                self._lost.append(key)
            return
        seal(page, PageName(self._fingerprint, *key), parent)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            try:
                file = os.open(draft, flags, 0o600)
            except FileNotFoundError:  # it is the first page there
                with contextlib.suppress(FileExistsError):
                    os.mkdir(shelf, 0o700)
                file = os.open(draft, flags, 0o600)
            try:
                _write(file, page)
            finally:
                os.close(file)
            if os.path.exists(path):
                os.unlink(draft)
                self._change_usage(-len(page))
            else:
                os.rename(draft, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            self._change_usage(-len(page))
            with self._lock:
                self._lost.append(key)
            raise
        self._has_stored(key)

    def _has_stored(self, key: PageKey) -> None:
        # So `_find_changes` notices when it goes.
        self._listed.setdefault(key[1].hex()[:2], set()).add(key)
        with self._lock:
            self._stored.append(key)

    def _scan(self) -> None:
        """List the pages on disk. An engine that is alone also counts the bytes of all files."""
        is_only_user = _lock_now(self._users, fcntl.LOCK_EX)
        if not is_only_user:
            self._wait_for_lock(self._users, fcntl.LOCK_SH, COUNT_SECONDS)
        own_pages: list[tuple[int, PageKey]] = []
        foreign: list[tuple[int, Path, PageKey | None]] = []
        total = 0
        for folder, shelf in self._shelves():
            if folder == self._pages_folder:
                self._listed_at[shelf.name] = shelf.stat().st_mtime_ns
            for entry, status in _stats(shelf):
                key = _key_of(entry.name)
                if key is None or not stat.S_ISREG(status.st_mode):
                    if is_only_user and entry.name.startswith(
                        "."
                    ):  # an engine died while writing it
                        os.unlink(entry.path)
                    continue
                total += status.st_size
                if folder != self._pages_folder:
                    foreign.append((status.st_mtime_ns, Path(entry.path), None))
                    continue
                own_pages.append((status.st_mtime_ns, key))
                self._listed.setdefault(shelf.name, set()).add(key)
        self._oldest = deque(sorted(foreign, key=lambda page: page[0]))
        if is_only_user:
            with self._locked():
                os.pwrite(self._usage, _BYTES.pack(total), 0)
            self._make_room(0)
            _lock_now(self._users, fcntl.LOCK_SH)  # others may write from now on
        with self._lock:
            self._added += [key for _, key in sorted(own_pages)]

    def _report_all(self) -> None:
        self._listed_at.clear()
        self._listed.clear()
        self._find_changes()
        with self._lock:
            self._scanned = True
        self._news.set()

    def _find_changes(self) -> None:
        """Find pages that other engines have stored or deleted since the last scan."""
        added: list[PageKey] = []
        lost: list[PageKey] = []
        for shelf in _folders(self._pages_folder, None):
            changed = shelf.stat().st_mtime_ns
            if self._listed_at.get(shelf.name) == changed:
                continue
            self._listed_at[shelf.name] = changed
            now = {key for entry in _files(shelf) if (key := _key_of(entry.name))}
            before = self._listed.get(shelf.name, set())
            added += now - before
            lost += before - now
            self._listed[shelf.name] = now
        with self._lock:
            self._added += added
            self._lost += lost

    # -- bytes -----------------------------------------------------------------------------------

    def _make_room(self, size: int) -> bool:
        """Add to the bytes in use, if they stay within the quota. To make room, pages with other
        fingerprints that were there at the start are deleted first, oldest first; later, if such
        engines share the quota, the oldest pages of all."""
        while not self._change_usage(size):
            if not self._oldest and not (size and self._list_oldest()):
                return False
            changed, path, key = self._oldest.popleft()
            with contextlib.suppress(FileNotFoundError):
                if path.lstat().st_mtime_ns != changed:
                    continue  # it has been used or written since
                self._remove(path)
                if key is not None:
                    self._listed.get(path.parent.name, set()).discard(key)
                    with self._lock:
                        self._lost.append(key)
        return True

    def _list_oldest(self) -> bool:
        """List all pages for `_oldest`, and correct the bytes in use. Returns whether a page can be
        deleted: if all have this fingerprint, the engine decides, since it knows when they were
        used."""
        if time.monotonic() < self._list_again:
            return False
        with self._locked():
            used = self._used()
        pages: list[tuple[int, Path, PageKey | None]] = []
        total = 0
        for folder, shelf in self._shelves():
            for entry, status in _stats(shelf):
                total += status.st_size
                if key := _key_of(entry.name):
                    own_key = key if folder == self._pages_folder else None
                    pages.append((status.st_mtime_ns, Path(entry.path), own_key))
        if all(key is not None for _, _, key in pages):
            pages.clear()
        self._oldest = deque(sorted(pages, key=lambda page: page[0]))
        self._list_again = time.monotonic() + LOOK_SECONDS
        with self._locked():
            if used == self._used() and used - total > MAX_UNWRITTEN:
                os.pwrite(self._usage, _BYTES.pack(total), 0)
        return bool(pages)

    def _change_usage(self, size: int) -> bool:
        with self._locked():
            used = self._used()
            if size >= 0 and used + size > self._quota:
                return False
            os.pwrite(self._usage, _BYTES.pack(max(0, used + size)), 0)
        return True

    def _used(self) -> int:
        data = os.pread(self._usage, _BYTES.size, 0)
        return int(_BYTES.unpack(data)[0]) if len(data) == _BYTES.size else 0

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._usage_lock:
            self._wait_for_lock(self._usage, fcntl.LOCK_EX, LOCK_SECONDS)
            try:
                yield
            finally:
                fcntl.flock(self._usage, fcntl.LOCK_UN)

    def _wait_for_lock(self, file: int, kind: int, seconds: float) -> None:
        """Wait for a lock.

        Raises:
            OSError: another engine holds it too long, or this tier is turned off.
        """
        until = time.monotonic() + seconds
        while not _lock_now(file, kind):
            if time.monotonic() > until or self._off:
                raise OSError(errno.EAGAIN, "another engine holds its lock")
            time.sleep(0.002)

    def _remove(self, path: Path) -> None:
        """Delete a page, unless it is gone."""
        try:
            size = path.lstat().st_size
            path.unlink()
            self._change_usage(-size)
        except FileNotFoundError:
            return
        except OSError as error:
            self._disable(error)

    def _disable(self, error: OSError) -> None:
        with self._lock:
            if self._off:
                return
            self._off = error.strerror or str(error)
        self._news.set()
        log.warning(
            "%s: the disk tier in %s is turned off (%s); the engine continues without it",
            OPTION,
            self._root,
            self._off,
        )

    def _shelves(self) -> Iterator[tuple[Path, Path]]:
        """Yield the folders with pages, of all fingerprints, each with that of its fingerprint."""
        for folder in _folders(self._root, _FINGERPRINT):
            for shelf in _folders(folder, None):
                yield folder, shelf


class ReplayTier(PageFolder):
    """The disk tier of a replay: reads pages that the replay stored, else those of the folder,
    which it does not change.

    Its own pages are in an unnamed file, since a disk tier may be larger than memory. They take no
    more space than in the recorded tier, since pages dropped there are dropped here.
    """

    def __init__(self, folder: str, fingerprint: bytes, quota: int) -> None:
        """
        Args:
            quota: most bytes of its own pages.
        """
        self._pages_folder = Path(folder).expanduser().absolute() / fingerprint.hex()
        self._fingerprint = fingerprint
        self._quota_left = quota
        self._file: int | None = None  # file descriptor; opened for the first page
        self._end = 0
        self._pages: dict[PageKey, tuple[int, int]] = {}  # offset, bytes
        self._free: dict[int, list[int]] = {}  # by bytes: offsets

    def store(self, key: PageKey, parent: bytes, page: np.ndarray) -> bool:
        size = len(page)
        self.drop(key)
        if size > self._quota_left:
            return False
        if self._file is None:
            self._file, path = tempfile.mkstemp(prefix="kvik-")
            os.unlink(path)
        free = self._free.get(size)
        offset = free.pop() if free else self._end
        try:
            os.lseek(self._file, offset, os.SEEK_SET)
            _write(self._file, page)
        except OSError as error:
            log.warning("%s: a page cannot be kept for the replay: %s", OPTION, error.strerror)
            return False
        self._end = max(self._end, offset + size)
        self._quota_left -= size
        self._pages[key] = offset, size
        return True

    def drop(self, key: PageKey) -> None:
        place = self._pages.pop(key, None)
        if place is not None:
            offset, size = place
            self._free.setdefault(size, []).append(offset)
            self._quota_left += size

    def read(self, key: PageKey, page: np.ndarray) -> bool:
        if key in self._pages:
            assert self._file is not None
            offset, size = self._pages[key]
            return size == len(page) and _read(self._file, page, offset)
        try:
            stored = np.fromfile("/".join(_place(self._pages_folder, key)), np.uint8)
        except OSError:
            return False
        if len(stored) != len(page) or not is_good(stored, PageName(self._fingerprint, *key)):
            return False
        page[:] = stored
        return True

    def close(self) -> None:
        self._pages.clear()
        if self._file is not None:
            os.close(self._file)
            self._file = None


class ComputedPages(ReplayTier):
    """The pages of other engines that a replay needs, computed again before it. One engine stores
    them as in a disk tier, and the next one fetches them; see `PageFolder` and `Peers`."""

    def __init__(self) -> None:
        super().__init__(os.devnull, b"", sys.maxsize)
        self._stored: list[PageKey] = []  # since `take`

    def store(self, key: PageKey, parent: bytes, page: np.ndarray) -> bool:
        stored = super().store(key, parent, page)
        if stored:
            self._stored.append(key)
        return stored

    def take(self) -> Moved:
        stored, self._stored = self._stored, []
        return Moved(stored=stored, scanned=True)

    def expect(self, source: PageSource) -> None:
        pass

    def leave(self, source: PageSource) -> None:
        pass

    def fetch(
        self, source: PageSource, keys: Sequence[PageKey], sizes: Sequence[int]
    ) -> Iterator[np.ndarray | None]:
        for key in keys:
            page = np.empty(sizes[key[0]], np.uint8)
            yield page if self.read(key, page) else None

    def close(self) -> None:
        """Keep them for the next engine."""

    def end(self) -> None:
        """Free them."""
        super().close()


def usable_folder(folder: str, quota: int) -> Path:
    """Make the folder of a disk tier, if it is missing, and return its path.

    Args:
        quota: bytes of all its files.

    Raises:
        ConfigError: it cannot be used.
    """
    root = Path(folder).expanduser().absolute()
    with _named(root):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_ours(root)
        disk = os.statvfs(root)
        if not os.access(root, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    size = disk.f_blocks * disk.f_frsize  # 0: the file system does not say
    if 0 < size < quota:
        reason = f"the disk of {str(root)!r} has {show_bytes(size)} in all"
        raise ConfigError(OPTION, f"must fit its disk, not be {show_bytes(quota)}: {reason}")
    return root


@contextlib.contextmanager
def _named(root: Path) -> Iterator[None]:
    """Raise errors of the system as a ConfigError that names the folder."""
    try:
        yield
    except OSError as error:
        reason = f"cannot keep pages in {str(root)!r}: {error.strerror or error}"
        raise ConfigError(OPTION, f"{reason}; name a folder that this user may write") from None


def _check_ours(path: Path) -> None:
    """Check that a folder is private to this user.

    Raises:
        ConfigError: it is not.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(OPTION, f"must name a folder: {str(path)!r} is not one")
    if status.st_uid != os.getuid():
        raise ConfigError(OPTION, f"must name a folder of this user, not of another: {str(path)!r}")
    if status.st_mode & 0o077:
        reason = f"{str(path)!r} is open to other users; chmod 700 makes it private"
        raise ConfigError(OPTION, f"must name a private folder: {reason}")


def _place(root: Path, key: PageKey) -> tuple[str, str]:
    """Return the folder and the name of a page, as strings: `Path` is slower than writing."""
    name = key[1].hex()
    return f"{root}/{name[:2]}", f"{name}-{key[0]}.kv"


def _key_of(name: str) -> PageKey | None:
    """Return the page that a file of this name holds; None: it is not a page."""
    named = _NAME.fullmatch(name)
    return None if named is None else (int(named[2]), bytes.fromhex(named[1]))


def _folders(path: Path, pattern: re.Pattern[str] | None) -> list[Path]:
    """Return the subfolders whose names match."""
    with os.scandir(path) as entries:
        return [
            path / entry.name
            for entry in entries
            if entry.is_dir(follow_symlinks=False)
            and (pattern is None or pattern.fullmatch(entry.name))
        ]


def _files(path: Path) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return [entry for entry in entries if entry.is_file(follow_symlinks=False)]


def _stats(path: Path) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    """Yield the files in a folder with their stat results; files deleted meanwhile are skipped."""
    for entry in _files(path):
        with contextlib.suppress(FileNotFoundError):
            yield entry, entry.stat(follow_symlinks=False)


def _lock_now(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _read(file: int, page: np.ndarray, offset: int = 0) -> bool:
    """Fill a page. Returns whether the file has enough."""
    view, at = page.data, 0
    while at < len(page):
        count = os.preadv(file, [view[at:]], offset + at)
        if not count:
            return False
        at += count
    return True


def _write(file: int, page: np.ndarray) -> None:
    view, at = page.data, 0
    while at < len(page):
        at += os.write(file, view[at:])
