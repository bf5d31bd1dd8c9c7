"""Generator of the protocol's schemas in ``schemas/``, from the code that implements the protocol."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from flightedl.coordination import records
from flightedl.coordination.keys import JobKeys
from flightedl.formats.chunks import CHUNK_SCHEMA
from flightedl.messages import (
    base,
    checkpoints,
    control,
    declarations,
    feed,
    groups,
    hosts,
    moving,
    parameters,
    reading,
    scaling,
    status,
    tasks,
)
from flightedl.messages.parameters import Outcome
from flightedl.wire.changes import CHANGES_SCHEMA, Change, encode_changes
from flightedl.wire.parts import STEP_SCHEMA, batch_of, encode_message
from flightedl.wire.rows import PUSH_SCHEMA, VALUES_SCHEMA, OutgoingBlocks, encode_rows

_JOB = "<job>"
_MESSAGES = (
    *(checkpoints, declarations, control, groups, hosts, moving, parameters, reading, feed, scaling, status, tasks),
    records,
)


def current() -> dict[str, Any]:
    """Return the schemas of the protocol that the code implements: file name without suffix -> JSON value."""
    return {"messages": _messages(), "arrow": _arrow(), "keys": _keys(), "golden": _golden()}


def _messages() -> dict[str, Any]:
    structs = [
        kind
        for module in _MESSAGES
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
    ]
    _, components = msgspec.json.schema_components(structs, ref_template="#/$defs/{name}")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": dict(sorted(components.items()))}


def _arrow() -> dict[str, Any]:
    def fields(schema: pa.Schema) -> list[dict[str, Any]]:
        return [{"name": f.name, "type": str(f.type), "nullable": f.nullable} for f in schema]

    return {
        "pserver DoPut push, init": fields(PUSH_SCHEMA),
        "pserver DoGet pull": fields(VALUES_SCHEMA),
        "pserver DoExchange step (both ways; the header in app_metadata: README.md)": fields(STEP_SCHEMA),
        "pserver DoGet changes": fields(CHANGES_SCHEMA),
        "master DoGet tasks": fields(CHUNK_SCHEMA),
        "outcome": {outcome.name: int(outcome) for outcome in Outcome},
    }


def _keys() -> dict[str, str]:
    keys = JobKeys("j")
    described = {
        keys.history: "HistoryRecord; life times 2**40 is added to each revision of etcd, in generations as well",
        keys.launcher: "leased; ServerRecord without an address: the process that started the job",
        keys.master_lock: "leased; its create_revision is the master's generation",
        keys.master_address: "leased; ServerRecord",
        keys.ps_desired: "number of pservers, decimal",
        keys.pserver(0): "leased; ServerRecord; its create_revision is the pserver's generation",
        keys.trainer("id"): "leased; TrainerRecord; its create_revision is the trainer's generation",
        keys.job: "JobDeclaration",
        keys.init_params: "ElectionRecord; leased until done",
        keys.save("<url>"): "SaveRecord; leased until done",
        keys.task_queues: "the task queue, in its own encoding; constant size",
        keys.task_failures: "the quarantined tasks",
        keys.group: "GroupRecord: the current start of the group of ranks that receives the data",
        keys.stopped: "StopRecord, written when a trainer stopped the job",
        keys.arrival(0): "ArrivalRecord: files that joined a followed dataset, written once",
        keys.evaluations: "EvaluationsRecord",
        keys.membership: "the membership, in its own encoding",
        keys.pserver_recovery: "the process of each pserver that the queue relies on",
        keys.checkpoint_latest: "the newest published checkpoint",
        keys.once
        + "<name>": "id of the trainer that won the name before it had a model; leased until its session ends",
        keys.once
        + "<life>/<name>": "the same, for the life of the model that began with the election of this create_revision",
    }
    return {key.replace("/j/", f"/{_JOB}/"): text for key, text in described.items()}


def _golden() -> dict[str, Any]:
    batch = encode_rows([7], [3], [np.array([1.0, -2.5], np.float32)])
    pieces = [OutgoingBlocks(range(7, 9), 3, Outcome.NONE, np.array([1.0, -2.5], np.float32), ())]
    values, packed, _ = encode_message(pieces)
    assert values is not None, "values without inlining are in a batch"
    identity = parameters.BatchIdentity(epoch=1, task=2, batch=3, batch_count=4)
    header = parameters.PushHeader(
        trainer="t", generation=5, plan_hash="p", member=6, identity=identity, weight=32.0, rows=1
    )
    return {
        "push row: block 7 at base version 3, float32 [1, -2.5] (Arrow IPC stream, base64)": _stream(batch),
        "step message: blocks 7 and 8 at base version 3, float32 [1, -2.5] (Arrow IPC stream, base64)": _stream(
            batch_of(values)
        ),
        "header of that step message (app_metadata, base64)": base64.b64encode(packed).decode(),
        "the same step message as metadata alone (base64)": base64.b64encode(
            encode_message(pieces, inline=True)[1]
        ).decode(),
        "change: elements 0 and 1 of w, block 7 at version 3, float32 [1, -2.5] (Arrow IPC stream, base64)": _stream(
            encode_changes([Change("values", "w", 7, 0, 2, 3, values=np.array([1.0, -2.5], np.float32))])
        ),
        "push header": json.loads(base.encode(header)),
        "pull ticket": json.loads(base.encode(parameters.PullTicket(plan_hash="p"))),
    }


def _stream(batch: pa.RecordBatch) -> str:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return base64.b64encode(sink.getvalue().to_pybytes()).decode()


def write(directory: Path) -> None:
    """Write all schema files."""
    for name, value in current().items():
        (directory / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    write(Path(__file__).resolve().parent.parent / "schemas")
