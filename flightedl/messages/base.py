"""Base classes of the JSON messages, which are validated structs.

Rules:

* A request is a JSON object. If it has an unknown field, lacks a required field, or has a field of the wrong type, it
  is rejected with :class:`MessageError` before it has any effect. Replies may have unknown fields, because a server may
  be newer than its client.
* Every request that can be retried carries an identity: a push its ``BatchIdentity``, a report its ``attempt``, a
  trainer's request its ``generation``, a member's request its ``member``. Headers of the transport carry the
  generations of servers.
* Every request about a pserver's blocks names the shard plan (``plan_hash``), which includes the version of the
  placement.
* Numbers that identify something (epoch, task, batch, attempt, generation, member) are non-negative.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from flightedl.errors import MessageError
from flightedl.messages.decoding import from_json

Natural = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
#: W3C traceparent of the span to which the request belongs; empty if there is none.
Traceparent = Annotated[str, msgspec.Meta(max_length=64)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of requests to a server."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of a server's replies, and of values stored in etcd."""


class Sender(Request, frozen=True, kw_only=True):
    """A trainer: its id, and the generation of its key in etcd."""

    trainer: Name
    generation: Natural


class OfJob(Request, frozen=True, kw_only=True):
    """A request that changes a running job. The master refuses it unless ``job`` is the name of the master's job."""

    job: Text = ""


class SenderOfJob(Sender, frozen=True, kw_only=True):
    """A trainer's request that changes a running job (see ``OfJob``)."""

    job: Text = ""


class OfPlan(Request, frozen=True, kw_only=True):
    """A request about a pserver's blocks. A pserver with another shard plan answers *fenced*."""

    plan_hash: Name


Message = TypeVar("Message", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message as JSON."""
    return msgspec.json.encode(message)


def decode(data: bytes, kind: type[Message]) -> Message:
    """Decode a message.

    Raises:
        MessageError: ``data`` is not JSON, or has another type. The message names the field.
    """
    try:
        return from_json(data, kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MessageError(f"not a valid {kind.__name__}: {str(error)[:200]}") from None
