"""The disk tier returns a page unchanged or not at all, within its quota, whatever happens to
files."""

from __future__ import annotations

import errno
import os
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvik.core.plan import Moved, PageKey
from kvik.errors import ConfigError
from kvik.worker import disk_tier
from kvik.worker.disk_tier import DiskTier, ReplayTier

PAGE = 4096
PRINT = b"\x01" * 16


def key(number: int) -> PageKey:
    return (number % 2, number.to_bytes(16, "little"))


def page(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, PAGE, dtype=np.uint8)


class Folder:
    """A tier, and all its reports."""

    def __init__(self, path: Path, quota: int = 100 * PAGE, fingerprint: bytes = PRINT) -> None:
        self.path, self.fingerprint = path, fingerprint
        self.tier = DiskTier(str(path), fingerprint, quota)
        self.stored: list[PageKey] = []
        self.lost: list[PageKey] = []
        self.found: list[PageKey] = []
        self.off = ""
        self.scanned = False

    def take(self) -> Moved:
        moved = self.tier.take()
        self.stored += moved.stored
        self.lost += moved.lost
        self.found += moved.found
        self.off = self.off or moved.off
        self.scanned = self.scanned or moved.scanned
        return moved

    def until(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + 20
        while not done():
            assert time.monotonic() < end
            time.sleep(0.005)
            self.take()

    def store(self, *numbers: int) -> None:
        count = len(self.stored) + len(self.lost) + len(numbers)
        for number in numbers:
            assert self.tier.store(key(number), b"p" * 16, page(number))
        self.until(lambda: len(self.stored) + len(self.lost) >= count or bool(self.off))

    def has(self, number: int) -> bool:
        """Return whether a page can be read, and check its content."""
        found = np.zeros(PAGE, np.uint8)
        if not self.tier.read(key(number), found):
            return False
        assert np.array_equal(found[64:], page(number)[64:])
        return True

    def files(self) -> list[Path]:
        return sorted(self.path.glob("*/*/*.kv"))

    def file(self, number: int) -> Path:
        group, name = key(number)
        return self.path / self.fingerprint.hex() / name.hex()[:2] / f"{name.hex()}-{group}.kv"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path / "kv")
    yield folder
    folder.tier.close()


def test_pages_come_back_also_after_a_restart_in_order_of_use(folder: Folder) -> None:
    folder.store(3, 1, 2)
    assert [folder.has(n) for n in (1, 2, 3, 4)] == [True, True, True, False]
    for number, age in ((1, 30), (2, 10), (3, 20)):
        os.utime(folder.file(number), (1e9, 1e9 - age))
    folder.tier.close()
    again = Folder(folder.path)
    again.until(lambda: again.scanned)
    assert again.found == [key(1), key(3), key(2)] and again.has(2)
    again.tier.close()


def test_files_are_private(folder: Folder) -> None:
    folder.store(1)
    assert {path.stat().st_mode & 0o777 for path in folder.files()} == {0o600}
    assert folder.path.stat().st_mode & 0o777 == 0o700


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1000] ^= 4
    path.write_bytes(data)


def damage_link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to(path.with_name("other"))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped": damage_flip,
    "torn": lambda path: os.truncate(path, 100),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "zeros": lambda path: path.write_bytes(bytes(PAGE)),
    "link": damage_link,
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_page_is_not_read(folder: Folder, how: str) -> None:
    folder.store(1, 2)
    DAMAGE[how](folder.file(1))
    assert not folder.has(1) and folder.has(2)
    folder.take()
    assert not folder.off
    if how in ("flipped", "torn", "empty", "longer", "zeros"):
        assert not folder.file(1).exists()


def test_warnings_of_damaged_pages_are_bounded(folder: Folder, caplog) -> None:
    pages = range(40)
    folder.store(*pages)
    for number in pages:
        os.truncate(folder.file(number), 100)
        assert not folder.has(number)
    assert 0 < len(caplog.records) < 8 and not folder.files()


