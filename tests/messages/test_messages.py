"""Messages: invalid ones are rejected when they are decoded."""

from __future__ import annotations

import pytest

from flightedl.errors import MessageError
from flightedl.messages.base import decode, encode
from flightedl.messages.parameters import PushHeader
from flightedl.messages.tasks import JoinReply, TasksTicket


def test_a_ticket_survives_encoding_and_decoding() -> None:
    ticket = TasksTicket(trainer="a", generation=3, want=2)
    assert decode(encode(ticket), TasksTicket) == ticket


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b'{"trainer": "a"}',
        b'{"trainer": "a", "generation": -1}',
        b'{"trainer": "a", "generation": 1, "unknown": 2}',
        b'{"trainer": "", "generation": 1}',
        b'{"trainer": "a", "generation": 1, "want": 65}',
        b'{"trainer": "a", "generation": 1, "wait_s": 21}',
        b'{"trainer": "a", "generation": 1, "wait_s": 1e999}',
        b"[" * 100_000,
    ],
)
def test_a_bad_ticket_is_rejected(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode(data, TasksTicket)


def test_a_push_requires_a_complete_identity() -> None:
    with pytest.raises(MessageError, match="identity"):
        decode(b'{"trainer":"a","generation":1,"plan_hash":"p","member":1,"weight":1,"rows":1}', PushHeader)


def test_a_reply_may_come_from_a_newer_server() -> None:
    assert decode(b'{"member": 4, "something_new": true}', JoinReply) == JoinReply(member=4)
