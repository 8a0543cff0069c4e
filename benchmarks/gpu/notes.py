"""What a job finds out: a line of JSON each in a file, so that nothing is lost when it is stopped.

Kinds of lines: "fact" (a value), "check" (passed or not), "rate" (seconds, with the bytes or
operations that were needed, for a share of a ceiling), "missed" (not measured, and why) and
"failure" (an error, with the end of its traceback).
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

Record = dict[str, object]

LAST_LINES = 8  # of a traceback
LEAST = 1.0  # seconds without which nothing more is begun


class Notes:
    """Of one job.

    Args:
        file: that lines are added to.
        seconds: that the job may take.
    """

    def __init__(self, file: Path, job: str, seconds: float) -> None:
        self._file = file
        self._job = job
        self._ends = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the job should have ended."""
        return self._ends - time.monotonic()

    def fact(self, name: str, value: object, **more: object) -> None:
        self._add("fact", name, value=value, **more)

    def check(self, name: str, passed: bool, detail: str = "", **more: object) -> None:
        self._add("check", name, passed=passed, detail=detail, **more)

    def rate(
        self,
        name: str,
        seconds: float,
        ceiling: str,
        *,
        moved: float = 0.0,
        operations: float = 0.0,
        **more: object,
    ) -> None:
        """
        Args:
            seconds: of one call or step.
            ceiling: the fact that holds what the device can do: bytes or operations per second.
            moved, operations: that were needed; the other is 0.
        """
        done = {"moved": moved, "operations": operations}
        self._add("rate", name, seconds=seconds, ceiling=ceiling, **done, **more)

    def missed(self, name: str, why: str) -> None:
        self._add("missed", name, why=why)

    def attempt(self, name: str, call: Callable[[], None], needs: float = LEAST) -> bool:
        """Run a part of the job. An error is noted and the rest goes on, unless the device is lost.

        Args:
            needs: seconds that must be left.

        Returns:
            Whether it ran to its end.
        """
        if self.left() < needs:
            self.missed(name, "no time left")
            return False
        try:
            call()
        except Exception as error:
            self.failed(name, error)
            _check_device()
            return False
        return True

    def failed(self, name: str, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        self._add("failure", name, error=text.strip().splitlines()[-LAST_LINES:])

    def _add(self, kind: str, name: str, **values: object) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            line = {"kind": kind, "job": self._job, "name": name, **values}
            file.write(json.dumps(line, default=str) + "\n")


def read_notes(file: Path) -> list[Record]:
    """Whole lines; the last one may have been cut off."""
    if not file.exists():
        return []
    records = []
    for line in file.read_text("utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def _check_device() -> None:
    """After an illegal access every call to the device fails: raises what it says."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
