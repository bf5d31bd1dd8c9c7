"""Run work on a separate thread whose end is always reported."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from flightedl.errors import ExhaustedError, FlightedlError, InternalError

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Background(Generic[Result]):
    """Work that runs on a separate thread. It starts immediately.

    Lack of memory is converted to ExhaustedError. Other errors than FlightedlError are logged and converted to
    InternalError.

    Args:
        what: Name of the work and of its thread.
        work: Function that returns the result.
        ended: Called on the thread, with the result or the error, before ``result`` returns.
    """

    def __init__(
        self, what: str, work: Callable[[], Result], ended: Callable[[Result | FlightedlError], None] = lambda _: None
    ) -> None:
        self._has_ended = threading.Event()
        self._outcome: Result | FlightedlError
        run = partial(self._run, what, work, ended)
        threading.Thread(target=run, name=f"flightedl-{what}", daemon=True).start()

    @property
    def error(self) -> FlightedlError | None:
        if self._has_ended.is_set() and isinstance(self._outcome, FlightedlError):
            return self._outcome
        return None

    def result(self, timeout_s: float = 0.0) -> Result | None:
        """Return the result, or None if ``timeout_s`` passes first. Raises FlightedlError if the work failed."""
        if not self._has_ended.wait(timeout_s):
            return None
        if isinstance(self._outcome, FlightedlError):
            raise self._outcome
        return self._outcome

    def _run(self, what: str, work: Callable[[], Result], report: Callable[[Result | FlightedlError], None]) -> None:
        try:
            self._outcome = work()
        except FlightedlError as error:
            self._outcome = error
        except MemoryError:
            self._outcome = ExhaustedError(f"{what} failed: this machine has too little free memory")
        except BaseException as error:  # noqa: BLE001 - every waiter must learn of the end
            _log.exception("%s failed", what)
            self._outcome = InternalError(f"{what} failed by {type(error).__name__}: see the log of the server")
        try:
            report(self._outcome)
        finally:
            self._has_ended.set()
