"""Generator of the protocol's schemas in ``schemas/``, from the code that implements the protocol."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from flightedl.coordination import records
from flightedl.coordination.keys import JobKeys
from flightedl.domain.model.optimizers import SGD
from flightedl.domain.model.parameters import ParameterSpec
from flightedl.domain.queue.batching import record_order
from flightedl.domain.tables.evict import Evict
from flightedl.domain.tables.placement import bucket_of, salt_of
from flightedl.domain.tables.spec import TableSpec
from flightedl.formats.chunks import CHUNK_SCHEMA
from flightedl.formats.columns import parameter_schema, table_schema
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
from flightedl.wire.table_rows import Kind, Section, encode_sections

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
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "protocol": records.PROTOCOL,
        "$defs": dict(sorted(components.items())),
    }


def _arrow() -> dict[str, Any]:
    def fields(schema: pa.Schema) -> list[dict[str, Any]]:
        return [{"name": f.name, "type": str(f.type), "nullable": f.nullable} for f in schema]

    table = TableSpec("t", 3, SGD(lr=1.0), evict=Evict(unused_versions=1))
    return {
        "read: a vector of float32": fields(parameter_schema(ParameterSpec("v", (2,)), 0, {})),
        "read: a bfloat16 matrix with slices of 3 elements": fields(
            parameter_schema(ParameterSpec("m", (2, 3), "bfloat16"), 0, {})
        ),
        "read: a table with rows of 3 elements, all columns without slots": fields(
            table_schema(table, {}, ("id", "values", "version", "updates"))
        ),
        "pserver DoPut push, init": fields(PUSH_SCHEMA),
        "pserver DoGet pull": fields(VALUES_SCHEMA),
        "pserver DoExchange step (both ways; the header in app_metadata: README.md)": fields(STEP_SCHEMA),
        "pserver DoGet changes": fields(CHANGES_SCHEMA),
        "master DoGet tasks": fields(CHUNK_SCHEMA),
        "outcome": {outcome.name: int(outcome) for outcome in Outcome},
        "kind of a section of table rows": {kind.name: int(kind) for kind in Kind},
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
        keys.consumer("<name>"): "leased; ServerRecord without an address: the process that follows under this name",
        keys.acknowledgement("<name>", 0): "leased as the name; Acknowledgement of the consumer to pserver 0",
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
    rows = Section(Kind.GRADIENTS, 0, np.array([7, -3]).view(np.uint64), np.array([[1.0], [-2.5]], np.float32))
    return {
        "push row: block 7 at base version 3, float32 [1, -2.5] (Arrow IPC stream, base64)": _stream(batch),
        "step message: blocks 7 and 8 at base version 3, float32 [1, -2.5] (Arrow IPC stream, base64)": _stream(
            batch_of(values)
        ),
        "header of that step message (app_metadata, base64)": _base64(packed),
        "the same step message as metadata alone (base64)": _base64(encode_message(pieces, inline=True)[1]),
        "table rows: gradients 1 and -2.5 for ids 7 and -3 of table 0, whose dim is 1 (payload, base64)": _base64(
            encode_sections([rows]).tobytes()
        ),
        "change: elements 0 and 1 of w, block 7 at version 3, float32 [1, -2.5] (Arrow IPC stream, base64)": _stream(
            encode_changes([Change("values", "w", 7, 0, 2, 3, values=np.array([1.0, -2.5], np.float32))])
        ),
        "xxh3-64 of texts": {text: xxhash.xxh3_64_hexdigest(text.encode()) for text in ("", "users", "flightedl" * 40)},
        "buckets of ids of the table users": {
            str(number): bucket_of(number, salt_of("users")) for number in (0, 1, -3, (1 << 64) - 1)
        },
        "order of 10 records: seed 2^64 - 1, epoch 1, task 2": record_order(10, (1 << 64) - 1, 1, 2).tolist(),
        **{name: json.loads(base.encode(message)) for name, message in _messages_of_a_trainer().items()},
    }


def _messages_of_a_trainer() -> dict[str, msgspec.Struct]:
    sender: dict[str, Any] = {"trainer": "t", "generation": 5}
    identity = parameters.BatchIdentity(epoch=1, task=2, batch=3, batch_count=4)
    position = feed.Position(life=3, generation=4, placement=1, number=9)
    done = tasks.FinishedTask(epoch=1, position=0, attempt=7, pservers=[4])
    return {
        "push header": parameters.PushHeader(**sender, plan_hash="p", member=6, identity=identity, weight=32.0, rows=1),
        "pull ticket": parameters.PullTicket(plan_hash="p"),
        "lookup header": parameters.LookupHeader(plan_hash="p", member=6),
        "read command": reading.ReadCommand(name="w", start=2, stop=9),
        "changes ticket": feed.ChangesTicket(plan_hash="p", since=position),
        "changes header": feed.ChangesHeader(position=position, since=8, blocks=[(0, 2)], buckets=[(0, 512)]),
        "tasks ticket": tasks.TasksTicket(**sender, finished=[done]),
        "join request": tasks.JoinRequest(**sender, attempt=7),
    }


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _stream(batch: pa.RecordBatch) -> str:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return _base64(sink.getvalue().to_pybytes())


def write(directory: Path) -> None:
    """Write all schema files."""
    for name, value in current().items():
        (directory / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[2] / "schemas")
