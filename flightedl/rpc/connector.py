"""The one place that opens connections to a job's servers, with the certificate that proves what this process is.

Certificates are read again for each new connection when their files have changed: a process whose certificate was
renewed goes on without a restart.
"""

from __future__ import annotations

import threading

from flightedl.adapters.pem_files import FILES
from flightedl.errors import UsageError
from flightedl.rpc.authentication import Credentials, Role, place_of
from flightedl.rpc.client import Connection
from flightedl.rpc.identity import Caller, ServerIdentity
from flightedl.rpc.integrity import has_checksums, is_loopback


class Connector:
    """Opens connections. Thread-safe.

    Args:
        caller: Who asks, for the servers' logs.
        role: What this process is; says which certificate it shows.
        tls_dir: Directory with its certificate, see ``Credentials.load``; empty: plain text.
        integrity: Whether this process wants values with checksums, see ``rpc.integrity``.
        same_host: Whether it shares memory with servers of its host, see ``rpc.same_host``.

    Raises:
        UsageError: a file of the directory is missing or is not PEM.
    """

    def __init__(
        self, caller: Caller, role: Role, tls_dir: str = "", integrity: str = "auto", same_host: str = "auto"
    ) -> None:
        self._integrity = integrity
        self._shares_memory = same_host != "never"
        self._caller = caller
        self._role = role
        self._directory = tls_dir
        self._lock = threading.Lock()
        self._state = self._looks()
        self._credentials = Credentials.load(tls_dir, role)

    def connect(self, address: str, expected: ServerIdentity | None, integrity: str = "auto") -> Connection:
        """A connection to the server at ``host:port`` that is meant; ``integrity``: whether that wants checksums."""
        credentials = self._present()
        is_protected = credentials is not None or is_loopback(address)
        return Connection(
            address,
            expected=expected,
            caller=self._caller,
            credentials=credentials,
            has_checksums=has_checksums(self._integrity, integrity, is_protected=is_protected),
            shares_memory=self._shares_memory,
        )

    def _present(self) -> Credentials | None:
        if not self._directory:
            return None
        with self._lock:
            if (state := self._looks()) != self._state:
                try:
                    self._credentials = Credentials.load(self._directory, self._role)
                    self._state = state
                except UsageError:
                    # They are just being replaced: what was read before is good for a while.
                    pass
            return self._credentials

    def _looks(self) -> tuple[tuple[int, int], ...]:
        """What changes when a file is replaced."""
        if not self._directory:
            return ()
        place = place_of(self._directory, self._role)
        found = []
        for name in FILES:
            try:
                status = (place / name).stat()
            except OSError:
                found.append((0, 0))
            else:
                found.append((status.st_mtime_ns, status.st_ino))
        return tuple(found)
