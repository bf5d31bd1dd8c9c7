"""Every verb of both servers, called with every kind of credentials by every role: admission and errors.

The client is plain pyarrow, as strangers or other languages would use, without this package.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest
from pyarrow import flight

from flightedl.adapters import certificates
from flightedl.adapters.certificates import Member, create
from flightedl.adapters.clock import SystemClock
from flightedl.errors import NotFoundError
from flightedl.master.flight import MasterFlight
from flightedl.pserver.flight import PserverFlight
from flightedl.rpc import Credentials, ExchangeRoute, FlightServer, PutRoute, Role, Routes, ServerIdentity
from flightedl.rpc.authentication import name_in_certificate

JOB = "demo"
#: Credentials of the caller, apart from its role.
STATES = ("plain text", "no certificate", "another authority", "expired", "another job", "no role", "header twice")
#: Internals of a server, which errors must not contain.
FORBIDDEN = re.compile(r"Traceback|File \"|BEGIN |/(?:tmp|root|home|usr|var|work)/|\.py\b|0x[0-9a-f]{6}")
TIMEOUT_S = 10.0


class Service:
    """Stand-in for a server's service: the routes only read its attributes."""

    def __getattr__(self, name: str) -> Service:
        return self

    def __call__(self, *_: object, **__: object) -> None: ...


class Recorded:
    """A server with the real verbs and roles, whose handlers only record that they were reached."""

    def __init__(self, routes: Routes, role: str, credentials: Credentials) -> None:
        self.reached: list[str] = []
        self.asks: dict[str, tuple[str, str]] = {
            **{f"action {verb}": ("action", verb) for verb in routes.actions},
            **{f"get {verb}": ("get", verb) for verb in routes.gets},
            **{f"put {verb}": ("put", verb) for verb in routes.puts},
            **{f"exchange {verb}": ("exchange", verb) for verb in routes.exchanges},
            **{f"request stream {verb}": ("exchange", verb) for verb in routes.request_streams},
            **({"info": ("info", "parameters")} if routes.info else {}),
            **({"list": ("list", "info")} if routes.flights else {}),
        }
        self.roles = routes.roles
        exchanges = {verb: ExchangeRoute(route.schema, self._stream) for verb, route in routes.exchanges.items()}
        exchanges |= {verb: ExchangeRoute(pa.schema([]), self._stream) for verb in routes.request_streams}
        quiet = dataclasses.replace(
            routes,
            actions=dict.fromkeys(routes.actions, self._act),
            gets=dict.fromkeys(routes.gets, self._act),
            puts=dict.fromkeys(routes.puts, PutRoute(pa.schema([]), self._stream)),
            exchanges=exchanges,
            request_streams={},
            info=None if routes.info is None else self._act,
            flights=None if routes.flights is None else self._act,
        )
        identity = ServerIdentity(JOB, role, 0, 7)
        self.server = FlightServer(quiet, identity, clock=SystemClock(), credentials=credentials)
        self.server.start_serving(identity)

    def _act(self, _body: bytes, call: Any) -> Any:
        self.reached.append(call.verb)
        raise NotFoundError("nothing is behind this verb")

    def _stream(self, _request: bytes, _stream: Any, call: Any) -> Any:
        return self._act(b"", call)

    def is_open_to(self, method: str, verb: str, role: Role) -> bool:
        return role in self.roles[verb if method != "info" else "info"]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Role], Path]:
    root = tmp_path_factory.mktemp("certificates")

    def members(job: str) -> list[Member]:
        return [Member(role, name_in_certificate(job, role), ("flightedl",)) for role in Role]

    create(root / "right", members(JOB), days=2, authority_days=3)
    create(root / "another authority", members(JOB), days=2, authority_days=3)
    for name, wanted in (("another job", members("other")), ("no role", [Member(role, "", ("x",)) for role in Role])):
        trusted = root / "right"
        certificates.renew(trusted, [dataclasses.replace(each, name=f"{name}/{each.name}") for each in wanted], days=2)
    with pytest.MonkeyPatch.context() as patch:
        over = dt.datetime.now(dt.UTC) - dt.timedelta(hours=1)
        patch.setattr(certificates, "_span", lambda _: (over - dt.timedelta(days=1), over))
        expired = [dataclasses.replace(each, name=f"expired/{each.name}") for each in members(JOB)]
        certificates.renew(root / "right", expired, days=2)

    def place(state: str, role: Role) -> Path:
        if state == "another authority":
            return root / state / role
        return (
            root / "right" / state / role if state in {"another job", "no role", "expired"} else root / "right" / role
        )

    return place


