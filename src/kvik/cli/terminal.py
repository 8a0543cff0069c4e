"""Output of all commands to standard output and standard error, made safe for terminals."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from textwrap import fill
from typing import TYPE_CHECKING, TextIO
from unicodedata import combining, east_asian_width

if TYPE_CHECKING:
    from rich.console import Console

# ESC, the other controls of C0 and C1, and DEL: terminals interpret them. Newline and tab stay.
_CONTROLS: Mapping[int, str] = {
    code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}


def visible(text: str) -> str:
    """Return the text with control characters escaped, as in `\\x1b`, so that text of a model, a
    file or a server cannot control the terminal. It works per character, so a split sequence is
    caught."""
    return text.replace("\r\n", "\n").translate(_CONTROLS)


def say(
    text: str = "", *, end: str = "\n", error: bool = False, flush: bool = False, style: str = ""
) -> None:
    """Print text on standard output, or on standard error; pipes and files get it unchanged.

    Args:
        style: one of `STYLES`, for a terminal with colours.

    Raises:
        OSError: writing failed; `filename` names the stream.
    """
    stream = sys.stderr if error else sys.stdout
    if stream.isatty():
        text = visible(text)
        text = styled(text, style) if style else text
    _print(text, end, stream, flush=flush)


STYLES: Mapping[str, str] = {"bold": "1", "dim": "2", "red": "31", "green": "32"}


def styled(text: str, style: str) -> str:
    """Return a text with the codes of a style, unless the user has turned colours off."""
    from kvik.config.env import wants_colour  # slow to import, and few commands need it

    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if wants_colour() else text


class Flow:
    """Prints streamed text to standard output. On a terminal, lines are wrapped between words, and
    a word is written once it is complete. Pipes and files get every chunk unchanged."""

    def __init__(self) -> None:
        self._wraps = sys.stdout.isatty()
        self._column = 0
        self._gap = ""  # spaces before the word
        self._word = ""  # not written yet
        self._ready: list[str] = []

    def write(self, text: str) -> None:
        """Raises OSError as `say` does."""
        if not self._wraps:
            _print(text, "", sys.stdout, flush=True)
            return
        columns = shutil.get_terminal_size().columns
        for char in visible(text):
            if char == "\n":
                self._place_word(columns)
                self._ready.append("\n")
                self._column, self._gap = 0, ""
            elif char in " \t":
                self._place_word(columns)
                self._gap += char
            elif _cells(char) > 1:  # Chinese and Japanese have no spaces: break anywhere
                self._place_word(columns)
                self._word = char
                self._place_word(columns)
            else:
                self._word += char
        if _cells(self._word) >= columns:  # longer than a line
            self._place_word(columns)
        self._flush()

    def end(self) -> None:
        """Write the rest."""
        self._place_word(shutil.get_terminal_size().columns)
        self._flush()

    def _place_word(self, columns: int) -> None:
        if not self._word:
            return
        cells = _cells(self._word)
        start = self._column
        for char in self._gap:
            start += 8 - start % 8 if char == "\t" else 1
        if self._column and start + cells > columns:
            self._ready += ("\n", self._word)
            self._column = cells
        else:
            self._ready += (self._gap, self._word)
            self._column = start + cells
        self._column = self._column % columns if self._column > columns else self._column
        self._gap = self._word = ""

    def _flush(self) -> None:
        text, self._ready = "".join(self._ready), []
        _print(text, "", sys.stdout, flush=True)


def _cells(text: str) -> int:
    """Return the width of a text in terminal columns."""
    wide = sum(east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(combining(char) > 0 for char in text)


def _print(text: str, end: str, stream: TextIO, *, flush: bool) -> None:
    try:
        print(text, end=end, file=stream, flush=flush)
    except OSError as failure:
        raise _named(failure, stream) from None


def say_report(text: str) -> None:
    """Print lines of columns. If a terminal is too narrow for a line, the line is wrapped and
    continued below its last column; pipes and files get it unchanged. Raises OSError as `say`."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        text = "\n".join(_wrapped(line, width) for line in text.split("\n"))
    say(text, flush=True)


def say_answer(values: object, text: str, *, as_json: bool) -> None:
    """Print an answer as one JSON object, or as a report in words."""
    if as_json:
        say(json.dumps(values))
    else:
        say_report(text)


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    starts = [match.end() for match in re.finditer(r"^ +| {2,}", line)]
    indent = max([start for start in starts if start <= width // 2], default=0)
    return fill(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)


def flush_output() -> None:
    """Flush standard output. Raises OSError as `say`."""
    try:
        sys.stdout.flush()
    except OSError as failure:
        raise _named(failure, sys.stdout) from None


def open_missing_streams() -> None:
    """Open the null device for each standard stream that the caller closed (`kvik ... >&-`). Python
    sets such a stream to None, and the next opened file would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest free number
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8"))


def abandon_broken_streams() -> None:
    """Redirect the buffered output of broken streams to the null device: the interpreter flushes
    the streams again at exit, and would report an error."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _named(failure: OSError, stream: TextIO) -> OSError:
    name = "standard error" if stream is sys.stderr else "standard output"
    return OSError(failure.errno, failure.strerror, name)


def output_console() -> Console:
    """Return rich's console of standard output, whose broken pipe is a BrokenPipeError, as it is
    of `say`; rich's own ends the process with code 1."""
    from rich.console import Console

    class OutputConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return OutputConsole()


@contextmanager
def byte_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal; yield advance(bytes done since, bytes in total)."""
    if not sys.stderr.isatty():
        yield lambda size, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = (label, BarColumn(), DownloadColumn(), TransferSpeedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=None)

    def advance(size: int, total: int) -> None:
        bar.start()  # only after the loader's own bar is gone
        bar.update(task, advance=size, total=total)

    try:
        yield advance
    finally:
        bar.stop()


@contextmanager
def share_bar(*, redraws: bool = True) -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar on a terminal; yield progress(what is being done, share done).

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

        def tell(label: str, share: float) -> None:
            bar.update(task, completed=share, description=label, refresh=not redraws)

        yield tell
