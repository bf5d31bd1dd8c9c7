"""Tables that commands print, and the console on which they print them."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

#: Wide enough for any row that a command prints.
_UNFOLDED_WIDTH = 1000


def table_console() -> Console:
    """Stdout: folded to the width of a terminal, but whole lines in a file or a pipe, for whoever searches them."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_UNFOLDED_WIDTH)


def plain_table(*titles: str, right: tuple[str, ...] = ()) -> Table:
    """Return a table without lines, whose columns are as wide as their content; those of numbers are to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left", overflow="fold")
    return table
