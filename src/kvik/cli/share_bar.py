"""A progress bar for long work that knows what it does and how much of it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def share_bar(*, redraws: bool = True) -> Iterator[Callable[[str, float], None]]:
    """To be told (what is done now, the share of the whole that is done). On a terminal, else
    nothing.

    Args:
        redraws: by itself, several times a second; else only when it is told something, as a thread
            that draws takes time from what is measured.
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
