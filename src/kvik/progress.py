"""A progress bar for batches: requests done, output tokens per second."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvik.engine.output import RequestOutput


class BatchProgress:
    """Shown on standard error. `show` None: for more than one request, on a terminal."""

    def __init__(self, total: int, show: bool | None) -> None:
        visible = show if show is not None else total > 1 and sys.stderr.isatty()
        self._bar = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:>8} tok/s"),
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            disable=not visible,
        )
        self._task = self._bar.add_task("", total=total, rate="-")
        self._tokens = 0
        self._started = time.monotonic()

    def finished(self, output: RequestOutput) -> None:
        self._tokens += output.num_output_tokens
        seconds = max(time.monotonic() - self._started, 1e-9)
        self._bar.update(self._task, advance=1, rate=f"{self._tokens / seconds:.0f}")

    def __enter__(self) -> BatchProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
