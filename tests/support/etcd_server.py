"""A real etcd for tests. It starts in a fraction of a second, and can be killed, frozen and compacted."""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.adapters.etcd_access import EtcdAccess
from flightedl.adapters.etcd_program import find_etcd, member_arguments
from flightedl.errors import AuthenticationError, UnavailableError
from tests.support.processes import ServerProcess, free_port

_START_TIMEOUT_S = 20.0
_START_TRIES = 5


class EtcdServer:
    """An etcd on 127.0.0.1 with its data in a temporary directory. A context manager.

    The server's address stays the same through ``kill`` and ``restart``.

    Args:
        binary: Path of etcd; None searches for it (``find_etcd``).
        tls_dir: Directory with ca.pem, cert.pem and key.pem. If given, clients must use TLS with a client certificate.
    """

    def __init__(self, binary: str | None = None, tls_dir: Path | None = None) -> None:
        self._binary = binary or find_etcd()[0]
        self._tls_dir = tls_dir
        self._directory = Path()
        self._ports = (0, 0)
        self._process: ServerProcess | None = None
        self._cluster = "etcd-cluster"

    def __enter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix="flightedl-etcd-"))
        try:
            for _ in range(_START_TRIES):
                self._ports = (free_port(), free_port())
                if self._start():
                    return self
        except BaseException:
            self.__exit__(None, None, None)
            raise
        log = self.process.log()
        self.__exit__(None, None, None)
        raise RuntimeError(f"etcd did not start: {log}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._ports[0]}"

    @property
    def access(self) -> EtcdAccess:
        """Return a client that uses the server's own certificate if TLS is on."""
        return EtcdAccess(self.address, "" if self._tls_dir is None else str(self._tls_dir))

    @property
    def process(self) -> ServerProcess:
        if self._process is None:
            raise RuntimeError("etcd was not started: use it in a with statement")
        return self._process

    def kill(self) -> None:
        self.process.kill()

    def restart(self) -> None:
        """Kill etcd if it is running, restart it with the same data and address, and wait until it responds."""
        self.process.kill()
        for _ in range(_START_TRIES):
            if self._start():
                return
        raise RuntimeError(f"etcd did not restart: {self.process.log()}")

    def backup(self) -> Path:
        """Stop etcd, copy its data, and restart it. Return the directory with the copy."""
        self.process.kill()
        copy = Path(tempfile.mkdtemp(prefix="backup-", dir=self._directory))
        shutil.copytree(self._directory / "data", copy / "data")
        self.restart()
        return copy

    def restore(self, backup: Path | None, cluster: str = "") -> None:
        """Restart from a backup (None: with no data) at the same address. A new ``cluster`` changes the cluster id."""
        self.process.kill()
        shutil.rmtree(self._directory / "data")
        if backup is not None:
            shutil.copytree(backup / "data", self._directory / "data")
        self._cluster = cluster or self._cluster
        self.restart()

    def freeze(self) -> None:
        self.process.freeze()

    def thaw(self) -> None:
        self.process.thaw()

    def compact(self) -> None:
        coordinator = EtcdCoordinator(self.access, clock=SystemClock())
        try:
            coordinator.compact()
        finally:
            coordinator.close()

    def _start(self) -> bool:
        scheme = "http" if self._tls_dir is None else "https"
        client, peer = f"{scheme}://127.0.0.1:{self._ports[0]}", f"http://127.0.0.1:{self._ports[1]}"
        command = [
            self._binary,
            *member_arguments("test", f"{self._directory}/data", client, peer, f"test={peer}"),
            f"--initial-cluster-token={self._cluster}",
            "--heartbeat-interval=10",
            "--election-timeout=50",
            "--unsafe-no-fsync",
            "--log-level=error",
            "--logger=zap",
        ]
        if self._tls_dir is not None:
            files = {"trusted-ca-file": "ca.pem", "cert-file": "cert.pem", "key-file": "key.pem"}
            command += [f"--{option}={self._tls_dir / name}" for option, name in files.items()]
            command.append("--client-cert-auth")
        self._process = ServerProcess(command, self._directory / "log", environment={})
        return self._process.wait_until(self._answers, _START_TIMEOUT_S)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._ports[0]), timeout=1.0).close()
        except OSError:
            return False
        coordinator = EtcdCoordinator(self.access, timeout_s=1.0, clock=SystemClock())
        try:
            coordinator.get("/")
        except UnavailableError:
            return False
        except AuthenticationError:
            return True  # etcd is running, and its access control is enabled.
        finally:
            coordinator.close()
        return True
