"""One job in this process: `python job.py NAME MODULE FUNCTION FILE SECONDS [ARGUMENT ...]`.

A process each, because an illegal access of one kernel ends all work on the device in its process.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path

from notes import Notes


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
    name, module, function, file, seconds, *arguments = sys.argv[1:]
    notes = Notes(Path(file), name, float(seconds))
    logging.basicConfig()
    logging.getLogger().addHandler(Overheard(notes))
    try:
        getattr(importlib.import_module(module), function)(notes, *arguments)
    except Exception as error:
        notes.failed(name, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
