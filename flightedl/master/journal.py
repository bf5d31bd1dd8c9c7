"""The job's recent events since this master took over, for users and for programs that follow them.

Events are kept only in memory. After a takeover, the journal begins with an event that reports the takeover; earlier
events are in the log of the previous master.
"""

from __future__ import annotations

import threading
from collections import Counter, deque

from flightedl.domain.master.effects import Kind
from flightedl.messages.status import EventsReply, EventsRequest, JobEvent
from flightedl.ports import Clock

#: Maximum number of kept events.
_KEPT = 2_000
_TEXT_LIMIT = 500
#: Polling interval, in seconds, of waiting requests, which check if the server is closing.
_LOOK_S = 0.5
_WAIT_LIMIT_S = 15.0


class Journal:
    """Recent events of one master. Thread-safe."""

    def __init__(self, generation: int, clock: Clock, kept: int = _KEPT) -> None:
        self._generation = generation
        self._clock = clock
        self._changed = threading.Condition()
        self._events: deque[JobEvent] = deque(maxlen=kept)
        self._number = 0
        self._counts: Counter[str] = Counter()

    def add(self, kind: Kind, who: str, text: str, *, is_warning: bool = False) -> None:
        at = self._clock.wall_time()
        with self._changed:
            self._number += 1
            self._counts[kind.value] += 1
            text = text[:_TEXT_LIMIT]
            self._events.append(
                JobEvent(number=self._number, at=at, kind=kind.value, who=who, text=text, is_warning=is_warning)
            )
            self._changed.notify_all()

    @property
    def counts(self) -> dict[str, int]:
        with self._changed:
            return {kind.value: self._counts[kind.value] for kind in Kind}

    def read(self, request: EventsRequest, closing: threading.Event | None = None) -> EventsReply:
        """Return the requested events. If there are none, wait for the next one, or until ``closing`` is set."""
        deadline = self._clock.now() + min(request.wait_s, _WAIT_LIMIT_S)
        with self._changed:
            after = request.after if request.generation == self._generation else 0
            while self._number <= after and (left_s := deadline - self._clock.now()) > 0:
                if closing is not None and closing.is_set():
                    break
                self._changed.wait(min(left_s, _LOOK_S))
            found = [event for event in self._events if event.number > after]
            missing = max(0, self._number - after) - len(found)
        return EventsReply(generation=self._generation, events=found, forgotten=missing)
