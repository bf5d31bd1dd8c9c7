"""Streams by which the master notices at once that this process has died; see ``domain.master.presence``."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import msgspec

from flightedl.coordination.directory import Directory
from flightedl.coordination.keeper import HeldKey
from flightedl.errors import FlightedlError, NotReadyError, UsageError
from flightedl.messages.base import encode
from flightedl.messages.control import PresenceRequest
from flightedl.rpc.client_streams import ClientExchange
from flightedl.rpc.connector import Connector
from flightedl.rpc.identity import ServerIdentity, sealed
from flightedl.rpc.routes import NO_COLUMNS

#: Number of streams.
STREAMS = 2
_DESCRIPTOR = msgspec.json.encode({"verb": "presence"})
#: Lifetime of the first stream, and how much longer each other one lives, so that they do not end together. The server
#: authorizes the caller when a stream is opened, and some networks drop connections that are idle for minutes.
_LIFETIME_S, _LONGER_S = 60.0, 37.0
#: Pauses before a stream is opened again: after it was open, if it could not be opened, and if the master refused it.
_PAUSE_S, _FAILED_S, _REFUSED_S = 0.02, 0.5, 60.0


class PresenceStreams:
    """Keeps the streams open until ``close``, in threads of their own.

    Args:
        job: Name of the job.
        directory: Where the master is found.
        connector: Opens the connections.
        held: Returns the key that this process holds.
    """

    def __init__(self, job: str, directory: Directory, connector: Connector, held: Callable[[], HeldKey]) -> None:
        self._job = job
        self._directory = directory
        self._connector = connector
        self._held = held
        self._stop = threading.Event()
        #: Number of a stream -> the generation for which it was opened, and the stream.
        self._open: dict[int, tuple[int, ClientExchange]] = {}
        self._threads = [
            threading.Thread(target=self._keep, args=(number,), name=f"flightedl-presence {number}", daemon=True)
            for number in range(STREAMS)
        ]
        directory.subscribe(self._look)
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for _, stream in tuple(self._open.values()):
            stream.cancel()
        for thread in self._threads:
            thread.join(_FAILED_S)

    def _look(self) -> None:
        """End the streams of an earlier registration. Their threads open others."""
        present = self._held().generation
        for generation, stream in tuple(self._open.values()):
            if generation != present:
                stream.cancel()

    def _keep(self, number: int) -> None:
        # Without pservers, only leases show that a process is dead.
        while not self._stop.is_set() and self._directory.ps_desired() != 0:
            pause_s = _FAILED_S
            try:
                with self._opened(number) as stream:
                    stream.answer()
                    pause_s = _PAUSE_S
                    # There is no second answer, but an error when the stream ends.
                    stream.answer()
            except UsageError:
                pause_s = _REFUSED_S
            except FlightedlError:
                pass
            self._open.pop(number, None)
            self._stop.wait(pause_s)

    @contextlib.contextmanager
    def _opened(self, number: int) -> Iterator[ClientExchange]:
        held, master = self._held(), self._directory.master()
        if master is None or not held.is_held:
            raise NotReadyError("there is no master")
        expected = ServerIdentity(self._job, "master", 0, master.generation)
        connection = self._connector.connect(master.address, expected, master.integrity)
        exchange = connection.exchange(_DESCRIPTOR, NO_COLUMNS, timeout_s=_LIFETIME_S + number * _LONGER_S)
        with contextlib.closing(connection), exchange as stream:
            self._open[number] = held.generation, stream
            if self._stop.is_set():
                raise NotReadyError("the streams have been closed")
            request = PresenceRequest(key=held.key, generation=held.generation, streams=STREAMS)
            stream.write_metadata(sealed(encode(request)))
            yield stream
