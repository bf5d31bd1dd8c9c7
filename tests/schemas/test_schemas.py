"""The published schema files match the code."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pyarrow as pa
import pytest

import flightedl_schemas
from flightedl.adapters.clock import SystemClock
from flightedl.errors import MessageError
from flightedl.master.flight import MasterFlight
from flightedl.messages.base import Reply, decode
from flightedl.messages.parameters import PushHeader
from flightedl.pserver.flight import PserverFlight
from flightedl.rpc.routes import Routes
from flightedl.wire.parts import decode_message
from flightedl.wire.rows import decode_rows
from tools.generators import schemas


@pytest.mark.parametrize("name", flightedl_schemas.NAMES)
def test_the_schema_files_match_the_code(name: str) -> None:
    assert flightedl_schemas.load(name) == json.loads(json.dumps(schemas.current()[name])), "run `make schemas`"


def test_the_golden_row_still_decodes() -> None:
    golden = flightedl_schemas.load("golden")
    data = next(value for key, value in golden.items() if key.startswith("push row"))
    (row,) = decode_rows(pa.ipc.open_stream(base64.b64decode(data)).read_next_batch())
    assert (row.block, row.version) == (7, 3)
    np.testing.assert_array_equal(row.array(np.float32), [1.0, -2.5])


def test_the_golden_step_message_still_decodes() -> None:
    golden = flightedl_schemas.load("golden")
    data, packed = (
        base64.b64decode(next(value for key, value in golden.items() if key.startswith(name)))
        for name in ("step message", "header of that step message")
    )
    (part,) = decode_message(pa.ipc.open_stream(data).read_next_batch(), packed)[0]
    assert (part.blocks, part.version, part.outcome) == (range(7, 9), 3, 0)
    np.testing.assert_array_equal(np.frombuffer(part.data, np.float32), [1.0, -2.5])


def test_the_golden_header_still_decodes() -> None:
    header = decode(json.dumps(flightedl_schemas.load("golden")["push header"]).encode(), PushHeader)
    assert header.identity.batch == 3


#: Messages and records of clients that read, follow, push and take tasks. Messages inside them are included.
OF_CLIENTS = (
    *("ReadCommand", "ReadTicket", "ChangesTicket", "TasksTicket", "JoinRequest", "PushHeader", "PullTicket"),
    *("LookupHeader", "ChangesHeader", "TasksReply", "JoinReply", "PushReply"),
    *("JobDeclaration", "HistoryRecord", "ServerRecord", "TrainerRecord"),
)


def published() -> dict[str, Any]:
    """Return the parts of the protocol that must not change within a version."""
    known = flightedl_schemas.load("messages")
    found: dict[str, Any] = {}
    names = list(OF_CLIENTS)
    while names:
        if (name := names.pop()) not in found:
            message = known["$defs"][name]
            found[name] = {"properties": {key: _bare(value) for key, value in message["properties"].items()}}
            if message.get("additionalProperties") is False:
                found[name]["required"] = sorted(message.get("required", []))
            names += re.findall(r"#/\$defs/(\w+)", json.dumps(message))
    arrow, keys = (flightedl_schemas.load(each) for each in ("arrow", "keys"))
    used = {key: "" for key in keys if re.match("/flightedl/<job>/(history|job|master/addr|ps/|trainers/)", key)}
    golden = {key: value for key, value in flightedl_schemas.load("golden").items() if not isinstance(value, dict)}
    return {"protocol": known["protocol"], "messages": found, "arrow": arrow, "keys": used, "golden": golden}


def _bare(field: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in field.items() if key not in {"default", "description", "maximum", "maxLength"}}


def _accepts(now: dict[str, Any], then: dict[str, Any]) -> bool:
    """True if a field is the same, or permits more values."""
    values = then.get("enum", [])
    return {**now, "enum": values} == {**then, "enum": values} and set(values) <= set(now.get("enum", []))


def test_the_protocol_only_grows_within_a_version(pytestconfig: pytest.Config) -> None:
    """Clients of the first release of this version still work. With ``--rewrite``, what has been added is kept, too."""
    now, file = published(), Path(__file__).with_name("published.json")
    then = json.loads(file.read_text("utf-8"))
    if now["protocol"] == then["protocol"]:
        _require_compatible(now, then)
    if pytestconfig.getoption("--rewrite"):
        lines = (f' "{part}": {_one_line_for_each(value)}' for part, value in now.items())
        file.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    else:
        assert now["protocol"] == then["protocol"], "publish the new version: pytest --rewrite tests/schemas"


def _require_compatible(now: dict[str, Any], then: dict[str, Any]) -> None:
    for name, message in then["messages"].items():
        for field, kind in message["properties"].items():
            assert _accepts(now["messages"][name]["properties"].get(field, {}), kind), f"{name}.{field} has changed"
        assert now["messages"][name].get("required") == message.get("required"), f"{name} has a new required field"
    for part in ("arrow", "golden", "keys"):
        assert then[part] == {key: now[part].get(key) for key in then[part]}


def _one_line_for_each(part: Any) -> str:
    if not isinstance(part, dict):
        return json.dumps(part)
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in part.items()) + "\n }"


README = resources.files(flightedl_schemas).joinpath("README.md").read_text("utf-8")


class Anything:
    """A service that answers every request with an empty message."""

    def __getattr__(self, name: str) -> Anything:
        return self

    def __call__(self, *_: object) -> msgspec.Struct:
        return Reply()


SERVERS = {
    "Master": MasterFlight(cast("Any", Anything())).routes(),
    "Pserver": PserverFlight(cast("Any", Anything()), SystemClock()).routes(),
}


def rows_of(server: str) -> list[list[str]]:
    """Return verb, method, request, reply and roles of each row of a server's table."""
    _, _, rest = README.partition(f"### {server}\n")
    lines = re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]


