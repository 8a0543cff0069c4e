"""The engine in a process of its own: `engine_in_process` for the parent, `main` for the child,
which finds its end of their socket under the number it is given.

The child lives as long as the socket. Signals that end the programs of a terminal do not end it, as
its parent may still drain; and whatever becomes of the parent, the socket is closed.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvik.child_process import python_command
from kvik.config.config import ResolvedConfig
from kvik.engine.host import host_engine
from kvik.engine.remote import RemoteClient
from kvik.engine.sources import Supervisor, restart_policy
from kvik.engine.wire import EngineStart, HostSocket, to_start
from kvik.launch import load_loop

GRACE_SECONDS = 2.0  # between the parent's end and ours, whatever we are at
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

log = logging.getLogger(__name__)


def engine_in_process(
    resolved: ResolvedConfig, relay: Callable[[str], object], record: Path | None = None
) -> RemoteClient:
    """For an event loop. Nothing is loaded before the client is started; what does not load then
    makes it fail.

    Args:
        relay: takes what the child prints. It is called in the event loop, and must not block.
        record: file that what happens is written to, for `kvik replay`.
    """
    command = python_command(__name__)
    start = EngineStart(resolved, None if record is None else str(record))
    return RemoteClient(resolved, Supervisor(command, start, restart_policy(resolved), relay))


def main(arguments: Sequence[str]) -> int:
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    sock = socket.socket(fileno=int(arguments[0]))
    sock.set_inheritable(False)
    threading.Thread(target=_end_with_parent, args=(sock.fileno(),), daemon=True).start()
    line = HostSocket(sock)
    try:
        return _serve(line)
    except EOFError:
        return 0
    finally:
        line.close()


def _serve(line: HostSocket) -> int:
    start = _first_message(line)
    record = None if start.record is None else Path(start.record)
    return 0 if host_engine(lambda: load_loop(start.config, record), line) else 1


def _first_message(line: HostSocket) -> EngineStart:
    """Raises EOFError if there is none."""
    while not (bodies := line.receive(None)):
        pass
    return to_start.decode(bodies[0])


def _end_with_parent(fd: int) -> None:
    """Loading takes minutes and a kernel can hang: neither may outlive the parent."""
    poll = select.poll()
    poll.register(fd, 0)  # a hang-up is reported in any case
    poll.poll()
    time.sleep(GRACE_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
