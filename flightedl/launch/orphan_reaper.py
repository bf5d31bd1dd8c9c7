"""The process that cleans up after a launcher that died before it could clean up itself.

Rules:

* The reaper reads these lines from its standard input: ``group N``, ``forget-group N``, ``directory PATH``,
  ``forget-directory PATH``.
* The input ends when the launcher closes it or dies. The reaper then kills the process groups and removes the
  directories that are still on its lists, and exits.
* The reaper has its own session and ignores the terminal's signals, so it briefly outlives the launcher.

Limitation: the reaper does not find grandchildren that have their own session. If the reaper is killed together with
the launcher, the parent-death signal still kills children, but grandchildren and directories remain.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterable


def reap(lines: Iterable[str]) -> None:
    """Process ``lines`` until the input ends, then kill the remaining groups and remove the remaining directories."""
    groups: set[int] = set()
    directories: set[str] = set()
    for line in lines:
        word, _, rest = line.rstrip("\n").partition(" ")
        if word == "group":
            groups.add(int(rest))
        elif word == "forget-group":
            groups.discard(int(rest))
        elif word == "directory":
            directories.add(rest)
        elif word == "forget-directory":
            directories.discard(rest)
    for group in groups:
        kill_group(group)
    for directory in directories:
        remove_directory(directory)


def kill_group(group: int) -> None:
    """Send SIGKILL to all processes of the group, if there are any left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def remove_directory(directory: str) -> None:
    """Remove a directory tree, even while a dying process writes to it."""
    for _attempt in range(5):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.lexists(directory):
            return


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    reap(sys.stdin)
