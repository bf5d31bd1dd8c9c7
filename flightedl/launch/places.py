"""Directories for a job's results and logs, and free ports."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from typing import Any

from flightedl.config import LOOPBACK, family_of
from flightedl.errors import UsageError

#: Subdirectory of the results for the logs.
LOGS = "logs"


def free_ports(count: int) -> list[int]:
    """Return ports on loopback that are free now. Another process may take them before they are used."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket(family_of(LOOPBACK))) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]


def make_directory(directory: Path) -> None:
    """Create a directory for results unless it exists. Raises UsageError if this is impossible."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the output directory {directory} cannot be created ({error.strerror}): choose another one (--output)"
        ) from None


def directory_of(value: Any, name: str = "output_dir") -> Path:
    """Return the absolute path of a directory that a user has named. Raises UsageError if it is not a path."""
    try:
        return Path(value).absolute()
    except TypeError:
        raise UsageError(f"{name} is {value!r:.80}, but must be a path") from None
