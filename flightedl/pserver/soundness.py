"""Whether what a pserver holds still belongs together: values, slots, versions, and the batches marked as applied.

A batch is marked first, then its gradient is taken, then rounds are closed. What may be refused is refused before the
mark, memory that is lacking, too. An exception that comes later has left a mark without its gradient, or some blocks a
round behind the others; there is no way back from that but the checkpoint. So the process has to end, for its successor
to load one, and until it has ended nobody reads, pushes or saves any of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType

from flightedl.errors import MessageError, NotReadyError

_log = logging.getLogger(__name__)


class Soundness:
    """``with soundness:`` around whatever changes blocks, under their locks. Entering it again inside is harmless.

    Args:
        on_lost: Called once, with the reason, when it is lost: ends the process. Must be quick.
    """

    __slots__ = ("lost_because", "on_lost")

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self.on_lost = on_lost
        #: Empty while it is sound.
        self.lost_because = ""

    def require(self) -> None:
        """Raise NotReadyError once it is lost: the successor is to be asked."""
        if self.lost_because:
            raise NotReadyError(f"this pserver ends, ask its successor: {self.lost_because}")

    @property
    def is_lost(self) -> bool:
        """Once True, True for ever."""
        return bool(self.lost_because)

    def __enter__(self) -> None:
        if self.lost_because:
            self.require()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.broke_off(error)

    def broke_off(self, error: BaseException) -> None:
        """Note that a change of blocks ended with ``error``; a MessageError refused it before anything was changed."""
        if self.lost_because or isinstance(error, MessageError):
            return
        _log.error("a change of blocks broke off", exc_info=error)
        self.lost_because = f"a change of its blocks broke off midway ({type(error).__name__}: {str(error)[:200]})"
        self.on_lost(self.lost_because)
