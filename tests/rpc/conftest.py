"""Fixtures: servers and connections on 127.0.0.1, and certificates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pyarrow import flight

from flightedl.adapters.certificates import Member, create
from flightedl.adapters.clock import SystemClock
from flightedl.errors import UsageError
from flightedl.rpc import Connection, Credentials, FlightServer, Role, Routes, ServerIdentity
from flightedl.rpc.authentication import name_in_certificate

from .rpc_support import CALLER, IDENTITY, Handlers, eventually


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Leak check that tolerates gRPC's own threads, which Python lists once they have logged something."""

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
    """Function that starts servers, which are stopped at the end."""
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
    """A plain pyarrow client, as strangers or other languages would use."""
    with flight.FlightClient(f"grpc://{server.address}") as client:
        yield client


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories with ca.pem, cert.pem and key.pem: "job" for members of one authority, "stranger" for another."""
    root = tmp_path_factory.mktemp("tls")

    def proof(role: Role, job: str = IDENTITY.job) -> str:
        return name_in_certificate(job, role)

    create(
        root / "job",
        [
            Member("server", proof(Role.SERVER), ("flightedl",)),
            Member("wrong-name", proof(Role.SERVER), ("somebody",)),
            *(Member(role, proof(role)) for role in (Role.TRAINER, Role.READER, Role.ADMIN)),
            Member("of-all-jobs", proof(Role.TRAINER, "*")),
            Member("other-job", proof(Role.TRAINER, "other")),
            Member("no-role", "", ("flightedl",)),
            Member("unknown-role", f"flightedl://{IDENTITY.job}/owner"),
            Member("no-uri", "", (f"{IDENTITY.job}.trainer",)),
        ],
        days=2,
        authority_days=3,
    )
    create(root / "stranger", [Member("outsider", proof(Role.SERVER), ("flightedl",))], days=2, authority_days=3)
    return lambda name: root / ("stranger" if name == "outsider" else "job") / name


@pytest.fixture(scope="session")
def credentials(certificates: Callable[[str], Path]) -> Callable[[str], Credentials]:
    def load(name: str) -> Credentials:
        found = Credentials.load(str(certificates(name)), Role.TRAINER)
        if found is None:
            raise UsageError("no credentials")
        return found

    return load
