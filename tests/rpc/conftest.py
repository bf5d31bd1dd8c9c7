"""Servers and connections on 127.0.0.1, and certificates made by the openssl command."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyarrow import flight
from rpc_support import CALLER, IDENTITY, Handlers, eventually

from flightedl.adapters.clock import SystemClock
from flightedl.errors import UsageError
from flightedl.rpc import Connection, Credentials, FlightServer, Routes, ServerIdentity


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Like the common one, but gRPC's own threads, which Python lists once they log something, may stay."""

    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}

    before = threads()
    yield
    eventually(lambda: threads() <= before, "all threads end")


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


@pytest.fixture
def serve() -> Iterator[Callable[..., FlightServer]]:
    """Makes servers that serve, and stops them."""
    servers: list[FlightServer] = []

    def make(routes: Routes, *, ready: bool = True, **options: object) -> FlightServer:
        server = FlightServer(routes, ServerIdentity("digits", "pserver", 1), clock=SystemClock(), **options)
        servers.append(server)
        if ready:
            server.start_serving(IDENTITY)
        return server

    yield make
    for server in servers:
        assert server.stop(grace_s=0.2)
        assert server.running_calls == 0


@pytest.fixture
def server(serve: Callable[..., FlightServer], handlers: Handlers) -> FlightServer:
    return serve(handlers.routes())


@pytest.fixture
def connection(server: FlightServer) -> Iterator[Connection]:
    with Connection(server.address, expected=IDENTITY, caller=CALLER) as made:
        yield made


@pytest.fixture
def bare(server: FlightServer) -> Iterator[flight.FlightClient]:
    """A plain pyarrow client: what a stranger, or another language, would use."""
    with flight.FlightClient(f"grpc://{server.address}") as client:
        yield client


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories with ca.pem, cert.pem and key.pem: "job" twice the same authority, "stranger" another one."""
    root = tmp_path_factory.mktemp("tls")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=root, check=True, capture_output=True)

    def authority(name: str) -> None:
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
                "-subj", f"/CN={name}", "-keyout", f"{name}-ca.key", "-out", f"{name}-ca.pem")  # fmt: skip

    def issue(authority_name: str, name: str, alternative: str) -> None:
        directory = root / name
        directory.mkdir()
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}",
                "-keyout", f"{name}/key.pem", "-out", f"{name}.csr")  # fmt: skip
        (root / f"{name}.ext").write_text(f"subjectAltName=DNS:{alternative}\n")
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority_name}-ca.pem", "-CAkey",
                f"{authority_name}-ca.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext",
                "-out", f"{name}/cert.pem")  # fmt: skip
        (directory / "ca.pem").write_bytes((root / f"{authority_name}-ca.pem").read_bytes())

    for name in ("job", "stranger"):
        authority(name)
    issue("job", "server", "flightedl")
    issue("job", "trainer", "trainer")
    issue("job", "wrong-name", "somebody")
    issue("stranger", "outsider", "flightedl")
    return root.joinpath


@pytest.fixture(scope="session")
def credentials(certificates: Callable[[str], Path]) -> Callable[[str], Credentials]:
    def load(name: str) -> Credentials:
        found = Credentials.load(str(certificates(name)))
        if found is None:
            raise UsageError("no credentials")
        return found

    return load
