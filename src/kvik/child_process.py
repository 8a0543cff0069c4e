"""How kvik starts a Python process of its own, and how such a process lives."""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import sys
import threading
import time

GRACE_SECONDS = 2.0  # between the parent's end and ours, whatever we are at
# What a poll reports of a socket whose other end has gone; on one machine it is reported anyway.
HANG_UP = getattr(select, "POLLRDHUP", 0)
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def python_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of kvik in a new Python process.

    With -P, so that files of the current folder, which anyone may have written, are not imported.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


def live_with_parent(fd: int) -> None:
    """Of the child: ignore what ends the programs of a terminal, log to the standard error, and end
    after the socket `fd` to the parent has closed."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    threading.Thread(target=_end_with_parent, args=(fd,), daemon=True).start()


def _end_with_parent(fd: int) -> None:
    """Loading takes minutes and a kernel can hang: neither may outlive the parent."""
    poll = select.poll()
    poll.register(fd, HANG_UP)
    poll.poll()
    time.sleep(GRACE_SECONDS)
    os._exit(1)
