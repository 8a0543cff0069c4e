"""The results of a job: one JSON line each in a file, so that nothing is lost when it is stopped.

Kinds of lines: "fact" (a value), "check" (passed or not), "rate" (seconds, with the bytes or
operations that were needed, for a share of a ceiling), "missed" (not measured, and why), "failure"
(an error, with the end of its traceback; all of it is printed) and "begun" (a part of the job).
"""

from __future__ import annotations

import json
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

Record = dict[str, object]

LAST_LINES = 8  # lines of a traceback that are noted
LEAST = 1.0  # seconds that must be left to start a part


class DeviceLost(Exception):
    """After an illegal access every call to the device fails: the job must be restarted."""


class Notes:
    """The notes of one job. Parts that an earlier try began, according to the file, are skipped."""

    def __init__(
        self,
        file: Path,
        job: str,
        seconds: float,
        *,
        again: str = "",
        only: str | None = None,
        quiet: bool = False,
    ) -> None:
        """
        Args:
            file: the file to which lines are appended.
            seconds: the time budget of the job.
            again: a command that runs this job again, printed with an error.
            only: the only part to run; None: all.
            quiet: note only which parts were begun.
        """
        self._file = file
        self._job = job
        self._ends = time.monotonic() + seconds
        self._again = again
        self._only = only
        self._quiet = quiet
        self._begun = set(begun(file))

    def silenced(self) -> Notes:
        """Return notes that drop results and failures, for warm-up work."""
        return Notes(
            self._file, self._job, self.left(), again=self._again, only=self._only, quiet=True
        )

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
            seconds: the time of one call or step.
            ceiling: the name of the fact with the device's peak bytes or operations per second.
            moved, operations: the bytes or operations needed; the other is 0.
        """
        done = {"moved": moved, "operations": operations}
        self._add("rate", name, seconds=seconds, ceiling=ceiling, **done, **more)

    def missed(self, name: str, why: str) -> None:
        self._add("missed", name, why=why)

    def attempt(self, name: str, call: Callable[[], None], needs: float = LEAST) -> bool:
        """Run a part of the job. An error is noted and the job continues.

        Args:
            needs: seconds that must be left.

        Returns:
            Whether it ran to its end.

        Raises:
            DeviceLost: it failed, and the device is unusable.
        """
        if name in self._begun or self._only not in (None, name):
            return False
        if self.left() < needs:
            self.missed(name, "no time left")
            return False
        self._add("begun", name)
        try:
            call()
        except Exception as error:
            self.failed(name, error)
            _check_device()
            return False
        return True

    def failed(self, name: str, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        print(f"-- {name}\n{text}", flush=True)
        if self._again:
            part = "" if name == self._job else f" --part {shlex.quote(name)}"
            print(f"again: {self._again}{part}\n", flush=True)
        self._add("failure", name, error=text.strip().splitlines()[-LAST_LINES:])

    def _add(self, kind: str, name: str, **values: object) -> None:
        if self._quiet and kind != "begun":
            return
        with self._file.open("a", encoding="utf-8") as file:
            line = {"kind": kind, "job": self._job, "name": name, **values}
            file.write(json.dumps(line, default=str) + "\n")


def read_notes(file: Path) -> list[Record]:
    """Return the records of complete lines; the last line may have been cut off."""
    if not file.is_file():
        return []
    records = []
    for line in file.read_text("utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def begun(file: Path) -> list[str]:
    """Return the names of the parts that were begun, in order."""
    return [str(line["name"]) for line in read_notes(file) if line["kind"] == "begun"]


def _check_device() -> None:
    """Raise `DeviceLost` if the device is unusable."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:
        raise DeviceLost(str(error)) from error
