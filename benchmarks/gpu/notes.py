"""What a job finds out: a line of JSON each in a file, so that nothing is lost when it is stopped.

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

LAST_LINES = 8  # of a traceback
LEAST = 1.0  # seconds without which nothing more is begun


class DeviceLost(Exception):
    """After an illegal access every call to the device fails: the job has to begin anew."""


class Notes:
    """Of one job. Parts that the file says were begun are passed over: it is the second try."""

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
            file: that lines are added to.
            seconds: that the job may take.
            again: a command that runs this job again, printed with an error.
            only: the only part to run; None: all.
            quiet: nothing is noted but what was begun.
        """
        self._file = file
        self._job = job
        self._ends = time.monotonic() + seconds
        self._again = again
        self._only = only
        self._quiet = quiet
        self._begun = set(begun(file))

    def silenced(self) -> Notes:
        """For work whose results and failures nobody wants to know."""
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
            seconds: of one call or step.
            ceiling: the fact that holds what the device can do: bytes or operations per second.
            moved, operations: that were needed; the other is 0.
        """
        done = {"moved": moved, "operations": operations}
        self._add("rate", name, seconds=seconds, ceiling=ceiling, **done, **more)

    def missed(self, name: str, why: str) -> None:
        self._add("missed", name, why=why)

    def attempt(self, name: str, call: Callable[[], None], needs: float = LEAST) -> bool:
        """Run a part of the job. An error is noted and the rest goes on.

        Args:
            needs: seconds that must be left.

        Returns:
            Whether it ran to its end.

        Raises:
            DeviceLost: it did not, and took the device along.
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
    """Whole lines; the last one may have been cut off."""
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
    """Names of parts, in order."""
    return [str(line["name"]) for line in read_notes(file) if line["kind"] == "begun"]


def _check_device() -> None:
    """Raises `DeviceLost` if it is."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:
        raise DeviceLost(str(error)) from error
