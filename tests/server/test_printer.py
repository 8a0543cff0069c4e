"""What is printed while nobody reads it: writers go on, and what is lost is counted."""

from __future__ import annotations

import fcntl
import os
import sys
import time

import pytest

from kvik.server.run import Printer


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a pipe is set")
def test_writers_do_not_wait_and_what_is_lost_is_counted() -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    printer = Printer(writing, limit=10_000)
    lines = [f"{number:0999}" for number in range(40)]
    began = time.monotonic()
    for line in lines:
        printer.tell(line)
    printer.close(0.01)
    assert time.monotonic() - began < 5
    read: list[str] = []
    with os.fdopen(reading) as stream:
        while not read or "lost" not in read[-1]:
            read.append(stream.readline().rstrip("\n"))
        *kept, note = read
        assert kept == lines[: len(kept)]
        assert note.startswith(f"{len(lines) - len(kept)} lines were lost")
        printer.tell("more")
        assert stream.readline() == "more\n"
        printer.close(10)
    os.close(writing)


def test_a_reader_who_is_gone_costs_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    printer = Printer(writing, limit=100)
    for _ in range(100):
        printer.tell("a" * 50)
        printer.close(10)
    os.close(writing)
