"""Progress of a long step: a bar on a terminal, and one line per 10% in log files and pipes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

#: A function that takes the amount done so far, in the same units as the total.
Advance = Callable[[int], None]


@contextlib.contextmanager
def progress(title: str, total: int, stream: TextIO | None = None) -> Iterator[Advance]:
    """Show the progress of a step. Yields a function to which the block passes the amount done so far.

    Args:
        title: Name of the step.
        total: Amount of work in all; 0 is shown as done.
        stream: Output stream; standard error by default.
    """
    stream = stream or sys.stderr
    if not stream.isatty():
        yield _lines(title, total, stream)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)


def _lines(title: str, total: int, stream: TextIO) -> Advance:
    shown = -1

    def advance(done: int) -> None:
        nonlocal shown
        tenth = 10 if total <= 0 else min(10, 10 * done // total)
        if tenth > shown:
            shown = tenth
            stream.write(f"{title}: {10 * tenth} %\n")
            stream.flush()

    return advance
