"""A single thread that serves small steps from all lines. It reads, decides and answers without blocking.

With one thread per stream, passing the GIL between threads would cost more than the work itself. The handler thread of
a stream therefore lends its conversation to this loop while its steps are small, and waits until the loop hands back a
large message, a large answer, an error, or the end of the line. A small step that waits for its round is parked; the
loop answers it when blocks have changed.

The loop runs while any step stream is open.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

#: Seconds that the loop waits for messages if nothing is parked.
_LONG_S = 3600.0


class Lent(Protocol):
    """A conversation that is lent to the loop. The loop's thread calls its methods, one at a time."""

    @property
    def fileno(self) -> int:
        """File descriptor of the conversation's line."""
        ...

    #: Time at which a parked step must be checked at the latest; None if no step is parked.
    due_at: float | None

    def receive(self) -> bool:
        """Receive and serve a message from the line. Return False if the conversation was handed back."""
        ...

    def look(self, now: float) -> bool:
        """Answer the parked step as far as possible. Return False if the conversation was handed back."""
        ...

    def fail(self, error: BaseException) -> None:
        """Hand the conversation back because of an error."""
        ...


class LineLoop:
    """Loop that serves lent conversations. Thread-safe.

    Args:
        now: The process's clock.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._streams = 0
        self._thread: threading.Thread | None = None
        #: Held while the thread serves messages, but not while it waits for them.
        self._lock = threading.Lock()
        self._lent: dict[int, Lent] = {}
        self._parked: set[Lent] = set()
        #: True while the loop is going to check parked steps anyway.
        self._is_awake = False

    def enter(self) -> None:
        """Count a new step stream."""
        with self._lock:
            self._streams += 1

    def leave(self) -> None:
        """Count the end of a stream whose conversation is not lent. The end of the last stream ends the thread."""
        with self._lock:
            self._streams -= 1
            if not self._streams and self._thread is not None:
                # Not joined, because that would register gRPC's foreign thread with Python's threading module.
                self._thread = None
                os.eventfd_write(self._event, 1)

    def lend(self, conversation: Lent) -> None:
        """Serve the conversation until it is handed back."""
        with self._lock:
            if self._thread is None:
                self._start()
            self._lent[conversation.fileno] = conversation
            self._poller.register(conversation.fileno, select.EPOLLIN)

    def take_back(self, conversation: Lent) -> None:
        """Stop serving a conversation. Afterwards the loop neither reads its line nor hands anything back."""
        with self._lock:
            self._let_go(conversation)

    def wake(self) -> None:
        """Check parked steps, because blocks may have changed."""
        if self._parked and not self._is_awake:
            os.eventfd_write(self._event, 1)

    def _start(self) -> None:
        self._poller = select.epoll()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller.register(self._event, select.EPOLLIN)
        arguments = (self._poller, self._event)
        self._thread = threading.Thread(target=self._run, args=arguments, name="flightedl-lines", daemon=True)
        self._thread.start()

    def _run(self, poller: select.epoll, event: int) -> None:
        timeout_s = _LONG_S
        while True:
            ready = poller.poll(timeout_s)
            with self._lock:
                if self._thread is not threading.current_thread():
                    break
                self._is_awake = True
                for descriptor, _ in ready:
                    conversation = self._lent.get(descriptor)
                    if conversation is not None:
                        if self._serve(conversation, conversation.receive) and conversation.due_at is not None:
                            self._parked.add(conversation)
                    elif descriptor == event:
                        os.eventfd_read(event)
                self._is_awake = False
                timeout_s = self._look() if self._parked else _LONG_S
        poller.close()
        os.close(event)

    def _look(self) -> float:
        now = self._now()
        for conversation in list(self._parked):
            if self._serve(conversation, conversation.look, now) and conversation.due_at is None:
                self._parked.discard(conversation)
        due = [conversation.due_at for conversation in self._parked if conversation.due_at is not None]
        return max(0.0, min(due) - now) if due else _LONG_S

    def _serve(self, conversation: Lent, method: Callable[..., bool], *args: float) -> bool:
        """Call a method of a conversation. Return False if it handed the conversation back or failed."""
        try:
            is_lent = method(*args)
        except BaseException as error:  # noqa: BLE001 - the handler raises it
            conversation.fail(error)
            is_lent = False
        if not is_lent:
            self._let_go(conversation)
        return is_lent

    def _let_go(self, conversation: Lent) -> None:
        self._parked.discard(conversation)
        if self._lent.pop(conversation.fileno, None) is not None:
            with suppress(OSError):
                self._poller.unregister(conversation.fileno)
