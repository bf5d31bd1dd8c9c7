"""Responses for the paths of the page."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from importlib import resources

import msgspec

from flightedl.master.history import History
from flightedl.master.journal import Journal
from flightedl.messages.status import EventsRequest, JobEvent, StatusReply
from flightedl.ports import Clock
from flightedl.process.http_page import TEXT, Answer, Asked

_EVERY_S = 1.0
#: Maximum number of events that a page receives when it is opened.
_EVENTS = 200
_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class News(msgspec.Struct, frozen=True):
    """An update for a page."""

    #: Time by the master's clock, in seconds since 1970.
    at: float
    status: StatusReply
    events: list[JobEvent]
    #: Name -> [seconds since 1970, value] pairs, oldest first; empty if no curve has changed.
    curves: dict[str, list[tuple[float, float]]]


class JobPage:
    """The page of a job. Thread-safe."""

    def __init__(self, status: Callable[[], StatusReply], journal: Journal, clock: Clock) -> None:
        self._status = status
        self._journal = journal
        self._clock = clock
        self._history = History()
        self._lock = threading.Lock()

    def look(self) -> None:
        now = self._clock.now()
        if self._history.is_due(now):
            status = self._status()
            with self._lock:
                self._history.add(status, now, self._clock.wall_time())

    def answer(self, asked: Asked) -> Answer:
        if asked.path == "/stream":
            return Answer(self._stream(asked.closing), "text/event-stream", headers=_HEADERS)
        if asked.path == "/status.json":
            return Answer(msgspec.json.encode(self._status()), "application/json", headers=_HEADERS)
        if asked.path in _FILES:
            name, content_type = _FILES[asked.path]
            return Answer(resources.files(__package__).joinpath(name).read_bytes(), content_type, headers=_HEADERS)
        return Answer(b"not found; try /, /status.json, /metrics, /started, /live or /ready\n", TEXT, 404)

    def _stream(self, closing: threading.Event) -> Iterator[bytes]:
        """Yield an update about once per second. It includes the curves if they have changed."""
        after = generation = 0
        known = 0
        while not closing.is_set():
            reply = self._journal.read(EventsRequest(after=after, generation=generation))
            generation = reply.generation
            after = reply.events[-1].number if reply.events else after
            with self._lock:
                curves = dict(self._history.curves())
            size = sum(map(len, curves.values()))
            news = News(
                self._clock.wall_time(), self._status(), reply.events[-_EVENTS:], {} if size == known else curves
            )
            known = size
            yield b"data: " + msgspec.json.encode(news) + b"\n\n"
            closing.wait(_EVERY_S)
