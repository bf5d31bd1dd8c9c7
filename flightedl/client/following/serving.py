"""A small lookup server on a follower, as HTTP with JSON and as Arrow Flight, for demonstrations and small services.

* ``GET /``: page with the age of the copy, and its parameters and tables
* ``GET /parameters/NAME``: ``{"dtype": ..., "shape": ..., "values": [...]}``
* ``GET /tables/NAME/ID,ID``: ``{"values": [[...], ...]}``, one list for each id. Ids are integers or strings.
* ``DoGet`` with ``{"verb": "lookup", "table": ..., "ids": [...]}``: a batch with the columns ``id`` and ``values``
"""

from __future__ import annotations

import html
import json
from typing import Annotated, Any
from urllib.parse import unquote

import msgspec
import numpy as np
import pyarrow as pa

from flightedl.client.following.follower import Follower
from flightedl.client.tables.ids import found_ids
from flightedl.errors import FlightedlError, MessageError, NotFoundError
from flightedl.messages.base import Name, Request, decode
from flightedl.process.http_page import Answer as HttpAnswer
from flightedl.process.http_page import Asked
from flightedl.rpc.authentication import Role
from flightedl.rpc.call import Call
from flightedl.rpc.routes import Answer, Routes

_JSON = "application/json"
_MOST_IDS = 10_000
_MOST_VALUES = 1 << 20


class LookupTicket(Request, frozen=True, kw_only=True):
    """Ticket of DoGet: asks a lookup server for rows."""

    verb: str = "lookup"
    table: Name
    ids: Annotated[list[int | str], msgspec.Meta(max_length=_MOST_IDS)]


class LookupService:
    """The requests that a lookup server answers.

    Args:
        follower: The copy of the model.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def routes(self) -> Routes:
        """Return the verbs of the Flight server."""
        return Routes(gets={"lookup": self._lookup}, roles={"lookup": tuple(Role)})

    def _lookup(self, ticket: bytes, _: Call) -> Answer:
        request = decode(ticket, LookupTicket)
        ids, values = self._rows(request.table, request.ids)
        column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), max(values.shape[1], 1))
        batch = pa.RecordBatch.from_arrays([pa.array(ids.view(np.int64)), column], ["id", "values"])
        return Answer(batch.schema, [batch], b"")

    def _rows(self, name: str, ids: list[int | str]) -> tuple[Any, Any]:
        table = self._follower.tables.get(name)
        if table is None:
            raise NotFoundError(f"the model has no table {name!r:.80}")
        return found_ids(name, ids).ids, table.lookup(ids)

    def page(self, asked: Asked) -> HttpAnswer:
        """Answer an HTTP request."""
        match [unquote(part) for part in asked.path.strip("/").split("/")]:
            case [""]:
                return HttpAnswer(self._overview().encode(), "text/html; charset=utf-8")
            case ["parameters", name]:
                return self._answered(lambda: self._parameter(name))
            case ["tables", name, ids]:
                return self._answered(lambda: {"values": self._rows(name, _ids_of(ids))[1].tolist()})
        return HttpAnswer(b'{"error": "ask for /parameters/NAME or /tables/NAME/ID,ID"}', _JSON, 404)

    def _answered(self, answer: Any) -> HttpAnswer:
        try:
            return HttpAnswer(json.dumps(answer()).encode(), _JSON)
        except FlightedlError as error:
            status = 404 if isinstance(error, NotFoundError) else 400
            return HttpAnswer(json.dumps({"error": str(error)}).encode(), _JSON, status)

    def _parameter(self, name: str) -> dict[str, Any]:
        found = self._follower.parameters().get(name)
        if found is None:
            raise NotFoundError(f"the model has no parameter {name!r:.80}")
        if found.size > _MOST_VALUES:
            raise MessageError(f"parameter {name!r:.80} has {found.size} values: read it with `flightedl model get`")
        values = found.astype(np.float64).reshape(-1).tolist()
        return {"dtype": found.dtype.name, "shape": found.shape, "values": values}

    def _overview(self) -> str:
        found = {name: f"{value.dtype} {list(value.shape)}" for name, value in self._follower.parameters().items()}
        found |= {name: f"{len(table.rows()[0]):,} rows" for name, table in self._follower.tables.items()}
        rows = [f"<tr><td>{html.escape(name)}<td>{html.escape(text)}" for name, text in found.items()]
        return (
            "<!doctype html><meta http-equiv=refresh content=1><title>flightedl serve</title>"
            f"<p>This copy was up to date {self._follower.age_s:.1f} s ago.<table>{''.join(rows)}</table>"
        )


def _ids_of(text: str) -> list[int | str]:
    parts = text.split(",")
    if len(parts) > _MOST_IDS:
        raise MessageError(f"{len(parts)} ids were requested, at most {_MOST_IDS} are allowed")
    is_number = all(part.removeprefix("-").isdecimal() for part in parts)
    return [int(part) if is_number else part for part in parts]
