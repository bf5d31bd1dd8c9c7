"""Which changes belong in an increment: a pserver's side of chains, see ``chains``.

An increment is what has changed since the cut that a file was made of, and it is made on the file that is in the newest
complete checkpoint. A cut whose file came to nothing, because it could not be written or its checkpoint was given up,
must not swallow what it had: so the changes up to it are kept until an increment on a later cut is asked for, which
says that a checkpoint has them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Generic, TypeVar

C = TypeVar("C")


class ChangesSince(Generic[C]):
    """What has changed since cuts, of which two are known at most. The caller holds the lock of what changes.

    Args:
        merge: Two sets of changes, the older one first, as one.
    """

    def __init__(self, merge: Callable[[C, C], C]) -> None:
        self._merge = merge
        #: File of the newest cut; empty: there was none.
        self._newest = ""
        #: Of the cut before that one, and what had changed in between; None: there is none.
        self._before: tuple[str, C] | None = None

    def knows(self, file: str) -> bool:
        """Whether it can be said what has changed since the cut that this file was made of."""
        return bool(file) and (file == self._newest or (self._before is not None and file == self._before[0]))

    def cut(self, file: str, after: str, since_newest: C) -> C | None:
        """A cut is made.

        Args:
            file: That will be made of it.
            after: The file that is in the newest complete checkpoint; empty: none of this process.
            since_newest: What has changed since the cut before this one.

        Returns:
            What has changed since the cut of ``after``; None: that is not known, and only everything will do.
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
    """The file that what is copied now will be an increment on; empty: everything is copied.

    Args:
        after: As ordered.
        knows: Whether all that is copied by changes knows what has changed since.
        is_base: As ordered.
    """
    return after if after and not is_base and knows(after) else ""
