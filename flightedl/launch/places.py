"""Directories of a job's results and logs, and a port for its page."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from flightedl.errors import UsageError

#: Directory of the logs, in that of the results.
LOGS = "logs"


def free_port() -> int:
    """A port of loopback that nobody has now, and that somebody else may have by the time it is used."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def make_directory(directory: Path) -> None:
    """Make a directory for results where it is missing.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the output directory {directory} cannot be made ({error.strerror}): choose another one (--output)"
        ) from None


def directory_of(value: Any, name: str = "output_dir") -> Path:
    """A directory that a user has given, absolute.

    Raises:
        UsageError: it is no path.
    """
    try:
        return Path(value).absolute()
    except TypeError:
        raise UsageError(f"{name} is {value!r:.80}, but must be a path") from None
