"""Hostile requests for changes: each gets changes or one sentence, and the next correct client gets what it needs."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import pyarrow.flight as flight
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.client.following.copy import FollowedModel
from flightedl.errors import FencedError
from flightedl.messages.base import encode
from flightedl.messages.feed import ChangesTicket
from flightedl.pserver.flight import PserverFlight
from flightedl.pserver.readers import feed
from flightedl.pserver.readers.feed import _ANSWERS, PserverFeed
from flightedl.pserver.stores.interface import distinct
from flightedl.rpc.identity import ServerIdentity
from flightedl.rpc.server import FlightServer
from tests.support.contracts.coordinator import eventually

from .fuzz import mutated
from .test_feed_marks import Bench, content_of

OPTIONS = flight.FlightCallOptions(timeout=20)
NUMBERS = (0, 1, 2, 3, -1, 1 << 31, 1 << 63, 1 << 64, 1 << 200, 1.5, "1", None, True, [], {})
STRANGE: dict[str, tuple[Any, ...]] = {
    "verb": ("changes", "change", "", 3, None),
    "plan_hash": ("", "0" * 32, "x" * 5000, 7, None),
    "since": (None, 3, "", [], {}, {"number": 1}),
    "marks": (True, False, 1, "yes", None),
    "wait_s": (0, 0.01, -1, 21, 1e300, "0", None),
    "wire": ("", "bfloat16", "float16", "int8", "BFLOAT16", 2, None),
    "consumer": ("", "serving", "a/b", "../x", "x" * 65, "\0", "é", 5, None),
    "consumer_generation": NUMBERS,
    "unknown": (1,),
}


class Served(Bench):
    """A pserver whose feed is served to plain Flight clients."""

    def __init__(self) -> None:
        super().__init__()
        # Requests wait for changes.
        self.feed = self.snapshots.feed = PserverFeed(self.shard, self.plan, 1, 5, SystemClock())
        service = SimpleNamespace(require_lease=lambda: None, feed=self._feed_of)
        clock = SystemClock()
        self.server = FlightServer(
            PserverFlight(cast("Any", service), clock).routes(), ServerIdentity("demo", "pserver"), clock=clock
        )
        self.server.start_serving(ServerIdentity("demo", "pserver", 0, 1))
        self.client = flight.connect(f"grpc://{self.server.address}")
        self.train([1, 2, 3], 1.0)

    def _feed_of(self, plan_hash: str) -> PserverFeed:
        if plan_hash != self.plan.hash:
            raise FencedError("the trainer has a different shard plan: read the job's declaration again")
        return self.feed

    def send(self, ticket: bytes) -> str:
        """Return the code of the error that a ticket causes; empty if there is none."""
        try:
            rows = self.client.do_get(flight.Ticket(ticket), OPTIONS).read_all().to_pylist()
        except flight.FlightError as error:
            said, code = str(error), json.loads(error.extra_info)["code"]
            assert len(said) < 1500, said
            assert "Traceback" not in said, said
            return str(code)
        assert rows[-1]["kind"] == "end"
        assert rows[-1]["block"] == len(rows) - 1
        return ""

    def close(self) -> None:
        self.client.close()
        self.server.stop(1.0)

    def require_healthy(self) -> None:
        """Assert that a follower that stops at checkpoints gets them, and that no cuts are left over."""
        follower = self.followers[0]
        for _ in range(2):
            self.train([1, 2, 9], 0.4)
            self.ask(follower, is_marked=True)
            self.save()
            assert self.ask(follower, is_marked=True).checkpoint == self.number
            assert content_of(follower) == self.expected
        fresh = FollowedModel(self.plan)
        self.ask(fresh, is_marked=False)
        self.ask(follower, is_marked=False)
        assert content_of(follower) == content_of(fresh)
        self.feed.expire()
        assert self.feed._sending == []
        (rows,) = (span.rows for span in distinct(self.shard.rows.spans))
        assert sum(not cut.is_over for cut in rows._cuts.values()) <= 1, "only the newest mark's cut is left"


@pytest.fixture
def served() -> Iterator[Served]:
    with closing(Served()) as made:
        yield made


def ticket_of(served: Served, number: int = 0) -> dict[str, Any]:
    position = {"life": 1, "generation": 5, "placement": 0, "number": number}
    ticket = ChangesTicket(plan_hash=served.plan.hash, wait_s=0.0)
    return {**json.loads(encode(ticket)), "since": position}


@pytest.mark.parametrize("field", STRANGE)
def test_a_ticket_with_a_strange_field_is_answered(served: Served, field: str) -> None:
    codes = {served.send(json.dumps({**ticket_of(served), field: value}).encode()) for value in STRANGE[field]}
    assert codes <= {"", "message", "fenced"}
    assert "message" in codes
    served.require_healthy()


@pytest.mark.parametrize("field", ["life", "generation", "placement", "number"])
def test_a_strange_position_is_answered_with_a_base_or_an_error(served: Served, field: str) -> None:
    codes = Counter[str]()
    for value in NUMBERS:
        ticket = ticket_of(served)
        ticket["since"][field] = value
        codes[served.send(json.dumps(ticket).encode())] += 1
        del ticket["since"][field]
        assert served.send(json.dumps(ticket).encode()) == "message"
    assert set(codes) == {"", "message"}
    served.require_healthy()


def test_damaged_tickets_are_answered(served: Served) -> None:
    chance, codes = random.Random(1), Counter[str]()
    for number in range(400):
        ticket = ticket_of(served, number % 5)
        for _ in range(chance.choice((0, 0, 1, 2))):
            field = chance.choice(list(STRANGE))
            ticket[field] = chance.choice(STRANGE[field])
        data = json.dumps(ticket).encode()
        codes[served.send(mutated(data, chance) if chance.random() < 0.7 else data)] += 1
        if number % 20 == 0:
            served.train([number % 13], 1.0)
        if number % 50 == 0:
            served.save()
    assert set(codes) <= {"", "message", "fenced"}, codes
    assert codes[""] > 50
    assert codes["message"] > 100
    served.require_healthy()


def test_clients_that_stop_reading_do_not_keep_others_out(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers are larger than the buffers between the processes."""
    monkeypatch.setattr(feed, "_STALLED_S", 1.0)
    served.train(list(range(700_000)), 1.0)
    ticket = json.dumps({**ticket_of(served), "since": None}).encode()
    # By default, gRPC enlarges its buffers as latency grows, so on a busy machine they could hold a whole answer.
    client = flight.connect(f"grpc://{served.server.address}", generic_options=[("grpc.http2.bdp_probe", 0)])
    sleeping = [client.do_get(flight.Ticket(ticket), OPTIONS) for _ in range(_ANSWERS)]
    for each in sleeping:
        each.read_chunk()
    assert served.send(ticket) == "busy"
    eventually(lambda: served.send(ticket) == "", 20.0)
    ends = [end_of(each) for each in sleeping]
    assert ends.count("") == 1
    assert any("accepted no changes" in end for end in ends)
    served.feed.expire()
    assert served.feed._sending == []


def end_of(stream: Any) -> str:
    """Read the rest of an answer, and return the error at its end."""
    try:
        stream.read_all()
    except flight.FlightError as error:
        return str(error)
    return ""
