"""Output of every command: text to standard output or standard error, harmless on a terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from textwrap import fill
from typing import TextIO

# ESC, the other controls of C0 and C1, and DEL: a terminal obeys them. Newline and tab stay.
_CONTROLS: Mapping[int, str] = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}


def visible(text: str) -> str:
    """The text with control characters spelt out, as in `\\x1b`, so that text of a model, a file or
    a server cannot steer the terminal. It works per character: a sequence in two pieces is caught.
    """
    return text.replace("\r\n", "\n").translate(_CONTROLS)


def say(text: str = "", *, end: str = "\n", error: bool = False, flush: bool = False) -> None:
    """Print text on standard output, or on standard error; a pipe or a file gets it as it is.

    Raises:
        OSError: it cannot be written; `filename` names the stream.
    """
    stream = sys.stderr if error else sys.stdout
    try:
        print(visible(text) if stream.isatty() else text, end=end, file=stream, flush=flush)
    except OSError as failure:
        raise _named(failure, stream) from None


def say_report(text: str) -> None:
    """Print lines of columns. Where a terminal is too narrow for a line, the line is wrapped, and
    goes on below its last column; a pipe or a file gets it as it is.

    Raises:
        OSError: as `say` does.
    """
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        text = "\n".join(_wrapped(line, width) for line in text.split("\n"))
    say(text, flush=True)


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    starts = [match.end() for match in re.finditer(r"^ +| {2,}", line)]
    indent = max([start for start in starts if start <= width // 2], default=0)
    return fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)


def flush_output() -> None:
    """Write what standard output still holds.

    Raises:
        OSError: as `say` does.
    """
    try:
        sys.stdout.flush()
    except OSError as failure:
        raise _named(failure, sys.stdout) from None


def open_missing_streams() -> None:
    """Put the null device where the caller closed a standard stream (`kvik ... >&-`), which Python
    shows as None, and whose number the next file would take."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def abandon_broken_streams() -> None:
    """Send what a broken stream still holds to the null device: the interpreter flushes it again
    when it ends, and would complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _named(failure: OSError, stream: TextIO) -> OSError:
    name = "standard error" if stream is sys.stderr else "standard output"
    return OSError(failure.errno, failure.strerror, name)


@contextmanager
def share_bar(*, redraws: bool = True) -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar on a terminal; yields progress(what is being done, share done).

    Args:
        redraws: whether the bar redraws itself several times a second; if not, it redraws only
            when progress is reported, since a drawing thread takes time from what is measured.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        auto_refresh=redraws,
    ) as bar:
        task = bar.add_task("", total=1.0)

        def tell(what: str, share: float) -> None:
            bar.update(task, completed=share, description=what, refresh=not redraws)

        yield tell
