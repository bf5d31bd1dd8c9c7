"""The thread that serves small steps on all lines. It receives, decides and answers without blocking.

With one thread per stream, passing the GIL from thread to thread would cost more than the work itself. Therefore the
handler thread of a stream lends its conversation to this loop while the steps are small. The handler thread waits until
the loop hands back a large message, a large answer, an error, or the end of the line. If a small step must wait for its
round, the loop parks it, and answers it when blocks have changed.

The loop runs as long as any stream for steps is open.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVarTuple

if TYPE_CHECKING:
    from flightedl.pserver.steps.conversation import Conversation

#: Seconds that the loop waits for messages while no step is parked.
_LONG_S = 3600.0
Args = TypeVarTuple("Args")


class LineLoop:
    """The loop that serves lent conversations. Thread-safe.

    Args:
        now: The process's clock.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._streams = 0
        self._thread: threading.Thread | None = None
        #: Held while the thread serves messages, and released while it waits for messages.
        self._lock = threading.Lock()
        self._lent: dict[int, Conversation] = {}
        self._parked: set[Conversation] = set()
        #: True if the loop is already about to check parked steps.
        self._is_awake = False
        #: Held while another thread uses the event, and while the loop's thread closes it.
        self._waking = threading.Lock()
        #: Event by which other threads wake the newest thread of the loop; None after the loop has ended.
        self._event: int | None = None

    def enter(self) -> None:
        with self._lock:
            self._streams += 1

    def leave(self) -> None:
        """Record the end of a stream whose conversation is not lent. The thread exits when the last stream ends."""
        with self._lock:
            self._streams -= 1
            if not self._streams and self._thread is not None:
                # The thread is not joined, because that would register gRPC's foreign thread with Python's threading
                # module.
                self._thread = None
                self._write_event()

    def lend(self, conversation: Conversation) -> None:
        with self._lock:
            if self._thread is None:
                self._start()
            self._lent[conversation.fileno] = conversation
            self._poller.register(conversation.fileno, select.EPOLLIN)

    def take_back(self, conversation: Conversation) -> None:
        """Stop serving a conversation. After this call, the loop neither reads its line nor hands anything back."""
        with self._lock:
            self._let_go(conversation)

    def wake(self) -> None:
        """Check the parked steps, because blocks may have changed."""
        if self._parked and not self._is_awake:
            self._write_event()

    def _write_event(self) -> None:
        with self._waking:
            if self._event is not None:
                os.eventfd_write(self._event, 1)

    def _start(self) -> None:
        self._poller = select.epoll()
        event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        with self._waking:
            self._event = event
        self._poller.register(event, select.EPOLLIN)
        arguments = (self._poller, event)
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
        with self._waking:
            # The loop may have started another thread in the meantime.
            if self._event == event:
                self._event = None
            os.close(event)

    def _look(self) -> float:
        now = self._now()
        for conversation in list(self._parked):
            if self._serve(conversation, conversation.look, now) and conversation.due_at is None:
                self._parked.discard(conversation)
        due = [conversation.due_at for conversation in self._parked if conversation.due_at is not None]
        return max(0.0, min(due) - now) if due else _LONG_S

    def _serve(self, conversation: Conversation, method: Callable[[*Args], bool], *args: *Args) -> bool:
        """Call a method of a conversation. Return False if the conversation was handed back or failed."""
        try:
            is_lent = method(*args)
        except BaseException as error:  # noqa: BLE001 - the handler raises it
            conversation.fail(error)
            is_lent = False
        if not is_lent:
            self._let_go(conversation)
        return is_lent

    def _let_go(self, conversation: Conversation) -> None:
        self._parked.discard(conversation)
        if self._lent.pop(conversation.fileno, None) is not None:
            with suppress(OSError):
                self._poller.unregister(conversation.fileno)
