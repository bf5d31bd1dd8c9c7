"""Factory of connections to a job's servers. It uses the certificate that proves this process's role.

Before each new connection, changed certificate files are read again, so a renewed certificate requires no restart.
"""

from __future__ import annotations

import threading

from flightedl.adapters.pem_files import FILES
from flightedl.config import is_loopback
from flightedl.errors import UsageError
from flightedl.rpc.authentication import Credentials, Role, place_of
from flightedl.rpc.client import Connection
from flightedl.rpc.identity import Caller, ServerIdentity
from flightedl.rpc.integrity import has_checksums


class Connector:
    """Opens connections. Thread-safe.

    Args:
        caller: Name of this process, for the servers' logs.
        role: Role of this process, which determines its certificate.
        tls: The certificate, or its directory (see ``Credentials.load``); empty for plain text.
        integrity: This process's setting for checksums of values; see ``rpc.integrity``.
        same_host: "never" to disable shared memory with servers on the same host; see ``rpc.same_host``.

    Raises:
        UsageError: a file in the directory is missing or is not PEM.
    """

    def __init__(
        self, caller: Caller, role: Role, tls: str | Credentials = "", integrity: str = "auto", same_host: str = "auto"
    ) -> None:
        self._integrity = integrity
        self._shares_memory = same_host != "never"
        self._caller = caller
        self._role = role
        self._directory = tls if isinstance(tls, str) else ""
        self._lock = threading.Lock()
        self._state = self._looks()
        self._credentials = Credentials.load(tls, role) if isinstance(tls, str) else tls

    def connect(self, address: str, expected: ServerIdentity | None, integrity: str = "auto") -> Connection:
        """Return a connection to the expected server at ``host:port``, whose policy for checksums is ``integrity``."""
        credentials = self._present()
        is_protected = credentials is not None or is_loopback(address.rpartition(":")[0])
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
            return self._credentials
        with self._lock:
            if (state := self._looks()) != self._state:
                try:
                    self._credentials = Credentials.load(self._directory, self._role)
                    self._state = state
                except UsageError:
                    # The files are being replaced. The old certificate remains in use until they are complete.
                    pass
            return self._credentials

    def _looks(self) -> tuple[tuple[int, int], ...]:
        """Return modification times and inodes of the files. They change when a file is replaced."""
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
