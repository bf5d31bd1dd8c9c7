"""Content of a moving unit that arrives at a pserver, and everything that ends its move before it is adopted."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from flightedl.adapters.clock import SystemClock
from flightedl.domain.model.sharding import hash_with
from flightedl.domain.moving.server import State
from flightedl.errors import StalePlacementError
from flightedl.messages.moving import MoveHeader, MoveReply
from flightedl.messages.parameters import Outcome
from flightedl.pserver.moving.mover import Mover
from tests.schedules.test_moving import DESTINATION, Peers, messages_of, pserver_with
from tests.support.contracts.coordinator import eventually

from .test_snapshots import Pserver


class Destination:
    """A pserver with block 1, to which block 0 moves."""

    def __init__(self) -> None:
        self.pserver: Pserver = pserver_with(range(1, 2))
        self.peers = Peers()
        self.peers.placement = self.peers.placement.moved([(range(1, 2), 1)], 1)
        self.attempt = self.peers.intend(0)
        peers: Any = self.peers
        self.ends: list[str] = []
        self.moves = Mover(
            1,
            DESTINATION,
            State(tuple(self.pserver.shard.numbers), 1, 1),
            self.pserver.shard,
            peers,
            SystemClock(),
            lambda _: None,
            self.ends.append,
        )
        self.moves.look()

    def receive(self, message: tuple[MoveHeader, list[Any]], **changed: Any) -> str:
        """Receive a message. Return the problem, if any."""
        header, content = message
        incoming: Any = content
        found: MoveReply = self.moves.receive(msgspec.structs.replace(header, **changed), incoming)
        return found.problem

    def receive_all(self, attempt: int | None = None) -> list[str]:
        return [self.receive(each) for each in messages_of(self.attempt if attempt is None else attempt)]

    @property
    def waits(self) -> bool:
        """True if pushes wait because blocks are about to arrive."""
        return self.pserver.shard.is_moving

    def push(self) -> set[Outcome]:
        self.pserver.view(1, 2, first_round=0)
        return {Outcome(piece.outcome) for piece in self.pserver.push(0)}


@pytest.fixture
def destination() -> Iterator[Destination]:
    made = Destination()
    yield made
    made.moves.close()
    assert not made.ends


def test_a_complete_unit_is_acknowledged_until_it_is_adopted(destination: Destination) -> None:
    assert destination.receive_all() == ["", "", ""]
    assert destination.waits
    # An acknowledgement may be lost, so it is repeated.
    eventually(lambda: len(destination.peers.acknowledged) > 2)
    assert {each.attempt for each in destination.peers.acknowledged} == {destination.attempt}
    destination.peers.commit(destination.peers.acknowledged[0])
    destination.moves.look()
    assert destination.pserver.shard.numbers == [0, 1]
    assert not destination.waits
    with destination.moves.no_unit_is_pinned():
        pass
    eventually(lambda: not destination.moves._threads)
    count = len(destination.peers.acknowledged)
    destination.moves.look()
    assert len(destination.peers.acknowledged) == count
    assert destination.push() == {Outcome.ACCEPTED}


@pytest.mark.parametrize("received", range(4))
def test_a_unit_whose_attempt_ends_leaves_nothing_behind(destination: Destination, received: int) -> None:
    """Also its memory is free: it is used for the same unit of the next attempt."""
    arena = destination.pserver.shard.dense._arena
    for _ in range(3):
        for message in messages_of(destination.attempt)[:received]:
            assert not destination.receive(message)
        assert destination.waits == (received == 3)
        destination.peers.end(destination.attempt)
        destination.moves.look()
        assert not destination.waits
        assert not destination.moves._acknowledged
        assert not destination.moves._arrivals
        with destination.moves.no_unit_is_pinned():
            pass
        size_bytes = arena.size_bytes
        assert size_bytes == pserver_with(range(1, 2)).shard.dense._arena.size_bytes
        destination.attempt = destination.peers.intend(0)
        destination.moves.look()
    assert destination.receive_all() == ["", "", ""]
    assert destination.pserver.shard.numbers == [1]


def test_messages_of_other_attempts_and_repeated_messages_are_rejected(destination: Destination) -> None:
    copy, update, last = messages_of(destination.attempt)
    for message in (update, last):
        assert "arrived" in destination.receive(message) or "over" in destination.receive(message)
    assert not destination.receive(copy)
    assert "over" in destination.receive(copy), "a copy that is repeated may have been cut off"
    assert "over" in destination.receive(update, attempt=destination.attempt - 1)
    assert "over" in destination.receive(update, generation=DESTINATION + 1)
    assert "repeated" in destination.receive(update, number=2)
    assert not destination.receive(update)
    assert "repeated" in destination.receive(update)
    for wrong in ({"number": 2}, {"digest": "0" * 16}, {"attempt": destination.attempt + 1}):
        size_bytes = destination.pserver.shard.dense._arena.size_bytes
        assert destination.receive(last, **wrong)
        assert destination.pserver.shard.dense._arena.size_bytes == size_bytes, "the prepared blocks stay in memory"
        assert not destination.waits
        assert not destination.peers.acknowledged
    assert not destination.receive(last)
    # The source may not have received the answer.
    size_bytes = destination.pserver.shard.dense._arena.size_bytes
    assert not destination.receive(last)
    assert destination.pserver.shard.dense._arena.size_bytes == size_bytes


def test_a_newer_attempt_replaces_what_an_older_one_has_sent(destination: Destination) -> None:
    assert destination.receive_all()[:2] == ["", ""]
    attempt = destination.peers.intend(0)
    size_bytes = destination.pserver.shard.dense._arena.size_bytes
    assert destination.receive_all(attempt) == ["", "", ""]
    assert destination.pserver.shard.dense._arena.size_bytes == size_bytes, "the older content is still there"
    destination.moves.look()
    eventually(lambda: attempt in {each.attempt for each in destination.peers.acknowledged})
    (newest,) = {each for each in destination.peers.acknowledged if each.attempt == attempt}
    destination.peers.commit(newest)
    destination.moves.look()
    assert destination.pserver.shard.numbers == [0, 1]


def test_damaged_content_is_not_acknowledged(destination: Destination) -> None:
    copy, (header, content), last = messages_of(destination.attempt)
    assert not destination.receive(copy)
    place = next(place for place, (batch, _) in enumerate(content) if batch.column(1)[0].as_buffer().size)
    batch, metadata = content[place]
    values = bytearray(batch.column(0)[0].as_py())
    values[0] ^= 1
    damaged = batch.set_column(0, batch.schema.field(0), pa.array([bytes(values)], pa.binary()))
    content[place] = damaged, metadata
    assert not destination.receive((header, content))
    assert destination.receive(last)
    assert not destination.waits
    assert destination.pserver.shard.numbers == [1]


def test_no_unit_is_acknowledged_during_a_cut(destination: Destination) -> None:
    """A checkpoint would have the blocks neither on the source nor here, or on both."""
    copy, update, last = messages_of(destination.attempt)
    assert not destination.receive(copy)
    assert not destination.receive(update)
    protocol = destination.pserver.shard._protocol
    cut = protocol.begin_cut(None).cut
    assert destination.receive(last)
    assert not destination.waits
    assert not destination.peers.acknowledged
    protocol.drop_cut(cut)
    assert not destination.receive(last)


def test_all_blocks_are_named_only_to_those_who_know_which_they_are(destination: Destination) -> None:
    shard = destination.pserver.shard
    older, newer = (hash_with(destination.pserver.plan.hash, version) for version in (1, 2))
    shard.place(older)
    assert shard.all_numbers(older) == [1]
    assert destination.receive_all() == ["", "", ""]
    eventually(lambda: destination.peers.acknowledged)
    destination.peers.commit(destination.peers.acknowledged[0])
    with ThreadPoolExecutor(1) as executor:
        with shard.placing:
            destination.moves.look()
            asked = executor.submit(shard.all_numbers, older)
            with pytest.raises(TimeoutError):
                asked.result(0.05)
        with pytest.raises(StalePlacementError):
            asked.result(20.0)
    assert shard.all_numbers(newer) == [0, 1]
    shard.place(newer)
    assert shard.all_numbers(newer) == [0, 1]
    with pytest.raises(StalePlacementError):
        shard.all_numbers(older)
