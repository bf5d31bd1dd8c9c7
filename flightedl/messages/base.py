"""Base classes of the JSON messages, which are validated structs.

Rules:

* A request is a JSON object. A request with an unknown field, without a required field, or with a field of the wrong
  type is rejected with :class:`MessageError` before anything is done. Replies may have unknown fields, so that a server
  can be newer than its client.
* Every request that can be retried carries an identity: a pushed batch its ``BatchIdentity``, a report its ``attempt``,
  a trainer its ``generation``, a member its ``member``. The generations of servers are in headers of the transport.
* Every request about the blocks of a pserver names the shard plan (``plan_hash``), and with it the version of the
  placement.
* Identifying numbers (epoch, task, batch, attempt, generation, member) are non-negative.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from flightedl.errors import MessageError
from flightedl.messages.decoding import from_json

Natural = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
#: W3C traceparent of the span to which the request belongs, or empty.
Traceparent = Annotated[str, msgspec.Meta(max_length=64)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of requests to a server."""


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Base of a server's replies, and of values in etcd."""


class Sender(Request, frozen=True, kw_only=True):
    """A trainer: its id, and the generation of its key in etcd."""

    trainer: Name
    generation: Natural


class OfJob(Request, frozen=True, kw_only=True):
    """A request that changes a running job. The master refuses it unless ``job`` is the name of its job."""

    job: Text = ""


class SenderOfJob(Sender, frozen=True, kw_only=True):
    """A request of a trainer that changes a running job, see ``OfJob``."""

    job: Text = ""


class OfPlan(Request, frozen=True, kw_only=True):
    """A request about the blocks of a pserver. A pserver with another shard plan answers *fenced*."""

    plan_hash: Name


Message = TypeVar("Message", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """Encode a message as JSON."""
    return msgspec.json.encode(message)


def decode(data: bytes, kind: type[Message]) -> Message:
    """Decode a message.

    Raises:
        MessageError: ``data`` is not JSON, or not of this kind; names the field.
    """
    try:
        return from_json(data, kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MessageError(f"not a valid {kind.__name__}: {str(error)[:200]}") from None
