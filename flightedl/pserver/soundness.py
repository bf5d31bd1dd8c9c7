"""Detection of interrupted changes, which leave values, slots, versions and applied batches inconsistent.

A push first marks its batch as applied, then uses the gradient, then closes rounds. All reasons for rejection,
including lack of memory, are checked before the batch is marked. A later exception therefore leaves a mark without its
gradient, or some blocks one round behind the others. Only a checkpoint can repair this. The process must end, so that
its successor loads one; until then, blocks can no longer be read, pushed to or saved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType

from flightedl.errors import MessageError, NotReadyError

_log = logging.getLogger(__name__)


class Soundness:
    """Context manager around each change of blocks, used under their locks. It may be nested.

    Args:
        on_lost: Called once with the reason when a change was interrupted. It ends the process and must return quickly.
    """

    __slots__ = ("lost_because", "on_lost")

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self.on_lost = on_lost
        #: Reason why the blocks are inconsistent; empty while they are consistent.
        self.lost_because = ""

    def require(self) -> None:
        """Raise NotReadyError if the blocks are inconsistent."""
        if self.lost_because:
            raise NotReadyError(f"this pserver is ending, ask its successor: {self.lost_because}")

    @property
    def is_lost(self) -> bool:
        """True from the first interrupted change on."""
        return bool(self.lost_because)

    def __enter__(self) -> None:
        if self.lost_because:
            self.require()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.interrupted(error)

    def interrupted(self, error: BaseException) -> None:
        """Record that ``error`` ended a change of blocks. A MessageError is ignored: it precedes any change."""
        if self.lost_because or isinstance(error, MessageError):
            return
        _log.error("a change of blocks was interrupted", exc_info=error)
        self.lost_because = f"a change of its blocks was interrupted ({type(error).__name__}: {str(error)[:200]})"
        self.on_lost(self.lost_because)