def served(routes: Routes) -> dict[tuple[str, str], set[str]]:
    """Return the permitted roles by verb and method."""
    verbs = [
        *((verb, "DoAction", verb) for verb in routes.actions),
        *((verb, "DoGet", verb) for verb in routes.gets),
        *((verb, "DoPut", verb) for verb in routes.puts),
        *((verb, "DoExchange", verb) for verb in {*routes.exchanges, *routes.request_streams}),
        *([(verb, "GetFlightInfo", "info") for verb in ("parameters", "read", "changes")] if routes.info else []),
        *([("-", "ListFlights", "info")] if routes.flights else []),
    ]
    return {(verb, method): {role.value for role in routes.roles[key]} for verb, method, key in verbs}


@pytest.mark.parametrize("server", SERVERS)
def test_the_page_lists_every_verb_with_its_method_and_roles(server: str) -> None:
    documented = {(verb.strip("`"), method): set(roles.split(", ")) for verb, method, _, _, roles in rows_of(server)}
    assert documented == served(SERVERS[server])


def message_of(action: Callable[[bytes, Any], bytes]) -> str:
    """Return the message that an action decodes, or "-" if it ignores its body."""
    try:
        action(b"no JSON", None)
    except MessageError as error:
        return str(error).removeprefix("not a valid ").partition(":")[0]
    return "-"


@pytest.mark.parametrize("server", SERVERS)
def test_the_page_names_existing_messages_and_the_request_of_each_action(server: str) -> None:
    known = flightedl_schemas.load("messages")["$defs"]
    for verb, method, request, reply, _ in rows_of(server):
        named = re.findall(
            r"\b(?:[A-Z]\w+(?:Request|Reply|Header|Ticket|Declaration)|Declared\w+)\b", f"{request} {reply}"
        )
        assert set(named) <= known.keys(), verb
        assert method != "DoAction" or request == message_of(SERVERS[server].actions[verb.strip("`")]), verb
