"""One job in this process: `python job.py NAME MODULE FUNCTION FILE SECONDS [ARGUMENT ...]`.

A process each, because an illegal access of one kernel ends all work on the device in its process.
`--part NAME` last: one part of it alone, to look at what failed.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import shlex
import sys
from pathlib import Path

from notes import DeviceLost, Notes

LOST = 3  # exit status: the device is lost, and parts may be left
BEFORE = 2.0  # seconds before the end at which a job that hangs says where
PART = "--part"


class Overheard(logging.Handler):
    """Notes errors that were logged, as what they are of goes on without what they concern."""

    def __init__(self, notes: Notes) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            self._notes.failed(f"logged: {record.getMessage()}", error)


def main() -> int:
    arguments = sys.argv[1:]
    only = arguments.pop() if arguments[-2:-1] == [PART] else None
    if only is not None:
        arguments.pop()
    name, module, function, file, seconds, *more = arguments
    notes = Notes(Path(file), name, float(seconds), again=_again(arguments), only=only)
    logging.basicConfig()
    logging.getLogger().addHandler(Overheard(notes))
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, float(seconds) - BEFORE))
    try:
        if os.environ.get("KVIK_GPU_REHEARSAL") == "1":
            from helpers.optional_triton import interpret_without_gpu

            interpret_without_gpu()  # a rehearsal
        getattr(importlib.import_module(module), function)(notes, *more)
    except DeviceLost as error:
        print(f"the device is lost: {error}", flush=True)
        return LOST
    except Exception as error:
        notes.failed(name, error)
        return 1
    return 0


def _again(arguments: list[str]) -> str:
    """The command for this job, which prints what it finds out."""
    name, module, function, _, seconds, *more = arguments
    words = ["python", "benchmarks/gpu/job.py", name, module, function, "/dev/stdout", seconds]
    return "PYTHONPATH=src:benchmarks/gpu " + shlex.join([*words, *more])


if __name__ == "__main__":
    sys.exit(main())
