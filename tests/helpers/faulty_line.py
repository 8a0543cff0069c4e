"""A connection that damages its data."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault in the answers on a connection.

    Attributes:
        what: "flip" a bit, "cut" the connection, or "stall" it; "none".
        at: bytes from the listener before the fault.
    """

    what: str = "none"
    at: int = 0


class FaultyLine:
    """Forwards connections to a listener.

    Attributes:
        fault: of new connections.
    """

    def __init__(self, host: str, port: int) -> None:
        self.fault = Fault()
        self._target = host, port
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        for each in (self._socket, *self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._socket.accept()
                far = socket.create_connection(self._target)
                self._open += [near, far]
                for source, to, fault in ((near, far, Fault()), (far, near, self.fault)):
                    threading.Thread(
                        target=self._pass, args=(source, to, fault), daemon=True
                    ).start()

    def _pass(self, source: socket.socket, to: socket.socket, fault: Fault) -> None:
        passed = 0
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                place = fault.at - passed
                passed += len(data)
                if fault.what != "none" and 0 <= place < len(data):
                    if fault.what == "flip":
                        data[place] ^= 1 << (fault.at % 8)
                    else:
                        to.sendall(data[:place])
                        if fault.what == "stall":
                            return  # both sockets stay open
                        break
                to.sendall(data)
        with suppress(OSError):
            to.shutdown(socket.SHUT_RDWR)
