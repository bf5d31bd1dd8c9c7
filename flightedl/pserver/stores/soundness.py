"""Detection of interrupted changes, after which values, slots, versions and applied batches may be inconsistent.

A push first marks its batch as applied, then uses the gradient, then closes rounds. Everything that can cause a
rejection, including lack of memory, is checked before the batch is marked. So a later exception leaves a marked batch
whose gradient was not used, or some blocks one round behind the others. Only a checkpoint can repair this: the process
must end, and its successor loads one. Until then, reads, pushes and checkpoints of the blocks are rejected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from flightedl.errors import MessageError, NotReadyError

_log = logging.getLogger(__name__)


class Soundness:
    """Context manager for every change of blocks, used under the blocks' locks. May be nested.

    Args:
        on_lost: Called once, with the reason, if a change was interrupted. It must end the process and return quickly.
    """

    __slots__ = ("lost_because", "on_lost")

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self.on_lost = on_lost
        #: Reason why the blocks are inconsistent; empty if they are consistent.
        self.lost_because = ""

    def require(self) -> None:
        if self.lost_because:
            raise NotReadyError(f"this pserver is ending, ask its successor: {self.lost_because}")

    @property
    def is_lost(self) -> bool:
        """True after a change has been interrupted."""
        return bool(self.lost_because)

    def __enter__(self) -> None:
        if self.lost_because:
            self.require()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.interrupted(error)

    def interrupted(self, error: BaseException) -> None:
        """Record that ``error`` interrupted a change of blocks. Ignore a MessageError: nothing has changed yet."""
        if self.lost_because or isinstance(error, MessageError):
            return
        _log.error("a change of blocks was interrupted", exc_info=error)
        self.lost_because = f"a change of its blocks was interrupted ({type(error).__name__}: {str(error)[:200]})"
        self.on_lost(self.lost_because)