def test_a_page_under_another_name_is_not_read(folder: Folder) -> None:
    folder.store(2, 4)
    folder.file(2).replace(folder.file(4))
    assert not folder.has(4)


def test_pages_of_another_fingerprint_are_ignored_and_evicted(tmp_path: Path) -> None:
    old = Folder(tmp_path / "kv", 10 * PAGE, b"\x02" * 16)
    old.store(*range(8))
    old.tier.close()
    new = Folder(tmp_path / "kv", 10 * PAGE)
    new.until(lambda: new.scanned)
    assert not new.found
    new.store(*range(6))
    assert len(new.stored) == 6 and len(new.files()) == 10
    new.tier.close()


def test_a_later_engine_of_another_fingerprint_leaves_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each evicts the oldest of all pages, and reports which of its own are gone."""
    monkeypatch.setattr(disk_tier, "LOOK_SECONDS", 0.02)
    one = Folder(tmp_path / "kv", 10 * PAGE)
    one.store(1, 2)
    two = Folder(tmp_path / "kv", 10 * PAGE, b"\x02" * 16)
    two.store(*range(20, 28))
    os.utime(one.file(1), (1e9, 1e9 - 5000))  # the oldest
    os.utime(two.file(20), (1e9, 1e9 - 4000))
    os.utime(two.file(21), (1e9, 1e9 - 3000))
    for number in (3, 4, 5):
        one.store(number)
    one.until(lambda: key(1) in one.lost and len(one.stored) == 5)
    two.until(lambda: {key(20), key(21)} <= set(two.lost))
    assert [one.has(n) for n in (1, 2, 3, 4, 5)] == [False, True, True, True, True]
    assert [two.has(n) for n in range(20, 28)] == [False] * 2 + [True] * 6
    assert len(one.files()) == 10 and not one.off and not two.off
    one.tier.close()
    two.tier.close()


def test_a_page_that_was_used_since_it_was_listed_stays(tmp_path: Path) -> None:
    old = Folder(tmp_path / "kv", 10 * PAGE, b"\x02" * 16)
    old.store(*range(10))
    for number in range(10):
        os.utime(old.file(number), (1e9, 1e9 + number))
    new = Folder(tmp_path / "kv", 10 * PAGE)
    new.until(lambda: new.scanned)
    os.utime(old.file(0))
    new.store(50)
    assert old.has(0) and not old.has(1) and new.has(50)
    old.tier.close()
    new.tier.close()


def test_a_replay_keeps_the_same_pages_as_the_tier(tmp_path: Path) -> None:
    tier = ReplayTier(str(tmp_path / "kv"), PRINT, 3 * PAGE)
    found = np.zeros(PAGE, np.uint8)
    for round_ in range(3):
        numbers = range(10 * round_, 10 * round_ + 3)
        for number in numbers:
            assert tier.store(key(number), b"", page(number))
        assert not tier.store(key(99), b"", page(99)) and not tier.read(key(99), found)
        assert tier.store(key(numbers[0]), b"", page(numbers[0]))  # it already exists
        for number in numbers:
            assert tier.read(key(number), found) and np.array_equal(found, page(number))
            tier.drop(key(number))
            assert not tier.read(key(number), found)
    assert not (tmp_path / "kv").exists()
    tier.close()


def test_two_engines_share_pages_and_a_quota(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(disk_tier, "LOOK_SECONDS", 0.05)
    one, two = (Folder(tmp_path / "kv", 10 * PAGE) for _ in range(2))
    one.store(1, 2, 3)
    two.until(lambda: len(two.found) == 3)
    assert two.has(2)
    threads = [
        threading.Thread(target=each.store, args=range(first, first + 10))
        for each, first in ((one, 100), (two, 200))
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert len(one.files()) <= 10
    assert len(one.files()) == 10 and len(one.lost) + len(two.lost) == 13
    one.tier.drop(key(1))
    two.until(lambda: key(1) in two.lost)
    one.tier.close()
    two.tier.close()


def test_a_start_recounts_and_removes_leftovers_of_killed_engines(tmp_path: Path) -> None:
    one = Folder(tmp_path / "kv", 10 * PAGE)
    one.store(1, 2)
    one.tier.close()
    (one.path / "usage").write_bytes((10 * PAGE).to_bytes(8, "little"))  # reserved, not written
    draft = one.file(1).with_name(".half.kv.1-a")
    draft.write_bytes(b"x")
    two = Folder(tmp_path / "kv", 10 * PAGE)
    two.store(*range(10, 18))
    assert len(two.stored) == 8 and not draft.exists()
    two.tier.close()


def test_bytes_in_use_that_are_too_many_are_counted_again(folder: Folder) -> None:
    folder.store(1, 2)
    (folder.path / "usage").write_bytes((1 << 62).to_bytes(8, "little"))
    folder.store(3)  # finds that there is no room, and counts
    folder.store(*range(10, 120))
    assert {key(n) for n in (1, 2, *range(10, 100))} <= set(folder.stored)
    assert len(folder.files()) == 100 and not folder.off


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_fails_is_turned_off_with_one_warning(
    folder: Folder, error: int, monkeypatch, caplog
) -> None:
    folder.store(1)

    def fail(file: int, data: object) -> int:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "write", fail)
    folder.store(2)
    monkeypatch.undo()
    folder.until(lambda: bool(folder.off))
    assert key(2) in folder.lost and len(folder.files()) == 1
    assert not folder.tier.store(key(3), b"", page(3))
    assert len([r for r in caplog.records if "turned off" in r.message]) == 1
    assert not list(folder.path.glob("*/*/.*"))


def test_a_drop_before_the_write_and_one_after_it(folder: Folder) -> None:
    folder.tier.drop(key(1))
    folder.store(1)
    assert folder.has(1)
    folder.tier.drop(key(1))
    folder.until(lambda: not folder.file(1).exists())


def test_pending_writes_are_bounded(folder: Folder, monkeypatch) -> None:
    hold = threading.Event()
    write = disk_tier._write
    monkeypatch.setattr(disk_tier, "_write", lambda *a: (hold.wait(20), write(*a)))
    monkeypatch.setattr(disk_tier, "MAX_WAITING", 10 * PAGE)
    taken = [folder.tier.store(key(n), b"", page(n)) for n in range(15)]
    assert taken == [True] * 10 + [False] * 5
    hold.set()


def test_pending_pages_are_freed_when_the_tier_is_turned_off(folder: Folder, monkeypatch) -> None:
    hold = threading.Event()

    def fail(file: int, data: np.ndarray) -> None:
        hold.wait(20)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_tier, "_write", fail)
    tracemalloc.start()
    for number in range(100):
        assert folder.tier.store(key(number), b"", page(number))
    hold.set()
    folder.until(lambda: bool(folder.off))
    folder.tier.close()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 50 * PAGE


def foreign_owner(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)


def unwritable(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *a: object, **k: object) -> None:
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "mkdir", refuse)


def test_a_quota_beyond_the_disk_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^kv_tiers: .*must fit its disk.*\Z"):
        DiskTier(str(tmp_path / "kv"), PRINT, 1 << 60)


@pytest.mark.parametrize(
    "make",
    [
        lambda path, _: path.write_text("x"),
        lambda path, _: path.mkdir(mode=0o755),
        lambda path, _: path.symlink_to("/"),
        foreign_owner,
        unwritable,
    ],
    ids=["file", "open to others", "link", "of another user", "read-only"],
)
def test_a_folder_that_cannot_be_used_is_one_error(tmp_path: Path, make, monkeypatch) -> None:
    path = tmp_path / "kv"
    make(path, monkeypatch)
    with pytest.raises(ConfigError) as error:
        DiskTier(str(path), PRINT, 100)
    monkeypatch.undo()
    assert error.value.field == "kv_tiers" and str(path) in str(error.value)
