"""The changes that belong in an increment: a pserver's side of ``chains``.

An increment contains the changes since the cut from which the file in the newest complete checkpoint was written.

The file of a later cut may be lost, because it could not be written or its checkpoint was aborted. The changes in that
file must not be lost. They are therefore kept until the master orders an increment based on a later file, which proves
that a complete checkpoint contains them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Generic, TypeVar

C = TypeVar("C")


class ChangesSince(Generic[C]):
    """Records of changes since at most two cuts. The caller holds the lock that protects the changing values.

    Args:
        merge: Function that merges two sets of changes, the older one first.
    """

    def __init__(self, merge: Callable[[C, C], C]) -> None:
        self._merge = merge
        #: File written from the newest cut; empty if there is none.
        self._newest = ""
        #: (file of an older cut, changes between that cut and the newest one), or None if there is no older cut.
        self._before: tuple[str, C] | None = None

    def knows(self, file: str) -> bool:
        """True if all changes since this file's cut are known."""
        return bool(file) and (file == self._newest or (self._before is not None and file == self._before[0]))

    def cut(self, file: str, after: str, since_newest: C) -> C | None:
        """Record a cut.

        Args:
            file: The file to be written from it.
            after: This process's file in the newest complete checkpoint; empty if there is none.
            since_newest: The changes since the previous cut.

        Returns:
            The changes since the cut of ``after``, or None if they are unknown, so a base is needed.
        """
        found: C | None = None
        if after and after == self._newest:
            found = since_newest
        elif self._before is not None and after == self._before[0]:
            found = reduce(self._merge, (self._before[1], since_newest))
        self._newest = file
        self._before = None if found is None else (after, found)
        return found


def increment_on(after: str, knows: Callable[[str], bool], *, is_base: bool) -> str:
    """Return the file on which the current copy is based, or an empty string if the copy is a base.

    Args:
        after: As ordered.
        knows: True for a file if all changes since its cut are known.
        is_base: As ordered.
    """
    return after if after and not is_base and knows(after) else ""
