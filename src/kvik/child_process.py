"""How kvik starts a Python process of its own."""

from __future__ import annotations

import sys


def python_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of kvik in a new Python process.

    With -P, so that files of the current folder, which anyone may have written, are not imported.
    """
    return (sys.executable, "-P", "-m", module, *arguments)
