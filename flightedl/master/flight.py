"""The master's verbs: each handler decodes a request, calls the service, and encodes the reply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from msgspec.structs import replace

from flightedl.errors import MessageError, UsageError
from flightedl.formats.chunks import CHUNK_SCHEMA, Chunk, chunks_to_batch, chunks_to_rows, parts_to_rows
from flightedl.formats.stored_index import PIECES_SCHEMA
from flightedl.master.service import MasterService
from flightedl.messages.base import OfJob, SenderOfJob, decode, encode
from flightedl.messages.checkpoints import CheckpointRequest, SaveModelRequest
from flightedl.messages.control import PresenceRequest
from flightedl.messages.declarations import DatasetDeclaration, EvaluationDeclaration, ModelDeclaration
from flightedl.messages.feed import ChangesTicket
from flightedl.messages.groups import GroupLeaveRequest, GroupPlaceRequest, GroupStartRequest
from flightedl.messages.moving import MovedRequest
from flightedl.messages.parameters import PullTicket
from flightedl.messages.scaling import ScaleRequest
from flightedl.messages.status import EventsRequest, StacksReply, StacksRequest
from flightedl.messages.tasks import (
    Assignment,
    DroppedTasksRequest,
    EndGrowthRequest,
    FailedTasksRequest,
    JoinRequest,
    LogRequest,
    ModeRequest,
    StopRequest,
    TasksTicket,
)
from flightedl.process import tracing
from flightedl.process.stacks import stacks
from flightedl.rpc.authentication import Role
from flightedl.rpc.call import Call
from flightedl.rpc.routes import Answer, Endpoint, Endpoints, Routes, verb_of
from flightedl.wire.changes import CHANGES_SCHEMA
from flightedl.wire.rows import VALUES_SCHEMA

_OF_A_TRAINER = (
    *("declare_dataset", "declare_model", "declare_evaluation", "join", "tasks", "log", "end_growth", "stop"),
    *("save_model", "index", "group_start", "group_at", "group_leave"),
)
_OF_AN_ADMIN = ("set_mode", "checkpoint", "retry_failed", "drop_failed", "stacks")
_ROLES = {
    **dict.fromkeys(_OF_A_TRAINER, (Role.TRAINER,)),
    **dict.fromkeys(_OF_AN_ADMIN, (Role.ADMIN,)),
    "presence": (Role.TRAINER, Role.SERVER),
    "scale": (Role.ADMIN, Role.SERVER),
    "moved": (Role.SERVER,),
    "status": tuple(Role),
    "events": (Role.READER, Role.ADMIN),
    "info": tuple(Role),
    "read": (Role.TRAINER, Role.READER, Role.ADMIN),
}


_Changing = TypeVar("_Changing", bound=OfJob | SenderOfJob)


class MasterFlight:
    """Routes of the master."""

    def __init__(self, service: MasterService) -> None:
        self._service = service

    def routes(self) -> Routes:
        return Routes(
            actions={
                "declare_dataset": lambda body, _: encode(
                    self._service.declaring.dataset(decode(body, DatasetDeclaration))
                ),
                "declare_model": lambda body, _: encode(self._service.declaring.model(decode(body, ModelDeclaration))),
                "join": lambda body, _: encode(self._service.ask(decode(body, JoinRequest))),
                "set_mode": self._asks(ModeRequest),
                "log": self._log,
                "checkpoint": self._asks(CheckpointRequest),
                "save_model": lambda body, _: encode(self._service.exports.ask(decode(body, SaveModelRequest))),
                "declare_evaluation": lambda body, _: encode(
                    self._service.tasks.declare_evaluation(decode(body, EvaluationDeclaration))
                ),
                "end_growth": self._end_growth,
                "stop": self._asks(StopRequest),
                "scale": self._asks(ScaleRequest),
                "moved": lambda body, _: encode(self._service.ask(decode(body, MovedRequest))),
                "group_start": self._asks(GroupStartRequest),
                "group_at": self._asks(GroupPlaceRequest),
                "group_leave": self._asks(GroupLeaveRequest),
                "retry_failed": self._asks(FailedTasksRequest),
                "drop_failed": self._asks(DroppedTasksRequest),
                "status": lambda _body, _: encode(self._service.status()),
                "stacks": self._stacks,
                "events": lambda body, call: encode(self._service.events(decode(body, EventsRequest), call.closing)),
            },
            gets={
                "tasks": self._get_tasks,
                "index": self._get_index,
                "read": lambda ticket, _: self._service.locations.read(ticket),
            },
            request_streams={"tasks": self._ask_for_tasks, "presence": self._hear},
            info=self._info,
            flights=lambda criteria, _: self._service.locations.commands(criteria),
            roles=_ROLES,
        )

    def _log(self, body: bytes, _: Call) -> bytes:
        return encode(self._service.log(decode(body, LogRequest)))

    def _stacks(self, body: bytes, call: Call) -> bytes:
        request = decode(body, StacksRequest)
        if request.trainer:
            return encode(self._service.stacks_of_trainer(request, call.closing))
        return encode(StacksReply(text=stacks()))

    def _end_growth(self, body: bytes, _: Call) -> bytes:
        self._service.growing.end(self._for_this_job(body, EndGrowthRequest))
        return b"{}"

    def _asks(self, kind: type[_Changing]) -> Callable[[bytes, Call], bytes]:
        """Return an action that passes requests of this type, which change the job, to the core."""

        def ask(body: bytes, _: Call) -> bytes:
            request: Any = self._for_this_job(body, kind)
            return encode(self._service.ask(request))

        return ask

    def _for_this_job(self, body: bytes, kind: type[_Changing]) -> _Changing:
        """Decode a request that changes the job, and check that it names this job.

        Raises:
            MessageError: the request has another type, or does not name this job.
        """
        request = decode(body, kind)
        if request.job != self._service.job:
            raise MessageError(f"the {kind.__name__} names another job than the one of this master")
        return request

    def _get_tasks(self, ticket: bytes, call: Call) -> Answer:
        request = decode(ticket, TasksTicket)
        reply, pieces, _ = self._service.tasks.exchange(request, call.closing)
        located = [replace(each, chunks=[]) for each in _located(request, reply.assignments, pieces)]
        batches = [chunks_to_batch(chunks) for chunks in pieces]
        return Answer(CHUNK_SCHEMA, batches, encode(replace(reply, assignments=located)))

    def _get_index(self, _ticket: bytes, _call: Call) -> Answer:
        return Answer(PIECES_SCHEMA, self._service.tasks.index_pieces(), b"")

    def _ask_for_tasks(self, ticket: bytes, call: Call) -> bytes:
        request = decode(ticket, TasksTicket)
        with tracing.serves("master", "tasks", request.traceparent):
            reply, pieces, ahead = self._service.tasks.exchange(request, call.closing)
        return encode(
            replace(
                reply,
                assignments=_located(request, reply.assignments, pieces),
                ahead=_located(request, reply.ahead, ahead),
            )
        )

    def _hear(self, body: bytes, call: Call) -> bytes:
        self._service.presence.hear(decode(body, PresenceRequest), call)
        return b"{}"

    def _info(self, command: bytes, call: Call) -> Endpoints:
        """Return where to read a parameter or table, or all blocks of all pservers."""
        match verb_of(command):
            case "read":
                return self._service.locations.endpoints(command, call)
            case "changes" | "parameters" as verb:
                kind, schema = (ChangesTicket, CHANGES_SCHEMA) if verb == "changes" else (PullTicket, VALUES_SCHEMA)
                plan_hash, addresses = self._service.parameter_servers()
                ticket = encode(kind(plan_hash=plan_hash))
                return Endpoints(schema, tuple(Endpoint(ticket, (address,)) for address in addresses))
        raise MessageError("the verb of a command of GetFlightInfo is read, changes or parameters")


def _located(ticket: TasksTicket, assignments: list[Assignment], pieces: list[list[Chunk]]) -> list[Assignment]:
    parts = [parts_to_rows(chunks) for chunks in pieces]
    if any(parts) and not ticket.reads_parts:
        raise UsageError(
            "tasks have parts of chunks, which this trainer cannot read: declare shuffle_bytes 0, or update"
        )
    return [
        replace(each, chunks=chunks_to_rows(chunks), parts=of_chunks)
        for each, chunks, of_chunks in zip(assignments, pieces, parts, strict=True)
    ]
