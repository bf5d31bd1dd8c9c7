"""Tables that commands print, and the console that prints them."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

#: A width that is sufficient for every row of every command.
_UNFOLDED_WIDTH = 1000


def table_console() -> Console:
    """Return a console on stdout. It wraps lines only on a terminal, so that files and pipes are easy to search."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_UNFOLDED_WIDTH)


def plain_table(*titles: str, right: tuple[str, ...] = ()) -> Table:
    """Return a table without borders. Columns are as wide as their content; those in ``right`` are right-aligned."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", overflow="fold")
    return table
