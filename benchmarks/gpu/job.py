"""Run one job in this process: `python job.py NAME MODULE FUNCTION FILE SECONDS [ARGUMENT ...]`.

Each job has its own process, because an illegal access in one kernel makes the device unusable for
its whole process. A final `--part NAME` runs one part alone, to debug a failure.
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

LOST = 3  # exit status: the device is lost, and parts may remain
BEFORE = 2.0  # seconds before the deadline at which a hanging job prints its stack
PART = "--part"


class Overheard(logging.Handler):
    """Notes logged errors: their code continues without the part that failed."""

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
    """Return the command that runs this job again and prints its notes."""
    name, module, function, _, seconds, *more = arguments
    words = ["python", "benchmarks/gpu/job.py", name, module, function, "/dev/stdout", seconds]
    return "PYTHONPATH=benchmarks/gpu:src:tests " + shlex.join([*words, *more])


if __name__ == "__main__":
    sys.exit(main())
