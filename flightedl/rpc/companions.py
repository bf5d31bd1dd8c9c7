"""What a client's streams have beside them, and how it ends: with the stream, or with all calls of the connection."""

from __future__ import annotations

import threading
from typing import Protocol


class Companion(Protocol):
    """Something beside a stream."""

    def shut(self) -> None:
        """Nobody is to wait for it any more. For any thread."""
        ...

    def close(self) -> None:
        """Let go of it. The stream's own thread does."""
        ...


class Companions:
    """What the streams of one connection have beside them. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[object, Companion] = {}
        self._are_shut = False

    def add(self, stream: object, companion: Companion) -> None:
        """A stream has one from now on."""
        with self._lock:
            self._open[stream] = companion
            if self._are_shut:
                companion.shut()

    def end(self, stream: object) -> None:
        """A stream is over, and what it has."""
        with self._lock:
            found = self._open.pop(stream, None)
            if found is not None:
                found.close()

    def shut(self) -> None:
        """All streams are about to be."""
        with self._lock:
            self._are_shut = True
            for companion in self._open.values():
                companion.shut()
