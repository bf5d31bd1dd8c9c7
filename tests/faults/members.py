"""Three members of etcd that can be killed, frozen and cut off from each other."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Self

import psutil

from flightedl.adapters.clock import SystemClock
from flightedl.adapters.etcd import EtcdCoordinator
from flightedl.adapters.etcd_program import find_etcd, member_arguments
from flightedl.errors import FlightedlError
from tests.support.processes import ServerProcess, free_port
from tests.support.proxy import TcpProxy

COUNT = 3
_START_TIMEOUT_S = 30.0


class EtcdMembers:
    """A cluster of three members on 127.0.0.1; a context manager.

    Clients connect directly. Members reach each other through proxies, one in front of each member, which refuse
    connections from and to members that are cut off. So a member that is cut off still answers its clients.
    """

    def __init__(self) -> None:
        self._binary = find_etcd()[0]
        self._directory = Path(tempfile.mkdtemp(prefix="flightedl-members-"))
        self._clients = [free_port() for _ in range(COUNT)]
        self._peers = [free_port() for _ in range(COUNT)]
        self._proxies = [TcpProxy(f"127.0.0.1:{port}") for port in self._peers]
        self._processes: list[ServerProcess | None] = [None] * COUNT
        self._cut_off: set[int] = set()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
        for number, proxy in enumerate(self._proxies):
            proxy.is_refused = partial(self._is_refused, number)
            self._stack.enter_context(proxy)
        self._stack.callback(self._kill_all)
        for number in range(COUNT):
            self._start(number)
        self.wait_until_healthy()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def address(self) -> str:
        """Addresses of all members."""
        return ",".join(f"127.0.0.1:{port}" for port in self._clients)

    def process(self, number: int) -> ServerProcess:
        found = self._processes[number]
        assert found is not None, "the member was not started"
        return found

    def kill(self, number: int, *, down_s: float) -> None:
        """Kill a member, and restart it on the same data later."""
        self.process(number).kill()
        time.sleep(down_s)
        self._start(number)

    def freeze(self, number: int, *, frozen_s: float) -> None:
        self.process(number).freeze()
        time.sleep(frozen_s)
        self.process(number).thaw()

    @contextlib.contextmanager
    def cut(self, number: int) -> Iterator[None]:
        """Cut a member off from the others, but not from its clients, until the context ends."""
        self._cut_off.add(number)
        self._reset()
        try:
            yield
        finally:
            self._cut_off.discard(number)
            self._reset()

    def wait_until_healthy(self) -> None:
        """Wait until every member answers. Raises AssertionError if one does not."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        for port in self._clients:
            with contextlib.closing(
                EtcdCoordinator(f"127.0.0.1:{port}", timeout_s=1.0, clock=SystemClock())
            ) as coordinator:
                while True:
                    try:
                        coordinator.get("/")
                        break
                    except FlightedlError:
                        assert time.monotonic() < deadline, f"the member at port {port} does not answer"
                        time.sleep(0.1)

    def _reset(self) -> None:
        for proxy in self._proxies:
            proxy.cut()

    def _is_refused(self, to: int, port: int) -> bool:
        """True if a connection from this local port to a member crosses a cut."""
        if not self._cut_off:
            return False
        return to in self._cut_off or any(self._has_port(number, port) for number in self._cut_off)

    def _has_port(self, number: int, port: int) -> bool:
        with contextlib.suppress(psutil.Error):
            connections = psutil.Process(self.process(number).pid).net_connections("tcp4")
            return any(each.laddr and each.laddr.port == port for each in connections)
        return True

    def _start(self, number: int) -> None:
        cluster = ",".join(f"m{each}=http://{proxy.address}" for each, proxy in enumerate(self._proxies))
        command = [
            self._binary,
            *member_arguments(
                f"m{number}",
                f"{self._directory}/{number}",
                f"http://127.0.0.1:{self._clients[number]}",
                f"http://127.0.0.1:{self._peers[number]}",
                cluster,
            ),
            f"--initial-advertise-peer-urls=http://{self._proxies[number].address}",
            "--heartbeat-interval=50",
            "--election-timeout=500",
            "--unsafe-no-fsync",
            "--log-level=error",
            "--logger=zap",
        ]
        self._processes[number] = ServerProcess(command, self._directory / f"log-{number}", environment={})

    def _kill_all(self) -> None:
        for process in self._processes:
            if process is not None:
                process.kill()
