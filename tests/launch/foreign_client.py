"""A trainer as if written in another language: it follows ``schemas/README.md`` and does not import flightedl.

It uses Flight through pyarrow, and etcd through its HTTP gateway. Usage: ``foreign_client.py ETCD JOB``. The program
registers, receives a task, joins, pulls, pushes the gradient of each batch twice, pulls, reports the task, and prints
what it saw.
"""

from __future__ import annotations

import base64
import json
import sys
import time
import urllib.request
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import xxhash

LIFE = 1 << 40
OPTIONS = flight.FlightCallOptions(timeout=20)
ROW = pa.schema(
    [
        pa.field("block", pa.int32(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("checksum", pa.uint64(), nullable=False),
        pa.field("values", pa.binary(), nullable=False),
    ]
)


class Etcd:
    """The calls to etcd that a trainer needs."""

    def __init__(self, address: str) -> None:
        self._address = address

    def call(self, path: str, **request: Any) -> Any:
        body = json.dumps(request).encode()
        with urllib.request.urlopen(f"http://{self._address}/v3/{path}", body, 10) as reply:
            return json.load(reply)

    def get(self, key: str) -> tuple[Any, int] | None:
        """Return the JSON value of a key, and its create_revision."""
        found = self.call("kv/range", key=_b64(key)).get("kvs")
        return found and (json.loads(base64.b64decode(found[0]["value"])), int(found[0]["create_revision"]))

    def put_leased(self, key: str, value: Any, ttl_s: int) -> None:
        lease = self.call("lease/grant", TTL=ttl_s)["ID"]
        self.call("kv/put", key=_b64(key), value=_b64(json.dumps(value)), lease=lease)


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def act(client: flight.FlightClient, verb: str, request: Any) -> Any:
    (reply,) = client.do_action(flight.Action(verb, json.dumps(request).encode()), OPTIONS)
    return json.loads(reply.body.to_pybytes())


def get(client: flight.FlightClient, ticket: Any) -> Any:
    return client.do_get(flight.Ticket(json.dumps(ticket).encode()), OPTIONS)


def put(client: flight.FlightClient, header: Any, rows: list[dict[str, Any]]) -> Any:
    """Upload one batch with its commit record, and return the acknowledgement."""
    descriptor = flight.FlightDescriptor.for_command(json.dumps(header).encode())
    writer, reader = client.do_put(descriptor, ROW, OPTIONS)
    writer.write_batch(pa.RecordBatch.from_pylist(rows, ROW))
    size_bytes = sum(4 + 8 + 8 + len(row["values"]) for row in rows)
    writer.write_metadata(json.dumps({"commit": {"batches": 1, "rows": len(rows), "bytes": size_bytes}}).encode())
    writer.done_writing()
    reply = json.loads(reader.read().to_pybytes())
    writer.close()
    return reply


def until_given(ask: Any, is_enough: Any) -> Any:
    for _ in range(100):
        reply = ask()
        if is_enough(reply):
            return reply
        time.sleep(reply.get("retry_after_s") or 0.05)
    raise TimeoutError(str(reply))


def main(address: str, job: str) -> None:
    etcd = Etcd(address)
    own = f"/flightedl/{job}/trainers/foreign"
    etcd.put_leased(own, {"id": "foreign"}, 60)
    history = etcd.get(f"/flightedl/{job}/history")
    life = LIFE * (0 if history is None else history[0].get("life", 0))
    sender = {"trainer": "foreign", "generation": etcd.get(own)[1] + life}
    plan_hash = etcd.get(f"/flightedl/{job}/job")[0]["model"]["plan_hash"]
    server, created = etcd.get(f"/flightedl/{job}/ps/0")
    seen: dict[str, Any] = {"pushed": [], "repeated": [], "values": [], "joined": []}
    master = flight.FlightClient(f"grpc://{etcd.get(f'/flightedl/{job}/master/addr')[0]['address']}")
    pserver = flight.FlightClient(f"grpc://{server['address']}")

    def ask(**more: Any) -> Any:
        return json.loads(get(master, {"verb": "tasks", **sender, **more}).schema.metadata[b"reply"])

    def pull(member: int) -> list[dict[str, Any]]:
        ticket = {"verb": "pull", "plan_hash": plan_hash, "member": member}
        return get(pserver, ticket).read_all().to_pylist()

    reply = until_given(lambda: ask(want=1), lambda reply: reply["assignments"])
    while reply["outcome"] != "epochs_done":
        for piece in reply["assignments"]:
            joining = {**sender, "attempt": piece["attempt"]}
            joined = until_given(lambda joining=joining: act(master, "join", joining), lambda reply: reply["member"])
            seen["joined"].append(joined)
            for batch in range(piece["first_batch"], piece["end_batch"]):
                identity = {**{name: piece[name] for name in ("epoch", "task", "batch_count")}, "batch": batch}
                rows = []
                for row in pull(joined["member"]):
                    gradient = pa.array([-1.0] * (len(row["values"]) // 4), pa.float32()).buffers()[1].to_pybytes()
                    checksum = xxhash.xxh3_64_intdigest(gradient)
                    rows.append({**row, "checksum": checksum, "values": gradient})
                header = {
                    "verb": "push",
                    **sender,
                    "plan_hash": plan_hash,
                    "member": joined["member"],
                    "identity": identity,
                    "weight": 1.0,
                    "rows": len(rows),
                }
                seen["pushed"].append(put(pserver, header, rows))
                seen["repeated"].append(put(pserver, header, rows))
        done = [
            {**{name: piece[name] for name in ("epoch", "position", "attempt")}, "pservers": [created + life]}
            for piece in reply["assignments"]
        ]
        reply = until_given(
            lambda done=done: ask(want=1, finished=done),
            lambda reply: reply["assignments"] or reply["outcome"] == "epochs_done",
        )
    for row in pull(0):
        values = pa.Array.from_buffers(pa.float32(), len(row["values"]) // 4, [None, pa.py_buffer(row["values"])])
        seen["values"] += values.to_pylist()
    seen["imported"] = "flightedl" in sys.modules
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
