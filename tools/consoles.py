"""Console on which commands print tables."""

from __future__ import annotations

from rich.console import Console

#: Wide enough for any row that a command prints.
_UNFOLDED_WIDTH = 1000


def table_console() -> Console:
    """Stdout: folded to the width of a terminal, but whole lines in a file or a pipe, for whoever searches them."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_UNFOLDED_WIDTH)