@pytest.fixture(scope="module")
def servers(places: Callable[[str, Role], Path]) -> Iterator[dict[str, Recorded]]:
    credentials = Credentials.load(str(places("right", Role.SERVER)), Role.SERVER)
    assert credentials is not None
    service = cast("Any", Service())
    made = {
        "master": Recorded(MasterFlight(service).routes(), "master", credentials),
        "pserver": Recorded(PserverFlight(service, SystemClock()).routes(), "pserver", credentials),
    }
    yield made
    for each in made.values():
        assert each.server.stop(grace_s=1.0)


def client_of(place: Callable[[str, Role], Path], state: str, role: Role, address: str) -> flight.FlightClient:
    if state == "plain text":
        return flight.FlightClient(f"grpc://{address}")
    arguments = {
        "tls_root_certs": (place("right", role) / "ca.pem").read_bytes(),
        "override_hostname": "flightedl",
    }
    if state != "no certificate":
        arguments["cert_chain"] = (place(state, role) / "cert.pem").read_bytes()
        arguments["private_key"] = (place(state, role) / "key.pem").read_bytes()
    return flight.FlightClient(f"grpc+tls://{address}", **arguments)


def ask(client: flight.FlightClient, method: str, verb: str, state: str) -> str:
    """Return the server's error, or "" if the call succeeded."""
    headers = [(b"flightedl-caller", b"admin/me")] * (2 if state == "header twice" else 1)
    options = flight.FlightCallOptions(timeout=TIMEOUT_S, headers=headers)
    envelope = json.dumps({"verb": verb}).encode()
    descriptor = flight.FlightDescriptor.for_command(envelope)
    try:
        match method:
            case "action":
                list(client.do_action(flight.Action(verb, b"{}"), options))
            case "get":
                client.do_get(flight.Ticket(envelope), options).read_all()
            case "put":
                writer, reader = client.do_put(descriptor, pa.schema([]), options)
                with writer:
                    writer.done_writing()
                    reader.read()
            case "exchange":
                writer, exchange = client.do_exchange(descriptor, options)
                with writer:
                    writer.done_writing()
                    exchange.read_all()
            case "info":
                client.get_flight_info(descriptor, options)
            case "list":
                list(client.list_flights(options=options))
    except (flight.FlightError, pa.ArrowException, OSError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("role", list(Role), ids=str)
@pytest.mark.parametrize("state", ["right", *STATES])
@pytest.mark.parametrize("which", ["master", "pserver"])
def test_only_the_right_role_with_the_right_certificate_reaches_a_verb(
    servers: dict[str, Recorded], places: Callable[[str, Role], Path], which: str, state: str, role: Role
) -> None:
    server = servers[which]
    with client_of(places, state, role, server.server.address) as client:
        for name, (method, verb) in server.asks.items():
            server.reached.clear()
            reply = ask(client, method, verb, state)
            may = state == "right" and server.is_open_to(method, verb, role)
            assert bool(server.reached) == may, f"{name} by {role} with {state}: {reply}"
            assert reply, f"{name} by {role} with {state}: no error"
            assert not FORBIDDEN.search(reply), f"{name} by {role} with {state}: {reply}"


def test_every_verb_names_its_roles(servers: dict[str, Recorded]) -> None:
    for server in servers.values():
        assert server.roles.keys() == server.server.routes.verbs
        assert all(server.roles.values())


def test_the_matrix_has_its_documented_size(servers: dict[str, Recorded]) -> None:
    cells = sum(len(server.asks) for server in servers.values()) * (len(STATES) + 1) * len(Role)
    assert cells >= 700


def test_each_role_has_exactly_its_verbs(servers: dict[str, Recorded]) -> None:
    def open_to(role: Role) -> set[str]:
        return {verb for server in servers.values() for verb, roles in server.roles.items() if role in roles}

    assert open_to(Role.READER) == {"status", "events", "info", "pull", "read", "changes"}
    decides = {"set_mode", "checkpoint", "retry_failed", "drop_failed", "scale"}
    assert open_to(Role.ADMIN) == {"status", "events", "stacks", "info", "pull", "read", "changes"} | decides
    assert {"push", "init", "step", "pull", "tasks", "join"} <= open_to(Role.TRAINER)
    ordered = {"view", "snapshot", "cut", "applied", "reload", "seal", "copy"}
    assert not open_to(Role.TRAINER) & (ordered | {"set_mode", "checkpoint"})
    assert open_to(Role.SERVER) == ordered | {"status", "info", "read", "move", "moved", "scale", "presence"}
