"""Ctrl-C as a question asked between steps, rather than an exception in the middle of one."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class CatchInterrupt:
    """While it is open, the first Ctrl-C sets `seen`; a second one raises KeyboardInterrupt, so a
    step that never ends can still be left. Off the main thread nothing is caught."""

    def __init__(self) -> None:
        self.seen = False
        self._active = threading.current_thread() is threading.main_thread()
        self._before: object = None

    def __enter__(self) -> CatchInterrupt:
        if self._active:
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True
